"""Objects as Peano writes them, for what reads them: ELF with the frames of functions in `.stack_sizes`."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from stages.targets.cpu.toolchain import need_host_compiler

_FUNCTION = """
    .{binding} {name}
    .type {name}, @function
{name}:
    .zero 16
    .size {name}, 16
"""
_FRAME = """
    .section .stack_sizes, "o", @progbits, .text
    .quad {name}
    .uleb128 {bytes}
    .text
"""


def stack_object(frames: Mapping[str, int | None]) -> bytes:
    """An object with these functions and their frames in bytes; None: a function without an entry. Names that begin
    with an underscore are not exported."""
    text = ""
    for name, size in frames.items():
        text += _FUNCTION.format(name=name, binding="local" if name.startswith("_") else "globl")
        text += "" if size is None else _FRAME.format(name=name, bytes=size)
    with tempfile.TemporaryDirectory() as work:
        source, made = Path(work) / "made.s", Path(work) / "made.o"
        source.write_text(f'    .section .note.GNU-stack,"",@progbits\n    .text\n{text}')
        subprocess.run([*need_host_compiler(), "-c", source, "-o", made], check=True)
        return made.read_bytes()


PEANO_OBJECT = stack_object({"tile": 64})
