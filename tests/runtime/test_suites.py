"""Suites of others that check servers, as commands."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, build
from tests.support.caller import write_caller
from tests.support.programs import installed
from tests.support.retrieval import write_embedder, write_ranker
from tests.support.serving import Server, serving

SUPPORT = ROOT / "tests/support"
MORE = shlex.split(os.environ.get("LLAMA_NPU2_SCHEMATHESIS", ""))
SERVER = "SERVER_PID"
"""The variable of the environment that tells the hooks which process is the server."""

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that calls tools, twice where it may, and says what it is asked to say."""
    write_caller(checkpoint := tmp_path_factory.mktemp("caller") / "caller", answer="PONG", calls=2)
    with serving(build(checkpoint, artifacts)) as running:
        yield running


@installed("trustedrouter-provider-check", "pip install trustedrouter-provider-check")
def test_provider_check(server: Server, tmp_path: Path) -> None:
    """All is passed but the catalogue of a marketplace, which a server of one's own does not have."""
    report = tmp_path / "report.json"
    command = ["trustedrouter-provider-check", f"--base-url={server.url}/v1", "--tier=5", f"--json={report}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    checks = json.loads(report.read_text())["checks"]
    assert [each["id"] for each in checks if each["status"] != "pass"] == ["catalog.declared-v2"], run.stdout
    assert run.returncode == 0 and {each["tier"] for each in checks} == {1, 2, 3, 4, 5}


@installed("compatcanary", "npm install -g compatcanary")
def test_compatcanary(server: Server) -> None:
    command = ["compatcanary", "scan", "--base-url", f"{server.url}/v1", "--model", "caller"]
    command += ["--profile", "modern", "--fail-on", "any", "--format", "json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert {each["status"] for each in json.loads(run.stdout)["results"]} == {"pass"}


@installed("schemathesis", "pipx install schemathesis")
def test_schemathesis(artifacts: Path, tmp_path: Path) -> None:
    """All checks, 200 examples of each operation, with models that write, embed and rank; minutes.

    `LLAMA_NPU2_SCHEMATHESIS` may have further options, as in `--max-examples=10 --seed=2 --include-path=/api/chat`.
    """
    models = []
    for name, write in (("caller", write_caller), ("embedder", write_embedder), ("ranker", write_ranker)):
        write(tmp_path / name)
        models.append(build(tmp_path / name, artifacts))
    with serving(models[0], others=models[1:]) as running:
        command = ["schemathesis", f"--config-file={SUPPORT / 'schemathesis.toml'}", "run"]
        command += [f"{running.url}/openapi.json", "--checks=all", "--exclude-checks=positive_data_acceptance"]
        command += ["--max-examples=200", "--continue-on-failure", "--no-color", "--seed=1", *MORE]
        hooks = {
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "PYTHONPATH": str(SUPPORT),
            SERVER: str(running.process.pid),
        }
        run = subprocess.run(command, cwd=tmp_path, env=os.environ | hooks, capture_output=True, text=True)
        operations = sum(map(len, running.ask("/openapi.json").json["paths"].values()))
    assert run.returncode == 0, run.stdout
    assert "WARNINGS" not in run.stdout, run.stdout
    assert MORE or f"Operations:       {operations} selected / {operations} total" in run.stdout
