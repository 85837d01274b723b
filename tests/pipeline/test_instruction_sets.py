"""A reply needs kernels for this machine only; what others may run has them for all machines."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_npu2.artifact import cpu_features
from stages.engine.places import CACHE
from stages.targets.cpu import instruction_sets, objects
from stages.targets.cpu.instruction_sets import all_sets, objects_of, sets_used_here
from tests.conftest import doit, ran, snapshot
from tests.support.kept_objects import copy_new
from tests.support.runtime_process import run_module

ANSWER = ("run", "model=model", "target=cpu", "prompt=hello", "raw=1", "max_tokens=2")
COMPILE = ("compile", "model=model", "target=cpu")
BUILT = Path("artifacts/model/cpu")

needs_several = pytest.mark.skipif(len(all_sets()) == 1, reason="this architecture has one instruction set")


@pytest.fixture
def fresh(built: Path, artifacts: Path) -> Iterator[Path]:
    """A project that has built nothing, with the session's objects in its cache, which gets what it links."""
    shutil.rmtree(built / "artifacts/model")
    yield built
    copy_new(built / "artifacts" / CACHE, artifacts / CACHE)


def sets_in(directory: Path) -> list[str]:
    sets: list[str] = json.loads((directory / "manifest.json").read_text())["target"]["instruction_sets"]
    return sets


def compiled_sets(steps: set[str]) -> set[str]:
    """Return the instruction sets of the objects that were compiled."""
    return {step.partition(".")[2] for step in steps if step.startswith("object:") and "." in step}


@needs_several
def test_a_reply_compiles_for_this_machine_and_a_file_for_others_adds_the_rest(project: Path, fresh: Path) -> None:
    """As doit compile does at once."""
    assert compiled_sets(ran(doit(*ANSWER, cwd=fresh))) == {*sets_used_here()} != {*all_sets()}
    here = fresh / BUILT
    assert sets_in(here) == [*sets_used_here()]
    before = snapshot(here)

    steps = ran(doit("export", *COMPILE[1:], "output=model.pyz", cwd=fresh))
    assert compiled_sets(steps) == {*all_sets()} - {*sets_used_here()}
    assert {step for step in steps if step.partition(":")[0] not in ("module", "object", "elf")} == {"manifest"}
    after = snapshot(here)
    assert {name for name in before if after[name] != before[name] and name.startswith("weights/")} == set()
    at_once = snapshot(project / BUILT)
    assert {name for name in at_once if name.startswith("elf/") and after[name] != at_once[name]} == set()
    assert sets_in(here) == sets_in(project / BUILT) == [*all_sets()]

    assert ran(doit(*ANSWER, cwd=fresh)) == set(), "what runs on other machines stays so"
    assert snapshot(here) == after


@needs_several
def test_a_machine_without_the_set_takes_the_portable_code_or_says_what_to_do(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sets_used_here()[0] in ("avx2", "portable"):
        pytest.skip("this machine has no set between the best and the portable one")
    ran(doit(*ANSWER, cwd=fresh))
    monkeypatch.setenv("LLAMA_NPU2_ISA", "avx2")
    refused = run_module(fresh / BUILT, "hello")
    (line,) = refused.stderr.strip().splitlines()
    assert refused.returncode == 1 and not refused.stdout
    assert "has no code for LLAMA_NPU2_ISA=avx2: unset it, or run doit compile" in line

    steps = ran(doit(*ANSWER, cwd=fresh, env={"LLAMA_NPU2_ISA": "portable"}))
    assert compiled_sets(steps) == {"portable"}
    assert sets_in(fresh / BUILT) == [*sets_used_here_without(monkeypatch), "portable"]
    taken = run_module(fresh / BUILT, "hello")
    assert taken.returncode == 0 and "cpu, portable," in taken.stderr


def sets_used_here_without(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Return the sets that this machine uses unless it is told to."""
    with monkeypatch.context() as patch:
        patch.delenv("LLAMA_NPU2_ISA")
        return sets_used_here()


AVX2 = "sse2 avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_vnni"
AMX = f"{AVX512} amx_tile amx_int8 amx_bf16"


@pytest.mark.parametrize(
    ("flags", "chosen", "sets"),
    [
        (AMX, "", ("amx", "avx512bf16")),
        (AMX, "avx512bf16", ("avx512bf16",)),
        (AVX512, "", ("avx512bf16",)),
        (AVX512, "amx", ("avx512bf16",)),
        (AVX512, "portable", ("portable",)),
        (AVX512, "unknown", ("avx512bf16",)),
        (AVX512.replace("avx512_vnni", ""), "", ("avx2",)),
        (AVX2.replace("fma", ""), "", ("portable",)),
        (None, "", ("amx", "avx512bf16", "avx2", "portable")),
    ],
)
def test_the_sets_that_a_machine_uses(
    flags: str | None, chosen: str, sets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_features, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setitem(os.environ, "LLAMA_NPU2_ISA", chosen)
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    assert sets_used_here() == sets


def test_a_source_without_tiles_has_no_object_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert objects_of("rope", ("amx", "avx512bf16")) == ["cpu/rope.avx512bf16"]
    assert objects_of("attention", ("amx", "avx512bf16")) == ["cpu/attention.amx", "cpu/attention.avx512bf16"]
    assert objects_of("team", ("portable",)) == ["cpu/team"]


def test_an_object_of_other_options_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that many projects share would hand out what was compiled without the option."""
    compiled: list[tuple[str, ...]] = []

    def compile_host(source: Path, output: Path, declared: str, isa: str) -> list[Path]:
        compiled.append(objects.flags_of(isa))
        output.write_text(" ".join(compiled[-1]))
        return []

    monkeypatch.setattr(objects, "compile_host", compile_host)

    def made(isa: str) -> str:
        source = instruction_sets.SOURCES / "embed.cc"
        return objects.host_object(source, tmp_path / CACHE, "", isa).path.read_text()

    before = made("avx2"), made("portable")
    monkeypatch.setattr(instruction_sets, "FLAGS", {"avx2": ("-fother",)})
    after = made("avx2"), made("portable")
    assert "-fother" in after[0] and after[0] != before[0] and after[1] == before[1]
    assert len(compiled) == 3, "that of the other set is still the same"
