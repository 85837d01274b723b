"""Ctrl-C while steps run on workers: one line, nothing half-made, no process left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.support.fleets import CLAIMS, TOOL, Client, Grid, scheduler, until

pytest.importorskip("distributed")

DODO = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from stages.engine.doit_tasks import DOIT_CONFIG, command_task, doit_task
from stages.sharing.cluster import Crew
from tests.support import fleets

here, address = Path({here!r}), {address!r}
crew = Crew(2, str(here / "store"), str(here / "crew"), "tests.support.fleets")
client = fleets.Client(here / "client", here / "store", address, crew=crew, count=2, seconds=60)
DOIT_CONFIG["num_process"] = 16

def task_compile():
    return command_task(client.fleet.close, [], ["last"])
def task_last():
    return doit_task(client.steps["last"], client.steps.values())
def task_0():
    return doit_task(client.steps["0"], client.steps.values())
def task_1():
    return doit_task(client.steps["1"], client.steps.values())
"""


@pytest.mark.parametrize("where", ["local", pytest.param("address", marks=pytest.mark.thorough)])
def test_ctrl_c_ends_in_one_line(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOOL, "version 1")
    monkeypatch.setenv(CLAIMS, '["version 1"]')
    if where == "local":
        interrupted(tmp_path, "local")
        assert not (tmp_path / "crew").exists()
        return
    with scheduler(tmp_path) as (address, _):
        grid = Grid(address, tmp_path)
        grid.start("version 1")
        grid.start("version 1")
        looking = Client(tmp_path / "looking", grid.store, address).fleet
        until(lambda: len(looking.workers()) == 2)
        looking.close()
        interrupted(tmp_path, address)
        assert len(grid.alive) == 2, "the workers are others'"
        grid.stop()


def interrupted(here: Path, address: str) -> None:
    """Press Ctrl-C while two steps run on workers."""
    paths = [str(ROOT), str(ROOT / "runtime")]
    (here / "dodo.py").write_text(DODO.format(paths=paths, here=str(here), address=address))
    log = here / "client/log"
    build = subprocess.Popen(
        [sys.executable, "-m", "doit", "compile"],
        cwd=here,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # who started the tests may ignore it
    )
    with build, contextlib.ExitStack() as failed:
        failed.callback(build.kill)
        until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
        workers = [psutil.Process(int(line.split()[1])) for line in log.read_text().splitlines()]
        sleeping = [child for worker in workers for child in worker.children()]
        started = psutil.Process(build.pid).children(recursive=True)
        assert len(sleeping) == 2 and bool(started) == (address == "local")
        os.killpg(build.pid, signal.SIGINT)
        assert build.stderr
        said = build.stderr.read()
    assert (build.returncode, said) == (-signal.SIGINT, "interrupted: the next run goes on from here\n")
    until(lambda: not any(process.is_running() for process in (*sleeping, *started)), 10)
    assert len(log.read_text().splitlines()) == 2, "no step was begun here instead"
    made = [path for path in (here / "client/artifact").rglob("*") if path.is_file()]
    assert [path.name for path in made] == ["config.json"]
