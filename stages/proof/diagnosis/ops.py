"""The operations of a plan: each launch of each call, fused as the programs of an artifact directory have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import LOGITS, PREFILL, PREFILL_CHUNK, SEQUENCES, TOKENS, Phase, PlannedCall
from llama_npu2.frozen import frozen
from stages.engine.places import CONFIG
from stages.graph import Build
from stages.kernels import HOST_SET, Arg, Kernel, kernels, kv_rows
from stages.kernels.grouped import GROUPED
from stages.model.families import read_config
from stages.model.grouping import Chain, Grouping, Placed, Program, chained, cover
from stages.model.importers import PLAIN
from stages.model.part import KV, Launch, Slot
from stages.targets import Target
from stages.weights.formats import w8a8

PLAIN_FORMATS = {"i32", *PLAIN}


@frozen(eq=False)
class Op:
    """One launch of one call of a phase. `slots`, `names` and `buffers` are by the kernel's arguments."""

    phase: Phase
    call: int
    """The call's place in the phase, from 0."""
    index: int
    """The launch's place in the call, from 0."""
    program: str
    layer: int | None
    """From 0; None outside of the layers."""
    launch: Launch
    slots: Mapping[str, Slot]
    """The part's description of each argument (slot)."""
    names: Mapping[str, str]
    """Each argument's name in the program."""
    buffers: Mapping[str, str]
    """The buffer that is bound to each argument."""
    window: int | None
    """The context bucket of the program, where it attends over one."""
    kernel_set: str
    """The kernel set that computes it."""

    @property
    def kernel(self) -> Kernel:
        """The kernel that is launched."""
        return self.launch.kernel

    @property
    def format(self) -> str:
        """The format of the weights or the cache that it reads, where it is not a plain one; else bf16."""
        return next((arg.format for arg in self.kernel.args if arg.format not in PLAIN_FORMATS), "bf16")

    @property
    def base(self) -> str:
        """The kernel that computes the same on bf16 weights and caches, if there is one; else its own."""
        return self.operation if self.operation in kernels() else self.kernel.name

    @property
    def operation(self) -> str:
        """The operation, whatever the format."""
        return self.kernel.operation

    @property
    def judged_by(self) -> Kernel:
        """The kernel whose reference it is compared with."""
        return kernels()[self.base] if self.of_values and not self.in_numbers else self.kernel

    @property
    def in_numbers(self) -> bool:
        """Whether the array reads or writes a KV cache in whole numbers, which it multiplies as such."""
        of_cache = any(slot.keeps == KV and kv_rows.in_numbers(slot.format) for slot in self.slots.values())
        return of_cache and self.kernel_set != HOST_SET

    @property
    def of_values(self) -> bool:
        """Whether that reference takes weights as values: products that round `x` and unpacking take stored ones."""
        return self.format == "bf16" or (self.base != self.kernel.name and not self.in_eight_bits)

    @property
    def fixed_point(self) -> bool:
        """Whether it takes `x` in fixed point, as the host's products with group-wise weights do."""
        in_panels = any(arg.matrix and arg.layout(HOST_SET) == "panels" for arg in self.kernel.args)
        on_host = self.kernel_set == HOST_SET and in_panels and self.format in {form.name for form in GROUPED}
        return on_host and not self.in_eight_bits

    @property
    def in_eight_bits(self) -> bool:
        """Whether it rounds `x` to 8 bits."""
        whole = self.format == w8a8.FORMAT.name and any(arg.name == "x" for arg in self.kernel.args)
        return whole or self.kernel.activations == "int8"

    @property
    def written(self) -> tuple[Arg, ...]:
        """Arguments that it writes."""
        return tuple(arg for arg in self.kernel.args if arg.written)

    @property
    def read(self) -> tuple[Arg, ...]:
        """Arguments that it reads."""
        return tuple(arg for arg in self.kernel.args if not arg.written)

    @property
    def ends_layer(self) -> str:
        """The argument that holds the layer's output, or nothing if no argument does."""
        return next((arg.name for arg in self.written if self.slots[arg.name].buffer == "x.{next}"), "")

    @property
    def fused(self) -> bool:
        """Whether it computes several launches of the part in one, so that intermediate results are not in memory."""
        return self.kernel_set == HOST_SET and self.operation.endswith(("_add", "_silu"))

    @property
    def place(self) -> str:
        """Where it is, for people. Layers count from 0, as in names of tensors."""
        where = "outside of the layers" if self.layer is None else f"layer {self.layer}"
        return f"launch {self.index + 1} of {self.program}, {where}, {self.phase}"

    @property
    def does(self) -> str:
        """The computation, with the program's names: `gemm_add(attn_out, wo, x_residual) -> res1`."""
        slots = self.names
        reads = ", ".join(slots[arg.name] for arg in self.read)
        return f"{self.kernel.name}({reads}) -> {', '.join(slots[arg.name] for arg in self.written)}"


def ops(build: Build, manifest: Manifest, unfused: str = "") -> dict[Phase, list[list[Op]]]:
    """Return the operations of each call of each phase; those of the program `unfused` without fusion."""
    programs = {program.name: (program, library.target) for library in build.libraries for program in library.programs}
    config = read_config(build.directory / CONFIG)

    def phase(name: Phase, calls: Sequence[PlannedCall]) -> Iterator[list[Op]]:
        chain = _chain(build.grouping, name)
        placed = cover(chained(config, chain, build.policy), build.grouping.groups)
        for at, (call, (_, parts)) in enumerate(zip(calls, placed, strict=True)):
            program, target = programs[call.program]
            yield list(_launches(name, at, call, parts, program, target, call.program != unfused))

    return {name: list(phase(name, calls)) for name, calls in manifest.plans.items()}


def _chain(grouping: Grouping, phase: Phase) -> Chain:
    if phase == PREFILL_CHUNK:
        return replace(grouping.prompt, end=())
    if phase.kind == LOGITS.kind:
        assert grouping.row_logits
        return grouping.row_logits
    if phase.kind == SEQUENCES:
        return grouping.sequences[phase.rows]
    if phase.kind == TOKENS:
        return grouping.tokens[phase.rows]
    return grouping.prompt if phase.kind == PREFILL.kind else grouping.token


def _launches(
    phase: Phase,
    at: int,
    call: PlannedCall,
    parts: Sequence[Placed],
    program: Program,
    target: Target,
    fused: bool,
) -> Iterator[Op]:
    bound = {slot.name: name for slot, name in zip(program.slots, call.names, strict=True)}
    index = 0
    for placed, wired in zip(parts, program.wiring, strict=True):
        for launch in target.modules.launches(placed.part) if fused else placed.part.launches:
            names = {arg: wired[slot] for arg, slot in launch.args.items()}
            slots = {arg: placed.part.slot(slot) for arg, slot in launch.args.items()}
            yield Op(
                phase=phase,
                call=at,
                index=index,
                program=program.name,
                layer=placed.layer if placed.inside else None,
                launch=launch,
                slots=slots,
                names=names,
                buffers={arg: bound[name] for arg, name in names.items()},
                window=program.context,
                kernel_set=HOST_SET if program.host else target.kernel_set,
            )
            index += 1
