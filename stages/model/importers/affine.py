"""Asymmetric quantisation, `w = s (q - z)`, which all methods share: numbers, zeros and scales in a format of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llama_npu2.frozen import frozen
from stages.model.importers import Held
from stages.model.importers.directory import Tensors
from stages.weights.constants import GROUP
from stages.weights.format import Shape
from stages.weights.formats import int4_f32, int8_f32
from stages.weights.grouped import Grouped

SCALES = ("BF16", "F16", "F32")
"""The dtypes that scales may have."""


@frozen
class Affine:
    """A quantised matrix."""

    numbers: np.ndarray
    """int16 `[rows, cols]`, unsigned."""
    zeros: np.ndarray
    """int16 `[rows, groups]`, unsigned."""
    scales: np.ndarray
    """f32 `[rows, groups]`."""


def words(count: int, bits: int) -> int:
    """Return how many words of 32 bits hold `count` numbers."""
    return -(-count * bits // 32)


def words_to_numbers(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack i32 `[..., n]` to unsigned numbers of 4 or 8 bits, the lowest first: int16 `[..., n * 32 / bits]`."""
    numbers = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return numbers.astype(np.int16)


def equal_groups(cols: int, size: int) -> np.ndarray:
    """Return the group of each column, where groups have `size` columns."""
    return np.arange(cols) // size


def held(
    tensors: Tensors,
    parts: Sequence[str],
    shape: Shape,
    bits: int,
    groups: np.ndarray,
    symmetric: bool,
    read: Callable[[], Affine],
) -> Held:
    """Return a quantised tensor.

    Args:
        parts: the file's tensors that it is made of, its scales last.
        groups: the group of each column, from 0.
        symmetric: whether all zeros are in the middle of the range.
        read: returns its content.
    """
    wide = tensors.entries[parts[-1]].dtype == "F32"
    name = _format(bits, groups, wide, symmetric)

    def stored() -> np.ndarray:
        affine = read()
        check_scales(tensors, parts[-1], affine.scales)
        if name == "f32":
            return affine.scales[:, groups] * (affine.numbers - affine.zeros[:, groups]).astype(np.float32)
        first = groups[::GROUP]
        within = Affine(affine.numbers, affine.zeros[:, first], affine.scales[:, first])
        if name == "int4_f32":
            return _grouped(int4_f32.GROUPED, within, np.zeros_like(within.zeros))
        fits = bits == 4 or symmetric
        return _grouped(int8_f32.GROUPED, within, within.zeros if fits else np.full_like(within.zeros, 128))

    return Held(shape, name, stored, tuple(parts))


def check_scales(tensors: Tensors, name: str, scales: np.ndarray) -> None:
    """Raise UserError for scales that are not finite."""
    if not np.isfinite(scales).all():
        raise tensors.fails(name, "holds a scale that is not a finite number: the checkpoint is damaged")


def _format(bits: int, groups: np.ndarray, wide: bool, symmetric: bool) -> str:
    """Return the format that holds `s (q - z)` exactly.

    `s q - s z` is equal where `s` has at most 11 bits; a `wide` one has 24, and then `q - z` has to fit in a number.
    """
    padded = np.pad(groups, (0, -len(groups) % GROUP), mode="edge").reshape(-1, GROUP)
    if (padded != padded[:, :1]).any() or (wide and bits == 8 and not symmetric):
        return "f32"
    return "int4_f32" if bits == 4 and not wide else "int8_f32"


def _grouped(form: Grouped, affine: Affine, middle: np.ndarray) -> np.ndarray:
    """Return the matrix stored as `s (q - middle) - s (z - middle)`, `middle` int16 `[rows, groups of GROUP]`."""
    rows, cols = affine.numbers.shape
    numbers = np.pad(affine.numbers, ((0, 0), (0, -cols % GROUP))).reshape(rows, -1, GROUP) - middle[..., None]
    minimum = affine.scales * (affine.zeros - middle).astype(np.float32)
    return form.scaled(np.stack([affine.scales, minimum], axis=-1), numbers.astype(np.int8))
