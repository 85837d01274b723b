"""The table of kernels: one Python module each, with signature, numpy reference, tiling, AIR program and cost.

Every target knows a kernel by its name. `kernel_src/<kernel set>/<source>.cc` implements it; a kernel set is what a
target's processors run: `cpu` or `aie2p`. The table contains every module of this package that has `KERNELS`, so adding
a kernel means adding a module. The modules load MLIR (`stages.air`) only when a program is built, because a build that
is up to date needs nothing but their signatures.

Kernels for weights in other formats than bf16 have no module each: `stages.kernels.grouped` derives them, and their
names, such as `int4_gemm`, from the kernels for bf16.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol

from llama_npu2.artifact.dtypes import SIZES
from llama_npu2.artifact.plan import View
from llama_npu2.frozen import frozen
from stages.air import limits

if TYPE_CHECKING:
    from stages.air import AirModule

HOST_SET = "cpu"
"""The kernel set of host programs. Every target has some."""

BF16, F32 = SIZES["bf16"], SIZES["f32"]
"""Bytes per element."""

KV_FORMATS: Mapping[str, str] = {"bf16": "bf16", "int8": "int8_rows"}
"""Value of the variable `kv=` -> format of a KV cache in panels. There are kernels for each of these formats."""

Sizes = Mapping[str, Any]
"""A launch's scalars: name -> value."""


@frozen
class Cost:
    """Operations that one call of a tile function executes on its core."""

    macs: int = 0
    """Multiply-accumulates of the matrix unit. They include the loads and stores that feed and drain it."""
    mode: str = "bf16"
    """How the matrix unit multiplies: "bf16" as products of elements, "bf16_x_bfp16" through block floating point (the
    rates `macs_<mode>` of `stages.estimate.constants`)."""
    vectors: int = 0
    """Other vector operations. An operation of the AIE API on at most 64 lanes counts as one, and so does a load or
    store of 64 bytes. A function that the API composes of several operations counts as those. Constants and extracting
    a part of a vector count as none."""
    scheduled: int = 0
    """Vector operations in long loops over independent values, which the compiler overlaps."""
    share: float = 1.0
    """Share of the calls that do this work. The others return at once."""


def lanes(length: int, widest: int = limits.VECTOR) -> int:
    """Return the lanes per vector with which a tile function processes `length` values: the widest that divides it.

    `lanes_for` in kernel_src/aie2p/tile.h computes the same.
    """
    return widest if length % widest == 0 or widest == 16 else lanes(length, widest // 2)


class Tiling(Protocol):
    """How a launch is divided among the cores of the array. `str()` of it is stored next to the module, for people."""

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the whole launch, including those on padding."""

    @property
    def costs(self) -> Mapping[str, Cost]:
        """Tile function -> cost of one call."""


class Sliding(Tiling, Protocol):
    """How a launch is divided that sees a KV cache from the beginning of its window on."""

    @property
    def window(self) -> int:
        """Positions of the view."""

    @property
    def view(self) -> View:
        """The view of the cache."""


@frozen
class Arg:
    """A tensor argument of a kernel."""

    name: str
    format: str = "bf16"
    """Name of the format of its values (`stages.weights.formats`)."""
    written: bool = False
    """Whether the kernel writes it."""
    layouts: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Kernel set -> layout that its kernel reads. A set that is not listed reads the layout `plain`."""
    matrix: bool = False
    """Whether it is a weight matrix that may also be stored in another format (`format_kernel`)."""

    def layout(self, kernel_set: str) -> str:
        return self.layouts.get(kernel_set, "plain")


@frozen
class Param:
    """A scalar parameter of a kernel."""

    name: str
    kind: str = "int64"
    """`int64`, `float`, or `blocks`, the table of a cache's blocks."""


@frozen
class Kernel:
    """A kernel: its signature, what it computes, and how the array runs it.

    The C++ function takes the tensors, then the parameters, then the derived numbers, each in the order given here. A
    kernel without `tiling` and `program` runs on the host only.
    """

    operation: str
    """The name of what it computes, whatever the format: that of the kernel for weights, or a KV cache, in bf16."""
    args: tuple[Arg, ...]
    """Tensor arguments in order: those that it reads, then those that it writes."""
    params: tuple[Param, ...]
    """Scalar parameters in order."""
    source: str
    """Stem of the C++ file that defines it. One file may define several kernels."""
    reference: Callable[..., Any] = field(compare=False)
    """The numpy function that computes the same."""
    stored: str = "bf16"
    """The format of its weights or of its KV cache."""
    activations: str = "bf16"
    """How a product with group-wise weights takes `x`, as `activations=` says it."""
    attends: bool = False
    """Whether it is attention, with `heads` heads of `head_dim`."""
    derived: Mapping[str, Callable[[Sizes], int]] = field(default_factory=dict, compare=False)
    """Further whole numbers that the host's C++ function takes, each a function of the parameters: how a layout divides
    the tensor, where that depends on the tensor's size."""
    paged: bool = False
    """Whether the host's C++ function takes the table of a cache's blocks as its last scalar."""
    host: bool = True
    """Whether the host has this kernel. If not, it runs on the array only."""
    tile_sources: tuple[str, ...] = ()
    """Stems of the C++ files with its tile functions, if that is not `source`."""
    tiling: Callable[[Sizes], Tiling] | None = field(default=None, compare=False)
    """Divides a launch among the array's cores. Raises UserError if that is impossible."""
    sliding: Callable[[Sizes], Sliding] | None = field(default=None, compare=False)
    """Divides a launch of attention that reads just the part of a KV cache that its window sees, however long the cache
    is. Raises UserError if that is impossible."""
    program: Callable[[Any], AirModule] | None = field(default=None, compare=False)
    """Builds the AIR program of a tiling. Its arguments have the names of `args`."""

    @property
    def name(self) -> str:
        """Its name, which is also that of the host's C++ function."""
        return format_kernel(self.operation, self.stored, self.activations)

    @property
    def on_array(self) -> tuple[str, ...]:
        """Stems of the C++ files with its tile functions."""
        return self.tile_sources or (self.source,)

    @property
    def scalars(self) -> tuple[Param, ...]:
        """The scalars that the C++ function takes after its tensors."""
        return (*self.params, *map(Param, self.derived), *(Param("blocks", "blocks") for _ in range(self.paged)))

    def arg(self, name: str) -> Arg:
        return next(arg for arg in self.args if arg.name == name)


ACTIVATIONS = {"bf16": "", "int8": "_a8"}
"""How products with group-wise weights take their other operand, as `activations=` says it -> what the names of their
kernels have after the format."""


def format_kernel(operation: str, stored: str, activations: str = "bf16") -> str:
    """Return the name of the kernel that does `operation` on weights, or a KV cache, in the format `stored`.

    ("gemm", "int4") -> "int4_gemm", ("gemm", "int4", "int8") -> "int4_a8_gemm", ("gemm", "bf16") -> "gemm".
    """
    return operation if stored == "bf16" else f"{stored}{ACTIVATIONS[activations]}_{operation}"


def kernel_for(operation: str, stored: str, activations: str) -> Kernel | None:
    """Return the kernel that does `operation` on weights or a cache in the format `stored`, if there is one.

    It takes `activations` where such weights have products that do, and 16 bits elsewhere.
    """
    known = kernels()
    return known.get(format_kernel(operation, stored, activations)) or known.get(format_kernel(operation, stored))


def matrix(name: str) -> Arg:
    """Return the argument for a bf16 weight matrix in the layouts that the products of both kernel sets read."""
    return Arg(name, layouts={"cpu": "panels", "aie2p": "blocks"}, matrix=True)


def signature(
    operation: str,
    reads: tuple[Arg | str, ...],
    params: str,
    reference: Callable[..., Any],
    *,
    writes: tuple[Arg | str, ...] = ("out",),
    source: str = "",
    **fields: Any,
) -> Kernel:
    """Return a kernel.

    Args:
        reads: The tensors that it reads. A bare name means bf16 in plain layout.
        params: Names of the scalars, separated by spaces. `:float` after a name marks one that is not a whole number.
        writes: The tensors that it writes.
        source: As in `Kernel`; the operation's name if empty.
        fields: Further fields of `Kernel`: `stored`, `attends`, `paged`, `derived`, `tile_sources`, `tiling`,
            `sliding`, `program`, `host`.
    """
    inputs = [Arg(arg) if isinstance(arg, str) else arg for arg in reads]
    outputs = [Arg(arg, written=True) if isinstance(arg, str) else arg for arg in writes]
    scalars = (Param(p, kind or "int64") for p, _, kind in (word.partition(":") for word in params.split()))
    return Kernel(operation, (*inputs, *outputs), tuple(scalars), source or operation, reference, **fields)


@functools.cache
def kernels() -> dict[str, Kernel]:
    """Return the table: name -> kernel. Raise TypeError if two kernels have one name."""
    table: dict[str, Kernel] = {}
    for module in sorted(entry.name for entry in pkgutil.iter_modules(__path__)):
        for kernel in getattr(importlib.import_module(f"{__name__}.{module}"), "KERNELS", ()):
            if table.setdefault(kernel.name, kernel) is not kernel:
                raise TypeError(f"two kernels are called {kernel.name}")
    return table
