"""Mixture of experts (Shazeer et al. 2017): which experts a row takes, and what they make of it. They run on the host.

Each row takes some of many feed-forward networks, whose weights are stacked: `[experts, rows, columns]`. Choices of a
prompt's rows are sorted by expert and then by row, so that each expert's weights are read once. What a row's experts
make is summed in f32, in the order of their ids, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stages.engine.lazy import ml_dtypes, np
from stages.kernels import Arg, Kernel, add, matrix, signature, silu_and_mul

SOURCE = "moe"
"""The C++ source of the products; `<format>_moe` that for weights in another format."""

Product = Callable[["np.ndarray", "np.ndarray"], "np.ndarray"]


def route(
    x: np.ndarray, weight: np.ndarray, top: int, normed: int, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts that rows take, i32, and their shares, f32, each `[rows, top]`, or `[top]` for one row.

    A row takes the experts with the largest logits, of equal ones the first, in the order of their ids. Shares are the
    softmax of all logits, or with `normed` of those of the chosen. `x`: bf16 `[rows, cols]`; `weight`: bf16 `[experts,
    cols]`; `bias`: bf16 `[experts]`.
    """
    logits = f32_product(x, weight)
    if bias is not None:
        logits += bias.astype(np.float32)
    chosen = np.sort(np.argsort(-logits, axis=-1, kind="stable")[..., :top], axis=-1)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    taken = np.take_along_axis(powers, chosen, axis=-1)
    shares = taken / (taken if normed else powers).sum(axis=-1, keepdims=True)
    return chosen.astype(np.int32), shares.astype(np.float32)


def route_sigmoid(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, top: int, normed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `route` does, by sigmoids (Wang et al. 2024, arXiv:2408.15664, and DeepSeek-V3).

    A row takes the experts with the largest sums of a logit's sigmoid and `bias`, f32 `[experts]`. Shares are the
    sigmoids, with `normed` of the chosen divided by their sum and `LEAST_SUM`.
    """
    scores = 1 / (1 + np.exp(-f32_product(x, weight)))
    chosen = np.sort(np.argsort(-(scores + bias), axis=-1, kind="stable")[..., :top], axis=-1)
    shares = np.take_along_axis(scores, chosen, axis=-1)
    if normed:
        shares = shares / (shares.sum(axis=-1, keepdims=True) + LEAST_SUM)
    return chosen.astype(np.int32), shares.astype(np.float32)


LEAST_SUM = 1e-6
"""What is added to a sum that shares are divided by: transformers, `models/lfm2_moe`."""


def by_expert(chosen: np.ndarray) -> np.ndarray:
    """Return the order of choices `[rows, top]`, flat, by experts and then by rows."""
    return np.argsort(chosen.reshape(-1), kind="stable")


def f32_product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return `x @ weight.T`, f32."""
    product: np.ndarray = x.astype(np.float32) @ weight.astype(np.float32).T
    return product


def gated(
    x: np.ndarray,
    chosen: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    gate_bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    activation: int = 0,
    product: Product = f32_product,
) -> np.ndarray:
    """Return the gated activations of all choices, bf16 `[choices, out_cols]`, in the order `by_expert`.

    `x`: bf16 `[rows, cols]`; `gate`, `up`: `[experts, out_cols, cols]`; biases: bf16 `[experts, out_cols]`, flat.
    """
    rows = np.repeat(np.atleast_2d(x), chosen.shape[-1], axis=0)
    gates, ups = (
        _of_choices(rows, chosen, weight, bias, product).astype(ml_dtypes.bfloat16)
        for weight, bias in ((gate, gate_bias), (up, up_bias))
    )
    return silu_and_mul.reference(gates, ups, activation)[by_expert(chosen)]


def _of_choices(
    rows: np.ndarray, chosen: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, product: Product
) -> np.ndarray:
    """Return the product of each choice's row with its expert's weight, plus its bias, f32 `[choices, out_cols]`."""
    out = np.empty((len(rows), weight.shape[1]), np.float32)
    for expert in np.unique(chosen):
        at = chosen.reshape(-1) == expert
        out[at] = product(rows[at], weight[expert])
        if bias is not None:
            out[at] += bias.reshape(len(weight), -1)[expert].astype(np.float32)
    return out


def summed(
    x: np.ndarray,
    chosen: np.ndarray,
    shares: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    product: Product = f32_product,
) -> np.ndarray:
    """Return what each row's experts make of it, times their shares: the sum bf16 `[rows, out_cols]`, plus `residual`.

    `x`: bf16 `[choices, cols]`, as `gated` returns it; `weight`: `[experts, out_cols, cols]`; `bias`: bf16 `[experts,
    out_cols]`, flat.
    """
    top, flat = chosen.shape[-1], np.empty_like(x)
    flat[by_expert(chosen)] = x
    each = _of_choices(flat, chosen, weight, bias, product) * shares.reshape(-1, 1)
    sums = np.zeros((len(flat) // top, weight.shape[1]), np.float32)
    for place in range(top):
        sums += each[place::top]
    rounded = sums.astype(ml_dtypes.bfloat16)
    rounded = rounded if chosen.ndim == 2 else rounded[0]
    return rounded if residual is None else add.reference(residual, rounded)


_CHOSEN, _SHARES = Arg("chosen", "i32"), Arg("shares", "f32")


def _routers() -> Iterator[Kernel]:
    written = (Arg("chosen", "i32", written=True), Arg("shares", "f32", written=True))
    bias: list[str]
    for name, *bias in (("route",), ("route_bias", "bias")):
        reads: tuple[Arg | str, ...] = ("x", Arg("weight", layouts={"cpu": "panels"}), *bias)
        yield signature(name, reads, _ROUTER_SIZES, route, writes=written, source="route")
    reads = ("x", Arg("weight", layouts={"cpu": "panels"}), Arg("bias", "f32"))
    yield signature("route_sigmoid", reads, _ROUTER_SIZES, route_sigmoid, writes=written, source="route")


_ROUTER_SIZES = "rows cols experts top normed"


def _products(product: str, sizes: str) -> Iterator[Kernel]:
    """Yield the kernels of a token's row or of a prompt's rows."""
    both, more = (matrix("gate"), matrix("up")), list[str]()
    for name, *more in ((f"{product}_silu",), (f"{product}_silu_bias", "gate_bias", "up_bias")):
        yield signature(name, ("x", _CHOSEN, *both, *more), f"{sizes} activation", gated, source=SOURCE)
    for name, *more in ((product,), (f"{product}_bias", "bias")):
        reads: tuple[Arg | str, ...] = ("x", _CHOSEN, _SHARES, matrix("weight"), *more)
        yield signature(name, reads, sizes, summed, source=SOURCE)
        yield signature(f"{name}_add", (*reads, "residual"), sizes, summed, source=SOURCE)


KERNELS = (
    *_routers(),
    *_products("moe_gemv", "out_cols cols experts top"),
    *_products("moe_gemm", "rows cols out_cols experts top"),
)
