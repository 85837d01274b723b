"""The tile functions against the AIE API's own headers: types, overloads and constraints by a compiler's verdict."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from stages.air import Variant
from stages.engine.places import KERNELS
from stages.targets.npu2 import KERNEL_SET
from stages.weights.constants import macros
from tests.support.aie_intrinsics import declarations

HEADERS = Path(os.environ.get("AIE_API_INCLUDE", "/nowhere"))
CLANG = next(filter(None, map(shutil.which, ("clang++-22", "clang++-21", "clang++-20", "clang++-19", "clang++"))), None)

pytestmark = [
    pytest.mark.needs("AIE_API_INCLUDE with aie_api/aie.hpp in it", (HEADERS / "aie_api/aie.hpp").exists()),
    pytest.mark.needs("clang++ 19 or later on PATH", CLANG is not None),
]

FLAGS = [
    "-std=c++20",
    "-w",
    "-ferror-limit=0",
    "-DNDEBUG",
    "-D__AIENGINE__=2",
    "-D__AIEARCH__=21",
    "-D__AIE_ARCH__=21",
    "-D__AIECC__=1",
    "-D__AIE_API_AIE_ADF_HPP__",
]

VECTORS_IN_REGISTERS = ("--target=nvptx64-nvidia-cuda", "-Xclang", "-target-cpu", "-Xclang", "sm_90")
"""A target that hands vectors of every width to functions as they are, not by address, as AIE2P does: what is left on
the stack was put there by the source."""

FEED_FORWARD = {"COLS": 2048, "INNER": 1024, "OUTS": 2048, "PAIR_CHUNKS": 128, "PARTS": 4}

VARIANTS = (
    Variant.of("add", COUNT=2048),
    Variant.of("add", COUNT=48),
    Variant.of("rms_norm", ROWS=1, COLS=2048),
    Variant.of("rope", ROWS=2, HEADS=4, HEAD_DIM=64),
    Variant.of("silu_and_mul", COUNT=2048),
    Variant.of("short_conv", COLS=256, ROWS=8, TAPS=3),
    Variant.of("short_conv", COLS=48, ROWS=1, TAPS=4),
    Variant.of("gemm", TM=64, TK=32, TN=128),
    Variant.of("gemm", TM=64, TK=32, TN=128, BFP=1),
    Variant.of("gemm", TM=8, TK=24, TN=16, BFP=1),
    Variant.of("gemm", TM=64, TK=32, TN=128, BFP=1, SWIGLU=1),
    Variant.of("gemm", TM=24, TK=64, TN=48),
    Variant.of("gemv", BLOCKED=1, ROWS=8, KC=512, COLS=2048),
    Variant.of("gemv", BLOCKED=0, ROWS=16, KC=512, COLS=2048),
    Variant.of("grouped_gemv", BITS=4, COLS=2048, FACTORS=2, GROUPS=32, LANES=32, STEPS=2),
    Variant.of("grouped_gemv", BITS=4, COLS=14336, FACTORS=2, GROUPS=56, LANES=16, STEPS=8),
    Variant.of("grouped_gemv", BITS=6, COLS=2048, FACTORS=1, GROUPS=32, LANES=32, STEPS=2),
    Variant.of("grouped_gemv", BITS=6, COLS=720, FACTORS=1, GROUPS=12, LANES=16, STEPS=2),
    Variant.of("grouped_gemv", BITS=8, COLS=2048, FACTORS=0, GROUPS=16, LANES=32, STEPS=4),
    Variant.of("grouped_gemv", BITS=8, COLS=576, FACTORS=0, GROUPS=9, LANES=16, STEPS=2),
    Variant.of("grouped_gemv", BITS=4, COLS=2048, FACTORS=2, GROUPS=32, LANES=32, NORM=1, STEPS=2, PANELS=2),
    Variant.of("grouped_gemv", BITS=8, COLS=4096, FACTORS=0, GROUPS=32, LANES=16, STEPS=4, PANELS=2),
    Variant.of("grouped_gemv", ADD=2048, BITS=4, COLS=8192, FACTORS=2, GROUPS=64, LANES=16, ROW_STEP=32, STEPS=4),
    Variant.of("grouped_gemv", BITS=6, COLS=2048, FACTORS=1, GROUPS=16, KEEP=1, LANES=32, NORM=1, STEPS=4),
    Variant.of("feed_forward", BITS=4, FACTORS=2, GROUPS=32, LANES=32, STEPS=2, DOWN_STEPS=1, **FEED_FORWARD),
    Variant.of("feed_forward", BITS=6, FACTORS=1, GROUPS=16, LANES=32, STEPS=4, DOWN_STEPS=2, **FEED_FORWARD),
    Variant.of("feed_forward", BITS=8, FACTORS=0, GROUPS=16, LANES=32, STEPS=4, DOWN_STEPS=2, **FEED_FORWARD),
    Variant.of("token_attention", HD=64, HEADS=32, KV_HEADS=8, KR=64, MEMBERS=4, QR=8),
    Variant.of("token_attention", HD=128, HEADS=9, KV_HEADS=1, KR=32, MEMBERS=9, QR=16),
    Variant.of("flash_attention", HD=64, KR=32, QR=64),
    Variant.of("flash_attention", HD=96, KR=16, QR=16),
    Variant.of("token_attention", HD=64, HEADS=32, KV_BITS=8, KV_HEADS=8, KR=64, MEMBERS=4, QR=4),
    Variant.of("token_attention", HD=128, HEADS=9, KV_BITS=8, KV_HEADS=1, KR=32, MEMBERS=9, QR=12, TOKENS=4),
    Variant.of("flash_attention", HD=64, KR=64, KV_BITS=8, QR=32),
    Variant.of("rope", ROWS=2, HEADS=4, HEAD_DIM=64, KV_BITS=8),
    Variant.of("append_v", ROWS=2, HEADS=4, HEAD_DIM=64),
)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    command = [str(CLANG), *FLAGS, f"-I{HEADERS}"]
    layer = declarations(HEADERS, command, tmp_path_factory.mktemp("layer"))
    return [*command, "-include", str(layer), f"-I{KERNELS / KERNEL_SET}", *macros()]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.object)
def test_tile_functions_compile(variant: Variant, compiler: list[str], tmp_path: Path) -> None:
    """Every call finds an overload, down to declared intrinsics, and no vector is left in memory."""
    whole, made = tmp_path / "whole.ii", tmp_path / "made.ll"
    run([*compiler, *variant.flags(), "-E", str(KERNELS / KERNEL_SET / f"{variant.stem}.cc"), "-o", str(whole)])
    options = [*VECTORS_IN_REGISTERS, "-x", "c++-cpp-output", "-std=c++20", "-w", "-O2", "-S", "-emit-llvm"]
    run([str(CLANG), *options, str(whole), "-o", str(made)])
    code = made.read_text()
    assert re.findall(r"declare .*@(_Z\d+\w+z)\(", code) == [], "intrinsics without a declaration that fits"
    # What is handed to functions without a body lies in memory here: the state of a stream, which registers hold.
    elsewhere = r'\[16 x (?:float|bfloat)\]|%"class\.aie::block_vector_input_buffer_stream"'
    assert re.findall(rf"alloca (?!{elsewhere})[^\n]*", code) == []


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if "error:" in line)
