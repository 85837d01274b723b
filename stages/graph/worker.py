"""What a worker does with an order: it makes the graph that the order is about, runs one step, offers its outputs.

Each graph has a directory of its own, in which no file is ever replaced by another content: an order whose inputs are
others gets a new one. So a step reads what its address says, whatever else runs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llama_npu2.artifact.cpu_features import cpu_features
from llama_npu2.errors import UserError, shortened
from stages.engine.code import Code
from stages.engine.digests import Digests
from stages.engine.durations import Durations
from stages.engine.lock import ProcessLock
from stages.engine.places import CHECKPOINT, CONFIG, KERNELS, LOGS, SCRATCH
from stages.engine.project import Project
from stages.engine.room import at_a_time, memory
from stages.engine.steps import Step
from stages.graph.choices import Choices
from stages.graph.measuring import MEASURE, device_of, measure
from stages.graph.options import parse_options
from stages.graph.wiring import Wiring, arithmetic
from stages.model.sources import ArtifactsOnly
from stages.sharing.cache import Arrivals, offer_run, runs_of, step_entry
from stages.sharing.cluster import Crew, Has
from stages.sharing.fleet import ENOUGH, FAILED, MADE, MEMORY, REFUSED, Answer, Order, kind_of, sources, versions
from stages.sharing.records import Blob, circumstances, fits_here, is_here
from stages.sharing.remotes import open_remote
from stages.sharing.store import Store
from stages.targets import forget_tools, targets
from stages.targets.cpu.objects import precompile_for_forks

_KEPT = 8
"""Most graphs that a worker keeps, with their files."""
_LONGEST_LOG = 200_000
"""Most characters of a compiler's log that are sent back: its end."""

Steps = Callable[[Order, Project], Mapping[str, Step]]


def crew_here(store: str, artifacts: Path) -> Crew:
    """Return as many workers as this machine has room for, with a new directory below `artifacts` to work in."""
    artifacts.mkdir(parents=True, exist_ok=True)
    return Crew(at_a_time(), store, tempfile.mkdtemp(prefix=SCRATCH, dir=artifacts), __name__)


def offered(scratch: Path) -> tuple[Has, Has]:
    """Return what each worker of this machine has, and what one of them has besides: who measures is alone.

    What they share is made in `scratch`.
    """
    (headers := scratch / "headers").mkdir(parents=True, exist_ok=True)
    precompile_for_forks(headers)
    known: dict[str, Any] = {**arithmetic(), "features": cpu_features()}
    for target in targets().values():
        known |= target.built_on()
        for room in (target.modules, target.objects, target.programs):
            known[kind_of(room.fingerprint)] = room.fingerprint() or ""
    known |= sources(_project(scratch / "none", remembered(scratch)))
    devices: dict[str, float] = {}
    for target in targets().values():
        devices |= device_of(target.device) if target.runs_here() else {}
    return {**dict.fromkeys(versions(known), ENOUGH), MEMORY: memory() // at_a_time()}, devices


class _Digests(Digests):
    """Digests of a worker, which ends with its files."""

    def save(self, soon: bool = False) -> None:
        """Keep nothing for later."""


@functools.cache
def remembered(scratch: Path) -> Digests:
    """Return the digests of the workers of a crew: what is known of the sources before they are forked, all know."""
    return _Digests(scratch / "digests")


class _Durations(Durations):
    """Durations of a worker's steps, which are in its answers."""

    def note(self, step: str, seconds: float) -> None:
        """Write nothing down."""


def _project(directory: Path, digests: Digests) -> Project:
    lock = ProcessLock(directory.parent / f"{directory.name}.lock")
    project = Project(directory, digests, lock, lasting=False)
    project.durations = _Durations(digests.path.parent, directory)
    return project


def _signature(path: str) -> tuple[int, ...]:
    """Return what changes with a file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - for hundreds of files before and after each step
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ino


def steps_of(order: Order, project: Project) -> Mapping[str, Step]:
    """Return the steps of the build that an order is about, in the directory of a project. Raises UserError."""
    choices = Choices(parse_options({**order.options, "artifacts": str(project.directory.parent)}))
    choices.directory, choices.project = project.directory, project
    if "model" not in order.options:
        choices.source = ArtifactsOnly("model")
    return {step.name: step for step in Wiring(choices).steps()}


@dataclass
class Graph:
    """The steps of one build, and the files in its directory."""

    project: Project
    steps: Mapping[str, Step]
    files: dict[str, Blob] = field(default_factory=dict)
    """The inputs that were put into the directory."""

    def takes(self, inputs: Mapping[str, Blob]) -> bool:
        """Return whether these inputs can be put beside those that are there."""
        return all(self._is_free(label, blob) for label, blob in inputs.items())

    def _is_free(self, label: str, blob: Blob) -> bool:
        if label in self.files:
            return self.files[label] == blob
        return not (self.project.directory / label).exists() or is_here(self.project, label, blob)


class Workshop:
    """The place where a worker runs steps."""

    def __init__(self, store: str, scratch: Path, steps: Steps = steps_of) -> None:
        self._scratch, self._steps = scratch / str(os.getpid()), steps
        self._digests = remembered(scratch)
        self._store = Store(open_remote(store), self._digests)
        files = [*Code(self._digests).files("stages.graph"), *KERNELS.rglob("*")]
        self._sources = {str(path): _signature(str(path)) for path in files}
        self._graphs: dict[str, Graph] = {}
        self._numbers = itertools.count()

    def answer(self, content: str) -> Answer:
        """Return the answer to an order."""
        said = io.StringIO()
        answer = Answer(REFUSED, f"{os.uname().nodename}/{os.getpid()}")
        try:
            with contextlib.redirect_stderr(said):
                order = Order.of_text(content)
                answer = replace(answer, address=order.address)
                answer = self._run(order, answer)
        except (UserError, OSError, ValueError) as error:
            answer = replace(answer, why=str(error) or type(error).__name__)
        return replace(answer, said=[line for line in said.getvalue().splitlines() if line.strip()][:1000])

    def _run(self, order: Order, answer: Answer) -> Answer:
        """Run an order. Raises UserError, OSError and ValueError for what refuses it."""
        self._check_sources()
        if order.step == MEASURE:
            return self._measure(order, answer)
        graph = self._graph(order)
        step = graph.steps.get(order.step)
        if step is None:
            raise UserError(f"{order.step} is no step of the build that it is said to be of")
        self._place(graph, order)
        _check_same(order, step)
        started = time.monotonic()
        if not self._is_made(step, order.address):
            if failed := step.run():
                return replace(answer, outcome=FAILED, why=failed.message, logs=_logs(graph.project))
            self._check_sources()
            _check_same(order, step)  # its tool may have been exchanged meanwhile
            offer_run(self._store, step)
        return replace(answer, outcome=MADE, milliseconds=round(1000 * (time.monotonic() - started)))

    def _measure(self, order: Order, answer: Answer) -> Answer:
        """Measure an artifact directory, in a place of its own. Raises UserError."""
        graph = Graph(_project(self._scratch / str(next(self._numbers)), self._digests), {})
        try:
            self._receive(graph, order.inputs)
            measure(graph.project.directory, order, self._store, answer.worker)
        finally:
            self._forget(graph)
        return replace(answer, outcome=MADE)

    def _graph(self, order: Order) -> Graph:
        """Return the graph of an order, in a directory that takes its inputs. Raises UserError."""
        config = order.inputs.get(CONFIG.as_posix())
        key = repr((sorted(order.options.items()), config))
        graph = self._graphs.pop(key, None)
        if graph is None or not graph.project.directory.is_dir() or not graph.takes(order.inputs):
            self._forget(graph)
            project = _project(self._scratch / str(next(self._numbers)), self._digests)
            graph = Graph(project, {})
            # Which steps there are depends on the configuration.
            self._receive(graph, {} if config is None else {CONFIG.as_posix(): config})
            graph.steps = self._steps(order, project)
        self._graphs[key] = graph  # the one that was used last is the last one
        while len(self._graphs) > _KEPT:
            self._forget(self._graphs.pop(next(iter(self._graphs))))
        return graph

    def _forget(self, graph: Graph | None) -> None:
        if graph:
            shutil.rmtree(graph.project.directory, ignore_errors=True)

    def _place(self, graph: Graph, order: Order) -> None:
        """Put the inputs of an order into the directory of its graph. Raises UserError."""
        if "model" in order.options:
            # The step reads the checkpoint, which each machine has from where the options say.
            if failed := graph.steps["checkpoint"].run():
                raise UserError(failed.message)
            for label in map(Path.as_posix, (CONFIG, CHECKPOINT)):
                if (blob := order.inputs.get(label)) and not is_here(graph.project, label, blob):
                    raise UserError(f"model={order.options['model']} is another checkpoint here")
        self._receive(graph, order.inputs)

    def _receive(self, graph: Graph, files: Mapping[str, Blob]) -> None:
        new = {label: blob for label, blob in files.items() if label not in graph.files}
        if new:
            arrivals = Arrivals(self._store, graph.project, new, "inputs")
            arrivals.place(new, graph.project.directory)
            arrivals.done()
            graph.files |= new

    def _is_made(self, step: Step, where: str) -> bool:
        """Return whether this user ran a step before, here or on another worker."""
        runs = runs_of(self._store.own(step_entry(where)) or {}, where)
        return any(fits_here(step, run) and not self._absent(run.outputs.values()) for run in runs)

    def _absent(self, blobs: Iterable[Blob]) -> set[str]:
        return self._store.remote.missing({blob.name: blob.size for blob in blobs})

    def _check_sources(self) -> None:
        """Raise UserError if the checkout is not the one that this process has loaded."""
        if {path: _signature(path) for path in self._sources} != self._sources:
            raise UserError("the worker's checkout has changed since it started: start the worker again")


def _check_same(order: Order, step: Step) -> None:
    """Raise UserError if a step is another one here than the order says, with the tools that are here now."""
    forget_tools()
    if difference := _difference(order, circumstances(step)):
        raise UserError(f"{order.step} is another step here: {difference}")


def _difference(order: Order, here: Mapping[str, Any] | None) -> str:
    """Return what differs between an order's circumstances and those of the step here; nothing if they are the same."""
    if here is None:
        return "a tool that it needs is missing"
    for part, names in (("key", "its"), ("declared", "its input")):
        for name in sorted({*order.known[part], *here[part]}):
            there, now = order.known[part].get(name), here[part].get(name)
            if there != now:
                word = {"elsewhere": "machine", "params": "parameters"}.get(name, name)
                # The worker said at its start what it has, and was chosen for that.
                remedy = ": start the worker again" if name == "tool" else ""
                return f"{names} {word} is {shortened(str(now))}, not {shortened(str(there))}{remedy}"
    return "" if dict(order.known) == dict(here) else "the version of records"


def _logs(project: Project) -> dict[str, str]:
    """Return the logs that compilers left in the directory of a graph, and remove them."""
    logs = {}
    for path in sorted((project.directory / LOGS).glob("*.log")):
        logs[path.name] = path.read_text(errors="replace")[-_LONGEST_LOG:]
        path.unlink()
    return logs


@functools.cache
def _workshop() -> Workshop:
    here = Crew.here()
    return Workshop(here.store, Path(here.scratch))


def begin() -> None:
    """Make ready for orders. Raises UserError and OSError."""
    _workshop()


def act(content: str) -> str:
    """Run an order, and return the answer, both as texts. A worker calls this."""
    return _workshop().answer(content).text
