"""Reads the MLIR that the compiler leaves: how each launch configures the array, and the commands that move data.

The reader goes line by line: mlir-aie prints one operation to a line, in the custom syntax of its dialects, and xDSL
parses unregistered operations only in MLIR's generic syntax. An unknown operation is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages import air

Dims = tuple[tuple[int, int], ...]
"""(size, stride) of each dimension, outermost first, in elements."""

STACK_DEFAULT = 1024
"""Bytes of stack of a core without `stack_size` (mlir-aie, `AIEOps.td`)."""

_BITS = {"bf16": 16, "f32": 32, "i32": 32, "i16": 16, "i8": 8}


@dataclass
class Line:
    """An operation, or the label of a block."""

    number: int
    text: str
    """Without the opening brace."""
    body: list[Line] = field(default_factory=list)
    """The operations inside it."""
    tail: str = ""
    """The text after its closing brace."""

    @property
    def name(self) -> str:
        """The name of the operation (`aie.tile`) or the label (`^bb1`)."""
        return self._first(r"(?:%[\w#:, %]+ = )?([\w.]+|\^\w+)", self.text)

    @property
    def result(self) -> str:
        return self._first(r"(%\w+) = ", self.text)

    @property
    def symbol(self) -> str:
        """The first `@name`, else `sym_name` of the attributes."""
        return self._first(r".*?@([\w.]+)", self.text) or self._first(
            r'.*?sym_name = "([^"]+)"', self.tail or self.text
        )

    @staticmethod
    def _first(pattern: str, text: str) -> str:
        """Return the first group of a pattern that the text begins with, or an empty text."""
        match = re.match(pattern, text)
        return match[1] if match else ""

    def arguments(self) -> list[str]:
        """Return the text between the first pair of parentheses, split at its commas."""
        start = self.text.find("(")
        depth, arguments, argument = 0, [], ""
        for letter in self.text[start + 1 :] if start >= 0 else "":
            if letter in ")]}>" and depth == 0:
                break
            depth += (letter in "([{<") - (letter in ")]}>")
            if letter == "," and depth == 0:
                arguments.append(argument.strip())
                argument = ""
            else:
                argument += letter
        return [*arguments, argument.strip()] if argument.strip() else arguments

    def number_of(self, attribute: str) -> int | None:
        """Return an integer attribute of the operation's dictionary; None without it."""
        number = self._first(rf".*?\b{attribute} = (-?\d+)", self.tail or self.text)
        return int(number) if number else None

    def error(self, what: str) -> UserError:
        """Return the error that this line is refused with."""
        return UserError(f"line {self.number} of what aircc made: {what}: {self.text[:100]}")


def read_lines(text: str) -> list[Line]:
    """Return the operations of a module, nested like their braces. Raises UserError if braces do not match."""
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
            operation = Line(number, line.removesuffix("{").strip())
            open_lines[-1].body.append(operation)
            if line.endswith("{"):
                open_lines.append(operation)
    if len(open_lines) > 1:
        raise UserError(f"what aircc made ends inside line {open_lines[-1].number}")
    return top.body


def elements_of(memref: str) -> tuple[int, int]:
    """Return (number of elements, bytes of one) of a type `memref<2x4xbf16, 2 : i32>`.

    Raises UserError if the shape is not fixed.
    """
    match = re.match(r"(?:memref)?<((?:\d+x)*)(\w+)[,>]", memref)
    if not match or match[2] not in _BITS:
        raise UserError(f"what aircc made has a buffer of type {memref[:60]}, which cannot be read")
    return math.prod(int(n) for n in match[1].split("x") if n), _BITS[match[2]] // 8


@frozen
class Descriptor:
    """A buffer descriptor: one transfer of a DMA. Sizes are in elements."""

    buffer: str
    """The SSA name of the buffer."""
    elements: int
    """Size of the buffer."""
    element_bytes: int
    offset: int
    length: int
    dims: Dims
    """As written, else `length` elements in order."""
    line: int
    packet: int | None = None
    """The ID of the packets that it sends; None in a circuit-switched stream."""

    @property
    def bytes(self) -> int:
        return self.length * self.element_bytes


@frozen
class Channel:
    """A DMA channel of a tile."""

    column: int
    row: int
    direction: str
    """MM2S (out of memory) or S2MM (into memory)."""
    number: int

    def __str__(self) -> str:
        return f"channel {self.direction} {self.number} of tile ({self.column}, {self.row})"


@frozen(eq=False)
class Task:
    """A task of a shim channel: descriptors that run one after the other."""

    channel: Channel
    stream: str
    """The symbol of the channel's allocation."""
    descriptors: tuple[Descriptor, ...]
    runs: int
    """How often all of them run."""
    token: bool
    """Whether its end is signalled, so that it can be awaited."""


@frozen
class Command:
    """A command of a launch."""

    what: str
    """`start`, `await` or `free` (a task), `load` (a configuration) or `write` (a number)."""
    task: Task | None = None
    device: str = ""
    """The configuration that is loaded."""
    target: str = ""
    """The lock, or the memory of a core, that is written."""


LockUse = tuple[str, int]
"""(lock, amount by which it is taken or given)."""


@frozen
class Turn:
    """One descriptor of a tile's channel with its locks."""

    takes: tuple[LockUse, ...]
    """Locks that it waits for and takes before it runs."""
    descriptor: Descriptor
    gives: tuple[LockUse, ...]
    """Locks that it gives afterwards."""


@frozen
class Engine:
    """The program of a DMA channel of a memory or compute tile."""

    channel: Channel
    runs: int
    """How often the turns run, unless they are endless."""
    turns: tuple[Turn, ...]
    """In order."""
    endless: bool

    @property
    def descriptors(self) -> list[Descriptor]:
        return [turn.descriptor for turn in self.turns]


@frozen
class Action:
    """A step of a core's program."""

    what: str
    """`take` or `give` (a lock), `call` (a tile function) or `loop`."""
    lock: str = ""
    count: int = 1
    """The amount for a lock, or the iterations of a loop."""
    buffers: tuple[str, ...] = ()
    """Arguments of the call."""
    body: tuple[Action, ...] = ()
    """Actions of the loop."""


@frozen
class Core:
    """A core and its program."""

    column: int
    row: int
    actions: tuple[Action, ...]
    """Repeated for ever."""


@frozen
class Flow:
    """A stream between two DMAs."""

    source: Channel
    target: Channel
    packet: int | None = None
    """The ID of the packets that it carries; None if it is circuit-switched."""


@frozen
class Buffer:
    """A buffer in the memory of a tile."""

    name: str
    column: int
    row: int
    bytes: int
    address: int | None
    """None, like `bank`, before the compiler has chosen it."""
    bank: int | None


@frozen
class Configuration:
    """How the array is configured for a launch, and the commands that run it."""

    name: str
    engines: tuple[Engine, ...]
    buffers: tuple[Buffer, ...]
    locks: Mapping[str, int]
    """Initial value of each lock."""
    cores: tuple[Core, ...]
    stacks: frozenset[int]
    """The different stack sizes of its cores, in bytes."""
    flows: tuple[Flow, ...]
    arguments: tuple[str, ...]
    """SSA names of the arguments of the commands."""
    commands: tuple[Command, ...]


@frozen
class Compiled:
    """A compiled program."""

    steps: tuple[tuple[Configuration, tuple[int, ...]], ...]
    """Its configurations in the order of a dispatch, each with the indices of the program's arguments that it gets."""

    @property
    def resets(self) -> int:
        """The number of configurations that one dispatch loads, each after a reset of the array.

        The compiler drops a load directly before a load of the same configuration.
        """
        loads: list[str | None] = []
        for configuration, _ in self.steps:
            loads += [configuration.name, *(command.device or None for command in configuration.commands)]
        return sum(name is not None and name != after for name, after in zip(loads, [*loads[1:], None], strict=True))


def read_compiled(text: str, function: str) -> Compiled:
    """Read the program `function` of a module that `airrt-to-npu` lowered. Raises UserError."""
    devices = {line.symbol: line for line in _devices(read_lines(text))}
    main = next(filter(None, (_sequence(device, function) for device in devices.values())), None)
    if main is None:
        raise UserError(f"what aircc made has no sequence {function}")
    configurations: dict[str, Configuration] = {}
    arguments = [argument.partition(":")[0].strip() for argument in main.arguments()]
    steps = []
    for line in main.body:
        if line.name != "aiex.configure" or [inner.name for inner in line.body] != ["aiex.run"]:
            raise line.error("a program does more than to configure and run")
        name, bound = line.symbol, line.body[0].arguments()
        if name not in devices or any(argument not in arguments for argument in bound):
            raise line.error("a program runs what is not there")
        if name not in configurations:
            configurations[name] = _Reader(devices[name]).configuration(line.body[0].symbol)
        steps.append((configurations[name], tuple(map(arguments.index, bound))))
    return Compiled(tuple(steps))


def read_buffers(text: str) -> dict[str, tuple[Buffer, ...]]:
    """Return the buffers of every configuration of a module in which they have addresses."""
    return {line.symbol: tuple(_Reader(line).buffers()) for line in _devices(read_lines(text))}


def _devices(lines: Sequence[Line]) -> Iterator[Line]:
    for line in lines:
        if line.name == "aie.device":
            yield line
        elif line.name in ("module", "builtin.module"):
            yield from _devices(line.body)


def _sequence(device: Line, name: str) -> Line | None:
    """Return the sequence of commands of this name; None if the device does not have it."""
    return next((line for line in device.body if line.name in _SEQUENCES and line.symbol == name), None)


def _touches_none(call: Line) -> bool:
    """Return whether a tile function touches none of its buffers (`air.KEEP`)."""
    return f"{air.KEEP}_" in f"{call.text.partition('(')[0]}_"


_SEQUENCES = ("aie.runtime_sequence", "aiex.runtime_sequence")
_KNOWN = frozenset(
    (
        *("aie.tile", "aie.lock", "aie.buffer", "aie.mem", "aie.memtile_dma", "aie.core", "aie.flow"),
        *("aie.shim_dma_allocation", *_SEQUENCES),
        # Nothing of these is read.
        *("aie.end", "aie.packet_flow", "aie.cascade_flow", "aie.external_buffer", "memref.global", "func.func"),
    )
)
"""Operations that a configuration may have."""

_COMMANDS = {
    **{"aiex.dma_start_task": "start", "aiex.dma_await_task": "await", "aiex.dma_free_task": "free"},
    **{"aiex.npu.load_pdi": "load", "aiex.npu.rtp_write": "write", "aiex.set_lock": "write"},
}
"""Operation of a launch -> `Command.what`."""

_FOR = re.compile(r"= (%[\w]+) to (%[\w]+) step (%[\w]+)")


def _constants(line: Line) -> Iterator[tuple[str, int]]:
    """Yield (name, value) of the integer constants inside an operation."""
    for inner in line.body:
        if match := re.match(r"(%\w+) = arith\.constant (-?\d+) : ", inner.text):
            yield match[1], int(match[2])
        yield from _constants(inner)


def _lock_use(line: Line) -> tuple[str, str, int]:
    """Return (`take` or `give`, lock, amount)."""
    lock, action, count, *_ = line.arguments()
    if action not in ("AcquireGreaterEqual", "Release"):
        raise line.error("a use of a lock that is not known")
    return "take" if action == "AcquireGreaterEqual" else "give", lock, int(count)


class _Reader:
    """Reads one `aie.device`."""

    def __init__(self, device: Line) -> None:
        self.device = device
        tiles = ((line.result, line.arguments()) for line in self._named("aie.tile"))
        self.tiles = {tile: (int(column), int(row)) for tile, (column, row) in tiles}
        self.memrefs = {line.result: line.text.partition(" : memref")[2] for line in self._named("aie.buffer")}

    def _named(self, *names: str) -> Iterator[Line]:
        return (line for line in self.device.body if line.name in names)

    def _at(self, line: Line, value: str) -> tuple[int, int]:
        if value not in self.tiles:
            raise line.error("an unknown tile")
        return self.tiles[value]

    def configuration(self, sequence: str) -> Configuration:
        """Return the configuration with the commands of the sequence of this name."""
        for line in self.device.body:
            if line.name not in _KNOWN:
                raise line.error("an operation of a configuration that is not known")
        cores = list(self._named("aie.core"))
        commands = _sequence(self.device, sequence)
        if commands is None:
            raise self.device.error(f"no sequence {sequence}")
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
            tile = self._at(line, line.arguments()[0])
            address, bank = line.number_of("address"), line.number_of("mem_bank")
            yield Buffer(line.result, *tile, elements * size, address, bank)

    def _flow(self, line: Line) -> Flow:
        source, out, target, into = line.arguments()
        return Flow(self._port(line, source, out, "MM2S"), self._port(line, target, into, "S2MM"))

    def _port(self, line: Line, tile: str, port: str, direction: str) -> Channel:
        bundle, _, number = (word.strip() for word in port.partition(":"))
        if bundle != "DMA":
            raise line.error("a stream that is not between DMAs")
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
            raise line.error("a core with a way of its own")
        return Core(*self._at(line, line.arguments()[0]), tuple(self._actions(line.body, constants)))

    def _actions(self, lines: Sequence[Line], constants: Mapping[str, int]) -> Iterator[Action]:
        for line in lines:
            match line.name:
                case "aie.use_lock":
                    yield Action(*_lock_use(line))
                case "func.call" if _touches_none(line):
                    continue
                case "func.call":
                    yield Action("call", buffers=tuple(word for word in line.arguments() if word in self.memrefs))
                case "scf.for":
                    first, last, step = (constants[word] for word in _FOR.findall(line.text)[0])
                    body = tuple(self._actions(line.body, constants))
                    yield Action("loop", count=-(-(last - first) // step), body=body)
                case _ if line.body:
                    raise line.error("an operation of a core that is not known")

    def _engines(self, line: Line) -> Iterator[Engine]:
        tile = self._at(line, line.arguments()[0])
        blocks: dict[str, list[Line]] = {"": []}
        for inner in line.body:
            if inner.name.startswith("^"):
                blocks[inner.name] = []
            else:
                blocks[list(blocks)[-1]].append(inner)
        for start in (inner for block in blocks.values() for inner in block if inner.name == "aie.dma_start"):
            direction, number, first, _, *options = start.arguments()
            runs = next((int(word.partition("=")[2]) for word in options if word.startswith("repeat_count")), 0) + 1
            turns, endless = self._turns(blocks, first)
            yield Engine(Channel(*tile, direction, int(number)), runs, turns, endless)

    def _turns(self, blocks: Mapping[str, list[Line]], first: str) -> tuple[tuple[Turn, ...], bool]:
        """Return the turns from the first block on, and whether the last one leads back to it."""
        turns: list[Turn] = []
        label, seen = first, set()
        while label and label not in seen:
            seen.add(current := label)
            locks: dict[str, list[LockUse]] = {"take": [], "give": []}
            descriptor, label = None, ""
            for line in blocks[current]:
                match line.name:
                    case "aie.use_lock":
                        what, lock, count = _lock_use(line)
                        locks[what].append((lock, count))
                    case "aie.dma_bd":
                        descriptor = self._descriptor(line, self.memrefs)
                    case "aie.next_bd":
                        label = line.text.split()[1]
                    case "aie.end":
                        pass
                    case _:
                        raise line.error("an operation of a DMA that is not known")
            if descriptor is not None:
                turns.append(Turn(tuple(locks["take"]), descriptor, tuple(locks["give"])))
        if label not in ("", first):
            raise blocks[label][0].error("descriptors that lead into the middle of themselves")
        return tuple(turns), label == first

    def _descriptor(self, line: Line, memrefs: Mapping[str, str]) -> Descriptor:
        first, *rest = line.arguments()
        buffer, _, kind = (word.strip() for word in first.partition(":"))
        elements, size = elements_of(memrefs.get(buffer, kind))
        numbers = [int(word) for word in rest if word.isdigit()]
        offset, length = (*numbers, 0, elements)[:2] if len(numbers) != 1 else (numbers[0], elements)
        patterns = [word for word in rest if not word.isdigit()]
        pattern = " ".join(patterns)
        dims = tuple((int(n), int(stride)) for n, stride in re.findall(r"<size = (\d+), stride = (\d+)>", pattern))
        if buffer not in memrefs or len(patterns) > 1 or len(dims) != pattern.count("<"):
            raise line.error("a descriptor that cannot be read")
        packet = line.number_of("pkt_id")
        return Descriptor(buffer, elements, size, offset, length, dims or ((length, 1),), line.number, packet)

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
                raise line.error("a command that is not known")

    def _allocation(self, line: Line) -> Channel:
        tile, direction, number, *_ = line.arguments()
        return Channel(*self._at(line, tile), direction, int(number))

    def _task(self, line: Line, channels: Mapping[str, Channel], arguments: Mapping[str, str]) -> Task:
        lines = [inner for inner in line.body if inner.name != "aie.end"]
        if line.symbol not in channels or any(inner.name != "aie.dma_bd" for inner in lines):
            raise line.error("a task that cannot be read")
        descriptors = tuple(self._descriptor(inner, arguments) for inner in lines)
        runs = (line.number_of("repeat_count") or 0) + 1 if line.tail else 1
        return Task(channels[line.symbol], line.symbol, descriptors, runs, "issue_token = true" in line.tail)
