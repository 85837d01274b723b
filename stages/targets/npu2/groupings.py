"""The groupings of the NPU: which parts run in which order, and which of them share a program."""

from stages.model.decoder import Attention, ShortConv
from stages.model.grouping import Chain, Group, Grouping
from stages.model.part import UNPACK, UNPACK_JOINED

CONTEXT = 4096
"""Default capacity of KV caches, in positions. All of the NPU's memory is locked, whether it is used or not."""

_START = ("embed_token_rows",)
_MIXERS = {Attention.kind: ("rms_gemms_rope_kv", "flash_attn"), ShortConv.kind: ("rms_gemm_conv",)}
_PROMPT = {kind: (*mixer, "o_ffn") for kind, mixer in _MIXERS.items()}
_PROMPT_THIRDS = {kind: (*mixer, "o_add", "gate_up", "down_add") for kind, mixer in _MIXERS.items()}
# While the NPU runs one of these, the host unpacks the weights of the next, so no more than a layer's unpacked weights
# take memory.
_PROMPT_PROGRAMS = (
    Group("prefill_attend", (*_MIXERS[Attention.kind], "o_add"), prompt=True, windowed=True),
    Group("prefill_conv", (*_MIXERS[ShortConv.kind], "o_add"), prompt=True),
    Group("prefill_up", ("gate_up",), prompt=True),
    Group("prefill_down", ("down_add",), prompt=True),
)
_LOGITS = ("final_norm", "lm_head_gemv")
_LAST_ROW = ("final_norm", "lm_head_rows")
_TOKEN = Chain(
    _START,
    {
        Attention.kind: ("rms_gemv_rope", "decode_attn_kv", "o_gemv_ffn"),
        ShortConv.kind: ("rms_gemv_conv", "o_gemv_ffn"),
    },
    _LOGITS,
)
_JOINED_TOKEN = {
    Attention.kind: ("norm_qkv_gemv", "token_attn", "o_ffn_gemvs"),
    ShortConv.kind: ("norm_gemv_conv", "o_ffn_gemvs"),
}

GROUPINGS = {
    # The six programs of mlir-air's example for Llama-3.2-1B (credit: `stages.model.parts.builders`).
    "separate": Grouping(
        Chain(_START, _PROMPT, _LOGITS, UNPACK),
        _TOKEN,
        (
            Group("rms_gemms_rope", ("rms_gemms_rope_kv",), prompt=True),
            Group("flash_attn", ("flash_attn",), prompt=True, windowed=True),
            Group("rms_gemm_conv", ("rms_gemm_conv",), prompt=True),
            Group("o_ffn", ("o_ffn",), prompt=True),
            *(Group(name, (name,)) for name in ("rms_gemv_rope", "rms_gemv_conv", "o_gemv_ffn", "lm_head_gemv")),
        ),
    ),
    # Prefill takes three calls per layer, and the host computes the logits. Decode takes layers + 1 calls, because the
    # host computes attention between `rms_gemv_rope` and `o_gemv_ffn`.
    "fused": Grouping(
        Chain(_START, _PROMPT_THIRDS, _LAST_ROW, UNPACK),
        _TOKEN,
        (
            *_PROMPT_PROGRAMS,
            Group("rms_gemv_rope", ("rms_gemv_rope",)),
            Group("rms_gemv_conv", ("rms_gemv_conv",)),
            Group("decode_layer", ("o_gemv_ffn", "rms_gemv_rope")),
            Group("decode_layer_conv", ("o_gemv_ffn", "rms_gemv_conv")),
            Group("decode_last", ("o_gemv_ffn", *_LOGITS)),
        ),
        # For weights that can be joined: fewer and larger products that include norms and residuals; K and V go
        # straight into the cache.
        Grouping(
            Chain(_START, _PROMPT_THIRDS, _LAST_ROW, UNPACK_JOINED),
            Chain(_START, _JOINED_TOKEN, ("norm_lm_head",)),
            (
                *_PROMPT_PROGRAMS,
                Group("decode_first", ("norm_qkv_gemv", "token_attn"), windowed=True),
                Group("decode_first_conv", ("norm_gemv_conv",)),
                Group("decode_layer", ("o_ffn_gemvs", "norm_qkv_gemv", "token_attn"), windowed=True),
                Group("decode_layer_conv", ("o_ffn_gemvs", "norm_gemv_conv")),
                Group("decode_last", ("o_ffn_gemvs", "norm_lm_head")),
            ),
        ),
    ),
}
