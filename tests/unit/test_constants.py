"""Constants that Python packs by and C++ reads by: whichever side changes alone, nothing compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from stages.engine.places import KERNELS
from stages.targets.cpu.instruction_sets import options, sets_of
from stages.targets.cpu.toolchain import need_host_compiler
from stages.weights import constants

_GROUPED = ("-DBITS=4", "-DFACTORS=2", "-DGROUPS=2", "-DSTEPS=2", "-DLANES=32", "-DCOLS=64")
FLAGS = {"cpu": ("-std=c++17",), "aie2p": ("-std=c++20", "-DVARIANT=x", "-DBFP=0", "-DBLOCKED=1", *_GROUPED)}
SHAPES = {
    "aie2p/gemm.cc": "TM TN TK",
    "aie2p/gemv.cc": "ROWS COLS KC",
    "aie2p/flash_attention.cc": "QR KR HD",
    "aie2p/rope.cc": "HEADS HEAD_DIM ROWS",
}
READERS = {
    "PANEL_ROWS": ("cpu/gemm.cc", "cpu/gemv.cc", "cpu/embed.cc"),
    "KV_BLOCK_POSITIONS": ("cpu/attention.cc", "cpu/attention_kv.cc"),
    "GROUP": ("cpu/int4.cc", "cpu/int6.cc", "cpu/int8.cc", "cpu/int4_f32.cc", "cpu/int8_f32.cc"),
    "SHORT_GROUP": ("cpu/int8_f32_16.cc",),
    "QUAD": ("cpu/w8a8.cc",),
    "LANES": ("aie2p/grouped_gemv.cc",),
    "BLOCK": ("aie2p/gemm.cc", "aie2p/gemv.cc", "aie2p/flash_attention.cc"),
    "POSITION": ("aie2p/rope.cc",),
    "HEAD_POSITION": ("aie2p/rope.cc",),
}
CPP_NAMES = {
    "panel_rows": "PANEL_ROWS",
    "kv_block_positions": "KV_BLOCK_POSITIONS",
    "EDGE": "BLOCK",
    "group_inputs": "GROUP",
    "short_group_inputs": "SHORT_GROUP",
    "quad": "QUAD",
    "WIDE": "LANES",
    "POSITION": "POSITION",
    "HEAD_POSITION": "HEAD_POSITION",
}
EXPECTED = re.compile(rf"static_assert\(({'|'.join(CPP_NAMES)}) == (\d+), ")


def compile_errors(source: str, macros: Sequence[str], kernels: Path = KERNELS) -> str:
    """What the compiler refuses of `<kernel set>/<file>`; nothing if it does not. Sizes suit blocks of any edge."""
    sizes = [f"-D{size}=64" for size in SHAPES.get(source, "").split()]
    flags = [*FLAGS[source.split("/")[0]], *sizes, *macros, f"-I{kernels / 'cpu'}", f"-I{kernels / 'sim'}"]
    isa = "portable" if sets_of(Path(source).stem) and source.startswith("cpu/") else ""
    command = [*need_host_compiler(), *flags, "-fsyntax-only", *options(kernels / source, isa)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode != 0) == ("error" in run.stderr)
    return run.stderr


def assertions() -> list[tuple[str, str]]:
    """(file, name) of everything that C++ expects of a constant."""
    files = [path for kernel_set in FLAGS for path in sorted((KERNELS / kernel_set).iterdir())]
    return [(str(p.relative_to(KERNELS)), name) for p in files for name, _ in EXPECTED.findall(p.read_text())]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name, source", [(name, source) for name, sources in READERS.items() for source in sources])
@pytest.mark.parametrize("factor", [0.5, 1, 2])
def test_a_constant_changed_in_python_does_not_compile(
    name: str, source: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, name, int(getattr(constants, name) * factor))
    errors = compile_errors(source, constants.macros())
    assert ("static assertion failed" in errors) == (factor != 1), errors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("file, name", assertions())
def test_a_constant_changed_in_cpp_does_not_compile(file: str, name: str, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(KERNELS, tmp_path / "kernel_src"))
    text = (changed / file).read_text()
    (changed / file).write_text(EXPECTED.sub(lambda m: f"static_assert({m[1]} == {2 * int(m[2])}, ", text))
    # A header is read by all that its kernel set has of them.
    readers = [reader for reader in READERS[CPP_NAMES[name]] if Path(reader).parent == Path(file).parent]
    source = next((reader for reader in readers if Path(reader).stem == Path(file).stem), readers[0])
    assert "static assertion failed" in compile_errors(source, constants.macros(), changed)


def test_cpp_expects_something_of_every_constant() -> None:
    assert {CPP_NAMES[name] for _, name in assertions()} == set(READERS)
    assert {f"-DLAYOUT_{name}={getattr(constants, name)}" for name in READERS} == set(constants.macros())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", [source for sources in READERS.values() for source in sources])
def test_sources_are_not_compiled_without_the_constants(source: str) -> None:
    assert "#error" in compile_errors(source, ())
