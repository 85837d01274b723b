"""The rungs of the selftest, in order. Each builds on those before it; the first that breaks ends it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import Phase
from llama_npu2.devices import Device
from llama_npu2.devices.xrt.bindings import FAILURES, first_line
from llama_npu2.devices.xrt.limits import CHAIN
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.estimate.price import compiled_code
from stages.model.config import Config
from stages.model.grouping import Program
from stages.proof.selftest import faults, measure, raw
from stages.proof.selftest.faults import Failure, fault
from stages.proof.selftest.model import SEVERAL, Model
from stages.proof.selftest.probes import WATCHDOG, Probe, probes, tile_functions
from stages.proof.selftest.relink import Relink, other_level
from stages.proof.selftest.trial import DISPATCHES, Verdict, dispatch, judge
from stages.targets.npu2 import KERNEL_SET
from stages.targets.npu2.known_good import LEAST, version
from stages.targets.npu2.toolchain import npu
from stages.weights.formats import formats

PASSED, LIMITED, BROKEN, SKIPPED = "passed", "limited", "broken", "skipped"
"""`limited`: something is missing that is not needed."""

XRT_DEVICE = "xrt"
"""The runtime's device whose bindings and times are tried; with others, only results are."""

NO_LISTS = "LLAMA_NPU2_RUNLIST"
"""`0` makes the runtime submit runs one by one."""

_OF_THE_COMPILER = ("wrong", "zeros", "no numbers", "elsewhere", "later dispatch", "unsteady", "timeout")
"""Causes that a miscompiled tile function can have."""

LISTED = 16
"""Runs of the run list that is timed."""

HEAP_RUNS, HEAP_SECONDS = 2048, 10.0
"""Runs and seconds after which the count of runs in the heap ends, if the driver does not end it."""

LONG_SECONDS = (1.0, 3.0)
"""Commands that the driver's watchdog must let through, and must end."""


@frozen
class Rung:
    """The result of one rung."""

    rung: str
    what: str
    """The part of the rung that was tried."""
    result: str
    """`passed`, `limited`, `broken` or `skipped`."""
    detail: str = ""
    """Numbers, or what the tools printed."""
    seconds: float = 0.0
    cause: str = ""
    """Why it is broken or limited; `meaning` and `remedy` explain it."""
    meaning: str = ""
    remedy: str = ""


@dataclass
class Outcome:
    """The result of the selftest."""

    rungs: list[Rung] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each submission, by probe."""
    measured: dict[str, float] = field(default_factory=dict)
    """Constants of the estimate."""
    observed: dict[str, Any] = field(default_factory=dict)
    """Other observations."""

    @property
    def failed(self) -> Rung | None:
        """The rung that broke."""
        return next((rung for rung in self.rungs if rung.result == BROKEN), None)


@frozen
class Setup:
    """The directories and options that the ladder runs with."""

    probes: Manifest
    """The artifact directory of probes."""
    model: Manifest
    """The artifact directory of a model."""
    config: Config
    """The model's."""
    programs: Sequence[Program]
    """The model's."""
    bfp16: bool = False
    """Whether the model's prompts multiply in block floating point."""
    threads: int = 0
    repeats: int = 5
    risky: bool = False
    """Whether to try what may reset the device."""
    relink: Relink | None = None
    """Links a probe at another level of optimisation; None where the compilers are missing."""


class _Limited(Exception):
    """Something is missing that is not needed."""

    def __init__(self, cause: str, detail: str) -> None:
        self.cause, self.detail = cause, detail


def run_ladder(setup: Setup, say: Callable[[Rung], object] = lambda rung: None) -> Outcome:
    """Run all rungs up to the first that breaks; `say` gets each when it ends."""
    outcome = Outcome()
    before = os.environ.get(NO_LISTS)
    try:
        with contextlib.closing(_Ladder(setup, outcome).rungs()) as rungs:
            for rung, what, run in rungs:
                outcome.rungs.append(_run_rung(rung, what, run))
                say(outcome.rungs[-1])
                if outcome.rungs[-1].result == BROKEN:
                    break
    finally:
        if before is None:
            os.environ.pop(NO_LISTS, None)
        else:
            os.environ[NO_LISTS] = before
    medians = {name: float(np.median(times)) for name, times in outcome.times.items()}
    outcome.measured = measure.constants(medians, compiled_code(setup.probes.directory))
    return outcome


def _run_rung(rung: str, what: str, run: Callable[[], str | None]) -> Rung:
    """Run a rung. `run` returns what it saw, or None if there is nothing to try."""
    started = time.perf_counter()
    try:
        detail = run()
    except Failure as failure:
        result, cause, detail = BROKEN, failure.cause, failure.detail
    except _Limited as limited:
        result, cause, detail = LIMITED, limited.cause, limited.detail
    else:
        return Rung(rung, what, SKIPPED if detail is None else PASSED, detail or "", time.perf_counter() - started)
    meaning = fault(rung, cause)
    return Rung(rung, what, result, detail, time.perf_counter() - started, cause, meaning.meaning, meaning.remedy)


def _with_firmware(run: Callable[[], str]) -> Callable[[], str]:
    """Make old firmware the cause where it refuses something: it cannot run ELF programs at all."""

    def tried() -> str:
        try:
            return run()
        except Failure as failure:
            device = npu()
            firmware = device.firmware if device else ""
            if failure.cause != "failed" or not firmware or version(firmware) >= version(LEAST["NPU firmware"][0]):
                raise
            raise Failure("old firmware", f"{failure.detail}; firmware {firmware}") from None

    return tried


def packed(probe: Probe, slots: Sequence[Mapping[str, Any]], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a probe's inputs in the layouts that its program takes.

    Weights in groups, and caches in 8 bits, are stored as such already.
    """
    (part,) = probe.program.parts
    names = {slot.name: slot.format for slot in probe.program.slots}
    made = {}
    for name in (slot["name"] for slot in slots if slot["name"] in values):
        form, layout = formats()[names[name]], part.layout_of(name, KERNEL_SET)
        made[name] = (form.arrange if form.cut or form.row_elements else form.pack)(values[name], layout)
    return made


class _Ladder:
    def __init__(self, setup: Setup, outcome: Outcome) -> None:
        self.setup, self.outcome = setup, outcome
        self.on_xrt = setup.probes.target["device"] == XRT_DEVICE

    def rungs(self) -> Generator[tuple[str, str, Callable[[], str | None]], None, None]:
        """Yield each rung, what of it is tried, and how."""
        if self.on_xrt:
            yield faults.DEVICE, "the NPU, through XRT's Python bindings", self.device
            yield faults.CONTEXT, "a program's file (ELF) in a context of the NPU", _with_firmware(self.context)
            yield faults.KERNEL, f"{measure.BASE}, the smallest program", _with_firmware(self.first_kernel)
        for probe in tile_functions():
            yield faults.TILE, f"{probe.name}: {probe.about}", functools.partial(self.tile_function, probe)
        if self.on_xrt:
            yield faults.LISTS, f"{LISTED} runs of a program that are submitted as one list", self.run_list
            yield faults.SWITCH, "two programs in turn", self.switch
            for name in measure.TIMED:
                yield faults.TIMES, f"{name}: {probes()[name].about}", functools.partial(self.time, name)
            yield faults.HEAP, "how many runs the driver's memory for instructions holds", self.heap
        yield from self.model_rungs()
        if self.on_xrt:
            yield faults.WATCHDOG, "commands of a second and of three, with risky=1 alone", self.watchdog

    # The bindings

    def device(self) -> str:
        """Open the device."""
        with raw.Xrt() as xrt:
            self.outcome.observed["run_lists"] = xrt.lists
            return "opens"

    def context(self) -> str:
        """Open an ELF in a hardware context."""
        with raw.Xrt() as xrt:
            program = self.program(measure.BASE)
            xrt.kernel(xrt.context(self.setup.probes.directory / program["file"]), program)
            return "is taken, and has its kernel"

    def first_kernel(self) -> str:
        """Run the smallest program."""
        with raw.Xrt() as xrt:
            return self.checked(measure.BASE, self.load(xrt, measure.BASE).dispatch(DISPATCHES))

    def program(self, name: str) -> Mapping[str, Any]:
        """Return the manifest's entry of a probe."""
        return self.setup.probes.programs[name]

    def load(self, xrt: raw.Xrt, name: str) -> raw.Program:
        """Load a probe with its inputs."""
        probe, program = probes()[name], self.program(name)
        return xrt.load(self.setup.probes.directory, program, packed(probe, program["slots"], probe.values()))

    def checked(self, name: str, results: Sequence[Mapping[str, np.ndarray]]) -> str:
        """Check a probe's results, and return what to say of them. Raises Failure."""
        values = probes()[name].values()
        want = probes()[name].expected(values)
        return _right(judge(results, want, probes()[name].bound(values, want)))

    # Kernels

    def open(self) -> Device:
        """Open the runtime's device for the probes; host programs are the model's."""
        setup = self.setup
        module = importlib.import_module(f"llama_npu2.devices.{setup.probes.target['device']}")
        device: Device = module.open_device(
            setup.model.host_library, setup.threads, replace(setup.probes, model=setup.model.model)
        )
        return device

    def tile_function(self, probe: Probe) -> str:
        """Run a probe, and say whether it is right at another level where it breaks. Raises Failure."""
        try:
            return self._tile_function(probe)
        except Failure as failure:
            if not self.on_xrt or failure.cause not in _OF_THE_COMPILER:
                raise
            raise Failure(failure.cause, f"{failure.detail}; {self._at_another_level(probe)}") from None

    def _at_another_level(self, probe: Probe) -> str:
        """Link a probe at another level of optimisation, run it, and return what came of it."""
        level, setting = other_level(probe.name)
        if self.setup.relink is None:
            return f"-O{level} not tried, no compilers here: {setting} and doit selftest where they are"
        try:
            with tempfile.TemporaryDirectory() as work, raw.Xrt() as xrt:
                program = {**self.program(probe.name), **self.setup.relink(probe.name, level, Path(work))}
                values = packed(probe, program["slots"], probe.values())
                detail = self.checked(probe.name, xrt.load(Path(work), program, values).dispatch(DISPATCHES))
        except (Failure, UserError) as error:
            return f"at -O{level} no better: {error}"
        self.outcome.observed.setdefault("levels", {})[probe.name] = level
        return f"right at -O{level} ({detail}): {setting}"

    def _tile_function(self, probe: Probe) -> str:
        """Run a probe on the runtime's device, and check its results. Raises Failure."""
        program = self.program(probe.name)
        inputs = packed(probe, program["slots"], probe.values())
        with raw.as_failure(), raw.closing(self.open()) as device:
            loaded = device.load_program(self.setup.probes.native_file(program["file"]), program["entry"], False)
            results = dispatch(device, loaded, program["slots"], inputs)
        return f"{self.checked(probe.name, results)} ({probe.tile_function})"

    # Submissions

    def run_list(self) -> str:
        """Run a list, and time it."""
        try:
            with raw.Xrt() as xrt:
                if not xrt.lists:
                    raise _Limited("none", "pyxrt has no runlist")
                return self._run_list(xrt, self.load(xrt, measure.BASE))
        except Failure as failure:
            # The rungs after this one run without.
            os.environ[NO_LISTS] = "0"
            self.outcome.observed["run_lists"] = False
            raise _Limited(failure.cause, failure.detail) from None

    def _run_list(self, xrt: raw.Xrt, program: raw.Program) -> str:
        bound = [program.bound() for _ in range(LISTED)]
        raw.submit_list(xrt, program.context, [one.run for one in bound])
        self.checked(measure.BASE, [program.results(one.buffers) for one in bound])
        timed = (raw.submit_list(xrt, program.context, [one.run for one in bound]) for _ in range(self.setup.repeats))
        listed = 1e6 * min(timed) / LISTED
        alone = 1e6 * min(program.seconds() for _ in range(self.setup.repeats))
        self.outcome.observed |= {"listed_run_us": listed, "single_run_us": alone}
        return f"{listed:.0f} us a run in a list of {LISTED}, {alone:.0f} us alone"

    def switch(self) -> str:
        """Run programs in turn, in contexts of their own: each must still compute the same."""
        names = (measure.BASE, "rms_norm")
        with raw.Xrt() as xrt:
            context = xrt.context(self.setup.probes.directory / self.program(names[0])["file"])
            shared = xrt.shares(context, self.setup.probes.directory / self.program(names[1])["file"])
        self.outcome.observed["contexts_shared"] = shared
        with raw.Xrt() as xrt:
            first, second = (self.load(xrt, name) for name in names)
            results: dict[str, list[Mapping[str, np.ndarray]]] = {name: [] for name in names}
            for _ in range(DISPATCHES):
                for name, program in zip(names, (first, second), strict=True):
                    results[name] += program.dispatch(1)
            for name in names:
                self.checked(name, results[name])
            alone = min(first.seconds() for _ in range(self.setup.repeats))
            turns = min(first.seconds() for _ in range(self.setup.repeats) if second.seconds())
            extra = 1e6 * (turns - alone)
            self.outcome.observed["context_switch_us"] = extra
            return f"{'one context takes both' if shared else 'a context each'}; a switch costs {extra:.0f} us"

    # Times

    def time(self, name: str) -> str:
        """Check a probe, and time it."""
        with raw.Xrt() as xrt:
            program = self.load(xrt, name)
            detail = self.checked(name, program.dispatch(1))
            program.seconds()  # the NPU may have slept
            times = self.outcome.times[name] = [program.seconds() for _ in range(self.setup.repeats)]
            return f"{1e3 * float(np.median(times)):.3f} ms; {detail}"

    def heap(self) -> str:
        """Count runs of the program with the most instructions, until the driver refuses one."""
        sized = [
            (program.get("instruction_bytes", 0), name, manifest.directory, program)
            for manifest in (self.setup.probes, self.setup.model)
            for name, program in manifest.programs.items()
            if not program["host"]
        ]
        size, name, directory, program = max(sized, key=lambda entry: (entry[0], entry[1]))
        with raw.Xrt() as xrt:
            kernel = xrt.kernel(xrt.context(directory / program["file"]), program)
            count, refusal, started = 0, "", time.perf_counter()
            while count < HEAP_RUNS and time.perf_counter() - started < HEAP_SECONDS:
                try:
                    xrt.run(kernel)
                except FAILURES as error:
                    refusal = first_line(error)
                    break
                count += 1
        seen = {"program": name, "instruction_bytes": size, "runs": count, "refused": refusal}
        self.outcome.observed["heap"] = seen
        if not count:
            raise Failure("no memory", refusal)
        return f"{count} runs of {name}, {size} bytes of instructions each" + (f", then {refusal}" if refusal else "")

    # The model

    def model_rungs(self) -> Iterator[tuple[str, str, Callable[[], str | None]]]:
        """Yield the rungs of the model, like `rungs`."""
        setup = self.setup
        name = setup.model.model["name"]
        models: list[Model] = []

        def load() -> str:
            model = Model(setup.model, setup.config, setup.programs, setup.bfp16, setup.threads)
            stack.enter_context(raw.closing(model))
            models.append(model)
            return f"{len(model.expected.ids)} tokens of prompt"

        with contextlib.ExitStack() as stack:
            yield faults.PROGRAM, f"weights and programs of {name}", load
            (model,) = models
            for program in model.programs():
                tried = functools.partial(model.try_program, program)
                yield faults.PROGRAM, program, functools.partial(self.model_program, program, tried)
            yield faults.LAYER, f"the first layer of {name}", lambda: _right(model.try_layer())
            yield faults.PROMPT, f"a prompt of {name}", functools.partial(self.timed, "prompt_ms", model.try_prompt)
            yield faults.TOKEN, f"tokens of {name}", functools.partial(self.timed, "token_ms", model.try_tokens)
            for phase in model.expected.several:
                yield from self.several_rungs(model, phase)

    def several_rungs(self, model: Model, phase: Phase) -> Iterator[tuple[str, str, Callable[[], str | None]]]:
        """Yield the rungs of a phase that takes several tokens, or a token of each of several sequences."""
        which = SEVERAL[phase.kind]
        rung = faults.SEVERAL[which]
        for program in model.programs_of(phase):
            tried = functools.partial(model.try_program_of, phase, program)
            yield rung, program, functools.partial(self.model_program, program, tried)
        what = f"{phase.rows} {which}s of {self.setup.model.model['name']}"
        run = functools.partial(model.try_several, phase)
        yield rung, what, functools.partial(self.timed, f"{phase.rows}_{which}s_ms", run)

    def model_program(self, name: str, run: Callable[[], tuple[Verdict, float]]) -> str:
        """Check a program of the model, and time it."""
        verdict, seconds = run()
        programs = self.outcome.observed.setdefault("programs", {})
        estimated = self.setup.model.programs[name].get("milliseconds")
        programs[name] = {"ms": 1e3 * seconds, "estimated_ms": estimated}
        return f"{1e3 * seconds:.2f} ms with its syncs; {_right(verdict)}"

    def timed(self, name: str, run: Callable[[], tuple[Verdict, float]]) -> str:
        """Check a run of the model, and keep its time."""
        verdict, seconds = run()
        self.outcome.observed[name] = 1e3 * seconds
        return f"{1e3 * seconds:.1f} ms; {_right(verdict)}"

    # What may reset the device

    def watchdog(self) -> str | None:
        """Submit commands below and above the time of the driver's watchdog; then check that the device is back."""
        if not self.setup.risky:
            return None
        seen: dict[str, Any] = {}
        self.outcome.observed["watchdog"] = seen
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
        except Failure as failure:
            raise Failure("not recovered", failure.detail) from None
        return "; ".join(f"{name.replace('_', ' ')}: {what}" for name, what in seen.items())

    def _command(self, xrt: raw.Xrt, program: raw.Program, count: int, ends: bool) -> str:
        """Submit one command of `count` runs; `ends`: the watchdog may end it. Raises Failure."""
        runs, started = [program.bound().run for _ in range(count)], raw.clock()
        try:
            return f"{count} runs, {raw.submit_list(xrt, program.context, runs):.2f} s, done"
        except Failure as failure:
            if not ends:
                raise Failure("timeout", f"{count} runs: {failure.detail}") from None
            return f"{count} runs, ended after {raw.clock() - started:.2f} s: {failure.detail}"


def _right(verdict: Verdict) -> str:
    """Return the detail of a verdict that is right. Raises Failure for one that is not."""
    if verdict.cause:
        raise Failure(verdict.cause, verdict.detail)
    return verdict.detail
