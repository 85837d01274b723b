"""Puts new rows of K and V into the KV cache, in the form that the host's attention streams.

Two forms: panels (`kernel_src/cpu/README.md`), and one row per position that keeps K and V of a head together.
"""

from __future__ import annotations

import numpy as np

from stages.kernels import signature
from stages.weights.constants import KV_BLOCK_POSITIONS, PANEL_ROWS


def reference(k: np.ndarray, v: np.ndarray, kv: np.ndarray, pos: int) -> np.ndarray:
    """`k`, `v` bf16 `[kv_heads, head_dim]` into row `pos` of a copy of `kv`, `[positions, kv_heads, 2, head_dim]`."""
    out = kv.copy()
    out[pos, :, 0], out[pos, :, 1] = k, v
    return out


def reference_panels(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`k`, `v` bf16 `[positions, kv_heads, head_dim]` from position 0 on -> caches `[blocks, kv_heads, 128, head_dim]`
    and `[blocks, kv_heads, 128, padded head_dim]`, zeros where nothing was put."""
    positions, kv_heads, head_dim = k.shape
    padded = -(-head_dim // PANEL_ROWS) * PANEL_ROWS
    blocks = -(-positions // KV_BLOCK_POSITIONS)
    wide = np.zeros((2, blocks * KV_BLOCK_POSITIONS, kv_heads, padded), k.dtype)
    wide[0, :positions, :, :head_dim], wide[1, :positions, :, :head_dim] = k, v
    by_line = wide[0, ..., :head_dim].reshape(blocks, -1, PANEL_ROWS, kv_heads, head_dim // 2, 2)
    by_pair = wide[1].reshape(blocks, -1, 2, kv_heads, padded // PANEL_ROWS, PANEL_ROWS)
    k_panels = by_line.transpose(0, 3, 1, 4, 2, 5).reshape(blocks, kv_heads, KV_BLOCK_POSITIONS, head_dim)
    v_panels = by_pair.transpose(0, 3, 4, 1, 5, 2).reshape(blocks, kv_heads, KV_BLOCK_POSITIONS, padded)
    return k_panels, v_panels


KERNELS = (
    signature("append_kv", ("k", "v"), "pos kv_heads head_dim", reference, writes=("kv",)),
    signature(
        "append_kv_panels",
        ("k", "v"),
        "rows pos kv_heads head_dim",
        reference_panels,
        writes=("k_panels", "v_panels"),
    ),
)
