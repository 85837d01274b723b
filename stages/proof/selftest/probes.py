"""The table of probes: small programs, each of which tests one thing, with inputs, results and error bounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2.frozen import frozen
from stages.kernels import (
    KV_FORMATS,
    Arg,
    Kernel,
    flash_attention,
    format_kernel,
    kernels,
    kv_rows,
    rms_norm,
    token_attention,
)
from stages.kernels.tokens import ACTIVATIONS, PREFIX, of_sequence
from stages.model.config import position_rows
from stages.model.grouping import Program
from stages.model.part import Launch, Part, PartKey, Slot
from stages.model.reference import HALVES, Values, empty_cache, evaluate
from stages.proof.selftest import bounds, resident
from stages.proof.selftest.resident import Resident
from stages.proof.selftest.streams import Streams
from stages.weights.constants import BLOCK, HEAD_POSITION, POSITION
from stages.weights.formats import formats

Shapes = Mapping[str, tuple[int, ...]]
Bound = Callable[[Values, Values], Values]
"""(inputs, expected results) -> how far each element of each result may be off."""


START = 100
"""Position of the first row, for kernels that take one."""


@frozen(eq=False)
class Probe:
    """A small program that tests one thing."""

    name: str
    about: str
    """One line for people."""
    program: Program
    values: Callable[[], Values]
    """Returns its inputs, in plain layout."""
    expected: Callable[[Values], Values]
    """Returns the outputs for inputs, NaN where they are not written."""
    bound: Bound
    source: Resident | Streams | None = None
    """The function or stream that is repeated, if the probe measures a rate."""

    @property
    def tile_function(self) -> str:
        """The C++ file of the probe's tile functions."""
        return f"{self.program.parts[0].launches[0].kernel.source}.cc"


def _program(name: str, kernel: Kernel, shapes: Shapes, scalars: Mapping[str, Any], repeats: int = 1) -> Program:
    """Return a program of one kernel, launched `repeats` times with the same arguments."""
    slots = tuple(Slot(a.name, shapes[a.name], "output" if a.written else "input", a.format) for a in kernel.args)
    launch = Launch(kernel, {a.name: a.name for a in kernel.args}, dict(scalars))
    part = Part(PartKey(name), slots, (launch,) * repeats)
    # Rows are tiled as a bucket's are.
    bucket = scalars.get("rows", scalars.get("seq"))
    bucket = bucket if bucket and bucket > 1 else None
    several = kernel.operation.startswith(PREFIX)
    wiring = ({slot.name: slot.name for slot in slots},)
    return Program(name, name, (part,), slots, wiring, host=False, bucket=bucket, several=several)


def _seeded(name: str, shape: tuple[int, ...]) -> np.random.Generator:
    return np.random.default_rng([*name.encode(), *shape])


def _normal(name: str, arg: Arg, shape: tuple[int, ...]) -> np.ndarray:
    values = _seeded(name + arg.name, shape).normal(size=shape)
    return values.astype(bfloat16 if arg.format == "bf16" else np.float32)


def _drawn(name: str, arg: Arg, shape: tuple[int, ...]) -> np.ndarray:
    """Return random numbers, or a weight in groups as it is stored, whose products with them are of size 1."""
    form = formats()[arg.format]
    if not form.cut:
        return _normal(name, arg, shape)
    drawn = _seeded(name + arg.name, shape).standard_normal(shape, np.float32)
    return form.quantise(drawn / np.float32(math.sqrt(shape[-1])))


def _table(name: str, arg: Arg, shape: tuple[int, ...], position: int = START) -> np.ndarray:
    """Return rows of cosines, then sines, then their positions where rows are wider."""
    angles = _seeded(name, shape).normal(size=(shape[0], resident.HEAD_DIM // 2)) * 50
    rows = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return np.concatenate([rows, position_rows(position, len(rows))], axis=1)[:, : shape[1]]


def _queries(name: str, arg: Arg, shape: tuple[int, ...]) -> np.ndarray:
    """Return queries with the position of the row after each head."""
    heads = _normal(name, arg, shape).reshape(shape[0], _ATTENTION["heads"], -1)
    heads[..., resident.HEAD_DIM :] = position_rows(START, shape[0]).view(bfloat16)[:, None, :HEAD_POSITION]
    return heads.reshape(shape)


def _cache(name: str, arg: Arg, shape: tuple[int, ...]) -> np.ndarray:
    """Return a KV cache in rows, whose numbers have scales."""
    head = kv_rows.head_elements(resident.HEAD_DIM, arg.format)
    if not kv_rows.in_numbers(arg.format):
        return _normal(name, arg, shape)
    heads = shape[0], shape[1] // head, resident.HEAD_DIM
    k, v = (_seeded(f"{name}{half}", shape).normal(size=heads).astype(bfloat16) for half in "kv")
    return kv_rows.rows(k, v, arg.format).reshape(shape)


def _kernel_probe(
    name: str, about: str, kernel: str, shapes: Shapes, bound: Bound, sizes: Mapping[str, Any], repeats: int = 1
) -> Probe:
    """Return the probe of one kernel.

    Args:
        bound: gets weights in groups as numbers, which the inputs hold as they are stored.
        sizes: the kernel's scalars.
    """
    taken = kernels()[kernel]
    read = [arg for arg in taken.args if not arg.written]
    program = _program(name, taken, shapes, sizes, repeats)

    def values() -> Values:
        make = {"table": _table, "q": _queries, "kv": _cache}
        return {arg.name: make.get(arg.name, _drawn)(name, arg, shapes[arg.name]) for arg in read}

    def expected(inputs: Values) -> Values:
        slots = dict(inputs)
        if "kv" in slots:
            slots["kv"] = _by_head(slots["kv"], sizes, taken.stored)
        if taken.operation not in HALVES:
            evaluate(program, dict(sizes), slots)
            return {"out": slots["out"].reshape(shapes["out"])}
        heads = shapes["out"][1] // kv_rows.head_elements(sizes["head_dim"], taken.stored)
        slots["out"] = empty_cache(shapes["out"][0], heads, sizes["head_dim"], taken.stored)
        evaluate(program, dict(sizes), slots)
        # Bytes have no NaN, which says what is not written.
        half, made = HALVES[taken.operation], slots["out"]
        out = np.full(made.shape, np.nan, np.float32 if kv_rows.in_numbers(taken.stored) else bfloat16)
        out[:, :, half] = made[:, :, half]
        return {"out": out.reshape(shapes["out"])}

    def off(inputs: Values, want: Values) -> Values:
        grouped = {arg.name: formats()[arg.format] for arg in read if formats()[arg.format].cut}
        numbers = {slot: form.dequantise(inputs[slot], shapes[slot][-1]) for slot, form in grouped.items()}
        return bound(inputs | numbers, want)

    return Probe(name, about, program, values, expected, off)


def _by_head(cache: np.ndarray, sizes: Mapping[str, Any], stored: str = "bf16") -> np.ndarray:
    """Reshape `[positions, row]` to `[positions, kv_heads, 2, half_elements]`."""
    return cache.reshape(len(cache), -1, 2, kv_rows.half_elements(sizes["head_dim"], stored))


def _keys_and_values(cache: np.ndarray, sizes: Mapping[str, Any], stored: str = "bf16") -> list[np.ndarray]:
    """Return K and V `[positions, kv_heads * head_dim]` of an interleaved cache."""
    return kv_rows.keys_and_values(_by_head(cache, sizes, stored), stored)


def _key_numbers(inputs: Values, want: Values) -> Values:
    """Return the bound of K's numbers, which may be the next ones, and of bytes of scales, which may be any then."""
    off = np.zeros((want["out"].size // _KV_HALF, _KV_HALF))
    off[:, : resident.HEAD_DIM], off[:, resident.HEAD_DIM :] = 1, 255
    return {"out": off.reshape(want["out"].shape)}


_NUMBERS = "int8_rows"
_KV_HALF = kv_rows.half_elements(resident.HEAD_DIM, _NUMBERS)


def _queries_off(inputs: Values, want: Values) -> Values:
    """Return the bound of rotated queries; the position after each head is copied."""
    heads = want["out"].reshape(len(want["out"]), _HEADS["heads"], -1)
    off = np.zeros(heads.shape)
    own = heads[..., : _HEADS["head_dim"]]
    rotated = bounds.rotation(inputs["x"], _HEADS["heads"], own.reshape(len(own), -1))
    off[..., : _HEADS["head_dim"]] = rotated.reshape(own.shape)
    return {"out": off.reshape(want["out"].shape)}


def _product(inputs: Values, want: Values, rounded: bool = True) -> Values:
    return {"out": bounds.product(inputs["x"], inputs["weight"], want["out"], rounded)}


def _halves(which: int, head_dim: int, bound: Callable[[Values, np.ndarray], np.ndarray]) -> Bound:
    """Return the bound of the halves of an interleaved cache that are written; the others must not change."""

    def whole(inputs: Values, want: Values) -> Values:
        pairs = want["out"].reshape(len(want["out"]), -1, 2, head_dim)
        off = np.zeros(pairs.shape)
        own = pairs[:, :, which]
        off[:, :, which] = bound(inputs, own.reshape(len(own), -1)).reshape(own.shape)
        return {"out": off.reshape(want["out"].shape)}

    return whole


def _attention(inputs: Values, want: Values, stored: str = "bf16") -> Values:
    heads, kv_heads, dim = _ATTENTION["heads"], _ATTENTION["kv_heads"], _ATTENTION["head_dim"]
    k, v = _keys_and_values(inputs["kv"], _ATTENTION, stored)
    until = START + _ATTENTION["seq"]
    placed = functools.partial(flash_attention.reference_placed, stored=stored)
    spread = placed(inputs["q"], k[:until], np.abs(v[:until]), START, heads, kv_heads)
    own = inputs["q"].reshape(len(spread), heads, -1)[..., :dim]
    return {"out": bounds.attention(own, k, dim, spread, want["out"], **_score(stored))}


def _score(stored: str) -> dict[str, float]:
    """Return the relative error of scores besides that of their sums: what queries of 15 bits are off by."""
    return {"score": 2.0**-12} if kv_rows.in_numbers(stored) else {}


def _gated_product(inputs: Values, want: Values) -> Values:
    """Return the bound of SwiGLU of exact products. Eight rows of the gate and eight of up alternate in the weight."""
    rows = inputs["weight"].astype(np.float32).reshape(-1, 2, BLOCK, inputs["weight"].shape[1])
    gate, up = (inputs["x"].astype(np.float32) @ rows[:, half].reshape(-1, rows.shape[-1]).T for half in (0, 1))
    exact = np.zeros(gate.shape)
    return {"out": bounds.gated(gate, up, exact, exact)}


_ATTENTION = {"seq": 128, "window": 256, "pos": START, "heads": 4, "kv_heads": 2, "head_dim": 64}
_HEADS = {"rows": 64, "pos": 0, "heads": 4, "head_dim": 64}


def _gemm_shapes(rows: int, cols: int, out_cols: int, spread: int = 1) -> dict[str, tuple[int, ...]]:
    return {"x": (rows, cols), "weight": (out_cols, cols), "out": (rows, spread * out_cols)}


def _gemm(
    name: str, about: str, rows: int, cols: int, outs: int, bound: Bound = _product, kernel: str = "gemm"
) -> Probe:
    shapes, sizes = _gemm_shapes(rows, cols, outs), {"rows": rows, "cols": cols, "out_cols": outs}
    return _kernel_probe(name, about, kernel, shapes, bound, sizes)


def _gemv(name: str, about: str, outs: int, cols: int, kernel: str = "gemv", repeats: int = 1) -> Probe:
    shapes = {"weight": (outs, cols), "x": (cols,), "out": (outs,)}
    bound = functools.partial(_product, rounded=kernel == "gemv")
    return _kernel_probe(name, about, kernel, shapes, bound, {"out_cols": outs, "cols": cols}, repeats=repeats)


def _add(name: str, about: str, rows: int, cols: int, repeats: int = 1) -> Probe:
    shapes = dict.fromkeys(("a", "b", "out"), (rows, cols))

    def bound(inputs: Values, want: Values) -> Values:
        """Return 0: one f32 addition and one rounding have no freedom."""
        return {"out": np.zeros(want["out"].shape)}

    return _kernel_probe(name, about, "add", shapes, bound, {"rows": rows, "cols": cols}, repeats=repeats)


def _tile_functions() -> list[Probe]:
    return [*_elementwise(), *_rotations(), *_products(), *_attention_parts(), *_grouped(), *_token_attention()]


def _elementwise() -> Iterator[Probe]:
    rows, cols = 64, 768
    sizes = {"rows": rows, "cols": cols}
    square = dict.fromkeys(("gate", "up", "out"), (rows, cols))
    normed = {"x": (rows, cols), "weight": (cols,), "out": (rows, cols)}
    norm: Bound = lambda inputs, want: {"out": bounds.norm(want["out"])}  # noqa: E731
    silu: Bound = lambda inputs, want: {"out": bounds.silu(want["out"])}  # noqa: E731
    yield _add("add", "sum of two arrays", 64, 256)
    yield _kernel_probe("rms_norm", "RMS norm of rows", "rms_norm", normed, norm, sizes | {"eps": resident.EPS})
    yield _kernel_probe("silu_and_mul", "SwiGLU's activation", "silu_and_mul", square, silu, sizes)


def _rotations() -> Iterator[Probe]:
    wide = {"x": (64, 256), "table": (64, 64), "out": (64, 256)}
    into_kv = wide | {"table": (64, 64 + POSITION // 2), "out": (64, 512)}
    rotated: Bound = lambda g, w: {"out": bounds.rotation(g["x"], _HEADS["heads"], w["out"])}  # noqa: E731
    k_half = _halves(0, 64, lambda g, w: bounds.rotation(g["x"], _HEADS["heads"], w))
    yield _kernel_probe("rope", "rotary embedding", "rope", wide, rotated, _HEADS)
    yield _kernel_probe("rope_kv", "rotary embedding into a cache", "rope_kv", into_kv, k_half, _HEADS)
    in_bytes = into_kv | {"out": (64, 4 * 2 * _KV_HALF)}
    name, v_rows = f"{_NUMBERS}_rope_kv", {name: in_bytes[name] for name in ("x", "out")}
    exact: Bound = lambda inputs, want: {"out": np.zeros(want["out"].shape)}  # noqa: E731
    yield _kernel_probe(name, "rotary embedding into a cache in 8 bits", name, in_bytes, _key_numbers, _HEADS)
    name = f"{_NUMBERS}_append_v"
    yield _kernel_probe(name, "rows of V into a cache in 8 bits", name, v_rows, exact, _HEADS)
    placed = wide | {"table": (64, 64 + POSITION // 2), "out": (64, 4 * (64 + HEAD_POSITION))}
    yield _kernel_probe("rope_q", "rotary embedding of queries with positions", "rope_q", placed, _queries_off, _HEADS)


def _products() -> Iterator[Probe]:
    block_float: Bound = lambda g, w: {"out": bounds.block_float(g["x"], g["weight"], w["out"])}  # noqa: E731
    yield _gemv("gemv", "weight times vector, in blocks", 256, 768)
    yield _gemv("gemv_f32", "weight times vector, rows, f32", 2048, 256, "gemv_f32")
    yield _gemm("gemm", "product in bf16, x stays in L2", 512, 512, 512)
    yield _gemm("gemm_stream", "product in bf16, x passes through L2", 64, 4608, 64)
    yield _gemm("gemm_bfp16", "product in block floating point", 512, 512, 512, block_float, "bfp16_gemm")
    yield _whole_numbers(
        _kernel_probe(
            "gemm_swiglu_bfp16",
            "SwiGLU of a product in block floating point",
            "bfp16_gemm_swiglu",
            {"x": (256, 512), "weight": (1024, 512), "out": (256, 512)},
            _gated_product,
            {"rows": 256, "cols": 512, "out_cols": 512, "activation": 0},
        )
    )


def _whole_numbers(probe: Probe) -> Probe:
    """Return a probe whose inputs are small whole numbers, of which products in block floating point are exact.

    `x` is divided by a power of two, so that its products with the weight are of size 1.
    """

    def values() -> Values:
        shapes = {name: value.shape for name, value in probe.values().items()}
        drawn = {name: _seeded(probe.name + name, shape).integers(-2, 3, shape) for name, shape in shapes.items()}
        return {name: (whole / (32 if name == "x" else 1)).astype(bfloat16) for name, whole in drawn.items()}

    return replace(probe, values=values)


def _attention_parts() -> Iterator[Probe]:
    attending = {"q": (128, 4 * (64 + HEAD_POSITION)), "kv": (256, 256), "out": (128, 256)}
    v_half = _halves(1, 64, lambda g, w: bounds.product(g["x"], g["weight"], w))
    product = {"rows": 512, "cols": 512, "out_cols": 512, "pos": 0, "head_dim": 64}
    yield _kernel_probe("gemm_kv", "product into a cache", "gemm_kv", _gemm_shapes(512, 512, 512, 2), v_half, product)
    yield _kernel_probe("flash_attention", "causal attention", "flash_attention", attending, _attention, _ATTENTION)
    in_bytes = attending | {"kv": (attending["kv"][0], _ATTENTION["kv_heads"] * 2 * _KV_HALF)}
    name, bound = f"{_NUMBERS}_flash_attention", functools.partial(_attention, stored=_NUMBERS)
    yield _kernel_probe(name, "causal attention over a cache in 8 bits", name, in_bytes, bound, _ATTENTION)


# Weights in groups


def _grouped() -> Iterator[Probe]:
    def product(inputs: Values, want: Values) -> Values:
        rounded = bounds.one_ulp(want["out"]) if want["out"].dtype == bfloat16 else 0
        return {"out": bounds.grouped(inputs["x"], inputs["weight"]) + rounded}

    def swiglu(inputs: Values, want: Values) -> Values:
        return {"out": _gated_off(inputs["x"], inputs["norm"], inputs["weight"])[1]}

    def feed_forward(inputs: Values, want: Values) -> Values:
        inner, off = _gated_off(inputs["x"], inputs["norm"], inputs["gate_up"])
        sums = bounds.passed_on(inputs["down"], off) + bounds.grouped(inner, inputs["down"])
        return {"out": sums + bounds.one_ulp(want["out"])}

    for kernel, outs, cols in (("int4_gemv", 2048, 1024), ("int8_gemv", 1024, 512), ("int6_gemv_f32", 512, 512)):
        shapes, sizes = {"weight": (outs, cols), "x": (cols,), "out": (outs,)}, {"out_cols": outs, "cols": cols}
        yield _kernel_probe(kernel, f"weight in {kernel[:4]} times vector", kernel, shapes, product, sizes)
    rows: Shapes = {"x": (512,), "norm": (512,)}
    scalars = {"eps": resident.EPS, "offset": 0.0, "once": 0, "activation": 0}
    swiglu_probe = _kernel_probe(
        "int4_swiglu",
        "SwiGLU of the norm's product with weights in int4",
        "int4_norm_gemv_swiglu",
        {"weight": (2048, 512), **rows, "out": (1024,)},
        swiglu,
        {"out_cols": 1024, "cols": 512, **scalars},
    )
    network = _kernel_probe(
        "int4_feed_forward",
        "feed-forward network in int4, whose sums pass from core to core",
        "int4_feed_forward",
        {"gate_up": (1024, 512), "down": (512, 512), **rows, "out": (512,)},
        feed_forward,
        {"cols": 512, "ffn": 512, **scalars},
    )
    yield from map(_exact_norm, (swiglu_probe, network))
    yield from _grouped_rows(product, feed_forward, scalars)


TOGETHER = 4
"""Tokens of the probes of several."""


def _grouped_rows(product: Bound, feed_forward: Bound, scalars: Mapping[str, Any]) -> Iterator[Probe]:
    """Yield the probes of several tokens' products with weights in groups."""
    outs, cols, rows = 1024, 512, {"rows": TOGETHER}
    shapes = {"weight": (outs, cols), "x": (TOGETHER, cols), "out": (TOGETHER, outs)}
    name = f"int4_{PREFIX}gemv"
    about = f"weight in int4 times {TOGETHER} rows"
    yield _kernel_probe(name, about, name, shapes, _by_row(product), {"out_cols": outs, "cols": cols, **rows})
    network = _kernel_probe(
        f"int4_{PREFIX}feed_forward",
        f"feed-forward network in int4 of {TOGETHER} rows",
        f"int4_{PREFIX}feed_forward",
        {
            **{"gate_up": (1024, cols), "down": (cols, cols), "norm": (cols,)},
            **dict.fromkeys(("x", "out"), (TOGETHER, cols)),
        },
        _by_row(feed_forward),
        {"cols": cols, "ffn": 512, **rows, **scalars},
    )
    yield _exact_norm(network)


def _by_row(bound: Bound) -> Bound:
    """Return the bound of each row of several tokens, by that of a token."""

    def off(inputs: Values, want: Values) -> Values:
        given = {name: inputs[name] for name in inputs if name in ACTIVATIONS}
        rows = ({name: values[row] for name, values in given.items()} for row in range(len(want["out"])))
        pairs = zip(rows, want["out"], strict=True)
        return {"out": np.stack([bound(inputs | row, {"out": wanted})["out"] for row, wanted in pairs])}

    return off


def _gated_off(x: np.ndarray, norm: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return SwiGLU of the products of `x`'s norm with gate and up `[2 * outs, cols]`, and its bound.

    The norm is exact, and its numbers are whole (`_exact_norm`), so that products are off by their sums in f32 alone.
    """
    row = rms_norm.reference(x[None], norm, resident.EPS)[0]
    halves = np.split(weight, 2)
    gate, up = (half.astype(np.float64) @ row.astype(np.float64) for half in halves)
    off = (bounds.product(row, half, np.zeros(len(half)), rounded=False) for half in halves)
    return gate / (1 + np.exp(-gate)) * up, bounds.gated(gate, up, *off)


def _exact_norm(probe: Probe) -> Probe:
    """Return a probe whose `x`, and its norm's weight, are of ones and minus ones."""

    def values() -> Values:
        made = probe.values()
        ones = {name: np.copysign(1, made[name].astype(np.float32)).astype(bfloat16) for name in ("x", "norm")}
        return made | ones

    return replace(probe, values=values)


_TOKEN = {"window": 256, "heads": 4, "kv_heads": 2, "head_dim": 64}


def _token_attention() -> Iterator[Probe]:
    """Yield a token's attention with its own position in the first, a middle and the last tile of keys.

    Then that of several tokens, on either side of a tile's beginning, and that of some of several sequences.
    """
    for stored in KV_FORMATS.values():
        for where, position in (("first", 5), ("middle", START), ("last", _TOKEN["window"] - 1)):
            about = f"a token's attention, itself in the {where} tile"
            name = format_kernel(f"token_attention_{where}", stored)
            yield _token_probe(name, about + ", in 8 bits" * kv_rows.in_numbers(stored), position, stored)
    for stored, norm in (("bf16", False), ("bf16", True), (_NUMBERS, False)):
        more = ", after the norm of each head" * norm + ", in 8 bits" * kv_rows.in_numbers(stored)
        attention = f"{'norm_' * norm}token_attention"
        about = f"attention of {TOGETHER} tokens, each of which sees those before it{more}"
        yield _token_probe(format_kernel(f"{PREFIX}{attention}", stored), about, START + 26, stored, TOGETHER, norm)
        yield _sequences_probe(f"attention of {_OF_LAUNCH} of {TOGETHER} sequences{more}", stored, attention, norm)


_OF_LAUNCH, _FIRST = 2, 1
"""Sequences of the launch that is tried, of `TOGETHER`, and the number of the first."""


def _sequences_probe(about: str, stored: str, attention: str, norm: bool) -> Probe:
    """Return the probe of attention of some of several sequences, each of which is what its token is alone."""
    operation = f"{token_attention.of_sequences(_OF_LAUNCH)}{attention}"
    kernel = kernels()[name := format_kernel(operation, stored)]
    alone = [
        _token_probe(f"{name} {position}", about, position, stored, norm=norm)
        for position in (5, _TOKEN["window"] - 30)[:_OF_LAUNCH]
    ]
    shapes: dict[str, tuple[int, ...]] = {}
    for slot in alone[0].program.slots:
        each = range(_OF_LAUNCH) if slot.name in token_attention.OF_EACH else range(1)
        rows = (TOGETHER,) if slot.name in ACTIVATIONS else ()
        shapes |= {of_sequence(slot.name, number): (*rows, *map(int, slot.shape)) for number in each}

    def of_one(all_of: Values, number: int) -> Values:
        own = {name: all_of[of_sequence(name, number)] for name in token_attention.OF_EACH if name in all_of}
        rows = {name: all_of[name][_FIRST + number] for name in ACTIVATIONS if name in all_of}
        return all_of | own | rows

    def of_all(each: Sequence[Values], others: float) -> Values:
        made = dict(each[0])
        for name, first in each[0].items():
            if name in ACTIVATIONS:
                made[name] = np.full((TOGETHER, *first.shape), others, first.dtype)
            for number, values in enumerate(each):
                if name in ACTIVATIONS:
                    made[name][_FIRST + number] = values[name]
                elif name in token_attention.OF_EACH:
                    made[of_sequence(name, number)] = values[name]
        return made

    def values() -> Values:
        return of_all([probe.values() for probe in alone], others=1)

    def expected(inputs: Values) -> Values:
        return of_all([probe.expected(of_one(inputs, at)) for at, probe in enumerate(alone)], others=np.nan)

    def bound(inputs: Values, want: Values) -> Values:
        pairs = ((probe, of_one(inputs, at), of_one(want, at)) for at, probe in enumerate(alone))
        return of_all([probe.bound(own, wanted) for probe, own, wanted in pairs], others=0)

    which = {"sequences": TOGETHER, "sequence": _FIRST}
    norms = {"eps": resident.EPS, "offset": 0.0, "once": 0} if norm else {}
    program = _program(name, kernel, shapes, {**_TOKEN, "pos": 0, **which, **norms})
    return Probe(name, about, program, values, expected, bound)


def _token_probe(name: str, about: str, position: int, stored: str, tokens: int = 1, norm: bool = False) -> Probe:
    """Return the probe of attention of one token or of several.

    Args:
        position: that of the first token.
        norm: whether heads of Q and K are normed before.
    """
    heads, kv_heads, dim = _TOKEN["heads"], _TOKEN["kv_heads"], _TOKEN["head_dim"]
    width, kv_width = heads * dim, kv_heads * dim
    row_elements, in_numbers = kv_heads * kv_rows.head_elements(dim, stored), kv_rows.in_numbers(stored)
    several, which = ((tokens,), {"rows": tokens}) if tokens > 1 else ((), {})
    operation = f"{PREFIX if several else ''}{'norm_' * norm}token_attention"
    kernel = kernels()[format_kernel(operation, stored)]
    weights = [arg.name for arg in kernel.args if arg.name.endswith("_norm")]
    norms = {"eps": resident.EPS, "offset": 0.0, "once": 0} if norm else {}
    shapes = {"x": (*several, width + 2 * kv_width), "table": (tokens, dim + POSITION // 2)}
    shapes |= {"kv": (_TOKEN["window"], row_elements), "out": (*several, width), "row": (*several, row_elements)}
    shapes |= {weight: (2 * dim if len(weights) == 1 else dim,) for weight in weights}

    def values() -> Values:
        made = {"x": _normal(name, kernel.arg("x"), shapes["x"]), "kv": _cache(name, kernel.arg("kv"), shapes["kv"])}
        made |= {"table": _table(name, kernel.arg("table"), shapes["table"], position)}
        return made | _exact_heads(made["x"], weights, dim, width + kv_width) if norm else made

    def attended(inputs: Values, x: np.ndarray, k: np.ndarray, v: np.ndarray) -> Values:
        tables = np.repeat(inputs["table"][:1], position, axis=0)
        tables = np.concatenate([tables, inputs["table"]])
        given = [x if several else x[None], tables, *(inputs[weight] for weight in weights)]
        scalars = {"pos": position, "k": k, "v": v, "heads": heads, "kv_heads": kv_heads, **norms}
        out, row = kernel.reference(*given, **scalars)
        return {"out": out.reshape(shapes["out"]), "row": row.reshape(shapes["row"])}

    def expected(inputs: Values) -> Values:
        return attended(inputs, inputs["x"], *_keys_and_values(inputs["kv"], _TOKEN, stored))

    def bound(inputs: Values, want: Values) -> Values:
        x = inputs["x"].reshape(-1, width + 2 * kv_width)
        v_row = np.s_[..., width + kv_width :]
        positive = inputs["x"].copy()
        positive[v_row] = np.abs(positive[v_row])
        k, v = _keys_and_values(inputs["kv"], _TOKEN, stored)
        spread = attended(inputs, positive, k, np.abs(v))["out"].reshape(-1, width)
        if norm:
            halves = np.concatenate([inputs[weight] for weight in weights])
            q_norm, k_norm = np.split(halves, 2)
            normed = (token_attention.normed_heads(row, heads, q_norm, k_norm, resident.EPS, 0.0, 0) for row in x)
            x = np.stack([*normed])
        queries, own_keys, _ = np.split(x, [width, width + kv_width], axis=1)
        keys = np.concatenate([k[:position], own_keys])
        rows = want["row"].reshape(tokens, -1)
        if in_numbers:
            row = _key_numbers(inputs, {"out": rows})["out"]
            row.reshape(tokens * kv_heads, 2, -1)[:, 1] = 0
        else:
            rotated = _halves(0, dim, lambda _, key: bounds.rotation(own_keys, kv_heads, key))
            row = rotated(inputs, {"out": rows})["out"]
        # Rotations round queries and the token's own key.
        off = bounds.attention(queries, keys, dim, spread, want["out"].reshape(-1, width), score=2.0**-8)
        return {"out": off.reshape(want["out"].shape), "row": row.reshape(want["row"].shape)}

    program = _program(name, kernel, shapes, {**_TOKEN, "pos": position, **which, **norms})
    return Probe(name, about, program, values, expected, bound)


def _exact_heads(x: np.ndarray, weights: Sequence[str], dim: int, until: int) -> Values:
    """Return Q, K and V whose norms are exact, and the weights of these, of which K's are another number than Q's.

    Each head of Q and K, up to column `until`, has one magnitude.
    """
    rows = x.copy()
    heads = rows[..., :until].reshape(*x.shape[:-1], -1, dim)
    sizes = 2.0 ** (np.arange(heads.shape[-2]) % 3)
    rows[..., :until] = np.copysign(sizes[:, None], heads.astype(np.float32)).reshape(*x.shape[:-1], until)
    each = dict(zip(("q_norm", "k_norm"), np.repeat([[1], [0.5]], dim, axis=1).astype(bfloat16), strict=True))
    return {"x": rows} | ({weights[0]: np.concatenate([*each.values()])} if len(weights) == 1 else each)


# Launches and streams

FEW, MANY = 2, 10
"""Launches, or steps of one, of the probes whose difference is the cost of one. Even, so that none is added."""


def _launches() -> list[Probe]:
    rows, outs, cols = 8, 256, 64
    made = []
    for count in (FEW, MANY):
        made.append(_add(f"launch_row_{count}", f"{count} launches on one row of cores", rows, cols, count))
        made.append(_gemv(f"launch_array_{count}", f"{count} launches on all cores", outs, cols, repeats=count))
        made.append(_gemv(f"step_array_{count}", f"{count} steps of one launch on all cores", count * outs, cols))
    return made


STREAMS = (1, 2, 4, 8, 16)


# What is repeated

RATES: Mapping[str, Callable[[str], Resident]] = {
    "rate_gemm": lambda name: resident.product(name, 1024),
    "rate_gemm_bfp16": lambda name: resident.product(name, 1024, bfp16=True),
    "rate_gemv": lambda name: resident.vector_product(name, 4096),
    "rate_int4_gemv": lambda name: resident.grouped_product(name, 512, "int4"),
    "rate_int6_gemv": lambda name: resident.grouped_product(name, 512, "int6"),
    "rate_flash_attention": lambda name: resident.attention(name, 256),
    "rate_token_attention": lambda name: resident.attention_of_token(name, 512),
    "rate_silu_and_mul": lambda name: resident.by_element(name, "silu_and_mul", 512),
    "rate_add": lambda name: resident.by_element(name, "add", 4096),
    "rate_rms_norm": lambda name: resident.norm(name, 1024),
    "rate_rope": lambda name: resident.rotation(name, 1024),
}
"""With so many calls, a probe takes milliseconds by the published rates of such kernels."""

WATCHDOG = "watchdog"
WATCHDOG_CALLS = 32768
"""About a fifth of a second where bf16 is multiplied element by element."""


def _repeated(source: Resident | Streams) -> Probe:
    kernel, shapes = source.kernel(), source.slots()

    def values() -> Values:
        return {a.name: _input(source, a, shapes[a.name]) for a in kernel.args if not a.written}

    def bound(inputs: Values, want: Values) -> Values:
        return {"out": source.off(inputs, want["out"])}

    program = _program(source.name, kernel, shapes, {})
    return Probe(source.name, str(source), program, values, source.expected, bound, source=source)


def _input(source: Resident | Streams, arg: Arg, shape: tuple[int, ...]) -> np.ndarray:
    if source.whole:
        # Sums of products of small whole numbers are exact in f32, and every format holds the numbers exactly.
        return _seeded(source.name + arg.name, shape).integers(-2, 3, shape).astype(bfloat16)
    if arg.name == "table":
        assert isinstance(source, Resident)
        (table,) = (tile for tile in source.tiles if tile.name == arg.name)
        width, position = table.shape[-1], START if table.position is None else table.position
        return _table(source.name, arg, (math.prod(shape) // width, width), position).reshape(shape)
    values = _drawn(source.name, arg, shape)
    return source.placed(arg.name, values) if isinstance(source, Resident) else values


@functools.cache
def probes() -> dict[str, Probe]:
    """Return every probe by name: first those that check one kernel each, then those that are timed."""
    repeated: list[Resident | Streams] = [
        *(Streams(f"stream_{count}", count) for count in STREAMS),
        *(make(name) for name, make in RATES.items()),
        resident.product(WATCHDOG, WATCHDOG_CALLS),
    ]
    made = [*_tile_functions(), *_launches(), *(_repeated(source) for source in repeated)]
    return {probe.name: probe for probe in made}


def tile_functions() -> list[Probe]:
    """Return the probes that check a kernel."""
    return [probe for name, probe in probes().items() if name in _TILE_FUNCTIONS]


_TILE_FUNCTIONS = frozenset(probe.name for probe in _tile_functions())
