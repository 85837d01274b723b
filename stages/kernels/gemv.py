"""Matrix-vector product for decode and for the LM head: `out = weight @ x`, accumulated in f32, rounded once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.lazy import ml_dtypes, np
from stages.kernels import BF16, F32, Arg, Cost, add, bias, lanes, matrix, rms_norm, signature, silu_and_mul
from stages.kernels.tokens import batched
from stages.weights.formats.bf16 import padded_shape

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Index, MemRef, Number, Variant

    Dim = tuple[Number, int, int]


def reference(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return `weight @ x`, bf16 `[out_cols]`. `weight`: bf16 `[out_cols, cols]`; `x`: bf16 `[cols]`."""
    return reference_f32(weight, x).astype(ml_dtypes.bfloat16)


def reference_f32(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return `weight @ x` without rounding, f32 `[out_cols]`."""
    return weight.astype(np.float32) @ x.astype(np.float32)


def reference_add(weight: np.ndarray, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Return the rounded product plus `residual`, bf16 `[out_cols]`."""
    return add.reference(residual, reference(weight, x))


def reference_bias(weight: np.ndarray, x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the product plus `bias`, bf16 `[out_cols]`, rounded only after the sum."""
    return (reference_f32(weight, x) + bias.astype(np.float32)).astype(ml_dtypes.bfloat16)


def reference_qkv(
    wq: np.ndarray, wk: np.ndarray, wv: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the products of Q, K and V with one vector."""
    return reference(wq, x), reference(wk, x), reference(wv, x)


def reference_qkv_bias(
    wq: np.ndarray, wk: np.ndarray, wv: np.ndarray, x: np.ndarray, bq: np.ndarray, bk: np.ndarray, bv: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the products of Q, K and V with one vector, each plus a bias, rounded only after the sum."""
    return reference_bias(wq, x, bq), reference_bias(wk, x, bk), reference_bias(wv, x, bv)


def reference_silu(gate: np.ndarray, up: np.ndarray, x: np.ndarray, activation: int = 0) -> np.ndarray:
    """Return SwiGLU of two rounded products, or what it is with another activation."""
    return silu_and_mul.reference(reference(gate, x), reference(up, x), activation)


def reference_norm(
    weight: np.ndarray, x: np.ndarray, norm: np.ndarray, eps: float, offset: float = 0.0, once: int | bool = False
) -> np.ndarray:
    """Return the product with the RMS norm of `x`, whose weight is `norm`, bf16 `[cols]`."""
    return reference(weight, rms_norm.reference(x, norm, eps, offset, once))


def reference_norm_bias(
    weight: np.ndarray,
    x: np.ndarray,
    norm: np.ndarray,
    bias: np.ndarray,
    eps: float,
    offset: float = 0.0,
    once: int | bool = False,
) -> np.ndarray:
    """Return the product with the RMS norm of `x` plus `bias`, rounded only after the sum."""
    return reference_bias(weight, rms_norm.reference(x, norm, eps, offset, once), bias)


def reference_norm_f32(
    weight: np.ndarray, x: np.ndarray, norm: np.ndarray, eps: float, offset: float = 0.0, once: int | bool = False
) -> np.ndarray:
    """Return the product with the RMS norm of `x` without rounding it."""
    return reference_f32(weight, rms_norm.reference(x, norm, eps, offset, once))


def reference_norm_swiglu(
    weight: np.ndarray,
    x: np.ndarray,
    norm: np.ndarray,
    eps: float,
    offset: float = 0.0,
    once: int | bool = False,
    activation: int = 0,
) -> np.ndarray:
    """Return SwiGLU of two products with the RMS norm of `x`, or what it is with another activation.

    `weight`: `[2 * out_cols, cols]`, gate's rows, then up's.
    """
    gate, up = np.split(weight, 2)
    return reference_silu(gate, up, rms_norm.reference(x, norm, eps, offset, once), activation)


TILE_BYTES = 16384
"""Most bytes of a weight tile in L1."""

ROWS_PER_LAUNCH = 16384
"""Most output rows of one launch. Longer outputs, such as a vocabulary, are computed by several launches."""


@frozen
class Tiling:
    """How a product is divided: the array streams the weight once, in one stream per column through L2.

    `x` is broadcast from one channel.
    """

    out_cols: int
    """Rows of the weight."""
    cols: int
    """Columns of the weight, elements of `x`."""
    dtype: str
    """The dtype of the output: `bf16` or `f32`."""
    blocked: bool
    """Whether the weight is in 8x8 blocks (the bytes that `gemm` reads). If not, it has `padded` plain rows."""
    herd_rows: int
    """Rows of the herd, which has all columns of the array."""
    tile_m: int
    """Outputs that a core computes in a step."""
    chunk: int
    """Inputs that a core multiplies at a time."""
    steps: tuple[int, ...]
    """Steps of each launch."""

    @property
    def per_step(self) -> int:
        """Outputs of a step."""
        return limits.COLUMNS * self.herd_rows * self.tile_m

    @property
    def padded(self) -> int:
        """Rows of the weight and of the output in DDR: `out_cols` plus padding that nobody reads."""
        return sum(self.steps) * self.per_step

    @property
    def variant(self) -> Variant:
        return air.Variant.of("gemv", BLOCKED=int(self.blocked), COLS=self.cols, KC=self.chunk, ROWS=self.tile_m)

    @property
    def macs(self) -> int:
        return self.padded * self.cols

    @property
    def costs(self) -> Mapping[str, Cost]:
        """Tile function -> cost of one call.

        The vector unit multiplies. A block also takes the operations that spread `x` over it; plain rows also take the
        loads of `x`, which several rows share.
        """
        if self.blocked:
            step = self.tile_m // limits.BLOCK * (self.chunk // limits.BLOCK * 13 + 9)
        else:
            rows = next(n for n in (4, 2, 1) if self.tile_m % n == 0)
            step = self.tile_m // rows * (self.chunk // lanes(self.chunk, 64) * (2 + 3 * rows) + 14 * rows)
        out = 4 * math.ceil(self.tile_m / 16)
        return {"gemv_zero": Cost(), "gemv_step": Cost(vectors=step), "gemv_out": Cost(vectors=out)}

    def __str__(self) -> str:
        return (
            f"gemv {self.out_cols}x{self.cols} {self.dtype}: herd {limits.COLUMNS}x{self.herd_rows}, tile "
            f"{self.tile_m}x{self.chunk}, steps {'+'.join(map(str, self.steps))}, {self.padded} rows in DDR"
        )


def tile(out_cols: int, cols: int, dtype: str = "bf16", blocked: bool = True) -> Tiling:
    """Divide a product into tiles of at most `TILE_BYTES`, so that a step takes at most half of L2 if it can.

    L1 holds each tile twice, and `x`. A blocked tile is one row of blocks, which is contiguous; plain rows take a
    dimension of the transfer. UserError names the limit that no tile size meets.
    """
    what = f"gemv {out_cols}x{cols}"
    grain = limits.BLOCK if blocked else 2
    limits.require_multiple(what, "cols", cols, 2 * limits.BLOCK)
    if blocked:
        limits.require_multiple(what, "out_cols", out_cols, limits.COLUMNS * grain)
    column = padded_shape((out_cols,))[0] // limits.COLUMNS
    half = limits.L2_BYTES // 2
    shapes = [  # rows of the herd, outputs of a tile, inputs of a chunk
        (r, m, k)
        for r in range(limits.ROWS, 0, -1)
        for m in limits.divisors(column, grain, grain if blocked else 16)
        for k in limits.divisors(cols, limits.BLOCK, min(cols // 2, TILE_BYTES // BF16 // m))
        # The blocks of a chunk are contiguous, its plain rows are not.
        if blocked or k <= limits.WRAP
        if column % (r * m) == 0 and (k % limits.VECTOR == 0 or cols % limits.VECTOR)
    ]
    limits.require_any(what, f"cols = {cols} into two chunks of whole vectors ({limits.VECTOR})", shapes)
    fitting = (
        (r, m, k)
        for r, m, k in shapes
        if limits.fits_l1(limits.copies(cols // k) * m * k * BF16, cols * BF16, m * F32, m * BF16)
    )
    shapes = limits.require_any(what, limits.IN_L1, fitting)
    staged = [(r * m * (cols * BF16 + F32), (r, m, k)) for r, m, k in shapes]
    halves = [shape for size, shape in staged if size <= half + shape[0] * shape[1] * F32]
    shapes = halves or limits.require_any(what, limits.IN_L2, (s for size, s in staged if size <= limits.L2_BYTES))
    shapes = limits.steady_first(what, shapes, lambda s: cols // s[2])
    herd_rows, tile_m, chunk = max(shapes, key=lambda s: (limits.steady(cols // s[2]), s[0] * s[1], s[0], s[1] * s[2]))
    tiles = column // (herd_rows * tile_m)
    most = max(1, ROWS_PER_LAUNCH // (limits.COLUMNS * herd_rows * tile_m))
    steps = tuple(min(most, tiles - start) for start in range(0, tiles, most))
    return Tiling(out_cols, cols, dtype, blocked, herd_rows, tile_m, chunk, steps)


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program of a product with a vector.

    Its arguments are `weight`: bf16 `[padded][cols]`, `x`: bf16 `[cols]`, `out`: `[padded]`.
    """
    p = tiling
    shapes = {"weight": air.memref_type((p.padded, p.cols)), "x": air.memref_type((p.cols,))}
    b = air.Builder("gemv", shapes | {"out": air.memref_type((p.padded,), p.dtype)})
    start = 0
    for steps in p.steps:
        with b.launch(steps) as (step, _), b.segment():
            _step(b, p, step * p.per_step + start)
        start += steps * p.per_step
    return b.finish()


def _step(b: Builder, p: Tiling, first: Index) -> None:
    """Compute outputs `first` to `first + per_step`, `tile_m` of them on each core."""
    n, k, r = p.tile_m, p.cols, p.herd_rows
    with b.alloc(air.L2, (limits.COLUMNS, r * n, k), ((limits.COLUMNS, r * n), p.dtype)) as (weight, out):
        b.dma(weight, b.args["weight"].at((0, limits.COLUMNS, r * n * k), (first, r * n, k), (0, k, 1)))
        with b.herd(limits.COLUMNS, r) as (tx, ty), b.alloc(air.L1, (k,), ((n,), "f32")) as (x, acc):
            b.dma(x, b.args["x"].at((0, k, 1)))
            _accumulate(b, p, x, weight, ((tx, 1, r * n * k), (ty, 1, n * k)), acc)
            _write_outputs(b, p, acc, out.at((tx, 1, r * n), (ty, 1, n), (0, n, 1)))
        b.dma(b.args["out"].at((0, limits.COLUMNS, r * n), (first, r * n, 1)), out)


def _write_outputs(b: Builder, p: Tiling, acc: MemRef, out: MemRef) -> None:
    """Move a core's sums to `out`: f32 as they are, bf16 as a tile function rounds them."""
    if p.dtype == "f32":
        b.dma(out, acc)
        return
    with b.alloc(air.L1, (p.tile_m,)) as (rounded,):
        b.call(p.variant, "gemv_out", acc, rounded)
        b.dma(out, rounded)


def _accumulate(b: Builder, p: Tiling, x: MemRef, weight: MemRef, tile: tuple[Dim, Dim], acc: MemRef) -> None:
    """Compute `tile_m` dot products in f32, chunk by chunk of the inputs."""
    m, e = p.tile_m, limits.BLOCK
    b.call(p.variant, "gemv_zero", acc)
    with (
        b.loop(p.cols // p.chunk) as j,
        b.alloc(air.L1, (m // e, p.chunk // e, e, e) if p.blocked else (m, p.chunk)) as (a,),
    ):
        if p.blocked:
            chunk = ((0, m // e, e * p.cols), (j * (p.chunk * e), p.chunk * e, 1))
        else:
            chunk = ((0, m, p.cols), (j * p.chunk, p.chunk, 1))
        b.dma(a, weight.at(*tile, *chunk))
        b.call(p.variant, "gemv_step", a, x, j * p.chunk, acc)


_WEIGHT = matrix("weight")
_PARAMS = "out_cols cols"

_OF_A_TOKEN = (
    signature(
        "gemv", (_WEIGHT, "x"), _PARAMS, reference, tiling=lambda s: tile(s["out_cols"], s["cols"]), program=build
    ),
    signature("gemv_add", (_WEIGHT, "x", "residual"), _PARAMS, reference_add, source="gemv"),
    # The array adds the bias afterwards: steps of the launch share descriptors, so one stream cannot bring it with `x`.
    signature(
        "gemv_bias",
        (_WEIGHT, "x", "bias"),
        _PARAMS,
        reference_bias,
        source="gemv",
        tile_sources=("add", "gemv"),
        tiling=lambda s: bias.biased(tile(s["out_cols"], s["cols"]), 1, s["out_cols"]),
        program=bias.program(build),
    ),
    signature("gemv_silu", (matrix("gate"), matrix("up"), "x"), f"{_PARAMS} activation", reference_silu, source="gemv"),
    *(
        signature(
            f"gemv_qkv{more}",
            (*map(matrix, ("wq", "wk", "wv")), "x", *biases),
            "q_cols kv_cols cols",
            computes,
            writes=("q", "k", "v"),
            source="gemv",
        )
        for more, computes, *biases in (("", reference_qkv), ("_bias", reference_qkv_bias, "bq", "bk", "bv"))
    ),
    # Templates for `stages.kernels.grouped`: the array has these only for weights in formats that it reads as stored.
    *(
        signature(
            name,
            (Arg("weight", matrix=True), "x", "norm", *biased),
            f"{_PARAMS} {rms_norm.PARAMS}{more}",
            computes,
            writes=(Arg("out", dtype, written=True),),
            source="gemv",
            host=False,
        )
        for name, computes, dtype, more, *biased in (
            ("norm_gemv", reference_norm, "bf16", ""),
            ("norm_gemv_bias", reference_norm_bias, "bf16", "", "bias"),
            ("norm_gemv_swiglu", reference_norm_swiglu, "bf16", " activation"),
            ("norm_gemv_f32", reference_norm_f32, "f32", ""),
        )
    ),
    signature(
        "gemv_f32",
        (Arg("weight", layouts={"cpu": "panels", "aie2p": "padded"}, matrix=True), "x"),
        _PARAMS,
        reference_f32,
        writes=(Arg("out", "f32", written=True, layouts={"aie2p": "padded"}),),
        source="gemv",
        tiling=lambda s: tile(s["out_cols"], s["cols"], "f32", blocked=False),
        program=build,
    ),
    # For a weight in plain rows, such as the NPU's vocabulary matrix.
    signature(
        "gemv_rows_f32",
        (Arg("weight", matrix=True), "x"),
        _PARAMS,
        reference_f32,
        writes=(Arg("out", "f32", written=True),),
        source="gemv_rows",
    ),
)

_OF_THE_HOST = ("gemv_silu", "gemv_qkv", "gemv_qkv_bias", "gemv_rows_f32")
"""Products that the array has none of, so that there are none for several tokens either."""

# Templates, too: the array computes for several tokens with weights in groups alone.
KERNELS = (
    *_OF_A_TOKEN,
    *(batched(kernel) for kernel in _OF_A_TOKEN if kernel.operation not in _OF_THE_HOST),
)
