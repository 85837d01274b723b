"""Compiles the cpu kernels into a shared object and calls them, with every tensor next to a guard page."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np

SOURCES = Path(__file__).parents[1] / "kernel_src" / "cpu"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti"]
BF16 = ml_dtypes.bfloat16
U = 2.0**-8  # unit roundoff of bf16
U32 = 2.0**-24  # unit roundoff of f32

# kernel: its tensors (t) and scalars (i: int64, f: float) in the order of its arguments.
SIGNATURES = {
    "rms_norm": "tttiif",
    "gemm": "tttiii",
    "gemm_add": "ttttiii",
    "gemm_silu": "ttttiii",
    "gemv": "tttii",
    "gemv_f32": "tttii",
    "gemv_rows_f32": "tttii",
    "gemv_add": "ttttii",
    "gemv_silu": "ttttii",
    "rope": "tttiiii",
    "silu_and_mul": "tttii",
    "add": "tttii",
    "append_kv_panels": "ttttiiii",
    "flash_attention_panels": "ttttiiiii",
    "decode_attention_panels": "ttttiiii",
    "decode_attention_kv": "tttiiii",
    "append_kv": "tttiii",
    "embed": "tttiii",
    "embed_rows": "tttiii",
}


def glue() -> str:
    """An entry per kernel that takes every argument, scalars too, from its slots."""
    lines = [
        '#include "kernels.h"',
        "#include <cstring>",
        "struct Any {",
        "    void *bits;",
        "    template <class T> operator T *() const { return static_cast<T *>(bits); }",
        "    operator int64_t() const { return reinterpret_cast<int64_t>(bits); }",
        "    operator float() const { float f; memcpy(&f, &bits, 4); return f; }",
        "};",
    ]
    for name, kinds in SIGNATURES.items():
        types = {"i": "static_cast<int64_t>", "f": "static_cast<float>", "t": ""}
        arguments = ", ".join(f"{types[kind]}(Any{{s[{i}]}})" for i, kind in enumerate(kinds))
        lines.append(
            f'extern "C" void entry_{name}(void *const *s, const Dims *, Worker *w) {{ ::{name}({arguments}, *w); }}'
        )
    lines.append(
        'extern "C" void entry_nothing(void *const *, const Dims *, Worker *w) { w->barrier(); }\n'
        "// Every worker adds what it was handed to the counts of the indices.\n"
        'extern "C" void entry_count(void *const *s, const Dims *, Worker *w) {\n'
        "    Chunks chunks(*w, static_cast<int64_t>(Any{s[1]}), static_cast<int64_t>(Any{s[2]}));\n"
        "    for (int64_t i, end; chunks.next(i, end);)\n"
        "        for (; i < end; i++) __atomic_fetch_add(static_cast<int32_t *>(s[0]) + i, 1, __ATOMIC_SEQ_CST);\n"
        "}\n"
        "// The first worker comes late to what is behind it.\n"
        'extern "C" void entry_nap(void *const *, const Dims *, Worker *w) { if (w->thread == 0) usleep(50000); }\n'
        "// All workers but the first stay away until it has passed a barrier, or for ten seconds.\n"
        'extern "C" void entry_late(void *const *s, const Dims *, Worker *w) {\n'
        "    volatile int32_t *passed = static_cast<int32_t *>(s[0]), *seen = passed + 1, *work = passed + 2;\n"
        "    for (int i = 0; w->thread != 0 && i < 10000 && !(*seen = *passed); i++) usleep(1000);\n"
        "    {\n"
        "        Chunks chunks(*w, 100, 1);\n"
        "        for (int64_t i, end; chunks.next(i, end);) ++*work;\n"
        "    }\n"
        "    w->barrier();\n"
        "    if (w->thread == 0) *passed = 1;\n"
        "}\n"
    )
    return "\n".join(lines)


def build(directory: Path) -> Path:
    """One shared object with all kernels, the team and the glue."""
    (directory / "glue.cc").write_text(glue())
    compiler = os.environ.get("CXX", "g++").split()
    jobs = []
    for source in [*sorted(SOURCES.glob("*.cc")), directory / "glue.cc"]:
        out = directory / f"{source.stem}.o"
        command = [*compiler, *FLAGS, "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", "-c", str(source), "-o", str(out)]
        jobs.append((out, subprocess.Popen(command)))
    for out, job in jobs:
        assert job.wait() == 0, f"{out.name} does not compile"
    library = directory / "kernels.so"
    subprocess.run([*compiler, "-shared", "-o", str(library), *(str(out) for out, _ in jobs), "-lpthread"], check=True)
    return library


class Dims(ctypes.Structure):
    _fields_ = [("seq", ctypes.c_int64), ("pos", ctypes.c_int64)]


class Call(ctypes.Structure):
    _fields_ = [("entry", ctypes.c_void_p), ("slots", ctypes.POINTER(ctypes.c_void_p))]


class Kernels:
    """The kernels in one instruction set. It is chosen when the object is loaded, so each loads a copy."""

    def __init__(self, library: Path, isa: str, threads: int = 2):
        copy = library.with_name(f"kernels-{isa}.so")
        if not copy.exists():
            shutil.copy(library, copy)
        before = os.environ.get("LLAMA_NPU2_ISA")
        os.environ["LLAMA_NPU2_ISA"] = isa
        self.lib = ctypes.CDLL(str(copy))
        self.lib.isa_name.restype = ctypes.c_char_p
        self.isa = self.lib.isa_name().decode()
        if before is None:
            del os.environ["LLAMA_NPU2_ISA"]
        else:
            os.environ["LLAMA_NPU2_ISA"] = before
        self.lib.team_create.restype = ctypes.c_void_p
        self.lib.team_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(Call), ctypes.c_int64, ctypes.POINTER(Dims)]
        self.lib.team_destroy.argtypes = self.lib.team_threads.argtypes = [ctypes.c_void_p]
        self.team = self.lib.team_create(threads)

    def threads(self) -> int:
        return self.lib.team_threads(self.team)

    def close(self) -> None:
        self.lib.team_destroy(self.team)

    def call(self, name: str, *arguments) -> Call:
        """A call for `run`; keeps nothing alive but the slots."""
        kinds = SIGNATURES.get(name, "tii")
        slots = (ctypes.c_void_p * max(1, len(arguments)))()
        for i, (kind, value) in enumerate(zip(kinds, arguments, strict=False)):
            if kind == "t":
                slots[i] = value.ctypes.data
            elif kind == "i":
                slots[i] = ctypes.c_void_p(int(value)).value
            else:
                slots[i] = int(np.float32(value).view(np.uint32))
        return Call(ctypes.cast(getattr(self.lib, f"entry_{name}"), ctypes.c_void_p), slots)

    def run(self, *calls: Call) -> None:
        array = (Call * len(calls))(*calls)
        self.lib.team_run(self.team, array, len(calls), ctypes.byref(Dims(0, 0)))

    def __call__(self, name: str, *arguments) -> None:
        self.run(self.call(name, *arguments))


_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy whose last byte is the last one before a page that must not be touched."""
    page = mmap.PAGESIZE
    size = (array.nbytes + page - 1) // page * page
    mapping = mmap.mmap(-1, size + page)
    whole = np.frombuffer(mapping, np.uint8)
    assert _mprotect(whole.ctypes.data + size, page, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0) == 0
    copy = whole[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def output(shape, dtype=BF16) -> np.ndarray:
    """A guarded tensor that is full of NaN, so that what is not written shows."""
    return guarded(np.full(shape, np.nan, dtype))


def panels(weight: np.ndarray) -> np.ndarray:
    """[N][K] to [N/16][K/2][16][2], padded with zeros: the layout of panels.h."""
    n, k = weight.shape
    padded = np.zeros(((n + 15) // 16 * 16, (k + 1) // 2 * 2), weight.dtype)
    padded[:n, :k] = weight
    return padded.reshape(len(padded) // 16, 16, -1, 2).transpose(0, 2, 1, 3).copy()
