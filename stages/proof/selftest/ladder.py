"""The rungs, in order. Each builds on those before it; the first that breaks ends the climb."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.devices import Device
from llama_npu2.devices.xrt.bindings import FAILURES, first_line
from llama_npu2.devices.xrt.limits import CHAIN
from stages.model.config import Config
from stages.model.grouping import Program
from stages.proof.selftest import faults, measure, raw
from stages.proof.selftest.faults import Broken, fault
from stages.proof.selftest.model import Model
from stages.proof.selftest.probes import WATCHDOG, Probe, probes, tile_functions
from stages.proof.selftest.trial import DISPATCHES, Verdict, dispatch, judge
from stages.targets.npu2.objects import KERNEL_SET
from stages.weights.formats import formats

PASSED, LIMITED, BROKEN, SKIPPED = "passed", "limited", "broken", "skipped"
"""`limited`: it does without."""

XRT_DEVICE = "xrt"
"""The runtime's device whose bindings and times there are to try; others only compute."""

NO_LISTS = "LLAMA_NPU2_RUNLIST"
"""`0` makes the runtime do without run lists."""

LISTED = 16
"""Runs of the run list that is timed."""

HEAP_RUNS, HEAP_SECONDS = 2048, 10.0
"""Where counting what the heap holds ends, if the driver does not end it."""

LONG_SECONDS = (1.0, 3.0)
"""Commands that the driver's watchdog must let through, and must end."""


@dataclass(frozen=True)
class Rung:
    """How one rung went. `cause`, `meaning`, `remedy` where it broke or does without."""

    rung: str
    what: str
    result: str
    detail: str = ""
    seconds: float = 0.0
    cause: str = ""
    meaning: str = ""
    remedy: str = ""


@dataclass
class Climb:
    """What was found: rungs, constants of the estimate, and what else was seen."""

    rungs: list[Rung] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each submission, by probe."""
    measured: dict[str, float] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)

    @property
    def broken(self) -> Rung | None:
        return next((rung for rung in self.rungs if rung.result == BROKEN), None)


@dataclass(frozen=True)
class Kit:
    """What the ladder runs: the directory of probes, and a model's with what its programs are made of."""

    probes: Manifest
    model: Manifest
    config: Config
    programs: Sequence[Program]
    bfp16: bool = False
    threads: int = 0
    repeats: int = 5
    risky: bool = False


class _Limited(Exception):
    """Something is not there that can be done without."""

    def __init__(self, cause: str, detail: str) -> None:
        self.cause, self.detail = cause, detail


def climb(kit: Kit, say: Callable[[Rung], object] = lambda rung: None) -> Climb:
    """All rungs up to the first that breaks; `say` gets each as it is known."""
    found = Climb()
    before = os.environ.get(NO_LISTS)
    try:
        with contextlib.closing(_Ladder(kit, found).rungs()) as rungs:
            for rung, what, run in rungs:
                found.rungs.append(_climbed(rung, what, run))
                say(found.rungs[-1])
                if found.rungs[-1].result == BROKEN:
                    break
    finally:
        if before is None:
            os.environ.pop(NO_LISTS, None)
        else:
            os.environ[NO_LISTS] = before
    found.measured = measure.constants({name: float(np.median(times)) for name, times in found.times.items()})
    return found


def _climbed(rung: str, what: str, run: Callable[[], str | None]) -> Rung:
    """`run` says what it saw, or None if there is nothing to try."""
    started = time.perf_counter()
    try:
        detail = run()
    except Broken as broken:
        result, cause, detail = BROKEN, broken.cause, broken.detail
    except _Limited as limited:
        result, cause, detail = LIMITED, limited.cause, limited.detail
    else:
        return Rung(rung, what, SKIPPED if detail is None else PASSED, detail or "", time.perf_counter() - started)
    meaning = fault(rung, cause)
    return Rung(rung, what, result, detail, time.perf_counter() - started, cause, meaning.meaning, meaning.remedy)


def packed(probe: Probe, slots: Sequence[Mapping[str, Any]], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A probe's inputs as its program takes them."""
    (part,) = probe.program.parts
    formed = {slot.name: slot.format for slot in probe.program.slots}
    return {
        slot["name"]: formats()[formed[slot["name"]]].pack(
            values[slot["name"]], part.layout_of(slot["name"], KERNEL_SET)
        )
        for slot in slots
        if slot["name"] in values
    }


class _Ladder:
    def __init__(self, kit: Kit, found: Climb) -> None:
        self.kit, self.found = kit, found
        self.on_xrt = kit.probes.target["device"] == XRT_DEVICE

    def rungs(self) -> Generator[tuple[str, str, Callable[[], str | None]], None, None]:
        """Rung, what of it is tried, and how."""
        if self.on_xrt:
            yield faults.DEVICE, "bindings and device", self.device
            yield faults.CONTEXT, "an ELF in a hardware context", self.context
            yield faults.KERNEL, measure.BASE, self.first_kernel
        for probe in tile_functions():
            yield faults.TILE, f"{probe.name}: {probe.about}", functools.partial(self.tile_function, probe)
        if self.on_xrt:
            yield faults.LISTS, f"{LISTED} runs in a list", self.run_list
            yield faults.SWITCH, "two programs, one context and two", self.switch
            for name in measure.TIMED:
                yield faults.TIMES, f"{name}: {probes()[name].about}", functools.partial(self.time, name)
            yield faults.HEAP, "runs that the driver takes", self.heap
        yield from self.model_rungs()
        if self.on_xrt:
            yield faults.WATCHDOG, "commands of a second and of three", self.watchdog

    # The bindings

    def device(self) -> str:
        with raw.Xrt() as xrt:
            self.found.observed["run_lists"] = xrt.lists
            return "opens"

    def context(self) -> str:
        with raw.Xrt() as xrt:
            program = self.program(measure.BASE)
            xrt.kernel(xrt.context(self.kit.probes.directory / program["file"]), program)
            return "takes the ELF, and has its kernel"

    def first_kernel(self) -> str:
        with raw.Xrt() as xrt:
            return self.checked(measure.BASE, self.load(xrt, measure.BASE).dispatch(DISPATCHES))

    def program(self, name: str) -> Mapping[str, Any]:
        return self.kit.probes.programs[name]

    def load(self, xrt: raw.Xrt, name: str) -> raw.Program:
        probe, program = probes()[name], self.program(name)
        return xrt.load(self.kit.probes.directory, program, packed(probe, program["slots"], probe.values()))

    def checked(self, name: str, results: Sequence[Mapping[str, np.ndarray]]) -> str:
        """What is right about results. Raises Broken."""
        given = probes()[name].values()
        want = probes()[name].expected(given)
        return _right(judge(results, want, probes()[name].bound(given, want)))

    # Kernels

    def open(self) -> Device:
        """The runtime's device for the probes; host programs are the model's."""
        kit = self.kit
        module = importlib.import_module(f"llama_npu2.devices.{kit.probes.target['device']}")
        device: Device = module.open_device(
            kit.model.host_library, kit.threads, replace(kit.probes, model=kit.model.model)
        )
        return device

    def tile_function(self, probe: Probe) -> str:
        program = self.program(probe.name)
        given = packed(probe, program["slots"], probe.values())
        with raw.said(), raw.closing(self.open()) as device:
            loaded = device.load_program(self.kit.probes.native_file(program["file"]), program["entry"], False)
            results = dispatch(device, loaded, program["slots"], given)
        return f"{self.checked(probe.name, results)} ({probe.tile_function})"

    # Submissions

    def run_list(self) -> str:
        try:
            with raw.Xrt() as xrt:
                if not xrt.lists:
                    raise _Limited("none", "pyxrt has no runlist")
                return self._run_list(xrt, self.load(xrt, measure.BASE))
        except Broken as broken:
            # The rest of the climb does without.
            os.environ[NO_LISTS] = "0"
            self.found.observed["run_lists"] = False
            raise _Limited(broken.cause, broken.detail) from None

    def _run_list(self, xrt: raw.Xrt, program: raw.Program) -> str:
        bound = [program.bound() for _ in range(LISTED)]
        raw.submit_list(xrt, program.context, [each.run for each in bound])
        self.checked(measure.BASE, [program.results(each.buffers) for each in bound])
        timed = (raw.submit_list(xrt, program.context, [each.run for each in bound]) for _ in range(self.kit.repeats))
        listed = 1e6 * min(timed) / LISTED
        alone = 1e6 * min(program.seconds() for _ in range(self.kit.repeats))
        self.found.observed |= {"listed_run_us": listed, "single_run_us": alone}
        return f"{listed:.0f} us a run in a list of {LISTED}, {alone:.0f} us alone"

    def switch(self) -> str:
        """Programs take turns in contexts of their own: each must still compute what it did."""
        names = (measure.BASE, "rms_norm")
        with raw.Xrt() as xrt:
            context = xrt.context(self.kit.probes.directory / self.program(names[0])["file"])
            shared = xrt.shares(context, self.kit.probes.directory / self.program(names[1])["file"])
        self.found.observed["contexts_shared"] = shared
        with raw.Xrt() as xrt:
            first, second = (self.load(xrt, name) for name in names)
            results: dict[str, list[Mapping[str, np.ndarray]]] = {name: [] for name in names}
            for _ in range(DISPATCHES):
                for name, program in zip(names, (first, second), strict=True):
                    results[name] += program.dispatch(1)
            for name in names:
                self.checked(name, results[name])
            alone = min(first.seconds() for _ in range(self.kit.repeats))
            turns = min(first.seconds() for _ in range(self.kit.repeats) if second.seconds())
            extra = 1e6 * (turns - alone)
            self.found.observed["context_switch_us"] = extra
            return f"{'one context takes both' if shared else 'a context each'}; a switch costs {extra:.0f} us"

    # Times

    def time(self, name: str) -> str:
        with raw.Xrt() as xrt:
            program = self.load(xrt, name)
            detail = self.checked(name, program.dispatch(1))
            program.seconds()  # the NPU may have slept
            times = self.found.times[name] = [program.seconds() for _ in range(self.kit.repeats)]
            return f"{1e3 * float(np.median(times)):.3f} ms; {detail}"

    def heap(self) -> str:
        """Runs of the program with the most instructions, until the driver refuses one."""
        sized = [
            (program.get("instruction_bytes", 0), name, manifest.directory, program)
            for manifest in (self.kit.probes, self.kit.model)
            for name, program in manifest.programs.items()
            if not program["host"]
        ]
        size, name, directory, program = max(sized, key=lambda entry: (entry[0], entry[1]))
        with raw.Xrt() as xrt:
            kernel = xrt.kernel(xrt.context(directory / program["file"]), program)
            count, said, started = 0, "", time.perf_counter()
            while count < HEAP_RUNS and time.perf_counter() - started < HEAP_SECONDS:
                try:
                    xrt.run(kernel)
                except FAILURES as error:
                    said = first_line(error)
                    break
                count += 1
        seen = {"program": name, "instruction_bytes": size, "runs": count, "refused": said}
        self.found.observed["heap"] = seen
        if not count:
            raise Broken("no memory", said)
        return f"{count} runs of {name}, {size} bytes of instructions each" + (f", then {said}" if said else "")

    # The model

    def model_rungs(self) -> Iterator[tuple[str, str, Callable[[], str | None]]]:
        kit = self.kit
        name = kit.model.model["name"]
        held: list[Model] = []

        def load() -> str:
            model = Model(kit.model, kit.config, kit.programs, kit.bfp16, kit.threads)
            stack.enter_context(raw.closing(model))
            held.append(model)
            return f"{len(model.expected.ids)} tokens of prompt"

        with contextlib.ExitStack() as stack:
            yield faults.PROGRAM, f"weights and programs of {name}", load
            (model,) = held
            for program in model.programs():
                yield faults.PROGRAM, program, functools.partial(self.model_program, model, program)
            yield faults.LAYER, f"the first layer of {name}", lambda: _right(model.try_layer())
            yield faults.PROMPT, f"a prompt of {name}", functools.partial(self.timed, "prompt_ms", model.try_prompt)
            yield faults.TOKEN, f"tokens of {name}", functools.partial(self.timed, "token_ms", model.try_tokens)

    def model_program(self, model: Model, name: str) -> str:
        verdict, seconds = model.try_program(name)
        programs = self.found.observed.setdefault("programs", {})
        estimated = self.kit.model.programs[name].get("milliseconds")
        programs[name] = {"ms": 1e3 * seconds, "estimated_ms": estimated}
        return f"{1e3 * seconds:.2f} ms with its syncs; {_right(verdict)}"

    def timed(self, name: str, run: Callable[[], tuple[Verdict, float]]) -> str:
        verdict, seconds = run()
        self.found.observed[name] = 1e3 * seconds
        return f"{1e3 * seconds:.1f} ms; {_right(verdict)}"

    # What may reset the device

    def watchdog(self) -> str | None:
        """Commands that come near the driver's watchdog, and beyond; then whether the device is there again."""
        if not self.kit.risky:
            return None
        seen: dict[str, Any] = {}
        self.found.observed["watchdog"] = seen
        with raw.Xrt() as xrt:
            if not xrt.lists:
                return None
            program = self.load(xrt, WATCHDOG)
            one = program.seconds()
            seen["run_seconds"] = one
            for wanted in LONG_SECONDS:
                count = max(1, min(CHAIN, round(wanted / one)))
                seen[f"command_of_{wanted:g}_s"] = self._command(xrt, program, count, ends=wanted > min(LONG_SECONDS))
        try:
            self.first_kernel()
        except Broken as broken:
            raise Broken("not recovered", broken.detail) from None
        return "; ".join(f"{name.replace('_', ' ')}: {what}" for name, what in seen.items())

    def _command(self, xrt: raw.Xrt, program: raw.Program, count: int, ends: bool) -> str:
        """One command of so many runs; whether it may be ended."""
        runs, started = [program.bound().run for _ in range(count)], raw.clock()
        try:
            return f"{count} runs, {raw.submit_list(xrt, program.context, runs):.2f} s, done"
        except Broken as broken:
            if not ends:
                raise Broken("timeout", f"{count} runs: {broken.detail}") from None
            return f"{count} runs, ended after {raw.clock() - started:.2f} s: {broken.detail}"


def _right(verdict: Verdict) -> str:
    """What a verdict says in favour. Raises Broken."""
    if verdict.cause:
        raise Broken(verdict.cause, verdict.detail)
    return verdict.detail
