"""Everything at once: processes that build, push, pull, run and collect garbage in the same places, and are killed,
find the disk full or lose connections on the way.

    python -m tests.support.chaos [OPERATIONS [SEED]]

Two checkouts' artifacts, one on a disk of a few megabytes where this user may mount one, and two remotes: a directory
and a hub that drops connections. Four processes do OPERATIONS each (200). Behind that every directory is brought to its
end by one build, and every one that was ever pushed is pulled: the files must be those of an undisturbed build, by the
manifest, and the reply its reply.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from pathlib import Path

from doit.exceptions import TaskFailed

from llama_npu2.artifact.check import check_files
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.engine.llama import load
from llama_npu2.errors import UserError
from stages.engine.doit_tasks import command_task
from stages.graph import Build
from stages.graph.options import parse_options
from tests.conftest import unfinished, write_checkpoint
from tests.support.hub_server import HubServer, hub_server

PROCESSES = 4
DISK = 6 << 20
"""Bytes of the small disk: enough for what is built, and for little else."""
FAULTS = 0.5
"""Share of operations with one."""
LONGEST = 1.5
"""Seconds until a kill, at most: as long as an operation."""
DROPS = 0.1
"""Share of the hub's answers that end early."""
CHOICES: tuple[Mapping[str, str], ...] = ({}, {"weights": "int8"})


@dataclass(frozen=True)
class Place:
    """One artifact directory of one checkout."""

    checkpoint: Path
    artifacts: Path
    chosen: Mapping[str, str]

    def build(self, **more: str) -> Build:
        where = {"model": str(self.checkpoint), "artifacts": str(self.artifacts), "target": "cpu", "include": "weights"}
        return Build(parse_options({**where, **self.chosen, **more}))


class Failed(Exception):
    """An operation that ended in one line."""


def command(name: str) -> Callable[..., None]:
    def run_command(place: Place, **more: str) -> None:
        action = partial(import_module(f"stages.commands.{name}").run, place.build(**more))
        (reported,) = command_task(action, [], [])["actions"]
        outcome = reported()
        if isinstance(outcome, TaskFailed):
            raise Failed(outcome.message)

    return run_command


def build(place: Place, **more: str) -> None:
    """What doit does for `compile`."""
    made = place.build(**more)
    made.project.lock.acquire()
    for step in made.steps.values():
        if not step.is_current() and (failed := step.run()):
            raise Failed(failed.message)
    made.finish()


def push(place: Place, remote: str) -> None:
    build(place)
    command("push")(place, remote=remote)


def reply(place: Place) -> str:
    return "".join(load(place.build().directory, threads=1).generate("hello", raw=True, max_tokens=8))


def run(place: Place, expected: str) -> None:
    said = reply(place)
    assert said == expected, said


def damage(place: Place, chance: random.Random) -> None:
    """Lose a file, or half of it, between builds."""
    made = place.build()
    with made.project.lock:
        if not (files := sorted(path for path in made.directory.rglob("*") if path.is_file())):
            return
        path = chance.choice(files)
        if chance.random() < 0.5:
            path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                path.unlink()
                path.write_bytes(content[: len(content) // 2])


def in_a_process(action: Callable[[], object], faults: random.Random | None) -> str:
    """Run `action` in a fork: done, refused in one line, killed, or else what went wrong. `faults`: kill it at some
    moment, or let no file grow beyond some size."""
    fault = faults.choice(["kill", "kill", "size"]) if faults and faults.random() < FAULTS else ""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        if fault == "size":
            assert faults
            resource.setrlimit(resource.RLIMIT_FSIZE, (faults.randrange(1 << 18), resource.RLIM_INFINITY))
        os.write(writing, outcome(action).encode()[:4000])
        os._exit(0)
    os.close(writing)
    if fault == "kill":
        assert faults
        time.sleep(faults.uniform(0, LONGEST))
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said.replace("\n", "\\n").replace("\t", " ") or "killed"


def outcome(action: Callable[[], object]) -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            action()
    except (UserError, Failed) as error:
        text = str(error)
        return f"refused: {text}" if "\n" not in text and "Traceback" not in text else f"wrong: {text}"
    except BaseException:
        return f"wrong: {traceback.format_exc()}"
    return "done"


@dataclass(frozen=True)
class World:
    """What processes share. `config`: where the user's trust lies. `replies`: of the places' artifacts."""

    config: str
    places: tuple[Place, ...]
    replies: tuple[str, ...]
    remotes: tuple[str, ...]

    def work(self, operations: int, seed: int, log: Path) -> None:
        """Random operations, each noted in `log` as it ends: its name, where, and how it ended."""
        os.environ["LLAMA_NPU2_CONFIG"] = self.config
        chance = random.Random(seed)
        with log.open("w") as file:
            for _ in range(operations):
                number, remote = chance.randrange(len(self.places)), chance.choice(self.remotes)
                place, reply = self.places[number], self.replies[number]
                actions: dict[str, Callable[[], object]] = {
                    "build": partial(build, place),
                    "cached": partial(build, place, cache=remote),
                    "push": partial(push, place, remote),
                    "pull": partial(command("pull"), place, remote=remote),
                    "run": partial(run, place, reply),
                    "gc": partial(command("gc"), place, keep="0"),
                    "damage": partial(damage, place, chance),
                }
                name = chance.choice(sorted(actions))
                print(name, number, remote, in_a_process(actions[name], chance), sep="\t", file=file, flush=True)


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Callable[[], None]]:
    """A file system of `DISK` bytes, if this user may mount one; what it gives makes room on it."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(directory)]
    mounted = bool(shutil.which("mount")) and not subprocess.run(mount, capture_output=True, check=False).returncode
    print(f"a disk of {DISK >> 20} MiB" if mounted else "no small disk: this user may not mount one", flush=True)

    def grow() -> None:
        if mounted:
            subprocess.run(["mount", "-o", f"remount,size={4 * DISK}", str(directory)], check=True)

    try:
        yield grow
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(directory)], check=True)


class Dropping(HubServer):
    """A hub whose answers end early now and then."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.drops = chance, DROPS
        super().__init__()

    def write(self, request: BaseHTTPRequestHandler, data: bytes) -> None:
        if self.chance.random() < self.drops:
            data, request.close_connection = data[: self.chance.randrange(len(data) + 1)], True
        super().write(request, data)


def chaos(scratch: Path, operations: int, seed: int, objects: Path | None = None) -> Counter[tuple[str, str]]:
    """How many operations of each kind ended how. `objects`: of kernels that are compiled already. AssertionError for
    whatever must not happen."""
    write_checkpoint(scratch / "model")
    if objects:
        shutil.copytree(objects, scratch / "undisturbed/.cache/objects", ignore=unfinished)
    undisturbed = [Place(scratch / "model", scratch / "undisturbed", chosen) for chosen in CHOICES]
    for place in undisturbed:
        build(place)
    manifests = [(place.build().directory / "manifest.json").read_bytes() for place in undisturbed]
    replies = [reply(place) for place in undisturbed]
    with small_disk(scratch / "small") as grow, hub_server(Dropping(random.Random(seed))) as hub:
        os.environ |= {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
        roots = [scratch / "checkout", scratch / "small/checkout"]
        for root in roots:
            shutil.copytree(scratch / "undisturbed/.cache", root / ".cache")
        places = tuple(Place(scratch / "model", root, chosen) for root in roots for chosen in CHOICES)
        remotes = ((scratch / "remote").as_uri(), "hf://org/shared")
        world = World(os.environ["LLAMA_NPU2_CONFIG"], places, (*replies, *replies), remotes)
        ended = at_once(world, operations, seed, scratch)
        hub.drops = 0.0
        grow()
        for place in places:
            command("gc")(place, keep="0")
            build(place)
        pushed = {(int(number), remote) for name, number, remote, how in ended if (name, how) == ("push", "done")}
        fresh = [
            (number, remote, replace(places[number], artifacts=scratch / f"pulled/{at}"))
            for at, (number, remote) in enumerate(sorted(pushed))
        ]
        for _, remote, place in fresh:
            command("pull")(place, remote=remote)
        for number, place in [*enumerate(places), *((number, place) for number, _, place in fresh)]:
            check(place, manifests[number % len(CHOICES)], replies[number % len(CHOICES)])
    print(f"{len(places)} directories and {len(fresh)} that were pushed are whole", flush=True)
    return Counter((name, how.partition(":")[0]) for name, _, _, how in ended)


def at_once(world: World, operations: int, seed: int, scratch: Path) -> list[list[str]]:
    """What the operations of all processes came to: name, place, remote, end."""
    context = multiprocessing.get_context("spawn")
    logs = [scratch / f"{number}.log" for number in range(PROCESSES)]
    processes = [
        context.Process(target=world.work, args=(operations, seed * PROCESSES + number, log))
        for number, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    ended = [line.split("\t") for log in logs for line in log.read_text().splitlines()]
    assert len(ended) == PROCESSES * operations
    wrong = [line for line in ended if line[3].startswith("wrong")]
    assert not wrong, wrong[0][3].replace("\\n", "\n")
    return ended


def check(place: Place, manifest: bytes, expected: str) -> None:
    opened = Manifest.open(place.build().directory)
    assert opened.content == manifest
    check_files(opened)
    run(place, expected)


def main(operations: str = "200", seed: str = "0") -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ["LLAMA_NPU2_CONFIG"] = f"{name}/trust"
        for (operation, how), count in sorted(chaos(Path(name), int(operations), int(seed)).items()):
            print(f"{operation:8} {how:8} {count}")


if __name__ == "__main__":
    main(*sys.argv[1:])
