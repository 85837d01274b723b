"""The only module that knows Dask: runs texts on a cluster's workers, and starts workers.

Dask decides where something runs, and carries orders and answers, which are short texts. Files go through the store
(`stages.sharing.store`). A worker has one thread in a process of its own, so that what it runs can be stopped. The
workers of a crew are forks of one process, which imports what they need once, and starts again those that are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError, first_line
from llama_npu2.frozen import frozen
from stages.engine.places import python_environment

_CONNECTING = 10.0
"""Seconds until a scheduler that does not answer is not there."""
_PATIENCE = 2.0
"""Seconds between two looks at whether the cluster still can do what is waited for."""
_ABSENT = 30.0
"""Seconds without a fitting worker after which a step is taken back: a worker may have been started again."""
_STARTS = 60.0
"""Seconds in which the workers of a cluster on this machine have started."""
_STOPPING = 5.0
"""Seconds until a worker ends that goes on with what was cancelled."""
_AGAIN = 1.0
"""Seconds until workers that ended soon after their start are started again."""

_TLS = {"tls_ca_file": "CA_FILE", "tls_client_cert": "CLIENT__CERT", "tls_client_key": "CLIENT__KEY"}
"""What a client needs of Dask's `Security`, and how Dask's configuration names it."""

_NO_PAGES = "127.0.0.1:0"
"""The address of Dask's web server, which cannot be left out. Its own choice is a port that all can reach."""

_QUIET = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.admin.tick.interval": "1s",
}
"""What a worker does not need of Dask: it samples what runs a hundred times a second, for a page that nobody opens."""

Has = Mapping[str, float]
"""What a worker has: amounts by name. A name as `kind: value` says a version, of which there is enough for all."""


class Lost(Exception):
    """The cluster cannot be used any more, or a step had no worker for too long; the message says why."""


@frozen
class Place:
    """Where a scheduler is."""

    address: str
    security: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of Dask's `Security` for who connects; none where Dask's configuration has them."""

    def secured(self) -> Any:
        """Return the `security=` of who connects."""
        from distributed import Security

        return Security(**self.security) if self.security else None


@frozen
class Crew:
    """Workers that are started together."""

    count: int
    store: str
    """The remote that they read and write."""
    scratch: str
    """The directory that they work in, which is removed with them."""
    module: str
    """The module of what they run. Its `offered(scratch)`, which is called before they are forked, returns what each of
    them has, and one of them besides; each then calls its `begin()`."""

    def start(self, place: Place | None = None) -> subprocess.Popen[bytes]:
        """Start the process that imports what they need. It ends, with all, when its standard input is closed.

        Args:
            place: their scheduler, if it is known. They wait for a second line of input else.
        """
        command = [sys.executable, "-c", f"from {__name__} import supervise; supervise()"]
        # Ctrl-C in the terminal does not reach them: who started them stops them.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=python_environment(), start_new_session=True, bufsize=0
        )
        _tell(process, self)
        if place:
            _tell(process, place)
        return process

    @classmethod
    def here(cls) -> Crew:
        """Return the crew of this process, which is a worker."""
        assert _crew
        return _crew


_crew: Crew | None = None


def _tell(process: subprocess.Popen[bytes], value: Crew | Place) -> None:
    """Write a line to a process. If it has ended, who waits for it notices."""
    assert process.stdin
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(asdict(value)).encode() + b"\n")


def _end(process: subprocess.Popen[bytes], scratch: str) -> None:
    """End the process of a crew, and what it may have left."""
    assert process.stdin
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_STOPPING)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # it imports still; workers have groups of their own
        process.wait()
    shutil.rmtree(scratch, ignore_errors=True)


class Cluster:
    """A connection to the scheduler of a cluster."""

    def __init__(self, address: str, crew: Callable[[], Crew]) -> None:
        """Do nothing yet.

        Args:
            address: as `tcp://HOST:PORT`; without a colon, a cluster is started on this machine, which ends with it.
            crew: returns its workers.
        """
        self.place, self._new_crew = Place(address), crew
        self._connecting, self._looking = threading.Lock(), threading.Lock()
        self._looked, self._workers = 0.0, dict[str, Has]()
        self._lost = ""
        self._client: Any = None
        self._local: Any = None
        self._crew: Crew | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> bool:
        """Connect, unless that was done; return whether it was done now.

        Raises Lost if there is no scheduler at the address.
        """
        with self._connecting:
            if self._lost:
                raise Lost(self._lost)
            if self._client:
                return False
            try:
                self._connect()
                return True
            except Lost:  # somebody closed it
                raise
            except (OSError, ValueError, TypeError, RuntimeError) as error:
                self._lost = first_line(error) or type(error).__name__
                raise Lost(self._lost) from None

    def _connect(self) -> None:
        if ":" not in self.place.address:
            self._crew = self._new_crew()
            self._process = self._crew.start()  # it imports what it needs while this process imports Dask
        from distributed import Client, LocalCluster

        # What happens to workers is said in words of this project.
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("distributed", "tornado")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        if self._process and self._crew:
            # With a certificate, because whoever connects can run programs as this user.
            local = self._local = LocalCluster(
                n_workers=0,
                dashboard_address=_NO_PAGES,
                scheduler_kwargs={"dashboard": False},
                silence_logs=logging.CRITICAL,
                security=True,
            )
            tls = {name: getattr(local.security, name) for name in (*_TLS, "tls_worker_cert", "tls_worker_key")}
            self.place = Place(local.scheduler_address, {"require_encryption": True, **tls})
            _tell(self._process, self.place)
        self._client = Client(
            self.place.address,
            timeout=_CONNECTING,
            set_as_default=False,
            direct_to_workers=False,
            security=self.place.secured(),
        )
        if self._process and self._crew:
            ends = time.monotonic() + _STARTS
            while len(self.workers()) < self._crew.count:
                if self._process.poll() is not None or time.monotonic() > ends:
                    raise OSError("no worker starts on this machine")
                time.sleep(0.05)
                self._looked = 0.0

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of processes that connect to this cluster, too."""
        known = self.place.security
        return {f"DASK_DISTRIBUTED__COMM__TLS__{name}": known[part] for part, name in _TLS.items() if part in known}

    def workers(self) -> Mapping[str, Has]:
        """Return what the workers have, by their names. Raises Lost."""
        with self._looking:
            if not self._lost and time.monotonic() - self._looked > _PATIENCE / 2:
                try:
                    scheduler: Any = self._client.scheduler
                    about = self._client.sync(scheduler.identity, n_workers=-1, callback_timeout=_CONNECTING)
                    self._workers = {str(each["name"]): each["resources"] for each in about["workers"].values()}
                    self._looked = time.monotonic()
                except Exception as error:  # whatever a connection that broke raises, or that there is no answer
                    self._lost = f"the scheduler does not answer ({first_line(error)})"
            if self._lost:
                raise Lost(self._lost)
            return self._workers

    def run(self, key: str, action: Callable[[str], str], text: str, needs: Has) -> str:
        """Return `action(text)`, which a worker computes that has what it needs.

        Args:
            key: names the result: what has the same key runs once, whoever asks for it.
            action: a function of a module that workers have.
            text: its argument.
            needs: the amounts that it takes while it runs.

        Raises:
            Lost: if the cluster cannot be used, or no worker has what it needs for a while. A worker that is lost is
                no reason: another one runs it.
        """
        called = (action.__module__, action.__name__, text)
        future = self._client.submit(_calling(), *called, key=key, resources=dict(needs), pure=False)
        seen, done = time.monotonic(), threading.Event()
        future.add_done_callback(lambda _: done.set())  # a result is not asked for again and again: many wait
        try:
            while True:
                if done.wait(_PATIENCE):
                    with contextlib.suppress(TimeoutError):
                        return str(future.result(timeout=_PATIENCE))
                if any(fits(needs, has) for has in self.workers().values()):
                    seen = time.monotonic()
                elif time.monotonic() - seen > _ABSENT:
                    raise Lost("no worker is left that could run it")
        except (CancelledError, AttributeError) as error:  # of a client that was closed
            raise Lost(f"the scheduler is gone ({first_line(error)})") from None
        except Lost:
            future.cancel()
            raise
        except Exception as error:  # what it raised, or that workers were lost again and again
            raise Lost(first_line(error)) from None

    def close(self) -> None:
        """Stop what still runs for this process, and leave the cluster; that on this machine ends."""
        self._lost = "it was left"
        if self._client:
            with contextlib.suppress(Exception):
                self._client.close(timeout=1)  # a scheduler stops what nobody waits for
        if self._process and self._crew:
            _end(self._process, self._crew.scratch)
        if self._local:
            with contextlib.suppress(Exception):
                self._local.close(timeout=_STOPPING)


def _calling() -> Callable[[str, str, str], str]:
    """Return a function that is sent as such, since a scheduler, which reads what it passes on, has no checkout."""

    def call(module: str, name: str, text: str) -> str:
        import importlib

        return str(getattr(importlib.import_module(module), name)(text))

    return call


def fits(needs: Has, has: Has) -> bool:
    """Return whether a worker that has this can run what needs that."""
    return all(has.get(name, 0) >= amount for name, amount in needs.items())


def serve(address: str, crew: Crew) -> int:
    """Run workers of the cluster at `address` until they are stopped; return the exit status."""
    process = crew.start(Place(address))

    def stop(*_: object) -> None:
        assert process.stdin
        process.stdin.close()

    signal.signal(signal.SIGTERM, stop)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _end(process, crew.scratch)


def supervise() -> None:
    """Start the workers of a crew, again and again, until standard input is closed.

    Two lines of it say of which crew, and of which scheduler. Nothing here starts a thread before it forks.
    """
    with os.fdopen(os.dup(0), "rb", buffering=0) as orders:
        crew = Crew(**json.loads(orders.readline()))
        try:
            Path(crew.scratch).mkdir(parents=True, exist_ok=True)
            each, one = importlib.import_module(crew.module).offered(Path(crew.scratch))
            importlib.import_module("distributed.worker")
            if place := orders.readline():
                gc.collect()
                gc.freeze()
                has = [{**each, **(one if not number else {})} for number in range(crew.count)]
                _Supervisor(crew, has, Place(**json.loads(place))).run()
        finally:
            shutil.rmtree(crew.scratch, ignore_errors=True)


class _Supervisor:
    """The process whose forks are workers."""

    def __init__(self, crew: Crew, has: Sequence[Has], place: Place) -> None:
        self._crew, self._place = crew, place
        self._vacant = list(has)
        """What the workers have that are to be started."""
        self._started: dict[int, tuple[float, Has]] = {}
        """When the others were started, and what they have, by their processes."""
        self._alive = os.pipe()
        """A pipe to which only this process can write: workers end when it is closed, however this process ends."""
        self._woken = os.pipe()

    def run(self) -> None:
        """Keep workers running until standard input is closed, or a signal ends this process."""
        os.set_blocking(self._woken[1], False)
        signal.set_wakeup_fd(self._woken[1])
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        due = 0.0
        while True:
            now = time.monotonic()
            while self._vacant and now >= due:
                has = self._vacant.pop(0)
                self._started[self._fork(has)] = now, has
            waits = max(0.0, due - now) if self._vacant else None
            ready, _, _ = select.select([0, self._woken[0]], [], [], waits)
            if 0 in ready or (self._woken[0] in ready and {*os.read(self._woken[0], 64)} - {signal.SIGCHLD}):
                break
            for process in self._ended():
                started, has = self._started.pop(process)
                self._vacant.append(has)
                if time.monotonic() - started < _AGAIN:
                    due = time.monotonic() + _AGAIN
        for process in self._started:
            _kill_group(process)
        for process in self._started:
            os.waitpid(process, 0)

    def _ended(self) -> list[int]:
        """Return the workers that ended, after what they left running was stopped."""
        ended = [process for process in self._started if os.waitpid(process, os.WNOHANG)[0]]
        for process in ended:
            _kill_group(process)
        return ended

    def _fork(self, has: Has) -> int:
        if process := os.fork():
            with contextlib.suppress(OSError):
                os.setpgid(process, process)  # both sides do it, so that it is done when either goes on
            return process
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            os.close(self._alive[1])
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            asyncio.run(_work(self._crew, has, self._place, self._alive[0]))
        finally:
            os._exit(1)


def _kill_group(process: int) -> None:
    """Kill a worker and what it started."""
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGKILL)


async def _work(crew: Crew, has: Has, place: Place, alive: int) -> None:
    """Be a worker until its scheduler is gone."""
    import dask
    from distributed import Worker, WorkerPlugin

    global _crew
    _crew = crew
    dask.config.set(_QUIET)
    # What it leaves goes away with the crew.
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(dir=crew.scratch)
    logging.disable()
    with contextlib.suppress(UserError, OSError):  # which will be the answer to its orders
        importlib.import_module(crew.module).begin()
    group = os.getpid()
    asyncio.get_running_loop().add_reader(alive, _kill_group, group)

    class Stops(WorkerPlugin):
        """Stops what was cancelled, and all where the scheduler is gone."""

        def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
            task = worker.state.tasks.get(key)
            if start == "executing" and task and task.state == "cancelled":
                threading.Thread(target=_stop, args=(worker, key), daemon=True).start()

        def teardown(self, worker: Any) -> None:
            _kill_group(group)

    worker: Any = Worker(
        place.address,
        nthreads=1,
        memory_limit=0,
        local_directory=tempfile.tempdir,
        resources=dict(has),
        security=place.secured(),
        plugins=(Stops(),),
        dashboard_address=_NO_PAGES,
    )
    await worker
    await worker.finished()


def _stop(worker: Any, key: Any) -> None:
    """End the processes of what a worker runs, then the worker itself, which is started again, if it goes on."""
    import psutil

    ends = time.monotonic() + _STOPPING
    while (task := worker.state.tasks.get(key)) and task.state == "cancelled":
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        if time.monotonic() > ends:
            os._exit(1)
        time.sleep(0.02)
    if task and task.state == "resumed":
        os._exit(1)  # somebody else asks for it, who must not get the failure of a step whose compiler was killed
