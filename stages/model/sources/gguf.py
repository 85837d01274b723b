"""A source that is a GGUF file on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.model.sources.source import Listed, listed


@dataclass(frozen=True)
class GgufSource:
    name: str
    file: Path
    pinned = True

    def is_public(self) -> bool:
        return False

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "gguf"}

    def files(self) -> list[Path]:
        return [self.file]

    def config_files(self) -> list[Path]:
        return []

    def fetch(self) -> Path:
        return self.file

    def inventory(self) -> Mapping[str, Listed]:
        return listed(self.files())
