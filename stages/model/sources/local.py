"""Sources on this machine: a checkpoint directory, a GGUF file, or artifacts whose checkpoint is elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.engine.places import ROOT
from stages.model.importers.directory import CONFIG_FILES, INDEX, TOKENIZER_FILES
from stages.model.importers.gguf_parts import parts
from stages.model.sources.source import Source

DEMO = ROOT / "models/demo"


@frozen
class LocalSource(Source):
    """A checkpoint directory in Hugging Face format."""

    name: str
    directory: Path

    def is_public(self) -> bool:
        return self.directory == DEMO

    @property
    def anywhere(self) -> bool:
        return self.directory == DEMO

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "directory"}

    def files(self) -> list[Path]:
        patterns = {*CONFIG_FILES, "*.safetensors", INDEX, *TOKENIZER_FILES}
        paths = {path for pattern in patterns for path in self.directory.glob(pattern)}
        return sorted(path for path in paths if path.is_file())

    def config_files(self) -> list[Path]:
        return [path for name in CONFIG_FILES if (path := self.directory / name).is_file()]

    def fetch(self) -> Path:
        if not (self.directory / "config.json").is_file():
            raise UserError(f"{self.directory} has no config.json: model= needs a directory in Hugging Face format")
        return self.directory


@frozen
class GgufSource(Source):
    """A GGUF file, or the first of its parts."""

    name: str
    file: Path

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "gguf"}

    def files(self) -> list[Path]:
        return parts(self.file)

    def fetch(self) -> Path:
        return self.file


@frozen
class ArtifactsOnly(Source):
    """A name below `artifacts/` whose checkpoint is not on this machine: it can be used, not rebuilt."""

    name: str
    pinned = False

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "artifacts"}

    def fetch(self) -> Path:
        raise UserError(
            f"model={self.name}: artifacts/{self.name} needs a rebuild but its checkpoint is not on this machine: "
            "name the checkpoint it was built from"
        )
