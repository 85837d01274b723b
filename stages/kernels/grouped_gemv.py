"""Matrix-vector product on the array with group-wise quantised weights, which cores read as they are stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.kernels import BF16, F32, Cost, rms_norm, silu_and_mul
from stages.kernels.tokens import ACTIVATIONS, ONE, Tokens, in_rows
from stages.weights.constants import BLOCK, GROUP
from stages.weights.cut import Cut, padded_rows

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, MemRef, Number, Variant


@frozen
class Tiling:
    """How a product is divided: in each of `steps` steps, every core multiplies a panel, chunk by chunk.

    A column's panels are contiguous, in the order in which its cores read them. The panels of a step come to L2 while
    those of the step before are read. `x` comes to all cores at once and stays in L1. Outputs stay there too, until the
    launch has computed all of them.

    With several tokens, the cores of a column are given the same panels, and each has tokens of its own (`Tokens`).
    """

    cut: Cut
    """How the weight is cut into panels and chunks; with `pairs`, how each of the two matrices is."""
    out_cols: int
    """Outputs, without padding."""
    cols: int
    """Elements of `x`."""
    dtype: str
    """The dtype of the output: `bf16` or `f32`."""
    columns: int
    """Columns of the herd."""
    herd_rows: int
    """Cores of a column among which its panels are divided."""
    pairs: bool = False
    """Whether a core takes a panel of gate and one of up at a time, and computes one panel of their SwiGLU."""
    norm: rms_norm.Norm | None = None
    """If given, every core first computes this norm of `x`. The norm's weight comes with `x`."""
    adds: bool = False
    """Whether a residual comes with `x` and is added to the rounded product."""
    biased: bool = False
    """Whether a bias comes with `x` and is added to the product before it is rounded."""
    activation: int = 0
    """The gated activation, by its place in `ACTIVATIONS`."""
    tokens: Tokens = ONE
    """The rows of `x`. With several, `herd_rows` is 1."""

    @property
    def herd(self) -> tuple[int, int]:
        """Columns and rows of the herd."""
        return self.columns, self.herd_rows * self.tokens.herd_rows

    @property
    def panels(self) -> int:
        """Panels that a core takes in a step."""
        return 2 if self.pairs else 1

    @property
    def core_chunks(self) -> int:
        """Chunks that a core takes in a step."""
        return self.panels * self.cut.chunks

    @property
    def core_bytes(self) -> int:
        """Bytes of weights that a core takes in a step."""
        return self.panels * self.cut.panel_bytes

    @property
    def steps(self) -> int:
        """Steps of all launches."""
        return self.cut.panels // (self.columns * self.herd_rows)

    @property
    def launches(self) -> list[int]:
        """Steps of each launch.

        There are several if a task would have to run its descriptors more often than it can (`limits.RUNS`), if a core
        could not keep the outputs of all steps, or if the compiler cannot split the loop of all (`limits.cuttable`).
        All launches but the last then have an even number. Where cores have several tokens the last has as many, and
        begins with steps of the one before: of outputs with gaps between tokens a DMA takes fewer.
        """
        most = min(limits.RUNS, max(1, self.room // (self.cut.lanes * self.element)))
        fewest = -(-self.steps // most)
        divided = (self._in_launches(count) for count in range(fewest, fewest + 3))
        return next((found for found in divided if all(map(limits.cuttable, found))), self._in_launches(fewest))

    def _in_launches(self, count: int) -> list[int]:
        """Return the steps of each of `count` launches; fewer may be enough once their steps are made even."""
        most = -(-self.steps // count)
        most += most % 2 if count > 1 else 0
        return [most if self.tokens.each > 1 else min(most, self.steps - at) for at in range(0, self.steps, most)]

    @property
    def kept(self) -> int:
        """Outputs of a token that a core keeps during a launch."""
        return limits.aligned(max(self.launches) * self.cut.lanes, BF16)

    @property
    def element(self) -> int:
        """Bytes of an output."""
        return F32 if self.dtype == "f32" else BF16

    @property
    def room(self) -> int:
        """Bytes of L1 for outputs of a token: those that two chunks, `x` and what comes with it, and sums leave."""
        sums = self.tokens.each * F32 * self.sums + BF16 * self.panels * self.cut.lanes
        return (limits.BUFFER_BYTES - 2 * self.cut.chunk_bytes - BF16 * self.width - sums) // self.tokens.each

    @property
    def rows(self) -> Mapping[str, int]:
        """Arguments that come to every core: name -> elements of a row."""
        sizes = {"norm": self.cols * bool(self.norm), "bias": self.out_cols * self.biased}
        sizes |= {"residual": self.out_cols * self.adds}
        return {"x": self.cols, **{name: size for name, size in sizes.items() if size}}

    @property
    def placed(self) -> Mapping[str, int]:
        """Elements that a row of each of `rows` takes in the memory of a core: `x` is padded to whole chunks."""
        return {name: limits.aligned(size, BF16) for name, size in {**self.rows, "x": self.cut.inputs}.items()}

    @property
    def rows_of_core(self) -> Mapping[tuple[str, int], int]:
        """Where rows begin in the memory of a core, in elements, by argument and token of the core.

        Of arguments that all tokens share there is that of the first.
        """
        rows = [(name, at) for name in self.rows for at in range(self.tokens.each if name in ACTIVATIONS else 1)]
        ends = itertools.accumulate((self.placed[name] for name, _ in rows), initial=0)
        return dict(zip(rows, ends, strict=False))

    @property
    def width(self) -> int:
        """Elements of `x` and what comes with it."""
        (name, _), begin = list(self.rows_of_core.items())[-1]
        return begin + self.placed[name]

    @property
    def sums(self) -> int:
        """Return how many f32 values a core keeps.

        They are sums of its panels, two values per group of inputs, and the value that sums begin with.
        """
        return limits.aligned(self.panels * self.cut.lanes + 2 * self.cut.inputs // GROUP + 1, F32)

    @property
    def variant(self) -> Variant:
        shape = {"COLS": self.cols, "OUTS": self.kept, "STEPS": self.cut.chunks, **macros(self.cut)}
        shape |= self.tokens.macros
        if self.pairs:
            shape["PANELS"] = self.panels
        if self.adds:
            shape |= {"ADD": self.out_cols, "ROW_STEP": self.herd_rows * self.cut.lanes}
        if self.biased:
            shape |= {"BIAS": self.out_cols, "ROW_STEP": self.herd_rows * self.cut.lanes}
        flags = (("KEEP", self.dtype == "f32"), ("NORM", self.norm is not None))
        shape |= {name: 1 for name, chosen in flags if chosen} | (self.norm.macros if self.norm else {})
        shape |= silu_and_mul.macros(self.activation)
        return air.Variant.of("grouped_gemv", **shape)

    @property
    def macs(self) -> int:
        return self.tokens.count * self.panels * self.cut.panels * self.cut.lanes * self.cols

    @property
    def costs(self) -> Mapping[str, Cost]:
        norm, each = self.norm.vectors(self.cols) if self.norm else 0, self.tokens.each
        return {
            "grouped_gemv_begin": Cost(vectors=each * (norm + FIXED * self.cut.inputs // GROUP)),
            "grouped_gemv_step": Cost(
                vectors=-(-each * self.output_vectors // self.core_chunks), scheduled=chunk_vectors(self.cut, each)
            ),
        }

    @property
    def output_vectors(self) -> int:
        """Vector operations on a step's outputs, after the products of its chunks."""
        lanes = self.panels * self.cut.lanes // 16
        rounded = self.panels * 3 + lanes
        sums = 6 * (self.adds + self.biased)
        return lanes + rounded + (silu_and_mul.vectors(self.cut.lanes, self.activation) if self.pairs else sums)

    def __str__(self) -> str:
        panels = "pairs of panels" if self.pairs else "panels"
        told = {self.tokens.text: True, ", of a norm": self.norm, ", bias": self.biased, ", residual": self.adds}
        columns, rows = self.herd
        return (
            f"gemv {self.out_cols}x{self.cols} {self.dtype} in groups{''.join(t for t in told if told[t])}: herd "
            f"{columns}x{rows}, {panels} of {self.cut.lanes} rows in {self.cut.chunks} chunks of "
            f"{self.cut.chunk_bytes} bytes, steps {'+'.join(map(str, self.launches))}"
        )


_VECTORS: Mapping[int, tuple[int, int, int]] = {4: (2, 40, 32), 6: (7, 27, 20), 8: (2, 35, 4)}
"""Bits per number -> vector operations, including those of the matrix unit: per block of 64 numbers; per group, in
addition to two for each eight sums; per chunk."""

FIXED = 28
"""Vector operations that convert a group of inputs to fixed point."""


def chunk_vectors(cut: Cut, each: int = 1) -> int:
    """Return the vector operations of a chunk's products with the inputs of `each` tokens.

    They share the operations on blocks: the matrix unit takes the inputs of all as rows.
    """
    per_block, per_group, per_chunk = _VECTORS[cut.grouped.numbers.bits]
    blocks = GROUP * cut.lanes // BLOCK**2
    of_token = cut.chunk_groups * (2 * cut.lanes // BLOCK + per_group) + per_chunk
    return cut.chunk_groups * blocks * per_block + each * of_token


def macros(cut: Cut) -> dict[str, int]:
    """Return the macros with which `kernel_src/aie2p/grouped.h` is compiled for a cut."""
    grouped = cut.grouped
    return {"BITS": grouped.numbers.bits, "FACTORS": grouped.factors, "GROUPS": cut.chunk_groups, "LANES": cut.lanes}


def tile(
    cut: Callable[..., Cut],
    out_cols: int,
    cols: int,
    dtype: str = "bf16",
    pairs: bool = False,
    norm: rms_norm.Norm | None = None,
    adds: bool = False,
    biased: bool = False,
    tokens: Tokens = ONE,
) -> Tiling:
    """Choose the number of cores with the least time: at some point loading one more takes longer than it saves.

    `cut`: `Format.cut` of the weight's format. Other arguments as in `Tiling`, but tokens are divided here.
    Outputs in f32 are logits, whose rows are padded so that they fill the array. UserError names the limit that no herd
    meets.
    """
    what = f"gemv {out_cols}x{cols}"
    limits.require_multiple(what, "cols", cols, 2 * limits.BLOCK)
    matrix = cut(out_cols if dtype == "bf16" else padded_rows(out_cols), cols, 2 if pairs else 1)
    herds = [
        (columns, rows)
        for columns in range(limits.COLUMNS, 0, -1)
        for rows in range(limits.ROWS if tokens == ONE else 1, 0, -1)
        if matrix.panels % (columns * rows) == 0
    ]
    tilings = [
        Tiling(matrix, out_cols, cols, dtype, *herd, pairs, norm, adds, biased=biased, tokens=way)
        for way in in_rows(tokens.count)
        for herd in herds
    ]
    placeable = (p for p in tilings if all(_terminates(p, steps) for steps in p.launches))
    tilings = limits.require_any(what, "a herd that the compiler can place", placeable)
    # L1 holds the outputs of a launch with everything else.
    tilings = limits.require_any(what, limits.IN_L1, (p for p in tilings if p.room >= p.kept * p.element))
    tilings = limits.require_any(what, limits.IN_L2, (p for p in tilings if _l2(p) <= limits.L2_BYTES))
    return min(tilings, key=_operations)


def _terminates(p: Tiling, steps: int) -> bool:
    """Return whether a compiled launch of so many steps terminates (mlir-air of 2026-05-08).

    The compiler puts herds of two to four cores into one column, and then a second step never comes. Of a herd of two
    or three columns whose cores have tokens of their own, a core never gets its panels. Both were found by simulating
    the locks of the compiler's output.
    """
    cores = math.prod(p.herd)
    has_columns = p.tokens == ONE or p.columns > 3
    return limits.cuttable(steps) and has_columns and (steps == 1 or cores == 1 or cores > limits.ROWS)


LOAD_OPERATIONS = 7714
"""Vector operations in the time that loading a core takes: 6 us at 1.8 GHz and 1.4 cycles per operation
(`stages.estimate.constants`)."""

_BYTES = 7
"""Bytes that a column's stream brings in the time of a vector operation: 9.5 GB/s."""

_ARRAY_BYTES = 47
"""Bytes that DDR brings in the time of a vector operation: 60 GB/s."""


def _operations(p: Tiling) -> float:
    """Return the time of a product in units of a vector operation.

    Cores are loaded one after the other. A step takes as long as the longest of three: the products of its panels, its
    column's stream, the streams of all columns.
    """
    products = p.panels * p.cut.chunks * p.costs["grouped_gemv_step"].scheduled
    stream = p.herd_rows * p.core_bytes
    longest = max(products, stream / _BYTES, p.columns * stream / _ARRAY_BYTES)
    return p.tokens.launches * (len(p.launches) * math.prod(p.herd) * LOAD_OPERATIONS + p.steps * longest)


def _l2(p: Tiling) -> int:
    """Return the bytes of L2 that a column's panels, with the compiler's copies, and its outputs take.

    The compiler puts herds of up to `limits.ROWS` cores into one column, whose L2 then holds the panels of all.
    """
    panels = max(map(limits.copies, p.launches)) * p.herd_rows * p.core_bytes
    outputs = p.herd_rows * p.tokens.together * p.kept * p.element
    return (panels + outputs) * (p.columns if math.prod(p.herd) <= limits.ROWS else 1)


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program with the arguments `weight`, `x`, `norm`, `bias` and `residual` if there are, and `out`.

    `weight`: i8 `[panels][panel bytes]` (layout `lanes` or `padded_lanes`; `paired_lanes` has twice as many panels);
    `x`, `norm`: bf16 `[cols]`; `bias`, `residual`: bf16 `[out_cols]`; `out`: one row per lane of all panels. With
    several tokens, `x`, `residual` and `out` have them as their first dimension.
    """
    p = tiling
    weight = air.memref_type((p.panels * p.cut.panels, p.cut.panel_bytes), "i8")
    shapes = {"weight": weight}
    shapes |= {
        name: air.memref_type(p.tokens.shape(size) if name in ACTIVATIONS else (size,)) for name, size in p.rows.items()
    }
    b = air.Builder("gemv", shapes | {"out": air.memref_type(p.tokens.shape(p.cut.panels * p.cut.lanes), p.dtype)})
    for first in range(0, p.tokens.count, p.tokens.together):
        for number, steps in enumerate(p.launches):
            with b.launch(), b.segment():
                _launch(b, p, min(number * p.launches[0], p.steps - steps), steps, first)
    return b.finish()


def _launch(b: Builder, p: Tiling, start: int, steps: int, first: int) -> None:
    """Compute the outputs of `steps` steps from step `start` on, of a launch's tokens from token `first` on."""
    lanes, count, each = p.cut.lanes, p.tokens.together, p.tokens.each
    several = p.tokens != ONE
    outputs, column = steps * lanes, p.steps * p.herd_rows * lanes
    run = p.herd_rows * outputs
    fed = b.channel((p.columns, p.herd_rows), p.herd)
    with b.alloc(air.L2, ((p.columns, p.herd_rows * p.core_bytes), "i8")) as (panels,), b.loop(steps) as step:
        _feed(b, p, fed, panels, step + start)
    rows = b.channel((1, p.tokens.herd_rows), p.herd)
    for row in range(p.tokens.herd_rows):
        for name, size in p.rows.items():
            token = first + row * each
            if not (several and name in ACTIVATIONS):
                b.put(rows, (0, row), b.args[name].at((0, size, 1)))
            elif each == 1:
                b.put(rows, (0, row), b.args[name].at((token, 1, size), (0, size, 1)))
            else:
                with b.loop(each) as i:
                    b.put(rows, (0, row), b.args[name].at((token + i, 1, size), (0, size, 1)))
    with b.alloc(air.L2, ((p.columns, count * run), p.dtype)) as (out,):
        held = (each * p.sums,), (each * p.kept,)
        with (
            b.herd(*p.herd) as tile,
            b.alloc(air.L1, (p.width,), (held[0], "f32"), (held[1], p.dtype)) as (x, acc, kept),
        ):
            for (name, _), begin in p.rows_of_core.items():
                b.get(rows, tile, x if p.width == p.rows[name] else x.at((begin, p.rows[name], 1)))
            # Sums that only the loop uses would be moved into it, and doubled. So this call is given them.
            b.call(p.variant, "grouped_gemv_begin", x, acc, *((p.norm.eps,) if p.norm else ()))
            _multiply(b, p, start, steps, fed, tile, x, acc, kept)
            place: tuple[tuple[Number, int, int], ...]
            place = ((tile[0], 1, run), (0, steps, p.herd_rows * lanes), (tile[1], 1, lanes), (0, lanes, 1))
            if several:
                place = ((tile[0], 1, count * run), (tile[1], 1, each * run), (0, each * run, 1))
            of_tokens = ((0, each, p.kept),) if each > 1 else ()
            b.dma(out.at(*place), kept if outputs == p.kept else kept.at(*of_tokens, (0, outputs, 1)))
        tokens = ((first, count, p.cut.panels * lanes),) if several else ()
        b.dma(b.args["out"].at((0, p.columns, column), *tokens, (start * p.herd_rows * lanes, run, 1)), out)


def _feed(b: Builder, p: Tiling, fed: Channel, panels: MemRef, step: Number) -> None:
    """Move a step's panels to L2, contiguous for each column, then chunk by chunk to the cores."""
    share, run, chunk = p.core_bytes, p.herd_rows * p.core_bytes, p.cut.chunk_bytes
    b.dma(panels, b.args["weight"].at((0, p.columns, p.steps * run), (step * run, run, 1)))
    with b.parallel(p.columns, p.herd_rows) as (tx, ty), b.loop(p.core_chunks) as j:
        b.put(fed, (tx, ty), panels.at((tx, 1, run), (ty, 1, share), (j * chunk, chunk, 1)))


def _multiply(
    b: Builder, p: Tiling, start: int, steps: int, fed: Channel, tile: tuple[Index, Index], *core: MemRef
) -> None:
    """Multiply the panels of all steps, chunk by chunk. `core`: the core's `x`, sums and outputs.

    It is one loop, because the compiler doubles the buffers that a loop fills, for each loop.
    """
    x, acc, kept = core
    within = tile[1] if p.tokens == ONE else 0
    row = ((tile[0] * p.steps + start) * p.herd_rows + within) * p.cut.lanes if p.adds or p.biased else 0
    with b.loop(steps * p.core_chunks) as j, b.alloc(air.L1, ((p.cut.chunk_bytes,), "i8")) as (chunk,):
        b.get(fed, tile, chunk)
        b.call(p.variant, "grouped_gemv_step", chunk, x, j, *((row,) if p.adds or p.biased else ()), acc, kept)
