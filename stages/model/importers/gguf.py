"""A GGUF file as llama.cpp's converter writes it, with configuration and tokenizer in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from stages.engine.lazy import ml_dtypes, np
from stages.model import families
from stages.model.config import Config, ConfigFields
from stages.model.families import Weight, parse_config, weights
from stages.model.families.gguf import FACTORS, LONG_FACTORS, Gguf
from stages.model.families.place import Location
from stages.model.importers import PLAIN, Held
from stages.model.importers.gguf_blocks import REFUSED, TYPES, BlockType, finite
from stages.model.importers.gguf_config import architecture, config_fields, rope_scaling
from stages.model.importers.gguf_header import Place
from stages.model.importers.gguf_parts import parts, read_parts
from stages.model.importers.gguf_tokenizer import tokenizer_files
from stages.weights.format import Shape
from stages.weights.formats import formats

MOST_PAIRS = 1 << 16
"""The most factors of a rotation that are read."""
_CHUNK = 1 << 20
"""Values that are rearranged at a time, so that temporaries stay in the CPU's cache."""


def location(config: Config, weight: Weight, kind: Gguf) -> Location:
    """Return where weights lie in a GGUF file."""
    return families.location(config, weight, kind.tensors, kind.neighbours)


class GgufFile:
    """A container: see `stages.model.importers`."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)
        self._parts = parts(path)
        self._metadata, self.places = read_parts(self._parts)
        self.names = frozenset(self.places) - {FACTORS, *LONG_FACTORS}

    @cached_property
    def _meta(self) -> ConfigFields:
        return ConfigFields(self._metadata, self.where)

    @cached_property
    def _kind(self) -> Gguf:
        return architecture(self._meta)

    @cached_property
    def fields(self) -> dict[str, Any]:
        factors = {name: self._factors(name) for name in (FACTORS, *LONG_FACTORS) if name in self.places}
        return config_fields(self._meta, self._kind, self.places, rope_scaling(self._meta, self._kind, factors))

    @cached_property
    def config(self) -> Config:
        """The model that it holds. Raises UserError."""
        return parse_config(self.fields, self.where)

    def _factors(self, name: str) -> list[float]:
        """Return what the rotations are divided by. Raises UserError."""
        # Their number is checked with the others'.
        count = min(prod(self.places[name].shape), MOST_PAIRS)
        factors = self._read(name, self._place(name, (count,)))
        if factors.dtype != np.float32 or not (np.isfinite(factors) & (factors > 0)).all():
            raise UserError(f"{self.where_is(name)}: tensor {name} must be F32 and hold positive numbers")
        return factors.astype(np.float64).tolist()

    def files(self) -> list[Path]:
        return self._parts

    def where_is(self, name: str) -> str:
        return str(self.places[name].file)

    def location(self, config: Config, weight: Weight) -> Location:
        return location(config, weight, self._kind)

    @cached_property
    def _offsets(self) -> dict[str, float]:
        """The number that is added to a tensor's values, by its name."""
        return {self.location(self.config, each).tensor: each.offset for each in weights(self.config)}

    def held(self, name: str, shape: Shape) -> Held | None:
        if name not in self.places:
            return None
        place, offset = replace(self._place(name, shape), shape=shape), self._offsets[name]
        held = Held(shape, TYPES[place.type].format, partial(self._read, name, place), (name,))
        if not offset:
            return held
        if held.format not in PLAIN:
            raise UserError(f"{place.file}: tensor {name} is {TYPES[place.type].name}: only F32, F16, BF16 are read")
        return _without(held, offset)

    def _place(self, name: str, shape: Shape) -> Place:
        """Return where a tensor is. Raise UserError for another shape, an unknown type or a file that ends early."""
        place, where = self.places[name], f"{self.where_is(name)}: tensor {name}"
        if place.type not in TYPES:
            readable = ", ".join(kind.name for kind in TYPES.values())
            raise UserError(f"{where} is {REFUSED.get(place.type, f'of type {place.type}')}: only {readable} are read")
        kind = TYPES[place.type]
        if place.shape[-1:] != shape[-1:] or _lengths(place.shape) != _lengths(shape):
            raise UserError(f"{where} has shape {list(place.shape)}, the metadata imply {list(shape)}")
        if shape[-1] % kind.values:
            raise UserError(f"{where} has rows of {shape[-1]} values, {kind.name} has blocks of {kind.values}")
        if place.offset + prod(shape) // kind.values * kind.bytes > place.file.stat().st_size:
            raise UserError(f"{where} is not all in the file: it is truncated, download it again")
        return place

    def _read(self, name: str, place: Place) -> np.ndarray:
        kind, (*outer, length) = TYPES[place.type], place.shape
        blocks = length // kind.values
        raw = np.memmap(place.file, np.uint8, "r", place.offset, (prod(outer), blocks, kind.bytes))
        if kind.stored is None:
            dtypes = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
            plain = raw.reshape(len(raw), -1).view(dtypes[kind.format])
            return np.array(plain).reshape(place.shape)
        return self._stored(name, kind, raw).reshape(*outer, -1)

    def _stored(self, name: str, kind: BlockType, raw: np.ndarray) -> np.ndarray:
        """Return blocks as rows of the format, converted some rows at a time. Raises UserError."""
        assert kind.stored
        length = raw.shape[1] * kind.values
        stored = np.empty(formats()[kind.format].stored_shape((len(raw), length)), np.int8)
        step = max(1, _CHUNK // length)
        for first in range(0, len(raw), step):
            chunk = raw[first : first + step]
            if not finite(kind, chunk):
                where = f"{self.where_is(name)}: tensor {name}"
                raise UserError(f"{where} holds a scale that is not a finite number: the file is damaged")
            stored[first : first + step] = kind.stored(chunk)
        return stored

    def tokenizer(self) -> Mapping[str, bytes]:
        return tokenizer_files(self._meta)


def _lengths(shape: Shape) -> list[int]:
    """Return the lengths of the dimensions that are there: llama.cpp's converter leaves out some of length 1."""
    return [length for length in shape if length != 1]


def _without(held: Held, offset: float) -> Held:
    """Return a vector less a number that llama.cpp's converter has added to it, f32."""
    return replace(held, format="f32", read=lambda: held.read().astype(np.float32) - np.float32(offset))
