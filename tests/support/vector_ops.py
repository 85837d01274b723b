"""Counts the vector operations of a tile function: the stand-in for the AIE API with a counter in every operation.

The rule is that of `stages.kernels.Cost`.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.air.externs import Variant
from stages.engine.places import KERNELS
from stages.weights.constants import macros

_MEMORY = re.compile(r"(sim::require_aligned\((\w+), Elems \* sizeof\(T\)\);)")
_ONE = (
    "add",
    "sub",
    "max",
    "min",
    "mac",
    "msc",
    "lt",
    "select",
    "transpose",
    "upshift",
    "bit_and",
    "bit_or",
    "filter_even",
    "filter_odd",
    "shuffle_down",
)
# What the API makes of others (detail/aie2p/elementary.hpp): of whole numbers of 32 bits in two halves.
_SEVERAL = {"to_fixed": "sizeof(TR) > 2 ? 14 : 3", "to_float": "sizeof(T) > 2 ? 9 : 3"}
_ONE_OF_CLASS = ("from_vector", "to_vector", "insert", "unpack")


def counting_header() -> str:
    """The stand-in's header, its operations counted in `aie::sim::vectors`."""
    text = (KERNELS / "sim/aie_api/aie.hpp").read_text()
    text = text.replace("namespace sim {", "namespace sim {\ninline thread_local unsigned long vectors = 0;", 1)
    text, loads = _MEMORY.subn(r"\1 sim::vectors += (Elems * sizeof(T) + 63) / 64;", text)
    assert loads == 2, "load_v and store_v"
    for name in _ONE:
        text, found = _count(text, rf"^(?:vector|accum|mask)<[^;{{}}]*> {name}\(", "sim::vectors += 1;")
        assert found, name
    for name, number in _SEVERAL.items():
        text, found = _count(text, rf"^vector<[^;{{}}]*> {name}\(", f"sim::vectors += {number};")
        assert found, name
    for name in _ONE_OF_CLASS:
        text, found = _count(text, rf"^    (?:void|auto|vector|vector<[^;{{}}]*>) &?{name}\(", "sim::vectors += 1;")
        assert found, name
    text, found = _count(text, r"^std::pair<[^;{}]*> interleave_unzip\(", "sim::vectors += 2;")
    assert found == 1
    text, found = _count(text, r"^T reduce_(?:add|max)\(", "for (unsigned n = Elems; n > 1; n /= 2) sim::vectors += 2;")
    assert found == 2
    text, found = _count(text, r"^    mmul &mac\(const vector<int16", "sim::vectors += 1;")
    assert found == 1, "products of whole numbers are made among other operations"
    return text


def _count(text: str, start: str, statement: str) -> tuple[str, int]:
    return re.subn(rf"({start}[^;{{}}]*\{{)", rf"\1 {statement}", text, flags=re.MULTILINE)


def count(variant: Variant, function: str, arguments: Sequence[np.ndarray | int | float], work: Path) -> int:
    """Vector operations of one call. `arguments`: arrays that hold the buffers, whole numbers, floats."""
    library = work / f"{variant.stem}_{variant.suffix}.so"
    if not library.exists():
        (work / "aie_api").mkdir(exist_ok=True)
        (work / "aie_api/aie.hpp").write_text(counting_header())
        source = work / f"{variant.stem}.cc"
        counter = (
            'extern "C" unsigned long vectors() { const auto n = aie::sim::vectors; aie::sim::vectors = 0; return n; }'
        )
        source.write_text(f'#include "{KERNELS / "aie2p" / variant.stem}.cc"\n{counter}\n')
        flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-I{work}", f"-I{KERNELS / 'aie2p'}"]
        command = ["g++", *flags, *macros(), *variant.flags(), str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    loaded = ctypes.CDLL(str(library))
    passed = [_argument(value) for value in arguments]
    loaded.vectors()
    getattr(loaded, variant.symbol(function))(*passed)
    return int(loaded.vectors())


def _argument(value: np.ndarray | int | float) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)


def buffer(size: int) -> np.ndarray:
    """`size` bytes of ones as bf16, aligned as a core needs them."""
    whole = np.empty(size + 64, np.uint8)
    start = -whole.ctypes.data % 64
    part = whole[start : start + size]
    part.view(np.uint16)[:] = 0x3F80
    return part
