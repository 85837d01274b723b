"""Kernels that convert stored weights to the format in which the array multiplies them in prefill.

They run on the host. The result is 8x8 blocks in bf16 or in block floating point (`stages.weights.formats.bfp16`). This
module has the kernel for bf16 weights; `stages.kernels.grouped` has those for group-wise formats. A name is
`[<stored format>_]unpack[_<layout>][_bfp16]`, such as `unpack_bfp16` or `int4_unpack_paired`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from stages.engine.lazy import ml_dtypes, np
from stages.kernels import HOST_SET, Arg, Kernel, signature
from stages.weights.constants import BLOCK
from stages.weights.formats import bfp16

_LAYOUTS = {"bf16": "blocks", "bfp16": "pairs"}
"""Format of the result -> its layout."""


def unpack_kernel(kernel: str, target: str) -> str:
    """Return the name of the unpacking kernel that converts to the format `target`.

    ("unpack", "bfp16") becomes "unpack_bfp16".
    """
    return kernel if target == "bf16" else f"{kernel}_{target}"


def unpacking(
    kernel: str,
    weight: Arg,
    params: str,
    select: Callable[..., np.ndarray],
    target: str,
    **fields: Any,
) -> Kernel:
    """Return a kernel that converts rows of `weight` to the format `target`.

    Block i of eight rows becomes block `to + i * apart` of the result. The reference returns values in bf16, whatever
    the format.

    Args:
        kernel: Name without formats: `unpack`, `unpack_paired`, ...
        params: Names of further scalars, which say where in `weight` the rows are.
        select: Returns these rows as bf16 `[out_cols, cols]`, given the weight and the scalars that it names.
        fields: Further arguments of `signature`.
    """

    @functools.wraps(select)
    def reference(*tensors: Any, **scalars: Any) -> np.ndarray:
        values = select(*tensors, **scalars)
        if target == "bf16":
            return values
        return bfp16.dequantise(bfp16.quantise(values), values.shape[1]).astype(ml_dtypes.bfloat16)

    return signature(
        unpack_kernel(kernel, target),
        (weight,),
        f"out_cols cols {params} to apart",
        reference,
        writes=(Arg("out", target, written=True, layouts={HOST_SET: _LAYOUTS[target]}),),
        stored=weight.format,
        **fields,
    )


def written_part(out: np.ndarray, scalars: Mapping[str, Any]) -> np.ndarray:
    """Return the part of the result `out`, `[rows, cols]`, that a launch with these scalars writes.

    It is a view of it, `[blocks, 8, cols]`.
    """
    return out.reshape(-1, scalars["apart"], BLOCK, out.shape[-1])[:, scalars["to"]]


def _rows(weight: np.ndarray, out_cols: int, first: int) -> np.ndarray:
    """Return `out_cols` rows of `weight` from row `first` on, as bf16."""
    return weight[first:][:out_cols].astype(ml_dtypes.bfloat16)


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
