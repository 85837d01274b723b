"""Runs what the compiler made of a launch, as far as who waits for whom: locks, descriptors, streams, commands.

No data is moved, only counted. Streams hold more than the array's do, so that what waits for ever here waits for ever
there, too; not the other way round.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llama_npu2.errors import UserError
from stages.air import limits
from stages.targets.npu2.compiled import Action, Channel, Configuration, Core, Engine, Task, Turn

HELD = limits.L1_BYTES
"""Bytes that may wait at the end of a stream before its beginning waits."""

Stream = tuple[Channel, int | None]
"""Where it begins, and what its packets are marked with."""


def check_liveness(where: str, configuration: Configuration) -> None:
    """UserError if the commands of a launch would wait for ever, or if a core would use a buffer that is not the one
    that its DMA filled or sends."""
    _Array(where, configuration).run()


@dataclass(eq=False)
class _Ring:
    """Buffers of a core that a channel goes through in turn; `used`: how many of them the core has begun with."""

    buffers: tuple[str, ...]
    used: int = 0

    def use(self, buffer: str) -> str | None:
        """What the channel is at, where that is neither the buffer that the core used last nor the next."""
        now, behind = (self.buffers[(self.used + step) % len(self.buffers)] for step in (0, -1))
        if buffer == now:
            self.used += 1
        return None if buffer == now or (self.used > 0 and buffer == behind) else now


@dataclass(eq=False)
class _Part:
    """A core, a channel or the commands: `steps` yields whenever it has to wait. What it waits for is in `waits`."""

    steps: Iterator[None]
    waits: str = ""


@dataclass(eq=False)
class _Array:
    where: str
    configuration: Configuration
    locks: dict[str, int] = field(default_factory=dict)
    arrived: Counter[Channel] = field(default_factory=Counter)
    """Bytes that wait at the channel that takes them."""
    targets: dict[Stream, list[Channel]] = field(default_factory=lambda: defaultdict(list))
    pushed: dict[Channel, deque[Task]] = field(default_factory=lambda: defaultdict(deque))
    done: Counter[Task] = field(default_factory=Counter)
    moved: bool = False

    def run(self) -> None:
        self.locks = dict(self.configuration.locks)
        for flow in self.configuration.flows:
            self.targets[flow.source, flow.packet].append(flow.target)
        commands = _Part(iter(()))
        commands.steps = self._commands(commands)
        parts = [commands, *self._others()]
        alive = {id(part) for part in parts}
        while id(commands) in alive:
            self.moved = False
            for part in parts:
                if id(part) in alive and next(part.steps, "over") == "over":
                    alive.discard(id(part))
            if not self.moved and id(commands) in alive:
                waiting = [part.waits for part in parts[1:] if id(part) in alive and "core" in part.waits]
                also = f", {waiting[0]}" if waiting else ""
                raise UserError(f"{self.where}: never ends: {commands.waits}{also}")

    def _others(self) -> Iterator[_Part]:
        for engine in self.configuration.engines:
            part = _Part(iter(()))
            part.steps = self._engine(engine, part)
            yield part
        for core in self.configuration.cores:
            part = _Part(iter(()))
            part.steps = self._core(core, part)
            yield part
        shim = {command.task.channel for command in self.configuration.commands if command.task}
        for channel in sorted(shim, key=str):
            part = _Part(iter(()))
            part.steps = self._shim(channel)
            yield part

    # what they do

    def _take(self, lock: str, count: int) -> bool:
        if self.locks[lock] < count:
            return False
        self.locks[lock] -= count
        self.moved = True
        return True

    def _give(self, lock: str, count: int) -> None:
        self.locks[lock] += count
        self.moved = True

    def _send(self, stream: Stream, count: int) -> None:
        for target in self.targets[stream]:
            self.arrived[target] += count
        self.moved = True

    def _receive(self, channel: Channel, count: int) -> Iterator[None]:
        """What has arrived is taken at once: a descriptor may be longer than what a stream holds."""
        while count:
            taken = min(count, self.arrived[channel])
            if taken == 0:
                yield
                continue
            self.arrived[channel] -= taken
            count -= taken
            self.moved = True

    def _commands(self, part: _Part) -> Iterator[None]:
        for command in self.configuration.commands:
            if command.what == "start" and command.task:
                self.pushed[command.task.channel].append(command.task)
                self.moved = True
            elif command.what == "await" and command.task:
                part.waits = f"the commands wait for {command.task.channel}"
                while not self.done[command.task]:
                    yield
                self.done[command.task] -= 1
            elif command.what == "write" and command.target in self.locks:
                self.locks[command.target] = 1
                self.moved = True

    def _shim(self, channel: Channel) -> Iterator[None]:
        while True:
            while not self.pushed[channel]:
                yield
            task = self.pushed[channel].popleft()
            for descriptor in task.descriptors * task.runs:
                if channel.direction == "MM2S":
                    self._send((channel, descriptor.packet), descriptor.bytes)
                else:
                    yield from self._receive(channel, descriptor.bytes)
            self.done[task] += 1
            self.moved = True

    def _engine(self, engine: Engine, part: _Part) -> Iterator[None]:
        turns = 0
        while turns == 0 or engine.endless or turns < engine.runs:
            for turn in engine.turns:
                yield from self._turn(engine.channel, turn, part)
                # Channels that share a lock move equally much at a time: none takes a second turn before the others.
                yield
            turns += 1

    def _turn(self, channel: Channel, turn: Turn, part: _Part) -> Iterator[None]:
        for lock, count in turn.takes:
            while not self._take(lock, count):
                yield
        if channel.direction == "MM2S":
            stream = (channel, turn.descriptor.packet)
            while not self.targets[stream] or any(self.arrived[target] >= HELD for target in self.targets[stream]):
                yield
            self._send(stream, turn.descriptor.bytes)
        else:
            yield from self._receive(channel, turn.descriptor.bytes)
        for lock, count in turn.gives:
            self._give(lock, count)

    def _core(self, core: Core, part: _Part) -> Iterator[None]:
        rings = {buffer: ring for ring in self._rings(core) for buffer in ring.buffers}
        actions = list(_unrolled(core.actions))
        part.waits = f"core ({core.column}, {core.row}) waits"
        while actions:
            for action in actions:
                if action.what == "take":
                    while not self._take(action.lock, action.count):
                        yield
                elif action.what == "give":
                    self._give(action.lock, action.count)
                else:
                    self._call(core, action, rings)
            yield

    def _call(self, core: Core, action: Action, rings: Mapping[str, _Ring]) -> None:
        for buffer in action.buffers:
            wanted = rings[buffer].use(buffer) if buffer in rings else None
            if wanted is not None:
                where = f"{self.where}: core ({core.column}, {core.row})"
                raise UserError(f"{where} uses {buffer} where its DMA is at {wanted}")

    def _rings(self, core: Core) -> Iterator[_Ring]:
        """Where a channel of the core's tile has several buffers."""
        for engine in self.configuration.engines:
            buffers = tuple(descriptor.buffer for descriptor in engine.descriptors)
            if (engine.channel.column, engine.channel.row) == (core.column, core.row) and len(set(buffers)) > 1:
                yield _Ring(buffers)


def _unrolled(actions: Sequence[Action]) -> Iterator[Action]:
    for action in actions:
        if action.what == "loop":
            inner = list(_unrolled(action.body))
            for _ in range(action.count):
                yield from inner
        else:
            yield action
