"""Judges what the compiler made of a module before it is run: refuses, by name, what would hang or compute garbage.

The compiler reports success for programs that the array cannot run right. Everything is counted from what it leaves,
the configurations and commands of `compiled`, and held against the module and the limits of the hardware.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from xdsl.dialects.builtin import MemRefType, ModuleOp

from llama_npu2.errors import UserError
from stages.air import analysis, limits
from stages.air.access import Access, Coverage, Runs, accesses, in_order, walk
from stages.air.dialect import LaunchOp
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

LOWERED = "npu.air.mlir"
"""Of aircc: configurations and commands, as aiecc takes them."""
PLACED = "input_with_addresses.mlir"
"""Of aiecc: the same with places in memory."""

_Use = tuple[str, bool]
"""A slot, and whether it is written."""


@dataclass
class Findings:
    """What is worth knowing of a program that passed."""

    resets: int
    """Of the array, in one dispatch."""
    launches: int
    settled: bool
    """Whether the last launch is there for the number of resets alone."""
    in_flight: int = 0
    """Most tasks that wait at one channel of the shim."""
    shim_descriptors: int = 0
    memory_descriptors: int = 0
    core_descriptors: int = 0
    """Most that one tile holds at a time."""
    notes: list[str] = field(default_factory=list)
    """What is right, and could be better."""

    def most(self, counter: str, used: int) -> None:
        setattr(self, counter, max(getattr(self, counter), used))


PROGRAM_BYTES = 16 << 10
"""Program memory of a core."""


def audit_made(program: str, module: ModuleOp, made: Path, function: str) -> Findings:
    """Judge what is in aircc's directory of temporary files. Raises UserError."""
    try:
        lowered, addresses = ((made / name).read_text() for name in (LOWERED, PLACED))
    except OSError as error:
        raise UserError(f"{program}: aircc left no {Path(str(error.filename)).name} to audit") from None
    try:
        compiled, buffers = read_compiled(lowered, function), read_buffers(addresses)
    except UserError as error:
        raise UserError(f"{program}: {error}") from None
    findings = audit(program, module, compiled)
    # Behind a launch with a cascade, mlir-air of 2026-07-29 loads it again without cores, which nobody uses.
    run = {configuration.name for configuration, _ in compiled.steps}
    findings.notes += audit_buffers(program, {name: placed for name, placed in buffers.items() if name in run})
    for core in sorted(made.glob("*_core_*.elf")):
        audit_core(program, core)
    stream = next(iter(made.glob(f"*_{function}.bin")), None)
    if stream is not None:
        findings.resets = audit_stream(program, stream.read_bytes(), findings.resets)
    return findings


def audit(program: str, module: ModuleOp, compiled: Compiled) -> Findings:
    """Raises UserError, one line that names program, launch, limit and count."""
    launches = analysis.launches(module)
    if len(launches) != len(compiled.steps):
        raise UserError(f"{program}: has {len(launches)} launches, aircc made {len(compiled.steps)}")
    arguments = analysis.public_function(module).body.block.args
    slots = [
        _Slot(str(value.name_hint), analysis.element_bytes(value.type))
        for value in arguments
        if isinstance(value.type, MemRefType)
    ]
    findings = Findings(compiled.resets, len(launches), settles(module))
    for position, (launch, (configuration, given)) in enumerate(zip(launches, compiled.steps, strict=True)):
        where = f"{program}, launch {position + 1} of {len(launches)} ({configuration.name})"
        if list(given) != list(range(len(slots))):
            raise UserError(f"{where}: is not handed the program's arguments in their order")
        _Launch(where, configuration, slots, findings).check(launch)
    return findings


def words(descriptor: Descriptor, elements: int) -> int:
    """Elements of a descriptor's buffer in the units that a DMA counts in."""
    return elements * descriptor.element_bytes // limits.GRANULARITY_BYTES


def walked(descriptor: Descriptor, runs: int, where: str) -> Runs:
    """Elements of its buffer that a task's descriptor moves. With four dimensions each run moves on in the first."""
    dims, times = descriptor.dims, runs
    if len(dims) > 4:
        raise UserError(f"{where}: a descriptor of the shim has {len(dims)} dimensions, of at most 4")
    if len(dims) == 4:
        if dims[0][0] != runs:
            raise UserError(f"{where}: a descriptor of {dims[0][0]} steps runs {runs} times")
        times = 1
    moved = walk(np.array([descriptor.offset]), dims, times)
    if moved.elements != descriptor.length * runs:
        raise UserError(f"{where}: a descriptor of {descriptor.length} elements walks {moved.elements // runs}")
    return moved


@dataclass(frozen=True)
class _Slot:
    name: str
    element_bytes: int


@dataclass(frozen=True, eq=False)
class _Launch:
    """One launch: what the array is set up for, the slots its commands are given, and where to count to."""

    where: str
    configuration: Configuration
    slots: Sequence[_Slot]
    findings: Findings

    def check(self, launch: LaunchOp) -> None:
        self._check_slots(launch)
        self._check_flight()
        self._check_told(math.prod(launch.shape()))
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
        check_liveness(self.where, self.configuration)

    def _require(self, what: str, used: int, available: int) -> None:
        limits.require(self.where, what, used, available)

    def _tasks(self) -> Iterator[Task]:
        return (command.task for command in self.configuration.commands if command.what == "start" and command.task)

    # what moves

    def _check_slots(self, launch: LaunchOp) -> None:
        """Every slot is read and written just as the module says: no element more, none less, none twice, and each
        stream in the order of one of the module's."""
        said: dict[_Use, list[Access]] = defaultdict(list)
        for access in accesses(launch, self.where):
            said[access.slot, access.written].append(access)
        done: dict[_Use, dict[str, list[Runs]]] = defaultdict(lambda: defaultdict(list))
        slot_of = dict(zip(self.configuration.arguments, self.slots, strict=True))
        for task in self._tasks():
            for descriptor in task.descriptors:
                use = slot_of[descriptor.buffer].name, task.channel.direction == "S2MM"
                done[use][task.stream].append(walked(descriptor, task.runs, self.where))
        for slot in self.slots:
            for use in ((slot.name, False), (slot.name, True)):
                expected = Coverage.of(access.runs for access in said[use])
                found = Coverage.of(runs for stream in done[use].values() for runs in stream)
                if found != expected:
                    self._refuse_slot(slot, use[1], expected, found)
                self._check_order(use, said[use], list(done[use].values()))

    def _check_order(self, use: _Use, said: Sequence[Access], done: Sequence[Sequence[Runs]]) -> None:
        left = Counter(map(_digest, done))
        for access in said:
            ways = [Counter(_digest([stream]) for stream in way) for way in reversed(access.ways)]
            left -= next((way for way in ways if way <= left), Counter())
        if left:
            what, kind = ("writes", "outputs") if use[1] else ("reads", "inputs")
            raise UserError(f"{self.where}: {what} {use[0]} in another order than the module, in {left.total()} {kind}")

    def _refuse_slot(self, slot: _Slot, written: bool, expected: Coverage, found: Coverage) -> None:
        element = found.first_difference(expected)
        assert element is not None
        what = "writes" if written else "reads"
        done, said = (coverage.elements * slot.element_bytes for coverage in (found, expected))
        raise UserError(
            f"{self.where}: {what} {done} bytes of {slot.name}, the module says {said}: element {element} "
            f"{found.at(element)} times instead of {expected.at(element)}"
        )

    # when it moves

    def _check_flight(self) -> None:
        """Tasks that wait at a channel of the shim, and descriptors that a shim tile holds. A task is over when it is
        awaited; one that brings data in, when what is made of that data is: those that the compiler frees together
        with the outputs that it awaits."""
        running: list[Task] = []
        over: list[Task] = []
        awaited = False
        for command in self.configuration.commands:
            task = command.task
            if command.what in ("await", "free") and task in running:
                running.remove(task)
                over.append(task)
                awaited |= command.what == "await"
            elif command.what == "start" and task:
                self._check_over(over, awaited)
                over, awaited = [], False
                running.append(task)
                self._count_running(task, running)
            elif command.what == "load":
                self._check_quiet(running)
        self._check_over(over, awaited)
        self._check_quiet(running)

    def _check_told(self, steps: int) -> None:
        """Cores that are told which step of the launch it is are told before each, and not of the next before what they
        made of it is there: a lock that says so holds 1, however often it is set."""
        times: Counter[str] = Counter()
        told: set[str] = set()
        for command in self.configuration.commands:
            if command.what == "await":
                told.clear()
            elif command.what == "write":
                if command.target in told:
                    raise UserError(f"{self.where}: cores are told of several steps at once, by {command.target}")
                told.add(command.target)
                times[command.target] += 1
        for target, count in times.items():
            if count != steps:
                raise UserError(f"{self.where}: cores are told of {count} of {steps} steps, by {target}")

    def _check_over(self, over: Sequence[Task], awaited: bool) -> None:
        if over and not awaited:
            raise UserError(f"{self.where}: descriptors of {over[0].channel} are given away while they may be read")

    def _check_quiet(self, running: Iterable[Task]) -> None:
        """Nothing may move when the array is set up anew, or the program ends."""
        left = [task for task in running if task.channel.direction == "S2MM"]
        if left:
            raise UserError(f"{self.where}: {len(left)} outputs are never awaited, of {left[0].channel}")

    def _count_running(self, task: Task, running: Sequence[Task]) -> None:
        channel = task.channel
        waiting = sum(other.channel == channel for other in running)
        place = (channel.column, channel.row)
        held = sum(len(other.descriptors) for other in running if (other.channel.column, other.channel.row) == place)
        self.findings.most("in_flight", waiting)
        self.findings.most("shim_descriptors", held)
        staged = any(channel in (flow.source, flow.target) and 1 in flow.rows for flow in self.configuration.flows)
        more = PING_PONG_TASKS if staged else 0
        self._require(f"tasks at {channel}", waiting, limits.QUEUE_DEPTH + more)
        self._require(f"descriptors of tile {place}", held, limits.SHIM_DESCRIPTORS)

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
            return  # in order: no more than a length
        *outer, (run, _) = dims
        counts = [words(descriptor, run), *(size for size, _ in reversed(outer))]
        limits.require(where, "dimensions of a descriptor", len(counts), kind.dimensions)
        limits.require(where, "steps of a dimension", max(counts[: kind.counted]), kind.wrap)
        strides = [words(descriptor, stride) for size, stride in ((steps, step), *outer) if size > 1]
        limits.require(where, "words from step to step", max(strides, default=0), kind.stride)

    def _check_engines(self) -> None:
        held: Counter[tuple[int, int]] = Counter()
        half: Counter[tuple[int, int, int]] = Counter()
        for engine in self.configuration.engines:
            channel, count = engine.channel, len(engine.descriptors)
            held[channel.column, channel.row] += count
            half[channel.column, channel.row, channel.number % 2] += count
        for (column, row), count in held.items():
            memory = row == 1
            self.findings.most("memory_descriptors" if memory else "core_descriptors", count)
            most = limits.MEMTILE_DESCRIPTORS if memory else limits.TILE_DESCRIPTORS
            self._require(f"descriptors of tile ({column}, {row})", count, most)
        for (column, row, parity), count in half.items():
            if row == 1:
                which = f"{'odd' if parity else 'even'} channels of tile ({column}, {row})"
                self._require(f"descriptors of the {which}", count, limits.MEMTILE_DESCRIPTORS // 2)

    def _check_locks(self) -> None:
        turns = (turn for engine in self.configuration.engines for turn in engine.turns)
        used = [count for turn in turns for _, count in (*turn.takes, *turn.gives)]
        most = max((*used, *self.configuration.locks.values()), default=0)
        self._require("the value of a lock", most, limits.LOCK_VALUE)


def _digest(stream: Iterable[Runs]) -> bytes:
    """Of the elements that a stream walks, in order."""
    return xxhash.xxh3_128_digest(b"".join(array.tobytes() for array in in_order(stream)))


def audit_buffers(program: str, placed: Mapping[str, Sequence[Buffer]]) -> list[str]:
    """Where the compiler put the buffers of each configuration: inside the tile's memory, behind the stack, and apart.
    Returns notes. Raises UserError."""
    notes = []
    for name, buffers in placed.items():
        tiles: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
        for buffer in buffers:
            tiles[buffer.column, buffer.row].append(buffer)
        for place, found in tiles.items():
            _check_placed(f"{program}, {name}, tile {place}", place[1], found)
        rows = [row for (_, row), found in tiles.items() if any(buffer.bank is None for buffer in found)]
        kinds = Counter("memory" if row == 1 else "compute" for row in rows)
        if kinds:
            lost = " and ".join(f"{count} {kind} tiles" for kind, count in sorted(kinds.items()))
            notes.append(f"{name}: buffers of {lost} share banks of memory")
    return notes


def _check_placed(where: str, row: int, buffers: Iterable[Buffer]) -> None:
    end = 0 if row == 1 else limits.STACK_BYTES
    for buffer in sorted(buffers, key=lambda buffer: buffer.address or 0):
        if buffer.address is None:
            raise UserError(f"{where}: {buffer.name} has no address")
        if buffer.address < end:
            raise UserError(f"{where}: {buffer.name} at {buffer.address} begins below {end}, where others end")
        whole = math.gcd(buffer.bytes, limits.ALIGNMENT_BYTES)
        if row > 1 and buffer.address % whole:
            # The core drops the low bits of the address of a vector without a word.
            raise UserError(
                f"{where}: {buffer.name} at {buffer.address} is not aligned to the {whole} bytes of its vectors"
            )
        end = buffer.address + buffer.bytes
    limits.require(where, "bytes of memory", end, limits.L2_BYTES if row == 1 else limits.L1_BYTES)


def audit_core(program: str, core: Path) -> None:
    """The code of a core, linked by Peano, fits its program memory. Raises UserError."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.constants import SH_FLAGS
    from elftools.elf.elffile import ELFFile

    try:
        with core.open("rb") as file:
            sections = list(ELFFile(file).iter_sections())
    except ELFError as error:
        raise UserError(f"{program}: {core.name} cannot be read: {error}") from None
    code = sum(section["sh_size"] for section in sections if section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR)
    limits.require(f"{program}, {core.name}", "bytes of program memory", code, PROGRAM_BYTES)


_WORDS = {0: 6, 3: 7, 4: 7, 6: 1, 8: 4}
"""Words of an operation of the instruction stream by its code: write, masked write, masked poll, preempt, load. Others
say their size: a block in the fourth word, what waits for or patches a transfer in the second (mlir-aie,
`AIETargetNPU.cpp`)."""
_SIZED = {1: 3, 0x80: 1, 0x81: 1}
_LOAD = 8


def audit_stream(program: str, stream: bytes, resets: int) -> int:
    """The instruction stream loads as many images as its commands say, of an odd number perhaps one more (mlir-aie
    since #3622), and where they are even none that is loaded already. Returns how many. Raises UserError."""
    loaded = list(_loads(program, np.frombuffer(stream, "<u4")))
    if len(loaded) not in (resets, resets + resets % 2):
        raise UserError(f"{program}: its instructions load {len(loaded)} images, its commands {resets}")
    # The last one is loaded when the next dispatch begins.
    again = [image for image, before in zip(loaded, [*loaded[-1:], *loaded], strict=False) if image == before]
    if again and len(loaded) % 2 == 0:
        raise UserError(f"{program}: loads image {again[0]} while it is loaded, which the firmware ignores")
    return len(loaded)


def _loads(program: str, stream: np.ndarray) -> Iterator[int]:
    """Numbers of the images that an instruction stream loads, in order."""
    at = 4
    while at < len(stream):
        code = int(stream[at]) & 0xFF
        if code not in _WORDS and (code not in _SIZED or at + _SIZED[code] >= len(stream)):
            raise UserError(f"{program}: operation {code} of the instruction stream is not known")
        if code == _LOAD:
            yield int(stream[at]) >> 16
        at += _WORDS[code] if code in _WORDS else max(1, int(stream[at + _SIZED[code]]) // 4)
