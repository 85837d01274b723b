"""Damaged files: each is read, or refused in one line; and native code stays in its buffers. More: `tests.fuzz.run`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llama_npu2 import Llama
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.devices import cpu
from llama_npu2.engine.native_steps import NativeSteps
from llama_npu2.engine.step import Run
from tests.conftest import ODD_WIDTHS, ROOT, build, write_checkpoint
from tests.fuzz import parsers, run
from tests.fuzz.guarded import GuardedDevice
from tests.fuzz.mutate import mutated_bytes, mutated_json
from tests.fuzz.parsers import ARTIFACTS, PARSERS, Parser
from tests.fuzz.parsers import Run as FuzzRun

COUNT = {"artifacts": 6, "manifest": 8, "plan": 8, "template": 8, "schedules": 3}
"""How many inputs a parser gets. The others, which take less time, get 10."""


def fuzz_manifests(name: str, directories: list[Path], monkeypatch: pytest.MonkeyPatch, count: int) -> run.Result:
    monkeypatch.setenv(ARTIFACTS, ":".join(map(str, directories)))
    parsers.manifests.cache_clear()
    return run.fuzz(PARSERS[name], 0, 0, count, 3600)


def demo_apart(directory: Path) -> Path:
    """Return a copy of the demo's checkpoint, whose artifacts no other test builds for this machine's set alone."""
    return Path(shutil.copytree(ROOT / "models/demo", directory / "few_bits"))


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", PARSERS)
def test_damaged_files_are_read_or_one_line(name: str, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fuzz_manifests(name, [demo], monkeypatch, COUNT.get(name, 10))
    assert not result.findings, next(iter(result.findings.items()))
    assert result.outcomes["ran"]


@pytest.mark.slow
def test_two_thousand_manifests(demo: Path, artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights and caches in few bits and of odd widths too, with every instruction set that is here."""
    write_checkpoint(tmp_path / "odd", **ODD_WIDTHS)
    directories = [
        demo,
        build(demo_apart(tmp_path), artifacts, portable=True, weights="int4", kv="int8"),
        build(tmp_path / "odd", artifacts, portable=True, weights="int8,w_down=w8a8"),
    ]
    for isa, count in (("", 1000), ("avx2", 500), ("portable", 500)):
        monkeypatch.setenv("LLAMA_NPU2_ISA", isa)
        result = fuzz_manifests("manifest", directories, monkeypatch, count)
        assert not result.findings, next(iter(result.findings.items()))
        assert result.outcomes["ran"] > count / 20


@pytest.mark.slow
def test_schedules_and_tables_of_blocks_leave_no_buffer(
    demo: Path, artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In few bits and of odd widths too, with every instruction set that is here."""
    write_checkpoint(tmp_path / "odd", **ODD_WIDTHS, max_position_embeddings=1024)
    directories = [
        demo,
        build(demo_apart(tmp_path), artifacts, portable=True, weights="int4", kv="int8"),
        build(tmp_path / "odd", artifacts, portable=True, weights="int8,w_down=w8a8", kv="int8"),
    ]
    for isa, count in (("", 150), ("avx2", 75), ("portable", 30)):
        monkeypatch.setenv("LLAMA_NPU2_ISA", isa)
        for name, inputs in (("schedules", count), ("steps", 20 * count)):
            result = fuzz_manifests(name, directories, monkeypatch, inputs)
            assert not result.findings, next(iter(result.findings.items()))
            assert result.outcomes["ran"] > inputs / 20


def test_a_table_that_names_a_block_too_many_is_seen(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it would not be refused."""
    monkeypatch.setattr(cpu, "CpuDevice", GuardedDevice)
    manifest = Manifest.open(demo)

    def step(beyond: int) -> None:
        monkeypatch.setattr(NativeSteps, "_check", lambda *given: None)
        with contextlib.closing(Llama(manifest, 1)) as llm:
            llm.steps.step([Run([1, 2, 3], 0, [llm.steps.blocks - 1 + beyond])])

    assert run.in_child(lambda: step(0)) == ""
    assert run.in_child(lambda: step(1)) == "ended by SIGSEGV"


def test_a_buffer_that_is_too_small_is_left(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is, what is refused for it would be seen here."""
    monkeypatch.setattr(cpu, "CpuDevice", GuardedDevice)
    manifest = Manifest.open(demo)
    small = {**manifest.buffers["swiglu"], "shape": [512, 767]}

    def prompt(manifest: Manifest) -> None:
        with contextlib.closing(Llama(manifest, 1)) as llm:
            llm.prefill([1] * 512)

    assert run.in_child(lambda: prompt(manifest)) == ""
    narrow = replace(manifest, buffers={**manifest.buffers, "swiglu": small})
    assert run.in_child(lambda: prompt(narrow)) == "ended by SIGSEGV"
    constant = replace(
        manifest, buffers={**manifest.buffers, "swiglu": manifest.buffers["model.layers.0.mlp.up_proj.weight"]}
    )
    assert run.in_child(lambda: prompt(constant)) == "ended by SIGSEGV"


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def fail() -> None:
    raise KeyError("a name")


def leave() -> None:
    os._exit(3)


def never_end() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (crash, "ended by SIGSEGV"),
        (fail, "KeyError: 'a name'"),
        (leave, "ended with status 3"),
        (never_end, "ended by SIGPROF"),
    ],
)
def test_what_is_found(act: Callable[[], None], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Input 3 of 5."""
    monkeypatch.setattr(run, "LONGEST_INPUT", 1)

    @contextlib.contextmanager
    def opened(scratch: Path) -> Iterator[FuzzRun]:
        yield lambda name, content: act() if content == b"3" else None

    seeds = {str(i): str(i).encode() for i in range(5)}
    result = run.fuzz(Parser(opened, lambda: seeds, mutated_bytes), 0, 0, 5, 60)
    assert [*result.findings] == [3]
    assert why in result.findings[3]
    assert result.outcomes == {"ran": 4, "found": 1}


def test_an_input_is_the_same_for_ever() -> None:
    value: dict[str, Any] = {"a": [1, 2, {"b": "c"}], "d": None}
    for number in range(50):
        ours, theirs = (mutated_json(Random(number), value) for _ in range(2))
        assert repr(ours) == repr(theirs)
    assert value == {"a": [1, 2, {"b": "c"}], "d": None}
