"""Attention of the newest position over the KV cache. It runs on the host, whatever the target."""

from __future__ import annotations

from stages.engine.lazy import np
from stages.kernels import KV_FORMATS, Arg, flash_attention, format_kernel, signature


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    heads: int,
    kv_heads: int,
    scalar: float | None = None,
    sees: int = flash_attention.ALL,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Return attention of one query, bf16 `[heads * head_dim]`.

    `q`: bf16 `[heads * head_dim]`; `k`, `v`: `[pos + 1, kv_heads * head_dim]`, as the cache holds them; `sinks` as in
    `flash_attention.reference`.
    """
    return flash_attention.reference(q[None], k, v, len(k) - 1, heads, kv_heads, scalar, sees, sinks)[0]


_PARAMS = f"pos {flash_attention.PARAMS}"

KERNELS = (
    *(
        signature(
            "decode_attention_kv",
            ("q", Arg("kv", stored)),
            _PARAMS,
            reference,
            source=format_kernel("attention_kv", stored),
            stored=stored,
            attends=True,
        )
        for stored in KV_FORMATS.values()
    ),
    signature("decode_attention_kv_sinks", ("q", "kv", "sinks"), _PARAMS, reference, attends=True, host=False),
    *(
        signature(
            f"decode_attention_panels_{more}" if (more := "".join(sinks)) else "decode_attention_panels",
            ("q", Arg("k_panels", stored), Arg("v_panels", stored), *sinks),
            _PARAMS,
            reference,
            source=format_kernel("attention", stored),
            stored=stored,
            attends=True,
            paged=True,
        )
        for stored in KV_FORMATS.values()
        for sinks in flash_attention.SINKS
    ),
)
