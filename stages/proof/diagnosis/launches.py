"""Compare each launch of a run with its kernel's reference, on the inputs that the launch had."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2.frozen import frozen
from stages.kernels import Arg, kv_rows
from stages.model.artifact_weights import ArtifactWeights
from stages.model.buffers import tensors_of
from stages.model.part import KV
from stages.model.reference import HALVES, results
from stages.proof.diagnosis.bounds import SURE, Case, ErrorBound, Weight, error_bounds, in_fixed_point, ulp
from stages.proof.diagnosis.ops import Op
from stages.proof.diagnosis.record import Recorder, Sample
from stages.weights.formats import formats

BIAS = 0.25
"""Units in the last place. Results that are rounded to the nearest are off by 0 on average, results that are cut off by
1/2: a mean nearer to 1/2 is wrong."""
SIGNIFICANT = 6.0
"""A mean of this many standard errors is certainly not 0."""
GROUPS = 16
"""Rows (of heads, in attention) that are enough for a mean and its error."""
SIDES = {"magnitude": ("toward zero", "away from zero"), "value": ("down", "up")}
"""Quantities that may be off on average, and the words for their two sides."""
AROUND = 3
"""Values shown on each side of the worst."""

_APPENDS = ("append_kv", "append_kv_panels")
_ATTENTION = "attention"


@frozen
class Worst:
    """The element of a result whose error is the largest part of its limit."""

    argument: str
    """The kernel's argument."""
    slot: str
    """The program's name of that argument (slot)."""
    position: int
    rows: int
    index: tuple[int, ...]
    """Where the element is in the rows of that call."""
    first: int
    """Where `ours` and `reference` begin in its row."""
    ours: list[float]
    reference: list[float]
    error: float
    limit: float


@dataclass
class Finding:
    """The comparison of one launch in all its calls."""

    op: Op
    calls: int = 0
    elements: int = 0
    """Elements of results."""
    differ: int = 0
    """How many of them are another number than the reference's."""
    expected: float = 0.0
    """How many of those the order of sums explains at most."""
    ratio: float = 0.0
    """The largest error divided by its limit."""
    largest: float = 0.0
    """The error with that ratio."""
    bias: float = float("nan")
    """Mean error of magnitudes or of values, the larger one, in units in the last place. NaN: too few rows to say."""
    wrong: str = ""
    """Why the launch is wrong, or nothing."""
    worst: Worst | None = None
    means: dict[tuple[str, int, str], list[float]] = field(default_factory=dict, repr=False)
    """Mean errors of rows, by result, rounding and side."""

    def judge(self) -> None:
        """Decide what is wrong, once all calls are counted."""
        means = [(*_mean(values), side) for (_, _, side), values in self.means.items() if len(values) >= GROUPS]
        self.bias = max((mean for mean, _, _ in means), key=abs, default=float("nan"))
        biased = [(mean, side) for mean, error, side in means if abs(mean) >= max(BIAS, SIGNIFICANT * error)]
        if self.ratio > 1:
            self.wrong = f"off by {self.largest:.3g}, {self.ratio:.3g} times as much as sums and roundings explain"
        elif self.differ > self.expected + SURE * np.sqrt(self.expected) + SURE:
            self.wrong = (
                f"{self.differ} of {self.elements} values are another number than the reference's, where the order of "
                f"sums explains {self.expected:.0f}"
            )
        elif biased:
            mean, side = max(biased, key=lambda pair: abs(pair[0]))
            self.wrong = f"results are {abs(mean):.2f} units in the last place {SIDES[side][mean > 0]} on average"


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent values and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


@dataclass
class Judge:
    """Compares what a recorder recorded with references."""

    recorder: Recorder
    weights: ArtifactWeights

    def __post_init__(self) -> None:
        # The weights of a layer: each is read from the file once for all phases.
        self._weight = functools.lru_cache(maxsize=12)(self._read)

    def findings(self) -> Iterator[Finding]:
        """Yield the finding of every launch that ran, layer by layer."""
        in_order = {op: at for at, op in enumerate(self.recorder.samples)}
        for op in sorted(in_order, key=lambda op: (_place(op), in_order[op])):
            yield self._finding(op, self.recorder.samples[op])

    def _read(self, buffer: str) -> Weight:
        shapes = [self.weights.shapes[part] for part in tensors_of(buffer)]
        shape = (sum(rows for rows, *_ in shapes), *shapes[0][1:])
        return Weight(self.weights.stored(buffer), self.weights.manifest.buffers[buffer]["format"], shape)

    def _finding(self, op: Op, samples: Sequence[Sample]) -> Finding:
        finding = Finding(op)
        for sample in samples:
            case = self._case(op, sample)
            finding.calls += 1
            for arg, reference, spread in zip(op.written, case.results, error_bounds(case), strict=True):
                ours = sample.values[arg.name]
                heads = case.inputs["heads"] if _ATTENTION in op.operation else 1
                pair = ours, reference.reshape(ours.shape).astype(ours.dtype)
                _compare(finding, arg.name, sample, pair, spread, heads)
        finding.judge()
        return finding

    def _case(self, op: Op, sample: Sample) -> Case:
        sizes = self.recorder.sizes(op, sample.rows, sample.position)
        scalars = {name: sizes[of] if isinstance(of, str) else of for name, of in op.launch.scalars.items()}
        bound = {arg.name: op.buffers[arg.name] for arg in op.read}
        weights = {arg: self._weight(name) for arg, name in bound.items() if name in self.weights.held}
        tables = {arg: self.recorder.tables[name] for arg, name in bound.items() if name in self.recorder.tables}
        taken = {arg: weight.values if op.of_values else weight.stored for arg, weight in weights.items()}
        inputs: dict[str, Any] = {**scalars, **sample.values, **tables, **taken}
        # A prompt on the array multiplies with what was unpacked before.
        unpacked = (arg.name for arg in op.read if arg.matrix and arg.name not in weights)
        weights |= {name: Weight(inputs[name], "bf16", inputs[name].shape) for name in unpacked}
        if op.fixed_point and "x" in inputs:
            inputs["x"] = in_fixed_point(inputs["x"])
        return Case(op, inputs, weights, _reference(op, inputs))


def _place(op: Op) -> float:
    """Return a key that sorts by layer, with what is before the first layer first."""
    return -1.0 if op.layer is None and op.call == 0 else float("inf") if op.layer is None else op.layer


def _reference(op: Op, inputs: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    if "history" in inputs:
        # It begins with the first row that the call sees.
        return results(op.judged_by, {**inputs, "pos": 0})
    if op.operation not in _APPENDS:
        made = results(op.judged_by, inputs)
        if not op.in_numbers:
            return made
        return tuple(map(partial(_as_values, op, inputs["head_dim"]), op.written, made))
    form = formats()[op.format]
    heads = [inputs[which].reshape(-1, inputs["kv_heads"], inputs["head_dim"]) for which in "kv"]
    kept = [form.dequantise(form.quantise(rows), inputs["head_dim"]) for rows in heads]
    return (np.stack(kept, axis=2),) if op.operation == "append_kv" else tuple(kept)


def _as_values(op: Op, head_dim: int, arg: Arg, result: np.ndarray) -> np.ndarray:
    """Return a result; of a KV cache in numbers their values, `[rows * kv_heads, halves, head_dim]`."""
    if op.slots[arg.name].keeps != KV:
        return result
    stored, written = op.slots[arg.name].format, HALVES[op.operation]
    head = kv_rows.half_elements(head_dim, stored)
    rows = np.zeros((result.size // head // (written.stop - written.start), 2, head), result.dtype)
    rows[:, written] = result.reshape(len(rows), -1, head)
    return kv_rows.held(rows, stored)[:, written]


def _compare(
    finding: Finding, name: str, sample: Sample, pair: tuple[np.ndarray, np.ndarray], spread: ErrorBound, heads: int
) -> None:
    """Add one result to a finding; `pair`: the runtime's and the reference's."""
    ours, wanted = (values.astype(np.float32).ravel() for values in pair)
    limit, chance = spread.limit.ravel(), spread.chance.ravel()
    same = (ours == wanted) | np.isnan(ours) & np.isnan(wanted)
    error = np.where(same, 0, np.abs(ours - wanted))
    error[np.isnan(error)] = np.inf
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(same, 0, np.nan_to_num(error / limit, nan=np.inf, posinf=np.inf))
    worst = int(np.argmax(ratio))
    finding.elements += ours.size
    finding.differ += int((~same).sum())
    finding.expected += float(chance.sum())
    if finding.worst is None or ratio[worst] > finding.ratio:
        finding.ratio, finding.largest = float(ratio[worst]), float(error[worst])
        finding.worst = _worst(finding.op, name, sample, pair, worst, float(limit[worst]))
    if pair[0].dtype == bfloat16:
        groups = heads * (len(pair[0]) if pair[0].ndim > 1 else 1)
        errors = np.where(np.isfinite(ours - wanted), ours - wanted, 0)
        for which, values in enumerate((wanted, *spread.rounded)):
            unit = ulp(values).reshape(groups, -1).sum(axis=-1)
            for side, along in (("magnitude", np.sign(values.ravel())), ("value", np.float32(1))):
                # Errors of a row may have one cause, so a row counts once.
                sums = (errors * along).reshape(groups, -1).sum(axis=-1)
                finding.means.setdefault((name, which, side), []).extend((sums / unit).tolist())


def _worst(op: Op, name: str, sample: Sample, values: tuple[np.ndarray, np.ndarray], at: int, limit: float) -> Worst:
    ours, reference = values
    index = tuple(int(i) for i in np.unravel_index(at, ours.shape))
    first = max(0, index[-1] - AROUND)
    near = slice(first, index[-1] + AROUND + 1)
    return Worst(
        argument=name,
        slot=op.names[name],
        position=sample.position,
        rows=sample.rows,
        index=index,
        first=first,
        ours=ours[index[:-1]][near].astype(np.float64).tolist(),
        reference=reference[index[:-1]][near].astype(np.float64).tolist(),
        error=abs(float(ours[index]) - float(reference[index])),
        limit=limit,
    )
