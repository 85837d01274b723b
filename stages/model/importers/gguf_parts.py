"""GGUF files in parts, as llama-gguf-split names them: `NAME-00001-of-0000N.gguf`. The first has the metadata."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from stages.model.importers.gguf_header import Header, Place

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.ASCII)


def whole_name(name: str) -> str:
    """Return the name of a GGUF file without the number of its part."""
    match = _PART.fullmatch(name)
    return match[1] + match[4] if match else name


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a file by the name of one; the name itself where it is not a part's."""
    match = _PART.fullmatch(name)
    if not match or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def parts(path: Path) -> list[Path]:
    """Return the files of all parts by the path of one. Raises UserError."""
    files = [path.with_name(name) for name in part_names(path.name)]
    if missing := next((file for file in files if not file.is_file()), None):
        raise UserError(f"{missing} is missing: {path.name} is one of {len(files)} parts, all must be in its directory")
    return files


def read_parts(files: list[Path]) -> tuple[dict[str, Any], dict[str, Place]]:
    """Return the metadata and the places of all tensors of a file in parts. Raises UserError."""
    headers = [Header(file) for file in files]
    places: dict[str, Place] = {}
    for number, header in enumerate(headers):
        count, own = header.metadata.get("split.count", 0) or 1, header.metadata.get("split.no", 0)
        if (own, count) != (number, len(files)):
            says = f"split.no = {json.dumps(own)[:80]} and split.count = {json.dumps(count)[:80]}"
            raise UserError(
                f"{header.path}: {says} in it, its name means {number} and {len(files)}: "
                "parts have names as llama-gguf-split gives them"
            )
        if twice := places.keys() & header.tensors.keys():
            raise UserError(f"{header.path}: tensor {min(twice)[:80]} is in another part, too")
        places |= header.tensors
    return headers[0].metadata, places
