"""Shapes of published models for `model=random:<name>`: real sizes without real weights."""

from typing import Any

_LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

_LLAMA32 = {
    "vocab_size": 128256,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}

_SMOLLM2 = {
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _shape(hidden: int, layers: int, heads: int, **rest: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, **rest}


_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA32 | _shape(2048, 16, 32, head_dim=64),
    "llama-3.2-3b": _LLAMA32 | _shape(3072, 28, 24, head_dim=128),
    "llama-3.1-8b": _LLAMA32
    | {"tie_word_embeddings": False, "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0}, "intermediate_size": 14336}
    | _shape(4096, 32, 32, head_dim=128),
    "smollm2-135m": _SMOLLM2 | _shape(576, 30, 9, num_key_value_heads=3, intermediate_size=1536, rope_theta=100000.0),
    "smollm2-360m": _SMOLLM2 | _shape(960, 32, 15, num_key_value_heads=5, intermediate_size=2560, rope_theta=100000.0),
    "smollm2-1.7b": _SMOLLM2
    | _shape(2048, 24, 32, num_key_value_heads=32, intermediate_size=8192, rope_theta=130000.0),
    "tinyllama-1.1b": {
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    | _shape(2048, 22, 32, num_key_value_heads=4, intermediate_size=5632),
}

PRESETS: dict[str, dict[str, Any]] = {
    name: {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **shape}
    for name, shape in _SHAPES.items()
}
