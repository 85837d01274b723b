"""Simulates who waits for whom in a compiled launch: locks, descriptors, streams and commands.

Bytes are counted, not moved. The simulated streams buffer more than those of the array: a deadlock here is a deadlock
there too, but not the other way round.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llama_npu2.errors import UserError
from stages.air import limits
from stages.targets.npu2.compiled import Action, Channel, Configuration, Core, Engine, Task, Turn

HELD = limits.L1_BYTES
"""Bytes that may wait at the end of a stream before the sender waits."""

Stream = tuple[Channel, int | None]
"""(channel that sends, ID of its packets or None)."""


def check_liveness(where: str, configuration: Configuration) -> Mapping[Channel, int]:
    """Return how many turns each channel of a tile has while the commands of a launch run.

    Raises UserError if they would wait for ever, or mix up buffers: a core would use another buffer than its DMA filled
    or sends. Also if more is sent than is taken, because the array's streams hold no more than a few words of it.
    """
    array = _Array(where, configuration)
    array.run()
    return array.turned


@dataclass(eq=False)
class _Lane:
    """The turns of a channel at a core's tile, for whose buffers the core and the channel trade two locks."""

    engine: Engine
    ready: str
    """The lock that the channel gives after each turn."""
    free: str
    """The lock that it takes before each turn."""
    locks: Mapping[str, int]
    """How often each can be taken at the start."""
    taken: int = 0
    """How often the core took `ready`."""
    given: int = 0
    """How often it gave `free`."""
    turns: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The turns of each buffer."""
    unused: set[tuple[str, int]] = field(default_factory=set)
    """(buffer, first element) of what the core took and has not used yet."""

    def __post_init__(self) -> None:
        for turn, descriptor in enumerate(self.engine.descriptors):
            self.turns[descriptor.buffer].append(turn)

    def until(self, buffer: str) -> int | None:
        """Return the turn of the channel before which the core must have used a buffer, -1 if it has not taken it.

        None if the channel does not use that buffer.
        """
        count, at_start = len(self.engine.turns), self.locks[self.ready]
        latest = self.taken - at_start - 1
        lasts = [latest - (latest - turn) % count for turn in self.turns.get(buffer, ())]
        if not lasts:
            return None
        return -1 if min(lasts) < -at_start else min(lasts) + count

    @property
    def current(self) -> tuple[str, int]:
        """The buffer that the core took last, and the first element that the channel filled or sends."""
        turn = self.taken - self.locks[self.ready] - 1
        descriptor = self.engine.turns[turn % len(self.engine.turns)].descriptor
        return (descriptor.buffer, descriptor.offset) if self.taken else ("none", 0)


@dataclass(eq=False)
class _Process:
    """A core, a channel or the commands."""

    steps: Iterator[None] = field(default_factory=lambda: iter(()))
    """Yields whenever the process has to wait."""
    waits: str = ""
    """What it waits for."""
    within: bool = False
    """Whether it is a core that has taken inputs of a pass which it has not finished."""


@dataclass(eq=False)
class _Array:
    """The state of the array while a launch runs."""

    where: str
    configuration: Configuration
    locks: dict[str, int] = field(default_factory=dict)
    arrived: Counter[Channel] = field(default_factory=Counter)
    """Bytes that wait at each receiving channel."""
    targets: dict[Stream, list[Channel]] = field(default_factory=lambda: defaultdict(list))
    pushed: dict[Channel, deque[Task]] = field(default_factory=lambda: defaultdict(deque))
    done: Counter[Task] = field(default_factory=Counter)
    turned: Counter[Channel] = field(default_factory=Counter)
    """Turns that each channel of a tile did."""
    early: dict[tuple[Channel, int], str] = field(default_factory=dict)
    """(channel, turn) -> what is wrong if the channel ever gets there: a core used a buffer that it had given."""
    lost: str = ""
    """What is wrong if a core never used what came."""
    moved: bool = False
    """Whether anything happened in this round."""

    def run(self) -> None:
        self.locks = dict(self.configuration.locks)
        for flow in self.configuration.flows:
            self.targets[flow.source, flow.packet].append(flow.target)
        commands = _Process()
        commands.steps = self._commands(commands)
        processes = [commands, *self._others()]
        alive = {id(process) for process in processes}
        self.moved = True
        while self.moved or id(commands) in alive:
            self.moved = False
            for process in processes:
                if id(process) in alive and next(process.steps, "over") == "over":
                    alive.discard(id(process))
            if not self.moved and id(commands) in alive:
                cores = [process.waits for process in processes[1:] if id(process) in alive and process.waits]
                also = f", {cores[0]}" if cores else ""
                raise UserError(f"{self.where}: never ends: {commands.waits}{also}")
        for channel, count in self.arrived.items():
            if count and channel.row:
                raise UserError(f"{self.where}: {channel} is sent {count} bytes that nobody takes")
        for process in processes:
            if process.within:
                raise UserError(f"{self.where}: {process.waits} for more when all is over: it was sent too much")
        for (channel, turn), stale in self.early.items():
            if self.turned[channel] > turn:
                raise UserError(stale)
        if self.lost:
            raise UserError(self.lost)

    def _others(self) -> Iterator[_Process]:
        for engine in self.configuration.engines:
            yield _Process(self._engine(engine))
        for core in self.configuration.cores:
            process = _Process(waits=f"core ({core.column}, {core.row}) waits")
            process.steps = self._core(core, process)
            yield process
        shim = {command.task.channel for command in self.configuration.commands if command.task}
        for channel in sorted(shim, key=str):
            yield _Process(self._shim(channel))

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
        """Take bytes as they arrive, because a descriptor may be longer than what a stream buffers."""
        while count:
            received = min(count, self.arrived[channel])
            if received == 0:
                yield
                continue
            self.arrived[channel] -= received
            count -= received
            self.moved = True

    def _commands(self, process: _Process) -> Iterator[None]:
        for command in self.configuration.commands:
            if command.what == "start" and command.task:
                self.pushed[command.task.channel].append(command.task)
                self.moved = True
            elif command.what == "await" and command.task:
                process.waits = f"the commands wait for {command.task.channel}"
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

    def _engine(self, engine: Engine) -> Iterator[None]:
        turns = 0
        while turns == 0 or engine.endless or turns < engine.runs:
            for turn in engine.turns:
                yield from self._turn(engine.channel, turn)
                # Channels that share a lock move the same amount: none has a second turn before the others had one.
                yield
            turns += 1

    def _turn(self, channel: Channel, turn: Turn) -> Iterator[None]:
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
        self.turned[channel] += 1
        for lock, count in turn.gives:
            self._give(lock, count)

    def _core(self, core: Core, process: _Process) -> Iterator[None]:
        lanes = list(self._lanes(core))
        ready = {lane.ready for lane in lanes if lane.engine.channel.direction == "S2MM"}
        actions = list(_unrolled(core.actions))
        while actions:
            for action in actions:
                if action.what == "take":
                    while not self._take(action.lock, action.count):
                        yield
                    process.within = process.within or action.lock in ready
                elif action.what == "give":
                    self._give(action.lock, action.count)
                for lane in lanes:
                    self._trade(core, lane, action)
            process.within = False
            yield

    def _trade(self, core: Core, lane: _Lane, action: Action) -> None:
        """Follow a core's action that may be about the buffers of a channel."""
        where = f"{self.where}: core ({core.column}, {core.row})"
        if action.what == "take" and action.lock == lane.ready:
            lane.taken += action.count
            if lane.current in lane.unused:
                self.lost = (
                    self.lost or f"{where} has not used what its DMA brought to {lane.current[0]}, where more comes"
                )
            lane.unused |= {lane.current} if lane.engine.channel.direction == "S2MM" else set()
        elif action.what == "give":
            lane.given += action.count * (action.lock == lane.free)
        lane.unused -= {kept for kept in lane.unused if kept[0] in action.buffers}
        for buffer in action.buffers:
            until = lane.until(buffer)
            if until is None or until >= lane.locks[lane.free] + lane.given:
                continue
            stale = f"{where} uses {buffer} where its DMA is at {lane.current[0]}"
            if until < 0:
                raise UserError(stale)
            self.early.setdefault((lane.engine.channel, until), stale)

    def _lanes(self, core: Core) -> Iterator[_Lane]:
        """Yield the channels of the core's tile of which each turn takes and gives the same locks once.

        A channel with several programs, one after the other, is left out.
        """
        programs = Counter(engine.channel for engine in self.configuration.engines)
        for engine in self.configuration.engines:
            takes = {use for turn in engine.turns for use in turn.takes}
            gives = {use for turn in engine.turns for use in turn.gives}
            here = (engine.channel.column, engine.channel.row) == (core.column, core.row)
            alike = len(takes) == len(gives) == 1 and all(count == 1 for _, count in takes | gives)
            if here and alike and programs[engine.channel] == 1:
                ((free, _),), ((ready, _),) = takes, gives
                yield _Lane(engine, ready, free, self.configuration.locks)


def _unrolled(actions: Sequence[Action]) -> Iterator[Action]:
    for action in actions:
        if action.what == "loop":
            yield from list(_unrolled(action.body)) * action.count
        else:
            yield action
