"""The real compiler accepts every module, and its DDR descriptors reach every element of every slot.

Needs `aircc` on PATH and `PEANO_INSTALL_DIR`. Kernels are compiled where Peano's compiler is there; else the objects
are placeholders and everything but the cores' code is made.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects.builtin import MemRefType

from stages.air import AirModule, Variant, to_mlir
from stages.model.grouping import Program
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.modules import build_module
from stages.targets.npu2.objects import compile_tile
from stages.targets.npu2.toolchain import peano
from tests.npu_shapes import BUCKETS, MODELS, device_programs
from tests.test_air_programs import PROGRAMS

pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(shutil.which("aircc") is None, reason="aircc is not on PATH"),
    pytest.mark.skipif("PEANO_INSTALL_DIR" not in os.environ, reason="PEANO_INSTALL_DIR is not set"),
]

TILING = ("--air-runtime-loop-tiling-sizes=2",) * 2


def compile_module(work: Path, text: str, name: str, variants: Sequence[Variant], options: Sequence[str]) -> Path:
    """Run aircc in `work`; returns its last intermediate module."""
    (work / "air.mlir").write_text(text)
    for variant in variants:
        target = work / variant.object
        if peano() is None:
            target.write_text("placeholder")
        else:
            made = compile_tile(f"aie2p/{variant.stem}", work / "cache", variant.object, variant.flags())
            shutil.copyfile(made.path, target)
    command = ["aircc", "--device", "npu2", "air.mlir", "--output-format", "elf", "--elf-name", "out.elf"]
    command += ["--xclbin-instance-name", name, "--peano", os.environ["PEANO_INSTALL_DIR"], "--no-xchesscc"]
    command += ["--no-xbridge", "--tmpdir", "air_project", *options]
    run = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    errors = "\n".join(line for line in run.stderr.splitlines() if "error" in line.lower())
    assert run.returncode == 0 and (work / "out.elf").exists(), errors[:2000]
    return work / "air_project/npu.air.mlir"


@pytest.mark.parametrize("name", PROGRAMS)
def test_descriptors_reach_every_element(name: str, tmp_path: Path) -> None:
    made = PROGRAMS[name]()
    variants = sorted(made.variants, key=lambda variant: variant.object)
    function = made.function.sym_name.data
    lowered = compile_module(tmp_path, to_mlir(made.module), function, variants, TILING)
    if len(made.launches) == 1:
        touched = touched_elements(lowered.read_text(), made)
        half = {"out"} if "into KV" in name else set()
        for slot, elements in touched.items():
            expected = program_rows(name) if slot in half else 1.0
            assert elements.mean() == expected, slot


def program_rows(name: str) -> float:
    """Share of an interleaved output that one kernel writes: half of the width, of the rows that are its own."""
    return 0.25 if name.startswith("rope") else 0.5


_DESCRIPTOR = re.compile(r"aie\.dma_bd\(%arg(\d+) : memref<[^>]*>, (\d+), (\d+)(?:, \[([^\]]*)\])?")


def touched_elements(text: str, made: AirModule) -> dict[str, np.ndarray]:
    """Slot -> which elements some DDR descriptor of the run-time sequence reads or writes."""
    touched = {}
    for argument in made.function.body.block.args:
        assert isinstance(argument.type, MemRefType)
        touched[str(argument.name_hint)] = np.zeros(int(np.prod(argument.type.get_shape())), bool)
    order = list(touched)
    for index, offset, length, pattern in _DESCRIPTOR.findall(text):
        at = np.array([int(offset)])
        for size, stride in re.findall(r"size = (\d+), stride = (\d+)", pattern) or [(length, "1")]:
            at = (at[:, None] + np.arange(int(size)) * int(stride)).ravel()
        touched[order[int(index)]][at] = True
    return touched


def cases() -> Iterator[tuple[str, str, Program]]:
    for model in ("demo", "llama-3.2-1b", "llama-3.2-3b", "smollm2-360m"):
        for grouping in GROUPINGS:
            for program in device_programs(grouping, *BUCKETS):
                yield f"{model}-{grouping}-{program.name}", model, program


@pytest.mark.parametrize(
    ("model", "program"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (case[0] != "demo")) for name, *case in cases()],
)
def test_modules_are_accepted(model: str, program: Program, tmp_path: Path) -> None:
    module = build_module(program, MODELS[model].dimensions())
    compile_module(tmp_path, module.text(), module.name, module.variants, module.options)
