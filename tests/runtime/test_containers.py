"""What `deploy/` says of the server is true: its command line, port, check of health, variables and files."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_npu2.options import Listening
from llama_npu2.serve import listen
from tests.conftest import ROOT
from tests.support.serving import Server, serving

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def filled(value: Any) -> Any:
    """Return a part of a compose file with the defaults of variables."""
    if isinstance(value, dict):
        return {name: filled(each) for name, each in value.items()}
    if isinstance(value, list):
        return [filled(each) for each in value]
    return _VARIABLE.sub(r"\2", value) if isinstance(value, str) else value


TEXT = (DEPLOY / "compose.yaml").read_text()
COMPOSE = filled(yaml.safe_load(TEXT))
SERVICES: dict[str, Any] = COMPOSE["services"]
SERVERS = {name: service for name, service in SERVICES.items() if service["image"] == "llama-npu2"}


def of_dockerfile() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage of the Dockerfile, each with its arguments."""
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in re.sub(r"\\\n", "", (DEPLOY / "Dockerfile").read_text()).splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = [*stages.get(base, [])]
        elif stages and instruction not in ("", "#"):
            stages[list(stages)[-1]].append((instruction, rest))
    return stages


STAGES = of_dockerfile()


@pytest.fixture(scope="module")
def contained(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The server with the command line of the compose file, but for its directories and port."""
    places = {"/artifacts": demo.parents[1], "/run/secrets": tmp_path_factory.mktemp("secrets")}
    (places["/run/secrets"] / "keys").write_text("one\n")
    command = [*SERVERS["server"]["command"]]
    for inside, outside in places.items():
        command = [each.replace(inside, str(outside)) for each in command]
    assert command[0] == "serve" and Path(command[1]) == demo
    with serving(demo, *command[2:]) as running:
        yield running


def test_the_command_line_serves_those_who_have_a_key(contained: Server) -> None:
    asked = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 1}
    assert contained.ask("/v1/completions", asked).status == 401
    assert contained.ask("/v1/completions", asked, Authorization="Bearer one", Host="one:8000").status == 200


@pytest.mark.parametrize("name", SERVERS)
def test_the_check_of_health_asks_the_server(contained: Server, name: str) -> None:
    kind, program, *arguments = SERVERS[name]["healthcheck"]["test"]
    port = Listening().port
    assert (kind, program) == ("CMD", "python") and f"{port}" in arguments[-1]

    def healthy(port_: int) -> bool:
        command = [sys.executable, *(each.replace(f"{port}", f"{port_}") for each in arguments)]
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=30).returncode == 0

    assert healthy(contained.port) and not healthy(1)


@pytest.mark.parametrize("name", SERVERS)
def test_replies_may_end_before_a_container_is_killed(name: str) -> None:
    (seconds,) = re.fullmatch(r"(\d+)s", SERVERS[name]["stop_grace_period"]).groups()  # type: ignore[union-attr]
    assert timedelta(seconds=int(seconds)) > timedelta(seconds=listen._GRACE_PERIOD)
    assert int(seconds) <= int(SERVICES["proxy"]["stop_grace_period"][:-1])


def test_ports_are_those_that_somebody_listens_on() -> None:
    assert SERVERS["server"]["ports"] == [f"127.0.0.1:{Listening().port}:{Listening().port}"]
    addresses = dict(re.findall(r"presetenv (\w+) (\S+)", (DEPLOY / "haproxy.cfg").read_text()))
    assert addresses.keys() == SERVICES["proxy"]["environment"].keys()
    replicas = {name for name in SERVERS if "profiles" in SERVERS[name]}
    found = {value for value in SERVICES["proxy"]["environment"].values() if not value.startswith("*")}
    assert found == {f"{name}:{Listening().port}" for name in replicas}
    assert {*SERVICES["proxy"]["depends_on"]} == replicas
    port = SERVICES["proxy"]["environment"]["CLIENTS"].partition(":")[2]
    assert SERVICES["proxy"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (mounted,) = SERVICES["proxy"]["volumes"]
    assert (DEPLOY / mounted.partition(":")[0]).is_file()


def test_variables_are_documented() -> None:
    page = (ROOT / "docs/how-to/containers.md").read_text()
    assert {name for name, _ in _VARIABLE.findall(TEXT)} == set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    documented = (ROOT / "docs/reference/environment.md").read_text()
    of_image = [rest.partition("=")[0] for steps in STAGES.values() for kind, rest in steps if kind == "ENV"]
    given = [name for service in (*SERVERS.values(), SERVICES["compile"]) for name in service["environment"]]
    for name in {*of_image, *given}:
        assert f"`{name}`" in documented, name


@pytest.mark.parametrize("name", [name for name in SERVICES if "build" in SERVICES[name]])
def test_images_have_what_they_need(name: str) -> None:
    built = SERVICES[name]["build"]
    assert (DEPLOY / built["context"]).resolve() == ROOT and (ROOT / built["dockerfile"]).is_file()
    steps = STAGES[built["target"]]
    assert {*built["args"]} <= {rest.partition("=")[0] for kind, rest in steps if kind == "ARG"}
    made = " ".join(rest for kind, rest in steps if kind == "RUN")
    for volume in SERVICES[name]["volumes"]:
        assert f" {volume.split(':')[1]}" in made, "a volume has the owner of the directory where it is mounted first"
    assert [rest for kind, rest in steps if kind == "USER"] == ["llama"]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    taken = {each[1:] for each in ignored if each.startswith("!")}
    assert ignored[0] == "*" and all((ROOT / each).exists() for each in taken)
    copy = next(rest for kind, rest in steps if kind == "COPY")
    sources, _, _ = copy.removeprefix("--chown=llama ").rpartition(" ")
    copied = taken if sources == "." else {*sources.split()}
    assert copied <= taken and copied >= {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]}


def test_entry_points_are_commands() -> None:
    entries = {name: dict(steps)["ENTRYPOINT"] for name, steps in STAGES.items() if name != "base"}
    assert yaml.safe_load(entries["server"]) == [*PROJECT["scripts"]]
    command = yaml.safe_load(entries["compile"])
    found = subprocess.run(
        [sys.executable, "-m", *command, "dry=1"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert found.returncode and "dry" in found.stderr, "all but the last argument is known"


def test_secrets_and_artifacts_are_not_in_images_or_in_git() -> None:
    secret = COMPOSE["secrets"]["keys"]["file"]
    ignored = (ROOT / ".gitignore").read_text().split()
    assert f"/deploy/{secret}" in ignored and "/deploy/.env" in ignored
    taken = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert not any(fnmatch(each, "!deploy*") or fnmatch(each, "!artifacts*") for each in taken)
