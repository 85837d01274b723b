"""Reads what the compiler made of a module, from the MLIR that it leaves: how each launch configures the array, and the
commands by which the shim moves data.

A line-oriented reader of the operations that count, as mlir-aie prints them, one to a line. Where it expects one of
these and finds another it refuses: what it does not know it does not pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llama_npu2.errors import UserError

Dims = tuple[tuple[int, int], ...]
"""(size, stride) per dimension, outermost first, in elements."""

STACK_DEFAULT = 1024
"""Bytes, where a core does not say (mlir-aie, `AIEOps.td`)."""

_BITS = {"bf16": 16, "f32": 32, "i32": 32, "i16": 16, "i8": 8}


@dataclass
class Line:
    """An operation, the ones inside it, and what stands behind its closing brace."""

    number: int
    text: str
    body: list[Line] = field(default_factory=list)
    tail: str = ""

    @property
    def name(self) -> str:
        """`aie.tile`; of a label, `^bb1`."""
        found = re.match(r"(?:%[\w#:, %]+ = )?([\w.]+|\^\w+)", self.text)
        return found[1] if found else ""

    @property
    def result(self) -> str:
        found = re.match(r"(%\w+) = ", self.text)
        return found[1] if found else ""

    @property
    def symbol(self) -> str:
        """The first `@name`, of an operation or behind it."""
        found = re.search(r"@([\w.]+)", self.text) or re.search(r'sym_name = "([^"]+)"', self.tail or self.text)
        return found[1] if found else ""

    def arguments(self) -> list[str]:
        """What stands between the first pair of parentheses, at its commas."""
        start = self.text.find("(")
        depth, pieces, piece = 0, [], ""
        for letter in self.text[start + 1 :] if start >= 0 else "":
            if letter in ")]}>" and depth == 0:
                break
            depth += (letter in "([{<") - (letter in ")]}>")
            if letter == "," and depth == 0:
                pieces.append(piece.strip())
                piece = ""
            else:
                piece += letter
        return [*pieces, piece.strip()] if piece.strip() else pieces

    def number_of(self, attribute: str) -> int | None:
        """An integer attribute in the dictionary of the operation."""
        found = re.search(rf"\b{attribute} = (-?\d+)", self.tail or self.text)
        return int(found[1]) if found else None

    def refuse(self, what: str) -> UserError:
        return UserError(f"line {self.number} of what aircc made: {what}: {self.text[:100]}")


def read_lines(text: str) -> list[Line]:
    """The operations of a module, nested as their braces are. UserError where these do not match."""
    top = Line(0, "")
    open_lines = [top]
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("^"):
            line = line.partition("//")[0].strip()
        if line.startswith("}"):
            if len(open_lines) == 1:
                raise UserError(f"line {number} of what aircc made closes what nothing opened")
            open_lines.pop().tail = line[1:].strip()
            if not line.endswith("{"):
                continue
        if line and not line.startswith("#"):
            made = Line(number, line.removesuffix("{").strip())
            open_lines[-1].body.append(made)
            if line.endswith("{"):
                open_lines.append(made)
    if len(open_lines) > 1:
        raise UserError(f"what aircc made ends inside line {open_lines[-1].number}")
    return top.body


def elements_of(memref: str) -> tuple[int, int]:
    """(elements, bytes of one) of `memref<2x4xbf16, 2 : i32>`. UserError if it is none of a fixed shape."""
    found = re.match(r"(?:memref)?<((?:\d+x)*)(\w+)[,>]", memref)
    if not found or found[2] not in _BITS:
        raise UserError(f"what aircc made has a buffer of type {memref[:60]}, which cannot be read")
    return math.prod(int(n) for n in found[1].split("x") if n), _BITS[found[2]] // 8


@dataclass(frozen=True)
class Descriptor:
    """`buffer`: its name where it is defined, of so many `elements` of `element_bytes`. `dims` are as written, or the
    `length` in order. All but `element_bytes` in elements. `packet`: what the stream's packets are marked with, None
    where it is switched by circuit."""

    buffer: str
    elements: int
    element_bytes: int
    offset: int
    length: int
    dims: Dims
    line: int
    packet: int | None = None

    @property
    def bytes(self) -> int:
        return self.length * self.element_bytes


@dataclass(frozen=True)
class Channel:
    """`direction`: MM2S out of the tile's memory, S2MM into it."""

    column: int
    row: int
    direction: str
    number: int

    def __str__(self) -> str:
        return f"channel {self.direction} {self.number} of tile ({self.column}, {self.row})"


@dataclass(frozen=True, eq=False)
class Task:
    """What is pushed to a channel of the shim at once: descriptors one after the other, `runs` times."""

    channel: Channel
    stream: str
    descriptors: tuple[Descriptor, ...]
    runs: int
    token: bool


@dataclass(frozen=True)
class Command:
    """`what`: start, await or free a `task`; load the configuration `device`; or write a number to `target`, a lock or
    memory of a core."""

    what: str
    task: Task | None = None
    device: str = ""
    target: str = ""


LockUse = tuple[str, int]
"""A lock, and by how much it is taken down or up."""


@dataclass(frozen=True)
class Turn:
    """One descriptor of a tile's channel, the locks that it waits for and takes, and those that it gives."""

    takes: tuple[LockUse, ...]
    descriptor: Descriptor
    gives: tuple[LockUse, ...]


@dataclass(frozen=True)
class Engine:
    """What a channel of a memory or compute tile does on its own: its turns in order, again and again (`endless`) or
    `runs` times."""

    channel: Channel
    runs: int
    turns: tuple[Turn, ...]
    endless: bool

    @property
    def descriptors(self) -> list[Descriptor]:
        return [turn.descriptor for turn in self.turns]


@dataclass(frozen=True)
class Action:
    """What a core does: take or give (`lock`, by `count`), call a tile function with `buffers`, or all of `body`, and
    that `count` times."""

    what: str
    lock: str = ""
    count: int = 1
    buffers: tuple[str, ...] = ()
    body: tuple[Action, ...] = ()


@dataclass(frozen=True)
class Core:
    """`actions` are done again and again."""

    column: int
    row: int
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Flow:
    """A stream between two DMAs, or those of its packets that are marked with `packet`."""

    source: Channel
    target: Channel
    packet: int | None = None

    @property
    def rows(self) -> tuple[int, int]:
        return self.source.row, self.target.row


@dataclass(frozen=True)
class Buffer:
    """Memory of a tile. `address`, `bank`: where the compiler says."""

    name: str
    column: int
    row: int
    bytes: int
    address: int | None
    bank: int | None


@dataclass(frozen=True)
class Configuration:
    """How the array is set up for a launch, and the commands that run it."""

    name: str
    engines: tuple[Engine, ...]
    buffers: tuple[Buffer, ...]
    locks: Mapping[str, int]
    """Values that locks begin with."""
    cores: tuple[Core, ...]
    stacks: frozenset[int]
    """Bytes that cores have of it."""
    flows: tuple[Flow, ...]
    arguments: tuple[str, ...]
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Compiled:
    """A program: its configurations in the order in which a dispatch runs them, each with the program's argument
    number of every argument of its own."""

    steps: tuple[tuple[Configuration, tuple[int, ...]], ...]

    @property
    def resets(self) -> int:
        """Configurations loaded in one dispatch, each behind a reset of the array. A load directly in front of the same
        one is dropped by the compiler."""
        order: list[str | None] = []
        for configuration, _ in self.steps:
            order += [configuration.name, *(command.device or None for command in configuration.commands)]
        return sum(name is not None and name != behind for name, behind in zip(order, [*order[1:], None], strict=True))


def read_compiled(text: str, function: str) -> Compiled:
    """The program `function` of a module that `airrt-to-npu` lowered. UserError where it cannot be read."""
    devices = {line.symbol: line for line in _devices(read_lines(text))}
    main = next(
        (
            sequence
            for line in devices.values()
            for sequence in line.body
            if sequence.name.endswith("runtime_sequence") and sequence.symbol == function
        ),
        None,
    )
    if main is None:
        raise UserError(f"what aircc made has no sequence {function}")
    read: dict[str, Configuration] = {}
    own = [argument.partition(":")[0].strip() for argument in main.arguments()]
    steps = []
    for line in main.body:
        if line.name != "aiex.configure" or [inner.name for inner in line.body] != ["aiex.run"]:
            raise line.refuse("a program does more than to configure and run")
        name, given = line.symbol, line.body[0].arguments()
        if name not in devices or any(argument not in own for argument in given):
            raise line.refuse("a program runs what is not there")
        if name not in read:
            read[name] = _Reader(devices[name]).configuration(line.body[0].symbol)
        steps.append((read[name], tuple(own.index(argument) for argument in given)))
    return Compiled(tuple(steps))


def read_buffers(text: str) -> dict[str, tuple[Buffer, ...]]:
    """Buffers of every configuration, of a module to which the compiler has given addresses."""
    return {line.symbol: tuple(_Reader(line).buffers()) for line in _devices(read_lines(text))}


def _devices(lines: Sequence[Line]) -> Iterator[Line]:
    for line in lines:
        if line.name == "aie.device":
            yield line
        elif line.name in ("module", "builtin.module"):
            yield from _devices(line.body)


_KNOWN = frozenset(
    (
        *("aie.tile", "aie.lock", "aie.buffer", "aie.mem", "aie.memtile_dma", "aie.core", "aie.flow"),
        *("aie.shim_dma_allocation", "aie.runtime_sequence", "aiex.runtime_sequence"),
        # These say nothing of what is read here.
        *("aie.end", "aie.packet_flow", "aie.cascade_flow", "aie.external_buffer", "memref.global", "func.func"),
    )
)
"""Operations of a configuration."""

_COMMANDS = {
    "aiex.dma_start_task": "start",
    "aiex.dma_await_task": "await",
    "aiex.dma_free_task": "free",
    "aiex.npu.load_pdi": "load",
    "aiex.npu.rtp_write": "write",
    "aiex.set_lock": "write",
}


_FOR = re.compile(r"= (%[\w]+) to (%[\w]+) step (%[\w]+)")


def _constants(line: Line) -> Iterator[tuple[str, int]]:
    """Numbers of an operation and what is inside it, by name."""
    for inner in line.body:
        found = re.match(r"(%\w+) = arith\.constant (-?\d+) : ", inner.text)
        if found:
            yield found[1], int(found[2])
        yield from _constants(inner)


def _lock_use(line: Line) -> tuple[str, str, int]:
    """Whether a lock is taken or given, which, and by how much."""
    lock, action, count, *_ = line.arguments()
    if action not in ("AcquireGreaterEqual", "Release"):
        raise line.refuse("a use of a lock that is not known")
    return "take" if action == "AcquireGreaterEqual" else "give", lock, int(count)


class _Reader:
    """One `aie.device`."""

    def __init__(self, device: Line) -> None:
        self.device = device
        self.tiles = {line.result: self._tile(line) for line in device.body if line.name == "aie.tile"}
        self.memrefs = {line.result: line.text.partition(" : memref")[2] for line in self._named("aie.buffer")}

    def _named(self, *names: str) -> Iterator[Line]:
        return (line for line in self.device.body if line.name in names)

    def _tile(self, line: Line) -> tuple[int, int]:
        column, row = line.arguments()
        return int(column), int(row)

    def _at(self, line: Line, value: str) -> tuple[int, int]:
        if value not in self.tiles:
            raise line.refuse("an unknown tile")
        return self.tiles[value]

    def configuration(self, sequence: str) -> Configuration:
        """With the commands of the sequence of this name."""
        for line in self.device.body:
            if line.name not in _KNOWN:
                raise line.refuse("an operation of a configuration that is not known")
        cores = list(self._named("aie.core"))
        found = self._named("aie.runtime_sequence", "aiex.runtime_sequence")
        commands = next((line for line in found if line.symbol == sequence), None)
        if commands is None:
            raise self.device.refuse(f"no sequence {sequence}")
        arguments = {name.strip(): kind.strip() for name, _, kind in (a.partition(":") for a in commands.arguments())}
        return Configuration(
            self.device.symbol,
            tuple(engine for line in self._named("aie.mem", "aie.memtile_dma") for engine in self._engines(line)),
            tuple(self.buffers()),
            {line.result: line.number_of("init") or 0 for line in self._named("aie.lock")},
            tuple(self._core(core) for core in cores),
            frozenset(core.number_of("stack_size") or STACK_DEFAULT for core in cores),
            (*map(self._flow, self._named("aie.flow")), *self._packet_flows()),
            tuple(arguments),
            tuple(self._commands(commands.body, arguments)),
        )

    def buffers(self) -> Iterator[Buffer]:
        for line in self._named("aie.buffer"):
            elements, size = elements_of(self.memrefs[line.result])
            place = self._at(line, line.arguments()[0])
            address, bank = (line.number_of(attribute) for attribute in ("address", "mem_bank"))
            yield Buffer(line.result, *place, elements * size, address, bank)

    def _flow(self, line: Line) -> Flow:
        source, out, target, into = line.arguments()
        return Flow(self._port(line, source, out, "MM2S"), self._port(line, target, into, "S2MM"))

    def _port(self, line: Line, tile: str, port: str, direction: str) -> Channel:
        bundle, _, number = (word.strip() for word in port.partition(":"))
        if bundle != "DMA":
            raise line.refuse("a stream that is not between DMAs")
        return Channel(*self._at(line, tile), direction, int(number))

    def _packet_flows(self) -> Iterator[Flow]:
        for line in self._named("aie.packet_flow"):
            packet = int(line.arguments()[0], 0)
            ends: dict[str, list[Channel]] = {"MM2S": [], "S2MM": []}
            for inner in line.body:
                if inner.name != "aie.end":
                    direction = {"aie.packet_source": "MM2S", "aie.packet_dest": "S2MM"}[inner.name]
                    tile, port = (word.strip() for word in inner.text.partition("<")[2].rpartition(">")[0].split(","))
                    ends[direction].append(self._port(inner, tile, port, direction))
            yield from (Flow(source, target, packet) for source in ends["MM2S"] for target in ends["S2MM"])

    def _core(self, line: Line) -> Core:
        constants = dict(_constants(line))
        blocks = [inner for inner in line.body if inner.name.startswith("^")]
        if len(blocks) > 1 and any(inner.name == "cf.cond_br" for inner in line.body):
            raise line.refuse("a core with a way of its own")
        return Core(*self._at(line, line.arguments()[0]), tuple(self._actions(line.body, constants)))

    def _actions(self, lines: Sequence[Line], constants: Mapping[str, int]) -> Iterator[Action]:
        for line in lines:
            match line.name:
                case "aie.use_lock":
                    yield Action(*_lock_use(line))
                case "func.call":
                    yield Action("call", buffers=tuple(word for word in line.arguments() if word in self.memrefs))
                case "scf.for":
                    first, last, step = (constants[word] for word in _FOR.findall(line.text)[0])
                    yield Action(
                        "loop", count=-(-(last - first) // step), body=tuple(self._actions(line.body, constants))
                    )
                case _ if line.body:
                    raise line.refuse("an operation of a core that is not known")

    def _engines(self, line: Line) -> Iterator[Engine]:
        place = self._at(line, line.arguments()[0])
        blocks: dict[str, list[Line]] = {"": []}
        for inner in line.body:
            if inner.name.startswith("^"):
                blocks[inner.name] = []
            else:
                blocks[list(blocks)[-1]].append(inner)
        for start in (inner for block in blocks.values() for inner in block if inner.name == "aie.dma_start"):
            direction, number, first, _, *more = start.arguments()
            runs = next((int(word.partition("=")[2]) for word in more if word.startswith("repeat_count")), 0) + 1
            turns, endless = self._turns(blocks, first)
            yield Engine(Channel(*place, direction, int(number)), runs, turns, endless)

    def _turns(self, blocks: Mapping[str, list[Line]], first: str) -> tuple[tuple[Turn, ...], bool]:
        """From the first block on, and whether the last leads to it."""
        turns: list[Turn] = []
        label, seen = first, set()
        while label and label not in seen:
            seen.add(label)
            locks: dict[str, list[LockUse]] = {"take": [], "give": []}
            descriptor, following = None, ""
            for line in blocks[label]:
                match line.name:
                    case "aie.use_lock":
                        what, lock, count = _lock_use(line)
                        locks[what].append((lock, count))
                    case "aie.dma_bd":
                        descriptor = self._descriptor(line, self.memrefs)
                    case "aie.next_bd":
                        following = line.text.split()[1]
                    case "aie.end":
                        pass
                    case _:
                        raise line.refuse("an operation of a DMA that is not known")
            if descriptor is not None:
                turns.append(Turn(tuple(locks["take"]), descriptor, tuple(locks["give"])))
            label = following
        if label not in ("", first):
            raise blocks[label][0].refuse("descriptors that lead into the middle of themselves")
        return tuple(turns), label == first

    def _descriptor(self, line: Line, memrefs: Mapping[str, str]) -> Descriptor:
        first, *rest = line.arguments()
        buffer, _, kind = (word.strip() for word in first.partition(":"))
        elements, size = elements_of(memrefs.get(buffer, kind))
        numbers = [int(word) for word in rest if word.isdigit()]
        offset, length = (*numbers, 0, elements)[:2] if len(numbers) != 1 else (numbers[0], elements)
        patterns = [word for word in rest if not word.isdigit()]
        found = tuple(
            (int(n), int(stride)) for n, stride in re.findall(r"<size = (\d+), stride = (\d+)>", " ".join(patterns))
        )
        if buffer not in memrefs or len(patterns) > 1 or len(found) != " ".join(patterns).count("<"):
            raise line.refuse("a descriptor that cannot be read")
        packet = re.search(r"pkt_id = (\d+)", line.text)
        marked = int(packet[1]) if packet else None
        return Descriptor(buffer, elements, size, offset, length, found or ((length, 1),), line.number, marked)

    def _commands(self, lines: Sequence[Line], arguments: Mapping[str, str]) -> Iterator[Command]:
        channels = {line.symbol: self._allocation(line) for line in self._named("aie.shim_dma_allocation")}
        tasks: dict[str, Task] = {}
        for line in lines:
            if line.name == "aiex.dma_configure_task_for":
                tasks[line.result] = self._task(line, channels, arguments)
            elif line.name in _COMMANDS:
                task = tasks.get(line.arguments()[0]) if line.name.endswith("_task") else None
                device = line.symbol if line.name.endswith("load_pdi") else ""
                target = line.arguments()[0] if _COMMANDS[line.name] == "write" else ""
                yield Command(_COMMANDS[line.name], task, device, target)
            elif line.name != "arith.constant":
                raise line.refuse("a command that is not known")

    def _allocation(self, line: Line) -> Channel:
        tile, direction, number, *_ = line.arguments()
        return Channel(*self._at(line, tile), direction, int(number))

    def _task(self, line: Line, channels: Mapping[str, Channel], arguments: Mapping[str, str]) -> Task:
        inner = [one for one in line.body if one.name not in ("aie.end",)]
        if line.symbol not in channels or any(one.name != "aie.dma_bd" for one in inner):
            raise line.refuse("a task that cannot be read")
        descriptors = tuple(self._descriptor(one, arguments) for one in inner)
        runs = (line.number_of("repeat_count") or 0) + 1 if line.tail else 1
        return Task(channels[line.symbol], line.symbol, descriptors, runs, "issue_token = true" in line.tail)
