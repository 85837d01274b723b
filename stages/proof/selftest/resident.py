"""Probes of one tile function: a core calls it repeatedly on tiles that stay in L1, so that nothing else takes time.

The time of many calls, less that of a program with few, is the function's own. Tiles are those of Llama-3.2-1B's
programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2.frozen import frozen
from stages import air
from stages.kernels import Arg, Kernel, add, flash_attention, kernels, rms_norm, rope, silu_and_mul, token_attention
from stages.proof.selftest import bounds
from stages.targets.npu2 import KERNEL_SET
from stages.weights.constants import BLOCK, GROUP
from stages.weights.formats import formats
from stages.weights.formats.bf16 import from_blocks
from stages.weights.formats.bfp16 import PAIR

if TYPE_CHECKING:
    from stages.air import AirModule, MemRef, Variant

Shape = tuple[int, ...]
Call = tuple[str | int | float, ...]
"""A function, then its arguments: a buffer's name, or a number."""

ROWS, EMB, FFN, HEADS, KV_HEADS, HEAD_DIM = 512, 2048, 8192, 32, 8, 64
"""Sizes of the launches whose tiles are taken."""
EPS = 1e-5


@frozen
class Tile:
    """A buffer in L1."""

    name: str
    shape: Shape
    dtype: str = "bf16"
    filled: bool = False
    """Whether it is filled from DDR at first."""
    drained: int = 0
    """Elements that go to DDR at last."""
    values: Shape = ()
    """The shape of its values, where they are in block floating point or in groups."""
    grouped: str = ""
    """The format of a weight in groups, of which the tile has panels."""
    position: int | None = None
    """The i32 that each row of the last block of each row of blocks begins with; of a table, the one after angles."""

    @property
    def format(self) -> str:
        return self.grouped or ("bfp16" if self.values else self.dtype)

    @property
    def arg(self) -> Arg:
        """The argument in DDR."""
        return Arg(self.name, self.format, layouts={KERNEL_SET: "lanes"} if self.grouped else {})

    @property
    def slot(self) -> Shape:
        """The shape of its values in DDR. Weights in groups are stored by rows."""
        return self.values if self.grouped else (math.prod(self.values or self.shape),)

    def placed(self, values: np.ndarray) -> np.ndarray:
        """Return the tile's values with the position written into its blocks."""
        if self.position is not None:
            last = values.reshape(self.shape)[:, -1]
            last[...] = 0
            last[..., :2] = np.array([self.position], np.int32).view(bfloat16)
        return values


@frozen
class Resident:
    """A probe of one tile function: `first` and `last` run once, `step` runs `calls` times."""

    name: str
    source: str
    calls: int
    tiling: Any
    """The tiling of the launch whose tiles it takes, with the costs of a call."""
    tiles: tuple[Tile, ...]
    step: Call
    reference: Callable[..., np.ndarray]
    """(calls, *filled tiles) -> the elements that are drained."""
    first: Call = ()
    last: Call = ()
    macs: int = 0
    """Multiply-accumulates of one step."""
    values: int = 0
    """Results of one step."""
    whole: bool = False
    """Whether inputs are small whole numbers, whose sums of products are exact."""
    error: Callable[..., np.ndarray] | None = None
    """(want, *filled tiles) -> how far results may be off; None: not at all."""
    shape: Mapping[str, int] = field(default_factory=dict)
    """Constants that the source is compiled with; without them, those of the tiling."""

    @property
    def variant(self) -> Variant:
        return air.Variant.of(self.source, **self.shape) if self.shape else self.tiling.variant

    @property
    def costs(self) -> Any:
        return self.tiling.costs

    def __str__(self) -> str:
        return f"{self.step[0]}, {self.calls} calls on one core"

    def kernel(self) -> Kernel:
        """Return the kernel for a part; its arguments are the filled tiles, flat, and `out`."""
        (drained,) = (tile for tile in self.tiles if tile.drained)
        args = [tile.arg for tile in self.tiles if tile.filled]
        device: dict[str, Any] = {"tiling": lambda sizes: self, "program": build}
        args.append(Arg("out", drained.dtype, written=True))
        return Kernel(self.name, tuple(args), (), self.source, self.reference, host=False, **device)

    def slots(self) -> dict[str, Shape]:
        """Return the shapes of arguments in DDR."""
        filled = {tile.name: tile.slot for tile in self.tiles if tile.filled}
        return filled | {"out": (sum(tile.drained for tile in self.tiles),)}

    def placed(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return values of a filled tile, with its position if it has one."""
        return next(tile for tile in self.tiles if tile.name == name).placed(values)

    def expected(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"out": self.reference(self.calls, *self._filled(values)).reshape(-1)}

    def off(self, values: dict[str, np.ndarray], want: np.ndarray) -> np.ndarray:
        if self.error is None:
            return np.zeros(want.shape)
        return np.broadcast_to(self.error(want, *self._filled(values)).reshape(-1), want.shape)

    def _filled(self, values: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [
            values[tile.name] if tile.grouped else values[tile.name].reshape(tile.values or tile.shape)
            for tile in self.tiles
            if tile.filled
        ]


def build(resident: Resident) -> AirModule:
    """Build the module. Arguments are the filled tiles and `out`, flat."""
    dtypes = {tile.name: tile.dtype for tile in resident.tiles if tile.filled}
    dtypes["out"] = next(tile.dtype for tile in resident.tiles if tile.drained)
    shapes = resident.slots() | {tile.name: (math.prod(tile.shape),) for tile in resident.tiles if tile.filled}
    types = {name: air.memref_type(shape, dtypes[name]) for name, shape in shapes.items()}
    b = air.Builder(resident.name, types)
    tiles = [(tile.shape, tile.dtype) for tile in resident.tiles]
    with b.launch(), b.segment(), b.herd(1, 1), b.alloc(air.L1, *tiles) as buffers:
        named = dict(zip((tile.name for tile in resident.tiles), buffers, strict=True))
        for tile in resident.tiles:
            if tile.filled:
                b.dma(named[tile.name], b.args[tile.name].at((0, math.prod(tile.shape), 1)))
        _call(b, resident, named, resident.first)
        with b.loop(resident.calls):
            _call(b, resident, named, resident.step)
        _call(b, resident, named, resident.last)
        for tile in resident.tiles:
            if tile.drained:
                b.dma(b.args["out"].at((0, tile.drained, 1)), named[tile.name].at((0, tile.drained, 1)))
    return b.finish()


def _call(b: Any, resident: Resident, named: dict[str, MemRef], call: Call) -> None:
    if call:
        function, *arguments = call
        b.call(resident.variant, str(function), *(named[a] if isinstance(a, str) else a for a in arguments))


# Tiles in blocks


def _to_rows(tile: np.ndarray) -> np.ndarray:
    """Reshape blocks by rows `[rows/8, cols/8, 8, 8]` to f32 `[rows, cols]`."""
    high, wide = tile.shape[:2]
    return tile.astype(np.float32).transpose(0, 2, 1, 3).reshape(high * BLOCK, wide * BLOCK)


def _to_tile(rows: np.ndarray) -> np.ndarray:
    """Reshape `[rows, cols]` to blocks by rows, in bf16."""
    high, wide = (size // BLOCK for size in rows.shape)
    return rows.reshape(high, BLOCK, wide, BLOCK).transpose(0, 2, 1, 3).astype(bfloat16)


def _blocks(rows: int, cols: int) -> Shape:
    return (rows // BLOCK, cols // BLOCK, BLOCK, BLOCK)


def _weight(tile: np.ndarray) -> np.ndarray:
    """Reshape a weight's blocks to f32 `[outputs, inputs]`."""
    outs, ins = tile.shape[:2]
    return from_blocks(tile, (outs * BLOCK, ins * BLOCK)).astype(np.float32)


# The tile functions


def _tiling(kernel: str, **sizes: Any) -> Any:
    """Return the tiling of a launch of the model."""
    cut = kernels()[kernel].tiling
    assert cut
    return cut(sizes)


def product(name: str, calls: int, bfp16: bool = False) -> Resident:
    """Return the probe of gemm's step."""
    p = _tiling("bfp16_gemm" if bfp16 else "gemm", rows=ROWS, cols=EMB, out_cols=EMB)
    m, n, k = p.tile_m, p.tile_n, p.tile_k
    weight = Tile("w", _blocks(n, k), filled=True)
    if bfp16:
        weight = Tile("w", p.weight_tile, "i8", filled=True, values=(n // PAIR, k // BLOCK, 2, BLOCK, BLOCK))

    def reference(count: int, a: np.ndarray, w: np.ndarray) -> np.ndarray:
        wide = w.astype(np.float32).transpose(0, 2, 3, 1, 4).reshape(n, k) if bfp16 else _weight(w)
        return _to_tile(_to_rows(a) @ wide.T * count)

    tiles = Tile("a", _blocks(m, k), filled=True), weight, Tile("c", (2 * m * n,), drained=m * n)
    zero, step, out = ("gemm_zero", "c"), ("gemm_step", "a", "w", "c"), ("gemm_out", "c")
    return Resident(name, "gemm", calls, p, tiles, step, reference, zero, out, macs=m * n * k, whole=True)


def vector_product(name: str, calls: int) -> Resident:
    """Return the probe of gemv's step."""
    p = _tiling("gemv", out_cols=EMB, cols=EMB)

    def reference(count: int, a: np.ndarray, x: np.ndarray) -> np.ndarray:
        return (_weight(a) @ x[: p.chunk].astype(np.float32) * count).astype(bfloat16)

    tiles = (
        *(Tile("a", _blocks(p.tile_m, p.chunk), filled=True), Tile("x", (p.cols,), filled=True)),
        *(Tile("acc", (p.tile_m,), "f32"), Tile("rounded", (p.tile_m,), drained=p.tile_m)),
    )
    zero, step, out = ("gemv_zero", "acc"), ("gemv_step", "a", "x", 0, "acc"), ("gemv_out", "acc", "rounded")
    return Resident(name, "gemv", calls, p, tiles, step, reference, zero, out, macs=p.tile_m * p.chunk, whole=True)


def grouped_product(name: str, calls: int, form: str) -> Resident:
    """Return the probe of the step of a product with weights in groups: the first chunk begins its sums each time."""
    p = _tiling(f"{form}_gemv", out_cols=EMB, cols=EMB)
    inputs, lanes = p.cut.chunk_groups * GROUP, p.cut.lanes

    def numbers(panel: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return formats()[form].dequantise(panel, p.cols)[:, :inputs], x[:inputs].astype(np.float32)

    def reference(count: int, panel: np.ndarray, x: np.ndarray) -> np.ndarray:
        weight, row = numbers(panel, x)
        product: np.ndarray = weight @ row
        return product

    def error(want: np.ndarray, panel: np.ndarray, x: np.ndarray) -> np.ndarray:
        weight, row = numbers(panel, x)
        return bounds.grouped(row, weight)

    tiles = (
        Tile("panel", (p.cut.panel_bytes,), "i8", filled=True, values=(lanes, p.cols), grouped=form),
        Tile("x", (p.cols,), filled=True),
        *(Tile("acc", (p.sums,), "f32", drained=lanes), Tile("kept", (p.kept,))),
    )
    first: Call = ("grouped_gemv_begin", "x", "acc")
    step: Call = ("grouped_gemv_step", "panel", "x", 0, "acc", "kept")
    counts = {"macs": lanes * inputs, "values": lanes}
    return Resident(name, "grouped_gemv", calls, p, tiles, step, reference, first, error=error, **counts)


def attention(name: str, calls: int) -> Resident:
    """Return the probe of attention's step: repeating the same keys does not change their weights."""
    heads = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    p = _tiling("flash_attention", seq=ROWS, window=ROWS, **heads)
    d, q, k = HEAD_DIM, p.tile_q, p.tile_k

    def reference(count: int, queries: np.ndarray, kv: np.ndarray) -> np.ndarray:
        keys, values = kv[:, :d], kv[:, d:]
        return _to_tile(flash_attention.reference(_to_rows(queries[:, :-1]), keys, values, k - 1, 1, 1))

    def error(want: np.ndarray, queries: np.ndarray, kv: np.ndarray) -> np.ndarray:
        # No average of values is larger than the largest.
        spread = np.full(want.shape, np.abs(kv[:, d:]).max())
        return bounds.attention(_to_rows(queries[:, :-1]), kv[:, :d], d, spread, want)

    tiles = (
        # Every query is after the last key.
        Tile("q", _blocks(q, p.width), filled=True, drained=q * d, position=k - 1),
        Tile("kv", (k, 2 * d), filled=True),
        *(Tile("acc", (q, d), "f32"), Tile("stats", (2, q), "f32"), Tile("work", (q, k), "f32")),
    )
    first, step = ("fa_init", "q", "acc", "stats"), ("fa_step", 0, "q", "kv", "acc", "stats", "work")
    last, macs = ("fa_out", "acc", "stats", "q"), 2 * q * k * d
    counts = {"macs": macs, "values": q * k}
    return Resident(name, "flash_attention", calls, p, tiles, step, reference, first, last, error=error, **counts)


def attention_of_token(name: str, calls: int) -> Resident:
    """Return the probe of the step of a token's attention. The last key is its own."""
    p = _tiling("token_attention", window=ROWS, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    d, k, own = HEAD_DIM, p.tile_k, p.group * HEAD_DIM

    def reference(count: int, x: np.ndarray, table: np.ndarray, kv: np.ndarray) -> np.ndarray:
        keys, values = (np.tile(half, KV_HEADS) for half in (kv[:, :d], kv[:, d:]))
        tables = np.repeat(table[None], k, axis=0)
        out, _ = token_attention.reference(x[None], tables, k - 1, keys, values, HEADS, KV_HEADS)
        return out.reshape(-1)[:own]

    def error(want: np.ndarray, x: np.ndarray, table: np.ndarray, kv: np.ndarray) -> np.ndarray:
        heads, positive = x.reshape(-1, d), x.copy()
        keys = np.concatenate([kv[:, :d], heads[HEADS : HEADS + 1]])
        positive[(HEADS + KV_HEADS) * d :] = np.abs(positive[(HEADS + KV_HEADS) * d :])
        spread = reference(1, positive, table, np.concatenate([kv[:, :d], np.abs(kv[:, d:])], axis=1))
        # Rotations round queries and the token's own key.
        return bounds.attention(heads[: p.group], keys, d, spread, want, score=2.0**-8)

    names = ("x", "table", "row", "q", "acc", "stats", "scores")
    filled: dict[str, Any] = {"x": {"filled": True}, "table": {"filled": True, "position": k - 1}}
    held = (buffer if isinstance(buffer[0], tuple) else (buffer, "bf16") for buffer in token_attention.token_buffers(p))
    tiles = [Tile(name, *buffer, **filled.get(name, {})) for name, buffer in zip(names, held, strict=True)]
    tiles += [Tile("kv", (k, 2 * d), filled=True), Tile("out", (own,), drained=own)]
    first: Call = ("ta_init", "x", "table", 0, "q", "acc", "stats", "row")
    step: Call = ("ta_step", "table", 0, "row", "q", "kv", "acc", "stats", "scores")
    last, macs = ("ta_out", "acc", "stats", "q", "out"), 2 * p.queries * k * d
    counts = {"macs": macs, "values": p.queries * k}
    return Resident(
        name, "token_attention", calls, p, tuple(tiles), step, reference, first, last, error=error, **counts
    )


def _mapped(
    name: str, source: str, calls: int, tiling: Any, inputs: tuple[Tile, ...], out: Shape, *numbers: float, **more: Any
) -> Resident:
    """Return the probe of a function of two tiles, and numbers, to a third."""
    size = math.prod(out)
    step: Call = (source, *(tile.name for tile in inputs), "y", *numbers)
    return Resident(name, source, calls, tiling, (*inputs, Tile("y", out, drained=size)), step, values=size, **more)


def by_element(name: str, kernel: str, calls: int) -> Resident:
    """Return the probe of add or silu_and_mul."""
    p = _tiling(kernel, rows=ROWS, cols=FFN)
    references: dict[str, Callable[..., Any]] = {"add": add.reference, "silu_and_mul": silu_and_mul.reference}
    reference = references[kernel]
    more: dict[str, Any] = {
        "reference": lambda n, a, b: reference(a, b),
        "error": lambda want, a, b: bounds.silu(want) if kernel == "silu_and_mul" else np.zeros(want.shape),
    }
    inputs = Tile("a", (p.chunk,), filled=True), Tile("b", (p.chunk,), filled=True)
    return _mapped(name, kernel, calls, p, inputs, (p.chunk,), shape={"COUNT": p.chunk}, **more)


def norm(name: str, calls: int) -> Resident:
    """Return the probe of rms_norm."""
    p = _tiling("rms_norm", rows=ROWS, cols=EMB, eps=EPS)
    rows = (p.tile_rows, p.cols)
    more: dict[str, Any] = {
        "reference": lambda n, x, weight: rms_norm.reference(x, weight, EPS),
        "error": lambda want, x, weight: bounds.norm(want),
        "shape": {"COLS": p.cols, "ROWS": p.tile_rows},
    }
    inputs = Tile("x", rows, filled=True), Tile("weight", (p.cols,), filled=True)
    return _mapped(name, "rms_norm", calls, p, inputs, rows, EPS, **more)


def rotation(name: str, calls: int) -> Resident:
    """Return the probe of rope."""
    p = _tiling("rope", rows=ROWS, heads=HEADS, head_dim=HEAD_DIM)
    rows = (p.tile_rows, p.width)
    more: dict[str, Any] = {
        "reference": lambda n, x, table: rope.reference(x, table, 0, HEAD_DIM),
        "error": lambda want, x, table: bounds.rotation(x, HEADS, want.reshape(x.shape)),
    }
    inputs = Tile("x", rows, filled=True), Tile("table", (p.tile_rows, HEAD_DIM), "f32", filled=True)
    return _mapped(name, "rope", calls, p, inputs, rows, **more)
