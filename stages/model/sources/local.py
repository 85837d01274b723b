"""A source that is a checkpoint directory on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from stages.engine.places import ROOT
from stages.model.importers.directory import CONFIG_FILES, INDEX, SINGLE, TOKENIZER_FILES
from stages.model.sources.source import Listed, listed

DEMO = ROOT / "models/demo"


@dataclass(frozen=True)
class LocalSource:
    name: str
    directory: Path
    pinned = True

    def is_public(self) -> bool:
        return self.directory == DEMO

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "directory"}

    def files(self) -> list[Path]:
        names = {*CONFIG_FILES, SINGLE, INDEX, *TOKENIZER_FILES}
        paths = {*self.directory.glob("*.safetensors"), *(self.directory / name for name in names)}
        return sorted(path for path in paths if path.is_file())

    def config_files(self) -> list[Path]:
        return [path for path in self.files() if path.name in CONFIG_FILES]

    def fetch(self) -> Path:
        if not (self.directory / "config.json").is_file():
            raise UserError(f"{self.directory} has no config.json: model= needs a directory in Hugging Face format")
        return self.directory

    def inventory(self) -> Mapping[str, Listed]:
        return listed(self.files())
