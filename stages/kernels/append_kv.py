"""Appends new rows of K and V to the KV cache, in the layout that the host's attention streams.

There are two layouts, in any of `KV_FORMATS`: panels (`kernel_src/cpu/README.md`), and one row per position in which K
and V of a head lie next to each other (`stages.kernels.kv_rows`).
"""

from __future__ import annotations

from functools import partial

from stages.engine.lazy import np
from stages.kernels import KV_FORMATS, Arg, format_kernel, kv_rows, signature
from stages.weights.constants import KV_BLOCK_POSITIONS, PANEL_ROWS
from stages.weights.formats import formats


def reference(k: np.ndarray, v: np.ndarray, kv: np.ndarray, pos: int, stored: str = "bf16") -> np.ndarray:
    """Return a copy of `kv` with `k` and `v` in row `pos`.

    `k`, `v`: bf16 `[kv_heads, head_dim]`; `kv`: `[positions, kv_heads, 2, half_elements]`, in the format `stored`.
    """
    out = kv.copy()
    out[pos] = kv_rows.rows(k, v, stored)
    return out


def reference_panels(k: np.ndarray, v: np.ndarray, stored: str = "bf16") -> tuple[np.ndarray, np.ndarray]:
    """Return the caches of K and V, `[blocks, kv_heads, 128 * width]` in the format `stored`.

    `k`, `v`: bf16 `[positions, kv_heads, head_dim]`, from position 0 on. Positions after the last are zeros. `width`:
    elements of a stored row, for V after padding `head_dim` to whole panels.
    """
    head_dim = k.shape[-1]
    padding = [(0, 0), (0, 0), (0, -head_dim % PANEL_ROWS)]
    form = formats()[stored]
    (k_scales, k_blocks), (v_scales, v_blocks) = (
        _by_block(form.quantise(rows), form.row_elements) for rows in (k, np.pad(v, padding))
    )
    blocks, kv_heads = k_blocks.shape[:2]
    k_panels = k_blocks.reshape(blocks, kv_heads, -1, PANEL_ROWS, head_dim // 2, 2).swapaxes(3, 4)
    v_panels = v_blocks.reshape(blocks, kv_heads, -1, 2, v_blocks.shape[-1] // PANEL_ROWS, PANEL_ROWS)
    return (
        np.concatenate([k_scales, k_panels.reshape(blocks, kv_heads, -1)], axis=-1),
        np.concatenate([v_scales, v_panels.transpose(0, 1, 4, 2, 5, 3).reshape(blocks, kv_heads, -1)], axis=-1),
    )


def rows_of_panels(
    k_panels: np.ndarray, v_panels: np.ndarray, head_dim: int, positions: int, stored: str = "bf16"
) -> tuple[np.ndarray, np.ndarray]:
    """Return K and V of the first `positions` rows, f32 `[positions, kv_heads, head_dim]`.

    The inverse of `reference_panels`.
    """
    form, padded, half = formats()[stored], head_dim + -head_dim % PANEL_ROWS, KV_BLOCK_POSITIONS // 2
    blocks = -(-positions // KV_BLOCK_POSITIONS)
    scales = KV_BLOCK_POSITIONS * form.row_elements
    flat = (panels[:blocks].reshape(blocks, panels.shape[1], -1) for panels in (k_panels, v_panels))
    (k_scales, k), (v_scales, v) = (np.split(panels, [scales], axis=-1) for panels in flat)
    heads = k.shape[:2]
    k_rows = k.reshape(*heads, -1, head_dim // 2, PANEL_ROWS, 2).swapaxes(3, 4).reshape(*heads, -1, head_dim)
    v_rows = v.reshape(*heads, -1, half, PANEL_ROWS, 2).transpose(0, 1, 3, 5, 2, 4).reshape(*heads, -1, padded)

    def values(scales: np.ndarray, rows: np.ndarray) -> np.ndarray:
        by_row = scales.reshape(*rows.shape[:3], form.row_elements)
        quantised = np.concatenate([by_row, rows[..., :head_dim]], axis=-1).swapaxes(1, 2)
        return form.dequantise(quantised.reshape(-1, *quantised.shape[2:])[:positions], head_dim)

    return values(k_scales, k_rows), values(v_scales, v_rows)


def _by_block(rows: np.ndarray, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """Split stored rows `[positions, kv_heads, scale + width]` into blocks of 128 positions.

    Returns the scales, `[blocks, kv_heads, 128 * scale]`, and the elements after them, `[blocks, kv_heads, 128,
    width]`.
    """
    positions, kv_heads, _ = rows.shape
    padded = np.pad(rows, [(0, -positions % KV_BLOCK_POSITIONS), (0, 0), (0, 0)])
    blocks = padded.reshape(-1, KV_BLOCK_POSITIONS, kv_heads, rows.shape[-1]).swapaxes(1, 2)
    return blocks[..., :scale].reshape(*blocks.shape[:2], -1), blocks[..., scale:]


KERNELS = (
    *(
        signature(
            "append_kv",
            ("k", "v"),
            "pos kv_heads head_dim",
            partial(reference, stored=stored),
            writes=(Arg("kv", stored, written=True),),
            source="append_kv" if stored == "bf16" else format_kernel("attention_kv", stored),
            stored=stored,
        )
        for stored in KV_FORMATS.values()
    ),
    *(
        signature(
            "append_kv_panels",
            ("k", "v"),
            "rows pos kv_heads head_dim",
            partial(reference_panels, stored=stored),
            writes=tuple(Arg(f"{which}_panels", stored, written=True) for which in "kv"),
            source=format_kernel("attention", stored),
            stored=stored,
            paged=True,
        )
        for stored in KV_FORMATS.values()
    ),
)
