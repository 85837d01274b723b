"""Joins neighbouring launches of a part that the host kernels can do in one pass over memory.

The joined kernels round where the separate ones do, so no bit of a result changes. What was between them is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.kernels import ACTIVATIONS, format_kernel, kernels
from stages.model.part import Launch, Part
from stages.weights.formats import formats

_SUMMED = ("gemm", "gemv", "moe_gemm", "moe_gemv", "moe_gemm_bias", "moe_gemv_bias")
"""Operations whose result may be added to the residual stream at once."""
_JOINED = {f"{product}{more}": f"{product}_qkv{more}" for product in ("gemm", "gemv") for more in ("", "_bias")}
"""Operations of which one may multiply with Q's, K's and V's weights."""
_PRODUCTS = tuple(
    format_kernel(product, name, activations)
    for product in ("gemm", "gemv")
    for name in formats()
    for activations in ACTIVATIONS
)


def fuse(part: Part) -> tuple[Launch, ...]:
    """The part's launches with projections joined to the residual add or the activation that alone reads them.

    Those of Q, K and V are joined to each other.
    """
    launches, joined = list(part.launches), []
    while launches:
        found = (join(part, launches) for join in (_swiglu, _residual, _qkv))
        count, launch = next(filter(None, found), (1, launches[0]))
        joined.append(launch)
        del launches[:count]
    return tuple(joined)


def _swiglu(part: Part, launches: Sequence[Launch]) -> tuple[int, Launch] | None:
    """Gate and up projections of one input, and the activation of both."""
    match launches[:3]:
        case [gate, up, silu] if _names(gate, up, silu) in [(p, p, "silu_and_mul") for p in _PRODUCTS]:
            both = (gate.args["out"], up.args["out"])
            same = gate.args["x"] == up.args["x"] and gate.scalars == up.scalars
            if same and both == (silu.args["gate"], silu.args["up"]) and _only_here(part, both):
                args = {"x": gate.args["x"], "gate": gate.args["weight"], "up": up.args["weight"]}
                scalars = gate.scalars | {"activation": silu.scalars["activation"]}
                return 3, Launch(kernels()[f"{gate.kernel.name}_silu"], args | {"out": silu.args["out"]}, scalars)
    return None


def _residual(part: Part, launches: Sequence[Launch]) -> tuple[int, Launch] | None:
    """A projection and the residual added to it."""
    match launches[:2]:
        case [product, add] if product.kernel.operation in _SUMMED and add.kernel.name == "add":
            if product.args["out"] == add.args["b"] and _only_here(part, (add.args["b"],)):
                args = {**product.args, "residual": add.args["a"], "out": add.args["out"]}
                return 2, Launch(kernels()[f"{product.kernel.name}_add"], args, product.scalars)
    return None


def _qkv(part: Part, launches: Sequence[Launch]) -> tuple[int, Launch] | None:
    """Projections of one input, of which the last two have as many outputs."""
    match launches[:3]:
        case [q, k, v] if q.kernel.operation in _JOINED and q.kernel == k.kernel == v.kernel:
            if q.args["x"] == k.args["x"] == v.args["x"] and k.scalars == v.scalars:
                args = {"x": q.args["x"]}
                for which, launch in zip("qkv", (q, k, v), strict=True):
                    named = {"weight": f"w{which}", "bias": f"b{which}", "out": which}
                    args |= {named[arg]: slot for arg, slot in launch.args.items() if arg in named}
                scalars = {"q_cols": q.scalars["out_cols"], "kv_cols": k.scalars["out_cols"]}
                scalars |= {name: value for name, value in q.scalars.items() if name != "out_cols"}
                joined = format_kernel(_JOINED[q.kernel.operation], q.kernel.stored, q.kernel.activations)
                return 3, Launch(kernels()[joined], args, scalars)
    return None


def _names(*launches: Launch) -> tuple[str, ...]:
    return tuple(launch.kernel.name for launch in launches)


def _only_here(part: Part, slots: Sequence[str]) -> bool:
    """Nothing but the one reader sees these slots."""
    readers = [slot for launch in part.launches for slot in launch.reads()]
    return all(part.slot(slot).role == "scratch" and readers.count(slot) == 1 for slot in slots)
