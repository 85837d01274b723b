"""Products and embedding lookup with weights in the grouped formats and in w8a8: those of bf16 weights, by
`format_kernel` of their names, on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from stages.kernels import Kernel, add, format_kernel, gemm, gemv, signature, silu_and_mul
from stages.kernels import embed as embedding
from stages.weights.constants import GROUP, SHORT_GROUP
from stages.weights.formats import Format, formats, w8a8

GROUPED = tuple(f for f in formats().values() if f.values in (GROUP, SHORT_GROUP) and "panels" in f.layouts)
_OF_BF16 = [
    k for k in (*gemm.KERNELS, *gemv.KERNELS, *embedding.KERNELS) if k.host and any(arg.matrix for arg in k.args)
]


def _widened(kernel: Kernel, stored: Format) -> Callable[..., Any]:
    """The reference of a kernel of bf16 weights, of the values of stored ones; f32 until the result is rounded."""

    def reference(*tensors: np.ndarray, **scalars: Any) -> Any:
        args = [arg for arg in kernel.args if not arg.written]
        cols = scalars.pop("cols")
        wide = [stored.dequantise(t, cols) if arg.matrix else t for arg, t in zip(args, tensors, strict=False)]
        return kernel.reference(*wide, **scalars)

    return reference


def integer_product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`x` bf16 `[..., cols]` quantised by rows, `weight` stored as w8a8 `[out_cols, bytes]` -> f32 `[..., out_cols]`:
    exact sums, rounded once, times the scale of the row of `x` and then that of the output."""
    numbers, scale = w8a8.quantise_rows(x)
    weights, scales = w8a8.parts(weight)
    sums = numbers.astype(np.int32) @ weights[:, : x.shape[-1]].T.astype(np.int32)
    return sums.astype(np.float32) * scale * scales[:, 0]


def _of_integers(kernel: Kernel, stored: Format) -> Callable[..., Any]:
    """The reference of a kernel of bf16 weights, of whole numbers on both sides of a product."""

    def reference(*tensors: np.ndarray, **scalars: Any) -> Any:
        given = dict(zip((arg.name for arg in kernel.args if not arg.written), tensors, strict=False))
        if "x" not in given:
            return _widened(kernel, stored)(*tensors, **scalars)
        products = [integer_product(given["x"], given[arg.name]) for arg in kernel.args if arg.matrix]
        if kernel.arg("out").format == "f32":
            return products[0]
        rounded = [product.astype(bfloat16) for product in products]
        if "residual" in given:
            return add.reference(given["residual"], rounded[0])
        return rounded[0] if len(rounded) == 1 else silu_and_mul.reference(*rounded)

    return reference


def _kernels() -> Iterator[Kernel]:
    references = dict.fromkeys(GROUPED, _widened) | {w8a8.FORMAT: _of_integers}
    for stored, reference in references.items():
        for kernel in _OF_BF16:
            yield signature(
                format_kernel(kernel.name, stored.name),
                tuple(
                    replace(arg, format=stored.name, layouts={"cpu": "panels"}) if arg.matrix else arg
                    for arg in kernel.args
                    if not arg.written
                ),
                " ".join(p.name for p in kernel.params),
                reference(kernel, stored),
                writes=tuple(arg for arg in kernel.args if arg.written),
                source=stored.name,
            )


KERNELS = tuple(_kernels())
