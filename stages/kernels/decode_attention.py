"""Attention of the newest position over the KV cache. It runs on the host, whatever the target."""

from __future__ import annotations

import numpy as np

from stages.kernels import KV_FORMATS, Arg, flash_attention, format_kernel, signature


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Return attention of one query, bf16 `[heads * head_dim]`.

    `q`: bf16 `[heads * head_dim]`; `k`, `v`: `[pos + 1, kv_heads * head_dim]`, as the cache holds them.
    """
    return flash_attention.reference(q[None], k, v, len(k) - 1, heads, kv_heads)[0]


KERNELS = tuple(
    signature(name, ("q", *cache), "pos heads kv_heads head_dim", reference, source=source, attends=True)
    for name, cache, source in (
        ("decode_attention_kv", (Arg("kv"),), "attention_kv"),
        *(
            (
                format_kernel("decode_attention_panels", stored),
                (Arg("k_panels", stored), Arg("v_panels", stored)),
                format_kernel("attention", stored),
            )
            for stored in KV_FORMATS.values()
        ),
    )
)
