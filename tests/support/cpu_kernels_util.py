"""Compiles the cpu kernels into a shared object and calls them, with every tensor next to a guard page."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from filelock import FileLock

from stages.engine.objects import compile_object, source_file
from stages.engine.places import KERNELS as SOURCES
from stages.kernels import Kernel, format_kernel
from stages.kernels import kernels as all_kernels
from stages.kernels.flash_attention import ALL
from stages.kernels.grouped import GROUPED
from stages.targets.cpu.instruction_sets import LANES, objects_of, sets_of_machine, sets_used_here
from stages.targets.cpu.objects import host_object
from stages.targets.cpu.prototypes import dispatch, prototypes, prototypes_of, scalar_type, tensor_type
from stages.targets.cpu.toolchain import FLAGS, INCLUDE, need_host_compiler
from stages.weights.format import Format
from stages.weights.formats import formats

CPU = SOURCES / "cpu"
BF16 = ml_dtypes.bfloat16
U = 2.0**-8  # unit roundoff of bf16
U32 = 2.0**-24  # unit roundoff of f32

HOST = {name: kernel for name, kernel in all_kernels().items() if kernel.host}
PLAIN_ISA = "neon" if platform.machine() == "aarch64" else "portable"

_USUAL_SETS = {
    "int4": ("amx", "avx512bf16"),
    "int6": ("avx512bf16",),
    "int8": ("amx", "avx512bf16"),
    "w8a8": ("amx",),
    "int4_f32": ("portable",),
    "int8_f32": ("portable",),
    "int8_f32_16": ("portable",),
    "mxfp4": ("avx2",),
    "int4_f32_a8": ("avx512bf16",),
    "int8_f32_16_moe": ("avx2",),
    "int8_a8_moe": ("portable",),
    "moe": ("avx512bf16",),
    "route": ("avx512bf16", "portable"),
    "attention_kv": ("amx", "avx512bf16"),
    "int8_rows_attention": ("amx", "avx512bf16", "avx2"),
    "int8_rows_attention_kv": ("amx", "avx2"),
    "int4_lanes": ("avx512bf16",),
    "int6_lanes": ("avx2",),
    "int8_lanes": ("portable",),
}
"""Source -> the sets in which plain pytest tests its kernels, of those that take long to compile. Objects with tiles or
vectors of 16 take longest: in those sets it tests what builds in other tests compile as well. All kinds of kernels, and
all formats, are tested in some set, and all sets with some kernel of each kind."""
_APART = {*_USUAL_SETS, *(each.source for each in HOST.values() if each.stored in (*(f.name for f in GROUPED), "w8a8"))}
"""The sources that take most of the time that compiling takes. Each is compiled when a test calls its kernels."""

# Entries for tests of the team, and what they take.
_TEAM_ENTRIES = {
    **{"nothing": (), "nap": (), "count": ("tensor", "int64", "int64"), "late": ("tensor",)},
    **{"shares": ("tensor", "int64"), "age": ("int64",)},
}
_TEAM_SOURCE = """
extern "C" void entry_nothing(void *const *, const Dims *, Worker *w) { w->barrier(); }

// Every worker adds what it was handed to the counts of the indices.
extern "C" void entry_count(void *const *s, const Dims *, Worker *w) {
    w->barrier();
    Chunks chunks(*w, take<int64_t>(s[1]), take<int64_t>(s[2]));
    for (int64_t i, end; chunks.next(i, end);)
        for (; i < end; i++) __atomic_fetch_add(take<int32_t *>(s[0]) + i, 1, __ATOMIC_SEQ_CST);
}

// Every worker writes its number to what it was handed first, and waits until all have done so, or for ten seconds.
extern "C" void entry_shares(void *const *s, const Dims *, Worker *w) {
    w->barrier();
    const int64_t each = take<int64_t>(s[1]);
    int32_t *owners = take<int32_t *>(s[0]), *arrived = owners + w->threads * each;
    Chunks chunks(*w, w->threads * each, each);
    int64_t i, end;
    if (chunks.next(i, end))
        for (; i < end; i++) owners[i] = w->thread;
    __atomic_fetch_add(arrived, 1, __ATOMIC_SEQ_CST);
    for (int n = 0; n < 10000 && __atomic_load_n(arrived, __ATOMIC_SEQ_CST) < w->threads; n++) usleep(1000);
    while (chunks.next(i, end))
        for (; i < end; i++) owners[i] = -2;
}

// So many loops pass in which there is nothing to do.
extern "C" void entry_age(void *const *s, const Dims *, Worker *w) {
    w->loop += static_cast<uint32_t>(take<int64_t>(s[0]));
}

// The first worker comes late to what is behind it.
extern "C" void entry_nap(void *const *, const Dims *, Worker *w) { if (w->thread == 0) usleep(50000); }

// All workers but the first stay away until it has passed a barrier, or for ten seconds.
extern "C" void entry_late(void *const *s, const Dims *, Worker *w) {
    w->barrier();
    volatile int32_t *passed = take<int32_t *>(s[0]), *seen = passed + 1, *work = passed + 2;
    for (int i = 0; w->thread != 0 && i < 10000 && !(*seen = *passed); i++) usleep(1000);
    {
        Chunks chunks(*w, 100, 1);
        for (int64_t i, end; chunks.next(i, end);) ++*work;
    }
    w->barrier();
    if (w->thread == 0) *passed = 1;
}
"""


def format_of(name: str) -> Format:
    """Return the format of the weights of products whose names begin so: `int4_a8` for `int4_a8_gemm`."""
    return formats()[HOST[f"{name}_gemm"].stored]


def machine_isas() -> list[str]:
    """Instruction sets of the kernels that this machine has, best first."""
    return [*(isa for isa in sets_of_machine() if isa != "portable"), PLAIN_ISA]


def lacking_isas() -> frozenset[str]:
    """Return the instruction sets that kernels have objects for and this machine does not have."""
    return frozenset(LANES) - {*sets_of_machine()}


def lacking_objects() -> list[str]:
    """Return the names of the kernels' objects for the sets that this machine lacks."""
    isas = lacking_isas()
    names = (name for source in {kernel.source for kernel in HOST.values()} for name in objects_of(source))
    return sorted(name for name in names if name.partition(".")[2] in isas)


def compiled(source: str, cache: Path) -> Path:
    """Return the object of that name, compiled unless the cache has it. Raises UserError if it does not compile."""
    stem, _, isa = Path(source).name.partition(".")
    return host_object(source_file(source), cache, prototypes_of(stem, isa), isa).path


def of_source(source: str) -> list[Kernel]:
    """Return the kernels of a source that is compiled apart; all kernels of the others for an empty name."""
    return [each for each in HOST.values() if (each.source if each.source in _APART else "") == source]


def glue(called: Sequence[Kernel], sets: Sequence[str]) -> str:
    """An entry per kernel that takes every argument, scalars too, from its slots."""
    take = "template <class T> T take(void *slot) { T value; memcpy(&value, &slot, sizeof value); return value; }"
    return "\n".join(["#include <cstring>", prototypes(called), dispatch(called, sets), take, *map(_entry, called)])


def _entry(kernel: Kernel) -> str:
    types = [*map(tensor_type, kernel.args), *map(scalar_type, kernel.scalars)]
    arguments = [f"take<{kind}>(s[{i}])" for i, kind in enumerate(types)]
    head = f'extern "C" void entry_{kernel.name}(void *const *s, const Dims *, Worker *w)'
    return f"{head} {{ w->barrier(); ::{kernel.name}({', '.join([*arguments, '*w'])}); }}"


class Library:
    """The kernels in shared objects, each made from objects of builds when one of the parallel workers first needs it.

    One has the team and all kernels but those of `_APART`, in every set of this machine. Each source of those has one
    for each set.
    """

    def __init__(self, shared: Path, cache: Path):
        self._shared, self._cache = shared, cache
        shared.mkdir(exist_ok=True)

    def path(self, isa: str, source: str = "") -> Path:
        """Return a shared object that is loaded for that set alone: it chooses one when it is loaded."""
        name = source or "kernels"
        made = self._shared / f"{name}-{isa}.so"
        if not made.exists():
            with FileLock(self._shared / f"{name}.lock"):
                if not made.exists():
                    self._make(made, isa, source)
        return made

    def _make(self, made: Path, isa: str, source: str) -> None:
        part = made.with_suffix(".part")
        if source:
            with in_set(isa):
                sets = sets_used_here()
            self._link(source, objects_of(source, sets), glue(of_source(source), sets), part)
        else:
            every = self._shared / "kernels.so"
            if not every.exists():
                stems = {path.stem for path in CPU.glob("*.cc")} - _APART
                objects = {name for stem in stems for name in objects_of(stem)} - {*lacking_objects()}
                self._link("kernels", sorted(objects), glue(of_source(""), sets_of_machine()) + _TEAM_SOURCE, every)
            shutil.copy(every, part)
        part.replace(made)

    def _link(self, name: str, objects: Iterable[str], entries: str, output: Path) -> None:
        source = self._shared / f"{name}.cc"
        source.write_text(entries)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = [*pool.map(partial(compiled, cache=self._cache), objects)]
        link([*made, build_object(source, source.with_suffix(".o"))], output)


@contextmanager
def in_set(isa: str) -> Iterator[None]:
    """Whatever chooses an instruction set chooses this one, if the machine has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMA_NPU2_ISA", isa)
        yield


def in_sets(names: Iterable[str], kernel: str = "gemm") -> pytest.MarkDecorator:
    """Parametrise a test of `teams` and `name`: sets of this machine, and names of a format with what follows it.

    `kernel`: one that the test calls. Compiling the kernels of all formats for all sets takes minutes, so cases are
    thorough where `_is_usual` says no.
    """
    return in_usual_sets("teams", "name", {name: [format_kernel(kernel, name)] for name in names})


def in_usual_sets(fixture: str, names: str, cases: Mapping[Any, Iterable[str]]) -> pytest.MarkDecorator:
    """Parametrise a test of a fixture that takes a set of this machine, and of `names` of one parameter or several.

    `cases`: the values of those -> the kernels that the test calls. Where plain pytest does not test one of them in a
    set, the case is thorough.
    """
    made = []
    for isa in machine_isas():
        for given, called in cases.items():
            marks = () if all(_is_usual(isa, HOST[name]) for name in called) else pytest.mark.thorough
            values = given if isinstance(given, tuple) else (given,)
            label = "-".join(str(getattr(each, "name", each)) for each in (isa, *values))
            made.append(pytest.param(isa, *values, marks=marks, id=label))
    return pytest.mark.parametrize(f"{fixture}, {names}", made, indirect=[fixture])


def _is_usual(isa: str, kernel: Kernel) -> bool:
    """Whether plain pytest tests a kernel in a set."""
    if kernel.source not in _APART:
        return True
    usual = [PLAIN_ISA if each == "portable" else each for each in _USUAL_SETS.get(kernel.source, ())]
    found = [each for each in usual if each in machine_isas()]
    return isa in (found or machine_isas()[: len(usual)])


def build_object(source: Path, output: Path, *flags: str) -> Path:
    """The object of one file that includes headers of the kernels; UserError if it does not compile."""
    compile_object([*need_host_compiler(), *FLAGS, INCLUDE, *flags], source, output, source.name)
    return output


def link(objects: Sequence[Path], library: Path) -> Path:
    command = [*need_host_compiler(), "-shared", "-o", str(library), *map(str, objects), "-lpthread"]
    subprocess.run(command, check=True)
    return library


def _kinds(kernel: Kernel) -> Sequence[str]:
    return [*("tensor" for _ in kernel.args), *(param.kind for param in kernel.scalars)]


class Dims(ctypes.Structure):
    _fields_ = [("seq", ctypes.c_int64), ("count", ctypes.c_int64), ("runs", ctypes.c_void_p)]


class Call(ctypes.Structure):
    _fields_ = [("entry", ctypes.c_void_p), ("slots", ctypes.POINTER(ctypes.c_void_p))]


class Kernels:
    """The kernels in one instruction set."""

    def __init__(self, library: Library, isa: str, threads: int = 2):
        self._library, self._asked = library, isa
        self._apart: dict[str, ctypes.CDLL] = {}
        self.lib = self._loaded("")
        self.lib.isa_name.restype = ctypes.c_char_p
        with in_set(isa):
            self.isa = self.lib.isa_name().decode()
        self.lib.team_create.restype = ctypes.c_void_p
        self.lib.team_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(Call), ctypes.c_int64, ctypes.POINTER(Dims)]
        self.lib.team_destroy.argtypes = self.lib.team_threads.argtypes = [ctypes.c_void_p]
        self.team = self.lib.team_create(threads)

    def _loaded(self, source: str) -> ctypes.CDLL:
        with in_set(self._asked):
            return ctypes.CDLL(str(self._library.path(self._asked, source)))

    def _entry(self, name: str) -> ctypes.c_void_p:
        library = self.lib
        if name in HOST and HOST[name].source in _APART:
            source = HOST[name].source
            library = self._apart.get(source) or self._apart.setdefault(source, self._loaded(source))
        return ctypes.cast(getattr(library, f"entry_{name}"), ctypes.c_void_p)

    def threads(self) -> int:
        return self.lib.team_threads(self.team)

    def close(self) -> None:
        self.lib.team_destroy(self.team)

    def call(self, name: str, *arguments) -> Call:
        """A call for `run`; keeps nothing alive but the slots."""
        kinds = _kinds(HOST[name]) if name in HOST else _TEAM_ENTRIES[name]
        arguments = _all_arguments(HOST[name], arguments) if name in HOST else arguments
        slots = (ctypes.c_void_p * max(1, len(kinds)))()
        for i, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
            if kind in ("tensor", "blocks"):
                slots[i] = value.ctypes.data
            elif kind == "int64":
                slots[i] = ctypes.c_void_p(int(value)).value
            else:
                slots[i] = int(np.float32(value).view(np.uint32))
        return Call(self._entry(name), slots)

    def run(self, *calls: Call) -> None:
        array = (Call * len(calls))(*calls)
        self.lib.team_run(self.team, array, len(calls), ctypes.byref(Dims(0, 0, None)))

    def __call__(self, name: str, *arguments) -> None:
        self.run(self.call(name, *arguments))


IN_ORDER = np.arange(1024, dtype=np.int32)
"""The table of a cache whose blocks lie in the order of their positions."""

USUAL = {"activation": 0, "offset": 0.0, "once": 0, "scale": 1.0, "sees": ALL}
"""Scalars that calls may leave out, as a Llama has them; attention's `scalar` is the size of a head."""


def _all_arguments(kernel: Kernel, arguments: Sequence[Any]) -> list[Any]:
    names = [*(arg.name for arg in kernel.args), *(param.name for param in kernel.params), *kernel.derived]
    blocks = []
    if kernel.paged:  # the table may follow the scalars
        *arguments, table = arguments if isinstance(arguments[-1], np.ndarray) else (*arguments, IN_ORDER)
        blocks = [table]
    if len(arguments) == len(names):
        return [*arguments, *blocks]
    given = iter(arguments)
    values: dict[str, Any] = {}
    for name in names:
        values[name] = values["head_dim"] if name == "scalar" else USUAL[name] if name in USUAL else next(given)
    assert next(given, None) is None, f"{kernel.name} takes {names}"
    return [*values.values(), *blocks]


class Teams:
    """Teams of several sizes in one instruction set. A call is done by each of them, with equal bits."""

    def __init__(self, library: Library, isa: str, sizes: Sequence[int]):
        self.isa = isa
        self._teams = {threads: Kernels(library, isa, threads) for threads in sizes}

    def __call__(self, name: str, *arguments) -> None:
        """Run a kernel with each team: what it writes begins with the same content, and ends with the same bytes."""
        written = [value for arg, value in zip(HOST[name].args, arguments, strict=False) if arg.written]
        before = [value.copy() for value in written]
        results: dict[int, list[bytes]] = {}
        for threads, team in self._teams.items():
            for value, content in zip(written, before, strict=True):
                value[...] = content
            team(name, *arguments)
            results[threads] = [value.tobytes() for value in written]
        first, *others = results
        odd = [threads for threads in others if results[threads] != results[first]]
        assert not odd, f"{name} in {self.isa}: teams of {odd} threads write other bits than a team of {first}"

    def close(self) -> None:
        for team in self._teams.values():
            team.close()


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
    """A weight bf16 `[N, K]` as the host's kernels read it."""
    return formats()["bf16"].pack(weight, "panels")
