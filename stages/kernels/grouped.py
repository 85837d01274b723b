"""Products and embedding lookup with weights in the grouped formats: those of bf16 weights, by `format_kernel` of their
names, on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from stages.kernels import Kernel, format_kernel, gemm, gemv, signature
from stages.kernels import embed as embedding
from stages.weights.formats import Format, formats

GROUPED = tuple(f for f in formats().values() if f.values > 1 and "panels" in f.layouts)
_WEIGHTS = ("weight", "gate", "up")
_OF_BF16 = [
    k for k in (*gemm.KERNELS, *gemv.KERNELS, *embedding.KERNELS) if k.host and "rows" not in k.name.split("_")
]


def _widened(kernel: Kernel, stored: Format) -> Callable[..., Any]:
    """The reference of a kernel of bf16 weights, of the values of stored ones; f32 until the result is rounded."""

    def reference(*tensors: np.ndarray, **scalars: Any) -> Any:
        names = [arg.name for arg in kernel.args if not arg.written]
        cols = scalars.pop("cols")
        wide = [stored.dequantise(t, cols) if n in _WEIGHTS else t for n, t in zip(names, tensors, strict=False)]
        return kernel.reference(*wide, **scalars)

    return reference


def _kernels() -> Iterator[Kernel]:
    for stored in GROUPED:
        for kernel in _OF_BF16:
            yield signature(
                format_kernel(kernel.name, stored.name),
                tuple(
                    replace(arg, format=stored.name, layouts={"cpu": "panels"}) if arg.name in _WEIGHTS else arg
                    for arg in kernel.args
                    if not arg.written
                ),
                " ".join(p.name for p in kernel.params),
                _widened(kernel, stored),
                writes=tuple(arg for arg in kernel.args if arg.written),
                source=stored.name,
            )


KERNELS = tuple(_kernels())
