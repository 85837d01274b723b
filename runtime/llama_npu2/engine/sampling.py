"""Chooses the next token from logits: small filters, composed by one factory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Protocol

import numpy as np

from llama_npu2.errors import UserError
from llama_npu2.options import Sampling

Sampler = Callable[[np.ndarray], int]


class Restriction(Protocol):
    """What keeps tokens from being chosen."""

    def __call__(self, logits: np.ndarray) -> None:
        """Set float32 logits `[vocab]` of tokens that may not come next to minus infinity. Raises UserError."""


def sampler(
    options: Sampling, prompt: Sequence[int] = (), number: int = 0, restrict: Restriction | None = None
) -> Sampler:
    """Return a function from float32 logits `[vocab]` to a token id, to be called once for each token of a reply.

    It adjusts the logits first (`Adjustment`). With `temperature=0` it takes the most likely token, else it draws one
    from `distribution`. It raises UserError if the largest logit is not a finite number, or a bias is for no token.

    Args:
        options: which tokens may be drawn, and how likely they are.
        prompt: the tokens before the reply.
        number: which of the replies to a seed. Each has random numbers of its own, whatever else is drawn.
        restrict: is called with the adjusted logits, before one is chosen.
    """
    seed = np.random.SeedSequence(options.seed, spawn_key=(number,))
    generator = np.random.default_rng(seed) if options.temperature else None
    adjust = Adjustment(options, prompt)

    def choose(logits: np.ndarray) -> int:
        token, adjusted = most_likely(logits), logits
        if restrict or adjust.changes:
            adjusted = adjust(logits)
            if restrict:
                restrict(adjusted)
            token = most_likely(adjusted)
        if generator:
            ids, probabilities = distribution(adjusted, options)
            token = int(generator.choice(ids, p=probabilities))
        adjust.follow(token)
        return token

    return choose


def most_likely(logits: np.ndarray) -> int:
    """Return the token with the largest logit. Raises UserError if that is not a finite number."""
    best = int(np.argmax(logits))  # a NaN's index, if there is one
    if not isfinite(logits[best]):
        raise UserError("the model's logits are not finite numbers: look for damage with llama-npu2 check DIR")
    return best


class Adjustment:
    """A function that changes logits depending on the tokens so far, in the order of transformers.

    - It adds `logit_bias`.
    - It divides positive logits of tokens in prompt or reply by `repetition_penalty`, and multiplies negative ones by
      it (Keskar et al. 2019).
    - From the logits of tokens in the reply it subtracts `presence_penalty + frequency_penalty * count`, where count
      says how often the token is in the reply (OpenAI's formula).
    """

    def __init__(self, options: Sampling, prompt: Sequence[int]) -> None:
        biases = options.biases()
        self._options = options
        self._biased, self._biases = np.array([*biases], np.int64), np.array([*biases.values()], np.float32)
        self._seen = set(prompt) if options.repetition_penalty != 1 else set()
        self._reply: Counter[int] = Counter()
        penalised = options.repetition_penalty != 1 or options.presence_penalty or options.frequency_penalty
        self.changes = bool(biases or penalised)
        """Whether it may change a logit."""

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Return adjusted float32 logits `[vocab]`. Raises UserError for a bias of no token."""
        if bad := [token for token in self._biased if token >= len(logits)]:
            raise UserError(f"logit_bias: token {bad[0]} is outside the vocabulary of {len(logits)}")
        adjusted = logits.copy()
        adjusted[self._biased] += self._biases
        if self._seen:
            seen, penalty = np.array([*self._seen]), np.float32(self._options.repetition_penalty)
            adjusted[seen] = np.where(adjusted[seen] < 0, adjusted[seen] * penalty, adjusted[seen] / penalty)
        if self._reply:
            counts = np.array([*self._reply.values()], np.float32)
            penalties = self._options.presence_penalty + self._options.frequency_penalty * counts
            adjusted[[*self._reply]] -= penalties
        return adjusted

    def follow(self, token: int) -> None:
        """Append a token to the reply."""
        if self._options.repetition_penalty != 1:
            self._seen.add(token)
        if self._options.presence_penalty or self._options.frequency_penalty:
            self._reply[token] += 1


def distribution(logits: np.ndarray, options: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of the tokens that may be drawn, and their float64 probabilities, which add up to 1.

    The filters come in the order of transformers: scale logits by `1/temperature`, keep the `top_k` most likely tokens
    (0: all), then the smallest set whose probability reaches `top_p` (nucleus sampling, Holtzman et al. 2020), then
    those at least `min_p` times as likely as the most likely one (Nguyen et al. 2024).
    """
    ids, probabilities = _softmax(*_largest(logits, options.top_k), options.temperature)
    return _min_p(*_nucleus(ids, probabilities, options.top_p), options.min_p)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the float64 log-softmax over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _largest(logits: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and logits of the `top_k` largest logits, of all if 0."""
    if not 0 < top_k < len(logits):
        return np.arange(len(logits)), logits
    ids = np.argpartition(logits, -top_k)[-top_k:]
    return ids, logits[ids]


def _softmax(ids: np.ndarray, logits: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(over="ignore"):  # a logit far below the largest gets probability 0
        weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return ids, weights / weights.sum()


def _nucleus(ids: np.ndarray, probabilities: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    if top_p >= 1:
        return ids, probabilities
    order = np.argsort(-probabilities, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    return _only(ids, probabilities, order[:count])


def _min_p(ids: np.ndarray, probabilities: np.ndarray, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    if min_p <= 0:
        return ids, probabilities
    return _only(ids, probabilities, probabilities >= min_p * probabilities.max())


def _only(ids: np.ndarray, probabilities: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ids[kept], probabilities[kept] / probabilities[kept].sum()
