"""C++ declarations of host kernels, derived from their signatures, and the choice between their instruction sets."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stages.kernels import Arg, Kernel, Param, kernels
from stages.targets.cpu.instruction_sets import all_sets, sets_of
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


def dispatch(called: Iterable[Kernel], among: Collection[str] | None = None) -> str:
    """Return C++ that says which instruction sets a library has, and defines each kernel that is divided.

    Such a kernel calls the one for this machine. `among`: as in `sets_of`.
    """
    sets = [name for name in all_sets() if among is None or name in among]
    bits = " | ".join(f"isa_bit(Isa::{name})" for name in sets)
    divided = [kernel for kernel in called if sets_of(kernel.source)]
    isa = ["static const Isa isa = chosen_isa();", ""] if divided else []
    choices = (_choice(kernel, sets) for kernel in divided)
    return "\n".join(['#include "isa.h"', "", f"const unsigned library_isas = {bits};", *isa, *choices])


def _choice(kernel: Kernel, sets: list[str]) -> str:
    names = [*(arg.name for arg in kernel.args), *(param.name for param in kernel.scalars), "worker"]
    call = f"({', '.join(names)})"
    own = sets_of(kernel.source, sets)
    declared = [f"KERNEL void {kernel.name}_{name}({parameters(kernel)});" for name in own]
    # A set that has no object of its own has the code of the next one.
    worse = {name: next(s for s in sets[i:] if s in own) for i, name in enumerate(sets)}
    cases = [f"  case Isa::{name}: return {kernel.name}_{worse[name]}{call};" for name in sets]
    refused = "  default: __builtin_trap();"  # `isa_name` says so before anything is called
    head = f"void {kernel.name}({parameters(kernel)}) {{"
    return "\n".join([*declared, head, "  switch (isa) {", *cases, refused, "  }", "}", ""])
