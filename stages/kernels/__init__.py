"""One module per kernel: AIR builder, tile plan and numpy reference side by side. Here: every kernel's signature.

A kernel is known by name to every target; `kernel_src/<target>/<source>.cc` implements it. The signatures are apart
from the modules because a build that is up to date needs them and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arg:
    """A tensor argument. `layouts`: (target, how a weight's bytes are arranged there), see `stages.layouts`."""

    name: str
    dtype: str = "bf16"
    written: bool = False
    layouts: tuple[tuple[str, str], ...] = ()

    def layout(self, target: str) -> str:
        return dict(self.layouts).get(target, "plain")


@dataclass(frozen=True)
class Kernel:
    """Signature of a kernel: tensor arguments in order, then scalar parameters in order.

    `source` is the stem of the C++ file that defines it (one file may define several entry points).
    """

    name: str
    args: tuple[Arg, ...]
    params: tuple[str, ...]
    source: str


def _kernel(name: str, inputs: tuple[Arg | str, ...], params: str, out: str = "bf16", source: str = "") -> Kernel:
    args = tuple(Arg(arg) if isinstance(arg, str) else arg for arg in inputs)
    return Kernel(name, (*args, Arg("out", out, written=True)), tuple(params.split()), source or name)


def _panels(name: str) -> Arg:
    """A weight matrix that host kernels read in panels."""
    return Arg(name, layouts=(("cpu", "panels"),))


_WEIGHT = _panels("weight")
_CACHE = ("k_panels", "v_panels")

_KERNELS = (
    _kernel("rms_norm", ("x", "weight"), "rows cols eps"),
    _kernel("gemm", ("x", _WEIGHT), "rows cols out_cols"),
    _kernel("gemm_add", ("x", _WEIGHT, "residual"), "rows cols out_cols", source="gemm"),
    _kernel("gemm_silu", ("x", _panels("gate"), _panels("up")), "rows cols out_cols", source="gemm"),
    _kernel("gemv", (_WEIGHT, "x"), "out_cols cols"),
    _kernel("gemv_add", (_WEIGHT, "x", "residual"), "out_cols cols", source="gemv"),
    _kernel("gemv_silu", (_panels("gate"), _panels("up"), "x"), "out_cols cols", source="gemv"),
    _kernel("gemv_f32", (_WEIGHT, "x"), "out_cols cols", out="f32", source="gemv"),
    _kernel("gemv_rows_f32", ("weight", "x"), "out_cols cols", out="f32", source="gemv_rows"),
    _kernel("rope", ("x", Arg("table", "f32")), "rows pos heads head_dim"),
    _kernel("silu_and_mul", ("gate", "up"), "rows cols"),
    _kernel("add", ("a", "b"), "rows cols"),
    _kernel("flash_attention", ("q", "k", "v"), "seq pos heads kv_heads head_dim"),
    _kernel("flash_attention_panels", ("q", *_CACHE), "seq pos heads kv_heads head_dim", source="flash_attention"),
    _kernel("decode_attention_panels", ("q", *_CACHE), "pos heads kv_heads head_dim", source="decode_attention"),
    _kernel("decode_attention_kv", ("q", "kv"), "pos heads kv_heads head_dim", source="decode_attention"),
    Kernel(
        "append_kv_panels",
        (Arg("k"), Arg("v"), *(Arg(name, written=True) for name in _CACHE)),
        ("rows", "pos", "kv_heads", "head_dim"),
        "append_kv_panels",
    ),
    Kernel("append_kv", (Arg("k"), Arg("v"), Arg("kv", written=True)), ("pos", "kv_heads", "head_dim"), "append_kv"),
    _kernel("embed", (Arg("tokens", "i32"), _WEIGHT), "rows cols vocab"),
    _kernel("embed_rows", (Arg("tokens", "i32"), "weight"), "rows cols vocab"),
)

KERNELS = {kernel.name: kernel for kernel in _KERNELS}


def kernel(name: str) -> Kernel:
    """Look a signature up by kernel name."""
    return KERNELS[name]
