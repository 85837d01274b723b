"""The result of a diagnosis: launches, and layers next to another program's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, field
from typing import Any

import numpy as np

from llama_npu2.frozen import frozen
from stages.proof.diagnosis.launches import Finding

MOST = 2.0
"""A layer's error may be this many times that of a run in bf16: one bit."""
WORST = 5
"""Percentage of positions, those with the lowest cosines, that a cosine leaves out."""


@frozen
class Distance:
    """How far rows are from others."""

    cosine: float
    """The lowest cosine of all but the worst `WORST` percent of the rows."""
    largest: float
    """The largest difference of two values."""
    error: float
    """Root mean square of the differences, divided by that of the values."""


@frozen
class Layer:
    """The output of a layer, for the positions of one part of the text."""

    layer: int
    """From 0."""
    part: str
    """`prompt` or `tokens`."""
    ours: Distance
    """The runtime, against the other program in float32 with the same weights."""
    bf16: Distance
    """The other program in bf16, against itself in float32."""
    checkpoint: Distance | None
    """The runtime, against the checkpoint's weights, where the artifacts' are others."""
    bounded: bool
    """Whether a bound applies: not where activations are rounded to whole numbers too, or share exponents."""

    @property
    def times(self) -> float:
        """The error as a multiple of that in bf16."""
        return self.ours.error / self.bf16.error if self.bf16.error else float("inf" if self.ours.error else 0)

    @property
    def drifts(self) -> bool:
        """Whether the error exceeds the bound."""
        return self.bounded and not self.times <= MOST


def distance(rows: np.ndarray, exact: np.ndarray) -> Distance:
    """Return how far rows `[positions, emb]` are from exact ones."""
    a, b = rows.astype(np.float64), exact.astype(np.float64)
    sizes = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosines = np.divide((a * b).sum(axis=-1), sizes, out=np.zeros(len(a)), where=sizes > 0)
    size = np.linalg.norm(b)
    error = np.linalg.norm(a - b) / size if size else float(np.any(a))
    return Distance(float(np.percentile(cosines, WORST)), float(np.abs(a - b).max()), float(error))


def compared(
    layer: int,
    states: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    checkpoint: np.ndarray | None,
    prompt: int,
    bounded: bool,
) -> list[Layer]:
    """Compare one layer, at the positions of the prompt and at those after it.

    Args:
        states: The runtime's rows, by position.
        theirs: The other program's rows, in float32 and in bf16.
        checkpoint: Rows with the checkpoint's weights, where the artifacts' are others.
        prompt: Tokens of the prompt.
        bounded: See `Layer`.
    """
    ours, (exact, rounded) = np.stack(states), theirs
    parts = []
    for part, rows in (("prompt", slice(prompt)), ("tokens", slice(prompt, len(ours)))):
        if len(ours[rows]):
            apart = None if checkpoint is None else distance(ours[rows], checkpoint[rows])
            of_ours, of_bf16 = (distance(side[rows], exact[rows]) for side in (ours, rounded))
            parts.append(Layer(layer, part, of_ours, of_bf16, apart, bounded))
    return parts


@frozen
class Report:
    """The result of `doit diagnose`."""

    model: str
    runs: str
    """The weights, the device and its threads, for people."""
    text: str
    """The length of the text that was run, for people."""
    layers: list[Layer]
    """Empty where transformers could not compute them."""
    without_layers: str
    """Why there are no layers."""
    findings: list[Finding]
    """All launches, in the order in which they first ran."""
    not_run: list[str]
    """Phases that no prompt reached."""
    of_several: list[str] = field(default_factory=list)
    """Phases of several tokens or sequences, whose launches are not compared."""
    inside: list[Finding] = field(default_factory=list)
    """If the first wrong launch computes several in one: those of its call, one by one."""

    @property
    def wrong(self) -> list[Finding]:
        """Launches that are wrong, in the order in which they first ran."""
        return [finding for finding in self.findings if finding.wrong]

    @property
    def left_out(self) -> list[str]:
        """The phases of which no launch was compared, in sentences without full stops."""
        phases, several = (", ".join(names) for names in (self.not_run, self.of_several))
        tried = "doit selftest with the same npu.tokens= and npu.sequences= tries these phases"
        return [
            *([f"no prompt reached {phases}: full=1 runs all"] if phases else []),
            *([f"several tokens or sequences at once are not looked at ({several}): {tried}"] if several else []),
        ]

    @property
    def drift(self) -> Layer | None:
        """The first layer that is further off than rounding explains."""
        return next((layer for layer in self.layers if layer.drifts), None)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.wrong or self.drift)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        drift = f"layer {self.drift.layer} is the first to drift" if self.drift else ""
        if self.wrong:
            op = self.wrong[0].op
            also = f"; {drift}" if drift else ""
            return f"diagnose: FAULT in {op.place}: {op.does}: {self.wrong[0].wrong}{also}"
        if drift:
            return (
                f"diagnose: FAULT: {drift}, though all {len(self.findings)} launches are right: look at the plan, the "
                "tables, and whether the weights are those that transformers got"
            )
        bounded = f"; the error of each layer is at most {MOST:g} times that of transformers in bf16"
        layers = "" if self.without_layers else bounded
        return f"diagnose: no fault found: all {len(self.findings)} launches agree with their references{layers}"

    def as_json(self) -> dict[str, Any]:
        """Return all of it; numbers that are not finite are null."""
        launches = [_launch(finding) for finding in self.findings]
        first = next((launch for launch in launches if launch["wrong"]), None)
        content = {
            "model": self.model,
            "runs": self.runs,
            "text": self.text,
            "passed": self.passed,
            "verdict": self.verdict,
            "first_layer": self.drift.layer if self.drift else None,
            "first_launch": first,
            "unfused": [_launch(finding) for finding in self.inside],
            "not_run": self.not_run,
            "of_several": self.of_several,
            "without_layers": self.without_layers or None,
            "layers": [asdict(layer) | {"drifts": layer.drifts, "times": layer.times} for layer in self.layers],
            "launches": launches,
        }
        plain: dict[str, Any] = _plain(content)
        return plain


def _launch(finding: Finding) -> dict[str, Any]:
    op = finding.op
    place = {name: getattr(op, name) for name in ("program", "layer", "index", "does", "base", "fused")}
    place |= {"phase": str(op.phase), "kernel": op.kernel.name}
    numbers = ("calls", "elements", "differ", "expected", "ratio", "largest", "bias", "wrong")
    worst = asdict(finding.worst) if finding.worst else None
    return place | {name: getattr(finding, name) for name in numbers} | {"worst": worst}


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {name: _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case float() if not math.isfinite(value):
            return None
    return value
