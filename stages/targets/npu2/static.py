"""Checks the static data of tile functions: tables, and constants that Peano keeps in memory.

They lie in a core's L1 with its stack and its buffers, so tilings leave `STATIC_BYTES` free for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llama_npu2.errors import UserError
from stages.air import limits

LIMIT = limits.STATIC_BYTES - limits.ALIGNMENT_BYTES
"""Bytes that an object may have: the first address after the buffers may have to be aligned."""


@dataclass(frozen=True)
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
    """Raise UserError if the object `name` has more static data than `LIMIT`, or memory that nothing clears."""
    data = [section for section in loaded_sections(path, name) if not section.code]
    if empty := next((section for section in data if not section.filled), None):
        raise UserError(f"{name}: {empty.bytes} bytes of {empty.name}, which nothing clears: give them a value, or L1")
    needed = sum(limits.aligned(section.bytes) for section in data)
    if needed > LIMIT:
        raise UserError(
            f"{name}: needs {needed} bytes of static data and has {LIMIT}: shorten its tables, hand them over in a "
            "buffer, or raise STATIC_BYTES in stages/air/limits.py"
        )
