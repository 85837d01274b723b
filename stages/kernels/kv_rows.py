"""KV caches in rows: a position's row has K and V of each head next to each other, in a format of `KV_FORMATS`.

In formats whose rows have scales, K's scale comes behind K and V's in front of V: scales of a head lie together, and K
and V begin at whole blocks of `limits.BLOCK` elements.
"""

from __future__ import annotations

from stages.air import limits
from stages.engine.lazy import np
from stages.weights.formats import formats

KEYS, VALUES, BOTH = slice(0, 1), slice(1, 2), slice(0, 2)
"""Halves of a head's part of a row."""


def half_elements(head_dim: int, stored: str) -> int:
    """Return the elements of K or V of a head in a row."""
    return head_dim + formats()[stored].row_elements


def head_elements(head_dim: int, stored: str) -> int:
    """Return the elements of K and V of a head in a row."""
    return 2 * half_elements(head_dim, stored)


def element_type(stored: str) -> str:
    """Return the dtype of elements."""
    return formats()[stored].dtype


def in_numbers(stored: str) -> bool:
    """Return whether rows are whole numbers with scales, whose products are not those of bf16."""
    return bool(formats()[stored].row_elements)


def macros(stored: str) -> dict[str, int]:
    """Return the macros with which `kernel_src/aie2p` is compiled for such caches."""
    return {"KV_BITS": 8} if in_numbers(stored) else {}


class Heads:
    """A division of attention over a cache in rows."""

    kv_heads: int
    head_dim: int
    stored: str
    tile_k: int

    @property
    def kv_dtype(self) -> str:
        """The dtype of the cache's elements."""
        return element_type(self.stored)

    @property
    def kv_head(self) -> int:
        """The cache's elements of a position for a KV head."""
        return head_elements(self.head_dim, self.stored)

    @property
    def kv_row(self) -> int:
        """The cache's elements of a position."""
        return self.kv_heads * self.kv_head


def quantising_vectors(head_dim: int) -> int:
    """Return the vector operations that a core takes for a row of K or V of a head (kernel_src/aie2p/int8_rows.h)."""
    return head_dim // limits.VECTOR * 14 + 16


def halves(x: np.ndarray, which: slice, stored: str) -> np.ndarray:
    """Return rows of K or V, as `which` says, as a cache holds them: `[..., half_elements]`.

    `x`: bf16 `[..., head_dim]`.
    """
    form = formats()[stored]
    rows = form.quantise(x)
    return np.roll(rows, -form.row_elements, axis=-1) if which == KEYS else rows


def rows(k: np.ndarray, v: np.ndarray, stored: str = "bf16") -> np.ndarray:
    """Return a cache's rows, `[..., 2, half_elements]`. `k`, `v`: bf16 `[..., head_dim]`."""
    return np.stack([halves(k, KEYS, stored), halves(v, VALUES, stored)], axis=-2)


def values(cached: np.ndarray, stored: str = "bf16") -> tuple[np.ndarray, np.ndarray]:
    """Return K and V of rows `[..., 2, half_elements]`, f32 `[..., head_dim]`: the inverse of `rows`."""
    form = formats()[stored]
    head_dim = cached.shape[-1] - form.row_elements
    k = np.roll(cached[..., 0, :], form.row_elements, axis=-1)
    return form.dequantise(k, head_dim), form.dequantise(cached[..., 1, :], head_dim)


def held(cached: np.ndarray, stored: str) -> np.ndarray:
    """Return what a kernel takes rows `[..., 2, half_elements]` for, `[..., 2, head_dim]`: bf16, or f32 of numbers."""
    return np.stack(values(cached, stored), axis=-2) if in_numbers(stored) else cached


def keys_and_values(cached: np.ndarray, stored: str) -> list[np.ndarray]:
    """Return K and V that rows hold (`held`), `[positions, kv_heads * head_dim]`.

    `cached`: `[positions, kv_heads, 2, half_elements]`.
    """
    return [half.reshape(len(cached), -1) for half in np.moveaxis(held(cached, stored), 2, 0)]
