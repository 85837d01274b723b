"""How the runtime goes on with prompts, beside transformers: which tokens differ, and by how much.

Both choose greedily behind the same tokens, those that the runtime chose, so that every position counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from llama_npu2 import Llama, UserError
from llama_npu2.cli.table import Column, Table
from llama_npu2.engine.sampling import log_softmax
from llama_npu2.text.tokenizer import Tokenizer
from stages.proof.comparison.prompts import Prompt

TOKENS = 32
TOP = 5
"""Choices of the other side among which the token of one must be."""

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
class Choice:
    """The best token of one side. `text`: what it adds; `rank`: in the other's logits, 0 = best; `ours`, `theirs`: its
    probability to the runtime and to transformers."""

    token: int
    text: str
    rank: int
    ours: float
    theirs: float


@dataclass(frozen=True)
class Difference:
    """`position`: of the token, from 0 behind the prompt."""

    position: int
    ours: Choice
    theirs: Choice


@dataclass(frozen=True)
class Comparison:
    """Outcome for one prompt. `equal`: how many of `TOKENS` positions chose the same token; `first`: the first that did
    not, from 0; `ranks`: the worst rank (0 = best), over all positions, of our token in the reference's logits and of
    the reference's in ours. `pieces`: text of each token that the runtime chose."""

    prompt: Prompt
    equal: int
    first: int | None
    ranks: tuple[int, int]
    differences: tuple[Difference, ...]
    pieces: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Where the sides differ, each has the other's token among its best `TOP`."""
        return max(self.ranks) < TOP

    def row(self) -> str:
        first = "-" if self.first is None else f"token {self.first + 1}"
        ranks = (rank + 1 for rank in self.ranks)
        return TABLE.row(
            repr(self.prompt.text[:40]), f"{self.equal}/{TOKENS}", first, *ranks, "pass" if self.passed else "FAIL"
        )

    def __str__(self) -> str:
        if not self.differences:
            return f"all {TOKENS} tokens are those of transformers"
        ours, theirs = (rank + 1 for rank in self.ranks)
        return (
            f"{self.equal} of {TOKENS} tokens are those of transformers; of the others, ours is number {ours} of its "
            f"choices at worst, its own number {theirs} of ours; at most {TOP}"
        )


Piece = Callable[[Sequence[int], int], str]
"""The text that a token adds to those before it."""


@dataclass(frozen=True)
class Continued:
    """What the runtime makes of a prompt. `ids`: the prompt's and all that it chose but the last; `logits` f32
    `[TOKENS, vocab]`: by which it chose."""

    prompt: Prompt
    ids: Sequence[int]
    logits: np.ndarray

    def compared(self, logits: np.ndarray, piece: Piece) -> Comparison:
        """With the logits `[len(ids), vocab]` of transformers."""
        differences, ranks, pieces = [], (0, 0), []
        for position, (ours, theirs) in enumerate(zip(self.logits, logits[-TOKENS:], strict=True)):
            before = self.ids[: len(self.ids) - TOKENS + 1 + position]
            token, wanted = int(np.argmax(ours)), int(np.argmax(theirs))
            pieces.append(piece(before, token))
            if token != wanted:
                p, q = (np.exp(log_softmax(side)) for side in (ours, theirs))
                chosen = Choice(token, pieces[-1], _rank(theirs, token), float(p[token]), float(q[token]))
                other = Choice(wanted, piece(before, wanted), _rank(ours, wanted), float(p[wanted]), float(q[wanted]))
                differences.append(Difference(position, chosen, other))
                ranks = (max(ranks[0], chosen.rank), max(ranks[1], other.rank))
        first = differences[0].position if differences else None
        equal = TOKENS - len(differences)
        return Comparison(self.prompt, equal, first, ranks, tuple(differences), tuple(pieces))


def continued(llm: Llama, prompt: Prompt) -> Continued:
    """Decode `TOKENS` tokens greedily."""
    ids = llm.encode(prompt.text, raw=True)
    llm.reset()
    logits = [llm.prefill(ids)]
    for _ in range(TOKENS - 1):
        ids = [*ids, int(np.argmax(logits[-1]))]
        logits.append(llm.decode(ids[-1]))
    return Continued(prompt, ids, np.stack(logits))


def piece(tokenizer: Tokenizer, before: Sequence[int], token: int) -> str:
    """The text that a token adds to those before it; its name, where it is a special one or a part of a character."""
    text, longer = tokenizer.decode(before), tokenizer.decode([*before, token])
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, longer, strict=False)))
    added = longer[same:]
    return added if added.strip("\ufffd") else tokenizer.inner.id_to_token(token) or f"<{token}>"


def _rank(logits: np.ndarray, token: int) -> int:
    return int(np.sum(logits > logits[token]))


def check_lengths(llm: Llama, prompts: Sequence[Prompt]) -> None:
    """Prompts leave room for what is compared. Raises UserError."""
    for prompt in prompts:
        count = len(llm.encode(prompt.text, raw=True))
        if count + TOKENS > llm.context_length:
            raise UserError(
                f"prompts=: {prompt.name} has {count} tokens, and {TOKENS} more exceed the context of "
                f"{llm.context_length}: shorten it"
            )
