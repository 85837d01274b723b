"""Products and embedding lookup with weights in the grouped formats and in w8a8: those of bf16 weights, by
`format_kernel` of their names, on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from stages.air import limits
from stages.kernels import (
    HOST_SET,
    Arg,
    Kernel,
    Sizes,
    add,
    feed_forward,
    format_kernel,
    gemm,
    gemv,
    grouped_gemv,
    signature,
    silu_and_mul,
)
from stages.kernels import embed as embedding
from stages.kernels.unpacking import unpacking
from stages.weights.constants import GROUP, SHORT_GROUP
from stages.weights.formats import Format, formats, w8a8
from stages.weights.lanes import Cut, FeedForward, padded

GROUPED = tuple(f for f in formats().values() if f.values in (GROUP, SHORT_GROUP) and "panels" in f.layouts)
_OF_BF16 = [k for k in (*gemm.KERNELS, *gemv.KERNELS, *embedding.KERNELS) if any(a.matrix for a in k.args)]
_ARRAY_SET = "aie2p"
_LANES = "padded_lanes"
"""The layout of a vocabulary on the array."""


UNPACKING = ("unpack", "unpack_paired", "unpack_shared_pairs", "unpack_shared")
"""What takes values out of weights, of any format."""


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


def _streamed(kernel: Kernel) -> bool:
    """Whether it multiplies with weights in an order of their own, on the host or on the array."""
    in_panels = any(arg.matrix and arg.layout(HOST_SET) == "panels" for arg in kernel.args)
    return in_panels if kernel.host else kernel.name in _LAYOUTS


def _stored_args(kernel: Kernel, stored: Format, layouts: Mapping[str, str]) -> tuple[Arg, ...]:
    """What a kernel of bf16 weights reads, with weights of a format."""
    given = (arg for arg in kernel.args if not arg.written)
    return tuple(replace(arg, format=stored.name, layouts=layouts) if arg.matrix else arg for arg in given)


def _cut_scalars(cut_of: Callable[[Sizes], Cut], *names: str) -> dict[str, Callable[[Sizes], int]]:
    """What the host has to know of how a weight is cut that lies as the array takes it."""

    def scalar(name: str, sizes: Sizes) -> int:
        return int(getattr(cut_of(sizes), name))

    return {name: partial(scalar, name) for name in names}


def _cut(stored: Format, rows: int, sizes: Sizes, together: int = 1) -> Cut:
    assert stored.cut is not None
    found: Cut = stored.cut(rows, sizes["cols"], together)
    return found


def _padded_cut(stored: Format, rows: str, sizes: Sizes) -> Cut:
    """Of a vocabulary, whose rows have that name."""
    return _cut(stored, padded(sizes[rows]), sizes)


def _on_array(kernel: Kernel, stored: Format) -> dict[str, Any]:
    """What a kernel says of the array, for `signature`; nothing if it does not run there."""
    if stored.cut is None or kernel.name not in _LAYOUTS:
        return {}
    cut, dtype, pairs = stored.cut, kernel.arg("out").format, _LAYOUTS[kernel.name] == "paired_lanes"
    adds = any(arg.name == "residual" for arg in kernel.args)

    def cut_launch(sizes: Sizes) -> grouped_gemv.Tiling:
        return grouped_gemv.tile(cut, sizes["out_cols"], sizes["cols"], dtype, pairs, sizes.get("eps"), adds)

    return {"tile_source": "grouped_gemv", "tiling": cut_launch, "program": grouped_gemv.build}


_LAYOUTS = {
    **dict.fromkeys(("gemv", "gemv_add", "norm_gemv"), "lanes"),
    "norm_gemv_swiglu": "paired_lanes",
    **dict.fromkeys(("gemv_f32", "norm_gemv_f32"), "padded_lanes"),
}
"""Products that the array makes of weights in groups, and how these lie; those of prompts read them in bf16."""


def _products(stored: Format, reference: Callable[[Kernel, Format], Callable[..., Any]]) -> Iterator[Kernel]:
    for kernel in filter(_streamed, _OF_BF16):
        device = _on_array(kernel, stored)
        lanes = {_ARRAY_SET: _LAYOUTS[kernel.name]} if device else {}
        writes = tuple(arg for arg in kernel.args if arg.written)
        if lanes == {_ARRAY_SET: _LANES}:
            writes = tuple(replace(arg, layouts=lanes) for arg in writes)
        if kernel.host or device:
            yield signature(
                format_kernel(kernel.name, stored.name),
                _stored_args(kernel, stored, ({HOST_SET: "panels"} if kernel.host else {}) | lanes),
                " ".join(p.name for p in kernel.params),
                reference(kernel, stored),
                writes=writes,
                source=stored.name,
                host=kernel.host,
                **device,
            )


def _feed_forward(stored: Format) -> Kernel:
    """A token's, on the array."""
    (kernel,) = feed_forward.KERNELS
    layouts = {"gate_up": "shared_pairs", "down": "shared_lanes"}

    def reference(gate_up: np.ndarray, down: np.ndarray, x: np.ndarray, norm: np.ndarray, **known: Any) -> np.ndarray:
        wide = stored.dequantise(gate_up, known["cols"]), stored.dequantise(down, known["ffn"])
        return feed_forward.reference(*wide, x, norm, known["eps"])

    return replace(
        kernel,
        name=format_kernel(kernel.name, stored.name),
        args=tuple(
            replace(arg, format=stored.name, layouts={_ARRAY_SET: layouts[arg.name]}) if arg.matrix else arg
            for arg in kernel.args
        ),
        reference=reference,
        tiling=lambda sizes: feed_forward.tile(stored, sizes["cols"], sizes["ffn"], sizes["eps"]),
        program=feed_forward.build,
    )


def _of_lanes(stored: Format) -> Iterator[Kernel]:
    """What the host does with weights that lie as the array takes them."""
    source = f"{stored.name}_lanes"
    for kernel in _OF_BF16:
        if kernel.host and not _streamed(kernel):
            rows = "vocab" if any(param.name == "vocab" for param in kernel.params) else "out_cols"
            yield signature(
                format_kernel(kernel.name, stored.name),
                _stored_args(kernel, stored, {HOST_SET: _LANES}),
                " ".join(p.name for p in kernel.params),
                _widened(kernel, stored),
                writes=tuple(arg for arg in kernel.args if arg.written),
                source=source,
                derived=_cut_scalars(partial(_padded_cut, stored, rows), "lanes", "chunks"),
            )
    lying = (
        ("lanes", "first rows", _part_of_rows(stored)),
        ("paired_lanes", "which", _one_of_two(lambda sizes: _cut(stored, sizes["out_cols"], sizes, 2))),
        ("shared_pairs", "which", _one_of_two(lambda sizes: _inside(stored, sizes).pairs)),
        ("shared_lanes", "", _placed(lambda sizes: _outside(stored, sizes).shares)),
    )
    for name, (layout, params, derived) in zip(UNPACKING, lying, strict=True):
        weight = Arg("weight", stored.name, layouts={HOST_SET: layout})
        for made in ("bf16", "bfp16"):
            yield unpacking(name, weight, params, _unpacked(stored), made, source=source, derived=derived)


def _inside(stored: Format, sizes: Sizes) -> FeedForward:
    """Of a feed-forward network, by gate or up."""
    assert stored.feed_forward is not None
    found: FeedForward = stored.feed_forward(sizes["cols"], sizes["out_cols"])
    return found


def _outside(stored: Format, sizes: Sizes) -> FeedForward:
    """By down."""
    return _inside(stored, {"cols": sizes["out_cols"], "out_cols": sizes["cols"]})


def _unpacked(stored: Format) -> Callable[..., np.ndarray]:
    """The reference of what unpacks rows of weights: `out_cols` from `first` on, or those of one of two matrices."""

    def reference(weight: np.ndarray, out_cols: int, cols: int, first: int = 0, which: int = 0) -> np.ndarray:
        rows = weight[first + which * out_cols :][:out_cols]
        return stored.dequantise(rows, cols).astype(bfloat16)

    return reference


def _part_of_rows(stored: Format) -> dict[str, Callable[[Sizes], int]]:
    """`out_cols` rows from `first` on, of `rows`: they begin and end with a panel, and follow one another."""

    def start(sizes: Sizes) -> int:
        lanes = _cut(stored, sizes["rows"], sizes).lanes
        limits.require_multiple(f"a matrix of {sizes['rows']} rows", "the first of a part", sizes["first"], lanes)
        return int(sizes["first"]) // lanes

    return _placed(lambda sizes: _cut(stored, sizes["rows"], sizes), start)


def _one_of_two(cut_of: Callable[[Sizes], Cut]) -> dict[str, Callable[[Sizes], int]]:
    """Every second panel."""
    return _placed(cut_of, lambda sizes: sizes["which"], 2)


def _placed(
    cut_of: Callable[[Sizes], Cut], start: Callable[[Sizes], int] = lambda sizes: 0, step: int = 1
) -> dict[str, Callable[[Sizes], int]]:
    """What the host has to know to take panels out of a matrix: how it is cut, the first, and every how manieth."""
    cut = _cut_scalars(cut_of, "lanes", "chunks", "chunk_groups", "groups", "panels")
    return {**cut, "start": start, "step": lambda sizes: step}


def _kernels() -> Iterator[Kernel]:
    references = dict.fromkeys(GROUPED, _widened) | {w8a8.FORMAT: _of_integers}
    for stored, reference in references.items():
        yield from _products(stored, reference)
        if stored.cut is not None:
            yield from _of_lanes(stored)
            yield _feed_forward(stored)


KERNELS = tuple(_kernels())
