"""What a start costs when nothing is stale: the runtime's process starts at once, and little is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.engine import ahead
from tests.conftest import ROOT, doit, ran


def _waiting(**options: int) -> tuple[subprocess.Popen[str], int]:
    read, write = os.pipe()
    command = [sys.executable, "-m", "llama_npu2.ahead", str(read)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "runtime")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    process = subprocess.Popen(command, env=env, pass_fds=[read], text=True, cwd=ROOT, **pipes)
    os.close(read)
    return process, write


def test_a_process_without_a_command_line_ends_without_a_word() -> None:
    process, write = _waiting()
    os.close(write)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize(("arguments", "status"), [(["run", "--raw"], 0), (["run", "--max-tokens=-1"], 1)])
def test_a_process_runs_the_command_line_that_it_gets(demo: Path, arguments: list[str], status: int) -> None:
    process, write = _waiting()
    line = [*arguments, "--", str(demo), "The capital of France is"]
    os.write(write, json.dumps(line).encode())
    os.close(write)
    out, _ = process.communicate(timeout=60)
    plain = subprocess.run([sys.executable, "-m", "runtime", *line], cwd=ROOT, capture_output=True, text=True)
    assert (out, process.returncode) == (plain.stdout, plain.returncode) and process.returncode == status


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("run prompt=x", True),
        ("prompt=x max_tokens=3", True),
        ("prompt_file=x", True),
        ("chat", True),
        ("run", False),
        ("compile prompt=x", False),
        ("-v 1 run prompt=x", False),
        ("run compile prompt=x", False),
    ],
)
def test_only_a_command_line_that_asks_for_a_reply_starts_one(
    line: str, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_waiting", None)
    monkeypatch.setattr(ahead, "_asked", False)
    ahead.start_ahead(line.split())
    first = ahead._waiting
    ahead.start_ahead(line.split())
    assert ahead._waiting is first, "a command line has one process"
    waiting = ahead.take_ahead()
    assert bool(waiting) == starts
    if waiting:
        waiting.stop()
        os.close(waiting.pipe)


def test_a_process_that_has_ended_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_waiting", None)
    monkeypatch.setattr(ahead, "_asked", False)
    ahead.start_ahead(["chat"])
    assert ahead._waiting
    os.close(ahead._waiting.pipe)
    ahead._waiting.process.wait(timeout=60)
    assert ahead.take_ahead() is None


@pytest.mark.parametrize(("ends", "status"), [("ending.at_once(3)", 3), ("4", 4)])
def test_a_process_that_ends_at_once_does_all_that_others_see(ends: str, status: int) -> None:
    script = f"""
import atexit, sys
from llama_npu2 import ending
atexit.register(print, "handler")
print("said", end=" ")
sys.exit({ends})
"""
    env = os.environ | {"PYTHONPATH": str(ROOT / "runtime")}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert (run.stdout, run.stderr, run.returncode) == ("said handler\n", "", status)


def test_what_finds_that_all_is_current_imports_no_arithmetic(demo: Path) -> None:
    again = ("compile", f"artifacts={demo.parents[1]}", "target=cpu")
    assert not ran(doit(*again))
    told = doit(*again, env={"PYTHONPROFILEIMPORTTIME": "1"}).stderr
    imported = {line.rpartition("|")[2].strip() for line in told.splitlines()}
    assert "stages.kernels" in imported
    # `importlib.import_module` shows only what the module itself imports.
    packages = {name.partition(".")[0] for name in imported}
    assert not packages & {"numpy", "ml_dtypes", "tqdm", "rich", "xdsl"} and "stages.sharing.store" not in imported


@pytest.mark.parametrize("start", ["ahead.main(os.open(os.devnull, os.O_RDONLY))", "__main__.main(['info', DEMO])"])
@pytest.mark.parametrize("chosen", ["", "3"])
def test_numpy_has_one_thread_unless_the_user_says_more(start: str, chosen: str, demo: Path) -> None:
    """With the threads of OpenBLAS, importing numpy takes two thirds more CPU time."""
    code = f"import os, sys, llama_npu2.ahead, llama_npu2.__main__; DEMO = {str(demo)!r}; llama_npu2.{start}; "
    code += "import numpy; print(os.environ['OPENBLAS_NUM_THREADS'], file=sys.stderr)"
    inherited = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    env = inherited | {"PYTHONPATH": str(ROOT / "runtime")} | ({"OPENBLAS_NUM_THREADS": chosen} if chosen else {})
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.stderr.split() == [chosen or "1"], run
