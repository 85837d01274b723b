"""Standard output holds what was asked for and nothing else, whichever of doit's runners runs it; and whoever stops
reading ends a process without a word."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llama_npu2 import __main__
from llama_npu2.errors import CLOSED
from stages.graph.options import table
from tests.conftest import ROOT, doit, ran, snapshot

DODO = """
import os, subprocess, sys, threading
from functools import partial
from pathlib import Path
sys.path[:0] = {paths!r}
from stages.engine.digests import Digests
from stages.engine.doit_tasks import COMPLETE, DOIT_CONFIG, command_task, doit_task
from stages.engine.steps import Project, Step
from stages.engine.streams import end_with_readers
from stages.engine.lock import ProcessLock

end_with_readers()
artifacts = Path("artifacts").absolute()
lock = ProcessLock(artifacts / ".locks/model-cpu.lock")
project = Project(artifacts / "model/cpu", Digests(artifacts / ".digests.json"), lock)

def chatter(who):
    os.write(1, f"{{who}} is native\\n".encode())
    subprocess.run(["echo", f"{{who}} started a program"])
    thread = threading.Thread(target=print, args=(f"{{who}} has a thread",))
    thread.start()
    thread.join()

def act(name, work):
    print(f"{{name}} printed")
    chatter(name)
    (work / name).write_text("x")

def step(name, *inputs):
    paths = tuple(project.directory / each for each in inputs)
    return Step(project, name, "", partial(act, name), (project.directory / name,), paths)

steps = [step("first"), step("second"), step("third", "first", "second")]

def speak():
    print("the answer is")
    chatter("speak")
    print(42, flush=True)

def task_first():
    return doit_task(steps[0], steps)
def task_second():
    return doit_task(steps[1], steps)
def task_third():
    return doit_task(steps[2], steps)
def task_compile():
    return command_task(project.lock.release, [], ["third"]) | {{"meta": {{COMPLETE: "artifacts/model/cpu"}}}}
def task_speak():
    return command_task(speak, [], ["third"])
def task_long():
    return command_task(lambda: print("line\\n" * 100_000), [], ["third"])
"""

SAID = {
    f"{who} {what}"
    for who in ("first", "second", "third")
    for what in ("printed", "is native", "started a program", "has a thread")
}
RUNNERS = pytest.mark.parametrize(
    "runner", [(), ("-n", "0"), ("-n", "2", "-P", "process")], ids=["thread", "serial", "process"]
)


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    """A directory with a dodo.py of three steps and commands behind them, all of which chatter."""
    (tmp_path / "dodo.py").write_text(DODO.format(paths=[str(ROOT), str(ROOT / "runtime")]))
    return tmp_path


@pytest.mark.sampled(1)
@RUNNERS
def test_an_answer_is_alone_on_standard_output(runner: tuple[str, ...], chatty: Path) -> None:
    run = doit("run", *runner, "speak", cwd=chatty)
    assert (run.returncode, run.stdout) == (0, "the answer is\n42\n"), run.stderr
    # Lines of two threads may share one.
    once = SAID | {"first\n", "second\n", "third\n", "speak is native", "speak has a thread"}
    assert {text: run.stderr.count(text) for text in once} == dict.fromkeys(once, 1)


def test_steps_are_named_if_asked_for(chatty: Path) -> None:
    """Elsewhere than on a terminal, steps say what they print and nothing more."""
    run = doit("run", "-n", "0", "compile", cwd=chatty, env={"LLAMA_NPU2_VERBOSITY": "0"})
    assert (run.returncode, set(run.stderr.splitlines())) == (0, SAID)
    shutil.rmtree(chatty / "artifacts")
    run = doit("run", "-n", "0", "-v", "1", "compile", cwd=chatty, env={"LLAMA_NPU2_VERBOSITY": "0"})
    assert set(run.stderr.splitlines()) == SAID | {"first", "second", "third"}


def test_what_a_file_of_doit_holds(chatty: Path) -> None:
    """What doit reports of steps, where it is told to write that into a file."""
    run = doit("run", "-n", "0", "-o", "said", "compile", cwd=chatty, env={"LLAMA_NPU2_VERBOSITY": "0"})
    assert (run.returncode, run.stdout) == (0, "") and set(run.stderr.splitlines()) == SAID
    *steps, last = (chatty / "said").read_text().splitlines()
    assert set(steps) == {"first", "second", "third"} and last.startswith("artifacts/model/cpu is up to date: 3 steps")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("terminal", ["stderr", "stdout"])
def test_one_of_them_is_a_terminal(terminal: str, chatty: Path) -> None:
    """Steps are drawn on a terminal that is standard error; one that gets the answer gets nothing but that."""
    ours, theirs = pty.openpty()
    other = {"stderr": "stdout", "stdout": "stderr"}[terminal]
    streams = {terminal: theirs, other: subprocess.PIPE}
    command = [sys.executable, "-m", "doit", "-n", "0", "speak"]
    run = subprocess.run(command, cwd=chatty, env=os.environ | {"TERM": "xterm"}, text=True, check=True, **streams)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:  # all is read
            break
    os.close(ours)
    if terminal == "stderr":
        assert run.stdout == "the answer is\n42\n" and b"of 3 steps" in seen and b"first printed" in seen
    else:
        assert seen == b"the answer is\r\n42\r\n" and set(run.stderr.splitlines()) >= SAID


ANSWER = ("model=model", "prompt=hello", "raw=1", "max_tokens=4")
STATUS = re.compile(r"Traceback|Broken pipe|Exception ignored|Error\b")
"""What is said of a pipe that broke."""


@pytest.mark.sampled(1)
@RUNNERS
def test_a_reply_is_alone_also_where_all_is_stale(runner: tuple[str, ...], built: Path) -> None:
    reply = doit("run", *ANSWER, cwd=built)
    assert ran(reply) == set() and reply.stdout.count("\n") == 1
    (built / "artifacts/model/cpu/manifest.json").unlink()
    stale = doit("run", *runner, *ANSWER, cwd=built)
    assert "manifest" in ran(stale) and stale.stdout == reply.stdout
    (built / "artifacts/model/cpu/weights/layer_000.safetensors").unlink()
    stale = doit("run", *runner, *ANSWER, "json=1", cwd=built)
    assert "weights" in ran(stale) and json.loads(stale.stdout)["text"] == reply.stdout[:-1]


@pytest.fixture(scope="module")
def shared(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled project whose manifest may be removed."""
    copied = shutil.copytree(project, tmp_path_factory.mktemp("streams") / "checkout")
    (copied / "text").write_text("The capital of France is Paris. " * 20)
    return copied


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "command",
    [
        ("bench", "repeats=1", "threads=1"),
        ("profile", "max_tokens=4", "repeats=1"),
        ("perplexity", "text=text", "window=64"),
        ("gc",),
        ("du",),
        ("fit",),
        ("doctor",),
        ("why",),
        ("graph",),
        ("estimate", "model=demo", "npu.buckets=128"),
        ("estimate", "published=1"),
        pytest.param(("verify", "text=text"), marks=pytest.mark.verify),
        pytest.param(("diagnose",), marks=pytest.mark.verify),
        pytest.param(("quality", "text=text", "weights=int8"), marks=pytest.mark.verify),
    ],
    ids=lambda command: "-".join(command),
)
def test_json_is_alone_also_where_something_is_stale(command: tuple[str, ...], shared: Path) -> None:
    if command[0] in ("verify", "quality"):
        pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    (shared / "artifacts/model/cpu/manifest.json").unlink(missing_ok=True)
    model = ["model=model"] if any(each.name == "model" for each in table()[command[0]]) else []
    run = doit(*model, *command, "json=1", cwd=shared)
    assert run.returncode == 0, run.stderr
    assert isinstance(json.loads(run.stdout), dict | list)
    if command[0] in ("bench", "profile", "perplexity", "verify", "diagnose"):
        assert "manifest" in ran(run)


def test_provenance_as_json(shared: Path) -> None:
    ran(doit("compile", "model=model", cwd=shared))
    assert json.loads(doit("provenance", "model=model", "json=1", cwd=shared).stdout)["_type"]


# Closed pipes


def closed(command: list[str], cwd: Path, lines: int = 0, also_errors: bool = False) -> tuple[int, str]:
    """Status of a program whose output nobody reads, or reads on behind some lines, and its standard error.
    `also_errors`: they go the same way."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if also_errors else subprocess.PIPE,
        text=True,
        bufsize=1,
        env=os.environ | {"PYTHONUNBUFFERED": "", "LLAMA_NPU2_VERBOSITY": "1"},
    )
    assert process.stdout
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read() if process.stderr else ""
    return process.wait(timeout=120), said


def quiet(command: list[str], cwd: Path, lines: int = 0, also_errors: bool = False) -> None:
    status, said = closed(command, cwd, lines, also_errors)
    assert status == CLOSED and not STATUS.search(said), said


@pytest.mark.sampled(1)
@RUNNERS
def test_an_answer_that_nobody_reads(runner: tuple[str, ...], chatty: Path) -> None:
    command = [sys.executable, "-m", "doit", "run", *runner]
    quiet([*command, "compile"], chatty)
    quiet([*command, "long"], chatty, lines=1)


@pytest.mark.sampled(1)
@RUNNERS
@pytest.mark.parametrize("lines", [0, 3])
def test_progress_that_nobody_reads(lines: int, runner: tuple[str, ...], chatty: Path) -> None:
    command = [sys.executable, "-m", "doit", "run", *runner, "long"]
    quiet(command, chatty, lines, also_errors=True)
    assert doit("speak", cwd=chatty).stdout == "the answer is\n42\n", "the next run goes on"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "command",
    [
        ("list",),
        ("list", "--all"),
        ("info", "weights"),
        ("why",),
        ("why", "weights", "json=1"),
        ("provenance",),
        ("du",),
        ("graph", "json=1"),
        ("run", *ANSWER),
        ("run", "-n", "2", *ANSWER),
        ("run", "json=1", *ANSWER),
        ("profile", "max_tokens=4", "repeats=1"),
    ],
    ids=lambda command: "-".join(command[:3]),
)
def test_commands_that_nobody_reads(command: tuple[str, ...], shared: Path) -> None:
    ran(doit("compile", "model=model", cwd=shared))
    of_model = () if command == ("du",) else ("model=model",)
    quiet([sys.executable, "-m", "doit", *command, *of_model], shared)


@pytest.mark.parametrize("command", [("help", "run"), ("estimate", "--help")], ids=" ".join)
def test_help_that_nobody_reads(command: tuple[str, ...]) -> None:
    quiet([sys.executable, "-m", "doit", *command], ROOT)


@pytest.mark.thorough
def test_a_stale_build_that_nobody_reads(built: Path) -> None:
    def remove() -> None:
        shutil.rmtree(built / "artifacts/model")

    remove()
    ran(doit("run", *ANSWER, cwd=built))  # compiles for this machine alone, which `compile` has not done
    whole = snapshot(built / "artifacts/model/cpu")
    command = [sys.executable, "-m", "doit", "run", *ANSWER]
    for lines in (1, 12):
        remove()
        quiet(command, built, lines, also_errors=True)
    quiet(command, built)
    assert snapshot(built / "artifacts/model/cpu") == whole


def test_a_connection_that_breaks_ends_nothing(tmp_path: Path) -> None:
    """Who writes to it gets an error, as long as somebody reads the output."""
    script = """
import os
from stages.engine.streams import end_with_readers
end_with_readers()
reading, writing = os.pipe()
os.close(reading)
try:
    os.write(writing, b"x")
except BrokenPipeError:
    print("broken")
"""
    command = [sys.executable, "-c", script]
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("broken\n", "")


@pytest.mark.parametrize("moment", ["os.register_at_fork(after_in_parent=leave)\nfork()", "Leaving()"])
def test_a_reader_that_leaves_when_nothing_can_be_raised(moment: str) -> None:
    """Python drops exceptions of callbacks around a fork and of `__del__`; the process ends all the same."""
    script = f"""
import os, signal, time
from stages.engine.streams import end_with_readers
end_with_readers()
def leave():
    os.kill(os.getpid(), signal.SIGPIPE)
    time.sleep(0.01)
def fork():
    if not os.fork():
        os._exit(0)
class Leaving:
    def __del__(self):
        leave()
input()
{moment}
time.sleep(60)
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": path}
    process = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    assert process.stdin and process.stdout
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(timeout=30) == CLOSED


def test_what_a_terminal_has_no_character_for_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "latin-1"))
    monkeypatch.setattr(__main__, "overview", lambda artifacts: "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}")
    with pytest.raises(SystemExit):
        __main__.main(["--help"])
    assert shown.getvalue() == b"caf\xe9 ?\n"


FULL = "error: the output cannot be written: No space left on device: make room, or write it elsewhere\n"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", [("speak",), ("long",), ("compile",)])
def test_an_answer_for_which_there_is_no_room(command: tuple[str, ...], chatty: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = (sys.executable, "-m", "doit", *command)
        run = subprocess.run(command, cwd=chatty, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode and run.stderr.endswith(FULL) and "Traceback" not in run.stderr


def test_a_reply_for_which_there_is_no_room(demo: Path) -> None:
    with Path("/dev/full").open("w") as full:
        for arguments in ((demo, "hi"), ("check", demo)):
            command = (sys.executable, "-m", "runtime", *map(str, arguments))
            run = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
            assert (run.returncode, run.stderr) == (1, FULL)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "command", [("doit", "run", "prompt=hi", "max_tokens=2"), ("runtime", "demo", "hi", "--max-tokens=2")]
)
def test_a_reply_where_streams_are_closed(command: tuple[str, ...], closed: str, shared: Path, demo: Path) -> None:
    given = [str(demo) if word == "demo" else word for word in command]
    where = shared if "doit" in command else ROOT
    started = ["sh", "-c", f'exec "$@" {closed}', "-", sys.executable, "-m", *given]
    run = subprocess.run(started, cwd=where, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert bool(run.stdout) is (" >&-" not in f" {closed}") and "tokens/s" not in run.stdout
    assert ("tokens/s" in run.stderr) is ("2>&-" not in closed) and "Traceback" not in run.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("also_errors", [False, True])
@pytest.mark.parametrize("arguments", [("hi",), ("hi", "--json"), ("check",), (), ("hi", "--n=2")])
def test_a_runtime_that_nobody_reads(arguments: tuple[str, ...], also_errors: bool, demo: Path) -> None:
    where = ["check", str(demo)] if arguments == ("check",) else [str(demo), *arguments]
    command = [sys.executable, "-m", "runtime", *where]
    if arguments or also_errors:
        quiet(command, ROOT, also_errors=also_errors)
