"""A checked checkpoint: its configuration and its tensors, in whatever kind of file (`stages.model.importers`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.engine.lazy import np
from stages.model import families
from stages.model.buffers import tensors_of
from stages.model.config import Config
from stages.model.decoder import STACKED
from stages.model.families import parse_config, stored_names, text_fields
from stages.model.families.place import Location
from stages.model.importers import PLAIN, Container, Held, stacked
from stages.model.importers.adapters import COMPOSED, Adapted
from stages.model.importers.directory import Directory
from stages.weights.format import Format
from stages.weights.formats import formats

_CHUNK = 1 << 20
"""Values that are dequantised at a time, so that temporaries stay in the CPU's cache."""


def container(path: Path) -> Container:
    """Return the container of a checkpoint: a directory in Hugging Face format, maybe with adapters, or a GGUF file.

    Raises UserError.
    """
    if path.name == COMPOSED:
        return Adapted.read(path)
    if path.is_dir():
        return Directory(path)
    from stages.model.importers.gguf import GgufFile  # a build that is up to date reads no file

    return GgufFile(path)


@frozen
class Checkpoint:
    """A checked checkpoint."""

    config: Config
    fields: Mapping[str, Any]
    """Its configuration as the fields of a `config.json` that are about text."""
    files: Sequence[Path]
    """The files that hold weights and tokenizer."""
    held: Mapping[str, Held]
    """Its weights by name (`families.Weight`)."""

    @classmethod
    def open(cls, path: Path, ignore: Sequence[str] = ("*",)) -> Checkpoint:
        """Read the configuration and every header; check names, shapes and dtypes. Raises UserError.

        Args:
            ignore: patterns of tensors that may be there besides the model's.
        """
        within = container(path)
        fields = _fields(within)
        config = parse_config(fields, within.where)
        if config.layers > len(within.names):
            raise UserError(
                f"{path}: {config.layers} layers by its configuration, but only {len(within.names)} tensors"
            )
        held = _held(path, within, config)
        _check_others(within, held, (*families.of(config).ignored, *ignore))
        return cls(config, text_fields(fields, within.where), within.files(), held)

    def within(self, context: int) -> Checkpoint:
        """Return the checkpoint of `Config.within`."""
        return replace(self, config=self.config.within(context))

    def stored_format(self, name: str) -> str:
        """Return the format of a tensor: "bf16", "f16", "f32", or our format that holds its quantised values exactly.

        "f32" also stands for quantised values that none of our formats holds, and for joined tensors that differ.
        """
        names = {self.held[tensor].format for tensor in tensors_of(name)}
        return names.pop() if len(names) == 1 else "f32"

    def stored(self, name: str) -> np.ndarray:
        """Return a tensor in the elements of its `stored_format`, as `Format.quantise` makes them. Raises UserError.

        The rows of joined tensors (`stages.model.buffers`) follow one another.
        """
        return _stacked([self.held[tensor].read() for tensor in tensors_of(name)])

    def tensor(self, name: str) -> np.ndarray:
        """Return the values of a tensor, or of joined tensors. Raises UserError.

        They are bf16, f16 or f32 as in the file; those of a quantised tensor are computed in f32 from the stored
        numbers and scales.
        """
        return _stacked([self._values(tensor) for tensor in tensors_of(name)])

    def _values(self, name: str) -> np.ndarray:
        held = self.held[name]
        stored = held.read()
        return stored if held.format in PLAIN else _dequantised(formats()[held.format], stored, held.shape[-1])


def _fields(within: Container) -> Mapping[str, Any]:
    """Return the configuration of a checkpoint. One without an LM head (an embedding model's) gets the tied one."""
    headless = "embed_tokens.weight" in within.names and not {"lm_head.weight", "model.lm_head.weight"} & within.names
    return {**within.fields, "tie_word_embeddings": True} if headless else within.fields


def _stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _held(path: Path, within: Container, config: Config) -> dict[str, Held]:
    """Return all weights of the model by name. Raises UserError."""
    held, missing, wrapped = {}, [], "text_config" in within.fields
    count = config.decoder.experts.count if config.decoder.experts else 0
    for weight in families.weights(config):
        places = [*within.location(config, weight).of_experts(count)]
        found = [(at, _found(within, at, wrapped)) for at in places]
        missing += [at.tensor for at, tensor in found if tensor is None]
        if tensors := [tensor for _, tensor in found if tensor]:
            tensor = tensors[0] if places[0].expert is None else _of_experts(within, tensors)
            held[weight.name] = tensor.flat() if weight.slot in STACKED and len(weight.shape) == 1 else tensor
    if missing:
        raise UserError(
            f"{path}: {len({*missing})} tensors are missing, first {missing[0]}: "
            "the checkpoint is incomplete or not the model that its configuration describes"
        )
    return held


def _found(within: Container, at: Location, wrapped: bool) -> Held | None:
    """Return weights where they lie; None where they are not. Raises UserError for a tensor of another shape."""
    named = (within.held(stored, at.shape) for stored in stored_names(at.tensor, wrapped))
    tensor = next(filter(None, named), None)
    if tensor is None:
        return None
    transposed = at.transposed and tensor.format in PLAIN
    if tensor.shape != (at.plain_shape if transposed else at.shape):
        raise UserError(
            f"{within.where_is(tensor.parts[0])}: tensor {tensor.parts[0]} has shape {list(tensor.shape)}, "
            f"the configuration implies {list(at.plain_shape if transposed else at.shape)}"
        )
    return (tensor.transposed() if transposed else tensor).taken(at.rows, at.axis)


def _of_experts(within: Container, tensors: Sequence[Held]) -> Held:
    """Return the tensors of experts as one. Raises UserError if they have several formats."""
    first = tensors[0]
    if other := next((each for each in tensors if each.format != first.format), None):
        raise UserError(
            f"{within.where_is(other.parts[0])}: tensor {other.parts[0]} is {other.format}, {first.parts[0]} is "
            f"{first.format}: experts of one layer must have one format"
        )
    return stacked(tensors)


def _check_others(within: Container, held: Mapping[str, Held], ignore: Sequence[str]) -> None:
    """Refuse tensors that are neither part of the model nor ignored."""
    for name in sorted(within.names.difference(*(tensor.parts for tensor in held.values()))):
        if not any(fnmatchcase(name, pattern) for pattern in ignore):
            raise UserError(
                f"{within.where_is(name)}: unexpected tensor {name}: not part of the model that its configuration "
                f"describes; ignore={name} leaves it out"
            )


def _dequantised(form: Format, stored: np.ndarray, length: int) -> np.ndarray:
    """Return stored rows as f32 `[..., length]`, dequantised some at a time."""
    rows = stored.reshape(-1, stored.shape[-1])
    values = np.empty((len(rows), length), np.float32)
    step = max(1, _CHUNK // length)
    for first in range(0, len(rows), step):
        values[first : first + step] = form.dequantise(rows[first : first + step], length)
    return values.reshape(*stored.shape[:-1], length)
