"""C++ declarations of host kernels, derived from their signatures, and the choice between their instruction sets."""

from __future__ import annotations

from collections.abc import Iterable

from stages.kernels import Arg, Kernel, Param, kernels
from stages.targets.cpu.instruction_sets import LANES, sets_of
from stages.weights.formats import formats

_SCALARS = {"int64": "int64_t ", "float": "float ", "blocks": "const int32_t *"}
_ELEMENTS = {"bf16": "bf16", "f32": "float", "i32": "int32_t", "i8": "int8_t"}
"""C++ type of each dtype's elements."""


def prototypes(declared: Iterable[Kernel], isa: str = "") -> str:
    """Return C++ that declares kernels and the types that they take.

    Generated code begins with it. A kernel's own source is compiled after it (`-include`), so that a definition whose
    types are not those of the signature does not compile; in the object for an instruction set its symbol gets the
    set's name.
    """
    return "\n".join(['#include "kernel.h"', "", *(_prototype(kernel, isa) for kernel in declared), ""])


def tensor_type(arg: Arg) -> str:
    """C++ type of a pointer to the elements as they are stored."""
    return f"{'' if arg.written else 'const '}{_ELEMENTS[formats()[arg.format].dtype]} *"


def scalar_type(param: Param) -> str:
    return _SCALARS[param.kind]


def parameters(kernel: Kernel) -> str:
    """Return the parameters of the C++ function, as a declaration has them."""
    tensors = (f"{tensor_type(arg)}{arg.name}" for arg in kernel.args)
    scalars = (f"{scalar_type(param)}{param.name}" for param in kernel.scalars)
    return ", ".join([*tensors, *scalars, "Worker &worker"])


def _prototype(kernel: Kernel, isa: str) -> str:
    symbol = f' asm("{kernel.name}_{isa}")' if isa else ""
    return f"KERNEL void {kernel.name}({parameters(kernel)}){symbol};"


def prototypes_of(stem: str, isa: str = "") -> str:
    """Return declarations of the kernels that a source must define. `isa`: as in `prototypes`."""
    return prototypes((kernel for kernel in kernels().values() if kernel.source == stem and kernel.host), isa)


def dispatch(called: Iterable[Kernel]) -> str:
    """Return C++ that defines each kernel that is divided: it calls the one for this machine."""
    divided = [(kernel, sets) for kernel in called if (sets := sets_of(kernel.source))]
    if not divided:
        return ""
    return "\n".join(
        ['#include "isa.h"', "", "static const Isa isa = chosen_isa();", "", *map(_choice, *zip(*divided, strict=True))]
    )


def _choice(kernel: Kernel, sets: tuple[str, ...]) -> str:
    names = [*(arg.name for arg in kernel.args), *(param.name for param in kernel.scalars), "worker"]
    call = f"({', '.join(names)})"
    declared = [f"KERNEL void {kernel.name}_{name}({parameters(kernel)});" for name in sets]
    # A set that has no object of its own has the code of the next one.
    worse = {name: next(s for s in list(LANES)[i:] if s in sets) for i, name in enumerate(LANES)}
    cases = [f"  case Isa::{name}: return {kernel.name}_{worse[name]}{call};" for name in LANES]
    return "\n".join(
        [*declared, f"void {kernel.name}({parameters(kernel)}) {{", "  switch (isa) {", *cases, "  }", "}", ""]
    )
