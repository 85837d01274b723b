"""Parts -> the C++ source of a library: for each an entry point that calls its kernels in order."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from stages.engine.files import write_json
from stages.engine.places import CONFIG, MODULES
from stages.kernels import HOST_SET
from stages.model.families import read_config
from stages.model.grouping import Program
from stages.model.part import Dim, Launch, Part, PartKey, resolved
from stages.model.policy import parse_policy
from stages.model.unpacking import keyed_part
from stages.targets.cpu.fusion import fuse
from stages.targets.cpu.instruction_sets import objects_of
from stages.targets.cpu.prototypes import dispatch, prototypes, prototypes_of, tensor_type
from stages.targets.cpu.work import described_launch
from stages.weights.formats import formats
from stages.weights.grouped import LINE

COSTS = False
SUFFIX = ".cc"

_SUPPORT = ("peak_loops", "peaks", "team")
"""Sources of the library of host programs that are not kernels: the machine's speed limits and the thread team."""

_OF_CALL, _OF_RUN = {"seq": "dims->seq"}, {"seq": "run.rows", "pos": "run.pos"}
"""C++ of the values that are known at run time, for kernels that are called once and for those called for each run."""


def fingerprint() -> str:
    """The text depends on nothing but this project's code."""
    return ""


def arguments(programs: Sequence[Program], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `write_module` for a library of these programs."""
    return {
        "parts": [part.key for program in programs for part in program.parts],
        "support": _support(programs),
        "policy": options["policy"],
        "context": options["context"],
        "sets": list(options["sets"]),
    }


def launches(part: Part, fused: bool = True) -> tuple[Launch, ...]:
    """Return the launches of a part in a program. `fused`: launches that one kernel can do together are joined."""
    return fuse(part) if fused else part.launches


def sources(programs: Sequence[Program], sets: Collection[str] | None = None) -> list[str]:
    """C++ sources that a library of these programs links for these instruction sets (`sets_of`)."""
    found = (launch for program in programs for part in program.parts for launch in launches(part))
    return _sources(found, _support(programs), sets)


def expected(source: str) -> dict[str, Any]:
    """Return the declarations that the kernels of a source must match."""
    stem, _, isa = Path(source).name.partition(".")
    return {"declared": prototypes_of(stem, isa)}


def _support(programs: Sequence[Program]) -> list[str]:
    return list(_SUPPORT) if any(program.host for program in programs) else []


def _sources(launches: Iterable[Launch], support: Sequence[str], sets: Collection[str] | None) -> list[str]:
    stems = {launch.kernel.source for launch in launches}
    return [name for stem in sorted({*stems, *support}) for name in objects_of(stem, sets)]


def write_module(
    directory: Path,
    library: str,
    work: Path,
    parts: Sequence[PartKey],
    support: Sequence[str],
    policy: Mapping[str, str],
    context: int = 0,
    sets: Sequence[str] | None = None,
    fused: bool = True,
) -> None:
    """Write the source of a library of these parts, for the configuration in `directory` (step action).

    Beside it stands what else its build and the manifest need to know, as JSON. `policy`: `Policy.recorded`.
    `context`: that of `Config.within`. `sets`: as in `sources`. `fused`: as in `launches`.
    """
    config = read_config(directory / CONFIG).within(context)
    dimensions = config.dimensions()
    found = [keyed_part(config, key, parse_policy(**policy)) for key in parts]
    path = work / MODULES / f"{library}{SUFFIX}"
    path.parent.mkdir(parents=True)
    path.write_text(cpu_source(found, dimensions, sets, fused))
    run = (launch for part in found for launch in launches(part, fused))
    description = {
        "programs": {part.name: {"slots": described_slots(part, dimensions)} for part in found},
        "objects": {f"{Path(source).name}.o": [source] for source in _sources(run, support, sets)},
    }
    write_json(path.with_suffix(".json"), description)


def described_slots(part: Part, dimensions: Mapping[str, float]) -> list[dict[str, Any]]:
    """Slots as the manifest has them.

    Dimensions are numbers but for `seq` and `max_seq`, which say what a call touches of a longer buffer.
    """
    known = {name: int(size) for name, size in dimensions.items() if name != "max_seq"}
    described = []
    for slot in part.slots:
        stored = formats()[slot.format]
        shape = [known.get(dim, dim) if isinstance(dim, str) else dim for dim in slot.shape]
        if all(isinstance(dim, int) for dim in shape):
            shape = list(stored.packed_shape(tuple(shape), part.layout_of(slot.name, HOST_SET)))  # type: ignore[arg-type]
        elif slot.keeps:
            shape = [shape[0], *stored.stored_shape(tuple(shape[1:]))]  # type: ignore[arg-type]
        described.append({"name": slot.name, "shape": shape, "role": slot.role, "dtype": stored.dtype})
    return described


def cpu_source(
    parts: Sequence[Part],
    dimensions: Mapping[str, float],
    sets: Collection[str] | None = None,
    fused: bool = True,
) -> str:
    """Return a translation unit with the entry points of one or more parts.

    It chooses an instruction set for each kernel that they call. `sets`: as in `sources`. `fused`: as in `launches`.
    """
    by_name = {launch.kernel.name: launch.kernel for part in parts for launch in launches(part, fused)}
    called = [by_name[name] for name in sorted(by_name)]
    return "\n".join([prototypes(called), dispatch(called, sets), *(_glue(part, dimensions, fused) for part in parts)])


def _glue(part: Part, dimensions: Mapping[str, float], fused: bool) -> str:
    """C++ of one entry point. All threads run it; they meet at a barrier only where data flow demands it.

    Kernels that know a position are called for each run of rows, the others once for all rows. Before a barrier,
    threads ask for the weights that they read behind it.
    """

    def size(name: str) -> int:
        return part.host_bytes(part.slot(name), dimensions)

    run = launches(part, fused)
    places = {slot.name: f"slots[{i}]" for i, slot in enumerate(part.slots)}
    own = [name for launch in run if _by_each(part, launch) for name in launch.writes()]
    lines = [f'extern "C" void {part.name}(void *const *slots, [[maybe_unused]] const Dims *dims, Worker *worker) {{']
    lines += _own_results([(places[name], size(name)) for name in own])
    places |= {name: f"own[{i}]" for i, name in enumerate(own)}
    for stretch in _between_barriers(run, own):
        for launch in stretch:
            for weights in _streamed(part, launch):
                lines += _asks([(places[name], size(name)) for name in weights])
        lines.append("  worker->barrier();")
        for launch in stretch:
            alone = _by_each(part, launch)
            before = ("Worker alone; " if alone else "") + ("for (const Run &run : *dims) " if _by_runs(launch) else "")
            call = _kernel_call(part, launch, places, dimensions, "alone" if alone else "*worker")
            lines.append(f"  worker->launch([&] {{ {before}{call} }});")
    about = {
        "slots": described_slots(part, dimensions),
        # A program that knows no position runs with any context, and is linked once for all of them.
        "positions": dimensions.get("max_seq") if any(map(_by_runs, run)) else None,
        "launches": [described_launch(part, launch, dimensions) for launch in run],
    }
    # What the runtime holds a manifest against before it calls this, and a profile against.
    info = f'extern "C" const char {part.name}_info[] = {json.dumps(json.dumps(about))};'
    return "\n".join([*lines, "}", info, ""])


def _by_runs(launch: Launch) -> bool:
    return "pos" in launch.scalars.values()


def _by_each(part: Part, launch: Launch) -> bool:
    """Return whether every thread computes the result of a launch for itself: of one row, which only `part` sees.

    A norm or a rotation takes less time than waiting for the thread that would compute it, and then for its result.
    """
    one = launch.kernel.name in ("rms_norm", "rope", "norm_rope") and launch.scalars["rows"] == 1
    return one and all(part.slot(name).role == "scratch" for name in launch.writes())


def _own_results(results: Sequence[tuple[str, int]]) -> list[str]:
    """Return the C++ of `own`, where each thread has the results that every thread computes for itself.

    The first thread has them in their slots, where a trace finds them. `results`: C++ of the slot, and its bytes.
    """
    if not results:
        return []
    ends = [*accumulate((-(-size // LINE) * LINE for _, size in results), initial=0)]
    places = [f"worker->thread == 0 ? {slot} : results + {end}" for (slot, _), end in zip(results, ends, strict=False)]
    return [
        f"  char *const results = worker->own_results({ends[-1]});",
        f"  void *const own[] = {{{', '.join(places)}}};",
    ]


def _asks(weights: Sequence[tuple[str, int]]) -> list[str]:
    """Return C++ by which a thread asks for the begin of its share of weights that are shared out as one.

    `weights`: C++ of the slot of each, and its bytes.
    """
    ends = [*accumulate((size for _, size in weights), initial=0)]
    placed = zip(weights, ends, strict=False)
    return [f"  worker->ask({slot}, {size}, {before}, {ends[-1]});" for (slot, size), before in placed]


def _between_barriers(run: Sequence[Launch], own: Collection[str]) -> list[list[Launch]]:
    """Return the launches that run without a barrier, in lists.

    There is a barrier before a launch that reads or overwrites what another one has written for all threads, or
    overwrites what another one reads. `own`: the slots that every thread has for itself.
    """
    stretches: list[list[Launch]] = [[]]
    written: set[str] = set()
    read: set[str] = set()
    for launch in run:
        writes = launch.writes() - {*own}
        if launch.reads() & written or writes & (written | read):
            stretches.append([])
            written, read = set(), set()
        stretches[-1].append(launch)
        written |= writes
        read |= launch.reads()
    return stretches


def _streamed(part: Part, launch: Launch) -> list[list[str]]:
    """Return the weights of a product of which every thread reads a share, from the share's begin on.

    Weights with a result each are shared out as one, and are one list. Those that make one result together are shared
    out alike. A table is none: its rows are looked up. Nor are weights of experts, of which a row reads some.
    """
    names = [launch.args[arg.name] for arg in launch.kernel.args if arg.matrix and "x" in launch.args]
    streamed = [name for name in names if len(part.slot(name).shape) == 2]
    return [streamed] if len(launch.writes()) == len(streamed) else [[name] for name in streamed]


def _kernel_call(
    part: Part, launch: Launch, places: Mapping[str, str], dimensions: Mapping[str, float], worker: str
) -> str:
    by_runs, tensors = _by_runs(launch), []
    for arg in launch.kernel.args:
        name = launch.args[arg.name]
        first, *width = part.slot(name).shape
        rows = f" + run.first * {math.prod(resolved(width, dimensions))}" if by_runs and first == "seq" else ""
        tensors.append(f"static_cast<{tensor_type(arg)}>({places[name]}){rows}")
    values = _OF_RUN if by_runs else _OF_CALL
    scalars = [_scalar(launch.scalars[param.name], values, dimensions) for param in launch.kernel.params]
    sizes = {
        name: dimensions.get(size, size) if isinstance(size, str) else size for name, size in launch.scalars.items()
    }
    derived = [str(derive(sizes)) for derive in launch.kernel.derived.values()]
    blocks = ["run.blocks"] if launch.kernel.paged else []
    return f"{launch.kernel.name}({', '.join([*tensors, *scalars, *derived, *blocks, worker])});"


def _scalar(value: Dim | float, at_run_time: Mapping[str, str], dimensions: Mapping[str, float]) -> str:
    if isinstance(value, str):
        if value in at_run_time:
            return at_run_time[value]
        value = dimensions[value]
    return f"{value!r}f" if isinstance(value, float) else str(value)
