"""Tries what somebody may have prepared: an action in a process of its own, with limits, and what it changed outside.

An attack holds if the action ends within `SECONDS`, `LONGEST_WAIT` and `MEMORY`, is done or refused in one line, and
nothing outside of the directory that it works on is other than before.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import stat
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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

SECONDS = 10
"""Seconds of CPU that an action may take. A waiting one is stopped after `LONGEST_WAIT`, as other programs run here."""
LONGEST_WAIT = 60
MEMORY = 512 << 20
"""Bytes by which a process may grow."""
OLD = 30 * 86400
"""Seconds since the documents of a user were written: longer than housekeeping keeps what nobody needs."""
PROMPT = "hello"


class Refused(Exception):
    """An action ended in one line, which is its text."""


@dataclass(frozen=True)
class World:
    """A user's files below `root`: artifacts of a small model, its checkpoint, a remote, and documents of the user's
    own, which have the names that files of artifacts have."""

    root: Path

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def directory(self) -> Path:
        return self.artifacts / "model/cpu"

    @property
    def checkpoint(self) -> Path:
        return self.root / "model"

    @property
    def documents(self) -> Path:
        return self.root / "documents"

    @property
    def remote(self) -> Path:
        return self.root / "remote"

    def build(self, **more: str) -> Build:
        given = {"model": str(self.checkpoint), "artifacts": str(self.artifacts), "target": "cpu", "include": "weights"}
        return Build(parse_options(given | more))

    def copy(self, root: Path) -> World:
        """The same below another root: files are links to the same content, so an attack replaces them."""
        copied = World(shutil.copytree(self.root, root, symlinks=True, copy_function=os.link, dirs_exist_ok=True))
        shutil.rmtree(copied.checkpoint)
        shutil.copytree(self.checkpoint, copied.checkpoint)
        return copied

    def outside(self) -> dict[str, tuple[object, ...]]:
        """What lies below the root but for the artifacts: kind, size, time and content of each file."""
        found: dict[str, tuple[object, ...]] = {}
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if Path(folder, name) != self.artifacts]
            for path in (Path(folder, name) for name in (*folders, *names)):
                status = path.lstat()
                kind = stat.S_IFMT(status.st_mode)
                about: object = ""
                if stat.S_ISLNK(kind):
                    about = path.readlink()
                elif stat.S_ISREG(kind) and status.st_size < 1 << 24:
                    about = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path)] = (kind, 0 if stat.S_ISDIR(kind) else status.st_size, about)
        return found


Action = Callable[[World], object]


def reported(action: Callable[[], object]) -> None:
    """Do what a command does, with its errors as doit gets them."""
    (task,) = command_task(action, [], [])["actions"]  # type: ignore[arg-type]
    if isinstance(outcome := task(), TaskFailed):
        raise Refused(outcome.message)


def compile_all(world: World, **more: str) -> None:
    """What doit does for `compile`: the result is whole, and says what an undisturbed build says."""
    build = world.build(**more)
    build.project.lock.acquire()
    for step in build.steps.values():
        if not step.is_current() and (failed := step.run()):
            raise Refused(failed.message)
    reported(build.finish)
    check_files(Manifest.open(build.directory))


def reply(world: World) -> str:
    with contextlib.closing(load(world.build().directory, threads=1)) as llm:
        return "".join(llm.generate(PROMPT, raw=True, max_tokens=8))


def run(world: World) -> None:
    """A reply, which is that of an undisturbed directory."""
    said, expected = reply(world), (world.root / "expected").read_text()
    assert said == expected, f"another reply: {said!r}"


def clean(world: World) -> None:
    for step in world.build().steps.values():
        step.clean()


def command(name: str, **given: str) -> Action:
    def act(world: World) -> None:
        build = world.build(**({"remote": str(world.remote)} if name in ("push", "pull") else {}), **given)
        reported(partial(import_module(f"stages.commands.{name}").run, build))

    return act


ACTIONS: dict[str, Action] = {
    "compile": compile_all,
    "run": run,
    "why": command("why"),
    "gc": command("gc", keep="0"),
    "du": command("du"),
    "pull": command("pull"),
    "push": command("push"),
    "clean": clean,
}


@dataclass(frozen=True)
class Held:
    """How an action ended: `refused` in that line, or done, where that is empty. `wrong`: why it did not hold."""

    refused: str = ""
    wrong: str = ""
    seconds: float = 0.0
    grown: int = 0


def attempt(world: World, action: Action) -> Held:
    """Do it in a fork with the limits."""
    before, started = world.outside(), time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(LONGEST_WAIT)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory starts anew
        begun = _memory("VmHWM")
        outcome = _outcome(world, action)
        os.write(writing, json.dumps([*outcome, max(_memory("VmHWM") - begun, 0)]).encode()[:60000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - started
    if not said:
        code = os.waitstatus_to_exitcode(status)
        return Held(
            wrong="it hangs" if -code in (signal.SIGALRM, signal.SIGPROF) else f"ended with {code}", seconds=seconds
        )
    refused, wrong, grown = json.loads(said)
    if not wrong and grown > MEMORY:
        wrong = f"it took {grown >> 20} MiB"
    if not wrong and (after := world.outside()) != before:
        changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
        wrong = f"changed outside: {changed[:3]}"
    return Held(refused, wrong, seconds, grown)


def _outcome(world: World, action: Action) -> tuple[str, str]:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            action(world)
    except (UserError, Refused) as error:
        text = str(error)
        one_line = text.isprintable() and 0 < len(text) < 2000
        return text, "" if one_line else f"not one line: {text[:500]!r}"
    except BaseException:
        return "", traceback.format_exc()
    return "", ""


def _memory(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


def age(path: Path) -> None:
    """Make files old."""
    then = time.time() - OLD
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            os.utime(Path(folder, name), (then, then), follow_symlinks=False)
