"""A phase on the NPU: stretches of host calls and stretches of device calls, the latter as runs and run lists."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from llama_npu2.artifact.dtypes import nbytes
from llama_npu2.artifact.plan import Positions, first_of
from llama_npu2.devices import Binding, Call, Submission
from llama_npu2.devices.xrt.bindings import FAILURES, failures, first_line
from llama_npu2.devices.xrt.buffers import Range, XrtBuffer
from llama_npu2.devices.xrt.limits import CHAIN, COMMAND, RECOVERY, WATCHDOG, WATCHDOG_PERIODS
from llama_npu2.devices.xrt.session import Session, XrtProgram
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen

TIMEOUT_MS = round(1000 * (WATCHDOG_PERIODS * WATCHDOG + RECOVERY + COMMAND))
"""Longest wait for a run. The driver ends a command and reports that in less, even when the NPU has to wake first
(150 ms), so a verdict of the driver is not missed."""

_BUSY = ("NEW", "QUEUED", "SUBMITTED")
"""Endings of the states of a run that has not finished."""


@frozen
class Access:
    """A call's access to one buffer."""

    buffer: XrtBuffer
    binding: Binding
    slot: str
    rows: str
    """The name of the slot's first dimension, if it has one; a `max_seq` slot is a cache, to which a call adds rows."""
    nbytes: int
    """Bytes of a slot of static shape, else 0."""
    reads: bool
    writes: bool

    @staticmethod
    def of(binding: Binding, slot: Mapping[str, Any]) -> Access:
        """Return the access of a call that binds a buffer to `slot`, as the manifest describes it."""
        shape = slot["shape"]
        named = any(isinstance(dim, str) for dim in shape)
        first = str(shape[0]) if named else ""
        writes = slot["role"] in ("output", "scratch")
        reads = not writes or first == "max_seq"
        size = 0 if named else nbytes(slot["dtype"], shape)
        return Access(binding.buffer, binding, slot["name"], first, size, reads, writes)

    def read(self, seq: int, pos: Positions) -> Range:
        """Return the bytes that a call of `seq` rows from position `pos` on reads."""
        if self.rows == "max_seq":
            pos = first_of(pos)
            return 0, (pos if self.writes else pos + seq) * self.binding.row_bytes
        return self._range(seq, pos)

    def written(self, seq: int, pos: Positions) -> Range:
        """Return the bytes that a call of `seq` rows from position `pos` on writes."""
        if self.rows == "max_seq":
            pos = first_of(pos)
            return pos * self.binding.row_bytes, (pos + seq) * self.binding.row_bytes
        return self._range(seq, pos)

    def _range(self, seq: int, pos: Positions) -> Range:
        start = self.binding.offset(seq, pos)
        size = self.nbytes or (self.binding.row_bytes if self.binding.view else self.buffer.nbytes)
        if self.rows == "seq":
            size = seq * self.binding.row_bytes
        if start + size > self.buffer.nbytes:
            raise UserError(
                f"slot {self.slot} needs {size} bytes from {start} on, its buffer has {self.buffer.nbytes}: "
                "run doit compile"
            )
        return start, start + size


def accesses(calls: Sequence[Call]) -> Iterator[Access]:
    """Yield the accesses of calls, in order, to buffers that both sides can change."""
    for call in calls:
        for binding, slot in zip(call.bindings, call.slots, strict=True):
            if isinstance(binding.buffer, XrtBuffer) and not binding.buffer.constant:
                yield Access.of(binding, slot)


class XrtSubmission:
    """A phase as alternating stretches of host calls and device calls.

    While the device runs, the host goes on with the next stretch if that touches no memory of the device's: it unpacks
    the weights of the next program.
    """

    def __init__(self, session: Session, calls: Sequence[Call]) -> None:
        self._session = session
        self._stretches: list[_Device | _Host] = [
            _Device(session, list(part)) if device else _Host(session, list(part))
            for device, part in groupby(calls, lambda call: isinstance(call.program, XrtProgram))
        ]
        on_device = [call for call in calls if isinstance(call.program, XrtProgram)]
        self.calls = Counter(call.program for call in on_device)
        self._concurrent = list(_concurrent(self._stretches))
        wholes = {buffer.whole for stretch in self._stretches for buffer in stretch.touched}
        self._parts = [part for whole in wholes for part in whole.parts]
        self.suspended = False
        self._inputs = [access for access in accesses(on_device) if access.reads]

    def run(self, seq: int, pos: Positions) -> None:
        session = self._session
        if session.lost:
            raise UserError(session.lost)
        session.drain()
        self.suspended = False
        try:
            for part in (part for part in self._parts if part.host_newer):
                # After an interrupted call: cache lines that the host still holds would overwrite the new content.
                part.to_device(0, part.nbytes)
            for access in self._inputs:
                if access.buffer.shown:
                    access.buffer.host_newer.add(*access.read(seq, pos))
            self._run_stretches(seq, pos)
            for buffer in session.buffers:
                if buffer.shown:
                    buffer.from_device(0, buffer.nbytes)
        except UserError as error:
            session.lost = str(error)
            raise

    def _run_stretches(self, seq: int, pos: Positions) -> None:
        running: _Device | None = None
        for stretch, concurrent in zip(self._stretches, self._concurrent, strict=True):
            if running and not concurrent:
                running.finish()
                running = None
            stretch.run(seq, pos)
            if isinstance(stretch, _Device):
                running = stretch
            elif running:
                # The device's next stretch needs it, and the device is busy anyway.
                stretch.hand_over(seq, pos)
        if running:
            running.finish()

    def suspend(self) -> None:
        """Release the runs.

        Each has a copy of its program's instructions, for which the driver's heap has little room.
        """
        self.suspended = True
        for stretch in self._stretches:
            stretch.release()

    def release(self) -> None:
        """Release everything for good."""
        self.suspend()
        self._stretches.clear()


def _concurrent(stretches: Iterable[_Device | _Host]) -> Iterator[bool]:
    """Yield for each stretch whether it may run while the device's last one runs.

    That is so for those of the host that touch none of its memory.
    """
    device: frozenset[XrtBuffer] = frozenset()
    for stretch in stretches:
        yield isinstance(stretch, _Host) and not any(a.overlaps(b) for a in stretch.touched for b in device)
        if isinstance(stretch, _Device):
            device = stretch.touched


class _Host:
    """Calls of host programs, in one native call."""

    def __init__(self, session: Session, calls: Sequence[Call]) -> None:
        self._accesses = list(accesses(calls))
        self.touched = frozenset(access.buffer for access in self._accesses)
        self._native: Submission = session.cpu.prepare(calls)

    def run(self, seq: int, pos: Positions) -> None:
        for access in self._accesses:
            buffer = access.buffer
            if access.reads:
                buffer.from_device(*access.read(seq, pos))
            if access.writes:
                written = access.written(seq, pos)
                buffer.device_newer.take(*written)
                buffer.host_newer.add(*written)
        self._native.run(seq, pos)

    def hand_over(self, seq: int, pos: Positions) -> None:
        """Make the bytes that it wrote visible to the device."""
        for access in self._accesses:
            if access.writes:
                access.buffer.to_device(*access.written(seq, pos))

    def release(self) -> None:
        """Do nothing: host calls take nothing from the device."""


class _Device:
    """Calls of device programs: one submission for each group that a run list can hold, else one each."""

    def __init__(self, session: Session, calls: Sequence[Call]) -> None:
        self._session = session
        self._calls = calls
        self._accesses = list(accesses(calls))
        self.touched = frozenset(access.buffer for access in self._accesses)
        self._groups: list[_Single | _List] = []

    def run(self, seq: int, pos: Positions) -> None:
        """Run all submissions, but only start the last one: `finish` waits for it."""
        if not self._groups:
            # At first use, when all phases are prepared: not every bucket gets used.
            self._groups = list(self._grouped())
        for access in self._accesses:
            self._hand_over(access, seq, pos)
        for group in self._groups[:-1]:
            group.start(seq, pos)
            group.finish()
        self._groups[-1].start(seq, pos)

    def finish(self) -> None:
        self._groups[-1].finish()

    def release(self) -> None:
        for group in self._groups:
            group.release()
        self._groups = []

    def _hand_over(self, access: Access, seq: int, pos: Positions) -> None:
        buffer = access.buffer
        low, high = access.written(seq, pos)
        # Written bytes as well: a cache line that the host still holds would overwrite the result.
        buffer.to_device(low, high)
        if access.writes:
            buffer.device_newer.add(low, high)

    def _grouped(self) -> Iterator[_Single | _List]:
        session, own = self._session, self._session.runs_of_their_own()
        listed = hasattr(session.pyxrt, "runlist") and os.environ.get("LLAMA_NPU2_RUNLIST") != "0"
        runs = [_Run(session, call, call.program in own) for call in self._calls]
        for (context, listable), part in groupby(runs, lambda run: (run.program.context, listed and run.own)):
            for group in lists(part) if listable else ([run] for run in part):
                yield _List(session, context, group) if len(group) > 1 else _Single(session, group[0])


def lists(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    """Cut runs of one context into run lists, so that no command takes longer than `COMMAND`.

    XRT makes one command of every `CHAIN` runs of a list. A list ends where another run would make its last command too
    long.
    """
    group: list[_Run] = []
    seconds = 0.0
    for run in runs:
        if len(group) % CHAIN == 0:
            seconds = 0.0
        seconds += run.program.milliseconds / 1000
        if seconds >= COMMAND and len(group) % CHAIN:
            yield group
            group, seconds = [], run.program.milliseconds / 1000
        group.append(run)
    if group:
        yield group


class _Run:
    """One call as XRT runs it. `own` says that no other call shares its run, so that fixed arguments are set once."""

    def __init__(self, session: Session, call: Call, own: bool) -> None:
        self.program: XrtProgram = call.program
        self.own = own
        self.name, self.about = call.name, call.about
        self.where = f"{self.program.name}, {call.place}" if call.place else self.program.name
        self.run: Any = session.new_run(self.program) if own else session.shared_run(self.program)
        accesses = [Access.of(binding, slot) for binding, slot in zip(call.bindings, call.slots, strict=True)]
        self._moving = [(index, access) for index, access in enumerate(accesses) if access.binding.view or not own]
        self._views: list[Any] = []
        for index, access in enumerate(accesses):
            if own and not access.binding.view:
                self._set(index, access.buffer.bo)

    def _set(self, index: int, bo: Any) -> None:
        with failures(self.where):
            self.run.set_arg(index, bo)

    def move(self, seq: int, pos: Positions) -> None:
        """Set the arguments that depend on the position, and those that other calls changed."""
        views = []
        for index, access in self._moving:
            offset = access.binding.offset(seq, pos)
            views.append(access.buffer.view(offset, access.nbytes) if access.binding.view else access.buffer.bo)
            self._set(index, views[-1])
        self._views = views

    def release(self) -> None:
        self.run, self._views = None, []

    def failed(self, state: str) -> UserError:
        """Return the error for a run that ended in `state`."""
        if state.endswith("TIMEOUT"):
            what, advice = "did not finish in time", "docs/tutorials/ryzen-ai.md on timeouts"
        else:
            what, advice = "failed", "doit doctor on firmware and driver"
        return UserError(f"{self.where}: {what} on the NPU ({state}): see dmesg, and {advice}")


class _Single:
    """One run, one submission."""

    def __init__(self, session: Session, run: _Run) -> None:
        self._session, self._run = session, run

    def start(self, seq: int, pos: Positions) -> None:
        session, run = self._session, self._run
        session.timed("submit", "arguments", run.move, seq, pos)
        session.counts.submissions += 1
        session.counts.runs += 1
        with self._failures():
            session.timed("submit", "start", run.run.start)
        session.running = partial(run.run.wait, TIMEOUT_MS)

    def finish(self) -> None:
        session, run, about = self._session, self._run, self._run.about | {"runs": 1}
        with self._failures():
            waited = session.timed("wait", run.name, run.run.wait, TIMEOUT_MS, about=about)
            state = run.run.state()
        if state == session.pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED:
            session.running = None
            return
        if not state.name.endswith(_BUSY):
            session.running = None
        # A run that has not finished keeps its state; then the result of the wait says what happened.
        raise run.failed(waited.name if state.name.endswith(_BUSY) else state.name)

    def _failures(self) -> contextlib.AbstractContextManager[None]:
        return failures(f"{self._run.where}: cannot run", "see dmesg, the NPU may be gone")

    def release(self) -> None:
        self._run.release()


class _List:
    """Several runs of one context, one submission."""

    def __init__(self, session: Session, context: int, runs: Sequence[_Run]) -> None:
        self._session, self._runs = session, runs
        with failures(f"{runs[0].where}: no run list"):
            self._list: Any = session.pyxrt.runlist(session.contexts[context])
            for run in runs:
                self._list.add(run.run)

    def start(self, seq: int, pos: Positions) -> None:
        session = self._session
        for run in self._runs:
            session.timed("submit", "arguments", run.move, seq, pos)
        session.counts.submissions += 1
        session.counts.runs += len(self._runs)
        session.running = self._list.wait
        with failures(f"{self._runs[0].where} and the calls after it cannot run", "see dmesg, the NPU may be gone"):
            session.timed("submit", "start", self._list.execute)

    def finish(self) -> None:
        session = self._session
        try:
            # The bindings have no usable time limit here; the driver's watchdog ends a run that hangs.
            names = " ".join(dict.fromkeys(run.name for run in self._runs))
            session.timed("wait", names, self._list.wait, about={"runs": len(self._runs)})
        except FAILURES as error:
            raise self._blame(error) from None
        finally:
            session.running = None

    def release(self) -> None:
        self._list = None
        for run in self._runs:
            run.release()

    def _blame(self, error: Exception) -> UserError:
        """Return the error for the run that failed: XRT keeps its state, and aborts the runs after it."""
        for run in self._runs:
            state = run.run.state().name
            if not state.endswith((*_BUSY, "COMPLETED", "ABORT")):
                return run.failed(state)
        return UserError(f"{self._runs[0].where} or a call after it failed on the NPU: {first_line(error)}: see dmesg")
