"""Run a program several times, each into fresh memory, and judge the results.

Each dispatch has buffers of its own, so that one that does nothing does not show an earlier one's results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llama_npu2.artifact.dtypes import DTYPES, nbytes
from llama_npu2.artifact.plan import WHOLE, Positions, View
from llama_npu2.devices import Binding, Call, Device
from llama_npu2.frozen import frozen

Slots = Sequence[Mapping[str, Any]]
"""Slots (arguments) as in a manifest: name, shape, role, dtype."""
Values = Mapping[str, np.ndarray]

DISPATCHES = 3


@frozen
class Verdict:
    """The judgement of results."""

    cause: str
    """A cause of `stages.proof.selftest.faults`; "" where nothing is wrong."""
    detail: str
    """Numbers, in one line."""


def written(slots: Slots) -> list[str]:
    """Return the names of a program's results."""
    return [slot["name"] for slot in slots if slot["role"] == "output"]


def dispatch(
    device: Device,
    program: Any,
    slots: Slots,
    inputs: Mapping[str, np.ndarray | Binding],
    times: int = DISPATCHES,
    seq: int = 1,
    pos: Positions = 0,
    part_of: Mapping[str, tuple[str, View]] | None = None,
) -> list[dict[str, np.ndarray]]:
    """Dispatch a program `times` times, and return the results.

    Args:
        inputs: Arrays of a slot's elements, of any shape and padded with zeros, or bound buffers.
        part_of: The inputs of which a result is rows, and which, by the result's name.
    """
    parts = part_of or {}
    fresh = {*written(slots), *(whole for whole, _ in parts.values())}
    bound = {name: value for name, value in inputs.items() if isinstance(value, Binding)}
    for slot in slots:
        if slot["name"] not in (*bound, *fresh):
            bound[slot["name"]], _ = _buffer(device, slot, inputs)
    results = []
    for _ in range(times):
        buffers = {slot["name"]: _buffer(device, slot, inputs) for slot in slots if slot["name"] in fresh}
        for part, (whole, view) in parts.items():
            (binding, array), own = buffers[whole], buffers[part][1]
            at, row = view.row(seq, pos), array[:1].nbytes
            buffers[part] = Binding(binding.buffer, view, row), array[at:].reshape(-1)[: own.size]
        bindings = [bound.get(s["name"]) or buffers[s["name"]][0] for s in slots]
        device.prepare([Call(program, bindings, slots)]).run(seq, pos)
        results.append({name: buffers[name][1].copy() for name in written(slots)})
    return results


def _buffer(device: Device, slot: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[Binding, np.ndarray]:
    """Return a new buffer with a slot's input, padded with zeros, and the host's view of it."""
    buffer = device.alloc(nbytes(slot["dtype"], slot["shape"]))
    array = device.array(buffer, DTYPES[slot["dtype"]], tuple(slot["shape"]))
    if slot["name"] in inputs:
        values = np.asarray(inputs[slot["name"]])
        array.reshape(-1)[: values.size] = values.reshape(-1)
    return Binding(buffer, WHOLE, 0), array


def judge(results: Sequence[Values], want: Values, off: Values) -> Verdict:
    """Compare dispatches with what they must be (NaN: not written), each element within `off`, and with each other."""
    return _judged(results, want, lambda name, got: _elements(got, want[name], off[name]))


def judge_in_the_norm(results: Sequence[Values], want: Values, bound: float) -> Verdict:
    """Compare dispatches likewise, with a bound on the relative error of each result in the norm."""
    verdict = _judged(results, want, lambda name, got: in_the_norm(got, want[name], bound))
    if verdict.cause or len(want) == 1:
        return verdict
    worst = max(relative_error(results[0][name].reshape(-1)[: want[name].size], want[name]) for name in want)
    return Verdict("", f"{len(want)} results, {_relative(worst, bound)}")


def _judged(results: Sequence[Values], want: Values, check: Any) -> Verdict:
    details = []
    for number, result in enumerate(results):
        for name in want:
            got, first = (r[name].reshape(-1)[: want[name].size] for r in (result, results[0]))
            verdict = check(name, got)
            if verdict.cause and number:
                return Verdict("later dispatch", f"dispatch {number + 1}: {name}: {verdict.detail}")
            if verdict.cause:
                return Verdict(verdict.cause, f"{name}: {verdict.detail}")
            if got.tobytes() != first.tobytes():
                changed = int((got.view(np.uint8) != first.view(np.uint8)).any() and (got != first).sum())
                return Verdict("unsteady", f"dispatch {number + 1}: {name}: {changed} of {got.size} values changed")
            if not number:
                details.append(f"{name}: {verdict.detail}" if len(want) > 1 else verdict.detail)
    return Verdict("", "; ".join(details))


def _elements(got: np.ndarray, want: np.ndarray, off: np.ndarray) -> Verdict:
    got, want, off = (a.astype(np.float64).reshape(-1) for a in (got, want, off))
    meant = np.isfinite(want)
    # Elements that are not written are as before, or what a simulator puts into unwritten memory.
    if stray := int((np.isfinite(got[~meant]) & (got[~meant] != 0)).sum()):
        return Verdict("elsewhere", f"{stray} values written where nothing belongs")
    if problem := _never_written(got[meant], want[meant]):
        return problem
    error, allowed = np.abs(got - want)[meant], off[meant]
    bad = ~(error <= allowed)
    if not bad.any():
        return Verdict("", f"largest error {error.max():.3g}")
    worst = int(np.flatnonzero(meant)[np.argmax(np.where(np.isnan(error), np.inf, error - allowed))])
    share = f"{int(bad.sum())} of {bad.size} values"
    return Verdict("wrong", f"{share}, the worst is number {worst}: {got[worst]:.6g}, expected {want[worst]:.6g}")


def in_the_norm(got: np.ndarray, want: np.ndarray, bound: float) -> Verdict:
    """Compare a result by its relative error in the norm."""
    got, want = (a.astype(np.float64).reshape(-1) for a in (got, want))
    if problem := _never_written(got, want):
        return problem
    error = relative_error(got, want)
    return Verdict("" if error <= bound else "wrong", _relative(error, bound))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the relative error of a result in the norm."""
    got, want = (a.astype(np.float64).reshape(-1) for a in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _relative(error: float, bound: float) -> str:
    return f"relative error {error:.2g}, bound {bound:.2g}"


def _never_written(got: np.ndarray, want: np.ndarray) -> Verdict | None:
    if not got.any() and want.any():
        return Verdict("zeros", f"all {got.size} values are zero")
    if not np.isfinite(got).all():
        return Verdict("no numbers", f"{int((~np.isfinite(got)).sum())} of {got.size} values are no numbers")
    return None
