"""What a build shows on a terminal while it runs, whichever of doit's runners runs it, and what it shows elsewhere."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.engine.durations import Durations
from stages.engine.lock import ProcessLock
from tests.conftest import ROOT
from tests.npu.printed import missing

DODO = """
import sys, time
from functools import partial
from pathlib import Path
sys.path[:0] = {paths!r}
from llama_npu2.errors import UserError
from stages.engine.digests import Digests
from stages.engine.doit_tasks import COMPLETE, DOIT_CONFIG, command_task, doit_task
from stages.engine.bar import Bar
from stages.engine.progress import say
from stages.engine.steps import Project, Step
from stages.engine.lock import ProcessLock

artifacts = Path({artifacts!r})
lock = ProcessLock(artifacts / ".locks/model-cpu.lock")
project = Project(artifacts / "model/cpu", Digests(artifacts / ".digests.json"), lock)

def wait(name, what):
    # Where a test watches, go on when it has seen what the step waits for.
    deadline = time.monotonic() + (20 if Path("watched").exists() else 0.1)
    while time.monotonic() < deadline and not Path(f"{{name}} {{what}}").exists():
        time.sleep(0.01)

def act(name, work):
    print(f"{{name}} printed")
    print(f"{{name}} warned", file=sys.stderr)
    if Path("broken").exists():
        raise UserError("it is [broken]")
    for _ in Bar(range(4), desc="packing"):
        wait(name, "packing")
    say("waiting for [tool]")
    wait(name, "waiting")
    (work / name).write_text("x")

def step(name, *inputs):
    paths = tuple(project.directory / each for each in inputs)
    return Step(project, name, "", partial(act, name), (project.directory / name,), paths)

steps = [step("first"), step("second"), step("third", "first", "second")]

def task_first():
    return doit_task(steps[0], steps)
def task_second():
    return doit_task(steps[1], steps)
def task_third():
    return doit_task(steps[2], steps)
def task_compile():
    return command_task(project.lock.release, [], ["third"]) | {{"meta": {{COMPLETE: "artifacts/model/cpu"}}}}
def task_speak():
    return command_task(lambda: print("terminal", sys.stdout.isatty()), [], ["third"])
"""

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MOVE = re.compile(r"\x1b\[[0-9;?]*[A-Zhl]|\r")
COMPLETE = r"artifacts/model/cpu is up to date: 3 steps run, 0 current, \d+\.\d s"


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A directory with a dodo.py of three steps, which take half a second each."""
    paths, artifacts = [str(ROOT), str(ROOT / "runtime")], str(tmp_path / "artifacts")
    (tmp_path / "dodo.py").write_text(DODO.format(paths=paths, artifacts=artifacts))
    return tmp_path


def on_terminal(build: Path, *arguments: str, react: Callable[[str, int], None] | None = None) -> tuple[int, str]:
    """Exit status and all that a terminal of 100 columns got; `react` sees it as it grows, with the terminal."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(build)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # who started the tests may ignore it
        os.environ.update(TERM="xterm", COLUMNS="100")
        os.execv(sys.executable, [sys.executable, "-m", "doit", *arguments])
    seen, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                break
        if react:
            react(seen.decode(errors="replace"), terminal)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), seen.decode()


def lines(seen: str) -> list[str]:
    """What was shown, without what moves the cursor or colours it."""
    return [line.rstrip() for line in MOVE.sub("\n", COLOUR.sub("", seen)).splitlines() if line.strip()]


@pytest.mark.parametrize("runner", [[], ["-n", "0"], ["-n", "2", "-P", "process"]], ids=["thread", "serial", "process"])
def test_a_terminal_shows_what_runs(runner: list[str], build: Path) -> None:
    (build / "watched").touch()
    drawn = {
        (step, what): re.compile(rf"^\S+ \d of 3 steps  (.*; )?{step} \d+\.\d s, {text}(;|$)")
        for step in ("first", "second", "third")
        for what, text in (("packing", "packing: [0-4] of 4"), ("waiting", r"waiting for \[tool\]"))
    }

    def react(seen: str, terminal: int) -> None:
        for (step, what), pattern in drawn.items():
            if any(pattern.search(line) for line in lines(seen)):
                (build / f"{step} {what}").touch()

    status, seen = on_terminal(build, *runner, "-v", "1", "compile", react=react)
    assert status == 0, seen
    shown = lines(seen)
    for (step, _), pattern in drawn.items():
        assert any(pattern.search(line) for line in shown), pattern
        assert all(any(f"{step} {what}" in line for line in shown) for what in ("printed", "warned"))
    # What is done stays, with its time, because that was asked for.
    assert all(any(re.fullmatch(rf"{step} \d\.\d s", line) for line in shown) for step in ("first", "second", "third"))
    assert any(re.match(r"\S+ 2 of 3 steps", line) for line in shown)
    assert re.fullmatch(COMPLETE, shown[-1])
    assert set(Durations(build / "artifacts", build / "artifacts/model/cpu").last) == {"first", "second", "third"}


def test_what_is_done_leaves_its_time_if_asked_for(build: Path) -> None:
    status, seen = on_terminal(build, "-v", "1", "compile")
    shown = lines(seen)
    assert status == 0 and all(any(re.fullmatch(rf"{step} \d\.\d s", s) for s in shown) for step in ("first", "second"))


def test_elsewhere_a_line_per_step_if_asked_for(build: Path) -> None:
    command = [sys.executable, "-m", "doit", "-n", "0", "-v", "1", "compile"]
    run = subprocess.run(command, cwd=build, capture_output=True, text=True, check=True)
    steps = ("first", "second", "third")
    said = [line for step in steps for line in (step, f"{step} printed", f"{step} warned")]
    assert run.stderr.splitlines() == said and re.fullmatch(f"{COMPLETE}\n", run.stdout)
    assert missing("compile", [run.stdout.strip().replace("model/cpu", "demo/npu2")]) == []
    again = subprocess.run(command, cwd=build, capture_output=True, text=True, check=True)
    assert again.stdout.startswith("artifacts/model/cpu is up to date: 0 steps run, 3 current, ")


def test_what_is_waited_for(build: Path) -> None:
    lock = ProcessLock(build / "artifacts/.locks/model-cpu.lock")
    lock.acquire()

    def react(seen: str, terminal: int) -> None:
        if any(re.search(r"waiting for another process that builds model-cpu +\d", line) for line in lines(seen)):
            lock.release()

    status, seen = on_terminal(build, "-n", "2", "compile", react=react)
    assert status == 0 and re.fullmatch(COMPLETE, lines(seen)[-1]), seen


def test_a_command_has_the_terminal_to_itself(build: Path) -> None:
    (build / "artifacts/model/cpu").mkdir(parents=True)
    status, seen = on_terminal(build, "speak")
    assert status == 0 and lines(seen)[-1] == "terminal True"
    assert not any(re.fullmatch(r"\w+ \d\.\d s", line) for line in lines(seen)), "no step leaves a line"


def test_a_failure_stays_one_line(build: Path) -> None:
    (build / "broken").touch()
    status, seen = on_terminal(build, "compile")
    assert status == 1 and lines(seen).count("error: it is [broken]") == 1
    assert not any(line.startswith("first 0") for line in lines(seen)), "it is not done"


@pytest.mark.parametrize("runner", [[], ["-n", "0"], ["-n", "2", "-P", "process"]], ids=["thread", "serial", "process"])
def test_ctrl_c_ends_in_one_line(runner: list[str], build: Path) -> None:
    pressed = []

    def react(seen: str, terminal: int) -> None:
        if "packing" in seen and not pressed:
            pressed.append(os.write(terminal, b"\x03"))

    status, seen = on_terminal(build, *runner, "compile", react=react)
    assert status == -signal.SIGINT and "Traceback" not in seen
    assert lines(seen)[-1] == "interrupted: the next run goes on from here"
