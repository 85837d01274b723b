"""A source whose checkpoint is not on this machine, only its artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from stages.model.sources.source import Listed


@dataclass(frozen=True)
class ArtifactsOnly:
    """A name below `artifacts/` whose checkpoint is not on this machine: it can be used, not rebuilt."""

    name: str
    pinned = False

    def is_public(self) -> bool:
        return False

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "artifacts"}

    def files(self) -> list[Path]:
        return []

    def config_files(self) -> list[Path]:
        return []

    def fetch(self) -> Path:
        raise UserError(
            f"model={self.name}: artifacts/{self.name} needs a rebuild but its checkpoint is not on this machine: "
            "name the checkpoint it was built from"
        )

    def inventory(self) -> Mapping[str, Listed]:
        return {}
