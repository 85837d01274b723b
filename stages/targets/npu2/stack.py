"""Checks the stack that tile functions need, from the frame sizes that the compiler writes into `.stack_sizes`.

A core's stack lies in L1 right before its buffers: an overflow overwrites them, and nothing on the array notices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.air.limits import CALLER_STACK_BYTES, STACK_BYTES

FLAGS = ("-fstack-size-section",)
"""Make clang write the section."""

LIMIT = STACK_BYTES - CALLER_STACK_BYTES
"""Bytes that tile functions may use."""

Place = tuple[object, int]
"""(section, address in it); (None, address) where addresses are final."""


@frozen
class Frame:
    """The stack frame of a function."""

    function: str
    bytes: int | None
    """Stack that one call takes; None if the compiler cannot know it."""
    exported: bool
    """Whether other objects call the function."""


def check_stack(path: Path, name: str) -> None:
    """Raise UserError unless `LIMIT` bytes are enough for the tile functions of the object `name`.

    The bound is the largest frame of an exported function (exported functions do not call each other) plus the frames
    of all other functions at once.
    """
    functions = frames(path, name)
    unknown = next((frame.function for frame in functions if frame.bytes is None), None)
    if unknown is not None:
        raise UserError(f"{name}: how much stack {unknown} takes is not fixed: give its arrays a constant size")
    sizes = {frame.function: frame.bytes or 0 for frame in functions}
    exported = [sizes[frame.function] for frame in functions if frame.exported]
    needed = max(exported, default=0) + sum(sizes[frame.function] for frame in functions if not frame.exported)
    if needed > LIMIT:
        largest = max(sizes, key=lambda function: sizes[function])
        raise UserError(
            f"{name}: needs {needed} bytes of stack, {sizes[largest]} of them in {largest}, and has {LIMIT}: "
            "keep fewer vectors at a time, or raise STACK_BYTES in stages/air/limits.py"
        )


def frames(path: Path, name: str) -> list[Frame]:
    """Return the frame of every function that the object or linked core `name` defines.

    Raises UserError if it cannot be read.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            sections = [section for section in elf.iter_sections() if section.name == ".stack_sizes"]
            sizes = {place: size for section in sections for place, size in _sizes(elf, section).items()}
            return [
                Frame(symbol.name, sizes.get(_place(elf, symbol)), symbol["st_info"]["bind"] == "STB_GLOBAL")
                for symbol in _symbols(elf).iter_symbols()
                if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_shndx"] != "SHN_UNDEF"
            ]
    except (ELFError, AttributeError, KeyError, StopIteration) as error:
        raise UserError(f"{name}: the stack of its functions cannot be read ({error}): is it Peano's?") from None


def _symbols(elf: Any) -> Any:
    return elf.get_section_by_name(".symtab")


def _place(elf: Any, symbol: Any, addend: int = 0) -> Place:
    return symbol["st_shndx"] if elf["e_type"] == "ET_REL" else None, symbol["st_value"] + addend


def _sizes(elf: Any, section: Any) -> dict[Place, int]:
    """Read a section of pairs: address, size as unsigned LEB128 (LLVM's CodeGenerator.rst).

    In an object, the address comes from a relocation.
    """
    data, offset, sizes, relocated = section.data(), 0, {}, _relocated(elf, section)
    while offset < len(data):
        final: Place = (None, int.from_bytes(data[offset : offset + elf.elfclass // 8], "little"))
        place = relocated[offset] if elf["e_type"] == "ET_REL" else final
        offset += elf.elfclass // 8
        end = next(end for end in range(offset, len(data)) if data[end] < 0x80) + 1
        sizes[place] = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data[offset:end]))
        offset = end
    return sizes


def _relocated(elf: Any, section: Any) -> dict[int, Place]:
    """Return the place that the relocation at each offset of a section points to."""
    return {
        entry["r_offset"]: _place(elf, _symbols(elf).get_symbol(entry["r_info_sym"]), entry["r_addend"])
        for relocations in elf.iter_sections("SHT_RELA")
        if elf.get_section(relocations["sh_info"]) == section
        for entry in relocations.iter_relocations()
    }
