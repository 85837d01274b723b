"""Measure how far a model's probabilities are from its checkpoint's, over a text.

Every position of the text counts. The loss of a position is the Kullback-Leibler divergence sum(p log(p / q)) in nats:
p are the probabilities of the checkpoint in float32, q the model's. Perplexity is exp of the mean of -log(probability
of the next token). Both are defined as in llama.cpp's `perplexity --kl-divergence`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from llama_npu2 import Llama, UserError
from llama_npu2.engine.sampling import log_softmax
from llama_npu2.errors import reason
from llama_npu2.frozen import frozen

TEXT = Path(__file__).with_name("evaluation.txt")
"""Questions, facts and short stories, written for this project."""
WINDOW = 256
"""Tokens of a window, which is read from an empty context."""
WINDOWS, ALL_WINDOWS = 4, 16
"""Windows that are read, and with full=1."""
_RESAMPLES = 1000
_CONFIDENCE = (2.5, 97.5)
"""Percentiles of the resampled means."""


@frozen
class Quality:
    """How far a model is from its checkpoint in float32."""

    tokens: int
    """Positions that were compared."""
    divergence: float
    """The mean KL divergence, in nats."""
    interval: tuple[float, float]
    """Its 95 % interval, by bootstrap."""
    tail: float
    """The 99.9th percentile of the divergence."""
    same: float
    """The share of positions that prefer the same token."""
    perplexity: float
    """The model's."""
    source_perplexity: float
    """The checkpoint's."""

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"against the checkpoint in float32, {self.tokens} tokens: mean KL divergence {self.divergence:.6f} "
            f"({low:.6f} to {high:.6f}), 99.9th percentile {self.tail:.4f}, same best token {self.same:.2%}, "
            f"perplexity {self.perplexity:.3f}, the checkpoint's {self.source_perplexity:.3f}"
        )


def read_text(path: Path) -> str:
    """Read the file of `text=`. Raises UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text={path}: {reason(error)}: give a text file") from None


def windows(ids: Sequence[int], count: int, longest: int) -> list[list[int]]:
    """Cut the first tokens of a text into at most `count` windows of one length.

    Raises UserError for a text of fewer than two tokens.
    """
    if len(ids) < 2:
        raise UserError(f"text=: {len(ids)} tokens are too few to compare: give a longer text")
    length = min(WINDOW, longest, len(ids))
    return [list(ids[at : at + length]) for at in range(0, len(ids) - length + 1, length)][:count]


def artifact_logits(llm: Llama, ids: Sequence[int]) -> np.ndarray:
    """Return the logits f32 `[len(ids), vocab]` of every position, token by token."""
    llm.reset()
    return np.stack([llm.prefill(ids[:1]), *(llm.decode(token) for token in ids[1:])])


def measure(logits: Iterable[np.ndarray], source: Iterable[np.ndarray], parts: Sequence[Sequence[int]]) -> Quality:
    """Compare logits of the windows `parts`, f32 `[tokens, vocab]` each, with those of the checkpoint in float32."""
    compared = [_compare(exact, ours, ids) for exact, ours, ids in zip(source, logits, parts, strict=True)]
    divergence, same, surprise, wanted = (np.concatenate(values) for values in zip(*compared, strict=True))
    return Quality(
        tokens=len(divergence),
        divergence=float(divergence.mean()),
        interval=interval(divergence),
        tail=float(np.percentile(divergence, 99.9)),
        same=float(same.mean()),
        perplexity=float(np.exp(surprise.mean())),
        source_perplexity=float(np.exp(wanted.mean())),
    )


def _compare(
    source: np.ndarray, ours: np.ndarray, ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return by position what tells the model from the checkpoint.

    These are the divergence, whether both prefer one token, and for all but the last, -log p of the next token, of the
    model and of the checkpoint.
    """
    logp, logq = log_softmax(source), log_softmax(ours)
    divergence = np.einsum("pv,pv->p", np.exp(logp), logp - logq)
    at, following = np.arange(len(ids) - 1), list(ids[1:])
    return divergence, logp.argmax(axis=1) == logq.argmax(axis=1), -logq[at, following], -logp[at, following]


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean, by bootstrap (Efron 1979) with a fixed seed."""
    low, high = np.percentile(list(_resampled_means(values)), _CONFIDENCE)
    return float(low), float(high)


def _resampled_means(values: np.ndarray) -> Iterator[float]:
    generator = np.random.default_rng(0)
    for _ in range(_RESAMPLES):
        yield float(generator.choice(values, len(values)).mean())
