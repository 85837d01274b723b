"""Reads the static data of objects and cores: tables, and constants that Peano keeps in memory.

It lies in a core's L1 with stack and buffers: tilings leave `limits.STATIC_BYTES` for it, the linker refuses what finds
no room, and the audit looks where it lies.
"""

from __future__ import annotations

from pathlib import Path

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen


@frozen
class Section:
    """A section of an ELF that a core's memory holds."""

    name: str
    address: int
    bytes: int
    code: bool
    filled: bool
    """Whether the ELF has its content; nothing clears other sections (`.bss`)."""


def loaded_sections(path: Path, name: str) -> list[Section]:
    """Return the sections of an object or core that memory holds, without empty ones. UserError if it is no ELF."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.constants import SH_FLAGS
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as file:
            sections = [(section.name, section.header) for section in ELFFile(file).iter_sections()]
    except (ELFError, AttributeError, KeyError) as error:
        raise UserError(f"{name}: cannot be read: {error}") from None
    return [
        Section(
            section,
            header["sh_addr"],
            header["sh_size"],
            bool(header["sh_flags"] & SH_FLAGS.SHF_EXECINSTR),
            header["sh_type"] != "SHT_NOBITS",
        )
        for section, header in sections
        if header["sh_flags"] & SH_FLAGS.SHF_ALLOC and header["sh_size"]
    ]


def check_static(path: Path, name: str) -> None:
    """Raise UserError if the object `name` has memory without a value: nothing clears it."""
    for section in loaded_sections(path, name):
        if not section.code and not section.filled:
            raise UserError(f"{name}: {section.bytes} bytes of {section.name}, which nothing clears: give them a value")
