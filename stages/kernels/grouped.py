"""Kernels for weights in the group-wise formats and in w8a8, derived from the kernels for bf16 weights.

No module defines `int4_gemm`: this one makes it from `gemm`. A name is `<format>_<operation>` (`format_kernel`), for
each format of `GROUPED` and for w8a8. `kernel_src/cpu/<format>.cc` and `<format>_lanes.cc` implement them on the host,
`kernel_src/aie2p/grouped_gemv.cc` and `feed_forward.cc` on the array. Of each format there are

- on the host, every kernel of `gemm`, `gemv`, `embed` and `experts` that reads a bf16 weight in panels, here in the
  format's panels: `int4_gemm`, `int4_gemm_add`, `int4_gemm_silu`, `int4_gemv`, `int4_embed`, `int4_moe_gemv`, ...
- on the host, but for w8a8, the same products with `x` in 8 bits: `int4_a8_gemm`, `int4_a8_moe_gemv`, ...

and if the array reads the format (`Format.cut` is given: int4, int6 and int8)

- on the array, the products of `ARRAY_LAYOUTS`: `int4_gemv`, `int4_gemv_add`, `int4_norm_gemv_swiglu`, ...
- on the host, kernels that read a vocabulary as it lies for the array: `int4_gemv_rows_f32` and `int4_embed_rows`
- on the host, kernels that unpack the array's layouts for prefill (`UNPACKING`): `int4_unpack`, `int4_unpack_paired`,
  `int4_unpack_bfp16`, ...
- on the array, `int4_feed_forward` and `int4_sandwich_feed_forward`
- on the array, all of these for several tokens: `int4_batched_gemv`, `int4_batched_feed_forward`, ...
- on the array, for several tokens, a feed-forward network as two launches: `int4_batched_norm_shared_swiglu` and
  `int4_batched_shared_gemv_add`
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llama_npu2.errors import UserError
from stages.air import limits
from stages.engine.lazy import ml_dtypes, np
from stages.kernels import (
    ACTIVATIONS,
    HOST_SET,
    Arg,
    Kernel,
    Sizes,
    add,
    bias,
    experts,
    feed_forward,
    gemm,
    gemv,
    grouped_gemv,
    rms_norm,
    shared_down,
    silu_and_mul,
)
from stages.kernels import embed as embedding
from stages.kernels.tokens import ONE, Tokens, batched
from stages.kernels.unpacking import unpacking
from stages.weights.constants import GROUP, SHORT_GROUP
from stages.weights.cut import Cut, padded_rows
from stages.weights.format import Format
from stages.weights.formats import formats, w8a8

if TYPE_CHECKING:
    from stages.air import AirModule

GROUPED = tuple(f for f in formats().values() if f.values in (GROUP, SHORT_GROUP) and "panels" in f.layouts)
"""The group-wise formats."""

_TEMPLATES = [
    kernel
    for kernel in (*gemm.KERNELS, *gemv.KERNELS, *embedding.KERNELS, *experts.KERNELS)
    if any(arg.matrix for arg in kernel.args)
]
"""Kernels for bf16 weights that the others are derived from."""

_ARRAY_SET = "aie2p"

_VOCABULARY_LAYOUT = "padded_lanes"

ARRAY_LAYOUTS = {
    "gemv": "lanes",
    "gemv_add": "lanes",
    "gemv_bias": "lanes",
    "norm_gemv": "lanes",
    "norm_gemv_bias": "lanes",
    "norm_gemv_swiglu": "paired_lanes",
    "gemv_f32": _VOCABULARY_LAYOUT,
    "norm_gemv_f32": _VOCABULARY_LAYOUT,
}
"""Products that the array computes with group-wise quantised weights -> the layout in which it reads them. They are all
for decode: in prefill, the array reads weights that the host has unpacked."""

_BIASES = ("bias", "bq", "bk", "bv")
"""Arguments that are added to a product, in the order of the weights."""

UNPACKING = {
    "unpack": ("lanes", "first rows"),
    "unpack_paired": ("paired_lanes", "which"),
    "unpack_shared_pairs": ("shared_pairs", "which"),
    "unpack_shared": ("shared_lanes", ""),
}
"""Kernels that convert weights for prefill, of any format -> the layout that they read, and the scalars that select
rows: `out_cols` rows from `first` on of a matrix of `rows`, or one (0 or 1) of two matrices that alternate."""

Derived = Mapping[str, Callable[[Sizes], int]]
"""As `Kernel.derived`."""


def _dequantised(kernel: Kernel, stored: Format) -> Callable[..., Any]:
    """Return the reference of `kernel` for stored weights: it dequantises them to f32, and rounds only the result."""

    def reference(*tensors: np.ndarray, **scalars: Any) -> Any:
        taken = {param.name for param in kernel.params} & inspect.signature(kernel.reference).parameters.keys()
        args = [arg for arg in kernel.args if not arg.written]
        values = {
            arg.name: stored.dequantise(tensor, scalars["cols"]) if arg.matrix else tensor
            for arg, tensor in zip(args, tensors, strict=False)
        }
        return kernel.reference(**values, **{name: scalars[name] for name in taken & scalars.keys()})

    return reference


def integer_product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the product in w8a8, f32 `[..., out_cols]`.

    It is `(sum over i of x_i w_i) * scale of x's row * scale of w's row`.

    The sums are exact whole numbers, and rounded once. `x`: bf16 `[..., cols]`, quantised here, by rows; `weight`:
    stored as w8a8, `[out_cols, bytes]`.
    """
    numbers, scale = w8a8.quantise_rows(x)
    weights, scales = w8a8.parts(weight)
    sums = numbers.astype(np.int32) @ weights[:, : x.shape[-1]].T.astype(np.int32)
    return sums.astype(np.float32) * scale * scales[:, 0]


def in_bytes(x: np.ndarray, inputs: int) -> np.ndarray:
    """Return rows rounded to 8 bits, f32 `[..., cols]`; each `inputs` of a row, bf16 `[..., cols]`, have a scale."""
    cols = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-cols // inputs), inputs), np.float32)
    padded.reshape(*x.shape[:-1], -1)[..., :cols] = x
    numbers, scales = w8a8.quantise_rows(padded)
    return (numbers * scales).reshape(*x.shape[:-1], -1)[..., :cols]


def byte_product(x: np.ndarray, weight: np.ndarray, stored: Format) -> np.ndarray:
    """Return the product of `x` in 8 bits, by groups as `weight` has them, with the weight, f32 `[..., out_cols]`.

    `x`: bf16 `[..., cols]`; `weight`: stored, `[out_cols, bytes]`.
    """
    product: np.ndarray = in_bytes(x, stored.values) @ stored.dequantise(weight, x.shape[-1]).T
    return product


def _in_eight_bits(kernel: Kernel, stored: Format) -> Callable[..., Any]:
    """Return the reference of `kernel`, which rounds `x`. An embedding lookup is dequantised."""
    whole_rows = stored is w8a8.FORMAT
    product: experts.Product = integer_product if whole_rows else functools.partial(byte_product, stored=stored)

    def reference(*tensors: np.ndarray, **scalars: Any) -> Any:
        inputs = dict(zip((arg.name for arg in kernel.args if not arg.written), tensors, strict=False))
        if kernel.source == experts.SOURCE:
            more = {"activation": scalars["activation"]} if "activation" in scalars else {}
            return kernel.reference(**inputs, **more, product=product)
        if "x" not in inputs:
            return _dequantised(kernel, stored)(*tensors, **scalars)
        products = [product(inputs["x"], inputs[arg.name]) for arg in kernel.args if arg.matrix]
        results = [arg for arg in kernel.args if arg.written]
        if results[0].format == "f32":
            return products[0]
        for sums, name in zip(products, (name for name in inputs if name in _BIASES), strict=False):
            sums += inputs[name].astype(np.float32)
        rounded = [sums.astype(ml_dtypes.bfloat16) for sums in products]
        if "residual" in inputs:
            return add.reference(inputs["residual"], rounded[0])
        if len(results) > 1:
            return tuple(rounded)
        return (
            rounded[0]
            if len(rounded) == 1
            else silu_and_mul.reference(rounded[0], rounded[1], scalars.get("activation", 0))
        )

    return reference


def _stored_args(kernel: Kernel, stored: Format, layouts: Mapping[str, str]) -> tuple[Arg, ...]:
    """Return the arguments of `kernel` with its weights in another format and in these layouts."""
    return tuple(replace(arg, format=stored.name, layouts=layouts) if arg.matrix else arg for arg in kernel.args)


def _reads_panels(kernel: Kernel) -> bool:
    """Return whether the host's kernel reads its weights in panels."""
    return kernel.host and any(arg.matrix and arg.layout(HOST_SET) == "panels" for arg in kernel.args)


def _products(
    stored: Format, reference: Callable[[Kernel, Format], Callable[..., Any]], activations: str = "bf16"
) -> Iterator[Kernel]:
    """Yield the kernels that read a format's panels on the host, or its layouts of `ARRAY_LAYOUTS` on the array.

    With `activations` other than bf16, these are the host's products that take them so: a lookup takes none.
    """
    named = f"{stored.name}{ACTIVATIONS[activations]}"
    for kernel in _TEMPLATES:
        on_array = stored.cut is not None and kernel.name in ARRAY_LAYOUTS and activations == "bf16"
        if not (_reads_panels(kernel) or on_array):
            continue
        if activations != "bf16" and not any(arg.name == "x" for arg in kernel.args):
            continue
        array = {_ARRAY_SET: ARRAY_LAYOUTS[kernel.name]} if on_array else {}
        args = _stored_args(kernel, stored, ({HOST_SET: "panels"} if kernel.host else {}) | array)
        if array == {_ARRAY_SET: _VOCABULARY_LAYOUT}:
            args = tuple(replace(arg, layouts=array) if arg.written else arg for arg in args)
        tiling = _gemv_tiling(kernel, stored) if on_array else None
        one = replace(
            kernel,
            stored=stored.name,
            activations=activations,
            args=args,
            source=f"{named}_{kernel.source}" if kernel.source == experts.SOURCE else named,
            reference=reference(kernel, stored),
            tile_sources=_tile_sources(kernel) if on_array else (),
            tiling=tiling,
            program=_gemv_program if on_array else None,
        )
        yield one
        if tiling:
            yield batched(one, tiling)


def _tile_sources(kernel: Kernel) -> tuple[str, ...]:
    """Return `Kernel.tile_sources` of a product on the array."""
    return ("add", "grouped_gemv") if any(arg.name == "bias" for arg in kernel.args) else ("grouped_gemv",)


def _gemv_program(tiling: grouped_gemv.Tiling | bias.Biased) -> AirModule:
    return bias.program(grouped_gemv.build)(tiling) if isinstance(tiling, bias.Biased) else grouped_gemv.build(tiling)


def _gemv_tiling(kernel: Kernel, stored: Format) -> Callable[..., grouped_gemv.Tiling | bias.Biased]:
    """Return `Kernel.tiling` of a product on the array. A bias for which L1 has no room is added afterwards."""
    cut, dtype, pairs = stored.cut, kernel.arg("out").format, ARRAY_LAYOUTS[kernel.name] == "paired_lanes"
    adds, biased = (any(arg.name == name for arg in kernel.args) for name in ("residual", "bias"))
    assert cut is not None

    def tiling(sizes: Sizes, tokens: Tokens = ONE) -> grouped_gemv.Tiling | bias.Biased:
        out_cols, cols = sizes["out_cols"], sizes["cols"]
        norm = rms_norm.Norm.of(sizes) if "eps" in sizes else None
        tile = functools.partial(grouped_gemv.tile, cut, out_cols, cols, dtype, pairs, norm, adds)
        if biased:
            try:
                one = tile(biased=True)
            except UserError:  # Several tokens then are rounded twice, too.
                return bias.biased(tile(tokens=tokens), tokens.count, out_cols)
            return one if tokens == ONE else tile(biased=True, tokens=tokens)
        return replace(tile(tokens=tokens), activation=sizes.get("activation", 0))

    return tiling


def _feed_forward(kernel: Kernel, stored: Format) -> Iterator[Kernel]:
    """Yield the array's kernels for the feed-forward network of a token, and of several."""
    layouts = {"gate_up": "shared_pairs", "down": "shared_lanes"}

    def reference(gate_up: np.ndarray, down: np.ndarray, *rows: np.ndarray, **sizes: Any) -> np.ndarray:
        weights = stored.dequantise(gate_up, sizes["cols"]), stored.dequantise(down, sizes["ffn"])
        result: np.ndarray = kernel.reference(*weights, *rows, *(sizes[p.name] for p in kernel.params[2:]))
        return result

    def tiling(sizes: Sizes, tokens: Tokens = ONE) -> feed_forward.Tiling:
        sandwich = any(arg.name == "norms" for arg in kernel.args)
        cut = feed_forward.tile(stored, sizes["cols"], sizes["ffn"], rms_norm.Norm.of(sizes), sandwich, tokens)
        return replace(cut, activation=sizes.get("activation", 0))

    one = replace(
        kernel,
        stored=stored.name,
        args=tuple(
            replace(arg, format=stored.name, layouts={_ARRAY_SET: layouts[arg.name]}) if arg.matrix else arg
            for arg in kernel.args
        ),
        reference=reference,
        tiling=tiling,
        program=feed_forward.build,
    )
    yield from (one, batched(one, tiling))


def _shared(kernel: Kernel, stored: Format) -> Kernel:
    """Return the array's kernel for several tokens of a product of `shared_down`."""
    cut = stored.feed_forward
    assert cut is not None
    joins = kernel.source == shared_down.SOURCE

    def pairs(rows: int, cols: int, _: int) -> Cut:
        return cut(cols, rows).pairs

    def tiling(sizes: Sizes, tokens: Tokens = ONE) -> shared_down.Tiling | grouped_gemv.Tiling:
        out_cols, cols = sizes["out_cols"], sizes["cols"]
        if joins:
            return shared_down.tile(stored, out_cols, cols, tokens)
        norm = rms_norm.Norm.of(sizes)
        tiled = grouped_gemv.tile(pairs, out_cols, cols, pairs=True, norm=norm, tokens=tokens)
        return replace(tiled, activation=sizes.get("activation", 0))

    one = replace(
        kernel,
        stored=stored.name,
        args=_stored_args(kernel, stored, {_ARRAY_SET: "shared_lanes" if joins else "shared_pairs"}),
        reference=_dequantised(kernel, stored),
        program=shared_down.build if joins else grouped_gemv.build,
    )
    return batched(one, tiling)


def _vocabulary_kernels(stored: Format) -> Iterator[Kernel]:
    """Yield the host's kernels that read a vocabulary matrix as it lies for the array."""
    for kernel in _TEMPLATES:
        if kernel.host and not _reads_panels(kernel):
            rows = "vocab" if any(param.name == "vocab" for param in kernel.params) else "out_cols"
            yield replace(
                kernel,
                stored=stored.name,
                args=_stored_args(kernel, stored, {HOST_SET: _VOCABULARY_LAYOUT}),
                source=f"{stored.name}_lanes",
                reference=_dequantised(kernel, stored),
                derived=_cut_fields(_matrix_cut(stored, rows), "lanes", "chunks"),
            )


def _matrix_cut(stored: Format, rows: str) -> Callable[[Sizes], Cut]:
    """Return the cut of a matrix as a function of a kernel's sizes; `rows` names its number of rows among them."""
    assert stored.cut is not None
    cut: Callable[..., Cut] = stored.cut
    return lambda sizes: cut(padded_rows(sizes[rows]), sizes["cols"])


def _cut_fields(cut_of: Callable[[Sizes], Cut], *names: str) -> Derived:
    """Return fields of a `Cut` as derived numbers: the host needs them to read a weight that lies as for the array."""

    def derived(name: str) -> Callable[[Sizes], int]:
        return lambda sizes: int(getattr(cut_of(sizes), name))

    return {name: derived(name) for name in names}


def _unpacking_kernels(stored: Format) -> Iterator[Kernel]:
    """Yield the host's kernels of `UNPACKING`, for each format in which the array multiplies in prefill."""
    assert stored.cut is not None and stored.feed_forward is not None
    cut, cut_network = stored.cut, stored.feed_forward

    def first_panel(sizes: Sizes) -> int:
        lanes = cut(sizes["rows"], sizes["cols"]).lanes
        limits.require_multiple(f"a matrix of {sizes['rows']} rows", "the first of a part", sizes["first"], lanes)
        return int(sizes["first"]) // lanes

    def selected(weight: np.ndarray, out_cols: int, cols: int, first: int = 0, which: int = 0) -> np.ndarray:
        rows = weight[first + which * out_cols :][:out_cols]
        return stored.dequantise(rows, cols).astype(ml_dtypes.bfloat16)

    panels = {
        "unpack": _panels(lambda s: cut(s["rows"], s["cols"]), first_panel),
        "unpack_paired": _panels(lambda s: cut(s["out_cols"], s["cols"], 2), lambda s: s["which"], 2),
        "unpack_shared_pairs": _panels(lambda s: cut_network(s["cols"], s["out_cols"]).pairs, lambda s: s["which"], 2),
        "unpack_shared": _panels(lambda s: cut_network(s["out_cols"], s["cols"]).shares, lambda s: 0),
    }
    for name, (layout, params) in UNPACKING.items():
        weight = Arg("weight", stored.name, layouts={HOST_SET: layout})
        for target in ("bf16", "bfp16"):
            source = f"{stored.name}_lanes"
            yield unpacking(name, weight, params, selected, target, source=source, derived=panels[name])


def _panels(cut_of: Callable[[Sizes], Cut], start: Callable[[Sizes], int], step: int = 1) -> Derived:
    """Return how the host finds panels of a matrix.

    The result says how the matrix is cut, and that they are every `step`th panel from `start`.
    """
    fields = _cut_fields(cut_of, "lanes", "chunks", "chunk_groups", "groups", "panels")
    return {**fields, "start": start, "step": lambda sizes: step}


def _kernels() -> Iterator[Kernel]:
    yield from _products(w8a8.FORMAT, _in_eight_bits)
    for stored in GROUPED:
        yield from _products(stored, _dequantised)
        yield from _products(stored, _in_eight_bits, "int8")
        if stored.cut is not None:
            yield from _vocabulary_kernels(stored)
            yield from _unpacking_kernels(stored)
            for kernel in feed_forward.OF_A_TOKEN:
                yield from _feed_forward(kernel, stored)
            yield from (_shared(kernel, stored) for kernel in shared_down.OF_A_TOKEN)


KERNELS = tuple(_kernels())
