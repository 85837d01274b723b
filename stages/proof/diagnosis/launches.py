"""Each launch of a run against its kernel's reference, on the inputs that it had."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from stages.model.artifact_weights import ArtifactWeights
from stages.model.buffers import tensors_of
from stages.model.reference import results
from stages.proof.diagnosis.bounds import SURE, Given, Spread, Weight, in_fixed_point, spreads, ulp
from stages.proof.diagnosis.record import Recorder, Sample
from stages.proof.diagnosis.sites import Site
from stages.weights.formats import formats

BIAS = 0.25
"""Units in the last place. Rounded to the nearest, results are off by 0 on average; cut off, by a half: what is nearer
to that is wrong."""
SIGNIFICANT = 6.0
"""Times its standard error is a mean certainly not 0."""
GROUPS = 16
"""So many rows (of heads, in attention) are enough for a mean and its error."""
SIDES = {"magnitude": ("toward zero", "away from zero"), "value": ("down", "up")}
"""What is off on average, and to which sides."""
AROUND = 3
"""Values shown on each side of the worst."""

_APPENDS = ("append_kv", "append_kv_panels")
_ATTENTION = "attention"


@dataclass(frozen=True)
class Worst:
    """The element of a result that is farthest off, measured by what it may be off by. `argument`: of the kernel;
    `slot`; `index` in the slot's rows of that call; `ours`, `reference`: from `first` on in its row."""

    argument: str
    slot: str
    position: int
    rows: int
    index: tuple[int, ...]
    first: int
    ours: list[float]
    reference: list[float]
    error: float
    limit: float


@dataclass
class Finding:
    """What was seen of one launch in all its calls. `elements` of results; `differ`: how many are not the reference's
    number, `expected`: how many of these the order of sums explains at most; `ratio`: the largest error by its limit;
    `bias`: mean error of magnitudes or of values, the larger one, in units in the last place, NaN where rows are too
    few to say; `wrong`: why it is, or nothing; `means`: by result, rounding and side, those of rows."""

    site: Site
    calls: int = 0
    elements: int = 0
    differ: int = 0
    expected: float = 0.0
    ratio: float = 0.0
    largest: float = 0.0
    bias: float = float("nan")
    wrong: str = ""
    worst: Worst | None = None
    means: dict[tuple[str, int, str], list[float]] = field(default_factory=dict, repr=False)

    def judge(self) -> None:
        """Say what is wrong, once all calls are counted."""
        means = [(*_mean(values), side) for (_, _, side), values in self.means.items() if len(values) >= GROUPS]
        self.bias = max((mean for mean, _, _ in means), key=abs, default=float("nan"))
        biased = [each for each in means if abs(each[0]) >= max(BIAS, SIGNIFICANT * each[1])]
        if self.ratio > 1:
            self.wrong = f"off by {self.largest:.3g}, {self.ratio:.3g} times as much as sums and roundings can be"
        elif self.differ > self.expected + SURE * np.sqrt(self.expected) + SURE:
            self.wrong = (
                f"{self.differ} of {self.elements} values are another number than the reference's, where the order of "
                f"sums explains {self.expected:.0f}"
            )
        elif biased:
            mean, _, side = max(biased, key=lambda each: abs(each[0]))
            self.wrong = f"results are {abs(mean):.2f} units in the last place {SIDES[side][mean > 0]} on average"


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Of independent values, and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


@dataclass
class Judge:
    """Compares what a recorder has."""

    recorder: Recorder
    weights: ArtifactWeights

    def __post_init__(self) -> None:
        # Those of a layer: each is read from the file once for all phases.
        self._weight = functools.lru_cache(maxsize=12)(self._read)

    def findings(self) -> Iterator[Finding]:
        """Of every launch that ran, layer by layer."""
        in_order = {site: at for at, site in enumerate(self.recorder.samples)}
        for site in sorted(in_order, key=lambda site: (_place(site), in_order[site])):
            yield self._finding(site, self.recorder.samples[site])

    def _read(self, buffer: str) -> Weight:
        shapes = [self.weights.shapes[part] for part in tensors_of(buffer)]
        shape = (sum(rows for rows, *_ in shapes), *shapes[0][1:])
        return Weight(self.weights.stored(buffer), self.weights.manifest.buffers[buffer]["format"], shape)

    def _finding(self, site: Site, samples: Sequence[Sample]) -> Finding:
        finding = Finding(site)
        for sample in samples:
            given = self._given(site, sample)
            finding.calls += 1
            for arg, reference, spread in zip(site.written, given.results, spreads(given), strict=True):
                ours = sample.values[arg.name]
                heads = given.known["heads"] if _ATTENTION in site.operation else 1
                pair = ours, reference.reshape(ours.shape).astype(ours.dtype)
                _compare(finding, arg.name, sample, pair, spread, heads)
        finding.judge()
        return finding

    def _given(self, site: Site, sample: Sample) -> Given:
        sizes = self.recorder.sizes(site, sample.rows, sample.position)
        scalars = {name: sizes[of] if isinstance(of, str) else of for name, of in site.launch.scalars.items()}
        bound = {arg.name: site.buffers[arg.name] for arg in site.read}
        weights = {arg: self._weight(name) for arg, name in bound.items() if name in self.weights.held}
        tables = {arg: self.recorder.tables[name] for arg, name in bound.items() if name in self.recorder.tables}
        held = {arg: weight.values if site.of_values else weight.stored for arg, weight in weights.items()}
        known: dict[str, Any] = {**scalars, **sample.values, **tables, **held}
        # A prompt on the array multiplies with what was unpacked before.
        unpacked = (arg.name for arg in site.read if arg.matrix and arg.name not in weights)
        weights |= {name: Weight(known[name], "bf16", known[name].shape) for name in unpacked}
        if site.fixed_point and "x" in known:
            known["x"] = in_fixed_point(known["x"])
        return Given(site, known, weights, _reference(site, known))


def _place(site: Site) -> float:
    """Layers in order, what is before them and behind them around them."""
    return -1.0 if site.layer is None and site.call == 0 else float("inf") if site.layer is None else site.layer


def _reference(site: Site, known: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    if site.operation not in _APPENDS:
        return results(site.judged_by, known)
    form = formats()[site.format]
    rows = [known[which].reshape(-1, known["kv_heads"], known["head_dim"]) for which in "kv"]
    kept = [form.dequantise(form.quantise(each), known["head_dim"]) for each in rows]
    return (np.stack(kept, axis=2),) if site.operation == "append_kv" else tuple(kept)


def _compare(
    finding: Finding, name: str, sample: Sample, pair: tuple[np.ndarray, np.ndarray], spread: Spread, heads: int
) -> None:
    """Count one result in, ours and the reference's."""
    found, wanted = (each.astype(np.float32).ravel() for each in pair)
    limit, chance = spread.limit.ravel(), spread.chance.ravel()
    same = (found == wanted) | np.isnan(found) & np.isnan(wanted)
    error = np.where(same, 0, np.abs(found - wanted))
    error[np.isnan(error)] = np.inf
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(same, 0, np.nan_to_num(error / limit, nan=np.inf, posinf=np.inf))
    worst = int(np.argmax(ratio))
    finding.elements += found.size
    finding.differ += int((~same).sum())
    finding.expected += float(chance.sum())
    if finding.worst is None or ratio[worst] > finding.ratio:
        finding.ratio, finding.largest = float(ratio[worst]), float(error[worst])
        finding.worst = _worst(finding.site, name, sample, pair, worst, float(limit[worst]))
    if pair[0].dtype == bfloat16:
        groups = heads * (len(pair[0]) if pair[0].ndim > 1 else 1)
        errors = np.where(np.isfinite(found - wanted), found - wanted, 0)
        for which, values in enumerate((wanted, *spread.rounded)):
            unit = ulp(values).reshape(groups, -1).sum(axis=-1)
            for side, along in (("magnitude", np.sign(values.ravel())), ("value", np.float32(1))):
                # Errors of a row may have one cause: it counts as one.
                sums = (errors * along).reshape(groups, -1).sum(axis=-1)
                finding.means.setdefault((name, which, side), []).extend((sums / unit).tolist())


def _worst(
    site: Site, name: str, sample: Sample, values: tuple[np.ndarray, np.ndarray], at: int, limit: float
) -> Worst:
    ours, reference = values
    index = tuple(int(i) for i in np.unravel_index(at, ours.shape))
    first = max(0, index[-1] - AROUND)
    near = slice(first, index[-1] + AROUND + 1)
    return Worst(
        argument=name,
        slot=site.names[name],
        position=sample.position,
        rows=sample.rows,
        index=index,
        first=first,
        ours=ours[index[:-1]][near].astype(np.float64).tolist(),
        reference=reference[index[:-1]][near].astype(np.float64).tolist(),
        error=abs(float(ours[index]) - float(reference[index])),
        limit=limit,
    )
