"""GGUF files of every family: what we write is the same model for us and for llama.cpp."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from tokenizers import Tokenizer, models, pre_tokenizers

from llama_npu2 import load
from llama_npu2.errors import UserError
from stages.model import families
from stages.model.checkpoint import Checkpoint
from stages.proof.comparison import gguf_file, peers
from tests.conftest import build, needs_llama_cpp
from tests.kernels.test_families import FAMILIES, Raw, error, theirs, write
from tests.support.quantised_files import with_tokenizer

pytestmark = needs_llama_cpp

TOKENS = 32
WRITTEN = [name for name in FAMILIES if families.families()[name].gguf]
CASES = [
    pytest.param(family, seed, id=f"{family}-{seed}", marks=[pytest.mark.slow] if seed else [])
    for family in WRITTEN
    for seed in range(4)
]


def _as_wide(raw: Raw) -> Raw:
    """Rows of all heads that are as wide as the model's, as llama.cpp takes them to be."""
    return raw | {"hidden_size": raw["num_attention_heads"] * raw["head_dim"]}


def _olmo2(raw: Raw) -> Raw:
    """llama.cpp asks for a head."""
    return _as_wide(raw) | {"tie_word_embeddings": False}


SAID: dict[str, Callable[[Raw], Raw]] = {
    "gemma": lambda raw: raw | {"tie_word_embeddings": True},
    "gemma3_text": lambda raw: raw | {"query_pre_attn_scalar": raw["head_dim"]},
    # The second layer is a convolution: llama.cpp has no model without any.
    "lfm2": lambda raw: (
        {name: value for name, value in _as_wide(raw).items() if name != "layer_types"} | {"full_attn_idxs": [0, 2, 4]}
    ),
    "lfm2_moe": lambda raw: (
        _as_wide(raw) | {"layer_types": ["full_attention", "conv"] * 2, "num_hidden_layers": 4, "norm_topk_prob": True}
    ),
    "olmo2": _olmo2,
    # YaRN's pairs are cut to whole numbers there.
    "olmo3": lambda raw: _olmo2(raw | {"rope_scaling": None}),
    # llama.cpp knows by the number of layers that there are windows.
    "exaone4": lambda raw: (
        _as_wide(raw) | {"sliding_window": None, "layer_types": ["full_attention"] * raw["num_hidden_layers"]}
    ),
    "mixtral": lambda raw: raw | {"sliding_window": None},
    # Norms of K are as wide there as those of Q.
    "olmoe": lambda raw: (
        raw | {"num_key_value_heads": raw["num_attention_heads"], "norm_topk_prob": False, "tie_word_embeddings": False}
    ),
    "qwen3_moe": lambda raw: (
        raw | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
    ),
    # llama.cpp has a window in every second layer, and cuts the pairs between which YaRN blends to whole numbers.
    "gpt_oss": lambda raw: (
        {name: value for name, value in raw.items() if name != "layer_types"}
        | {"rope_scaling": {"rope_type": "default"}}
    ),
}
"""Changes to random configurations, without which few could be described or run."""


def written(family: str, seed: int, directory: Path) -> tuple[Path, Path]:
    """Write the first of a seed's checkpoints that a GGUF file can describe, and its file; return both paths."""
    for number in range(20):
        rng = np.random.default_rng([seed, number, *map(ord, family)])
        checkpoint = directory / f"{family}-{seed}-{number}"
        write(checkpoint, family, SAID.get(family, dict)(FAMILIES[family][1](rng)), seed)
        try:
            gguf_file.write_gguf(Checkpoint.open(checkpoint), directory / "BF16.gguf")
        except UserError as refused:
            assert "cannot describe its" in str(refused)
        else:
            return checkpoint, directory / "BF16.gguf"
    raise AssertionError(f"none of 20 models of {family} can be written")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family, seed", CASES)
def test_what_is_written(family: str, seed: int, tmp_path: Path) -> None:
    """The file has the checkpoint's tensors, bit for bit, and llama.cpp computes from it what transformers does."""
    directory, file = written(family, seed, tmp_path)
    before = Checkpoint.open(directory)
    stored = gguf_file.values(file, before.config)
    for name in before.held:
        np.testing.assert_array_equal(stored(name).astype(bfloat16), before.tensor(name))
    ids = np.random.default_rng(seed).integers(0, before.config.vocab, 200).tolist()
    exact, rounded, sure = theirs(directory, ids)
    llama_cpp, places = peers.LlamaCpp(file, 2, 256, peers.SAFELY), np.array([129, *range(149, 200)])
    logits = [llama_cpp.step(ids[:130]), llama_cpp.step(ids[130:150])]
    logits += [llama_cpp.step([token]) for token in ids[150:]]
    known = sure[places]
    assert known.sum() > 3
    assert error(np.array(logits)[known], exact[places[known]]) <= 1.5 * error(rounded[places], exact[places])


@pytest.mark.slow
@pytest.mark.parametrize("family", WRITTEN)
def test_tokens_are_those_of_llama_cpp(family: str, tmp_path: Path, artifacts: Path) -> None:
    """32 greedy tokens of both sides from a file in F16, but where two are as likely as makes no difference.

    Each side may be 1.5 times as far from transformers in float32 as transformers in bf16 is. Rows that take other
    experts in bf16 are not judged: they are as far off as these experts differ.
    """
    directory, file = written(family, 0, tmp_path)
    config = Checkpoint.open(directory).config
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[("a", "b")])
    with with_tokenizer(Tokenizer(model), "gpt-2", config.eos[0], config.vocab):
        gguf_file.write_gguf(Checkpoint.open(directory), file)
    f16 = tmp_path / f"{family}-f16.gguf"
    gguf_file.quantise_gguf(file, f16, "F16")
    ids = np.random.default_rng(0).integers(0, config.vocab, 150).tolist()
    least = error(*(logits[100:] for logits in theirs(directory, ids)[:2]))
    llama_cpp = peers.LlamaCpp(f16, 2, config.max_seq, peers.SAFELY)
    context = {"context": config.max_seq} if config.decoder.short_context else {}
    with contextlib.closing(load(build(f16, artifacts, **context), 2)) as llm:
        pairs = [(llm.prefill(ids), llama_cpp.step(ids))]
        while len(pairs) < TOKENS:
            ids.append(int(pairs[-1][1].argmax()))
            pairs.append((llm.decode(ids[-1]), llama_cpp.step([ids[-1]])))
    *_, sure = theirs(directory, ids)
    judged = [pair for pair, known in zip(pairs, sure[-TOKENS:], strict=True) if known]
    assert judged
    for ours, other in judged:
        distance = error(ours, other)
        assert distance < np.hypot(1.5, 1.5) * least
        assert ours.max() - ours[other.argmax()] < 4 * distance
