"""Matrix times vector on the array with weights in groups, whose numbers come as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages import air
from stages.air import limits
from stages.kernels import BF16, F32, Cost, silu_and_mul
from stages.kernels.gemv import hand_out
from stages.weights.constants import LANES
from stages.weights.lanes import Cut, padded

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, MemRef, Number, Variant


@dataclass(frozen=True)
class Tiling:
    """Every core of `columns` x `herd_rows` takes a panel in each of `steps` steps, chunk by chunk. A column's panels
    lie together, in the order in which its cores take them; those of a step come to L2 while those before are read.
    `pairs`: a panel of a gate's and one of an up's, which a core makes one of SwiGLU's activation of.
    """

    cut: Cut
    out_cols: int
    cols: int
    dtype: str
    columns: int
    herd_rows: int
    pairs: bool = False

    @property
    def panels(self) -> int:
        """That a core takes in a step."""
        return 2 if self.pairs else 1

    @property
    def core_bytes(self) -> int:
        """Of those."""
        return self.panels * self.cut.panel_bytes

    @property
    def steps(self) -> int:
        return self.cut.panels // (self.columns * self.herd_rows)

    @property
    def launches(self) -> list[int]:
        """Steps of each: a task runs its descriptors only so often."""
        count = -(-self.steps // limits.RUNS)
        most = -(-self.steps // count)
        most += most % 2 if count > 1 else 0
        return [min(most, self.steps - start) for start in range(0, self.steps, most)]

    @property
    def variant(self) -> Variant:
        panels = {"PANELS": self.panels} if self.pairs else {}
        return air.Variant.of("grouped_gemv", COLS=self.cols, STEPS=self.cut.chunks, **_macros(self.cut), **panels)

    @property
    def macs(self) -> int:
        return self.panels * self.cut.panels * self.cut.lanes * self.cols

    @property
    def costs(self) -> Mapping[str, Cost]:
        made, turn = self.cut.grouped.numbers.bits, LANES // self.cut.lanes
        of_numbers, of_group, of_chunk = _VECTORS[made]
        group = int(self.cut.lanes * (of_numbers + turn)) + of_group + turn
        out = 3 + self.cut.lanes // 16
        return {
            "grouped_gemv_zero": Cost(vectors=self.panels * self.cut.lanes // 16),
            "grouped_gemv_step": Cost(scheduled=self.cut.chunk_groups * group + of_chunk),
            "grouped_gemv_out": Cost(vectors=out),
            "grouped_gemv_silu": Cost(vectors=2 * out + silu_and_mul.VECTORS),
        }

    def __str__(self) -> str:
        panels = "pairs of panels" if self.pairs else "panels"
        return (
            f"gemv {self.out_cols}x{self.cols} {self.dtype} in groups: herd {self.columns}x{self.herd_rows}, "
            f"{panels} of {self.cut.lanes} rows in {self.cut.chunks} chunks of {self.cut.chunk_bytes} bytes, "
            f"steps {'+'.join(map(str, self.launches))}"
        )


_VECTORS: Mapping[int, tuple[float, int, int]] = {4: (4, 45, 36), 6: (8.5, 32, 20), 8: (7.5, 26, 4)}
"""Vector operations by the numbers' bits: for a vector of them, besides one for each input that it is multiplied with;
for a group; for a chunk."""


def _macros(found: Cut) -> dict[str, int]:
    """What `kernel_src/aie2p/grouped.h` wants to know."""
    made = found.grouped
    return {"BITS": made.numbers.bits, "FACTORS": made.factors, "GROUPS": found.chunk_groups, "LANES": found.lanes}


def tile(cut: Callable[..., Cut], out_cols: int, cols: int, dtype: str = "bf16", pairs: bool = False) -> Tiling:
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
    tilings = [Tiling(found, out_cols, cols, dtype, *herd, pairs) for herd in herds]
    tilings = [p for p in tilings if all(_runs(p.columns * p.herd_rows, steps) for steps in p.launches)]
    limits.first(what, "a herd that the compiler can place", range(len(tilings)))
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


def _l2(p: Tiling) -> int:
    """Bytes of the panels and outputs of a column, as often as the compiler copies what a loop of such steps fills."""
    element = F32 if p.dtype == "f32" else BF16
    return max(map(limits.copies, p.launches)) * p.herd_rows * (p.core_bytes + p.cut.lanes * element)


def build(tiling: Tiling) -> AirModule:
    """Arguments `weight`: i8 `[panels][panel bytes]` (layout `lanes`; `paired_lanes` has twice as many), `x`: bf16
    `[cols]`, `out`: a row per lane."""
    p = tiling
    weight = air.memref_type((p.panels * p.cut.panels, p.cut.panel_bytes), "i8")
    shapes = {"weight": weight, "x": air.memref_type((p.cols,))}
    b = air.Builder("gemv", shapes | {"out": air.memref_type((p.cut.panels * p.cut.lanes,), p.dtype)})
    start = 0
    for steps in p.launches:
        with b.launch(), b.segment(), b.loop(steps) as step:
            _step(b, p, step + start)
        start += steps
    return b.finish()


def _step(b: Builder, p: Tiling, step: Number) -> None:
    """What every core takes at a time."""
    share, lanes = p.core_bytes, p.cut.lanes
    run, rows = p.herd_rows * share, p.herd_rows * lanes
    with b.alloc(air.L2, ((p.columns, run), "i8"), ((p.columns, rows), p.dtype)) as (weight, out):
        b.dma(weight, b.args["weight"].at((0, p.columns, p.steps * run), (step * run, run, 1)))
        with (
            b.herd(p.columns, p.herd_rows) as (tx, ty),
            b.alloc(air.L1, (p.cut.inputs,), ((p.panels * lanes,), "f32")) as (x, acc),
        ):
            whole = x if p.cut.inputs == p.cols else x.at((0, p.cols, 1))
            b.dma(whole, b.args["x"].at((0, p.cols, 1)))
            b.call(p.variant, "grouped_gemv_zero", x, acc)
            _accumulate(b, p, x, weight.at((tx, 1, run), (ty, 1, share), (0, share, 1)), acc)
            mine = out.at((tx, 1, rows), (ty, 1, lanes), (0, lanes, 1))
            if p.pairs:
                _hand_out_pair(b, p, acc, mine)
            else:
                hand_out(b, p.variant, "grouped_gemv_out", p.dtype, acc, mine, lanes)
        b.dma(b.args["out"].at((0, p.columns, p.steps * rows), (step * rows, rows, 1)), out)


def _accumulate(b: Builder, p: Tiling, x: MemRef, panels: MemRef, acc: MemRef) -> None:
    """The products of a core's panels, over their chunks."""
    *place, (_, _, one) = zip(panels.offsets, panels.sizes, panels.strides, strict=True)
    with b.loop(p.panels * p.cut.chunks) as j, b.alloc(air.L1, ((p.cut.chunk_bytes,), "i8")) as (chunk,):
        b.dma(chunk, panels.at(*place, (j * p.cut.chunk_bytes, p.cut.chunk_bytes, one)))
        b.call(p.variant, "grouped_gemv_step", chunk, x, j, acc)


def _hand_out_pair(b: Builder, p: Tiling, acc: MemRef, to: MemRef) -> None:
    lanes = p.cut.lanes
    with b.alloc(air.L1, (p.panels * lanes,), (lanes,)) as (rounded, out):
        b.call(p.variant, "grouped_gemv_silu", acc, rounded, out)
        b.dma(to, out)
