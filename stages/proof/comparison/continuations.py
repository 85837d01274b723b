"""Compare greedy continuations of prompts with transformers: which tokens differ, and by how much.

Both choose after the same tokens, those that the runtime chose, so that every position counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from llama_npu2 import Llama
from llama_npu2.cli.table import Table
from llama_npu2.engine.sampling import log_softmax
from llama_npu2.errors import UserError, first_line, reason
from llama_npu2.frozen import frozen
from llama_npu2.schema import load_json, record, text
from llama_npu2.text.tokenizer import Tokenizer

SHIPPED = Path(__file__).with_name("prompts.txt")
JSON_LINES = ".jsonl"
_LINE = record(
    {"prompt": text(r"(?s)(?=.*\S)[^\ud800-\udfff]*", "some text")},
    {"id": text(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}", "one line of at most 200 characters")},
)


@frozen
class Prompt:
    """A prompt of a file."""

    id: str
    """Unique in its file; the number of its line, from 1, unless the file says it."""
    text: str

    @property
    def name(self) -> str:
        """The name in results."""
        return f"prompt {self.id}"


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file, at least one, without blank lines. Raises UserError."""
    where = f"prompts={path}"
    try:
        # Not splitlines: it splits at some characters that may be inside JSON strings.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: {reason(error)}: give a text file with a prompt per line") from None
    read = _from_json if path.suffix == JSON_LINES else Prompt
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompt = read(str(number), line)
            except ValueError as error:
                raise UserError(f"{where}: line {number}: {first_line(error)}: mend it") from None
            if prompt.id in prompts:
                raise UserError(f"{where}: line {number}: id {prompt.id} is taken by another prompt: give each its own")
            prompts[prompt.id] = prompt
    if not prompts:
        raise UserError(f"{where}: the file has no prompt: write one per line")
    return list(prompts.values())


def _from_json(number: str, line: str) -> Prompt:
    """Parse a JSON line. Raises ValueError if it is not such an object."""
    value = load_json(line.encode())
    _LINE(value)
    return Prompt(value.get("id", number), value["prompt"])


TOKENS = 32
TOP = 5
"""Each side's token must be among this many best choices of the other."""

LEGEND = (
    f"Ranks: the worst, over {TOKENS} positions, of one side's token among the other's choices. At most {TOP} passes."
)
_WIDTHS = {"prompt": 44, ">equal": 5, "first difference": 0, ">runtime's rank": 0, ">transformers' rank": 0, "": 4}
TABLE = Table(_WIDTHS.items())


@frozen
class Choice:
    """The best token of one side."""

    token: int
    text: str
    """The text that it adds."""
    rank: int
    """In the other side's logits, 0 = best."""
    ours: float
    """Its probability by the runtime."""
    theirs: float
    """Its probability by transformers."""


@frozen
class Difference:
    """A position at which the sides choose different tokens."""

    position: int
    """Tokens after the prompt, from 0."""
    ours: Choice
    theirs: Choice


@frozen
class Comparison:
    """The outcome for one prompt."""

    prompt: Prompt
    equal: int
    """How many of `TOKENS` positions chose the same token."""
    first: int | None
    """The first position that did not, from 0."""
    ranks: tuple[int, int]
    """The worst rank (0 = best) of the runtime's token in transformers' logits, and the other way round."""
    differences: tuple[Difference, ...]
    pieces: tuple[str, ...]
    """The text of each token that the runtime chose."""

    @property
    def passed(self) -> bool:
        """Whether each side has the other's token among its best `TOP`, wherever they differ."""
        return max(self.ranks) < TOP

    def row(self) -> str:
        """Return a row of `TABLE`."""
        first = "-" if self.first is None else f"token {self.first + 1}"
        ranks = (rank + 1 for rank in self.ranks)
        return TABLE.row(
            repr(self.prompt.text[:40]), f"{self.equal}/{TOKENS}", first, *ranks, "pass" if self.passed else "FAIL"
        )

    def __str__(self) -> str:
        if not self.differences:
            return f"all {TOKENS} tokens are equal to those of transformers"
        ours, theirs = (rank + 1 for rank in self.ranks)
        return (
            f"{self.equal} of {TOKENS} tokens are equal to those of transformers. Where they differ, the runtime's "
            f"token has rank {ours} for transformers at worst, and transformers' has rank {theirs} for the runtime; at "
            f"most {TOP} is allowed"
        )


Piece = Callable[[Sequence[int], int], str]
"""The text that a token adds to those before it."""


@frozen
class Continued:
    """A prompt as the runtime continues it."""

    prompt: Prompt
    ids: Sequence[int]
    """The prompt's tokens, and all that the runtime chose but the last."""
    logits: np.ndarray
    """f32 `[TOKENS, vocab]`, by which it chose."""

    def compared(self, logits: np.ndarray, piece: Piece) -> Comparison:
        """Compare with the logits `[len(ids), vocab]` of transformers."""
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
    """Return the text that a token adds to those before it, or its name if it is special or a part of a character."""
    text, longer = tokenizer.decode(before), tokenizer.decode([*before, token])
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, longer, strict=False)))
    added = longer[same:]
    return added if added.strip("\ufffd") else tokenizer.inner.id_to_token(token) or f"<{token}>"


def _rank(logits: np.ndarray, token: int) -> int:
    return int(np.sum(logits > logits[token]))


def check_lengths(llm: Llama, prompts: Sequence[Prompt]) -> None:
    """Raise UserError if a prompt leaves too little room in the context."""
    for prompt in prompts:
        count = len(llm.encode(prompt.text, raw=True))
        if count + TOKENS > llm.context_length:
            raise UserError(
                f"prompts=: {prompt.name} has {count} tokens, and {TOKENS} tokens after it exceed the context of "
                f"{llm.context_length}: shorten it"
            )
