"""Chooses the next token from logits: small filters, composed by one factory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import isfinite, log
from typing import Protocol

import numpy as np

from llama_npu2.errors import UserError
from llama_npu2.options import Sampling

Sampler = Callable[[np.ndarray], int]

_PART = 8192
"""Numbers that are worked on at a time in float64. An operating system gives out arrays of a megabyte page by page."""
_SETS = 64
"""How many values, far apart, share a maximum when the largest ones are looked for."""
_SPAN = 256
"""How many weights are first drawn from as one."""
_STEP, _LEAST = np.float32(1 / 16), np.float32(1e-30)
"""A nucleus is looked for among weights from `_STEP` on, then its square on, its cube and so on, down to `_LEAST`."""
_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures that float32 has room for. At these, only equal logits share the probability, or all tokens do."""


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
            ids, weights = _weighed(adjusted, options)
            token = drawn(weights, generator.random())
            if ids is not None:
                token = int(ids[token])
        adjust.follow(token)
        return token

    return choose


def most_likely(logits: np.ndarray) -> int:
    """Return the token with the largest logit. Raises UserError if that is not a finite number."""
    best = int(logits.argmax())  # a NaN's index, if there is one
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
    """Return the ids of the tokens that may be drawn, ascending, and their float64 probabilities, which add up to 1.

    The filters come in the order of transformers: scale logits by `1/temperature`, keep the `top_k` most likely tokens
    (0: all), then the smallest set whose probability reaches `top_p` (nucleus sampling, Holtzman et al. 2020), then
    those at least `min_p` times as likely as the most likely one (Nguyen et al. 2024). Of tokens that are as likely,
    filters keep the first.
    """
    ids, weights = _weighed(logits, options)
    return np.arange(len(logits)) if ids is None else ids, weights / weights.sum(dtype=np.float64)


def drawn(weights: np.ndarray, uniform: float) -> int:
    """Return an index that has a probability like its weight.

    Args:
        weights: float32 `[indices]`, none below 0 and one above.
        uniform: a random number, 0 <= uniform < 1.
    """
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _SPAN)), dtype=np.float64)
    target = uniform * float(sums[-1])
    part = _over(sums, target)
    first = part * _SPAN
    inner = np.cumsum(weights[first : first + _SPAN], dtype=np.float64)
    return first + _over(inner, target - float(sums[part - 1]) if part else target)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the float64 log-softmax over the last axis."""
    rows = logits.reshape(-1, logits.shape[-1])
    return np.stack([row - log_total(row) for row in rows.astype(np.float64)]).reshape(logits.shape)


def log_total(logits: np.ndarray) -> float:
    """Return the logarithm of the sum of `exp(logits)`, of `[vocab]`, in float64."""
    most = float(logits.max())
    parts = (logits[first : first + _PART] for first in range(0, len(logits), _PART))
    return most + log(sum(float(np.exp(part.astype(np.float64) - most).sum()) for part in parts))


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return where the `count` largest of float32 `[values]` are, ascending; of equal ones the first."""
    if count >= len(values):
        return np.arange(len(values))
    # The largest of each of `columns` sets are values: as many as are to be found are not below this bound.
    columns, bound = len(values) // _SETS, np.float32(-np.inf)
    if columns >= count:
        bound = _order_statistic(values[: _SETS * columns].reshape(_SETS, columns).max(axis=0), count)
    found = np.flatnonzero(values >= bound)
    least = _order_statistic(values[found], count)
    found = found[values[found] >= least]
    equal = np.flatnonzero(values[found] == least)
    return np.delete(found, equal[len(equal) - (len(found) - count) :])


def _order_statistic(values: np.ndarray, count: int) -> np.float32:
    found: np.float32 = np.partition(values, -count)[-count]
    return found


def _weighed(logits: np.ndarray, options: Sampling) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the ids of the tokens that may be drawn, ascending, and float32 weights like their probabilities.

    The ids are None for all tokens.
    """
    ids = largest(logits, options.top_k) if 0 < options.top_k < len(logits) else None
    weights = (logits if ids is None else logits[ids]) - logits.max()
    with np.errstate(over="ignore"):  # a logit far below the largest gets weight 0
        weights /= np.float32(min(max(options.temperature, _COLDEST), _HOTTEST))
    np.exp(weights, out=weights)
    if options.top_p < 1:
        ids, weights = _only(ids, weights, _nucleus(weights, options.top_p))
    if options.min_p > 0:
        ids, weights = _only(ids, weights, np.flatnonzero(weights >= np.float32(options.min_p) * weights.max()))
    return ids, weights


def _only(ids: np.ndarray | None, weights: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return kept if ids is None else ids[kept], weights[kept]


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Return where the fewest weights are, ascending, that have this share of their sum together."""
    wanted, least = top_p * weights.sum(dtype=np.float64), _STEP
    likely = np.flatnonzero(weights >= least)
    while least > _LEAST and weights[likely].sum(dtype=np.float64) < wanted:
        least *= _STEP
        likely = np.flatnonzero(weights >= least)
    some = weights[likely]
    sums = np.cumsum(np.sort(some)[::-1], dtype=np.float64)
    return likely[largest(some, int(np.searchsorted(sums, wanted)) + 1)]


def _over(sums: np.ndarray, target: float) -> int:
    """Return which sum is the first above `target`; if rounding leaves none, the first that is as large as the last."""
    index = int(np.searchsorted(sums, target, "right"))
    return index if index < len(sums) else int(np.searchsorted(sums, sums[-1]))
