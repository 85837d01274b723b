"""`doit perplexity`: how well an artifact directory, as it runs, predicts a text.

Perplexity is exp of the mean of -log p(token | what is before it). What is before it is cut off by `window=`, and a
figure is comparable with others of the same text, tokenizer, window and recipe:

- `recipe=transformers`: Hugging Face's for models of a fixed length (huggingface.co/docs/transformers/perplexity).
  Windows begin `stride=` tokens apart, and each predicts what no earlier one did: all of the text but its first token.
- `recipe=llama.cpp`: that of its program `perplexity`. Windows side by side, of which each begins with the tokenizer's
  begin-of-text token, if there is one, in the place of its own first; the latter half is predicted, but for its first.

The standard error is that of the mean, taken through exp (the delta method), as llama.cpp has it: it regards tokens as
independent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from llama_npu2 import Llama, UserError, load
from stages.graph import Build
from stages.proof.comparison import divergence


@dataclass(frozen=True)
class Window:
    """Tokens that are read from an empty context; those from number `first` on, 1 or more, are predicted."""

    ids: list[int]
    first: int


@dataclass(frozen=True)
class Perplexity:
    """`error`: standard error; `tokens`: that were predicted; `read`: that were read for it, in `seconds`."""

    perplexity: float
    error: float
    tokens: int
    read: int
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


def run(build: Build) -> None:
    """Raises UserError."""
    options = build.options
    text = Path(options.text) if options.text else divergence.TEXT
    with closing(load(build.directory, options.threads, options.second_copy)) as llm:
        window = min(options.window, llm.context_length)
        ids = llm.encode(divergence.read_text(text), raw=True)
        if options.recipe == "llama.cpp":
            stride, windows = window, side_by_side(ids, window, begin(llm))
        else:
            stride = options.stride or window // 2
            windows = strided(ids, window, stride)
        found = measure(llm, list(windows))
    if options.json:
        about = {"artifact": build.artifact, "text": text.name, "recipe": options.recipe, "window": window}
        print(json.dumps(about | {"stride": stride} | asdict(found) | {"rate": found.rate}), flush=True)
    else:
        print(f"{text.name}, windows of {window}, {stride} apart, as {options.recipe}: {found}", flush=True)


def begin(llm: Llama) -> list[int]:
    """The token that texts begin with, if they do."""
    return llm.tokenizer.encode("", special_tokens=True)[:1]


def strided(ids: Sequence[int], window: int, stride: int) -> Iterator[Window]:
    """As Hugging Face's recipe has them. The first token of a window has nothing before it. Raises UserError."""
    if stride > window:
        raise UserError(f"stride={stride}: must be at most the window of {window}, or tokens between are left out")
    known = 1
    for start in range(0, len(ids), stride):
        part = list(ids[start : start + window])
        if len(part) > (first := max(known - start, 1)):
            yield Window(part, first)
        known = start + len(part)
        if known == len(ids):
            return


def side_by_side(ids: Sequence[int], window: int, begin: Sequence[int]) -> Iterator[Window]:
    """As llama.cpp's program has them; `begin`: no token or one. What is left at the end is not read."""
    for start in range(0, len(ids) - window + 1, window):
        yield Window([*begin, *ids[start + len(begin) : start + window]], window // 2 + 1)


def measure(llm: Llama, windows: Sequence[Window]) -> Perplexity:
    """Raises UserError where there is too little to predict."""
    count = sum(len(window.ids) - window.first for window in windows)
    if count < 2:
        raise UserError("text=: there are no two tokens to predict in it: give a longer one, or a shorter window=")
    started = time.perf_counter()
    shown = tqdm(windows, desc="windows", disable=None, leave=False)
    surprise = np.array([-each.logprob for window in shown for each in llm.score(window.ids, window.first)])
    seconds = time.perf_counter() - started
    perplexity = float(np.exp(surprise.mean()))
    error = perplexity * float(surprise.std(ddof=1)) / count**0.5
    return Perplexity(perplexity, error, count, sum(len(window.ids) for window in windows), seconds)
