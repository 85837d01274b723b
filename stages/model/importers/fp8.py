"""FP8 in e4m3: `w = s q`, with a scale for each tensor, row or block of rows and columns.

The parts of a matrix `[out, in]` in transformers' checkpoints (`fp8`) are

    weight              f8_e4m3 [out, in]
    weight_scale_inv    one value, [out, 1] or [ceil(out / rows), ceil(in / columns)] for blocks

and scales of activations, which keep 16 bits here. A number has four bits besides its sign's and exponent's, so that
values are bf16 where scales are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np

from stages.model.config import ConfigFields
from stages.model.importers import Held, Method, affine
from stages.model.importers.directory import Tensors
from stages.weights.format import Shape

DTYPE = "F8_E4M3"
Block = tuple[int, int]
"""The rows and columns that share a scale."""

_EXPONENTS = (-116, 118)
"""Exponents of scales with which each number is a normal number of bf16: 448 at most, 2^-9 at least."""
_USUAL = [128, 128]


def held(tensors: Tensors, parts: tuple[str, ...], shape: Shape, block: Block | None) -> Held:
    """Return a matrix. Raises UserError.

    Args:
        parts: the names of its numbers, of others that it is made of, and of its scales.
        block: the rows and columns of a block; None: there is a scale for each row or one for all.
    """
    rows, cols = shape
    tensors.part(parts[0], (DTYPE,), shape)
    height, width = block or (rows, cols)
    blocks = (-(-rows // height), -(-cols // width))
    allowed = [blocks] if block else [(), (1,), (1, 1), (rows,), (rows, 1)]
    entry = tensors.part(parts[-1], affine.SCALES)
    if entry.shape not in allowed:
        raise tensors.fails(parts[-1], f"has shape {list(entry.shape)}, blocks of {height} x {width} imply {blocks}")
    scales = tensors.read(parts[-1]).astype(np.float32).reshape(blocks if block else (-1, 1))
    affine.check_scales(tensors, parts[-1], scales)
    read = partial(_values, tensors, parts[0], scales, rows // len(scales) if not block else height, width)
    if _powers_of_two(scales):
        return Held(shape, "bf16", lambda: read().astype(ml_dtypes.bfloat16), parts)
    return Held(shape, "f32", read, parts, origin="FP8")


def _powers_of_two(scales: np.ndarray) -> bool:
    mantissas, exponents = np.frexp(scales)
    least, most = _EXPONENTS
    return bool(((mantissas == 0.5) & (exponents >= least) & (exponents <= most)).all())


def _values(tensors: Tensors, name: str, scales: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return f32 `[out, in]`. Raises UserError."""
    values = tensors.read(name).astype(np.float32)
    if not np.isfinite(values).all():
        raise tensors.fails(name, "holds a value that is not a number: the checkpoint is damaged")
    for first, row in zip(range(0, len(values), height), scales, strict=True):
        values[first : first + height] *= np.repeat(row, width)[: values.shape[1]]
    return values


def block_of(fields: ConfigFields, name: str, default: list[int] | None = None) -> Block | None:
    """Return the rows and columns of a block in a field, None where it is null. Raises UserError."""
    value = fields.values.get(name, default)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise fields.fail(name, "must be two numbers, rows and columns, or null")
    height, width = (ConfigFields({name: size}, fields.where).integer(name) for size in value)
    return height, width


def _open(fields: ConfigFields) -> Callable[[Tensors, str, Shape], Held | None]:
    fields.require({"fmt": ("e4m3", None), "activation_scheme": ("dynamic", "static", None)})
    return partial(_held, block=block_of(fields, "weight_block_size", _USUAL))


def _held(tensors: Tensors, name: str, shape: Shape, block: Block | None) -> Held | None:
    stem = name.removesuffix("weight")
    scales = stem + "weight_scale_inv"
    if scales not in tensors.entries:
        return None
    beside = [part for part in (stem + "activation_scale",) if part in tensors.entries]
    return held(tensors, (name, *beside, scales), shape, block)


METHOD = Method("fp8", _open)
