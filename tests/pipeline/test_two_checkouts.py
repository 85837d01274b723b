"""Two checkouts and a remote between them: what one built, the other does not."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.targets.cpu.instruction_sets import objects_of
from stages.targets.cpu.toolchain import host_compiler
from tests.conftest import doit, ran, snapshot
from tests.support.hub_server import HubServer, hub_server

MODEL = ("model=model", "target=cpu")
REPLY = ("run", *MODEL, "prompt=hello", "raw=1", "max_tokens=5")
BUILT = Path("artifacts/model/cpu")


def another(checkout: Path, directory: Path) -> Path:
    """The same sources and checkpoint, nothing built."""
    return Path(shutil.copytree(checkout, directory, ignore=shutil.ignore_patterns("artifacts")))


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """A compiler that says what the real one says of itself, and makes nothing."""
    command, *options = host_compiler() or pytest.skip("no C++ compiler")
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\nfor word; do [ "$word" = --version ] && exec {command} "$@"; done\nexit 1\n')
    script.chmod(0o755)
    return {"CXX": shlex.join([str(script), *options])}


def done(run: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def fetched(run: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.removesuffix(": fetched") for line in run.stderr.splitlines() if line.endswith(": fetched")}


def blobs(remote: Path) -> dict[str, int]:
    """Size of each content on a remote, by SHA-256."""
    paths = (path for path in (remote / "objects/sha256").glob("*/*"))
    return {path.parent.name + path.name: path.stat().st_size for path in paths}


@pytest.mark.thorough
def test_a_changed_kernel_moves_what_depends_on_it(built: Path, tmp_path: Path, no_compiler: dict[str, str]) -> None:
    """A push and a pull each way: what is sent is the files that are not there, byte for byte."""
    other, remote = another(built, tmp_path / "other"), tmp_path / "remote"
    place = f"remote={remote.as_uri()}"
    done(doit("push", *MODEL, "include=weights", place, cwd=built))
    assert "received of" in done(doit("pull", *MODEL, place, cwd=other, env=no_compiler)).stdout
    before, there = snapshot(built / BUILT), blobs(remote)
    assert there == {hashlib.sha256(data).hexdigest(): len(data) for data in travelling(before).values()}
    assert travelling(snapshot(other / BUILT)) == travelling(before)
    assert ran(doit("compile", *MODEL, cwd=other, env=no_compiler)) == set()

    addition = "__attribute__((used)) static int added_for_a_test() { return 7; }\n"
    for checkout in (built, other):
        source = checkout / "kernel_src/cpu/rope.cc"
        source.write_text(addition + source.read_text())
    done(doit("push", *MODEL, "include=weights", place, cwd=built))
    after = travelling(snapshot(built / BUILT))
    changed = {name for name, data in after.items() if before.get(name) != data}
    assert changed == {
        *(f"build/objects/{name}/{Path(name).name}.o" for name in objects_of("rope")),
        *("elf/rms_gemms_rope.so", "elf/rms_gemv_attn_panels.so"),
        *("manifest.json", "manifest.sig", "provenance.json"),
    }
    new = {sha256: size for sha256, size in blobs(remote).items() if sha256 not in there}
    assert new == {hashlib.sha256(after[name]).hexdigest(): len(after[name]) for name in changed}
    said = done(doit("pull", *MODEL, place, cwd=other, env=no_compiler)).stdout
    assert f"{sum(new.values()) / 1e6:.1f} MB received" in said
    assert ran(doit("compile", *MODEL, cwd=other, env=no_compiler)) == set()
    assert travelling(snapshot(other / BUILT)) == after


def travelling(files: dict[str, bytes]) -> dict[str, bytes]:
    """Those of an artifact directory's files that go to others."""
    own = ("build/receipts/", "build/code/", "build/pulled.json", "manifest.local")
    return {name: data for name, data in files.items() if not name.startswith(own)}


@pytest.mark.thorough
def test_weights_of_a_private_checkpoint_stay(built: Path, tmp_path: Path, no_compiler: dict[str, str]) -> None:
    """Who pulls the programs packs weights from their own checkpoint, and builds nothing else."""
    other, remote = another(built, tmp_path / "other"), tmp_path / "remote"
    said = done(doit("push", *MODEL, f"remote={remote}", cwd=built)).stdout
    assert "without tokenizer, weights, manifest, as the checkpoint is not known to be public" in said
    files = snapshot(built / BUILT)
    private = {hashlib.sha256(files[name]).hexdigest() for name in files if name.startswith(("weights/", "tokenizer/"))}
    assert not private & blobs(remote).keys()
    done(doit("pull", *MODEL, f"remote={remote}", cwd=other, env=no_compiler))
    assert not (other / BUILT / "manifest.json").exists()
    assert ran(doit("compile", *MODEL, cwd=other, env=no_compiler)) == {"tokenizer", "weights", "manifest"}
    assert travelling(snapshot(other / BUILT)) == travelling(files)


@contextlib.contextmanager
def s3() -> Iterator[tuple[str, dict[str, str]]]:
    """A bucket on a local server."""
    server = pytest.importorskip("moto.server", reason="needs the test extra").ThreadedMotoServer(port=0)
    s3fs = pytest.importorskip("s3fs", reason="needs the test extra")
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    s3fs.S3FileSystem(key="test", secret="test", endpoint_url=endpoint).mkdir("bucket")
    known = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    yield "s3://bucket/shared", {"FSSPEC_S3_ENDPOINT_URL": endpoint} | known
    server.stop()


@contextlib.contextmanager
def hub() -> Iterator[tuple[str, dict[str, str]]]:
    with hub_server(HubServer()) as server:
        yield "hf://org/shared", {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}


@pytest.mark.thorough
@pytest.mark.parametrize(("server", "command"), [(s3, "cache"), (hub, "pull")], ids=["s3", "hub"])
def test_the_second_builds_nothing_and_says_the_same(
    server: Callable[[], contextlib.AbstractContextManager[tuple[str, dict[str, str]]]],
    command: str,
    built: Path,
    tmp_path: Path,
    no_compiler: dict[str, str],
) -> None:
    other = another(built, tmp_path / "other")
    with server() as (url, env):
        done(doit("push", *MODEL, "include=weights", f"remote={url}", cwd=built, env=env))
        reply = done(doit(*REPLY, cwd=built)).stdout
        if command == "pull":
            done(doit("pull", *MODEL, f"remote={url}", cwd=other, env=env | no_compiler))
            second = doit(*REPLY, cwd=other, env=no_compiler)
            assert ran(second) == set() and second.stdout == reply
        else:
            second = doit(*REPLY, f"cache={url}", cwd=other, env=env | no_compiler)
            assert ran(second) == fetched(second) and {"weights", "object:cpu/gemm.portable", "elf:host"} <= ran(second)
            assert second.stdout == reply
    assert travelling(snapshot(other / BUILT)).items() >= {
        (name, data) for name, data in travelling(snapshot(built / BUILT)).items() if name != "manifest.sig"
    }
