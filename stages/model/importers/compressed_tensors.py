"""compressed-tensors: whole numbers (`int-quantized`), the same in words (`pack-quantized`), FP8 (`float-quantized`).

The parts of a matrix `[out, in]` are

    weight              i8 [out, in]                            or
    weight_packed       i32 [out, ceil(in * bits / 32)]         numbers plus half their range, the lowest bits first
    weight_shape        [2]                                     next to it
    weight              f8_e4m3 [out, in], see `stages.model.importers.fp8`
    weight_scale        [out, groups], [out, 1] or [1]
    weight_zero_point   i8 as the scale, or i32 [ceil(out * bits / 32), groups] packed along the outputs
    weight_g_idx        i32 [in]                                the group of each input; -1: not used

Where activations have 8 bits, too, quantised token by token, rows of 8 bits with one scale each are our w8a8. Otherwise
activations keep 16 bits, and their scales (`input_scale`) are not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.model.config import ConfigFields
from stages.model.importers import Held, Method, affine, fp8
from stages.model.importers.affine import Affine, equal_groups, words, words_to_numbers
from stages.model.importers.directory import Tensors
from stages.model.importers.gptq import given_groups
from stages.weights.format import Shape
from stages.weights.formats import w8a8

FORMATS = ("int-quantized", "pack-quantized", "naive-quantized", "float-quantized")
_BESIDE = ("input_scale", "input_zero_point")


@frozen
class _Scheme:
    """The quantisation of the weights of some modules."""

    bits: int
    size: int | None
    """Values in a group; None: a scale for each row, or one for all."""
    symmetric: bool
    targets: tuple[str, ...]
    integers: bool
    """Whether activations are whole numbers, too."""
    floats: bool = False
    """Whether weights are FP8."""
    block: tuple[int, int] | None = None
    """The rows and columns of FP8 that share a scale; None as for `size`."""

    def rank(self, module: str) -> int | None:
        """Return how closely its targets mean a module: 0 by name, 1 by pattern, 2 by class; None: not at all."""
        kinds = [
            0 if target == module else 1 if target.startswith("re:") else 2
            for target in self.targets
            if target in (module, "Linear") or (target.startswith("re:") and re.match(target[3:], module))
        ]
        return min(kinds, default=None)


@frozen
class _Matrix:
    """A quantised matrix; `stem` is its name without `weight`, `packed` whether numbers lie in words."""

    tensors: Tensors
    stem: str
    shape: Shape
    scheme: _Scheme
    packed: bool

    @property
    def half(self) -> int:
        return 1 << (self.scheme.bits - 1)

    def affine(self) -> Affine:
        rows, cols = self.shape
        if self.packed:
            packed = self.tensors.read(self.stem + "weight_packed")
            numbers = words_to_numbers(packed, self.scheme.bits)[:, :cols]
        else:
            numbers = self.tensors.read(self.stem + "weight") + np.int16(self.half)
        shape = (rows, self._groups)
        return Affine(numbers, np.broadcast_to(self._zeros(), shape), np.broadcast_to(self._scales(), shape))

    def rows(self) -> np.ndarray:
        """Return the matrix stored as w8a8."""
        numbers, scales = self.tensors.read(self.stem + "weight"), self._scales()
        return w8a8.stored(numbers, np.broadcast_to(scales, (len(numbers), 1)))

    def _scales(self) -> np.ndarray:
        """Return the scales, f32 `[rows or 1, groups]`. Raises UserError."""
        name = self.stem + "weight_scale"
        scales = self.tensors.read(name).astype(np.float32).reshape(-1, self._groups)
        affine.check_scales(self.tensors, name, scales)
        return scales

    @property
    def _groups(self) -> int:
        return -(-self.shape[1] // (self.scheme.size or self.shape[1]))

    def _zeros(self) -> np.ndarray:
        """Return the zeros, int16 of the scales' shape."""
        name = self.stem + "weight_zero_point"
        if self.scheme.symmetric:
            return np.int16(self.half).reshape(1, 1)
        zeros = self.tensors.read(name)
        if self.packed and zeros.dtype == np.int32:
            return words_to_numbers(zeros.T, self.scheme.bits).T[: self.shape[0]]
        return zeros.reshape(-1, self._groups) + np.int16(self.half)

    def parts(self) -> tuple[str, ...]:
        """Return the names of all parts, which are checked against the scheme. Raises UserError."""
        part, stem, (rows, cols) = self.tensors.part, self.stem, self.shape
        names = [stem + ("weight_packed" if self.packed else "weight")]
        if self.packed:
            part(names[0], ("I32",), (rows, words(cols, self.scheme.bits)))
            names += self._checked_shape()
        else:
            part(names[0], ("I8",), self.shape)
        if not self.scheme.symmetric:
            names.append(stem + "weight_zero_point")
            self._check_scaled(names[-1], ("I8", "I32", "I64"), words(rows, self.scheme.bits))
        names += [name for name in (stem + beside for beside in _BESIDE) if name in self.tensors.entries]
        self._check_scaled(stem + "weight_scale", affine.SCALES)
        return (*names, stem + "weight_scale")

    def _checked_shape(self) -> list[str]:
        name = self.stem + "weight_shape"
        if name not in self.tensors.entries:
            return []
        self.tensors.part(name, ("I32", "I64"), (2,))
        if (given := tuple(self.tensors.read(name).tolist())) != self.shape:
            raise self.tensors.fails(name, f"says {list(given)}, the configuration implies {list(self.shape)}")
        return [name]

    def _check_scaled(self, name: str, dtypes: tuple[str, ...], packed_rows: int | None = None) -> None:
        """Check that there is one value for each group of each row, or one for all rows where a row is one group."""
        entry = self.tensors.part(name, dtypes)
        rows = packed_rows if packed_rows and self.packed and entry.dtype == "I32" else self.shape[0]
        allowed = [(rows, self._groups)] + ([] if self.scheme.size else [(rows,), (1,), (1, 1), ()])
        if entry.shape not in allowed:
            raise self.tensors.fails(name, f"has shape {list(entry.shape)}, group_size implies {list(allowed[0])}")


def _open(fields: ConfigFields) -> Callable[[Tensors, str, Shape], Held | None]:
    fields.require({"format": (*FORMATS, "dense", "mixed-precision", None)})
    groups = fields.values.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise fields.fail("config_groups", "must be an object of objects")
    schemes = [
        scheme for name, group in groups.items() if (scheme := _scheme(group, f"{fields.where}.config_groups.{name}"))
    ]

    def held(tensors: Tensors, name: str, shape: Shape) -> Held | None:
        stem = name.removesuffix("weight")
        packed = stem + "weight_packed" in tensors.entries
        # What is ignored is there as it was, without scales.
        if stem + "weight_scale" not in tensors.entries and not packed:
            return None
        ranked = [(rank, i) for i, scheme in enumerate(schemes) if (rank := scheme.rank(stem.rstrip("."))) is not None]
        if not ranked:
            raise UserError(f"{fields.where}: config_groups: none targets {stem.rstrip('.')}, which is quantised")
        matrix = _Matrix(tensors, stem, shape, schemes[min(ranked)[1]], packed)
        return _held(matrix)

    return held


def _held(matrix: _Matrix) -> Held:
    scheme, tensors, (_, cols) = matrix.scheme, matrix.tensors, matrix.shape
    if scheme.floats:
        names = (matrix.stem + part for part in _BESIDE)
        beside = [name for name in names if name in tensors.entries]
        parts = (matrix.stem + "weight", *beside, matrix.stem + "weight_scale")
        return fp8.held(tensors, parts, matrix.shape, scheme.block)
    parts, groups = matrix.parts(), equal_groups(cols, scheme.size or cols)
    if scheme.integers and not matrix.packed and not scheme.size:
        return Held(matrix.shape, "w8a8", matrix.rows, parts)
    if (name := matrix.stem + "weight_g_idx") in tensors.entries:
        parts = (name, *parts)
        tensors.part(name, ("I32", "I64"), (cols,))
        if (tensors.read(name) != -1).any():
            groups = given_groups(tensors, name, cols, groups[-1] + 1)
    return affine.held(tensors, parts, matrix.shape, scheme.bits, groups, scheme.symmetric, matrix.affine)


def _scheme(group: Mapping[str, Any], where: str) -> _Scheme | None:
    """Return the scheme of a group of `config_groups`; None if its weights are not quantised. Raises UserError."""
    outer, weights, targets = ConfigFields(group, where), group.get("weights"), group.get("targets")
    outer.require({"format": (*FORMATS, "dense", None)})
    if weights is None:
        return None
    if not isinstance(weights, dict):
        raise outer.fail("weights", "must be an object or null")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise outer.fail("targets", "must be a list of names")
    for target in targets:
        try:
            re.compile(target)
        except re.error:
            raise outer.fail("targets", f"{target} is not a regular expression") from None
    fields = ConfigFields(weights, f"{where}.weights")
    if weights.get("type") == "float":
        fields.require({"num_bits": (8,), "strategy": ("channel", "tensor", "block", None), "symmetric": (True, None)})
        return _Scheme(8, None, True, tuple(targets), False, True, fp8.block_of(fields, "block_structure"))
    strategies = ("channel", "tensor", "group", None)
    fields.require({"num_bits": (4, 8), "type": ("int",), "dynamic": (False, None), "strategy": strategies})
    symmetric = fields.boolean("symmetric", True)
    integers = symmetric and fields.integer("num_bits") == 8 and _by_token(group.get("input_activations"))
    return _Scheme(fields.integer("num_bits"), fields.group_size("group_size"), symmetric, tuple(targets), integers)


def _by_token(activations: Any) -> bool:
    """Whether activations are quantised as in our w8a8."""
    required = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    return isinstance(activations, dict) and required.items() <= activations.items()


METHOD = Method("compressed-tensors", _open)
