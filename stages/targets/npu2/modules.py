"""Generates the MLIR-AIR module of a program, for a model's dimensions and a bucket.

Kernels tile themselves; this module wires them together.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_npu2.devices.xrt.limits import check_duration
from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.files import write_json
from stages.engine.places import CONFIG, MODULES
from stages.estimate import price
from stages.kernels import Kernel, Tiling
from stages.model.families import read_config
from stages.model.grouping import CONTEXT_BUCKET, Program
from stages.model.grouping import programs as derive_programs
from stages.model.part import Launch, Part
from stages.model.policy import BF16, parse_policy
from stages.targets.npu2 import KERNEL_SET
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.levels import level_of

if TYPE_CHECKING:
    from stages.air import AirModule, Variant
    from stages.air.dialect import LaunchOp

SUFFIX = ".mlir"
COSTS = True

Dimensions = Mapping[str, int | float]


@functools.cache
def fingerprint() -> str | None:
    """Return the version of xDSL, which prints the text; None without it."""
    try:
        return f"xdsl {version('xdsl')}"
    except PackageNotFoundError:
        return None


def arguments(programs: Sequence[Program], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `write_module` for a library of one program."""
    (program,) = programs
    return {
        "grouping": options["grouping"],
        "entry": program.entry,
        "bucket": program.bucket,
        "window": program.context,
        "weights": options["policy"]["weights"],
        # `npu.matmul=` is for prefill only.
        "matmul": options["policy"]["matmul"] if program.bucket and not program.several else BF16.matmul,
        **({"kv": options["policy"]["kv"]} if options["policy"]["kv"] != BF16.kv else {}),
        **({"slides": True} if program.sliding else {}),
        **({"several": True} if program.several else {}),
    }


def launches(part: Part) -> tuple[Launch, ...]:
    """Return the launches that a program makes for a part."""
    return part.launches


def sources(programs: Sequence[Program], sets: Sequence[str] = ()) -> list[str]:
    """Return the C++ sources of the tile functions that these programs call."""
    parts = [part for program in programs for part in program.parts]
    stems = {stem for part in parts for launch in part.launches for stem in launch.kernel.on_array}
    return sorted(f"{KERNEL_SET}/{stem}" for stem in stems)


def expected(source: str) -> dict[str, Any]:
    """Return the level at which Peano optimises a source; else an object is asked for by its name and its flags."""
    return {"level": level_of(source)}


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
    slides: bool = False,
    several: bool = False,
    kv: str = BF16.kv,
    support: Sequence[str] = (),
    priced: bool = True,
) -> None:
    """Write the MLIR of one program, its description and its estimated times, the last two as JSON (step action).

    Args:
        directory: The artifact directory with the configuration.
        window: The context bucket of the program; None without attention over the KV cache.
        weights: Text of the policy, as `matmul`.
        slides: Whether it sees the KV cache from the beginning of its window on.
        several: Whether `bucket` is a number of tokens, which have the arithmetic of one.
        kv: The KV cache, as `Policy.kv`.
        support: C++ sources whose objects the program links besides its tile functions.
        priced: Whether to write the estimated times. They are no input of the build, so that a changed constant of the
            estimate re-links nothing.

    Raises:
        UserError: One call would take too long.
    """
    config, rows = read_config(directory / CONFIG), (bucket,) if bucket else ()
    chosen = GROUPINGS[grouping]
    # Tokens of one sequence first, since not every model has programs for those of several.
    ways = [replace(chosen, counts=rows), replace(chosen, together=rows)] if several else [chosen]
    policy, positions = parse_policy(weights, kv, matmul), config.max_seq if slides else window or CONTEXT_BUCKET
    programs = (p for way in ways for p in derive_programs(config, way, () if several else rows, policy, positions))
    program = next(
        p for p in programs if (p.entry, p.context, bool(p.sliding), p.several) == (entry, window, slides, several)
    )
    write(build_module(program, config.dimensions()), library, work, support, priced)


def write(module: Module, library: str, work: Path, support: Sequence[str] = (), priced: bool = True) -> None:
    """Write the files of a module below `work`."""
    path = work / MODULES / f"{library}{SUFFIX}"
    path.parent.mkdir(parents=True)
    path.write_text(module.text())
    # A dot in the name is a bucket, not a suffix.
    write_json(path.with_suffix(".json"), description(library, module, support))
    if priced:
        cost = price.description(module)
        check_duration(library, cost["milliseconds"])
        write_json(path.with_suffix(".cost.json"), cost)


def description(library: str, module: Module, support: Sequence[str]) -> dict[str, Any]:
    """Return the JSON next to the text: what the build and the manifest need to know of a module."""
    tiles = {variant.object: [f"{KERNEL_SET}/{variant.stem}", *variant.flags()] for variant in module.variants}
    return {
        "programs": {library: {"slots": module.described_slots()}},
        "function": module.name,
        "tilings": [str(tiling) for tiling in module.tilings],
        "objects": tiles | {f"{Path(source).name}.o": [source] for source in support},
        "options": module.options,
    }


@frozen
class Module:
    """The input of the compiler: a program, its operations, and the kernel and tiling of every launch."""

    program: Program
    air: AirModule
    """The operations."""
    kernels: tuple[Kernel, ...]
    """The kernel of each launch that a part describes; `tilings` alike."""
    tilings: tuple[Tiling, ...]
    code_bytes: Sequence[int] = ()
    """The bytes of code that each launch loads into its cores, if the program is compiled."""

    @property
    def name(self) -> str:
        return self.program.entry

    @property
    def variants(self) -> list[Variant]:
        """The object variants to compile, sorted by object name."""
        return sorted(self.air.variants, key=lambda variant: variant.object)

    @functools.cached_property
    def shared_steps(self) -> tuple[int, int]:
        """Return how many steps of each dimension of a launch grid are issued at most before one is awaited.

        Tokens: 16. Prompts: one of the first dimension, because the compiler moves rows in another order than the
        module says if there are more; as many of the second as every launch can queue. No core may be told which step
        it is in, because the compiler would tell it of N steps at once.
        """
        of_tokens = self.program.several or not self.program.bucket
        return (16, 16) if of_tokens else steps_together(self.air.launches)

    @property
    def options(self) -> list[str]:
        """Additional options of `aircc`."""
        return tiling_options(self.shared_steps)

    def text(self) -> str:
        """Return the MLIR."""
        return air.to_mlir(self.air.module)

    def described_slots(self) -> list[dict[str, Any]]:
        """Return the arguments (slots) as the manifest has them, with shapes and dtypes of the function's arguments."""
        types = self.air.function.function_type.inputs
        return [
            {"name": slot.name, "shape": list(t.get_shape()), "role": slot.role, "dtype": str(t.element_type)}  # type: ignore[attr-defined]
            for slot, t in zip(self.program.slots, types, strict=True)
        ]


def tiling_options(shared_steps: Sequence[int]) -> list[str]:
    """Return the options of `aircc` for `Module.shared_steps`."""
    return [f"--air-runtime-loop-tiling-sizes={steps}" for steps in shared_steps]


def steps_together(launches: Sequence[LaunchOp]) -> tuple[int, int]:
    """Return `Module.shared_steps` for launches whose steps fit the queues of the shims' channels.

    All steps of a transfer take the descriptors of one where they follow one another in the dimension of a descriptor
    that advances whenever it is run. A transfer that shares its channel with others takes turns with them, so each of
    its steps has its own.
    """
    most = limits.ITERATIONS - 1
    for launch in launches:
        channels = step_transfers(launch).values() if launch.shape()[1] > 1 else ()
        for transfers in channels:
            if len(transfers) > 1 or not transfers[0].advances:
                most = min(most, limits.QUEUE_DEPTH // sum(transfer.descriptors for transfer in transfers))
    return 1, max(1, most)


@frozen
class StepTransfer:
    """A transfer between DDR and a channel of a shim, in one step of a launch."""

    descriptors: int
    """How many descriptors it queues."""
    advances: bool
    """Whether its last descriptor has a dimension left in which it can advance by a step of the launch."""


def step_transfers(launch: LaunchOp) -> dict[object, list[StepTransfer]]:
    """Return what a step of a launch queues, by the channel of a shim, in order.

    The loops around a transfer use the dimensions of a descriptor that its access pattern leaves free; a size that its
    field does not hold takes two dimensions. Where dimensions run out, a loop is cut into several descriptors.
    """
    from xdsl.dialects import scf

    from stages.air import access, analysis
    from stages.air.occupancy import Segment

    op = analysis.segment_of(launch)
    name = analysis.name_of(op, "launch")
    segment = Segment(op, name)
    queued: dict[object, list[StepTransfer]] = defaultdict(list)
    for transfer in segment.transfers:
        end = transfer.side(air.L3)
        if end is None:
            continue
        side, _ = end
        loops = [loop for loop in analysis.walk_ops(launch, scf.ForOp) if loop.is_ancestor(transfer.op)]
        counts = [analysis.trip_count(loop, name) for loop in loops]
        sizes = [*counts, *(size for size, _ in segment.one_part(transfer, side))]
        dimensions = sum(1 if size <= limits.SHIM_DMA.wrap else 2 for size in sizes)
        cut = dimensions > limits.SHIM_DMA.dimensions
        stride = access.stride_of_steps(transfer.op, side, name)
        most = limits.SHIM_DMA.stride * limits.GRANULARITY_BYTES // analysis.element_bytes(side.kind)
        advances = not cut and stride is not None and stride <= most
        count = max(map(limits.descriptors, counts), default=1) if cut else 1
        queued[transfer.stream()].append(StepTransfer(count, advances))
    return queued


def build_module(program: Program, dimensions: Dimensions) -> Module:
    """Return the module of a program.

    The position of its first row is data: buffers that depend on it are bound from that position on.

    Args:
        dimensions: From `Config.dimensions`.

    Raises:
        UserError: Names the hardware limit that a shape breaks.
    """
    rows = program.bucket or 1
    sizes = {**dimensions, "seq": rows, "max_seq": rows, "window": program.context or 0, "pos": 0}
    launches = list(_launches(program, sizes))
    tilings = [_tile(program, kernel, scalars) for kernel, _, scalars in launches]
    parts = [(_program(k, tiling), args) for (k, args, _), tiling in zip(launches, tilings, strict=True)]
    stitched = air.stitch(program.entry, [slot.name for slot in program.slots], parts)
    if program.bucket:
        air.reserve_channel_names(stitched.module)
    return Module(program, stitched, tuple(kernel for kernel, _, _ in launches), tuple(tilings))


def _launches(program: Program, sizes: Dimensions) -> Iterator[tuple[Kernel, dict[str, str], dict[str, Any]]]:
    """Yield the kernel of each launch, the program's slots by kernel argument, and its scalars as numbers."""
    for part, wired in zip(program.parts, program.wiring, strict=True):
        for launch in part.launches:
            args = {arg: wired[slot] for arg, slot in launch.args.items()}
            yield launch.kernel, args, launch.numbers(sizes)


def _tile(program: Program, kernel: Kernel, scalars: Mapping[str, Any]) -> Tiling:
    if kernel.tiling is None:
        raise TypeError(f"kernel {kernel.name} has no program for the array")
    return kernel.sliding(scalars) if program.sliding and kernel.sliding else kernel.tiling(scalars)


def _program(kernel: Kernel, tiling: Tiling) -> AirModule:
    assert kernel.program is not None
    return kernel.program(tiling)
