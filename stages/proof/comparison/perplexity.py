"""Measure how well an artifact directory, as it runs, predicts a text.

Perplexity is exp of the mean of -log p(token | the tokens before it). A window cuts off the tokens before it, and a
figure is comparable with others of the same text, tokenizer, window and recipe:

- `strided` is the recipe of Hugging Face for models of a fixed length (huggingface.co/docs/transformers/perplexity).
  Windows begin `stride` tokens apart, and each predicts what no earlier one did: all of the text but its first token.
- `side_by_side` is that of llama.cpp's program `perplexity`. Windows do not overlap. Each begins with the tokenizer's
  begin-of-text token, if there is one, in place of its own first token; the latter half is predicted, except its first.

The standard error is that of the mean, taken through exp (the delta method), as in llama.cpp. It takes tokens as
independent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm

from llama_npu2 import Llama, UserError
from llama_npu2.frozen import frozen


@frozen
class Window:
    """Tokens that are read from an empty context."""

    ids: list[int]
    first: int
    """The tokens from this one on, 1 or more, are predicted."""


@frozen
class Perplexity:
    """The result for a text."""

    perplexity: float
    error: float
    """The standard error."""
    tokens: int
    """Tokens that were predicted."""
    read: int
    """Tokens that were read."""
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens read per second."""
        return self.read / self.seconds

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.4f} \N{PLUS-MINUS SIGN} {self.error:.4f} over {self.tokens} tokens; "
            f"{self.read} read in {self.seconds:.1f} s, {self.rate:.1f} tokens/s"
        )


def begin(llm: Llama) -> list[int]:
    """Return the token that texts begin with, if they do."""
    return llm.tokenizer.encode("", special_tokens=True)[:1]


def strided(ids: Sequence[int], window: int, stride: int) -> Iterator[Window]:
    """Yield the windows of Hugging Face's recipe. The first token of a window is not predicted. Raises UserError."""
    if stride > window:
        raise UserError(f"stride={stride}: must be at most the window of {window}, or tokens between are left out")
    predicted = 1
    for start in range(0, len(ids), stride):
        part = list(ids[start : start + window])
        if len(part) > (first := max(predicted - start, 1)):
            yield Window(part, first)
        predicted = start + len(part)
        if predicted == len(ids):
            return


def side_by_side(ids: Sequence[int], window: int, begin: Sequence[int]) -> Iterator[Window]:
    """Yield the windows of llama.cpp's program, without a shorter one at the end. `begin`: no token or one."""
    for start in range(0, len(ids) - window + 1, window):
        yield Window([*begin, *ids[start + len(begin) : start + window]], window // 2 + 1)


def measure(llm: Llama, windows: Sequence[Window]) -> Perplexity:
    """Read the windows, and return the perplexity. Raises UserError where there is too little to predict."""
    count = sum(len(window.ids) - window.first for window in windows)
    if count < 2:
        raise UserError("text=: it has fewer than two tokens to predict: give a longer one, or a shorter window=")
    started = time.perf_counter()
    shown = tqdm(windows, desc="windows", disable=None, leave=False)
    surprise = np.array([-token.logprob for window in shown for token in llm.score(window.ids, window.first)])
    seconds = time.perf_counter() - started
    perplexity = float(np.exp(surprise.mean()))
    error = perplexity * float(surprise.std(ddof=1)) / count**0.5
    return Perplexity(perplexity, error, count, sum(len(window.ids) for window in windows), seconds)
