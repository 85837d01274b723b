"""The table of kernels: one Python module each, with signature, numpy reference, tiling, AIR program and cost.

A kernel is known by name to every target; `kernel_src/<set>/<source>.cc` implements it, where a set is what a target's
processors run: `cpu` or `aie2p`. Every module of this package that has `KERNELS` is in the table: to add a kernel is to
add a module. The modules load no MLIR before a program is built (`stages.air`), because a build that is up to date
needs their signatures and nothing else.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from llama_npu2.dtypes import DTYPES
from stages.air import limits

if TYPE_CHECKING:
    from stages.air import AirModule

HOST_SET = "cpu"
"""The kernel set of host programs, which every target has some of."""

BF16, F32 = (DTYPES[name].itemsize for name in ("bf16", "f32"))
"""Bytes of an element."""

KV_FORMATS: Mapping[str, str] = {"bf16": "bf16", "int8": "int8_rows"}
"""What `kv=` says -> the format of a KV cache in panels, for which there are kernels."""

Sizes = Mapping[str, Any]
"""Values of a launch's scalars by name."""


@dataclass(frozen=True)
class Cost:
    """What one call of a tile function does on its core.

    `macs`: multiply-accumulates of the matrix unit, what feeds and drains it included, in a `mode`: "bf16" as products
    of elements, "bf16_bfp16" through block floating point (see `stages.estimate.constants`). `vectors`: other vector
    operations: an operation of the AIE API on at most 64 lanes is one, so is a load or store of 64 bytes; what the API
    makes of several is those; constants, and taking vectors apart, are none. `scheduled`: those of long loops over
    values that wait for no other, which the compiler overlaps. `share`: of the calls; the others return at once.
    """

    macs: int = 0
    mode: str = "bf16"
    vectors: int = 0
    scheduled: int = 0
    share: float = 1.0


def lanes(length: int, widest: int = limits.VECTOR) -> int:
    """Of the vectors that a tile function takes so many values in: as `lanes_for` in kernel_src/aie2p/tile.h."""
    return widest if length % widest == 0 or widest == 16 else lanes(length, widest // 2)


class Tiling(Protocol):
    """How a launch is cut for the array. `str()` of it goes beside the module, for people."""

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the whole launch, those on padding included."""

    @property
    def costs(self) -> Mapping[str, Cost]:
        """Of one call, by tile function."""


@dataclass(frozen=True)
class Arg:
    """A tensor argument. `layouts`: kernel set -> how a tensor's bytes are arranged for it, plain where none is named
    (see `stages.weights.formats`)."""

    name: str
    format: str = "bf16"
    written: bool = False
    layouts: Mapping[str, str] = field(default_factory=dict, hash=False)
    matrix: bool = False
    """Whether it is a weight that other formats can hold (`format_kernel`)."""

    def layout(self, kernel_set: str) -> str:
        return self.layouts.get(kernel_set, "plain")


@dataclass(frozen=True)
class Param:
    """A scalar parameter; `kind`: int64 or float."""

    name: str
    kind: str = "int64"


class KernelName(str):
    """The name of a kernel as C++ has it, and the two things that it is made of."""

    operation: str
    """The name of the kernel that does the same with weights, or a KV cache, in bf16."""
    stored: str
    """The format of its weights or its KV cache."""

    def __new__(cls, operation: str, stored: str = "bf16") -> KernelName:
        name = super().__new__(cls, operation if stored == "bf16" else f"{stored}_{operation}")
        name.operation, name.stored = operation, stored
        return name


@dataclass(frozen=True)
class Kernel:
    """Tensor arguments in order, then scalar parameters in order; both as the C++ function takes them.

    `source` is the stem of the C++ file that defines it (one file may define several), `tile_source` of that with its
    tile functions where it is another. `reference` is numpy. `attends`: it is attention, by `heads` heads of
    `head_dim`. `derived`: whole numbers that the C++ function takes behind the parameters, and that follow from them:
    of a layout whose cut depends on a tensor's size. `tiling(sizes)` cuts a launch for the array and refuses with
    UserError what cannot be cut; `program(tiling)` is its AIR program, with the arguments' names. A kernel without them
    runs on the host only; one that is not `host`, on the array only.
    """

    name: str
    args: tuple[Arg, ...]
    params: tuple[Param, ...]
    source: str
    reference: Callable[..., Any] = field(compare=False)
    attends: bool = False
    derived: Mapping[str, Callable[[Sizes], int]] = field(default_factory=dict, compare=False)
    host: bool = True
    tile_source: str = ""
    tiling: Callable[[Sizes], Tiling] | None = field(default=None, compare=False)
    program: Callable[[Any], AirModule] | None = field(default=None, compare=False)

    @property
    def operation(self) -> str:
        """What it computes, whatever the format: the name of the kernel for bf16."""
        return self.name.operation if isinstance(self.name, KernelName) else self.name

    @property
    def on_array(self) -> str:
        """Stem of the C++ file with its tile functions."""
        return self.tile_source or self.source

    @property
    def scalars(self) -> tuple[Param, ...]:
        """What the C++ function takes behind its tensors."""
        return (*self.params, *map(Param, self.derived))

    def arg(self, name: str) -> Arg:
        return next(arg for arg in self.args if arg.name == name)


def format_kernel(kernel: str, stored: str) -> KernelName:
    """Name of the kernel that does what a kernel of bf16 weights, or of a KV cache in bf16, does with others."""
    return KernelName(kernel, stored)


def matrix(name: str) -> Arg:
    """A weight matrix in the layouts that the products of both kernel sets read."""
    return Arg(name, layouts={"cpu": "panels", "aie2p": "blocks"}, matrix=True)


def signature(
    name: str,
    reads: tuple[Arg | str, ...],
    params: str,
    reference: Callable[..., Any],
    *,
    writes: tuple[Arg | str, ...] = ("out",),
    source: str = "",
    **device: Any,
) -> Kernel:
    """A kernel that reads and then writes tensors (bf16 if just named); `params`: names, `:float` behind what is not
    a whole number. `device`: `attends`, `derived`, `tile_source`, `tiling`, `program`, `host`."""
    inputs = [Arg(arg) if isinstance(arg, str) else arg for arg in reads]
    outputs = [Arg(arg, written=True) if isinstance(arg, str) else arg for arg in writes]
    scalars = (Param(p, kind or "int64") for p, _, kind in (word.partition(":") for word in params.split()))
    return Kernel(name, (*inputs, *outputs), tuple(scalars), source or name, reference, **device)


@functools.cache
def kernels() -> dict[str, Kernel]:
    """Every kernel by name."""
    found: dict[str, Kernel] = {}
    for entry in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        for kernel in getattr(importlib.import_module(f"{__name__}.{entry}"), "KERNELS", ()):
            if found.setdefault(kernel.name, kernel) is not kernel:
                raise TypeError(f"two kernels are called {kernel.name}")
    return found
