"""Residual add, and RMS norm of the sum, of a token's one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stages import air
from stages.air import limits
from stages.kernels import BF16, Cost, add, lanes, rms_norm, signature

if TYPE_CHECKING:
    from stages.air import AirModule


def reference(a: np.ndarray, b: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """`a`, `b`, `weight` bf16 `[cols]` -> their sum and its norm, bf16 `[cols]`."""
    total = add.reference(a, b)
    return total, rms_norm.reference(total, weight, eps)


@dataclass(frozen=True)
class Tiling:
    """One core. It has two streams in and takes three rows, so they come together in L2."""

    cols: int
    eps: float

    @property
    def macs(self) -> int:
        return 0

    @property
    def costs(self) -> Mapping[str, Cost]:
        return {"add_rms_norm": Cost(vectors=self.cols // lanes(self.cols) * 17 + 16)}

    def __str__(self) -> str:
        return f"add_rms_norm {self.cols}: one core"


def tile(cols: int, eps: float) -> Tiling:
    """UserError if a row is no whole vectors or does not fit L1."""
    what = f"add_rms_norm {cols}"
    limits.require_multiple(what, "cols", cols, limits.VECTOR // 2)
    limits.first(what, f"L1 ({limits.L1_BYTES} bytes)", range(limits.fits_l1(5 * BF16 * cols)))
    return Tiling(cols, eps)


def build(tiling: Tiling) -> AirModule:
    """Arguments `a`, `b`, `weight`, `total`, `out`: bf16 `[cols]`."""
    p = tiling
    row = (0, p.cols, 1)
    b = air.Builder("add_rms_norm", dict.fromkeys(("a", "b", "weight", "total", "out"), air.memref_type((p.cols,))))
    variant = air.Variant.of("add_rms_norm", COLS=p.cols)
    with b.launch(), b.segment(), b.alloc(air.L2, (3 * p.cols,)) as (together,):
        for place, name in enumerate(("a", "b", "weight")):
            b.dma(together.at((place * p.cols, p.cols, 1)), b.args[name].at(row))
        with b.herd(1, 1), b.alloc(air.L1, (3 * p.cols,), (p.cols,), (p.cols,)) as (rows, total, out):
            b.dma(rows, together)
            b.call(variant, "add_rms_norm", rows, total, out, p.eps)
            b.dma(b.args["total"].at(row), total)
            b.dma(b.args["out"].at(row), out)
    return b.finish()


KERNELS = (
    signature(
        "add_rms_norm",
        ("a", "b", "weight"),
        "cols eps:float",
        reference,
        writes=("total", "out"),
        host=False,
        tiling=lambda s: tile(s["cols"], float(s["eps"])),
        program=build,
    ),
)
