"""`on=ADDRESS`: steps run on the workers of a cluster, and their outputs come through the store of `cache=`.

A worker gets an `Order`: what the step's address is the digest of, and the digests of its inputs, which lie in the
store. It runs the very same step, and offers the outputs there, signed with its own key. From then on they are outputs
of the cache like any others: only a trusted signature counts. Whatever a worker or a scheduler may say instead costs no
more than a step that runs here.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError, printable
from llama_npu2.frozen import frozen
from llama_npu2.schema import anything, list_of, load_json, mapping, one_of, record, string, whole
from stages.engine.places import KERNELS, LOGS
from stages.engine.progress import say
from stages.engine.project import Project
from stages.engine.steps import Step
from stages.sharing.cache import Cache
from stages.sharing.cluster import Cluster, Crew, Has, Lost, fits
from stages.sharing.records import Blob, address_of, blob_of, blobs_of_json, canonical, circumstances
from stages.sharing.store import warn

IN_FLIGHT = 64
"""Steps that are begun at the same time. Those that run here are fewer (`Project.at_once`)."""
MEMORY = "memory"
"""The name of the bytes that a worker has, and that a step takes."""
ENOUGH = 1 << 20
"""The amount of a version that a worker has: each step takes 1."""
_LONGEST = 1 << 20
"""Most characters of what a worker says."""


@frozen
class Order:
    """What a worker is asked for."""

    known: Mapping[str, Any]
    """All that the step's address is the digest of (`records.circumstances`)."""
    options: Mapping[str, str]
    """The variables that decide which steps there are, as the command line has them."""
    inputs: Mapping[str, Blob]
    """The files that the step reads, by label, all in the artifact directory."""

    @property
    def step(self) -> str:
        return str(self.known["step"])

    @property
    def address(self) -> str:
        return address_of(self.known)

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, content: str) -> Order:
        """Return the order in a text. Raises UserError, ValueError."""
        value = load_json(content.encode())
        _ORDER(value)
        return cls(value["known"], value["options"], blobs_of_json(value["inputs"]))


_ORDER = record(
    {
        "known": record({"step": string, "key": mapping(string, anything), "declared": mapping(string, string)}),
        "options": mapping(string, string),
        "inputs": mapping(string, anything),
    }
)

MADE, FAILED, REFUSED = "made", "failed", "refused"


@frozen
class Answer:
    """What a worker says at the end."""

    outcome: str
    """`MADE`: the outputs are in the store. `FAILED`: the step raised an error, as it would here. `REFUSED`: the worker
    cannot run it, or not leave its outputs."""
    worker: str
    """The name of its machine and process."""
    address: str = ""
    """The address of the step that it was asked for, as it computed that; empty where it cannot read the order."""
    why: str = ""
    milliseconds: int = 0
    """How long the step ran."""
    said: Sequence[str] = ()
    """The lines that it printed."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """Logs of compilers that failed, by file name."""

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, content: str) -> Answer:
        """Return the answer in a text. Raises ValueError."""
        if len(content) > _LONGEST:
            raise ValueError("it is too long")
        value = load_json(content.encode(errors="surrogatepass"))
        _ANSWER(value)
        return cls(**{name: value[name] for name in cls.__annotations__})


_ANSWER = record(
    {
        "outcome": one_of(MADE, FAILED, REFUSED),
        "worker": string,
        "address": string,
        "why": string,
        "milliseconds": whole(0, 1 << 40),
        "said": list_of(string),
        "logs": mapping(string, string),
    }
)


def kind_of(find: Callable[[], str | None]) -> str:
    """Return the name of a function that returns a tool's fingerprint, as it is the same on all machines."""
    name = f"{find.__module__}.{find.__name__}".removeprefix("stages.targets.")
    return name.removesuffix("_fingerprint").removesuffix(".fingerprint")


def versions(values: Mapping[str, Any]) -> Has:
    """Return versions of tools and properties of machines, by kind, as what a step needs 1 of."""
    return {f"{kind}: {canonical(value).decode().strip(chr(34))}": 1 for kind, value in values.items() if value != ""}


def sources(project: Project) -> dict[str, str]:
    """Return the version of all code and kernel sources that steps may read, as `versions` takes it."""
    parts = project.code.sha256("stages.graph"), project.digests.sha256(KERNELS)
    return {"sources": hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}


@dataclass
class Fleet:
    """A cache whose steps may also be run elsewhere, see `engine.project.Shared`.

    Whatever fails prints a line, and the build goes on here. Raises UserError for a URL that cannot be used, or without
    the package that clusters need.
    """

    cache: Cache
    address: str
    """The address of the cluster, see `Cluster`."""
    crew: Callable[[], Crew]
    """Returns the workers of a cluster on this machine."""
    action: Callable[[str], str]
    """What a worker calls with the text of an order; it returns that of an answer."""
    options: Callable[[Step], Mapping[str, str] | None]
    """Returns what an order says for a step; None if the step must run here."""
    always: Sequence[Path] = ()
    """Files that a worker needs for any step, to know which steps there are."""
    _off: bool = field(default=False, init=False)
    _left: bool = field(default=False, init=False)
    _cluster: Cluster | None = field(default=None, init=False)
    _said: set[str] = field(default_factory=set, init=False)
    _sent: set[Blob] = field(default_factory=set, init=False)
    _versions: Mapping[str, str] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        if find_spec("distributed") is None:
            raise UserError(f"on={self.address}: needs the package distributed: pip install -e '.[fleet]'")

    def fetch(self, step: Step, work: Path) -> list[Path] | None:
        """Fetch the outputs of a step, which a worker makes if nobody has."""
        found = self.cache.fetch(step, work)
        if found is not None or self._off or self.cache.is_off:
            return found
        options = self.options(step)
        known = circumstances(step) if options is not None else None
        if options is None or known is None:
            return None
        try:
            order = Order(known, options, self._inputs(step))
            needs = needs_of(step, order, self._sources(step.project))
            if lack := lacking(needs, self._connected().workers()):
                self._say_once(f"{lack}: such steps run here")
                return None
            answer = self.ask(step.project, order, needs)
        except (Lost, UserError) as error:  # of the cluster, or of the store
            if self._left:
                raise UserError("the build was stopped") from None
            self._stop_using(str(error))
            return None
        return self._taken(step, answer, work)

    def offer(self, step: Step) -> None:
        """Add the outputs of a step that ran here to the cache."""
        self.cache.offer(step)

    def close(self) -> None:
        """Leave the cluster, if there is a connection; what still runs for this build is stopped."""
        with self._lock:
            self._off = self._left = True  # what fails from here on fails because of this
            cluster, self._cluster = self._cluster, None
        if cluster:
            atexit.unregister(self.close)
            cluster.close()

    def tool(self, find: Callable[[], str | None]) -> Callable[[], str | None]:
        """Return a function that returns a tool's fingerprint.

        Where the tool is missing it is the one that workers have, if all have the same.
        """

        @functools.wraps(find)
        def fingerprint() -> str | None:
            here = find()
            return self._tool_of_workers(kind_of(find)) if here is None else here

        return fingerprint

    def _tool_of_workers(self, kind: str) -> str | None:
        if self._off:
            return None
        try:
            found = {version for has in self._connected().workers().values() for version in _of_kind(kind, has)}
        except Lost as error:
            self._stop_using(str(error))
            return None
        return found.pop() if len(found) == 1 else None

    def _connected(self) -> Cluster:
        """Return the cluster. Raises Lost."""
        with self._lock:
            if self._off:
                raise Lost("it was left")
            if not self._cluster:
                self._cluster = Cluster(self.address, self.crew)
            cluster = self._cluster
        if cluster.connect():
            atexit.register(self.close)  # before Dask, which registered earlier, ends what steps wait for
        return cluster

    def _stop_using(self, why: str) -> None:
        with self._lock:
            said, self._off = self._off, True
        if not said:
            warn(f"on={self.address} is not used from here on: {printable(why)}: steps run here")

    def _inputs(self, step: Step) -> dict[str, Blob]:
        """Return the files of the artifact directory that a step reads. Raises UserError."""
        project = step.project
        paths = [each for path in (*step.inputs, *step.discovers(), *self.always) for each in _files(path)]
        inside = [path for path in dict.fromkeys(paths) if path.is_relative_to(project.directory)]
        return {path.relative_to(project.directory).as_posix(): blob_of(project, path) for path in inside}

    def workers(self) -> Mapping[str, Has]:
        """Return what the workers have, by their names. Raises Lost."""
        return self._connected().workers()

    def ask(self, project: Project, order: Order, needs: Has) -> Answer:
        """Return a worker's answer to an order, whose inputs are files of a project.

        Raises Lost, and UserError where the store fails.
        """
        cluster = self._connected()
        if new := {blob: label for label, blob in order.inputs.items() if blob not in self._sent}:
            self.cache.store(project).send({blob: project.directory / label for blob, label in new.items()})
            self._sent |= new.keys()
        say("waiting for a worker")
        content = cluster.run(order.address, self.action, order.text, needs)
        try:
            answer = Answer.of_text(content)
        except ValueError as error:
            raise Lost(f"an answer about {order.step} is malformed ({error})") from None
        unread = answer.outcome == REFUSED and not answer.address
        if answer.address != order.address and not unread:
            where = printable(answer.worker)
            raise Lost(f"{order.step} was asked for, and the answer (from {where}) is about another step or build")
        return answer

    def _taken(self, step: Step, answer: Answer, work: Path) -> list[Path] | None:
        """Fetch what a worker made. Raises UserError if the step failed there as it would here."""
        worker = printable(answer.worker)
        for line in answer.said:
            warn(f"{step.name}: {printable(line)} ({worker})")
        if answer.outcome == FAILED:
            for name, log in answer.logs.items():
                step.project.tree.write(LOGS / Path(name).name, log.encode(errors="replace"))
            raise UserError(f"{printable(answer.why)} (on {worker})")
        if answer.outcome == REFUSED:
            self._say_once(f"not run on {worker}: {printable(answer.why)}: such steps run here")
            return None
        found = self.cache.look_up(step, work)
        if found is None:
            self._stop_using(
                f"{worker} says that it ran {step.name}, but {self.cache.url} has no such outputs of a signer whom you "
                "trust"
            )
            return None
        seconds = answer.milliseconds / 1000
        step.project.durations.note(step.name, seconds)
        print(f"{step.name}: run on {worker}, {seconds:.1f} s\n", end="", file=sys.stderr, flush=True)
        return found

    def _sources(self, project: Project) -> Mapping[str, str]:
        with self._lock:
            if not self._versions:
                self._versions = sources(project)
            return self._versions

    def _say_once(self, line: str) -> None:
        with self._lock:
            said = line in self._said
            self._said.add(line)
        if not said:
            warn(line)


def needs_of(step: Step, order: Order, code: Mapping[str, str]) -> Has:
    """Return what a worker must have to run a step, by names as in `Cluster`; `code`: see `sources`."""
    key = order.known["key"]
    tool = {kind_of(step.tool): key["tool"]} if step.tool else {}
    memory = {MEMORY: step.memory} if step.memory else {}
    return {**versions({**code, **key["elsewhere"], **tool}), **memory}


def lacking(needs: Has, workers: Mapping[str, Has]) -> str:
    """Return which versions the workers lack, and which they have instead; nothing if one has what is needed."""
    if not workers:
        return "no worker is there"
    if any(fits(needs, has) for has in workers.values()):
        return ""
    nearest = max(workers.values(), key=lambda has: sum(has.get(name, 0) >= amount for name, amount in needs.items()))
    parts = []
    for name, amount in needs.items():
        if nearest.get(name, 0) < amount:
            kind, _, version = name.partition(": ")
            there = sorted({each for has in workers.values() for each in _of_kind(kind, has)})
            wanted = version or f"{amount / 1e9:.1f} GB"
            have = ", ".join(there) or f"{max(has.get(name, 0) for has in workers.values()) / 1e9:.1f} GB"
            parts.append(f"{kind} {wanted} here, {printable(have) if version or there else have} there")
    return f"no worker fits: {'; '.join(parts)}"


def _of_kind(kind: str, has: Has) -> Iterator[str]:
    for name in has:
        head, _, version = name.partition(": ")
        if head == kind and version:
            yield version


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or the files below a directory."""
    if path.is_dir():
        yield from sorted(each for each in path.rglob("*") if each.is_file())
    elif path.is_file():
        yield path
