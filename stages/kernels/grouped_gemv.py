"""Matrix times vector on the array with weights in groups, whose numbers come as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages import air
from stages.air import limits
from stages.kernels import BF16, F32, Cost, rms_norm, silu_and_mul
from stages.weights.constants import BLOCK, GROUP
from stages.weights.lanes import Cut, padded

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, MemRef, Number, Variant


@dataclass(frozen=True)
class Tiling:
    """Every core of `columns` x `herd_rows` takes a panel in each of `steps` steps, chunk by chunk. A column's panels
    lie together, in the order in which its cores take them; those of a step come to L2 while those before are read.
    `x` comes to all cores at once, and stays; so do their outputs, until all are there.

    `pairs`: a panel of a gate's and one of an up's, which a core makes one of SwiGLU's activation of. `eps`: of the RMS
    norm that every core first makes of `x`, whose weight comes with it; None: of none. `adds`: a residual comes with
    `x` and is added.
    """

    cut: Cut
    out_cols: int
    cols: int
    dtype: str
    columns: int
    herd_rows: int
    pairs: bool = False
    eps: float | None = None
    adds: bool = False

    @property
    def panels(self) -> int:
        """That a core takes in a step."""
        return 2 if self.pairs else 1

    @property
    def core_chunks(self) -> int:
        """Of those."""
        return self.panels * self.cut.chunks

    @property
    def core_bytes(self) -> int:
        """Of those."""
        return self.panels * self.cut.panel_bytes

    @property
    def steps(self) -> int:
        return self.cut.panels // (self.columns * self.herd_rows)

    @property
    def beside(self) -> int:
        """Elements that come with `x`, behind it: a norm's weight, or a residual."""
        return self.cols if self.eps is not None else self.out_cols if self.adds else 0

    @property
    def launches(self) -> list[int]:
        """Steps of each: a task runs its descriptors only so often, and a core keeps its outputs of all."""
        most = min(limits.RUNS, max(1, self.room // (self.cut.lanes * self.element)))
        count = -(-self.steps // most)
        most = -(-self.steps // count)
        most += most % 2 if count > 1 else 0
        return [min(most, self.steps - start) for start in range(0, self.steps, most)]

    @property
    def kept(self) -> int:
        """Outputs that a core keeps."""
        return limits.aligned(max(self.launches) * self.cut.lanes, BF16)

    @property
    def element(self) -> int:
        return F32 if self.dtype == "f32" else BF16

    @property
    def room(self) -> int:
        """Bytes of L1 that chunks, `x` and what comes with it, and sums leave to outputs."""
        beside = F32 * self.sums + BF16 * self.panels * self.cut.lanes
        return limits.L1_BYTES - limits.STACK_BYTES - 2 * self.cut.chunk_bytes - BF16 * self.width - beside

    @property
    def rows(self) -> Mapping[str, int]:
        """Elements of what comes to every core."""
        second = {"residual" if self.adds else "norm": self.beside} if self.beside else {}
        return {"x": self.cols, **second}

    @property
    def width(self) -> int:
        """Elements that come to every core."""
        return limits.aligned(self.cut.inputs + self.beside, BF16)

    @property
    def sums(self) -> int:
        """f32 that a core keeps: those of its panels, two for each group of inputs, and what they begin with."""
        return limits.aligned(self.panels * self.cut.lanes + 2 * self.cut.inputs // GROUP + 1, F32)

    @property
    def variant(self) -> Variant:
        shape = {"COLS": self.cols, "OUTS": self.kept, "STEPS": self.cut.chunks, **macros(self.cut)}
        if self.pairs:
            shape["PANELS"] = self.panels
        if self.adds:
            shape |= {"ADD": self.out_cols, "ROW_STEP": self.herd_rows * self.cut.lanes}
        shape |= {name: 1 for name, wanted in (("KEEP", self.dtype == "f32"), ("NORM", self.eps is not None)) if wanted}
        return air.Variant.of("grouped_gemv", **shape)

    @property
    def macs(self) -> int:
        return self.panels * self.cut.panels * self.cut.lanes * self.cols

    @property
    def costs(self) -> Mapping[str, Cost]:
        norm = 0 if self.eps is None else rms_norm.row_vectors(self.cols)
        return {
            "grouped_gemv_begin": Cost(vectors=norm + FIXED * self.cut.inputs // GROUP),
            "grouped_gemv_step": Cost(
                vectors=-(-self.output_vectors // self.core_chunks), scheduled=chunk_vectors(self.cut)
            ),
        }

    @property
    def output_vectors(self) -> int:
        """Vector operations that a step's outputs take, besides its chunks."""
        lanes = self.panels * self.cut.lanes // 16
        rounded = self.panels * 3 + lanes
        return lanes + rounded + (silu_and_mul.vectors(self.cut.lanes) if self.pairs else 6 if self.adds else 0)

    def __str__(self) -> str:
        panels = "pairs of panels" if self.pairs else "panels"
        norm = ", of a norm" if self.eps is not None else ""
        return (
            f"gemv {self.out_cols}x{self.cols} {self.dtype} in groups{norm}{', residual' if self.adds else ''}: herd "
            f"{self.columns}x{self.herd_rows}, {panels} of {self.cut.lanes} rows in {self.cut.chunks} chunks of "
            f"{self.cut.chunk_bytes} bytes, steps {'+'.join(map(str, self.launches))}"
        )


_VECTORS: Mapping[int, tuple[int, int, int]] = {4: (2, 40, 32), 6: (7, 27, 20), 8: (2, 35, 4)}
"""Vector operations by the numbers' bits, the matrix unit's among them: for a block of 64 numbers; for a group, besides
two for each eight sums; for a chunk."""

FIXED = 28
"""Those that a group of inputs takes until it lies in fixed point."""


def chunk_vectors(found: Cut) -> int:
    """Vector operations that the products of a chunk take."""
    of_block, of_group, of_chunk = _VECTORS[found.grouped.numbers.bits]
    blocks = GROUP * found.lanes // BLOCK**2
    return found.chunk_groups * (blocks * of_block + 2 * found.lanes // BLOCK + of_group) + of_chunk


def macros(found: Cut) -> dict[str, int]:
    """What `kernel_src/aie2p/grouped.h` wants to know."""
    made = found.grouped
    return {"BITS": made.numbers.bits, "FACTORS": made.factors, "GROUPS": found.chunk_groups, "LANES": found.lanes}


def tile(
    cut: Callable[..., Cut],
    out_cols: int,
    cols: int,
    dtype: str = "bf16",
    pairs: bool = False,
    eps: float | None = None,
    adds: bool = False,
) -> Tiling:
    """So many cores that loading another takes longer than what it saves. `cut`: of the weight's format. Logits, which
    are f32, have as many rows as fill the array."""
    what = f"gemv {out_cols}x{cols}"
    limits.require_multiple(what, "cols", cols, 2 * limits.BLOCK)
    found = cut(out_cols if dtype == "bf16" else padded(out_cols), cols, 2 if pairs else 1)
    herds = [
        (columns, rows)
        for columns in range(limits.COLUMNS, 0, -1)
        for rows in range(limits.ROWS, 0, -1)
        if found.panels % (columns * rows) == 0
    ]
    tilings = [Tiling(found, out_cols, cols, dtype, *herd, pairs, eps, adds) for herd in herds]
    tilings = [p for p in tilings if all(_runs(p.columns * p.herd_rows, steps) for steps in p.launches)]
    limits.first(what, "a herd that the compiler can place", range(len(tilings)))
    tilings = [p for p in tilings if _fits_l1(p)]
    limits.first(what, f"L1 ({limits.L1_BYTES} bytes)", range(len(tilings)))
    tilings = [p for p in tilings if _l2(p) <= limits.L2_BYTES]
    limits.first(what, f"L2 ({limits.L2_BYTES} bytes)", range(len(tilings)))
    return min(tilings, key=_operations)


def _runs(cores: int, steps: int) -> bool:
    """Whether the compiler makes something of it that ends. It puts herds of two to four cores into one column, and
    then a second step never comes (mlir-air of 2026-05-08; found by running the locks of what it made)."""
    return limits.cuttable(steps) and (steps == 1 or cores == 1 or cores > limits.ROWS)


LOAD_OPERATIONS = 7714
"""Vector operations in the time in which a core is loaded: 6 us of 1.4 cycles each, at 1.8 GHz
(`stages.estimate.constants`)."""

_BYTES = 7
"""That a column's stream brings in the time of one: 9.5 GB/s."""

_ARRAY_BYTES = 47
"""That DDR brings in the time of one: 60 GB/s."""


def _operations(p: Tiling) -> float:
    """What a launch takes, in vector operations: loading its cores, one after the other, and in each step what is
    longest, the products of its panels, its column's stream or all columns'."""
    products = p.panels * p.cut.chunks * p.costs["grouped_gemv_step"].scheduled
    stream = p.herd_rows * p.core_bytes
    longest = max(products, stream / _BYTES, p.columns * stream / _ARRAY_BYTES)
    return len(p.launches) * p.columns * p.herd_rows * LOAD_OPERATIONS + p.steps * longest


def _fits_l1(p: Tiling) -> bool:
    """Whether the outputs of a launch fit beside what a core holds besides."""
    return p.room >= p.kept * p.element


def _l2(p: Tiling) -> int:
    """Bytes of a column's panels, as often as the compiler copies what a loop of such steps fills, and of outputs. It
    puts up to `limits.ROWS` cores into one column, whose L2 has all of theirs."""
    panels = max(map(limits.copies, p.launches)) * p.herd_rows * p.core_bytes
    outputs = p.herd_rows * p.kept * p.element
    return (panels + outputs) * (p.columns if p.columns * p.herd_rows <= limits.ROWS else 1)


def build(tiling: Tiling) -> AirModule:
    """Arguments `weight`: i8 `[panels][panel bytes]` (layout `lanes`; `paired_lanes` has twice as many), `x`: bf16
    `[cols]`, `norm`: bf16 `[cols]` or `residual`: bf16 `[out_cols]` if there is one, `out`: a row per lane."""
    p = tiling
    weight = air.memref_type((p.panels * p.cut.panels, p.cut.panel_bytes), "i8")
    shapes = {"weight": weight} | {name: air.memref_type((size,)) for name, size in p.rows.items()}
    b = air.Builder("gemv", shapes | {"out": air.memref_type((p.cut.panels * p.cut.lanes,), p.dtype)})
    start = 0
    for steps in p.launches:
        with b.launch(), b.segment():
            _some_steps(b, p, start, steps)
        start += steps
    return b.finish()


def _some_steps(b: Builder, p: Tiling, start: int, steps: int) -> None:
    """Of a launch: those from `start` on."""
    lanes = p.cut.lanes
    mine, column = steps * lanes, p.steps * p.herd_rows * lanes
    fed = b.channel((p.columns, p.herd_rows), (p.columns, p.herd_rows))
    with b.alloc(air.L2, ((p.columns, p.herd_rows * p.core_bytes), "i8")) as (panels,), b.loop(steps) as step:
        _feed(b, p, fed, panels, step + start)
    rows = b.channel((1, 1), (p.columns, p.herd_rows))
    for name, size in p.rows.items():
        b.put(rows, (0, 0), b.args[name].at((0, size, 1)))
    with b.alloc(air.L2, ((p.columns, p.herd_rows * mine), p.dtype)) as (out,):
        with (
            b.herd(p.columns, p.herd_rows) as tile,
            b.alloc(air.L1, (p.width,), ((p.sums,), "f32"), ((p.kept,), p.dtype)) as (x, acc, made),
        ):
            b.get(rows, tile, x if p.width == p.cols else x.at((0, p.cols, 1)))
            if p.beside:
                b.get(rows, tile, x.at((p.cut.inputs, p.beside, 1)))
            # Sums that only the loop uses would be moved into it, and doubled.
            b.call(p.variant, "grouped_gemv_begin", x, acc, *(() if p.eps is None else (p.eps,)))
            _multiply(b, p, start, steps, fed, tile, x, acc, made)
            place = ((tile[0], 1, p.herd_rows * mine), (0, steps, p.herd_rows * lanes), (tile[1], 1, lanes))
            b.dma(out.at(*place, (0, lanes, 1)), made if mine == p.kept else made.at((0, mine, 1)))
        b.dma(b.args["out"].at((0, p.columns, column), (start * p.herd_rows * lanes, p.herd_rows * mine, 1)), out)


def _feed(b: Builder, p: Tiling, fed: Channel, panels: MemRef, step: Number) -> None:
    """A step's panels: to L2, a run for each column, then chunk by chunk to the cores."""
    share, run, chunk = p.core_bytes, p.herd_rows * p.core_bytes, p.cut.chunk_bytes
    b.dma(panels, b.args["weight"].at((0, p.columns, p.steps * run), (step * run, run, 1)))
    with b.parallel(p.columns, p.herd_rows) as (tx, ty), b.loop(p.core_chunks) as j:
        b.put(fed, (tx, ty), panels.at((tx, 1, run), (ty, 1, share), (j * chunk, chunk, 1)))


def _multiply(
    b: Builder, p: Tiling, start: int, steps: int, fed: Channel, tile: tuple[Index, Index], *core: MemRef
) -> None:
    """The products of all steps, chunk by chunk: one loop, because the compiler doubles what any loop takes in. `core`:
    its `x`, sums and outputs."""
    x, acc, made = core
    row = ((tile[0] * p.steps + start) * p.herd_rows + tile[1]) * p.cut.lanes if p.adds else 0
    with b.loop(steps * p.core_chunks) as j, b.alloc(air.L1, ((p.cut.chunk_bytes,), "i8")) as (chunk,):
        b.get(fed, tile, chunk)
        b.call(p.variant, "grouped_gemv_step", chunk, x, j, *((row,) if p.adds else ()), acc, made)
