"""Audits the compiler's output for a module: refuses, by name, what would hang or compute garbage.

The compiler reports success for programs that the array cannot run right. Everything is counted from the files that it
leaves (configurations and commands, read by `compiled`) and compared with the module and the limits of the hardware.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from xdsl.dialects import scf
from xdsl.dialects.builtin import MemRefType, ModuleOp

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.air import analysis, limits
from stages.air.access import Access, Coverage, Runs, accesses, in_order, walk
from stages.air.dialect import L3, ChannelEnd, ChannelGetOp, LaunchOp, constant_of, parents
from stages.air.occupancy import PING_PONG_TASKS
from stages.air.stitching import settles
from stages.targets.npu2.compiled import (
    Buffer,
    Channel,
    Compiled,
    Configuration,
    Descriptor,
    Task,
    read_buffers,
    read_compiled,
)
from stages.targets.npu2.liveness import check_liveness
from stages.targets.npu2.static import loaded_sections

LOWERED = "npu.air.mlir"
"""The file of aircc with the configurations and commands that aiecc gets."""
PLACED = "input_with_addresses.mlir"
"""The file of aiecc with the same and addresses in memory."""

_Use = tuple[str, bool]
"""(argument (slot), whether it is written)."""


@dataclass
class Findings:
    """Figures of a program that passed."""

    resets: int
    """Resets of the array in one dispatch."""
    launches: int
    settled: bool
    """Whether the last launch only serves to make the number of resets even."""
    in_flight: int = 0
    """Maximum of tasks that wait at one channel of the shim."""
    shim_descriptors: int = 0
    """Maximum of descriptors that one shim tile holds at a time."""
    memory_descriptors: int = 0
    """Maximum for a memory tile."""
    core_descriptors: int = 0
    """Maximum for a compute tile."""
    static_bytes: int = 0
    """Maximum of static data of a core: tables of tile functions, and constants that Peano keeps in memory."""
    code_bytes: list[int] = field(default_factory=list)
    """Bytes of code that each launch loads into its cores; empty if the cores were not linked."""
    notes: list[str] = field(default_factory=list)
    """Remarks on what is correct but could be better."""

    def raise_to(self, counter: str, used: int) -> None:
        """Raise a maximum to `used` if it is smaller."""
        setattr(self, counter, max(getattr(self, counter), used))


PROGRAM_BYTES = 16 << 10
"""Program memory of a core."""

OWN_MEMORY = 0x70000
"""Address at which a core sees its own L1 (mlir-aie, `AIETargetModel.h`)."""


def audit_made(program: str, module: ModuleOp, directory: Path, function: str, linked: bool = True) -> Findings:
    """Audit a program from aircc's directory of temporary files. Raises UserError.

    Args:
        linked: Whether Peano linked the cores; without it, their code and static data are not checked.
    """
    try:
        lowered, addresses = ((directory / name).read_text() for name in (LOWERED, PLACED))
    except OSError as error:
        raise UserError(f"{program}: aircc left no {Path(str(error.filename)).name} to audit") from None
    try:
        compiled, buffers = read_compiled(lowered, function), read_buffers(addresses)
    except UserError as error:
        raise UserError(f"{program}: {error}") from None
    findings = audit(program, module, compiled)
    # After a launch with a cascade, mlir-air of 2026-07-29 loads it again without cores, which nobody uses.
    run = {configuration.name: configuration for configuration, _ in compiled.steps}
    placed = {name: in_device for name, in_device in buffers.items() if name in run}
    findings.notes += audit_buffers(program, placed)
    if linked:
        cores = audit_cores(program, run.values(), placed, directory)
        findings.static_bytes = max((core.static for loaded in cores.values() for core in loaded), default=0)
        findings.code_bytes = [sum(core.code for core in cores[made.name]) for made, _ in compiled.steps]
    stream = next(iter(directory.glob(f"*_{function}.bin")), None)
    if stream is not None:
        findings.resets = audit_stream(program, stream.read_bytes(), findings.resets)
    return findings


def audit(program: str, module: ModuleOp, compiled: Compiled) -> Findings:
    """Audit a compiled program against its module. Raises UserError, one line with program, launch, limit and count."""
    launches = analysis.launches(module)
    if len(launches) != len(compiled.steps):
        raise UserError(f"{program}: has {len(launches)} launches, aircc made {len(compiled.steps)}")
    arguments = analysis.public_function(module).body.block.args
    memrefs = ((value, value.type) for value in arguments if isinstance(value.type, MemRefType))
    slots = {str(value.name_hint): analysis.element_bytes(kind) for value, kind in memrefs}
    findings = Findings(compiled.resets, len(launches), settles(module))
    for position, (launch, (configuration, bound)) in enumerate(zip(launches, compiled.steps, strict=True)):
        where = f"{program}, launch {position + 1} of {len(launches)} ({configuration.name})"
        if list(bound) != list(range(len(slots))):
            raise UserError(f"{where}: is not handed the program's arguments in their order")
        _Launch(where, configuration, slots, findings).check(launch)
    return findings


def words(descriptor: Descriptor, elements: int) -> int:
    """Convert elements of a descriptor's buffer to 32-bit words, the unit in which a DMA counts."""
    return elements * descriptor.element_bytes // limits.GRANULARITY_BYTES


def walked(descriptor: Descriptor, runs: int, where: str) -> Runs:
    """Return the elements of its buffer that a task's descriptor moves.

    With four dimensions, each run advances by one step of the first.
    """
    dims, times = descriptor.dims, runs
    if len(dims) > 4:
        raise UserError(f"{where}: a descriptor of the shim has {len(dims)} dimensions, of at most 4")
    if len(dims) == 4:
        if dims[0][0] != runs:
            raise UserError(f"{where}: a descriptor of {dims[0][0]} steps runs {runs} times")
        times = 1
    elements = walk(np.array([descriptor.offset]), dims, times)
    if elements.elements != descriptor.length * runs:
        raise UserError(f"{where}: a descriptor of {descriptor.length} elements walks {elements.elements // runs}")
    return elements


@frozen(eq=False)
class _Launch:
    """The audit of one launch."""

    where: str
    """Program and launch, for messages."""
    configuration: Configuration
    slots: Mapping[str, int]
    """Bytes of an element of each argument of the program, in order. The commands get them."""
    findings: Findings
    """The figures to update."""

    def check(self, launch: LaunchOp) -> None:
        self._check_slots(launch)
        self._check_flight()
        self._check_announced(math.prod(launch.shape()))
        for task in self._tasks():
            for descriptor in task.descriptors:
                self._check_descriptor(task.channel, descriptor, task.runs)
        for engine in self.configuration.engines:
            for descriptor in engine.descriptors:
                self._check_descriptor(engine.channel, descriptor, engine.runs)
        self._check_engines()
        self._check_locks()
        if stray := self.configuration.stacks - {limits.STACK_BYTES}:
            raise UserError(f"{self.where}: cores have {min(stray)} bytes of stack, not {limits.STACK_BYTES}")
        self._note_waits(check_liveness(self.where, self.configuration))

    def _require(self, what: str, used: int, available: int) -> None:
        limits.require(self.where, what, used, available)

    def _tasks(self) -> Iterator[Task]:
        return (command.task for command in self.configuration.commands if command.what == "start" and command.task)

    # what moves

    def _check_slots(self, launch: LaunchOp) -> None:
        """Check that every slot is read and written exactly as the module says.

        The same elements must be moved equally often, and each stream in the order of one of the module's streams.
        """
        expected: dict[_Use, list[Access]] = defaultdict(list)
        for access in accesses(launch, self.where):
            expected[access.slot, access.written].append(access)
        actual: dict[_Use, dict[str, list[Runs]]] = defaultdict(lambda: defaultdict(list))
        slot_of = dict(zip(self.configuration.arguments, self.slots, strict=True))
        for task in self._tasks():
            for descriptor in task.descriptors:
                use = slot_of[descriptor.buffer], task.channel.direction == "S2MM"
                actual[use][task.stream].append(walked(descriptor, task.runs, self.where))
        for slot in self.slots:
            for use in ((slot, False), (slot, True)):
                module = Coverage.of(access.runs for access in expected[use])
                compiled = Coverage.of(runs for stream in actual[use].values() for runs in stream)
                if compiled != module:
                    self._refuse_slot(*use, module, compiled)
                check_order(self.where, use, expected[use], list(actual[use].values()))
        self._check_turns(launch, slot_of)

    def _check_turns(self, launch: LaunchOp, slot_of: Mapping[str, str]) -> None:
        """Check that slots which share a channel of the module come in its order, on each channel of the shim.

        In a launch of several steps they come as often as there are steps.
        """
        compiled: dict[Channel, list[_Use]] = defaultdict(list)
        for task in self._tasks():
            written = task.channel.direction == "S2MM"
            compiled[task.channel] += ((slot_of[descriptor.buffer], written) for descriptor in task.descriptors)
        for turns in turns_of(launch, self.where):
            for channel, uses in compiled.items():
                found = [use for use, _ in itertools.groupby(use for use in uses if use in turns)]
                step = [use for use in turns if use in found]
                if step and found != step * (len(found) // len(step)):
                    names = ", ".join(slot for slot, _ in found)
                    raise UserError(f"{self.where}: {channel} has {names} in another order than the module")

    def _refuse_slot(self, slot: str, written: bool, module: Coverage, compiled: Coverage) -> None:
        element = compiled.first_difference(module)
        assert element is not None
        verb = "writes" if written else "reads"
        moved, expected = (coverage.elements * self.slots[slot] for coverage in (compiled, module))
        raise UserError(
            f"{self.where}: {verb} {moved} bytes of {slot}, the module says {expected}: element {element} "
            f"{compiled.at(element)} times instead of {module.at(element)}"
        )

    # when it moves

    def _check_flight(self) -> None:
        """Check how many tasks wait at a channel of the shim, and how many descriptors a shim tile holds.

        An output task ends when it is awaited. An input task ends when the result of its data is awaited: the compiler
        frees such inputs together with the outputs that it awaits.
        """
        running: list[Task] = []
        ended: list[Task] = []
        awaited = False
        for command in self.configuration.commands:
            task = command.task
            if command.what in ("await", "free") and task in running:
                running.remove(task)
                ended.append(task)
                awaited |= command.what == "await"
            elif command.what == "start" and task:
                self._check_ended(ended, awaited)
                ended, awaited = [], False
                running.append(task)
                self._count_running(task, running)
            elif command.what == "load":
                self._check_quiet(running)
        self._check_ended(ended, awaited)
        self._check_quiet(running)

    def _check_announced(self, steps: int) -> None:
        """Check that cores which depend on the step of the launch are told of each step in time.

        They are told before each step, and not of the next step before their results are there: the lock that tells
        them holds 1, however often it is set.
        """
        times: Counter[str] = Counter()
        pending: set[str] = set()
        for command in self.configuration.commands:
            if command.what == "await":
                pending.clear()
            elif command.what == "write":
                if command.target in pending:
                    raise UserError(f"{self.where}: cores are told of several steps at once, by {command.target}")
                pending.add(command.target)
                times[command.target] += 1
        for target, count in times.items():
            if count != steps:
                raise UserError(f"{self.where}: cores are told of {count} of {steps} steps, by {target}")

    def _check_ended(self, ended: Sequence[Task], awaited: bool) -> None:
        if ended and not awaited:
            raise UserError(f"{self.where}: descriptors of {ended[0].channel} are given away while they may be read")

    def _check_quiet(self, running: Iterable[Task]) -> None:
        """Check that no output is still moving when the array is configured again or the program ends."""
        outputs = [task for task in running if task.channel.direction == "S2MM"]
        if outputs:
            raise UserError(f"{self.where}: {len(outputs)} outputs are never awaited, of {outputs[0].channel}")

    def _count_running(self, task: Task, running: Sequence[Task]) -> None:
        channel = task.channel
        waiting = sum(other.channel == channel for other in running)
        tile = (channel.column, channel.row)
        in_tile = (other for other in running if (other.channel.column, other.channel.row) == tile)
        descriptors = sum(len(other.descriptors) for other in in_tile)
        self.findings.raise_to("in_flight", waiting)
        self.findings.raise_to("shim_descriptors", descriptors)
        ends = ((flow.source, flow.target) for flow in self.configuration.flows)
        staged = any(channel in pair and any(end.row == 1 for end in pair) for pair in ends)
        extra = PING_PONG_TASKS if staged else 0
        self._require(f"tasks at {channel}", waiting, limits.QUEUE_DEPTH + extra)
        self._require(f"descriptors of tile {tile}", descriptors, limits.SHIM_DESCRIPTORS)

    # what a descriptor and a tile can hold

    def _check_descriptor(self, channel: Channel, descriptor: Descriptor, runs: int) -> None:
        where = f"{self.where}: {channel}"
        kind = limits.dma(channel.row)
        limits.require(where, "runs of a descriptor", runs, limits.RUNS)
        if descriptor.bytes % limits.GRANULARITY_BYTES:
            raise UserError(f"{where}: moves {descriptor.bytes} bytes, no whole words")
        # The shim's fourth dimension is the step from run to run.
        iterates = channel.row == 0 and len(descriptor.dims) == 4
        (steps, step), dims = (descriptor.dims[0], descriptor.dims[1:]) if iterates else ((1, 0), descriptor.dims)
        limits.require(where, "steps of an iterated descriptor", steps, limits.ITERATIONS)
        if analysis.fold(dims) == ((descriptor.length, 1),):
            return  # in order: it needs only a length
        *outer, (run, _) = dims
        counts = [words(descriptor, run), *(size for size, _ in reversed(outer))]
        limits.require(where, "dimensions of a descriptor", len(counts), kind.dimensions)
        limits.require(where, "steps of a dimension", max(counts[: kind.counted]), kind.wrap)
        strides = [words(descriptor, stride) for size, stride in ((steps, step), *outer) if size > 1]
        limits.require(where, "words from step to step", max(strides, default=0), kind.stride)

    def _check_engines(self) -> None:
        tiles: Counter[tuple[int, int]] = Counter()
        halves: Counter[tuple[int, int, int]] = Counter()
        for engine in self.configuration.engines:
            channel, count = engine.channel, len(engine.descriptors)
            tiles[channel.column, channel.row] += count
            halves[channel.column, channel.row, channel.number % 2] += count
        for (column, row), count in tiles.items():
            memory = row == 1
            self.findings.raise_to("memory_descriptors" if memory else "core_descriptors", count)
            available = limits.MEMTILE_DESCRIPTORS if memory else limits.TILE_DESCRIPTORS
            self._require(f"descriptors of tile ({column}, {row})", count, available)
        for (column, row, parity), count in halves.items():
            if row == 1:
                which = f"{'odd' if parity else 'even'} channels of tile ({column}, {row})"
                self._require(f"descriptors of the {which}", count, limits.MEMTILE_DESCRIPTORS // 2)

    def _check_locks(self) -> None:
        turns = (turn for engine in self.configuration.engines for turn in engine.turns)
        counts = [count for turn in turns for _, count in (*turn.takes, *turn.gives)]
        largest = max((*counts, *self.configuration.locks.values()), default=0)
        self._require("the value of a lock", largest, limits.LOCK_VALUE)

    def _note_waits(self, turns: Mapping[Channel, int]) -> None:
        """Note where DDR waits until what it brought has left L2, because one buffer takes all of it in turn."""
        brought = {flow.target for flow in self.configuration.flows if flow.source.row == 0 and flow.target.row == 1}
        waits: Counter[str] = Counter()
        for engine in self.configuration.engines:
            buffers, fills = {descriptor.buffer for descriptor in engine.descriptors}, turns[engine.channel]
            if engine.channel in brought and len(buffers) == 1 and fills > len(engine.turns):
                waits[f"{fills} times with {engine.descriptors[0].bytes} bytes"] += 1
        for what, channels in waits.items():
            wait = f"{channels} channels from DDR wait for L2: each fills one buffer {what}"
            self.findings.notes.append(f"{self.configuration.name}: {wait}")


def turns_of(launch: LaunchOp, where: str) -> Iterator[list[_Use]]:
    """Yield for each channel to or from DDR the slots that have their turns on it, in order.

    Channels whose slots alternate in a loop are left out, and so are slots of several channels.
    """
    ends: dict[object, list[tuple[object, _Use]]] = defaultdict(list)
    channels: dict[_Use, set[str]] = defaultdict(set)
    for op in (op for op in analysis.moves(launch) if isinstance(op, ChannelEnd)):
        side = analysis.end(op, where)
        if side.space == L3:
            name, indices = op.chan_name.string_value(), tuple(map(constant_of, op.indices))
            outermost = next((parent for parent in reversed([*parents(op)]) if isinstance(parent, scf.ForOp)), op)
            use = str(analysis.root(side.value).name_hint), isinstance(op, ChannelGetOp)
            channels[use].add(name)
            ends[name, indices].append((outermost, use))
    for turns in ends.values():
        of_loop: dict[object, set[_Use]] = defaultdict(set)
        for loop, use in turns:
            of_loop[loop].add(use)
        if all(len(uses) == 1 for uses in of_loop.values()):
            yield [use for use, _ in itertools.groupby(use for _, use in turns) if len(channels[use]) == 1]


def check_order(where: str, use: _Use, expected: Sequence[Access], streams: Sequence[Sequence[Runs]]) -> None:
    """Check that the streams of one slot are those of one way of each access. Raises UserError."""
    remaining = Counter(map(_digest, streams))
    for access in expected:
        # A way of more streams than there are is none of them. It may have a stream for each row of weights.
        possible = [way for way in reversed(access.ways) if len(way) <= remaining.total()]
        carried = (Counter(_digest([stream]) for stream in way.streams()) for way in possible)
        remaining -= next((digests for digests in carried if digests <= remaining), Counter())
    if remaining:
        verb, kind = ("writes", "outputs") if use[1] else ("reads", "inputs")
        count = remaining.total()
        raise UserError(f"{where}: {verb} {use[0]} in another order than the module, in {count} {kind}")


def _digest(stream: Iterable[Runs]) -> bytes:
    """Return a digest of the elements that a stream walks, in order."""
    return xxhash.xxh3_128_digest(b"".join(array.tobytes() for array in in_order(stream)))


def audit_buffers(program: str, placed: Mapping[str, Sequence[Buffer]]) -> list[str]:
    """Check where the buffers of each configuration lie. Raises UserError.

    They must be inside the memory of their tile, after the stack, without overlap.

    Returns:
        Notes.
    """
    notes = []
    for name, buffers in placed.items():
        tiles: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
        for buffer in buffers:
            tiles[buffer.column, buffer.row].append(buffer)
        for tile, in_tile in tiles.items():
            _check_placed(f"{program}, {name}, tile {tile}", tile[1], in_tile)
        rows = [row for (_, row), in_tile in tiles.items() if any(buffer.bank is None for buffer in in_tile)]
        kinds = Counter("memory" if row == 1 else "compute" for row in rows)
        if kinds:
            counted = " and ".join(f"{count} {kind} tiles" for kind, count in sorted(kinds.items()))
            notes.append(f"{name}: buffers of {counted} share banks of memory")
    return notes


def _check_placed(where: str, row: int, buffers: Iterable[Buffer]) -> None:
    end = 0 if row == 1 else limits.STACK_BYTES
    for buffer in sorted(buffers, key=lambda buffer: buffer.address or 0):
        if buffer.address is None:
            raise UserError(f"{where}: {buffer.name} has no address")
        if buffer.address < end:
            raise UserError(f"{where}: {buffer.name} at {buffer.address} begins below {end}, where others end")
        alignment = math.gcd(buffer.bytes, limits.ALIGNMENT_BYTES)
        if row > 1 and buffer.address % alignment:
            # The core silently drops the low bits of the address of a vector.
            raise UserError(
                f"{where}: {buffer.name} at {buffer.address} is not aligned to the {alignment} bytes of its vectors"
            )
        end = buffer.address + buffer.bytes
    limits.require(where, "bytes of memory", end, limits.L2_BYTES if row == 1 else limits.L1_BYTES)


class CoreMemory(NamedTuple):
    """Bytes that Peano put into a core's memories."""

    code: int
    static: int


def audit_cores(
    program: str, configurations: Iterable[Configuration], placed: Mapping[str, Sequence[Buffer]], directory: Path
) -> dict[str, list[CoreMemory]]:
    """Check the ELF of every core of the configurations, and return what each core holds, by its configuration's name.

    aiecc names it `DEVICE_core_COLUMN_ROW.elf`, since July 2026 with `elfs_` before that (mlir-aie #3271). No other
    check sees whether the code fits (until mlir-aie #3618), so a core without an ELF is refused.

    Raises:
        UserError: One line.
    """
    elfs = {path.stem.removeprefix("elfs_"): path for path in directory.rglob("*_core_*.elf") if path.is_file()}
    cores = {
        f"{made.name}_core_{core.column}_{core.row}": (made, core) for made in configurations for core in made.cores
    }
    if missing := sorted(cores.keys() - elfs.keys()):
        found = len(cores) - len(missing)
        raise UserError(f"{program}: aiecc left {found} ELFs of {len(cores)} cores, none of {missing[0]}, to audit")
    loaded: dict[str, list[CoreMemory]] = defaultdict(list)
    for name, (made, core) in cores.items():
        in_tile = [b for b in placed.get(made.name, ()) if (b.column, b.row) == (core.column, core.row)]
        loaded[made.name].append(audit_core(program, elfs[name], in_tile))
    return loaded


def audit_core(program: str, core: Path, buffers: Sequence[Buffer]) -> CoreMemory:
    """Check the code and static data of a core that Peano linked. Raises UserError.

    The code must fit its program memory, and the data must lie in L1 apart from stack and buffers.
    """
    where = f"{program}, {core.name}"
    sections = loaded_sections(core, where)
    code = sum(section.bytes for section in sections if section.code)
    limits.require(where, "bytes of program memory", code, PROGRAM_BYTES)
    taken = [("the stack", 0, limits.STACK_BYTES), *((b.name, b.address or 0, b.bytes) for b in buffers)]
    for section in (s for s in sections if not s.code):
        start = section.address - OWN_MEMORY
        end = start + section.bytes
        if not 0 <= start <= end <= limits.L1_BYTES:
            raise UserError(f"{where}: {section.name} at {section.address:#x} is not in the core's own memory")
        for name, begin, size in taken:
            if begin < end and start < begin + size:
                raise UserError(
                    f"{where}: {section.name} at {start} of {section.bytes} bytes overlaps {name} at {begin}"
                )
    return CoreMemory(code, sum(section.bytes for section in sections) - code)


_WORDS = {0: 6, 3: 7, 4: 7, 6: 1, 8: 4}
"""Words of an operation of the instruction stream, by its code: write, masked write, masked poll, preempt, load
(mlir-aie, `AIETargetNPU.cpp`)."""
_SIZE_WORD = {1: 3, 0x80: 1, 0x81: 1}
"""Index of the word with the size in bytes of the other operations: a block write, and those that await or patch a
transfer."""
_LOAD = 8


def audit_stream(program: str, stream: bytes, resets: int) -> int:
    """Check the images that the instruction stream loads, and return their number.

    It must be the number of resets by the commands, or one more if that is odd (mlir-aie since #3622). If it is even,
    no image may be loaded that is loaded already.

    Raises:
        UserError: One line.
    """
    loaded = list(_loaded_images(program, np.frombuffer(stream, "<u4")))
    if len(loaded) not in (resets, resets + resets % 2):
        raise UserError(f"{program}: its instructions load {len(loaded)} images, its commands {resets}")
    # The last image is still loaded when the next dispatch begins.
    repeated = [image for image, before in zip(loaded, [*loaded[-1:], *loaded], strict=False) if image == before]
    if repeated and len(loaded) % 2 == 0:
        raise UserError(f"{program}: loads image {repeated[0]} while it is loaded, which the firmware ignores")
    return len(loaded)


def _loaded_images(program: str, stream: np.ndarray) -> Iterator[int]:
    """Yield the numbers of the images that an instruction stream loads, in order."""
    position = 4
    while position < len(stream):
        code = int(stream[position]) & 0xFF
        if code not in _WORDS and (code not in _SIZE_WORD or position + _SIZE_WORD[code] >= len(stream)):
            raise UserError(f"{program}: operation {code} of the instruction stream is not known")
        if code == _LOAD:
            yield int(stream[position]) >> 16
        position += _WORDS[code] if code in _WORDS else max(1, int(stream[position + _SIZE_WORD[code]]) // 4)
