"""Filters and draws of large vocabularies, against a plain way to do the same."""

from __future__ import annotations

import numpy as np
import pytest

from llama_npu2.engine.completion import Logprob
from llama_npu2.engine.sampling import distribution, drawn, largest, log_softmax
from llama_npu2.options import Sampling

SIZES = 1, 2, 63, 64, 257, 6400, 20000
"""Smaller and larger than the parts in which values are looked through."""


def row(rng: np.random.Generator, size: int) -> np.ndarray:
    """Logits, many of them equal in half of the rows, and some of tokens that may not come."""
    logits = rng.normal(0, rng.choice([0.1, 3, 30]), size).astype(np.float32)
    if rng.random() < 0.5:
        logits = np.round(logits)
    logits[rng.permutation(size)[: size // 3]] = -np.inf if rng.random() < 0.3 else 0
    logits[rng.integers(size)] = logits.max() if np.isfinite(logits.max()) else 0
    return logits


def sorted_out(logits: np.ndarray, options: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """What `distribution` returns, by sorting all tokens, the first of equal ones first."""
    order = np.argsort(-logits, kind="stable")
    order = order[: options.top_k or len(order)]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / options.temperature)
    if options.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(weights), options.top_p * weights.sum())) + 1]
        weights = weights[: len(order)]
    order, weights = (kept[weights >= options.min_p] for kept in (order, weights))
    ascending = np.argsort(order)
    return order[ascending], weights[ascending] / weights.sum()


@pytest.mark.parametrize("size", SIZES)
def test_filters_leave_what_sorting_leaves(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(30):
        options = Sampling(
            temperature=float(rng.choice([0.1, 0.7, 1, 3])),
            top_k=int(rng.choice([0, 1, 40, size // 2, size])),
            top_p=float(rng.choice([1, rng.uniform(0.01, 1), 0.9])),
            min_p=float(rng.choice([0, rng.uniform(0, 0.3)])),
        )
        logits = row(rng, size)
        ids, probabilities = distribution(logits, options)
        wanted, exact = sorted_out(logits, options)
        np.testing.assert_array_equal(ids, wanted, str(options))
        np.testing.assert_allclose(probabilities, exact, rtol=3e-5, atol=1e-30)


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_are_the_first_of_equal_ones(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(30):
        values, count = row(rng, size), int(rng.integers(1, size + 2))
        np.testing.assert_array_equal(largest(values, count), np.sort(np.argsort(-values, kind="stable")[:count]))


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e40, 1e300])
def test_temperatures_beyond_float32(temperature: float) -> None:
    _, probabilities = distribution(np.array([1, 2, 2, -3], np.float32), Sampling(temperature=temperature))
    np.testing.assert_array_equal(probabilities, [0, 0.5, 0.5, 0] if temperature < 1 else [0.25] * 4)


@pytest.mark.parametrize("size", SIZES)
def test_a_number_falls_on_the_weight_that_lies_there(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(30):
        weights = np.exp(row(rng, size) / 4)
        weights[: rng.integers(size)] = 0
        weights[rng.integers(size) :] = 0
        weights[rng.integers(size)] = rng.choice([1e-30, 1])
        sums = np.cumsum(weights, dtype=np.float64)
        for uniform in (0.0, *rng.random(20), 1 - 2**-53):
            index = drawn(weights, float(uniform))
            before, after = np.array([sums[index] - weights[index], sums[index]]) / sums[-1]
            assert weights[index] > 0 and before - 1e-6 <= uniform <= after + 1e-6


def test_draws_are_as_frequent_as_they_are_likely() -> None:
    """The weights are 1000, those of each hundred ten times as large as those of the hundred before."""
    weights = np.repeat(10.0 ** np.arange(-9, 1), 100).astype(np.float32)
    rng = np.random.default_rng(0)
    counts = np.bincount([drawn(weights, rng.random()) for _ in range(40000)], minlength=1000)
    expected = 40000 * weights / weights.sum()
    assert abs(counts[900:] - expected[900:]).max() < 5 * np.sqrt(expected[-1])
    assert abs(counts[800:900].sum() - expected[800:900].sum()) < 5 * np.sqrt(expected[800:900].sum())


def test_log_probabilities_name_the_first_of_equal_tokens() -> None:
    logits = np.zeros(20000, np.float32)
    logits[[7, 19000]] = 5
    found = Logprob.of(3, logits, 4)
    exact = log_softmax(logits)
    assert [token for token, _ in found.top] == [7, 19000, 0, 1] and not found.greedy
    assert found.logprob == exact[3] and [logprob for _, logprob in found.top] == exact[[7, 19000, 0, 1]].tolist()
    np.testing.assert_allclose(np.exp(exact).sum(), 1, rtol=1e-12)
    np.testing.assert_array_equal(log_softmax(np.stack([logits, -logits]))[0], exact)
