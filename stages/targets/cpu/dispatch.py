"""The generated code that chooses between the instruction sets of a kernel."""

from __future__ import annotations

from collections.abc import Iterable

from stages.kernels import Kernel
from stages.targets.cpu.instruction_sets import LANES, sets_of
from stages.targets.cpu.prototypes import parameters


def dispatch(kernels: Iterable[Kernel]) -> str:
    """Return C++ that defines each kernel that is divided: it calls the one for this machine."""
    divided = [(kernel, sets) for kernel in kernels if (sets := sets_of(kernel.source))]
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
