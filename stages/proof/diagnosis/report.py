"""The result of a diagnosis."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from stages.proof.diagnosis.launches import Finding
from stages.proof.diagnosis.layers import MOST, Layer


@dataclass(frozen=True)
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
    inside: list[Finding] = field(default_factory=list)
    """If the first wrong launch computes several in one: those of its call, one by one."""

    @property
    def wrong(self) -> list[Finding]:
        """Launches that are wrong, in the order in which they first ran."""
        return [finding for finding in self.findings if finding.wrong]

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
