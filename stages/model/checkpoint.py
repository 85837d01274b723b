"""A checkpoint, checked: its configuration and its tensors, whatever holds them (`stages.model.importers`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.errors import UserError
from stages.model import families
from stages.model.buffers import tensors_of
from stages.model.config import Config
from stages.model.families import parse_config
from stages.model.importers import PLAIN, Container, Held
from stages.model.importers.directory import Directory
from stages.model.importers.gguf import GgufFile
from stages.weights.formats import Format, formats

_CHUNK = 1 << 20
"""Values that are dequantised at a time, so that what is in the making stays in the cache."""


def container(path: Path) -> Container:
    """What holds a checkpoint: a directory in Hugging Face format, or a GGUF file. Raises UserError."""
    return Directory(path) if path.is_dir() else GgufFile(path)


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint. `fields`: its configuration as those of a `config.json`; `files`: that hold
    weights and tokenizer."""

    config: Config
    fields: Mapping[str, Any]
    files: Sequence[Path]
    held: Mapping[str, Held]

    @classmethod
    def open(cls, path: Path, ignore: Sequence[str] = ("*",)) -> Checkpoint:
        """Read the configuration and every header; check names, shapes and dtypes. Raises UserError.

        `ignore`: patterns of tensors that may be there besides the model's; any, unless something else is said.
        """
        within = container(path)
        config = parse_config(within.fields, within.where)
        if config.layers > len(within.names):
            raise UserError(
                f"{path}: {config.layers} layers by its configuration, but only {len(within.names)} tensors"
            )
        held = _held(path, within, families.tensors(config))
        _check_others(within, held, (*families.of(config).ignored, *ignore))
        return cls(config, within.fields, within.files(), held)

    def stored_format(self, name: str) -> str:
        """What the checkpoint holds a tensor as: "bf16", "f16", "f32", or the format of ours that holds its quantised
        values exactly; "f32" too for quantised values that none of those holds, and for joined tensors that differ."""
        found = {self.held[part].format for part in tensors_of(name)}
        return found.pop() if len(found) == 1 else "f32"

    def stored(self, name: str) -> np.ndarray:
        """A tensor in the elements of its `stored_format`, as `Format.quantise` makes them; the rows of joined ones
        (`stages.model.buffers`) one behind the other. Raises UserError."""
        return _stacked([self.held[part].read() for part in tensors_of(name)])

    def tensor(self, name: str) -> np.ndarray:
        """The values of a tensor, or of joined ones: bf16, f16 or f32 as the file holds them; of a quantised one f32,
        computed in f32 from the stored numbers and scales. Raises UserError."""
        return _stacked([self._values(part) for part in tensors_of(name)])

    def _values(self, name: str) -> np.ndarray:
        held = self.held[name]
        stored = held.read()
        return stored if held.format in PLAIN else _dequantised(formats()[held.format], stored, held.shape[-1])


def _stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _held(path: Path, within: Container, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Held]:
    """Every tensor of the model."""
    held, missing = {}, []
    for name, shape in wanted.items():
        found = within.held(name, shape)
        if found is None:
            missing.append(name)
        elif found.shape != shape:
            raise UserError(
                f"{within.where_is(found.parts[0])}: tensor {found.parts[0]} has shape {list(found.shape)}, "
                f"the configuration implies {list(shape)}"
            )
        else:
            held[name] = found
    if missing:
        raise UserError(
            f"{path}: {len(missing)} tensors are missing, first {missing[0]}: "
            "the checkpoint is incomplete or not the model that its configuration describes"
        )
    return held


def _check_others(within: Container, held: Mapping[str, Held], ignore: Sequence[str]) -> None:
    """Nothing is in the files that is neither part of the model nor ignored."""
    for name in sorted(within.names.difference(*(tensor.parts for tensor in held.values()))):
        if not any(fnmatchcase(name, pattern) for pattern in ignore):
            raise UserError(
                f"{within.where_is(name)}: unexpected tensor {name}: not part of the model that its configuration "
                f"describes; ignore={name} leaves it out"
            )


def _dequantised(form: Format, stored: np.ndarray, length: int) -> np.ndarray:
    """f32 `[..., length]` of stored rows, some at a time."""
    rows = stored.reshape(-1, stored.shape[-1])
    values = np.empty((len(rows), length), np.float32)
    step = max(1, _CHUNK // length)
    for first in range(0, len(rows), step):
        values[first : first + step] = form.dequantise(rows[first : first + step], length)
    return values.reshape(*stored.shape[:-1], length)
