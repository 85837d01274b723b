"""What the host makes of a prompt's weights that the array does not multiply as they are stored: 8x8 blocks of bf16, or
of block floating point (`stages.weights.formats.bfp16`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from stages.kernels import HOST_SET, Arg, Kernel, format_kernel, signature
from stages.weights.constants import BLOCK
from stages.weights.formats import bfp16

_LAYOUTS = {"bf16": "blocks", "bfp16": "pairs"}
"""Of what is made, by its format."""


def unpack_kernel(kernel: str, made: str) -> str:
    """The name of `unpack`, or of another that takes weights out of what they lie in, that makes this format."""
    return kernel if made == "bf16" else f"{kernel}_{made}"


def unpacking(
    kernel: str,
    weight: Arg,
    params: str,
    taken: Callable[..., np.ndarray],
    made: str,
    **more: Any,
) -> Kernel:
    """The signature of one that makes the format `made`. `params`: of where in `weight` the outputs lie that `taken`
    gives, by these, as bf16 `[out_cols, cols]`. Block i of eight outputs takes the place of block `to + i * apart` of
    the result. The reference gives values, which are bf16's whatever the format."""

    @functools.wraps(taken)
    def reference(*args: Any, **known: Any) -> np.ndarray:
        values = taken(*args, **known)
        if made == "bf16":
            return values
        return bfp16.dequantise(bfp16.quantise(values), values.shape[1]).astype(bfloat16)

    return signature(
        format_kernel(unpack_kernel(kernel, made), weight.format),
        (weight,),
        f"out_cols cols {params} to apart",
        reference,
        writes=(Arg("out", made, written=True, layouts={HOST_SET: _LAYOUTS[made]}),),
        **more,
    )


def written_part(out: np.ndarray, known: Mapping[str, Any]) -> np.ndarray:
    """What a launch with the scalars `known` writes of a matrix `[rows, cols]`: a view of it, `[blocks, 8, cols]`."""
    return out.reshape(-1, known["apart"], BLOCK, out.shape[-1])[:, known["to"]]


def _rows(weight: np.ndarray, out_cols: int, first: int) -> np.ndarray:
    """`out_cols` rows from `first` on, of a matrix of `rows`."""
    return weight[first:][:out_cols].astype(bfloat16)


KERNELS = (
    unpacking(
        "unpack",
        Arg("weight", layouts={HOST_SET: "blocks"}),
        "first rows",
        _rows,
        "bfp16",
        source="block_float",
    ),
)
