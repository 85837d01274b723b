"""Objects as Peano writes them, for what reads them: ELF with the frames of functions in `.stack_sizes`."""

from __future__ import annotations

import struct
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from elftools.elf.constants import SH_FLAGS

from stages.targets.cpu.toolchain import need_host_compiler
from stages.targets.npu2.audit import OWN_MEMORY

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


def stack_object(frames: Mapping[str, int | None], data: str = "") -> bytes:
    """An object with these functions and their frames in bytes; None: a function without an entry. Names that begin
    with an underscore are not exported. `data`: further lines for the assembler."""
    text = ""
    for name, size in frames.items():
        text += _FUNCTION.format(name=name, binding="local" if name.startswith("_") else "globl")
        text += "" if size is None else _FRAME.format(name=name, bytes=size)
    with tempfile.TemporaryDirectory() as work:
        source, made = Path(work) / "made.s", Path(work) / "made.o"
        source.write_text(f'    .section .note.GNU-stack,"",@progbits\n    .text\n{text}\n{data}\n')
        subprocess.run([*need_host_compiler(), "-c", source, "-o", made], check=True)
        return made.read_bytes()


def core_elf(code: int = 64, data: tuple[int, int] = (0, 0)) -> bytes:
    """A linked core: a 32-bit ELF with a section of so many bytes of code, and one of data (place in L1, bytes)."""
    place, size = data
    loaded, names = SH_FLAGS.SHF_ALLOC, b"\0.text\0.data\0.shstrtab\0"
    rows = [
        (0,) * 10,
        (1, 1, loaded | SH_FLAGS.SHF_EXECINSTR, 0, 0, code, 0, 0, 16, 0),
        (7, 1, loaded, OWN_MEMORY + place, 0, size, 0, 0, 64, 0),
        (13, 3, 0, 0, 52, len(names), 0, 0, 1, 0),
    ]
    header = struct.pack("<16sHHIIIIIHHHHHH", b"\x7fELF\1\1\1", 2, 264, 1, 0, 0, 52 + len(names), 0, 52, 0, 0, 40, 4, 3)
    return header + names + b"".join(struct.pack("<10I", *row) for row in rows)


PEANO_OBJECT = stack_object({"tile": 64})
