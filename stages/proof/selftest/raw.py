"""XRT's objects as they are, for the rungs that try the bindings themselves and for times: no buffer is followed, no
run list cut, and nothing is refused that the runtime would not dare."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.artifact.dtypes import DTYPES, nbytes
from llama_npu2.devices.xrt.bindings import FAILURES, first_line, import_pyxrt
from llama_npu2.devices.xrt.session import exclusive_use
from llama_npu2.devices.xrt.submissions import TIMEOUT_MS
from llama_npu2.errors import UserError
from stages.proof.selftest.faults import Broken, cause_of
from stages.proof.selftest.trial import Slots

NAME_CLASH = "kernel already exists"
"""What XRT says of an ELF whose kernel has the name of one that is there (`xrt_hw_context.cpp`)."""

clock: Callable[[], float] = time.perf_counter


@contextlib.contextmanager
def said() -> Iterator[None]:
    """What the bindings or the runtime raise breaks the rung, by what it says."""
    try:
        yield
    except (*FAILURES, UserError) as error:
        raise Broken(cause_of(str(error)), first_line(error)) from None


@contextlib.contextmanager
def _of_now() -> Iterator[None]:
    """The same around calls that older bindings do not have, or not with these arguments."""
    try:
        with said():
            yield
    except (TypeError, AttributeError) as error:
        raise Broken("old bindings", first_line(error)) from None


def let_go(error: BaseException | None) -> None:
    """Frames of an exception on its way hold what they were called with, and the device is to be closed last."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


@contextlib.contextmanager
def closing(thing: Any) -> Iterator[Any]:
    """Closes it at the end, and before that lets go of what an exception holds."""
    try:
        yield thing
    except BaseException as error:
        let_go(error)
        raise
    finally:
        thing.close()


class Held:
    """A context or kernel, until the device is closed: whoever keeps this keeps nothing from being released."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing


class Xrt:
    """The device, and everything of it that is held; given back in the order that XRT wants."""

    def __init__(self) -> None:
        """Raises Broken."""
        self._lock: int | None = None
        self._runs: list[Any] = []
        self._held: list[Held] = []
        self._buffers: list[Any] = []
        self.device: Any = None
        with said():
            self.pyxrt = import_pyxrt()
            self._lock = exclusive_use()
            try:
                self.device = self.pyxrt.device(0)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Xrt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        let_go(error)
        self.close()

    def close(self) -> None:
        self._runs.clear()
        # Kernels were made after their contexts.
        while self._held:
            self._held.pop().thing = None
        self._buffers.clear()
        self.device = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def lists(self) -> bool:
        """Whether there are run lists."""
        return hasattr(self.pyxrt, "runlist")

    def context(self, path: Path) -> Held:
        with _of_now():
            self._held.append(Held(self.pyxrt.hw_context(self.device, self.pyxrt.elf(str(path)))))
        return self._held[-1]

    def shares(self, context: Held, path: Path) -> bool:
        """Whether a context takes another ELF. Raises Broken if it is refused for another reason than its name."""
        try:
            context.thing.add_config(self.pyxrt.elf(str(path)))
        except AttributeError:
            return False
        except FAILURES as error:
            if NAME_CLASH in str(error):
                return False
            raise Broken("refused", first_line(error)) from None
        return True

    def kernel(self, context: Held, program: Mapping[str, Any]) -> Held:
        """`program`: of a manifest."""
        name = f"{program.get('kernel', 'main')}:{program['entry']}"
        with _of_now():
            self._held.append(Held(self.pyxrt.ext.kernel(context.thing, name)))
        return self._held[-1]

    def run(self, kernel: Held) -> Any:
        """A run without arguments. What the bindings raise."""
        self._runs.append(self.pyxrt.run(kernel.thing))
        return self._runs[-1]

    def buffer(self, nbytes: int) -> Any:
        size = -(-nbytes // 64) * 64
        with _of_now():
            self._buffers.append(self.pyxrt.ext.bo(self.device, size))
        return self._buffers[-1]

    def load(self, directory: Path, program: Mapping[str, Any], given: Mapping[str, np.ndarray]) -> Program:
        """A program in a context of its own, with its inputs."""
        context = self.context(directory / program["file"])
        return Program(self, context, self.kernel(context, program), program["slots"], given)


class Program:
    """A kernel, its arguments in memory, and one run of it."""

    def __init__(self, xrt: Xrt, context: Held, kernel: Held, slots: Slots, given: Mapping[str, np.ndarray]) -> None:
        self.xrt, self.context, self.kernel = xrt, context, kernel
        self._slots = slots
        self._given = given
        self._run: Any = None

    def _memory(self) -> dict[str, Any]:
        """New buffers by slot: inputs, and zeros."""
        buffers = {}
        for slot in self._slots:
            dtype, shape = DTYPES[slot["dtype"]], slot["shape"]
            values = np.zeros(shape, dtype)
            if slot["name"] in self._given:
                new = np.asarray(self._given[slot["name"]])
                values.reshape(-1)[: new.size] = new.reshape(-1)
            buffer = buffers[slot["name"]] = self.xrt.buffer(values.nbytes)
            np.frombuffer(buffer.map(), np.uint8)[: values.nbytes] = values.reshape(-1).view(np.uint8)
            self._sync(buffer, "TO")
        return buffers

    def _sync(self, buffer: Any, way: str) -> None:
        with said():
            direction = getattr(self.xrt.pyxrt.xclBOSyncDirection, f"XCL_BO_SYNC_BO_{way}_DEVICE")
            buffer.sync(direction, buffer.size(), 0)

    def bound(self) -> Bound:
        """A run of its own on new memory."""
        buffers = self._memory()
        with said():
            run = self.xrt.run(self.kernel)
            for index, slot in enumerate(self._slots):
                run.set_arg(index, buffers[slot["name"]])
        return Bound(run, buffers)

    def results(self, buffers: Mapping[str, Any]) -> dict[str, np.ndarray]:
        found = {}
        for slot in self._slots:
            if slot["role"] == "output":
                buffer = buffers[slot["name"]]
                self._sync(buffer, "FROM")
                dtype, shape = DTYPES[slot["dtype"]], slot["shape"]
                content = np.frombuffer(buffer.map(), np.uint8)[: nbytes(slot["dtype"], shape)]
                found[slot["name"]] = content.view(dtype).reshape(shape).copy()
        return found

    def seconds(self) -> float:
        """Of one more submission, always of the same run. Raises Broken."""
        self._run = self._run or self.bound().run
        return submit(self.xrt, self._run)

    def dispatch(self, times: int) -> list[dict[str, np.ndarray]]:
        """Results of so many dispatches, each into new memory. Raises Broken."""
        found = []
        for _ in range(times):
            bound = self.bound()
            submit(self.xrt, bound.run)
            found.append(self.results(bound.buffers))
        return found


@dataclass(frozen=True)
class Bound:
    """A run, and what it reads and writes, by slot."""

    run: Any
    buffers: Mapping[str, Any]


def submit(xrt: Xrt, run: Any) -> float:
    """Seconds from the start of a run to its end. Raises Broken."""
    with said():
        started = clock()
        run.start()
        waited = run.wait(TIMEOUT_MS)
        seconds = clock() - started
        state = run.state()
    if state != xrt.pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED:
        busy = state.name.endswith(("NEW", "QUEUED", "SUBMITTED"))
        name = waited.name if busy else state.name
        raise Broken(cause_of(name), f"{name} after {seconds:.1f} s")
    return seconds


def submit_list(xrt: Xrt, context: Held, runs: Sequence[Any]) -> float:
    """The same for runs of one context in a run list."""
    with said():
        runs_in_order = xrt.pyxrt.runlist(context.thing)
        for run in runs:
            runs_in_order.add(run)
        started = clock()
        runs_in_order.execute()
        runs_in_order.wait()
        return clock() - started
