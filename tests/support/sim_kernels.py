"""Running a kernel's program on the simulator, and comparing what it makes with a reference."""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16

from stages.air import AirModule
from stages.model.config import position_rows
from stages.weights.constants import HEAD_POSITION
from tests.support.sim_support import run

ULP = 2.0**-7


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(bfloat16)


def empty(*shape: int, dtype: type = bfloat16) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def execute(made: AirModule, *arrays: np.ndarray, flags: tuple[str, ...] = ()) -> np.ndarray:
    """The last slot after a run; the run backwards must give the same bytes."""
    forward, _ = run(made.module, arrays, flags)
    backward, _ = run(made.module, arrays, flags, reverse=True)
    assert forward[-1].tobytes() == backward[-1].tobytes(), "the result depends on the order of tiles"
    return forward[-1]


def assert_close(got: np.ndarray, want: np.ndarray, bound: np.ndarray | float) -> None:
    """`bound` is absolute, per element. Nothing may be missing."""
    error = np.abs(got.astype(np.float64) - want.astype(np.float64))
    assert np.isfinite(error).all(), "not every element was written"
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), f"at {worst}: {got[worst]} for {want[worst]}"


def attention_case(
    seq: int, window: int, heads: int, kv_heads: int, dim: int, pos: int, scale: float
) -> tuple[np.ndarray, ...]:
    """Queries with their positions; keys and values up to the last of them, and a window of the cache that has them,
    behind which lies what other texts left."""
    q, k = random(seq, heads * dim, seed=15, scale=scale), random(pos + seq, kv_heads * dim, seed=16, scale=scale)
    v = random(pos + seq, kv_heads * dim, seed=17)
    kv = np.full((window, kv_heads, 2, dim), 1000, bfloat16)
    kv[: pos + seq] = np.stack([t.reshape(pos + seq, kv_heads, dim) for t in (k, v)], axis=2)
    behind = position_rows(pos, seq).view(bfloat16)[:, None, :HEAD_POSITION].repeat(heads, axis=1)
    placed = np.concatenate([q.reshape(seq, heads, dim), behind], axis=2).reshape(seq, -1)
    return placed, k, v, kv.reshape(window, -1)
