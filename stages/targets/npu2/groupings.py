"""The groupings of the NPU: which parts run in which order, and which of them share a program."""

from dataclasses import replace

from stages.air import limits
from stages.kernels.tokens import COUNTS
from stages.model.decoder import Attention, ShortConv
from stages.model.grouping import Chain, Group, Grouping
from stages.model.part import UNPACK, UNPACK_JOINED
from stages.model.parts.builders import BATCHED, SCALE_LOGITS_ROWS, WIDE, attention_of

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

_JOINED_TOKENS = {kind: tuple(f"{BATCHED}{name}" for name in names) for kind, names in _JOINED_TOKEN.items()}
_AFTER = f"{BATCHED}o_ffn_gemvs"


def _after(count: int) -> str:
    """Return the part after the mixer of so many tokens."""
    return WIDE if count > limits.ROWS else _AFTER


def _tokens(count: int) -> Chain:
    layers = {kind: (*first, _after(count)) for kind, (*first, _) in _JOINED_TOKENS.items()}
    return Chain(_START, layers, (f"{BATCHED}norm_lm_head",), scale=SCALE_LOGITS_ROWS)


def _sequences(count: int) -> Chain:
    parts = f"{BATCHED}norm_qkv_gemv", attention_of(count), _after(count)
    return replace(_tokens(count), layers={Attention.kind: parts})


_TOKENS, _SEQUENCES = ({count: chain(count) for count in COUNTS} for chain in (_tokens, _sequences))


def _groups_of_sequences(count: int, chain: Chain) -> tuple[Group, ...]:
    """Return the programs for a token of each of so many sequences, but for the last one, which tokens of one have."""
    *first, after = chain.layers[Attention.kind]
    return (
        Group(f"sequences_{count}_first", tuple(first), windowed=True, several=True),
        Group(f"sequences_{count}_layer", (after, *first), windowed=True, several=True),
    )


def _joined_groups(kind: str, prefix: str = "", **afters: str) -> tuple[Group, ...]:
    """Return the programs of a token, or of several, with joined weights.

    Args:
        prefix: what the names of their parts begin with; nothing for those of one token.
        afters: further parts that may come after the mixer, by what names of programs with them begin with.
    """
    several = bool(prefix)
    first, conv = (f"{prefix}norm_qkv_gemv", f"{prefix}token_attn"), f"{prefix}norm_gemv_conv"
    groups = [
        Group(f"{kind}_first", first, windowed=True, several=several),
        Group(f"{kind}_first_conv", (conv,), several=several),
    ]
    for name, after in {kind: f"{prefix}o_ffn_gemvs", **{f"{w}_{kind}": part for w, part in afters.items()}}.items():
        groups += [
            Group(f"{name}_layer", (after, *first), windowed=True, several=several),
            Group(f"{name}_layer_conv", (after, conv), several=several),
            Group(f"{name}_last", (after, f"{prefix}norm_lm_head"), several=several),
        ]
    return tuple(groups)


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
                *_joined_groups("decode"),
                *_joined_groups("tokens", BATCHED, wide=WIDE),
                *(group for each in _SEQUENCES.items() for group in _groups_of_sequences(*each)),
            ),
            tokens=_TOKENS,
            sequences=_SEQUENCES,
        ),
    ),
}
