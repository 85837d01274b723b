"""What runs again and what does not: content decides, never a timestamp."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.engine.digests import Digests
from stages.targets.cpu.instruction_sets import objects_of
from stages.targets.cpu.toolchain import need_host_compiler
from tests.conftest import doit, ran, snapshot, write_checkpoint
from tests.support import forked

COMPILE = ("compile", "model=model")
BUILT = Path("artifacts/model/cpu")


def objects(stem: str) -> set[str]:
    """Return the steps that compile a source."""
    return {f"object:{name}" for name in objects_of(stem)}


def test_touching_every_file_rebuilds_nothing(built: Path) -> None:
    for path in built.rglob("*"):
        os.utime(path, (time.time() + 60, time.time() + 60))
    assert ran(doit(*COMPILE, cwd=built)) == set()


@pytest.mark.thorough
def test_comment_recompiles_one_object_and_stops(built: Path) -> None:
    source = built / "kernel_src/cpu/embed.cc"
    source.write_text(source.read_text() + "\n// a comment\n")
    assert ran(doit(*COMPILE, cwd=built)) == objects("embed")


def test_changed_kernel_relinks_only_its_users(built: Path) -> None:
    source = built / "kernel_src/cpu/embed.cc"
    source.write_text("__attribute__((used)) static int added_for_a_test() { return 7; }\n" + source.read_text())
    assert ran(doit(*COMPILE, cwd=built)) == objects("embed") | {"elf:host", "manifest"}


@pytest.mark.parametrize(
    ("header", "readers"),
    [("scale_row.h", {"embed"}), pytest.param("norm.h", {"rms_norm", "rope"}, marks=pytest.mark.thorough)],
)
def test_changed_header_recompiles_its_readers(built: Path, header: str, readers: set[str]) -> None:
    path = built / "kernel_src/cpu" / header
    path.write_text(path.read_text() + "\n// a comment\n")
    assert ran(doit(*COMPILE, cwd=built)) == set().union(*map(objects, readers))


def test_headers_of_generated_source_are_inputs_too(built: Path) -> None:
    read = json.loads((built / BUILT / "build/receipts/elf-o_ffn.json").read_text())["inputs"]
    assert {
        "kernel_src/cpu/kernel.h",
        "kernel_src/cpu/team.h",
        "build/objects/cpu/gemm.portable/gemm.portable.o",
    } <= read.keys()


def test_changed_weights_repack_and_compile_nothing(built: Path) -> None:
    before = snapshot(built / BUILT)
    write_checkpoint(built / "model", seed=1)
    assert ran(doit(*COMPILE, cwd=built)) == {"checkpoint", "tokenizer", "weights", "manifest"}
    after = snapshot(built / BUILT)
    changed = {name for name in after if not name.startswith("build/") and after[name] != before.get(name)}
    packed = {name for name in after if name.startswith("weights/") and "tables" not in name}
    assert changed == packed | {"manifest.json", "manifest.local", "provenance.json"}


@pytest.mark.thorough
def test_changed_rotation_repacks_the_tables(built: Path) -> None:
    """Only the values of a table change with it, no shape and no weight."""
    before = snapshot(built / BUILT)
    write_checkpoint(built / "model", rope_theta=500.0)
    assert {"weights", "manifest"} <= ran(doit(*COMPILE, cwd=built))
    after = snapshot(built / BUILT)
    assert {name for name in after if name.startswith("weights/") and after[name] != before[name]} == {
        "weights/tables.safetensors"
    }


def test_changed_shape_regenerates_programs_but_compiles_no_kernel(built: Path) -> None:
    write_checkpoint(built / "model", intermediate_size=128, num_hidden_layers=1)
    tasks = ran(doit(*COMPILE, cwd=built))
    assert {"module:o_ffn", "elf:o_ffn", "elf:o_gemv_ffn", "weights", "manifest"} <= tasks
    assert not any(task.startswith("object:") for task in tasks)
    assert "elf:rms_gemms_rope" not in tasks, "its source does not depend on the feed-forward width"
    assert not (built / BUILT / "weights/layer_001.safetensors").exists(), "a layer that is no more"


def test_changed_stage_code_reruns_that_stage(built: Path) -> None:
    code = built / "stages/targets/cpu/modules.py"
    code.write_text(code.read_text() + "\n# a comment\n")
    tasks = ran(doit(*COMPILE, cwd=built))
    assert tasks == {t for t in tasks if t.startswith("module:")} != set()


def test_a_module_with_another_text_is_linked_again(built: Path) -> None:
    """Also where its description, which names the objects, is the same."""
    code = built / "stages/targets/cpu/modules.py"
    code.write_text(
        code.read_text().replace(
            "cpu_source(found, dimensions, sets, fused))", "cpu_source(found, dimensions, sets, fused) + '// more\\n')"
        )
    )
    tasks = ran(doit(*COMPILE, cwd=built))
    linked, made = ({t.partition(":")[2] for t in tasks if t.startswith(kind)} for kind in ("elf:", "module:"))
    assert made and made == linked


def test_an_edited_tiling_compiles_nothing(built: Path) -> None:
    """What a kernel says of the array does not concern the host's objects, and no weight is packed again."""
    kernel = built / "stages/kernels/gemm.py"
    kernel.write_text(kernel.read_text().replace("CHUNK = 256", "CHUNK = 128"))
    tasks = ran(doit(*COMPILE, cwd=built))
    assert tasks and not [task for task in tasks if task != "plan" and not task.startswith("module:")]


@pytest.mark.thorough
def test_a_role_edited_in_a_description_changes_the_manifest(built: Path) -> None:
    """And syncs, which follow roles, with it; the program itself stays."""
    family = built / "stages/model/parts/builders.py"
    text = family.read_text()
    slot = 'gate = b.slot("gate", rows.act("ffn"), "scratch")'
    assert slot in text
    family.write_text(text.replace(slot, slot.replace("scratch", "output")))
    (built / "stages/targets/cpu/fusion.py").write_text("def fuse(part):\n    return part.launches\n")

    def role() -> str:
        slots = json.loads((built / BUILT / "manifest.json").read_text())["programs"]["o_ffn"]["slots"]
        return next(slot["role"] for slot in slots if slot["name"] == "gate")

    before = role()
    tasks = ran(doit(*COMPILE, cwd=built))
    assert {"module:o_ffn", "manifest"} <= tasks and not tasks & {"weights", "checkpoint"}
    assert (before, role()) == ("scratch", "output")


@pytest.mark.thorough
def test_another_bucket_packs_nothing_and_fewer_leave_nothing(built: Path) -> None:
    """Programs come and go with the buckets, their receipts too; the weights of all are the same."""
    sim = built / "artifacts/model/npu2-sim"

    def compiled(buckets: str) -> set[str]:
        return ran(doit("compile", "model=wide", "target=npu2-sim", f"npu.buckets={buckets}", cwd=built))

    write_checkpoint(built / "wide", hidden_size=128, intermediate_size=128, head_dim=32, max_position_embeddings=256)
    sim = built / "artifacts/wide/npu2-sim"
    assert "weights" in compiled("128")
    one = {name for name in snapshot(sim) if not name.startswith("build/objects")}
    tasks = compiled("128,256")
    assert "elf:prefill_attend.256" in tasks and "weights" not in tasks
    more = compiled("128")
    assert "weights" not in more and "manifest" in more
    assert {name for name in snapshot(sim) if not name.startswith("build/objects")} == one


def test_what_no_step_makes_any_more_is_removed(built: Path) -> None:
    receipts = built / BUILT / "build/receipts"
    gone = built / BUILT / "elf/vanished.so"
    gone.write_bytes(b"program")
    receipt = json.loads((receipts / "elf-o_ffn.json").read_text()) | {"outputs": {"elf/vanished.so": "0"}}
    del receipt["xxh3"]
    (receipts / "elf-vanished.json").write_text(json.dumps(receipt))
    assert ran(doit(*COMPILE, cwd=built)) == set()
    assert not gone.exists() and not (receipts / "elf-vanished.json").exists()
    assert (built / BUILT / "elf/o_ffn.so").exists()


def test_a_receipt_cannot_remove_what_is_not_its_directory_s(built: Path) -> None:
    """Receipts come with directories that others made."""
    victim = built / "artifacts/victim"
    victim.write_text("keep me")
    receipts = built / BUILT / "build/receipts"
    receipt = json.loads((receipts / "elf-o_ffn.json").read_text())
    del receipt["xxh3"]
    receipt["outputs"] = dict.fromkeys(("../../victim", str(victim)), "0")
    for name in ("elf-vanished", "weights"):
        (receipts / f"{name}.json").write_text(json.dumps(receipt))
    assert doit(*COMPILE, cwd=built).returncode == 0
    assert victim.read_text() == "keep me"


def test_a_receipt_cannot_have_a_directory_read(built: Path) -> None:
    """What an action discovered are files: another receipt could name the root of the file system."""
    path, named = built / BUILT / "build/receipts/elf-o_ffn.json", built / "named"
    named.mkdir()
    receipt = json.loads(path.read_text())
    del receipt["xxh3"]
    path.write_text(json.dumps(receipt | {"inputs": receipt["inputs"] | {str(named): Digests(built / "d").of(named)}}))
    assert "elf:o_ffn" in ran(doit(*COMPILE, cwd=built))


STEPS_FROM_ELSEWHERE = """
import sys
sys.path[:0] = sys.argv[1:3]
from stages.graph.options import parse_options
from stages.graph import Build
for step in Build(parse_options({"artifacts": sys.argv[3]})).steps.values():
    assert step.run() is None, step.name
"""


@pytest.mark.thorough
def test_steps_do_not_depend_on_the_working_directory(built: Path, tmp_path: Path) -> None:
    """Kernels, the demo model and objects are found from anywhere."""
    command = [sys.executable, "-c", STEPS_FROM_ELSEWHERE, built, built / "runtime", built / "artifacts"]
    subprocess.run(list(map(str, command)), cwd=tmp_path, check=True)
    assert ran(doit("compile", cwd=built)) == set()


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_every_damaged_artifact_is_repaired(every: int, built: Path) -> None:
    """Delete, truncate or flip a byte of each file in turn, receipts included; the next compile restores every byte."""
    whole = snapshot(built / BUILT)
    generator = random.Random(0)
    names = list(whole)[::every]
    for number, name in enumerate(names):
        path = built / BUILT / name
        data = bytearray(whole[name])
        if number % 3 == 0:
            path.unlink()
        elif number % 3 == 1:
            path.write_bytes(data[: len(data) // 2])
        else:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            path.write_bytes(data)
        if number % 80 == 79 or number == len(names) - 1:
            ran(doit(*COMPILE, cwd=built))
            assert snapshot(built / BUILT) == whole, f"after damage up to {name}"


@pytest.mark.thorough
def test_flip_that_keeps_size_and_mtime_is_repaired(built: Path) -> None:
    path = built / BUILT / "weights/layer_000.safetensors"
    whole, status = path.read_bytes(), path.stat()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "weights" in ran(doit(*COMPILE, cwd=built))
    assert path.read_bytes() == whole


@pytest.mark.thorough
def test_new_compiler_version_recompiles(built: Path, tmp_path: Path) -> None:
    real = shutil.which("c++") or pytest.skip("no system compiler")
    wrapper = tmp_path / "c++"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "other compiler 99" && exit\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    other = {"CXX": str(wrapper)}
    assert "object:cpu/rope.portable" in ran(doit("object:cpu/rope.portable", "model=model", cwd=built, env=other))
    said = dict(line.split(maxsplit=1) for line in doit("why", "model=model", cwd=built, env=other).stdout.splitlines())
    assert said["object:cpu/rope.portable"] == said["weights"] == "current"
    changed = r'its tool: ".+" -> "other compiler 99 for \w+"'
    assert re.fullmatch(changed, said["object:cpu/gemm.portable"]) and re.match(changed, said["elf:o_ffn"])


@pytest.mark.thorough
def test_why_names_what_was_edited(built: Path) -> None:
    """Functions, classes, imports; headers; the checkpoint's files; what comes behind whom; and says so without
    running anything."""

    def edit(path: str, before: str, after: str) -> None:
        text = (built / path).read_text()
        assert before in text
        (built / path).write_text(text.replace(before, after, 1))

    def why(*arguments: str) -> dict[str, dict]:
        said = doit("why", *arguments, "model=model", "json=1", cwd=built)
        assert said.returncode == 0, said.stderr
        return {each["step"]: each for each in json.loads(said.stdout)}

    def texts(finding: dict) -> list[str]:
        return [text for change in finding["changes"] for text in change["text"]]

    before = snapshot(built / BUILT)
    edit("stages/model/packing.py", "def pack_weights(", "LIMIT = 3\n\n\ndef pack_weights(")
    edit("stages/model/packing.py", "def _write_blob(", "def _write_all(")
    edit("stages/targets/cpu/programs.py", "\nfrom stages.targets", "\nimport stages.graph.needs\nfrom stages.targets")
    edit("kernel_src/cpu/epilogue.h", "namespace ISA {", "namespace ISA {  // each")
    edit("model/config.json", '"rope_theta": 10000.0', '"rope_theta": 500.0')
    said = why()
    edited = "code stages/model/packing.py: LIMIT, _write_all added; _write_blob removed"
    assert texts(said["weights"]) == [edited]
    assert "code stages/graph/needs.py is imported now" in texts(said["elf:o_ffn"])
    assert texts(said["object:cpu/gemm.portable"]) == ["header kernel_src/cpu/epilogue.h changed"]
    assert said["object:cpu/rope.portable"]["state"] == "current"
    assert texts(said["checkpoint"]) == ["input model/config.json changed"]
    assert (said["tokenizer"]["state"], said["tokenizer"]["behind"]) == ("behind", ["checkpoint"])
    assert why("elf:o_ffn")["elf:o_ffn"]["behind"] == ["checkpoint", *sorted(objects("gemm"))]
    assert set(why("elf", "plan")) == {"plan", *(name for name in said if name.startswith("elf:"))}
    assert snapshot(built / BUILT) == before


def without_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH leads to nothing."""
    (tmp_path / "empty").mkdir(exist_ok=True)
    return {"PATH": str(tmp_path / "empty"), "CXX": "/no/such/compiler"}


def test_copied_artifacts_are_up_to_date_elsewhere(built: Path, tmp_path: Path) -> None:
    """In another checkout, on a machine without a compiler and without the checkpoint: no task runs, text comes."""
    other = tmp_path / "other"
    shutil.copytree(built, other, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(other / "model")
    assert ran(doit(*COMPILE, cwd=other, env=without_compiler(tmp_path))) == set()
    command = [sys.executable, "-m", "runtime", str(BUILT), "hello", "--max-tokens", "3"]
    run = forked.run(command, cwd=other, env=os.environ | without_compiler(tmp_path))
    assert run.returncode == 0, run.stderr
    assert "3 tokens" in run.stderr


def test_two_builds_at_once_take_turns(built: Path) -> None:
    once = snapshot(built / BUILT)
    shutil.rmtree(built / BUILT)
    command = [sys.executable, "-m", "doit", *COMPILE]
    both = [forked.Popen(command, cwd=built, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [p.communicate(timeout=300)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert snapshot(built / BUILT) == once
    assert ran(doit(*COMPILE, cwd=built)) == set()


@pytest.mark.thorough
def test_two_builds_of_different_kinds_do_not_mix(built: Path) -> None:
    """Same directory, different parameters, at once: the result is that of one or the other, whole."""
    command = [sys.executable, "-m", "doit", "compile", "target=npu2-sim"]
    both = [
        forked.Popen([*command, f"npu.buckets={bucket}"], cwd=built, stdout=subprocess.PIPE, text=True)
        for bucket in (64, 128)
    ]
    outputs = [p.communicate(timeout=500)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    manifest = json.loads((built / "artifacts/demo/npu2-sim/manifest.json").read_text())
    buckets = {name.split("@")[1] for name in manifest["plans"] if "@" in name}
    assert buckets in ({"64"}, {"128"})
    assert {name.split(".")[1] for name in manifest["programs"] if "." in name} == buckets


@pytest.mark.thorough
def test_parallel_build_is_identical(built: Path) -> None:
    serial = snapshot(built / BUILT)
    shutil.rmtree(built / BUILT)
    ran(doit("-n", "3", *COMPILE, cwd=built))
    assert snapshot(built / BUILT) == serial


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.thorough)])
def test_killed_builds_are_finished_by_the_next(kills: int, built: Path) -> None:
    """kill -9 at random moments of a build, then one compile: byte-identical to an undisturbed one. Nothing is there
    but most objects, so that the moments are spread over all steps; one kernel is compiled."""
    undisturbed = snapshot(built / BUILT)

    def remove() -> None:
        shutil.rmtree(built / BUILT)
        for path in (built / "artifacts/.cache/objects").glob("embed-*"):
            path.unlink()

    remove()
    generator = random.Random(5)
    for _ in range(kills):
        process = forked.Popen(
            [sys.executable, "-m", "doit", *COMPILE],
            cwd=built,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(generator.uniform(0.3, 3.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ran(doit(*COMPILE, cwd=built))
    assert snapshot(built / BUILT) == undisturbed
    assert ran(doit(*COMPILE, cwd=built)) == set()


@pytest.mark.thorough
def test_programs_of_the_same_shapes_are_linked_once(built: Path, tmp_path: Path) -> None:
    """A fine-tune has the programs of its model; one that was altered in the cache is linked again."""
    write_checkpoint(built / "tuned", seed=1)
    command, *options = need_host_compiler()
    log, logged = tmp_path / "log", tmp_path / "c++"
    logged.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo "$@" >> {log} ;; esac\nexec {command} "$@"\n')
    logged.chmod(0o755)

    def compile_tuned() -> dict[str, bytes]:
        compiler = {"CXX": shlex.join([str(logged), *options])}
        assert "elf:o_ffn" in ran(doit("compile", "model=tuned", cwd=built, env=compiler))
        return snapshot(built / "artifacts/tuned/cpu/elf")

    programs = compile_tuned()
    assert not log.exists() and programs == snapshot(built / "artifacts/model/cpu/elf")
    for cached in (built / "artifacts/.cache/objects").glob("o_ffn-*.o"):
        content = cached.read_bytes()
        cached.unlink()  # a link to that of other tests
        cached.write_bytes(content[:-1])
    shutil.rmtree(built / "artifacts/tuned")
    assert compile_tuned() == programs and len(log.read_text().splitlines()) == 1
