"""The real compiler accepts every module, and the audit finds nothing wrong with what it made of it.

Needs `aircc` and `aiecc` on PATH and `PEANO_INSTALL_DIR`. Where no Peano is, the objects are placeholders, and the
compiler ends where it would compile the first core: what the audit reads is there by then.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from llama_npu2.errors import UserError
from stages.air import AirModule, Variant, parse_mlir, to_mlir
from stages.kernels import flash_attention, gemm, gemv, kernels, rms_norm, rope
from stages.model.grouping import Program
from stages.targets.npu2.audit import Findings, audit_made
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.modules import build_module, steps_together, tiling_options
from stages.targets.npu2.objects import compile_tile
from stages.targets.npu2.programs import INTERMEDIATE, Job, link, with_settling_toggled
from stages.targets.npu2.toolchain import peano
from tests.support.air_programs import PROGRAMS
from tests.support.npu_shapes import BUCKETS, FAMILIES, JUDGED, device_programs, drawn_program, family_programs

pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.needs("aircc on PATH", shutil.which("aircc") is not None),
    pytest.mark.needs("PEANO_INSTALL_DIR", "PEANO_INSTALL_DIR" in os.environ),
]

NO_PEANO = "Error running Peano"
"""What aiecc says where Peano's programs are not what they should be."""


def judged(work: Path, text: str, function: str, variants: Sequence[Variant], options: Sequence[str]) -> Findings:
    """Compile a module and audit what came of it. UserError where either refuses it."""
    objects = {}
    for variant in variants:
        placeholder = work / f"placeholder-{variant.object}"
        placeholder.write_text("placeholder")
        made = (
            compile_tile(f"aie2p/{variant.stem}", work / "cache", variant.object, variant.flags()) if real() else None
        )
        objects[variant.object] = made.path if made else placeholder
    log = work / "failed.log"
    try:
        link(Job(function, text, function, options, objects), work / "scratch", log)
    except UserError:
        if NO_PEANO not in log.read_text():
            raise
    return audit_made(function, parse_mlir(text), work / "scratch" / INTERMEDIATE, function, linked=real())


def real() -> bool:
    """Whether Peano is a compiler."""
    found = peano()
    return found is not None and "clang" in found.version


def judged_kernel(work: Path, made: AirModule) -> Findings:
    name = made.function.sym_name.data
    variants = sorted(made.variants, key=lambda variant: variant.object)
    together = (16, 16) if name == "gemv" else steps_together(made.launches)
    return judged(work, to_mlir(made.module), name, variants, tiling_options(together))


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_are_compiled_right(name: str, tmp_path: Path) -> None:
    judged_kernel(tmp_path, PROGRAMS[name]())


def cases() -> Iterator[tuple[str, str, Program]]:
    for model in JUDGED:
        for grouping in GROUPINGS:
            for program in device_programs(grouping, *BUCKETS):
                yield f"{model}-{grouping}-{program.name}", model, program


@pytest.mark.parametrize(
    ("model", "program"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (case[0] != "demo")) for name, *case in cases()],
)
def test_modules_are_compiled_right(model: str, program: Program, tmp_path: Path) -> None:
    module = build_module(program, JUDGED[model].dimensions())
    found = judged(tmp_path, module.text(), module.name, module.variants, module.options)
    assert found.resets % 2 == 0, "else the link step makes it even"


@pytest.mark.parametrize("grouping, weights", [("separate", "bf16"), ("fused", "bf16"), ("fused", "int4")])
@pytest.mark.parametrize("model", [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_modules_of_families_are_compiled_right(model: str, grouping: str, weights: str, tmp_path: Path) -> None:
    """Each that no other program has but for its weights' sizes."""
    for program in family_programs(model, grouping, weights):
        module = build_module(program, FAMILIES[model].dimensions())
        work = tmp_path / program.name
        work.mkdir()
        found = judged(work, module.text(), module.name, module.variants, module.options)
        assert found.resets % 2 == 0, "else the link step makes it even"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(64))
def test_programs_that_a_seed_draws_are_compiled_right(seed: int, tmp_path: Path) -> None:
    label, config, program = drawn_program(seed)
    try:
        module = build_module(program, config.dimensions())
    except UserError as refused:
        pytest.skip(f"{label}: planned: {refused}")
    text, resets = module.text(), list[int]()
    for again in ("once", "toggled"):
        (work := tmp_path / again).mkdir()
        resets.append(judged(work, text, module.name, module.variants, module.options).resets)
        if resets[-1] % 2 == 0:
            return
        text = with_settling_toggled(text)  # as the link step does
    pytest.fail(f"{label}: {resets} resets")


def _heads(shape: random.Random) -> tuple[int, int, int]:
    kv_heads = shape.choice([1, 2, 3, 4, 5, 8, 12, 16])
    return kv_heads * shape.choice([1, 2, 3, 4, 6, 7]), kv_heads, shape.choice([32, 64, 96, 128])


def _rows(shape: random.Random) -> int:
    return 64 * shape.randint(1, 10)


def _attention(shape: random.Random) -> AirModule:
    seq = 16 * shape.randint(2, 16)
    return flash_attention.build(flash_attention.tile(seq, *_heads(shape), shape.choice([seq, seq, 512])))


def _rope(shape: random.Random) -> AirModule:
    heads, _, head_dim = _heads(shape)
    rows = shape.choice([1, _rows(shape)])
    out, norm = rope.ROWS if rows == 1 else shape.choice(rope.OUTS), shape.choice([None, rms_norm.Norm(1e-6)])
    return rope.build(rope.tile(rows, heads, head_dim, out, norm))


def _elementwise(shape: random.Random) -> AirModule:
    kernel = kernels()[shape.choice(["add", "silu_and_mul"])]
    assert kernel.tiling and kernel.program
    return kernel.program(kernel.tiling({"rows": shape.choice([1, _rows(shape)]), "cols": 32 * shape.randint(1, 300)}))


def _gemm(shape: random.Random) -> AirModule:
    cols, out_cols = (16 * shape.randint(1, 130) for _ in range(2))
    return gemm.build(gemm.tile(_rows(shape), cols, out_cols))


def _gemm_kv(shape: random.Random) -> AirModule:
    _, kv_heads, head_dim = _heads(shape)
    cols = 16 * shape.randint(1, 130)
    return gemm.build(gemm.tile(_rows(shape), cols, kv_heads * head_dim, head_dim, shape.choice([0, 128])))


def _gemv(shape: random.Random) -> AirModule:
    plain = shape.random() < 0.3
    out_cols = shape.randint(1, 40000) if plain else 64 * shape.randint(1, 100)
    return gemv.build(gemv.tile(out_cols, 16 * shape.randint(2, 400), "f32" if plain else "bf16", not plain))


def _norm(shape: random.Random) -> AirModule:
    return rms_norm.build(
        rms_norm.tile(shape.choice([1, _rows(shape)]), 16 * shape.randint(2, 500), rms_norm.Norm(1e-5))
    )


GENERATED: tuple[Callable[[random.Random], AirModule], ...] = (
    *(_gemm, _gemm, _gemm_kv, _gemv, _gemv, _attention, _attention, _rope, _elementwise, _norm),
)
SEEDS = range(80)


@pytest.mark.parametrize("seed", SEEDS)
def test_shapes_that_nobody_listed_are_refused_or_compiled_right(seed: int, tmp_path: Path) -> None:
    """The planner may refuse, and so may the compiler, both by name; what they accept is right."""
    shape = random.Random(seed)
    try:
        made = GENERATED[seed % len(GENERATED)](shape)
    except UserError as refused:
        pytest.skip(f"planned: {refused}")
    try:
        judged_kernel(tmp_path, made)
    except UserError as refused:
        assert ": aircc: " in str(refused), refused
