"""The only module that knows Dask: runs texts on a cluster's workers, and starts workers.

Dask decides where something runs, and carries orders and answers, which are short texts. Files go through the store
(`stages.sharing.store`). A worker has one thread in a process of its own, so that what it runs can be stopped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass
from typing import Any

from llama_npu2.errors import first_line
from stages.engine.places import python_environment

_SETTINGS = "LLAMA_NPU2_WORKER"
"""Environment variable of a worker: its settings as JSON."""
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

Has = Mapping[str, float]
"""What a worker has: amounts by name. A name as `kind: value` says a version, of which there is enough for all."""


class Lost(Exception):
    """The cluster cannot be used any more, or a step had no worker for too long; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What a worker is started with."""

    has: Has
    store: str
    """The remote that it reads and writes."""
    scratch: str
    """The directory that it works in."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its process."""
        return {"PYTHONPATH": python_environment()["PYTHONPATH"], _SETTINGS: json.dumps(asdict(self))}

    @classmethod
    def here(cls) -> Settings:
        """Return the settings of this process, which is a worker."""
        return cls(**json.loads(os.environ[_SETTINGS]))


class Cluster:
    """A connection to the scheduler of a cluster."""

    def __init__(self, address: str, local: Callable[[], Settings], workers: int) -> None:
        """Connect.

        Args:
            address: as `tcp://HOST:PORT`; without a colon, a cluster is started on this machine, which ends with it.
            local: returns the settings of its workers.
            workers: how many it has.

        Raises:
            Lost: if there is no scheduler at the address.
        """
        from distributed import Client, LocalCluster

        # What happens to workers is said in words of this project.
        for name in filter(lambda name: name.startswith("distributed"), list(logging.root.manager.loggerDict)):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._local: Any = None
        self._scratch = ""
        self._lock = threading.Lock()
        self._looked, self._workers = 0.0, dict[str, Has]()
        self._lost = ""
        try:
            if ":" not in address:
                settings = local()
                self._scratch = settings.scratch
                self._local = LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    memory_limit=0,
                    dashboard_address=None,
                    worker_dashboard_address=None,
                    local_directory=settings.scratch,
                    preload=[__name__],
                    env=settings.environment,
                    silence_logs=logging.CRITICAL,
                    # With a certificate, because whoever connects can run programs as this user.
                    security=True,
                )
            place = self._local or address
            self._client = Client(place, timeout=_CONNECTING, set_as_default=False, direct_to_workers=False)
            if self._local:
                self._client.wait_for_workers(workers, timeout=_STARTS)
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            self._end_local()
            raise Lost(first_line(error) or type(error).__name__) from None

    def workers(self) -> Mapping[str, Has]:
        """Return what the workers have, by their names. Raises Lost."""
        with self._lock:
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
            action: a function of a module that workers have, too.
            text: its argument.
            needs: the amounts that it takes while it runs.

        Raises:
            Lost: if the cluster cannot be used, or no worker has what it needs for a while. A worker that is lost is
                no reason: another one runs it.
        """
        future = self._client.submit(action, text, key=key, resources=dict(needs), pure=False)
        seen = time.monotonic()
        try:
            while True:
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
        with contextlib.suppress(Exception):
            self._client.close(timeout=1)  # a scheduler stops what nobody waits for
        self._end_local()

    def _end_local(self) -> None:
        if self._local:
            with contextlib.suppress(Exception):
                self._local.close(timeout=2 * _STOPPING)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


def fits(needs: Has, has: Has) -> bool:
    """Return whether a worker that has this can run what needs that."""
    return all(has.get(name, 0) >= amount for name, amount in needs.items())


def serve(address: str, settings: Settings, workers: int) -> int:
    """Run workers of the cluster at `address` until they are stopped; return the exit status."""
    options = ["--nworkers", workers, "--nthreads", 1, "--memory-limit", 0, "--no-dashboard"]
    places = ["--local-directory", settings.scratch, "--preload", __name__]
    command: Sequence[object] = [sys.executable, "-m", "distributed.cli.dask_worker", address, *options, *places]
    process = subprocess.Popen([*map(str, command)], env=os.environ | settings.environment)
    signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # it stops its workers, and then ends
            return process.wait()


async def dask_setup(worker: Any) -> None:
    """Prepare a worker before it is known to its scheduler (Dask calls this, because the module is a preload)."""
    from distributed import WorkerPlugin

    # Ctrl-C reaches it, too; who started it stops it. What it starts does not inherit a handler, as it would SIG_IGN.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    for resources in (worker.state.total_resources, worker.state.available_resources):
        resources |= Settings.here().has

    class Stops(WorkerPlugin):
        """Stops what was cancelled."""

        def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
            if (start, finish) == ("executing", "cancelled"):
                threading.Thread(target=_stop, args=(worker, key), daemon=True).start()

    await worker.plugin_add(Stops(), name="stops")


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
        time.sleep(0.1)
