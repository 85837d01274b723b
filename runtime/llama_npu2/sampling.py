"""Choosing the next token from logits: small filters, composed by one factory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llama_npu2.errors import UserError
from llama_npu2.options import Sampling

Sampler = Callable[[np.ndarray], int]


def sampler(options: Sampling) -> Sampler:
    """A function from float32 logits `[vocab]` to a token id.

    `temperature=0` takes the most likely token. Otherwise: scale by `1/temperature`, keep the `top_k` most likely
    (0: all), then the smallest set whose probability reaches `top_p` (nucleus sampling, Holtzman et al. 2020), draw.
    It raises UserError for logits of which the largest is not a finite number.
    """
    generator = np.random.default_rng(options.seed) if options.temperature else None

    def choose(logits: np.ndarray) -> int:
        best = int(np.argmax(logits))  # NaN, if there is one
        if not np.isfinite(logits[best]):
            raise UserError("the model's logits are not finite numbers: look for damage with llama-npu2 DIR --check")
        if generator is None:
            return best
        ids, probabilities = _nucleus(
            *_softmax(*_most_likely(logits, options.top_k), options.temperature), options.top_p
        )
        return int(generator.choice(ids, p=probabilities))

    return choose


def _most_likely(logits: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logits of the `top_k` largest, all if 0."""
    if not 0 < top_k < len(logits):
        return np.arange(len(logits)), logits
    ids = np.argpartition(logits, -top_k)[-top_k:]
    return ids, logits[ids]


def _softmax(ids: np.ndarray, logits: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(over="ignore"):  # far below the best: probability 0
        weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return ids, weights / weights.sum()


def _nucleus(ids: np.ndarray, probabilities: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    if top_p >= 1:
        return ids, probabilities
    order = np.argsort(-probabilities, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    kept = order[:count]
    return ids[kept], probabilities[kept] / probabilities[kept].sum()
