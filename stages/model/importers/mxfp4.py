"""MXFP4 as gpt-oss has it: experts' matrices of numbers of 4 bits, of which 32 share a power of two.

The parts of stacked matrices `[experts, out, in]` are

    ..._blocks   u8 [experts, out, in / 32, 16]   two numbers a byte, the first in the low bits
    ..._scales   u8 [experts, out, in / 32]
"""

from __future__ import annotations

import numpy as np

from stages.model.importers import Held, Method, affine
from stages.model.importers.directory import Tensors
from stages.weights.constants import GROUP
from stages.weights.format import Shape
from stages.weights.formats import mxfp4

DTYPES = ("U8",)


def held(tensors: Tensors, name: str, shape: Shape) -> Held | None:
    """Return a tensor of a name and shape; None if it is not quantised. Raises UserError."""
    parts = (f"{name}_blocks", f"{name}_scales")
    if parts[0] not in tensors.entries:
        return None
    *outer, columns = shape
    groups = -(-columns // GROUP)
    tensors.part(parts[0], DTYPES, (*outer, groups, GROUP // 2))
    tensors.part(parts[1], DTYPES, (*outer, groups))

    def read() -> np.ndarray:
        pairs, scales = tensors.read(parts[0]), tensors.read(parts[1])
        affine.check_scales(tensors, parts[1], mxfp4.scale_values(scales))
        numbers = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*outer, groups, GROUP)
        return mxfp4.stored(scales, numbers)

    return Held(shape, mxfp4.FORMAT.name, read, parts)


METHOD = Method("mxfp4", lambda fields: held)
