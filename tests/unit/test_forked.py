"""Forked commands are what processes of their own are."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support import forked

SEEN = """
import json, os, signal, sys, threading
print(json.dumps({
    "arguments": [sys.argv, sys.orig_argv[1:]],
    "path": sys.path,
    "cwd": os.getcwd(),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "group": os.getpgid(0) == os.getpid(),
    "session": os.getsid(0) == os.getpid(),
    "files": sorted(set(os.listdir("/proc/self/fd"))),
    "streams": [[s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.isatty(), s.newlines]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "signals": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "threads": threading.active_count(),
    "main": sorted(vars(sys.modules["__main__"])),
    "said": sys.stdin.read(),
}, default=str))
"""


def both(command: list[str], given: str | None = None, **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """A command, forked and in a process of its own."""
    own = subprocess.run(command, input=given, capture_output=True, text=True, **options)
    return [forked.run(command, input=given, **options), own]


def forks() -> bool:
    """Whether a command in the environment that tests begin with is forked: it has no command line of its own."""
    script = "print(open('/proc/self/cmdline').read())"
    run = forked.run([sys.executable, "-c", script], env=dict(forked._start))
    return "fork_server" in run.stdout


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def test_commands_are_forked() -> None:
    assert forks()


@pytest.mark.parametrize("option", ["-c", "-m"])
@pytest.mark.parametrize("session", [False, True], ids=["", "session"])
def test_a_command_sees_what_it_would_see(option: str, session: bool, tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    what = "seen" if option == "-m" else SEEN
    read, write = os.pipe()
    options = {
        "cwd": tmp_path,
        "env": os.environ | {"A": "b", "PYTHONPATH": f"here{os.pathsep}/there"},
        "start_new_session": session,
        "pass_fds": [read],
    }
    found, own = both([sys.executable, option, what, "é", "--x"], "one\ntwo", **options)
    os.close(read)
    os.close(write)
    assert found.stderr == own.stderr == ""
    assert json.loads(found.stdout) == json.loads(own.stdout)


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(7)",
        "raise SystemExit('why')",
        "import os; os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.abort()",
        "import atexit; atexit.register(print, 'at the end')",
        "import threading, time; threading.Thread(target=lambda: time.sleep(0.1) or print('late')).start()",
        "import os; os.close(1); print('nobody reads it')",
    ],
)
def test_it_ends_as_it_would_end(code: str) -> None:
    # From Python 3.13 on tracebacks show lines of the code, which a fork does not know.
    compared = slice(None) if sys.version_info < (3, 13) else slice(-1, None)
    found, own = (
        (run.returncode, run.stdout, run.stderr.splitlines()[compared]) for run in both([sys.executable, "-c", code])
    )
    assert found == own


def test_a_signal_reaches_it() -> None:
    code = "print('there', flush=True); import time; time.sleep(60)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        with forked.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as process:
            assert process.stdout.readline() == "there\n"
            process.send_signal(number)
            assert process.wait(20) == -number
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run([sys.executable, "-c", code], timeout=0.5)


def test_a_copys_modules_are_its_own(tmp_path: Path) -> None:
    code = "import stages.graph, llama_npu2; print(stages.graph.__file__, llama_npu2.__file__)"
    for package in ("stages", "runtime/llama_npu2"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for root in (ROOT, tmp_path):
        found, own = both([sys.executable, "-c", code], cwd=root, env={"PYTHONPATH": f"{root / 'runtime'}"})
        assert found.stdout == own.stdout and found.stdout.count(f"{root}/") == 2, found


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "LLAMA_NPU2_VERBOSITY"])
def test_what_was_read_before_is_read_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own."""
    monkeypatch.setenv(name, "3")
    command = [sys.executable, "-m", "doit", "list"]
    request = forked._request(
        {
            "args": command,
            "env": None,
            "cwd": None,
            "preexec_fn": None,
            "close_fds": True,
            "pass_fds": (),
            "start_new_session": False,
        }
    )
    assert request and not forked._server(*forked._imported(request)).suits(request["environment"])
