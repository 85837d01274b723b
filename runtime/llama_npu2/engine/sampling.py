"""Choosing the next token from logits: small filters, composed by one factory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from llama_npu2.errors import UserError
from llama_npu2.options import Sampling

Sampler = Callable[[np.ndarray], int]


def sampler(options: Sampling, prompt: Sequence[int] = (), number: int = 0) -> Sampler:
    """A function from float32 logits `[vocab]` to a token id, to be called once for each token of a reply to `prompt`.

    Logits are adjusted first (`Adjustment`). `temperature=0` takes the most likely token, else one is drawn from
    `distribution`. Its random numbers are its own: those of the reply `number` to a seed, whatever else is drawn.
    It raises UserError for logits of which the largest is not a finite number, and for a bias of no token.
    """
    seed = np.random.SeedSequence(options.seed, spawn_key=(number,))
    generator = np.random.default_rng(seed) if options.temperature else None
    adjust = Adjustment(options, prompt)

    def choose(logits: np.ndarray) -> int:
        most_likely(logits)
        adjusted = adjust(logits)
        if generator is None:
            token = most_likely(adjusted)
        else:
            ids, probabilities = distribution(adjusted, options)
            token = int(generator.choice(ids, p=probabilities))
        adjust.follow(token)
        return token

    return choose


def most_likely(logits: np.ndarray) -> int:
    """The token with the largest logit. Raises UserError if that is not a finite number."""
    best = int(np.argmax(logits))  # NaN, if there is one
    if not np.isfinite(logits[best]):
        raise UserError("the model's logits are not finite numbers: look for damage with llama-npu2 check DIR")
    return best


class Adjustment:
    """Logits in view of the tokens that are there, in the order of transformers:

    - `logit_bias` is added;
    - `repetition_penalty` (Keskar et al. 2019): logits of tokens of prompt and reply are divided by it, those below 0
      multiplied;
    - from logits of tokens of the reply, `presence_penalty` and `frequency_penalty` times how often they are in it are
      taken away (OpenAI's formula).
    """

    def __init__(self, options: Sampling, prompt: Sequence[int]) -> None:
        biases = options.biases()
        self._options = options
        self._biased, self._biases = np.array([*biases], np.int64), np.array([*biases.values()], np.float32)
        self._seen = set(prompt) if options.repetition_penalty != 1 else set()
        self._reply: Counter[int] = Counter()

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Float32 `[vocab]`. Raises UserError."""
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
        """The reply goes on with this one."""
        if self._options.repetition_penalty != 1:
            self._seen.add(token)
        if self._options.presence_penalty or self._options.frequency_penalty:
            self._reply[token] += 1


def distribution(logits: np.ndarray, options: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and float64 probabilities, which add up to 1, of what may be drawn. In the order of transformers: scale
    by `1/temperature`, keep the `top_k` most likely (0: all), then the smallest set whose probability reaches `top_p`
    (nucleus sampling, Holtzman et al. 2020), then what is at least `min_p` times as likely as the most likely one
    (Nguyen et al. 2024)."""
    ids, probabilities = _softmax(*_largest(logits, options.top_k), options.temperature)
    return _min_p(*_nucleus(ids, probabilities, options.top_p), options.min_p)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64, of the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _largest(logits: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
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
    return _only(ids, probabilities, order[:count])


def _min_p(ids: np.ndarray, probabilities: np.ndarray, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    if min_p <= 0:
        return ids, probabilities
    return _only(ids, probabilities, probabilities >= min_p * probabilities.max())


def _only(ids: np.ndarray, probabilities: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ids[kept], probabilities[kept] / probabilities[kept].sum()
