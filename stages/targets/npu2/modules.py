"""Programs + a model's dimensions + a bucket -> MLIR-AIR modules. Kernels tile themselves; this wires them together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_npu2.devices.xrt.limits import check_duration
from stages import air
from stages.air import limits
from stages.engine.files import write_json
from stages.engine.places import CONFIG, MODULES
from stages.estimate import price
from stages.kernels import Kernel, Tiling
from stages.model.families import read_config
from stages.model.grouping import WINDOW, Program
from stages.model.grouping import programs as derive_programs
from stages.model.part import Launch, Part
from stages.model.policy import BF16, Policy, parse_policy
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.objects import KERNEL_SET

if TYPE_CHECKING:
    from stages.air import AirModule, Variant
    from stages.air.dialect import LaunchOp

SUFFIX = ".mlir"
COSTS = True

Dimensions = Mapping[str, int | float]


@functools.cache
def fingerprint() -> str:
    """xDSL prints the text."""
    return f"xdsl {version('xdsl')}"


def arguments(programs: Sequence[Program], options: Mapping[str, Any]) -> dict[str, Any]:
    """What `write_module` takes for a library of one program."""
    (program,) = programs
    chosen = {"grouping": options["grouping"], "entry": program.entry, "bucket": program.bucket}
    # Tokens do not multiply with what prompts are multiplied with.
    matmul = options["matmul"] if program.bucket else BF16.matmul
    return {**chosen, "window": program.window, "weights": options["weights"], "matmul": matmul}


def launches(part: Part) -> tuple[Launch, ...]:
    """What a program runs of a part."""
    return part.launches


def sources(programs: Sequence[Program]) -> list[str]:
    """C++ sources of the tile functions that these programs call."""
    parts = [part for program in programs for part in program.parts]
    return sorted({f"{KERNEL_SET}/{launch.kernel.on_array}" for part in parts for launch in part.launches})


def expected(source: str) -> dict[str, Any]:
    """Nothing: an object is asked for by its name and its flags."""
    return {}


def write_module(
    directory: Path,
    library: str,
    work: Path,
    grouping: str,
    entry: str,
    bucket: int | None,
    window: int | None,
    weights: str,
    matmul: str,
    support: Sequence[str] = (),
    priced: bool = True,
) -> None:
    """Step action: MLIR of one program, and beside it what else its build and the manifest need to know, and what the
    estimate says of its launches, both as JSON. Raises UserError where one call would take too long.

    `weights`, `matmul`: a policy's. `support`: C++ sources whose objects it links besides its tile functions. `priced`:
    whether the estimate's time of one call is written too; it is no input of what is built, so that another constant of
    the estimate re-links nothing.
    """
    policy = parse_policy(weights, matmul=matmul)
    write(_module(directory, grouping, entry, (bucket, window), policy), library, work, support, priced)


def write(module: Module, library: str, work: Path, support: Sequence[str] = (), priced: bool = True) -> None:
    """The files of a module below `work`."""
    path = work / MODULES / f"{library}{SUFFIX}"
    path.parent.mkdir(parents=True)
    path.write_text(module.text())
    # A dot in the name is a bucket, not a suffix.
    write_json(path.with_suffix(".json"), description(library, module, support))
    if priced:
        cost = price.description(module)
        check_duration(library, cost["milliseconds"])
        write_json(path.with_suffix(".cost.json"), cost)


def _module(directory: Path, grouping: str, entry: str, sizes: tuple[int | None, int | None], policy: Policy) -> Module:
    config = read_config(directory / CONFIG)
    bucket, window = sizes
    buckets = [bucket] if bucket else ()
    found = derive_programs(config.family, GROUPINGS[grouping], buckets, policy, window or WINDOW)
    program = next(p for p in found if p.entry == entry and p.window == window)
    return build_module(program, config.dimensions())


def description(library: str, module: Module, support: Sequence[str]) -> dict[str, Any]:
    """What lies beside the text."""
    tiles = {variant.object: [f"{KERNEL_SET}/{variant.stem}", *variant.flags()] for variant in module.variants}
    return {
        "programs": {library: {"slots": module.described_slots()}},
        "function": module.name,
        "tilings": [str(tiling) for tiling in module.tilings],
        "objects": tiles | {f"{Path(source).name}.o": [source] for source in support},
        "options": module.options,
    }


@dataclass(frozen=True)
class Module:
    """What the compiler gets: a program, its operations, the kernel and tiling of every launch, options for `aircc`."""

    program: Program
    air: AirModule
    kernels: tuple[Kernel, ...]
    tilings: tuple[Tiling, ...]

    @property
    def name(self) -> str:
        return self.program.entry

    @property
    def variants(self) -> list[Variant]:
        """Object variants to compile, sorted by object name."""
        return sorted(self.air.variants, key=lambda variant: variant.object)

    @functools.cached_property
    def shared_steps(self) -> int:
        """So many steps of each dimension of a launch grid share descriptors: they are issued without awaiting one
        another. Of a prompt's as many as the queue of a channel takes; one where steps of a launch go in two
        dimensions, which takes more descriptors than there are, or moves rows in another order than the module says;
        and fewer where a step's transfer is cut into several. No core may be told which step it is in: the compiler
        would tell it of all these at once."""
        if not self.program.bucket:
            return 16
        stepped = [(launch, sum(size > 1 for size in launch.shape())) for launch in self.air.launches]
        if max(dimensions for _, dimensions in stepped) > 1:
            return 1
        most = max((step_descriptors(launch) for launch, dimensions in stepped if dimensions), default=1)
        return max(1, limits.QUEUE_DEPTH // most)

    @property
    def options(self) -> list[str]:
        """For `aircc`."""
        return [f"--air-runtime-loop-tiling-sizes={self.shared_steps}"] * 2

    def text(self) -> str:
        return air.to_mlir(self.air.module)

    def described_slots(self) -> list[dict[str, Any]]:
        """Slots as the manifest has them: shape and dtype are those of the function's arguments."""
        types = self.air.function.function_type.inputs
        return [
            {"name": slot.name, "shape": list(t.get_shape()), "role": slot.role, "dtype": str(t.element_type)}  # type: ignore[attr-defined]
            for slot, t in zip(self.program.slots, types, strict=True)
        ]


def step_descriptors(launch: LaunchOp) -> int:
    """That a step's longest transfer from or to DDR takes. Loops around it go in the dimensions that its pattern leaves
    to a descriptor, where a size that the field does not hold takes two; loops beyond that are cut."""
    from xdsl.dialects import scf

    from stages.air import analysis

    name = analysis.name_of(analysis.segment_of(launch), "launch")
    most = 1
    for move in analysis.moves(launch):
        loops = [loop for loop in analysis.walk_ops(launch, scf.ForOp) if loop.is_ancestor(move)]
        counts = [analysis.trip_count(loop, name) for loop in loops]
        for side, _ in analysis.ends(move, name):
            sizes = [*counts, *(size for size, _ in side.dims)]
            taken = sum(1 if size <= limits.SHIM_DMA.wrap else 2 for size in sizes)
            if side.space == air.L3 and taken > limits.SHIM_DMA.dimensions:
                most = max([most, *map(limits.descriptors, counts)])
    return most


def build_module(program: Program, dimensions: Dimensions) -> Module:
    """The module of a program. Where its rows begin is data: what depends on the position is bound from there on.

    `dimensions`: of `Config.dimensions`. UserError names the hardware limit that a shape breaks.
    """
    rows = program.bucket or 1
    known = {**dimensions, "seq": rows, "max_seq": rows, "window": program.window or 0, "pos": 0}
    launches = list(_launches(program, known))
    tilings = [_tile(kernel, sizes) for kernel, _, sizes in launches]
    parts = [(_program(k, tiling), args) for (k, args, _), tiling in zip(launches, tilings, strict=True)]
    stitched = air.stitch(program.entry, [slot.name for slot in program.slots], parts)
    if program.bucket:
        air.reserve_channel_names(stitched.module)
    return Module(program, stitched, tuple(kernel for kernel, _, _ in launches), tuple(tilings))


def _launches(program: Program, known: Dimensions) -> Iterator[tuple[Kernel, dict[str, str], dict[str, Any]]]:
    """Kernel, its arguments' slots in the program, and its scalars as numbers."""
    for part, wired in zip(program.parts, program.wiring, strict=True):
        for launch in part.launches:
            args = {arg: wired[slot] for arg, slot in launch.args.items()}
            yield launch.kernel, args, {k: known[v] if isinstance(v, str) else v for k, v in launch.scalars.items()}


def _tile(kernel: Kernel, sizes: Mapping[str, Any]) -> Tiling:
    if kernel.tiling is None:
        raise TypeError(f"kernel {kernel.name} has no program for the array")
    return kernel.tiling(sizes)


def _program(kernel: Kernel, tiling: Tiling) -> AirModule:
    assert kernel.program is not None
    return kernel.program(tiling)
