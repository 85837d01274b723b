"""GPTQ, as AutoGPTQ and GPTQModel write it.

The parts of a matrix `[out, in]` are

    qweight   i32 [in / word, out]        numbers along the inputs, the lowest bits first, 32 / bits to a word
    qzeros    i32 [groups, out / word]    zeros along the outputs; less one in `gptq`, as they are in `gptq_v2`
    scales    [groups, out]
    g_idx     i32 [in]                    the group of each input, where one is written

and a bias of zeros in AutoGPTQ's files, where the model has none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from llama_npu2.frozen import frozen
from stages.model.config import ConfigFields
from stages.model.importers import Held, Method, affine
from stages.model.importers.affine import Affine, equal_groups, words, words_to_numbers
from stages.model.importers.directory import Tensors
from stages.weights.format import Shape


@frozen
class _Matrix:
    """A quantised matrix; `stem` is its name without `weight`."""

    tensors: Tensors
    stem: str
    shape: Shape
    bits: int
    stored_less_one: bool
    symmetric: bool

    def read(self, part: str) -> np.ndarray:
        return self.tensors.read(self.stem + part)

    def affine(self) -> Affine:
        numbers = words_to_numbers(self.read("qweight").T, self.bits)[:, : self.shape[1]]
        return Affine(numbers, self.zeros().T, self.read("scales").T.astype(np.float32))

    def zeros(self) -> np.ndarray:
        """Return the zeros, int16 `[groups, out]`. Raises UserError."""
        packed, middle = self.read("qzeros").view(np.uint32), 1 << (self.bits - 1)
        zeros = self._zeros(packed)
        # Files of GPTQModel 5 may say gptq and store zeros as gptq_v2 does. A symmetric one shows it.
        if self.stored_less_one and not (self.symmetric and (zeros == middle).all()):
            # One addition to whole words, carries included, as GPTQModel reads them.
            zeros = self._zeros(packed + np.uint32(0xFFFFFFFF // ((1 << self.bits) - 1)))
        if self.symmetric and (zeros != middle).any():
            raise self.tensors.fails(self.stem + "qzeros", "has zeros that are not in the middle, though sym is true")
        return zeros

    def _zeros(self, packed: np.ndarray) -> np.ndarray:
        return words_to_numbers(packed, self.bits)[:, : self.shape[0]]


def _open(fields: ConfigFields) -> Callable[[Tensors, str, Shape], Held | None]:
    fields.require({"checkpoint_format": ("gptq", "gptq_v2", None), "bits": (4, 8), "pack_dtype": ("int32", None)})
    bits, size = fields.integer("bits"), fields.group_size("group_size")
    less_one = fields.values.get("checkpoint_format") != "gptq_v2"
    return partial(_held, bits=bits, size=size, less_one=less_one, symmetric=fields.boolean("sym", False))


def _held(
    tensors: Tensors, name: str, shape: Shape, bits: int, size: int | None, less_one: bool, symmetric: bool
) -> Held | None:
    stem = name.removesuffix("weight")
    if stem + "qweight" not in tensors.entries:
        return None
    rows, cols = shape
    width = size or cols
    groups = -(-cols // width)
    tensors.part(stem + "qweight", ("I32",), (words(cols, bits), rows))
    tensors.part(stem + "qzeros", ("I32",), (groups, words(rows, bits)))
    tensors.part(stem + "scales", affine.SCALES, (groups, rows))
    parts = [stem + "qweight", stem + "qzeros", *_zero_bias(tensors, stem + "bias", rows)]
    group_of = equal_groups(cols, width)
    if stem + "g_idx" in tensors.entries:
        parts.append(stem + "g_idx")
        group_of = given_groups(tensors, stem + "g_idx", cols, groups)
    matrix = _Matrix(tensors, stem, shape, bits, less_one, symmetric)
    return affine.held(tensors, (*parts, stem + "scales"), shape, bits, group_of, symmetric, matrix.affine)


def given_groups(tensors: Tensors, name: str, cols: int, groups: int) -> np.ndarray:
    """Return the group of each column by a tensor of the file. Raises UserError."""
    tensors.part(name, ("I32", "I64"), (cols,))
    group_of = tensors.read(name)
    if group_of.min() < 0 or group_of.max() >= groups:
        raise tensors.fails(name, f"names groups {group_of.min()} to {group_of.max()}, there are {groups}")
    return group_of


def _zero_bias(tensors: Tensors, name: str, rows: int) -> list[str]:
    """Return the name of a bias that only AutoGPTQ has written. One that is not zero is the model's, or unexpected."""
    if name not in tensors.entries:
        return []
    tensors.part(name, affine.SCALES, (rows,))
    return [] if tensors.read(name).any() else [name]


METHOD = Method("gptq", _open)
