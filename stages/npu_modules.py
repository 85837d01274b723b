"""ELF descriptions + model dimensions + sequence bucket -> the MLIR modules of the NPU, in a chosen grouping.

Knows which launches share a module and how a description's slots look in the NPU's DDR; the kernels plan themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from runtime.errors import UserError
from stages.air.builder import Program, memref_type
from stages.air.externs import Variant
from stages.air.printer import to_mlir
from stages.air.stitch import stitch
from stages.elfs import all_elfs
from stages.kernels import add, flash_attention, gemm, gemv, rms_norm, rope, silu_and_mul
from stages.layouts_npu import padded_shape

BUCKETS = (128, 512, 2048)

Dimensions = Mapping[str, int | float]
Part = tuple[str, dict[str, str]]
"""An ELF description and new names for some of its slots; parts that use one name share the slot."""

_PROJECT: Part = ("rms_gemms_rope", {"k_roped": "kv", "v": "kv"})
_ATTEND: Part = ("flash_attn", {"k": "kv", "v": "kv"})
"""Prefill keeps K and V interleaved by head in one slot, so that attention needs one stream per column."""


@dataclass(frozen=True)
class Group:
    """One module: its function's name, the descriptions it joins, whether its shapes depend on the bucket, and the
    results of one part that only another part reads."""

    name: str
    parts: tuple[Part, ...]
    prefill: bool = False
    inside: tuple[str, ...] = ()


GROUPINGS: dict[str, tuple[Group, ...]] = {
    "spec": (
        Group("rms_gemms_rope", (_PROJECT,), prefill=True),
        Group("flash_attn", (_ATTEND,), prefill=True),
        Group("o_ffn", (("o_ffn", {}),), prefill=True),
        *(Group(name, ((name, {}),)) for name in ("rms_gemv_rope", "o_gemv_ffn", "lm_head_gemv")),
    ),
    "fused": (
        Group(
            "prefill_layer",
            (_PROJECT, ("flash_attn", {"k": "kv", "v": "kv", "q": "q_roped"}), ("o_ffn", {"x_residual": "x_in"})),
            prefill=True,
            inside=("q_roped", "attn_out"),
        ),
        Group("rms_gemv_rope", (("rms_gemv_rope", {}),)),
        Group("decode_layer", (("o_gemv_ffn", {}), ("rms_gemv_rope", {"x_in": "output"}))),
        Group(
            "decode_last",
            (("o_gemv_ffn", {}), ("final_norm", {"x": "output"}), ("lm_head_gemv", {"x": "normed"})),
            inside=("output", "normed"),
        ),
    ),
}
"""`fused`: a prompt takes one call per layer, all of one program, and the host makes its logits; a token takes
`layers` + 1 calls, because the host attends between `rms_gemv_rope` and `o_gemv_ffn`: first `rms_gemv_rope`, then a
`decode_layer` per layer but the last, then `decode_last`."""


@dataclass(frozen=True)
class NpuSlot:
    """An argument of a module: shape and byte order in DDR. `layout`: plain, or blocks (`layouts_npu`)."""

    name: str
    shape: tuple[int, ...]
    role: str
    dtype: str = "bf16"
    layout: str = "plain"


@dataclass(frozen=True)
class NpuModule:
    """What the compiler gets: a program, its slots in order, the tile plan of every launch, options for `aircc`."""

    name: str
    program: Program
    slots: tuple[NpuSlot, ...]
    plans: tuple[object, ...]
    options: tuple[str, ...]

    @property
    def variants(self) -> list[Variant]:
        """Object variants to compile, sorted by object name."""
        return sorted(self.program.variants, key=lambda variant: variant.object)

    def text(self) -> str:
        return to_mlir(self.program.module)

    def slot(self, name: str) -> NpuSlot:
        return next(slot for slot in self.slots if slot.name == name)


@dataclass(frozen=True)
class _Wired:
    """A launch whose arguments name the module's slots and whose scalars are numbers."""

    kernel: str
    args: dict[str, str]
    scalars: dict[str, int | float]

    def integer(self, name: str) -> int:
        return int(self.scalars[name])


def groups(grouping: str) -> tuple[Group, ...]:
    if grouping not in GROUPINGS:
        raise UserError(f"grouping={grouping}: choose one of {', '.join(GROUPINGS)}")
    return GROUPINGS[grouping]


def modules(dimensions: Dimensions, grouping: str = "fused", bucket: int = BUCKETS[-1]) -> Iterator[NpuModule]:
    """The modules of a grouping; those that are not prefill's do not depend on `bucket`."""
    for group in groups(grouping):
        yield build_module(group, dimensions, bucket)


def build_module(group: Group, dimensions: Dimensions, bucket: int, pos: int = 0, bfp16: bool = False) -> NpuModule:
    """One module for `bucket` rows whose first position is `pos` (decode modules ignore both).

    `dimensions`: the names `stages.elfs` uses (vocab, emb, ffn, heads, kv_heads, head_dim, q_dim, kv_dim, eps).
    `bfp16`: see `gemm.Plan`. UserError names the hardware limit that a shape breaks.
    """
    known = {**dimensions, "seq": bucket, "max_seq": pos + bucket, "pos": pos, "bfp16": bfp16}
    launches = [wired for name, renamed in group.parts for wired in _wire(name, renamed, known)]
    plans = [_PLANS[wired.kernel](wired) for wired in launches]
    slots = module_slots(group, known)
    types = {slot.name: memref_type(slot.shape, slot.dtype) for slot in slots}
    parts = [(_PROGRAMS[w.kernel](plan), _wiring(w)) for w, plan in zip(launches, plans, strict=True)]
    program = stitch(group.name, types, parts)
    return NpuModule(group.name, program, tuple(slots), tuple(plans), options(group))


def options(group: Group) -> tuple[str, ...]:
    """Options for `aircc`: how many steps of a launch grid share the descriptors of a shim channel."""
    steps = 2 if group.prefill else 16
    return (f"--air-runtime-loop-tiling-sizes={steps}",) * 2


def _wire(elf: str, renamed: Mapping[str, str], known: Dimensions) -> Iterator[_Wired]:
    for launch in all_elfs()[elf].launches:
        args = {arg: renamed.get(slot, slot) for arg, slot in launch.args.items()}
        scalars = {key: known[v] if isinstance(v, str) else v for key, v in launch.scalars.items()}
        yield _Wired(launch.kernel.name, args, {**known, **scalars})


def _wiring(wired: _Wired) -> dict[str, str]:
    """Argument of the program -> slot. Attention takes K and V as one."""
    if wired.kernel != "flash_attention":
        return wired.args
    return {"q": wired.args["q"], "kv": wired.args["k"], "out": wired.args["out"]}


def module_slots(group: Group, known: Dimensions) -> list[NpuSlot]:
    """Slots of all parts, each name once. A slot that a part hands on keeps the role it was made with."""
    slots: dict[str, NpuSlot] = {}
    for elf_name, renamed in group.parts:
        elf = all_elfs()[elf_name]
        for slot in elf.slots:
            name = renamed.get(slot.name, slot.name)
            shape = tuple(int(known[dim] if isinstance(dim, str) else dim) for dim in slot.shape)
            role = "scratch" if name in group.inside else slot.role
            slots.setdefault(name, _in_ddr(NpuSlot(name, shape, role, slot.dtype), group, known))
    return list(slots.values())


def _in_ddr(slot: NpuSlot, group: Group, known: Dimensions) -> NpuSlot:
    """How a described slot lies in the NPU's memory."""
    match slot:
        case NpuSlot(name="kv"):
            return replace(slot, shape=(int(known["max_seq"]), 2 * int(known["kv_dim"])))
        case NpuSlot(role="table"):
            # The rows of the current positions: the host binds them, so that no position is compiled in.
            rows = (int(known["seq"]),) if group.prefill else ()
            return replace(slot, shape=(*rows, slot.shape[-1]))
        case NpuSlot(name="w_vocab" | "logits"):
            return replace(slot, shape=padded_shape(slot.shape))
        case NpuSlot(role="weight", shape=(_, _)):
            return replace(slot, layout="blocks")
    return slot


def _plan_gemm(w: _Wired) -> gemm.Plan:
    shape, bfp16 = (w.integer("rows"), w.integer("cols"), w.integer("out_cols")), bool(w.scalars["bfp16"])
    if w.args["out"] == "kv":
        return gemm.plan(*shape, w.integer("head_dim"), w.integer("pos"), bfp16)
    return gemm.plan(*shape, bfp16=bfp16)


def _plan_rope(w: _Wired) -> rope.Plan:
    interleaved = w.args["out"] == "kv"
    first = w.integer("pos") if interleaved else 0
    return rope.plan(w.integer("rows"), w.integer("heads"), w.integer("head_dim"), interleaved, first)


_PLANS: dict[str, Callable[[_Wired], Any]] = {
    "rms_norm": lambda w: rms_norm.plan(w.integer("rows"), w.integer("cols"), float(w.scalars["eps"])),
    "gemm": _plan_gemm,
    "gemv": lambda w: gemv.plan(w.integer("out_cols"), w.integer("cols")),
    "gemv_f32": lambda w: gemv.plan(w.integer("out_cols"), w.integer("cols"), "f32", blocked=False),
    "rope": _plan_rope,
    "silu_and_mul": lambda w: silu_and_mul.plan(w.integer("rows"), w.integer("cols")),
    "add": lambda w: add.plan(w.integer("rows"), w.integer("cols")),
    "flash_attention": lambda w: flash_attention.plan(
        w.integer("seq"), w.integer("heads"), w.integer("kv_heads"), w.integer("head_dim"), w.integer("pos")
    ),
}

_PROGRAMS: dict[str, Callable[[Any], Program]] = {
    "rms_norm": rms_norm.build,
    "gemm": gemm.build,
    "gemv": gemv.build,
    "gemv_f32": gemv.build,
    "rope": rope.build,
    "silu_and_mul": silu_and_mul.build,
    "add": add.build,
    "flash_attention": flash_attention.build,
}
