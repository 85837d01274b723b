"""C++ declarations of host kernels, derived from their signatures."""

from __future__ import annotations

from collections.abc import Iterable

from stages.kernels import Arg, Kernel, Param, kernels
from stages.weights.dtypes import DTYPES
from stages.weights.formats import formats

_SCALARS = {"int64": "int64_t", "float": "float"}


def prototypes(declared: Iterable[Kernel], isa: str = "") -> str:
    """Return C++ that declares kernels and the types that they take.

    Generated code begins with it. A kernel's own source is compiled after it (`-include`), so that a definition whose
    types are not those of the signature does not compile; in the object for an instruction set its symbol gets the
    set's name.
    """
    return "\n".join(['#include "kernel.h"', "", *(_prototype(kernel, isa) for kernel in declared), ""])


def tensor_type(arg: Arg) -> str:
    """C++ type of a pointer to the elements as they are stored."""
    return f"{'' if arg.written else 'const '}{DTYPES[formats()[arg.format].dtype].c} *"


def scalar_type(param: Param) -> str:
    return _SCALARS[param.kind]


def parameters(kernel: Kernel) -> str:
    """Return the parameters of the C++ function, as a declaration has them."""
    tensors = (f"{tensor_type(arg)}{arg.name}" for arg in kernel.args)
    scalars = (f"{scalar_type(param)} {param.name}" for param in kernel.scalars)
    return ", ".join([*tensors, *scalars, "Worker &worker"])


def _prototype(kernel: Kernel, isa: str) -> str:
    symbol = f' asm("{kernel.name}_{isa}")' if isa else ""
    return f"KERNEL void {kernel.name}({parameters(kernel)}){symbol};"


def prototypes_of(stem: str, isa: str = "") -> str:
    """Return declarations of the kernels that a source must define. `isa`: as in `prototypes`."""
    return prototypes((kernel for kernel in kernels().values() if kernel.source == stem and kernel.host), isa)
