"""The token gate: greedy decoding of an artifact directory against transformers in bf16 on the same checkpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime import Llama, UserError, load

TOKENS = 32
TOP = 5

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4,",
    "The opposite of hot is",
    "Water is made of hydrogen and",
    "In the beginning there was a small",
    "What is the largest planet?",
    "The days of the week are Monday,",
)


@dataclass(frozen=True)
class Comparison:
    """Outcome for one prompt. `agreed`: equal leading tokens; `ranks`: at the first difference, the rank (0 = best) of
    each side's token in the other side's logits."""

    prompt: str
    agreed: int
    ranks: tuple[int, int] | None

    @property
    def passed(self) -> bool:
        return self.ranks is None or max(self.ranks) < TOP

    def row(self) -> str:
        ranks = "-" if self.ranks is None else f"{self.ranks[0] + 1} / {self.ranks[1] + 1}"
        return f"{self.prompt[:40]!r:44} {self.agreed:3}/{TOKENS}  {ranks:^14} {'pass' if self.passed else 'FAIL'}"


def verify(directory: Path, checkpoint: Path, prompts: int, threads: int = 0) -> bool:
    """Compare on the first `prompts` prompts, print a table, return whether all passed. Raises UserError."""
    model = load_transformers(checkpoint, "bfloat16")
    llm = load(directory, threads)
    print(f"{'prompt':44} {'equal':>6}  rank ours / theirs in the other's logits", flush=True)
    passed = True
    for prompt in PROMPTS[:prompts]:
        comparison = compare(llm, model, prompt)
        passed &= comparison.passed
        print(comparison.row(), flush=True)
    llm.close()
    return passed


def load_transformers(checkpoint: Path, dtype: str) -> Any:
    """`LlamaForCausalLM` from a checkpoint directory. Raises UserError without the verify extra."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        raise UserError("verify needs torch and transformers: pip install -e '.[verify]'")
    import torch
    from transformers import LlamaForCausalLM

    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()


def compare(llm: Llama, model: Any, prompt: str) -> Comparison:
    """Decode greedily on both sides until the first difference or `TOKENS` tokens."""
    ids = llm.encode(prompt, raw=True)
    llm.reset()
    ours, theirs = llm.prefill(ids), TransformersSteps(model)
    expected = theirs(ids)
    for agreed in range(TOKENS):
        token, other = int(np.argmax(ours)), int(np.argmax(expected))
        if token != other:
            return Comparison(prompt, agreed, (_rank(expected, token), _rank(ours, other)))
        if agreed + 1 < TOKENS:
            ours, expected = llm.decode(token), theirs([token])
    return Comparison(prompt, TOKENS, None)


class TransformersSteps:
    """Feeds tokens to a transformers model with its KV cache; returns float32 logits `[vocab]` of the last one."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        import torch

        with torch.no_grad():
            out = self._model(torch.tensor([list(ids)]), past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        logits: np.ndarray = out.logits[0, -1].float().numpy()
        return logits


def _rank(logits: np.ndarray, token: int) -> int:
    return int(np.sum(logits > logits[token]))
