"""The token gate: greedy decoding of an artifact directory against transformers in bf16 on the same checkpoint.

Both sides are fed the reference's tokens, so that every position counts, those after a first difference too.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from doit.exceptions import TaskFailed

from llama_npu2 import Llama, UserError, load
from llama_npu2.table import Column, Table
from stages.graph import Build
from stages.model import families

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


TABLE = Table(
    [
        Column("prompt", 44),
        Column("equal", 5, right=True),
        Column("first difference"),
        Column("worst rank of ours in theirs"),
        Column("of theirs in ours"),
        Column("", 4),
    ]
)


@dataclass(frozen=True)
class Comparison:
    """Outcome for one prompt. `equal`: how many of `TOKENS` positions chose the same token; `first`: the first that did
    not, from 0; `ranks`: the worst rank (0 = best), over all positions, of our token in the reference's logits and of
    the reference's in ours."""

    prompt: str
    equal: int
    first: int | None
    ranks: tuple[int, int]

    @property
    def passed(self) -> bool:
        """Where the sides differ, each has the other's token among its best `TOP`."""
        return max(self.ranks) < TOP

    def row(self) -> str:
        first = "-" if self.first is None else f"token {self.first + 1}"
        ranks = (rank + 1 for rank in self.ranks)
        return TABLE.row(
            repr(self.prompt[:40]), f"{self.equal}/{TOKENS}", first, *ranks, "pass" if self.passed else "FAIL"
        )


def run(build: Build) -> TaskFailed | None:
    """`doit verify`: two prompts, or with full=1 all."""
    options = build.options
    passed = verify(build.directory, build.source.fetch(), len(PROMPTS) if options.full else 2, options.threads)
    return None if passed else TaskFailed("verify: the runtime and transformers disagree, see the table")


def verify(directory: Path, checkpoint: Path, prompts: int, threads: int = 0) -> bool:
    """Compare on the first `prompts` prompts, print a table, return whether all passed. Raises UserError."""
    model = load_transformers(checkpoint, "bfloat16")
    print(TABLE.header(), flush=True)
    passed = True
    with contextlib.closing(load(directory, threads)) as llm:
        for prompt in PROMPTS[:prompts]:
            comparison = compare(llm, model, prompt)
            passed &= comparison.passed
            print(comparison.row(), flush=True)
    return passed


def load_transformers(checkpoint: Path, dtype: str) -> Any:
    """The model of a checkpoint directory as its family's class. Raises UserError without the verify extra."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        raise UserError("verify needs torch and transformers: pip install -e '.[verify]'")
    import torch
    import transformers

    architecture = getattr(transformers, families.of(families.read_config(checkpoint / "config.json")).architectures[0])
    with torch.no_grad():
        return architecture.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()


def compare(llm: Llama, model: Any, prompt: str) -> Comparison:
    """Decode `TOKENS` tokens greedily on both sides, each time going on with the reference's."""
    ids = llm.encode(prompt, raw=True)
    llm.reset()
    reference = TransformersSteps(model)
    ours, theirs = llm.prefill(ids), reference(ids)
    differ, ranks = [], (0, 0)
    for position in range(TOKENS):
        token, wanted = int(np.argmax(ours)), int(np.argmax(theirs))
        if token != wanted:
            differ.append(position)
            ranks = (max(ranks[0], _rank(theirs, token)), max(ranks[1], _rank(ours, wanted)))
        if position + 1 < TOKENS:
            ours, theirs = llm.decode(wanted), reference([wanted])
    return Comparison(prompt, TOKENS - len(differ), differ[0] if differ else None, ranks)


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
