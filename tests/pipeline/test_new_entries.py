"""A new kernel, weight format, model family and target are files of their own: nothing else is touched, and all run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.conftest import ROOT, doit, ran, snapshot

ENTRIES = ROOT / "tests/support/new_entries"
KERNEL_AND_FORMAT = {
    "stages/weights/formats/tiny8.py": "format.py",
    "stages/kernels/unpack.py": "kernel.py",
    "kernel_src/cpu/unpack.cc": "cpu.cc",
    "kernel_src/aie2p/unpack.cc": "aie2p.cc",
}
FAMILY = {"stages/model/families/toy.py": "family.py"}


def add(checkout: Path, place: str, text: str) -> None:
    """A file that was not there."""
    path = checkout / place
    path.parent.mkdir(exist_ok=True)
    with path.open("x") as file:
        file.write(text)


def logits(checkout: Path, directory: str) -> np.ndarray:
    """Of a prompt, by the runtime of a checkout."""
    code = "import sys; from llama_npu2 import load; load(sys.argv[1]).prefill(range(3, 20)).tofile(sys.argv[2])"
    out = checkout / "logits"
    environment = os.environ | {"PYTHONPATH": str(checkout / "runtime")}
    subprocess.run([sys.executable, "-c", code, directory, str(out)], cwd=checkout, env=environment, check=True)
    return np.fromfile(out, np.float32)


@pytest.fixture
def extended(built: Path) -> Path:
    """A checkout with the new kernel and format."""
    for place, source in KERNEL_AND_FORMAT.items():
        add(built, place, (ENTRIES / source).read_text())
    return built


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["cpu", "npu2-sim"])
def test_runs(extended: Path, target: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(extended / "runtime"), str(extended)])}
    (tmp_path / "build").mkdir()
    command = [sys.executable, ENTRIES / "run.py", tmp_path / "build", target]
    run = subprocess.run(list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_changes_nothing_that_was_built(extended: Path) -> None:
    """Who reads a table looks again, and makes the same bytes; receipts say what they saw, and of which code."""
    before = snapshot(extended / "artifacts/model/cpu")
    tasks = ran(doit("compile", "model=model", cwd=extended))
    assert not any(task.startswith("elf:") for task in tasks)
    after = snapshot(extended / "artifacts/model/cpu")
    assert {name for name in after if after[name] != before.get(name)} <= {
        name for name in after if name.startswith(("build/receipts/", "build/code/"))
    }


@pytest.mark.thorough
def test_a_family(built: Path) -> None:
    """The same weights under other names, in a checkpoint of another family: the same logits."""
    for place, source in FAMILY.items():
        add(built, place, (ENTRIES / source).read_text())
    shutil.copytree(built / "model", built / "toy")
    config = json.loads((built / "toy/config.json").read_text())
    config |= {"architectures": ["ToyForCausalLM"], "model_type": "toy"}
    (built / "toy/config.json").write_text(json.dumps(config))
    weights = load_file(built / "toy/model.safetensors")
    renames = (("model.layers.", "decoder."), ("model.embed_tokens", "tokens"))
    for old, new in renames:
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    save_file(weights, built / "toy/model.safetensors")
    ran(doit("compile", "model=toy", cwd=built))
    assert (built / "artifacts/toy/cpu/weights/layer_001.safetensors").is_file()
    assert (logits(built, "artifacts/toy/cpu") == logits(built, "artifacts/model/cpu")).all()


@pytest.mark.thorough
def test_a_target(built: Path) -> None:
    """A folder and a device: the whole pipeline builds it, and the runtime runs it."""
    add(built, "stages/targets/twin/__init__.py", (ENTRIES / "target.py").read_text())
    for room in ("modules", "objects", "programs", "toolchain"):
        add(built, f"stages/targets/twin/{room}.py", f"from stages.targets.cpu.{room} import *  # noqa: F403\n")
    add(built, "runtime/llama_npu2/devices/twin.py", "from llama_npu2.devices.cpu import open_device\n")
    ran(doit("compile", "model=model", "target=twin", cwd=built))
    assert json.loads((built / "artifacts/model/twin/manifest.json").read_text())["target"]["device"] == "twin"
    assert (logits(built, "artifacts/model/twin") == logits(built, "artifacts/model/cpu")).all()
