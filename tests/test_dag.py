"""What runs again and what does not: content decides, never a timestamp."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import doit, ran, snapshot, write_checkpoint

COMPILE = ("compile", "model=model")
BUILT = Path("artifacts/model/cpu")


def test_second_run_does_nothing(built: Path) -> None:
    assert ran(doit(*COMPILE, cwd=built)) == set()


def test_touching_every_file_rebuilds_nothing(built: Path) -> None:
    for path in built.rglob("*"):
        os.utime(path, (time.time() + 60, time.time() + 60))
    assert ran(doit(*COMPILE, cwd=built)) == set()


def test_comment_recompiles_one_object_and_stops(built: Path) -> None:
    source = built / "kernel_src/cpu/gemv.cc"
    source.write_text(source.read_text() + "\n// a comment\n")
    assert ran(doit(*COMPILE, cwd=built)) == {"object:gemv"}


def test_changed_kernel_relinks_only_its_users(built: Path) -> None:
    source = built / "kernel_src/cpu/rope.cc"
    addition = '#ifndef ADDED\n#define ADDED\nextern "C" int added_for_a_test() { return 7; }\n#endif\n'
    source.write_text(addition + source.read_text())
    assert ran(doit(*COMPILE, cwd=built)) == {"object:rope", "elf:rms_gemms_rope", "elf:rms_gemv_rope", "manifest"}


def test_changed_header_recompiles_its_readers(built: Path) -> None:
    header = built / "kernel_src/cpu/attention_core.h"
    header.write_text(header.read_text() + "\n// a comment\n")
    assert ran(doit(*COMPILE, cwd=built)) == {"object:flash_attention", "object:decode_attention"}


def test_changed_weights_repack_and_compile_nothing(built: Path) -> None:
    before = snapshot(built / BUILT)
    write_checkpoint(built / "model", seed=1)
    assert ran(doit(*COMPILE, cwd=built)) == {"checkpoint", "tokenizer", "weights", "manifest"}
    after = snapshot(built / BUILT)
    changed = {name for name in after if not name.startswith("build/") and after[name] != before.get(name)}
    assert changed == {name for name in after if name.startswith("weights/") and "tables" not in name} | {
        "manifest.json"
    }


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
    write_checkpoint(built / "model", intermediate_size=128)
    tasks = ran(doit(*COMPILE, cwd=built))
    assert {"module:o_ffn", "elf:o_ffn", "elf:o_gemv_ffn", "weights", "manifest"} <= tasks
    assert not any(task.startswith("object:") for task in tasks)
    assert "elf:rms_gemms_rope" not in tasks, "its source does not depend on the feed-forward width"


def test_fewer_layers_leave_no_stale_blob(built: Path) -> None:
    write_checkpoint(built / "model", num_hidden_layers=1)
    ran(doit(*COMPILE, cwd=built))
    assert not (built / BUILT / "weights/layer_001.safetensors").exists()


def test_changed_stage_code_reruns_that_stage(built: Path) -> None:
    code = built / "stages/modules.py"
    code.write_text(code.read_text() + "\n# a comment\n")
    tasks = ran(doit(*COMPILE, cwd=built))
    assert tasks == {t for t in tasks if t.startswith("module:")} != set()


def test_every_damaged_artifact_is_repaired(built: Path) -> None:
    """Delete, truncate or flip a byte of each file in turn, receipts included; the next compile restores every byte."""
    whole = snapshot(built / BUILT)
    generator = random.Random(0)
    for number, name in enumerate(whole):
        path = built / BUILT / name
        data = bytearray(whole[name])
        if number % 3 == 0:
            path.unlink()
        elif number % 3 == 1:
            path.write_bytes(data[: len(data) // 2])
        else:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            path.write_bytes(data)
        if number % 6 == 5 or number == len(whole) - 1:
            ran(doit(*COMPILE, cwd=built))
            assert snapshot(built / BUILT) == whole, f"after damage up to {name}"


def test_flip_that_keeps_size_and_mtime_is_repaired(built: Path) -> None:
    path = built / BUILT / "weights/layer_000.safetensors"
    whole, status = path.read_bytes(), path.stat()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "weights" in ran(doit(*COMPILE, cwd=built))
    assert path.read_bytes() == whole


def test_new_compiler_version_recompiles(built: Path, tmp_path: Path) -> None:
    real = shutil.which("c++") or pytest.skip("no system compiler")
    wrapper = tmp_path / "c++"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "other compiler 99" && exit\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    tasks = ran(doit(*COMPILE, cwd=built, env={"CXX": str(wrapper)}))
    assert {"object:gemm", "elf:o_ffn"} <= tasks


def without_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH leads to nothing."""
    (tmp_path / "empty").mkdir(exist_ok=True)
    return {"PATH": str(tmp_path / "empty"), "CXX": "/no/such/compiler"}


def test_copied_artifacts_are_up_to_date_elsewhere(built: Path, tmp_path: Path) -> None:
    """In another checkout, on a machine without a compiler and without the checkpoint: no task runs, text comes."""
    other = tmp_path / "other"
    shutil.copytree(built, other, ignore=shutil.ignore_patterns("artifacts", "model", "__pycache__"))
    shutil.copytree(built / "artifacts", other / "artifacts")
    assert ran(doit(*COMPILE, cwd=other, env=without_compiler(tmp_path))) == set()
    command = [sys.executable, "-m", "runtime", str(BUILT), "hello", "--max-tokens", "3"]
    run = subprocess.run(
        command, cwd=other, env=os.environ | without_compiler(tmp_path), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "3 tokens" in run.stderr


def test_two_builds_at_once_take_turns(built: Path) -> None:
    once = snapshot(built / BUILT)
    shutil.rmtree(built / BUILT)
    command = [sys.executable, "-m", "doit", *COMPILE]
    both = [subprocess.Popen(command, cwd=built, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [p.communicate(timeout=300)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert snapshot(built / BUILT) == once
    assert ran(doit(*COMPILE, cwd=built)) == set()


def test_two_builds_of_different_kinds_do_not_mix(built: Path) -> None:
    """Same directory, different parameters, at once: the result is that of one or the other, whole."""
    command = [sys.executable, "-m", "doit", "compile", "target=npu2-sim"]
    both = [
        subprocess.Popen([*command, f"buckets={bucket}"], cwd=built, stdout=subprocess.PIPE, text=True)
        for bucket in (64, 128)
    ]
    outputs = [p.communicate(timeout=500)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    manifest = json.loads((built / "artifacts/demo/npu2-sim/manifest.json").read_text())
    buckets = {name.partition("@")[2] for name in manifest["plans"] if "@" in name}
    assert buckets in ({"64"}, {"128"})
    assert {name.partition(".")[2] for name in manifest["programs"] if "." in name} == buckets


def test_parallel_build_is_identical(built: Path) -> None:
    serial = snapshot(built / BUILT)
    shutil.rmtree(built / BUILT)
    ran(doit("-n", "3", *COMPILE, cwd=built))
    assert snapshot(built / BUILT) == serial


def test_killed_builds_are_finished_by_the_next(built: Path) -> None:
    """kill -9 at 20 random moments of a build from nothing, then one compile: byte-identical to an undisturbed one."""
    undisturbed = snapshot(built / BUILT)
    started = time.monotonic()
    shutil.rmtree(built / "artifacts")
    ran(doit(*COMPILE, cwd=built))
    whole_build = time.monotonic() - started
    shutil.rmtree(built / "artifacts")
    generator = random.Random(1)
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-m", "doit", *COMPILE],
            cwd=built,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(generator.uniform(0.1, min(whole_build, 4.0)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ran(doit(*COMPILE, cwd=built))
    assert snapshot(built / BUILT) == undisturbed
    assert ran(doit(*COMPILE, cwd=built)) == set()
