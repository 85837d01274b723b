"""Finds objects that keep the state of a load FIFO on the stack.

Streams of blocks in block floating point come through a FIFO of the core, whose state fills two registers (`lfl` and
`lfh`). Where registers run out, Peano stores them to the stack, at places that it cannot encode or that are wrong
(llvm-aie #1090, #1209, #1276): the object does not compile, or computes garbage.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from llama_npu2.errors import UserError

FEWER = "-DFEWER_ACCUMULATORS=1"
"""Makes a source that reads such streams hold fewer sums at a time, so that registers do not run out."""

_NOT_ENCODED = "is not a multiple of 64"
"""What Peano says of a place on the stack that it cannot encode."""

_SPILL = re.compile(r"\b(vst|vld[ab])\S*\s+lf[lh]\d+,\s*\[\s*sp\b", re.IGNORECASE)
"""An instruction that moves the state of a FIFO to the stack or back."""


class _SpillError(UserError):
    """An object keeps the state of a FIFO on the stack."""


def is_spill(error: UserError) -> bool:
    """Return whether an object was refused, by Peano or by `check_fifos`, because a FIFO's state is on the stack."""
    return isinstance(error, _SpillError) or _NOT_ENCODED in str(error)


def check_fifos(path: Path, name: str, objdump: Path) -> None:
    """Raise UserError if the object `name` keeps the state of a FIFO on the stack.

    Args:
        objdump: Peano's `llvm-objdump`. Without it nothing is checked.
    """
    if not objdump.exists():
        return
    run = subprocess.run([objdump, "--disassemble", path], capture_output=True, text=True)
    if run.returncode:
        raise UserError(f"{name}: {objdump.name} cannot read it: {run.stderr.strip()[:200]}")
    if _SPILL.search(run.stdout):
        raise _SpillError(
            f"{name}: Peano keeps the state of a FIFO on the stack, which it may do wrongly (llvm-aie #1090): "
            "choose another Peano, or npu.matmul=bf16"
        )
