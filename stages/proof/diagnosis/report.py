"""The result of a diagnosis."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from stages.proof.diagnosis.launches import Finding
from stages.proof.diagnosis.layers import MOST, Layer


@dataclass(frozen=True)
class Report:
    """What was found. `layers`: empty where transformers could not say, and `unsaid` why; `findings`: of all launches,
    in the order in which they first ran; `unmet`: phases that no prompt came to; `inside`: where the first wrong launch
    does several in one, those of its call one by one."""

    model: str
    runs: str
    text: str
    layers: list[Layer]
    unsaid: str
    findings: list[Finding]
    unmet: list[str]
    inside: list[Finding] = field(default_factory=list)

    @property
    def wrong(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.wrong]

    @property
    def drift(self) -> Layer | None:
        """The first layer that is further off than rounding explains."""
        return next((layer for layer in self.layers if layer.drifts), None)

    @property
    def passed(self) -> bool:
        return not (self.wrong or self.drift)

    @property
    def verdict(self) -> str:
        """In one line."""
        drift = f"layer {self.drift.layer + 1} is the first to drift" if self.drift else ""
        if self.wrong:
            site = self.wrong[0].site
            also = f"; {drift}" if drift else ""
            return f"diagnose: FAULT in {site.place}: {site.does}: {self.wrong[0].wrong}{also}"
        if drift:
            return (
                f"diagnose: FAULT: {drift}, though all {len(self.findings)} launches are right: look at the plan, the "
                "tables, and whether the weights are those that transformers got"
            )
        layers = "" if self.unsaid else f", and layers are no more than {MOST:g} times as far off as in bf16"
        return f"diagnose: no fault found: {len(self.findings)} launches are what their references make{layers}"

    def as_json(self) -> dict[str, Any]:
        """All of it; what is no number is null."""
        launches = [_launch(finding) for finding in self.findings]
        first = next((launch for launch in launches if launch["wrong"]), None)
        found = {
            "model": self.model,
            "runs": self.runs,
            "text": self.text,
            "passed": self.passed,
            "verdict": self.verdict,
            "first_layer": self.drift.layer if self.drift else None,
            "first_launch": first,
            "unfused": [_launch(finding) for finding in self.inside],
            "not_run": self.unmet,
            "without_layers": self.unsaid or None,
            "layers": [asdict(layer) | {"drifts": layer.drifts, "times": layer.times} for layer in self.layers],
            "launches": launches,
        }
        plain: dict[str, Any] = _plain(found)
        return plain


def _launch(finding: Finding) -> dict[str, Any]:
    site = finding.site
    where = {name: getattr(site, name) for name in ("program", "layer", "index", "does", "base", "fused")}
    seen = ("calls", "elements", "differ", "expected", "ratio", "largest", "bias", "wrong")
    worst = asdict(finding.worst) if finding.worst else None
    where |= {"phase": str(site.phase), "kernel": site.kernel.name}
    return where | {name: getattr(finding, name) for name in seen} | {"worst": worst}


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {name: _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case float() if not math.isfinite(value):
            return None
    return value
