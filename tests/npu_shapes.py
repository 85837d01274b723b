"""Dimensions of the models that every NPU module must exist for."""

from __future__ import annotations


def _dimensions(
    vocab: int, emb: int, ffn: int, heads: int, kv_heads: int, head_dim: int, layers: int
) -> dict[str, float]:
    return {
        "vocab": vocab,
        "emb": emb,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "q_dim": heads * head_dim,
        "kv_dim": kv_heads * head_dim,
        "layers": layers,
        "eps": 1e-5,
    }


MODELS = {
    "demo": _dimensions(2000, 256, 768, 4, 2, 64, 4),
    "Llama-3.2-1B": _dimensions(128256, 2048, 8192, 32, 8, 64, 16),
    "Llama-3.2-3B": _dimensions(128256, 3072, 8192, 24, 8, 128, 28),
    "SmolLM2-135M": _dimensions(49152, 576, 1536, 9, 3, 64, 30),
    "SmolLM2-360M": _dimensions(49152, 960, 2560, 15, 5, 64, 32),
    "SmolLM2-1.7B": _dimensions(49152, 2048, 8192, 32, 32, 64, 24),
    "TinyLlama-1.1B": _dimensions(32000, 2048, 5632, 32, 4, 64, 22),
}
