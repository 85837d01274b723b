"""Matrix-matrix product for prefill: `out = x @ weight.T`, accumulated in f32, rounded once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.lazy import ml_dtypes, np
from stages.kernels import BF16, F32, Arg, Cost, Kernel, Sizes, add, bias, matrix, signature, silu_and_mul
from stages.weights.formats import bfp16 as block_float

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, MemRef, Number, Variant

    Dims = tuple[tuple[Number, int, int], ...]
    Fetch = Callable[[MemRef, Number, tuple[Index, Index]], None]


def reference(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return `x @ weight.T`, bf16 `[rows, out_cols]`. `x`: bf16 `[rows, cols]`; `weight`: bf16 `[out_cols, cols]`."""
    return reference_f32(x, weight).astype(ml_dtypes.bfloat16)


def reference_add(x: np.ndarray, weight: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Return the rounded product plus `residual`, bf16 `[rows, out_cols]`."""
    return add.reference(residual, reference(x, weight))


def reference_bias(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the product plus `bias`, bf16 `[out_cols]`, rounded only after the sum."""
    return (reference_f32(x, weight) + bias.astype(np.float32)).astype(ml_dtypes.bfloat16)


def reference_f32(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return `x @ weight.T`, f32 `[rows, out_cols]`."""
    product: np.ndarray = x.astype(np.float32) @ weight.astype(np.float32, copy=False).T
    return product


def reference_qkv(
    x: np.ndarray, wq: np.ndarray, wk: np.ndarray, wv: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the products of Q, K and V with the same rows."""
    return reference(x, wq), reference(x, wk), reference(x, wv)


def reference_qkv_bias(
    x: np.ndarray, wq: np.ndarray, wk: np.ndarray, wv: np.ndarray, bq: np.ndarray, bk: np.ndarray, bv: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the products of Q, K and V with the same rows, each plus a bias, rounded only after the sum."""
    return reference_bias(x, wq, bq), reference_bias(x, wk, bk), reference_bias(x, wv, bv)


def reference_silu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, activation: int = 0) -> np.ndarray:
    """Return SwiGLU of two rounded products, or what it is with another activation."""
    return silu_and_mul.reference(reference(x, gate), reference(x, up), activation)


def reference_swiglu(x: np.ndarray, weight: np.ndarray, activation: int = 0) -> np.ndarray:
    """Return SwiGLU as `reference_silu`, with gate and up in one matrix.

    `weight`: bf16 `[2 * out_cols, cols]`, in which eight rows of the gate and eight rows of up alternate.
    """
    gate, up = (weight.reshape(-1, 2, limits.BLOCK, weight.shape[1])[:, half] for half in (0, 1))
    return reference_silu(x, gate.reshape(-1, weight.shape[1]), up.reshape(-1, weight.shape[1]), activation)


TILE = 64
"""Edge of the largest tiles: accumulators of `TILE` x `2 * TILE` take half of L1."""

CHUNK = 256
"""Columns of `x` that pass through L2 at a time, at most."""


@frozen
class Tiling:
    """How a product is divided: columns of the array split the rows of `x`, rows of the array the columns of `out`.

    Each core accumulates a tile of `tile_m` x `tile_n` outputs. `x` passes through L2 once per block of output columns.
    It cannot stay there while all weights pass by: a memory tile sends once what it received once, because the compiler
    counts who takes a buffer, and not how often. Where the output columns are no multiple of a large block, a second
    launch with fewer rows of cores computes what the blocks leave.
    """

    rows: int
    """Rows of `x`."""
    cols: int
    """Columns of `x` and of the weight."""
    out_cols: int
    """Rows of the weight."""
    herd_rows: int
    """Rows of the herd, which has all columns of the array."""
    tile_m: int
    """Rows of a core's tile."""
    tile_n: int
    """Columns of a core's tile."""
    tile_k: int
    """Inputs that a core multiplies at a time."""
    x_chunk: int
    """Columns of `x` that pass through L2 at a time."""
    head_dim: int | None = None
    """If given, the output is written to the V halves of `[K | V]` heads of this size; if None, to plain rows."""
    bfp16: bool = False
    """Whether the weight is in block floating point, to which a core converts `x` too: faster, less exact."""
    swiglu: bool = False
    """Whether the product's columns alternate between eight of the gate and eight of up, whose SwiGLU is the output."""
    activation: int = 0
    """The gated activation, by its place in `ACTIVATIONS`."""
    rest_rows: int = 0
    """Rows of the herd of a second launch; 0 for none."""

    @property
    def block_m(self) -> int:
        """Rows of `out` that the herd computes at a time."""
        return limits.COLUMNS * self.tile_m

    @property
    def block_n(self) -> int:
        """Columns of the product that the herd computes at a time."""
        return self.herd_rows * self.tile_n

    @property
    def core_steps(self) -> int:
        return self.cols // self.tile_k

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of the first launch: blocks of rows, and for each of them blocks of output columns."""
        return self.rows // self.block_m, self.out_cols // self.block_n

    @property
    def passes(self) -> int:
        """How often all of `x` passes through L2."""
        return self.steps[1] + bool(self.rest_rows)

    @property
    def out_n(self) -> int:
        """Columns of `out` that a core computes at a time."""
        return self.tile_n // (2 if self.swiglu else 1)

    @property
    def out_width(self) -> int:
        """Columns of `out`."""
        return self.out_cols // (2 if self.swiglu else 1)

    @property
    def run(self) -> int:
        """Contiguous elements of the weight for `tile_k` inputs: a row of 8x8 blocks.

        In block floating point two rows of blocks, whose streams on the core begin at whole lines of 64 bytes.
        """
        return self.tile_k // limits.BLOCK * (2 * _BFP_BLOCK if self.bfp16 else limits.BLOCK**2)

    @property
    def runs(self) -> int:
        """Runs of a tile of the weight."""
        return self.tile_n // (block_float.PAIR if self.bfp16 else limits.BLOCK)

    @property
    def weight_tile(self) -> tuple[int, int]:
        """`runs`, and the elements that each occupies in L1."""
        return self.runs, limits.aligned(self.run) if self.bfp16 else self.run

    @property
    def weight_descriptors(self) -> int:
        """Shim descriptors for one core's weights in one step of the launch.

        A run that is too long for a dimension is split, and takes the dimension that would have held the loop over
        `core_steps`, which then is split too.
        """
        return 1 if self.run <= limits.SHIM_DMA.wrap else limits.descriptors(self.core_steps)

    @property
    def variant(self) -> Variant:
        flags = {name: 1 for name, chosen in (("BFP", self.bfp16), ("SWIGLU", self.swiglu)) if chosen}
        flags |= silu_and_mul.macros(self.activation)
        return air.Variant.of("gemm", TK=self.tile_k, TM=self.tile_m, TN=self.tile_n, **flags)

    @property
    def macs(self) -> int:
        return self.rows * self.cols * self.out_cols

    @property
    def costs(self) -> Mapping[str, Cost]:
        vectors = self.tile_m * self.tile_n // limits.VECTOR
        macs = self.tile_m * self.tile_n * self.tile_k
        activation = silu_and_mul.vectors(self.tile_m * self.tile_n // 2, self.activation) if self.swiglu else 0
        return {
            "gemm_zero": Cost(vectors=2 * vectors),
            "gemm_step": Cost(macs, "bf16_x_bfp16" if self.bfp16 else "bf16"),
            "gemm_out": Cost(vectors=9 * vectors // 2 + activation),
        }

    def __str__(self) -> str:
        return (
            f"gemm {self.rows}x{self.cols}x{self.out_cols}: herd {limits.COLUMNS}x{self.herd_rows}, tile "
            f"{self.tile_m}x{self.tile_k}x{self.tile_n}, {self.x_chunk} columns of x at a time"
            f"{f', {self.rest_rows} rows of cores for the rest' if self.rest_rows else ''}"
            f"{', out V halves of KV' if self.head_dim else ''}{', SwiGLU' if self.swiglu else ''}"
        )


_BFP_BLOCK = limits.BLOCK * block_float.BYTES
"""Bytes of a block in block floating point."""

_LINE_INPUTS = 32
"""Fewest inputs whose blocks in block floating point, of two rows of blocks, fill whole lines of 64: they
take 4 * 2 * 72 bytes."""


def tile(
    rows: int, cols: int, out_cols: int, head_dim: int | None = None, bfp16: bool = False, swiglu: bool = False
) -> Tiling:
    """Divide a product so that it moves the fewest bytes from and to DDR, which favours large output tiles.

    There is a second launch where it saves more than `_LAUNCH_BYTES`, or where no division does without. A core makes
    an even number of steps (`limits.steady`) wherever the shape allows it. Per step, a weight takes one descriptor if
    it can: of several, the compiler frees only one. Arguments as in `Tiling`. UserError names the limit that no tile
    size meets.
    """
    what = f"gemm {rows}x{cols}x{out_cols}"
    limits.require_multiple(what, "rows", rows, limits.COLUMNS * limits.BLOCK)
    limits.require_multiple(what, "cols", cols, 2 * limits.BLOCK)
    limits.require_multiple(what, "out_cols", out_cols, 2 * limits.BLOCK)
    herd_rows = max(r for r in (1, 2, 4) if out_cols % (r * 2 * limits.BLOCK) == 0)
    depth = _LINE_INPUTS if bfp16 and cols % _LINE_INPUTS == 0 else limits.BLOCK
    steps = f"descriptors of at most {limits.ITERATIONS} steps"
    chunk, depths = _chunk(cols, depth)
    limits.require_any(what, steps, depths)
    tilings = [
        Tiling(rows, cols, out_cols, height, m, n, k, chunk, head_dim, bfp16, swiglu, rest_rows=rest)
        for m in limits.divisors(rows // limits.COLUMNS, limits.BLOCK, TILE)
        for n in limits.divisors(out_cols, 2 * limits.BLOCK, 2 * TILE)
        for height, rest in _heights(out_cols // n, herd_rows)
        for k in depths
        if (n if rest else height * n) % (head_dim or 1) == 0
    ]
    # Streams of a weight in block floating point begin at lines: gaps between them take one more dimension in L1.
    tilings = [p for p in tilings if p.weight_tile[1] == p.run or p.run <= limits.WRAP]
    limits.require_any(what, f"whole heads of {head_dim} into {herd_rows * 2 * TILE} columns", tilings)
    tilings = limits.require_any(what, limits.IN_L1, (p for p in tilings if limits.fits_l1(*_l1(p))))
    tilings = limits.require_any(what, limits.IN_L2, (p for p in tilings if sum(_l2(p)) <= limits.L2_BYTES))
    cuttable = (p for p in tilings if limits.cuttable(p.steps[1]))
    tilings = limits.require_any(what, steps, cuttable)
    return min(limits.steady_first(what, tilings, lambda p: p.core_steps), key=_rank)


def _heights(tiles: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the rows of the herds of the first and the second launch that compute so many tiles of a row.

    `most`: of the first launch, if it computes all.
    """
    if tiles % most == 0:
        yield most, 0
    if tiles > limits.ROWS and tiles % limits.ROWS:
        yield limits.ROWS, tiles % limits.ROWS


def _chunk(cols: int, depth: int) -> tuple[int, list[int]]:
    """Return the longest chunk of columns whose loops the compiler can split, and the depths of tiles that divide it.

    `depth`: what a chunk is a multiple of.
    """
    for chunk in limits.divisors(cols, max(depth, 2 * limits.BLOCK), max(2 * depth, min(CHUNK, cols // 2))):
        depths = [k for k in limits.divisors(chunk, limits.BLOCK, TILE) if limits.cuttable(chunk // k)]
        if depths and limits.cuttable(cols // chunk):
            return chunk, depths
    return cols, []


def _rank(p: Tiling) -> tuple[float, ...]:
    """Return the rank of a tiling: the lowest is the best."""
    split, moved = p.weight_descriptors > 1, ddr_bytes(p) + _LAUNCH_BYTES * bool(p.rest_rows)
    return not limits.steady(p.core_steps), moved, p.tile_k < 32, -p.tile_m * p.tile_n, split, -p.tile_k


_LAUNCH_BYTES = 24_000_000
"""Bytes that DDR brings in the time that a launch takes to load its cores: 0.4 ms at 60 GB/s (`doit estimate`)."""


def _l1(p: Tiling) -> tuple[int, int, int]:
    """Return the bytes of accumulators, of `x` tiles and of weight tiles on one core."""
    copies = limits.copies(p.core_steps)
    weight = math.prod(p.weight_tile) * (1 if p.bfp16 else BF16)
    return F32 * p.tile_m * p.tile_n, copies * BF16 * p.tile_m * p.tile_k, copies * weight


def _l2(p: Tiling) -> tuple[int, int]:
    """Return the bytes of `x` and of finished output in one memory tile. Both are double-buffered."""
    return 2 * BF16 * p.tile_m * p.x_chunk, 2 * BF16 * p.herd_rows * p.tile_m * p.out_n


def ddr_bytes(p: Tiling) -> int:
    """Return the bytes that the whole product reads from and writes to DDR."""
    weight = p.cols * p.out_cols * (block_float.BYTES / limits.BLOCK if p.bfp16 else BF16)
    return int(BF16 * p.rows * (p.cols * p.passes + p.out_width) + weight * p.steps[0])


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program with the arguments `x`, `weight` and `out`.

    `x`: bf16 `[rows][cols]`. `weight`: 8x8 blocks of `[out_cols][cols]`, in bf16 (layout `blocks`) or in block floating
    point (i8, layout `pairs`). `out`: bf16 `[rows][out_cols]`; `[rows][2 * out_cols]` if V halves are written,
    `[rows][out_cols / 2]` for SwiGLU.
    """
    p = tiling
    width = p.out_width * (2 if p.head_dim else 1)
    shapes = {"x": (p.rows, p.cols), "weight": (p.out_cols, p.cols), "out": (p.rows, width)}
    types = {name: air.memref_type(shape) for name, shape in shapes.items()}
    if p.bfp16:
        types["weight"] = air.memref_type(
            block_float.pairs_shape((p.out_cols, p.cols // limits.BLOCK * block_float.BYTES)), "i8"
        )
    b = air.Builder("gemm", types)
    with b.launch(*p.steps) as (i, j), b.segment():
        _stream(b, p, i * p.block_m, Columns(p, j))
    if p.rest_rows:
        with b.launch(p.steps[0], together=False) as (i, _), b.segment():
            _stream(b, replace(p, herd_rows=p.rest_rows), i * p.block_m, Columns(p, p.steps[1]))
    return b.finish()


@frozen
class Columns:
    """A block of output columns."""

    of: Tiling
    """How the blocks before it are divided."""
    number: Number

    def first(self, unit: int) -> Number:
        """Return its first column, in units of so many, of which tiles have a whole number."""
        return self.number * (self.of.herd_rows * self.of.out_n // unit)


def _stream(b: Builder, p: Tiling, row: Index, columns: Columns) -> None:
    """Compute rows `row` to `row + block_m` of a block of output columns; `x` passes through L2 chunk by chunk."""
    channel = b.channel((limits.COLUMNS, 1), (limits.COLUMNS, p.herd_rows))
    with b.loop(p.cols // p.x_chunk) as chunk:
        for column in range(limits.COLUMNS):
            _pass_chunk(b, p, channel, column, row + column * p.tile_m, chunk * p.x_chunk)
    _block(b, p, row, columns, lambda a, step, tile: b.get(channel, tile, a))


def _pass_chunk(b: Builder, p: Tiling, channel: Channel, column: int, row: Index, first: Number) -> None:
    """Move one column's rows of a chunk to L2, in 8x8 blocks, then to the column's cores, tile by tile."""
    m, k, e, n = p.tile_m, p.tile_k, limits.BLOCK, p.x_chunk
    with b.alloc(air.L2, (m // e, n // e, e, e)) as (x,):
        blocks = ((0, m // e, e * n), (0, e, e), (0, n // e, e * e), (0, e, 1))
        b.dma(x.at(*blocks), b.args["x"].at((row, m, p.cols), (first, n, 1)))
        with b.loop(n // k) as step:
            b.put(channel, (column, 0), x.at((0, m // e, e * n), (step * (k * e), k * e, 1)))


def _block(b: Builder, p: Tiling, row: Index, columns: Columns, fetch: Fetch) -> None:
    """Compute the outputs of a block of columns from row `row` on in one herd, and move them by way of L2 to DDR."""
    m, n, r = p.tile_m, p.out_n, p.herd_rows
    with b.alloc(air.L2, (limits.COLUMNS, r, m, n)) as (staged,):
        with b.herd(limits.COLUMNS, r) as tile, b.alloc(air.L1, (2, m, p.tile_n)) as (acc,):
            b.call(p.variant, "gemm_zero", acc)
            _accumulate(b, p, acc, columns.first(n) + tile[1], tile, fetch)
            b.call(p.variant, "gemm_out", acc)
            b.dma(staged.at(*_by_rows(p, tile)), acc.at((0, 1, m * n), (0, m, n), (0, n, 1)))
        source = ((0, limits.COLUMNS, r * m * n), (0, m, n), (0, r, m * n), (0, n, 1))
        b.dma(b.args["out"].at(*_drain(p, row, columns)), staged.at(*source))


def _accumulate(b: Builder, p: Tiling, acc: MemRef, col: Index, tile: tuple[Index, Index], fetch: Fetch) -> None:
    """Add `x @ weight.T` of column `col` of tiles to `acc`, in steps of `tile_k` inputs."""
    m, k, e = p.tile_m, p.tile_k, limits.BLOCK
    weight = (p.weight_tile, "i8" if p.bfp16 else "bf16")
    with b.loop(p.core_steps) as step, b.alloc(air.L1, (m // e, k // e, e, e), weight) as (a, w):
        fetch(a, step, tile)
        source = b.args["weight"].at((col * p.runs, p.runs, p.core_steps * p.run), (step * p.run, p.run, 1))
        b.dma(w if p.weight_tile[1] == p.run else w.at((0, p.runs, p.weight_tile[1]), (0, p.run, 1)), source)
        b.call(p.variant, "gemm_step", a, w, acc)


def _by_rows(p: Tiling, tile: tuple[Index, Index]) -> Dims:
    """Return the pattern that writes the 8x8 blocks of a finished tile to L2 as whole rows."""
    m, n, e = p.tile_m, p.out_n, limits.BLOCK
    place = ((tile[0], 1, p.herd_rows * m * n), (tile[1], 1, m * n))
    return (*place, (0, m // e, e * n), (0, n // e, e), (0, e, n), (0, e, 1))


def _drain(p: Tiling, row: Index, columns: Columns) -> Dims:
    """Return the pattern of a block of outputs in DDR.

    The offset of the array's columns stays 0: the compiler splits the transfer by them and drops an offset of that
    dimension.
    """
    m, n, r, hd, width = p.tile_m, p.out_n, p.herd_rows, p.head_dim, p.out_width
    if hd is None:
        return ((0, limits.COLUMNS, m * width), (row, m, width), (columns.first(n), r, n), (0, n, 1))
    heads, wide = r * n // hd, 2 * p.out_cols
    return ((0, limits.COLUMNS, m * wide), (row, m, wide), (columns.first(hd), heads, 2 * hd), (hd, hd, 1))


_PARAMS = "rows cols out_cols"


def _cut(sizes: Sizes, bfp16: bool = False) -> Tiling:
    """Return the tiling of a launch. The scalar `head_dim`, if there is one, says that V halves are written."""
    return tile(sizes["rows"], sizes["cols"], sizes["out_cols"], sizes.get("head_dim"), bfp16)


def _cut_swiglu(sizes: Sizes, bfp16: bool = False) -> Tiling:
    cut = tile(sizes["rows"], sizes["cols"], 2 * sizes["out_cols"], bfp16=bfp16, swiglu=True)
    return replace(cut, activation=sizes.get("activation", 0))


def _on_array(name: str, weight: Arg, params: str = _PARAMS, computed: Callable[..., Any] = reference) -> Kernel:
    """Return a product for prompts that exists on the array only."""
    cut = _cut_swiglu if computed is reference_swiglu else _cut
    return signature(
        name,
        ("x", weight),
        params,
        computed,
        stored=weight.format,
        source="gemm",
        host=False,
        tiling=functools.partial(cut, bfp16=weight.format == "bfp16"),
        program=build,
    )


def _biased(name: str, weight: Arg, params: str = _PARAMS, host: bool = False) -> Kernel:
    """Return a product with a bias. The array adds it afterwards, because a core's streams bring `x` and the weight."""

    def cut(sizes: Sizes) -> bias.Biased:
        product = _cut(sizes, bfp16=weight.format == "bfp16")
        return bias.biased(product, product.rows, product.out_cols, product.head_dim)

    return signature(
        name,
        ("x", weight, "bias"),
        params,
        reference_bias,
        stored=weight.format,
        source="gemm",
        host=host,
        tile_sources=("add", "gemm"),
        tiling=cut,
        program=bias.program(build),
    )


_WEIGHT = matrix("weight")
_BLOCK_FLOAT = Arg("weight", "bfp16", layouts={"aie2p": "pairs"}, matrix=True)

KERNELS = (
    signature("gemm", ("x", _WEIGHT), _PARAMS, reference, tiling=_cut, program=build),
    signature("gemm_add", ("x", _WEIGHT, "residual"), _PARAMS, reference_add, source="gemm"),
    signature("gemm_silu", ("x", matrix("gate"), matrix("up")), f"{_PARAMS} activation", reference_silu, source="gemm"),
    *(
        signature(
            f"gemm_qkv{more}",
            ("x", *map(matrix, ("wq", "wk", "wv")), *biases),
            "rows cols q_cols kv_cols",
            computes,
            writes=("q", "k", "v"),
            source="gemm",
        )
        for more, computes, *biases in (("", reference_qkv), ("_bias", reference_qkv_bias, "bq", "bk", "bv"))
    ),
    signature(
        "gemm_f32",
        ("x", _WEIGHT),
        _PARAMS,
        reference_f32,
        writes=(Arg("out", "f32", written=True),),
        source="gemm",
    ),
    _on_array("gemm", _BLOCK_FLOAT),
    _biased("gemm_bias", _WEIGHT, host=True),
    _biased("gemm_bias", _BLOCK_FLOAT),
    *(_biased("gemm_kv_bias", weight, f"{_PARAMS} pos head_dim") for weight in (_WEIGHT, _BLOCK_FLOAT)),
    *(_on_array("gemm_kv", weight, f"{_PARAMS} pos head_dim") for weight in (_WEIGHT, _BLOCK_FLOAT)),
    *(
        _on_array("gemm_swiglu", weight, f"{_PARAMS} activation", reference_swiglu)
        for weight in (_WEIGHT, _BLOCK_FLOAT)
    ),
)
