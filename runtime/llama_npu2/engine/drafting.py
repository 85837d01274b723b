"""Opens the small model that drafts for a larger one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import BLOCK_POSITIONS
from llama_npu2.engine.batch.small_model import SmallModel
from llama_npu2.engine.engine import Engine
from llama_npu2.engine.memory import blocks_within, cache_blocks, memory_of_blocks
from llama_npu2.options import OptionError
from llama_npu2.text.tokenizer import Tokenizer

_TOKENIZER = "tokenizer/tokenizer.json"


class Drafting:
    """A small model and the engine that it runs on."""

    def __init__(self, manifest: Manifest, large: Engine) -> None:
        """Open it with as many blocks of the KV cache as `large` has. Raises UserError."""
        kv_memory = memory_of_blocks(manifest, large.steps.blocks)
        self.engine = Engine(manifest, large.device.threads, kv_memory=kv_memory)
        steps, vocab = self.engine.steps, min(each.manifest.model["vocab"] for each in (self.engine, large))
        self.model = SmallModel(steps, BLOCK_POSITIONS, steps.rows, self.engine.context_length, vocab)

    def close(self) -> None:
        """Release its device."""
        self.engine.close()


def check_drafts(directory: str | Path, small: Manifest, large: Manifest) -> None:
    """Check that a small model can draft for a large one. Raises UserError."""
    for manifest, which in ((large, f"{large.directory} is for a device that"), (small, "it is for a device that")):
        if not manifest.plans or not cache_blocks(manifest):
            raise OptionError("draft", directory, f"{which} holds one sequence alone: give artifacts of target=cpu")
    digests = {manifest.files.get(_TOKENIZER, {}).get("sha256") for manifest in (small, large)}
    if len(digests) == 1 and None not in digests:
        return
    if differs := _difference(*(Tokenizer.open(manifest.storage) for manifest in (small, large))):
        what = f"its tokenizer is not that of {large.directory} ({differs})"
        raise OptionError("draft", directory, f"{what}: give a smaller model of the same family")


def kv_memory_beside(kv_memory: int, small: Manifest, large: Manifest) -> int:
    """Return what of `kv_memory` bytes is for the large model, so that both have as many blocks. Raises UserError."""
    return memory_of_blocks(large, blocks_within(kv_memory, large, small)) if kv_memory else 0


def _difference(small: Tokenizer, large: Tokenizer) -> str:
    """Return a token that two tokenizers do not have in common, with its numbers; empty if there is none."""
    one, other = (each.inner.get_vocab() for each in (small, large))
    if one == other:
        return ""
    token = min(token for token, _ in one.items() ^ other.items())
    return f"{token!r} is {_number(one, token)} there and {_number(other, token)} here"


def _number(vocabulary: Mapping[str, int], token: str) -> str:
    return f"token {vocabulary[token]}" if token in vocabulary else "no token"
