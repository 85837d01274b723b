"""Target `cpu`: native shared objects, AVX512-BF16, AVX2 or portable code chosen at run time.

Each device part is a program of its own, which fuses its launches where the host's kernels can.
"""

from stages.model.decoder import Attention, ShortConv
from stages.model.grouping import Chain, Group, Grouping
from stages.model.parts.builders import SCALE_LOGITS_ROWS
from stages.targets import Target
from stages.targets.cpu.toolchain import host_system, need_host_compiler

_START, _END = ("embed_tokens",), ("final_norm", "lm_head_gemv")
_PROMPT = {
    Attention.kind: ("rms_gemms_rope", "flash_attn_panels", "o_ffn"),
    ShortConv.kind: ("rms_gemm_conv", "o_ffn"),
}
_TOKEN = {
    Attention.kind: ("rms_gemv_attn_panels", "o_gemv_ffn"),
    ShortConv.kind: ("rms_gemv_conv", "o_gemv_ffn"),
}
_ROW_LOGITS = Chain((), dict.fromkeys(_PROMPT, ()), ("final_norm_rows", "lm_head_gemm"), scale=SCALE_LOGITS_ROWS)
_DEVICE = (
    *_PROMPT[Attention.kind],
    "rms_gemv_attn_panels",
    "rms_gemm_conv",
    "rms_gemv_conv",
    "o_gemv_ffn",
    "lm_head_gemv",
    "lm_head_gemm",
)

TARGET = Target(
    name="cpu",
    device="cpu",
    kernel_set="cpu",
    static=False,
    groupings={
        "separate": Grouping(
            Chain(_START, _PROMPT, _END),
            Chain(_START, _TOKEN, _END),
            tuple(Group(name, (name,)) for name in _DEVICE),
            row_logits=_ROW_LOGITS,
        )
    },
    default_grouping="separate",
    built_on=host_system,
    suits=lambda model: True,
    need_tools=need_host_compiler,
)
