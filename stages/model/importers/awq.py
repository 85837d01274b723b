"""AWQ in the `gemm` order of AutoAWQ.

The parts of a matrix `[out, in]` are

    qweight   i32 [in, out / 8]
    qzeros    i32 [groups, out / 8]
    scales    [groups, out]

where the number i of a word, from the lowest bits, is that of output `ORDER[i]` of its eight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from stages.model.config import ConfigFields
from stages.model.importers import Held, Method, affine
from stages.model.importers.affine import Affine, equal_groups, words, words_to_numbers
from stages.model.importers.directory import Tensors
from stages.weights.format import Shape

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _numbers(packed: np.ndarray, rows: int) -> np.ndarray:
    """Unpack i32 `[n, out / 8]` to int16 `[out, n]`."""
    in_words = words_to_numbers(packed, BITS).reshape(len(packed), -1, len(ORDER))
    return in_words[..., np.argsort(ORDER)].reshape(len(packed), -1)[:, :rows].T


def _open(fields: ConfigFields) -> Callable[[Tensors, str, Shape], Held | None]:
    # AutoAWQ's own names, and those that transformers writes.
    fields.require({"bits": (BITS,), "w_bit": (BITS,), "version": ("gemm", "GEMM"), "zero_point": (True,)})
    return partial(_held, size=fields.group_size("q_group_size" if "q_group_size" in fields.values else "group_size"))


def _held(tensors: Tensors, name: str, shape: Shape, size: int | None) -> Held | None:
    stem = name.removesuffix("weight")
    if stem + "qweight" not in tensors.entries:
        return None
    rows, cols = shape
    width = size or cols
    groups = -(-cols // width)
    parts = tuple(stem + part for part in ("qweight", "qzeros", "scales"))
    tensors.part(parts[0], ("I32",), (cols, words(rows, BITS)))
    tensors.part(parts[1], ("I32",), (groups, words(rows, BITS)))
    tensors.part(parts[2], affine.SCALES, (groups, rows))

    def read() -> Affine:
        qweight, qzeros, scales = (tensors.read(part) for part in parts)
        return Affine(_numbers(qweight, rows), _numbers(qzeros, rows), scales.T.astype(np.float32))

    return affine.held(tensors, parts, shape, BITS, equal_groups(cols, width), False, read)


METHOD = Method("awq", _open)
