"""A source of random weights, generated on this machine."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_npu2.artifact.regular import read_regular
from llama_npu2.frozen import frozen
from stages.engine.files import atomic_directory, require_space
from stages.engine.lock import ProcessLock
from stages.engine.places import GENERATED, lock_file
from stages.model.config import Config
from stages.model.families import parse_config
from stages.model.importers.directory import SINGLE
from stages.model.random_weights import RECIPE, random_tensors, write_byte_tokenizer, write_random_weights
from stages.model.sources.source import Listed, Source, listed
from stages.weights.blobs import safetensors_bytes


@frozen
class RandomSource(Source):
    """Seeded random weights of given shapes, generated once, to measure sizes and speed."""

    name: str
    raw_config: Mapping[str, Any]
    directory: Path

    def is_public(self) -> bool:
        return True

    @property
    def anywhere(self) -> bool:
        from stages.model.presets import PRESETS  # few builds need them

        return PRESETS.get(self.name.removeprefix("random-")) == self.raw_config

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "random", "config": dict(self.raw_config), "recipe": RECIPE}

    @property
    def config(self) -> Config:
        """The configuration. Raises UserError."""
        return parse_config(self.raw_config, f"model=random:{self.name}")

    def inventory(self) -> Mapping[str, Listed]:
        if self._is_complete:
            return listed(path for path in self.directory.iterdir() if path.is_file())
        with tempfile.TemporaryDirectory() as temporary:
            write_byte_tokenizer(self.config, Path(temporary))
            sizes = {path.name: path.stat().st_size for path in Path(temporary).iterdir()}
        sizes[SINGLE] = safetensors_bytes(random_tensors(self.config))
        return {name: Listed(size, here=False) for name, size in sizes.items()}

    @property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    @property
    def _stamp(self) -> Path:
        """The file with the digest of what the weights were made from."""
        return self.directory / GENERATED

    @property
    def _is_complete(self) -> bool:
        try:
            return read_regular(self._stamp, len(self._digest)).decode() == self._digest
        except (OSError, ValueError):
            return False

    def fetch(self) -> Path:
        config = self.config
        if self._is_complete:
            return self.directory
        require_space(self.directory, safetensors_bytes(random_tensors(config)), f"model=random:{self.name}")
        with (
            ProcessLock(lock_file(self.directory.parents[1], self.name)),
            atomic_directory(self.directory, GENERATED) as temporary,
        ):
            (temporary / "config.json").write_text(json.dumps(dict(self.raw_config), indent=2))
            write_random_weights(config, temporary / SINGLE)
            write_byte_tokenizer(config, temporary)
            (temporary / self._stamp.name).write_text(self._digest)
        return self.directory
