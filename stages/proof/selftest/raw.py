"""XRT's objects without the runtime, for rungs that try the bindings and for times.

Nothing tracks buffers, splits run lists, or refuses what the runtime would refuse.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.artifact.dtypes import DTYPES, nbytes
from llama_npu2.devices.xrt.bindings import FAILURES, first_line, import_pyxrt
from llama_npu2.devices.xrt.session import exclusive_use
from llama_npu2.devices.xrt.submissions import TIMEOUT_MS
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.proof.selftest.faults import Failure, cause_of
from stages.proof.selftest.trial import Slots

NAME_CLASH = "kernel already exists"
"""XRT's message about an ELF whose kernel has the name of an earlier one (`xrt_hw_context.cpp`)."""

clock: Callable[[], float] = time.perf_counter


@contextlib.contextmanager
def as_failure() -> Iterator[None]:
    """Turn an error of the bindings or the runtime into a Failure, whose cause follows from the message."""
    try:
        yield
    except (*FAILURES, UserError) as error:
        raise Failure(cause_of(str(error)), first_line(error)) from None


@contextlib.contextmanager
def _requiring_new_bindings() -> Iterator[None]:
    """Do the same around calls that older bindings lack, or take with other arguments."""
    try:
        with as_failure():
            yield
    except (TypeError, AttributeError) as error:
        raise Failure("old bindings", first_line(error)) from None


def release_frames(error: BaseException | None) -> None:
    """Clear the frames of an exception: they keep XRT's objects alive, and the device must be closed last."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


@contextlib.contextmanager
def closing(thing: Any) -> Iterator[Any]:
    """Close an object at the end, after releasing the frames of an exception."""
    try:
        yield thing
    except BaseException as error:
        release_frames(error)
        raise
    finally:
        thing.close()


class Handle:
    """A context or kernel, until the device is closed. Keeping a handle does not keep XRT's object alive."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing


class Xrt:
    """The device and its objects, which are released in the order that XRT wants."""

    def __init__(self) -> None:
        """Raises Failure."""
        self._lock: int | None = None
        self._runs: list[Any] = []
        self._handles: list[Handle] = []
        self._buffers: list[Any] = []
        self.device: Any = None
        with as_failure():
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
        release_frames(error)
        self.close()

    def close(self) -> None:
        """Release everything, in order."""
        self._runs.clear()
        # Kernels were made after their contexts.
        while self._handles:
            self._handles.pop().thing = None
        self._buffers.clear()
        self.device = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def lists(self) -> bool:
        """Whether the bindings have run lists."""
        return hasattr(self.pyxrt, "runlist")

    def context(self, path: Path) -> Handle:
        """Open a hardware context from an ELF. Raises Failure."""
        with _requiring_new_bindings():
            self._handles.append(Handle(self.pyxrt.hw_context(self.device, self.pyxrt.elf(str(path)))))
        return self._handles[-1]

    def shares(self, context: Handle, path: Path) -> bool:
        """Return whether a context takes another ELF. Raises Failure if its name is not the reason for a refusal."""
        try:
            context.thing.add_config(self.pyxrt.elf(str(path)))
        except AttributeError:
            return False
        except FAILURES as error:
            if NAME_CLASH in str(error):
                return False
            raise Failure("refused", first_line(error)) from None
        return True

    def kernel(self, context: Handle, program: Mapping[str, Any]) -> Handle:
        """Return the kernel of a manifest's program. Raises Failure."""
        name = f"{program.get('kernel', 'main')}:{program['entry']}"
        with _requiring_new_bindings():
            self._handles.append(Handle(self.pyxrt.ext.kernel(context.thing, name)))
        return self._handles[-1]

    def run(self, kernel: Handle) -> Any:
        """Return a run without arguments. Raises what the bindings raise."""
        self._runs.append(self.pyxrt.run(kernel.thing))
        return self._runs[-1]

    def buffer(self, nbytes: int) -> Any:
        """Allocate a buffer of the device, in multiples of 64 bytes. Raises Failure."""
        size = -(-nbytes // 64) * 64
        with _requiring_new_bindings():
            self._buffers.append(self.pyxrt.ext.bo(self.device, size))
        return self._buffers[-1]

    def load(self, directory: Path, program: Mapping[str, Any], given: Mapping[str, np.ndarray]) -> Program:
        """Return a program in a context of its own, with its inputs. Raises Failure."""
        context = self.context(directory / program["file"])
        return Program(self, context, self.kernel(context, program), program["slots"], given)


class Program:
    """A kernel, its arguments in memory, and one run of it."""

    def __init__(
        self, xrt: Xrt, context: Handle, kernel: Handle, slots: Slots, given: Mapping[str, np.ndarray]
    ) -> None:
        self.xrt, self.context, self.kernel = xrt, context, kernel
        self._slots = slots
        self._given = given
        self._run: Any = None

    def _memory(self) -> dict[str, Any]:
        """Return new buffers by slot (argument): inputs, and zeros."""
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
        with as_failure():
            direction = getattr(self.xrt.pyxrt.xclBOSyncDirection, f"XCL_BO_SYNC_BO_{way}_DEVICE")
            buffer.sync(direction, buffer.size(), 0)

    def bound(self) -> Bound:
        """Return a new run on new memory."""
        buffers = self._memory()
        with as_failure():
            run = self.xrt.run(self.kernel)
            for index, slot in enumerate(self._slots):
                run.set_arg(index, buffers[slot["name"]])
        return Bound(run, buffers)

    def results(self, buffers: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return copies of the outputs, by slot."""
        outputs = {}
        for slot in self._slots:
            if slot["role"] == "output":
                buffer = buffers[slot["name"]]
                self._sync(buffer, "FROM")
                dtype, shape = DTYPES[slot["dtype"]], slot["shape"]
                content = np.frombuffer(buffer.map(), np.uint8)[: nbytes(slot["dtype"], shape)]
                outputs[slot["name"]] = content.view(dtype).reshape(shape).copy()
        return outputs

    def seconds(self) -> float:
        """Submit one run again, always the same, and return its time. Raises Failure."""
        self._run = self._run or self.bound().run
        return submit(self.xrt, self._run)

    def dispatch(self, times: int) -> list[dict[str, np.ndarray]]:
        """Dispatch the program `times` times, each into new memory, and return the results. Raises Failure."""
        results = []
        for _ in range(times):
            bound = self.bound()
            submit(self.xrt, bound.run)
            results.append(self.results(bound.buffers))
        return results


@frozen
class Bound:
    """A run, and its buffers by slot."""

    run: Any
    buffers: Mapping[str, Any]


def submit(xrt: Xrt, run: Any) -> float:
    """Start a run, wait for its end, and return the seconds. Raises Failure."""
    with as_failure():
        started = clock()
        run.start()
        waited = run.wait(TIMEOUT_MS)
        seconds = clock() - started
        state = run.state()
    if state != xrt.pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED:
        busy = state.name.endswith(("NEW", "QUEUED", "SUBMITTED"))
        name = waited.name if busy else state.name
        raise Failure(cause_of(name), f"{name} after {seconds:.1f} s")
    return seconds


def submit_list(xrt: Xrt, context: Handle, runs: Sequence[Any]) -> float:
    """Submit runs of one context as a run list, and return the seconds. Raises Failure."""
    with as_failure():
        runs_in_order = xrt.pyxrt.runlist(context.thing)
        for run in runs:
            runs_in_order.add(run)
        started = clock()
        runs_in_order.execute()
        runs_in_order.wait()
        return clock() - started
