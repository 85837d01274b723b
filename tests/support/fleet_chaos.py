"""A cluster in which everything is killed, stopped and cut off at random while builds use it.

    python -m tests.support.fleet_chaos [FAULTS [SEED]]

A client process builds one stand-in directory after the other, on workers, through a store. Some of these see the store
as a directory, others through a server (`s3_server`). Meanwhile FAULTS (100) are drawn: workers, those who start them,
the scheduler, the client and the store's server are killed or stopped for a while, connections to the scheduler are
cut, the store goes away for a while. After each of them, and at the end, all that trusted entries of the
store promise must be there and right. At last every directory is built once more without faults: it must be complete,
with the bytes of a local build.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from stages.engine.digests import Digests
from stages.engine.files import content_sha256
from stages.engine.places import ROOT
from stages.sharing.cache import runs_of
from stages.sharing.remotes import open_remote
from stages.sharing.store import Store
from tests.support.fleets import TOOL, Client, Grid, until

STEPS, WORKERS, SECONDS = 24, 3, 0.2
SERVED = "s3://store"
"""The store as its server shows it."""
SAME = 2
"""Directories with one configuration: the second finds what the first left in the store."""


class Relay:
    """Passes connections on to another port, until they are cut."""

    def __init__(self, target: int) -> None:
        self._target, self._open = target, list[socket.socket]()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near = self._listening.accept()[0]
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Close all connections."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class World:
    """Scheduler, workers, store, and the client that builds."""

    scratch: Path
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    """How often each fault happened."""
    timers: list[threading.Timer] = field(default_factory=list)
    client: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        self.port = free_port()
        self.relay = Relay(self.port)
        self.store = self.scratch / "store"
        (self.scratch / "disk").mkdir()
        self.store.symlink_to(self.scratch / "disk")
        self.store_port = free_port()
        os.environ["FSSPEC_S3_ENDPOINT_URL"] = f"http://127.0.0.1:{self.store_port}"
        os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        self.start_server()
        self.start_scheduler()
        self.grid = Grid(f"tcp://127.0.0.1:{self.relay.port}", self.scratch, urls=[SERVED])
        for _ in range(WORKERS):
            self.grid.start("version 1")
        until(lambda: len(self.workers) == WORKERS, 120)

    def start_scheduler(self) -> None:
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard", "--no-show"]
        command = [sys.executable, "-m", "distributed.cli.dask_scheduler", *options]
        self.scheduler = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def start_server(self) -> None:
        command = [sys.executable, "-m", "tests.support.s3_server", str(self.store_port), str(self.scratch)]
        self.server = subprocess.Popen(command, cwd=ROOT)

    def start_client(self, number: int) -> None:
        words = [sys.executable, "-m", "tests.support.fleet_chaos", "client"]
        store = self.chance.choice([str(self.store), SERVED])
        words += [str(self.directory(number)), str(number // SAME), store, self.grid.address]
        self.client = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def directory(self, number: int) -> Path:
        return self.scratch / f"build {number}"

    @property
    def workers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return [child for crew in self.grid.alive for child in psutil.Process(crew.pid).children()]
        return []

    # Faults: each returns whether there was something to do it to.

    def kill_worker(self) -> bool:
        return self._signal(signal.SIGKILL)

    def stop_worker(self) -> bool:
        return self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> bool:
        if not (workers := self.workers):
            return False
        chosen = self.chance.choice(workers)
        with contextlib.suppress(psutil.Error):
            chosen.send_signal(number)
            if number == signal.SIGSTOP:
                self._later(2, partial(_go_on, chosen))
        return True

    def kill_crew(self) -> bool:
        if not (crews := self.grid.alive):
            return False
        chosen = self.chance.choice(crews)
        chosen.kill()
        chosen.wait()
        self.grid.start("version 1")
        return True

    def kill_scheduler(self) -> bool:
        self.scheduler.kill()
        self.scheduler.wait()
        self.start_scheduler()
        return True

    def stop_scheduler(self) -> bool:
        self.scheduler.send_signal(signal.SIGSTOP)
        self._later(3, partial(self.scheduler.send_signal, signal.SIGCONT))
        return True

    def kill_client(self) -> bool:
        assert self.client
        self.client.kill()
        return True

    def stop_client(self) -> bool:
        assert self.client
        self.client.send_signal(signal.SIGSTOP)
        self._later(3, partial(self.client.send_signal, signal.SIGCONT))
        return True

    def cut_connections(self) -> bool:
        self.relay.cut()
        return True

    def lose_store(self) -> bool:
        """Until it is back, its path leads round in a circle."""
        self._lead(self.store)
        self._later(1, partial(self._lead, self.scratch / "disk"))
        return True

    def kill_server(self) -> bool:
        if self.server.poll() is not None:
            return False
        self.server.kill()
        self.server.wait()
        self._later(3, self.start_server)
        return True

    def stop_server(self) -> bool:
        if self.server.poll() is not None:
            return False
        self.server.send_signal(signal.SIGSTOP)
        self._later(2, partial(self.server.send_signal, signal.SIGCONT))
        return True

    def _lead(self, to: Path) -> None:
        new = self.scratch / f"link to {to.name}"
        new.unlink(missing_ok=True)
        new.symlink_to(to)
        new.replace(self.store)

    def _later(self, most: float, what: Callable[[], object]) -> None:
        timer = threading.Timer(self.chance.uniform(0.1, most), what)
        self.timers.append(timer)
        timer.start()

    def calm(self) -> None:
        """Wait until all that was stopped goes on."""
        for timer in self.timers:
            timer.join()
        self.timers.clear()

    def stop(self) -> None:
        self.calm()
        self.grid.stop()
        for process in (self.scheduler, self.server):
            process.kill()
            process.wait()
        if self.client and self.client.poll() is None:
            self.client.kill()


def _go_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):  # it may have been killed while it was stopped
        process.send_signal(signal.SIGCONT)


FAULTS: dict[str, Callable[[World], bool]] = {
    name: getattr(World, name.replace(" ", "_"))
    for name in (
        *("kill worker", "stop worker", "kill crew", "kill scheduler", "stop scheduler"),
        *("kill client", "stop client", "cut connections", "lose store", "kill server", "stop server"),
    )
}


def content_of(config: object) -> str:
    """Return the configuration of the directories of a number."""
    return f"the configuration {config}"


def chaos(scratch: Path, faults: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Return how often each fault happened, and how often builds ended how. Raises AssertionError."""
    os.environ[TOOL] = "version 1"
    world, ended, number = World(scratch, random.Random(seed)), Counter[str](), -1
    try:
        while world.done.total() < faults:
            number += 1
            world.start_client(number)
            ended[outcome(world, number, faults)] += 1
            world.calm()
        for each in range(number + 1):
            client = client_of(world.directory(each), each // SAME, world.store, world.grid.address)
            assert client.build() == []
            check_directory(client, each // SAME)
        check_store(scratch)
    except BaseException:
        print(f"seed {seed}, after {dict(world.done)}", file=sys.stderr)
        raise
    finally:
        world.stop()
    return world.done, ended


def outcome(world: World, number: int, faults: int) -> str:
    """Do faults until the client's build has ended; return how it did."""
    assert world.client and world.client.stderr
    client = world.client
    until(lambda: client.poll() is not None or (world.directory(number) / "log").exists(), 120)
    while world.client.poll() is None and world.done.total() < faults:
        time.sleep(world.chance.uniform(0.1, 1.5))
        name = world.chance.choice(list(FAULTS))
        if world.client.poll() is None and FAULTS[name](world):
            world.done[name] += 1
        check_store(world.scratch)
    world.calm()
    said = world.client.stderr.read()
    status = world.client.wait()
    assert "Traceback" not in said, said
    if status == -signal.SIGKILL:
        return "killed"
    assert status == 0, f"{status}: {said}"
    client = client_of(world.directory(number), number // SAME, world.store, "")
    check_directory(client, number // SAME)
    return "complete, steps here" if "run here" in said else "complete"


def client_of(directory: Path, config: object, store: Path | str, address: str) -> Client:
    given = {"count": STEPS, "seconds": SECONDS, "log": directory / "log"}
    return Client(directory, store, address, config=content_of(config), **given)


def check_directory(client: Client, config: object) -> None:
    """Check that a directory is complete, with the right bytes."""
    names = [*map(str, range(STEPS)), "last"]
    assert client.made == {f"out-{name}": f"{name} of {content_of(config)}".encode() for name in names}
    assert all(step.is_current() for step in client.steps.values())


def check_store(scratch: Path) -> None:
    """Check that the store has all that its entries promise, with the right bytes."""
    disk = scratch / "disk"
    store = Store(open_remote(str(disk)), Digests(scratch / "digests of the check"))
    folders = {path.parent for path in (disk / "steps").rglob("*.json")}
    configs = {content_of(number) for number in range(1000)}
    for folder in folders:  # of whoever writes now, the entry comes last
        where = "".join(folder.parts[-2:])
        entries = store.entries(f"steps/{folder.parts[-2]}/{folder.parts[-1]}")
        assert len(entries) == 1, sorted((path.name, path.read_bytes()) for path in folder.iterdir())
        runs = runs_of(entries[0].content, where)
        assert runs
        for run in runs:
            ((label, blob),) = run.outputs.items()
            assert content_sha256(disk / blob.name) == blob.sha256, f"{run.step} is promised, and is not there"
            name, _, config = (disk / blob.name).read_text().partition(" of ")
            assert (label, name) == (f"out-{run.step}", run.step) and config in configs


def main(faults: str = "100", seed: str = "0") -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ["LLAMA_NPU2_CONFIG"] = f"{name}/trust"
        started = time.monotonic()
        done, ended = chaos(Path(name), int(faults), int(seed))
        print(f"{done.total()} faults in {time.monotonic() - started:.0f} s, seed {seed}")
        for what, count in sorted(done.items()):
            print(f"  {what:16} {count}")
        print(f"{ended.total()} builds: " + ", ".join(f"{count} {how}" for how, count in sorted(ended.items())))


def build(directory: str, config: str, store: str, address: str) -> None:
    client = client_of(Path(directory), config, store, address)
    if failed := client.build():
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    words = sys.argv[1:]
    build(*words[1:]) if words[:1] == ["client"] else main(*words)
