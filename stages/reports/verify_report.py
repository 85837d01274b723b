"""The files of `doit verify`: `verify.html` for people, `verify.json`, and `verify.xml` as JUnit, for CI."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from stages.engine.files import write_atomic
from stages.proof.comparison.continuations import TOKENS, TOP, Comparison, Difference
from stages.proof.comparison.verification import Verification
from stages.reports.pages import Axis, Page, Series, colour, columns, details, facts, note, table, tag

CONTEXT = 60
"""Characters shown before a difference."""


def write(directory: Path, artifact: str, result: Verification) -> Path:
    """Write all three files, and return the path of the page. `artifact` is `model/target`."""
    write_atomic(directory / "verify.json", (json.dumps(described(artifact, result), indent=1) + "\n").encode())
    write_atomic(directory / "verify.xml", junit(artifact, result))
    page(artifact, result).write(directory / "verify.html")
    return directory / "verify.html"


def described(artifact: str, result: Verification) -> dict[str, Any]:
    """Return all of it, for JSON."""
    return {
        "artifact": artifact,
        **result.summary(),
        "comparisons": [asdict(comparison) | {"passed": comparison.passed} for comparison in result.comparisons],
        "tensors": [asdict(tensor) | {"passed": tensor.passed} for tensor in result.tensors],
        "seconds": result.seconds,
    }


def junit(artifact: str, result: Verification) -> bytes:
    """Return a suite with a case per check, in the vocabulary of `junit-10.xsd` of Jenkins' xUnit plugin.

    A prompt's time is the runtime's. That of transformers, which takes all texts at once, is with the logits.
    """
    suite = ElementTree.Element("testsuite", _counts(result))
    suite.attrib |= {"name": _allowed(artifact), "timestamp": datetime.now(UTC).isoformat(timespec="seconds")}
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(result).items():
        ElementTree.SubElement(properties, "property", name=name, value=_allowed(value))
    for name, check in result.checks.items():
        time = f"{result.seconds[name]:.3f}"
        case = ElementTree.SubElement(suite, "testcase", classname="verify", name=_allowed(name), time=time)
        message = _allowed(str(check))
        if check.passed:
            ElementTree.SubElement(case, "system-out").text = message
        else:
            ElementTree.SubElement(case, "failure", type="mismatch", message=message).text = message
    suites = ElementTree.Element("testsuites", _counts(result), name="doit verify")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, "utf-8", xml_declaration=True) + b"\n"


def _counts(result: Verification) -> dict[str, str]:
    failures = sum(not check.passed for check in result.checks.values())
    # The time of the weights is a part of that of the logits.
    time = sum(seconds for name, seconds in result.seconds.items() if name != "weights")
    return {"tests": str(len(result.checks)), "failures": str(failures), "errors": "0", "time": f"{time:.3f}"}


def _properties(result: Verification) -> dict[str, str]:
    """Return what was verified, on what, and the figures that have no bound."""
    summary = result.summary()
    return {
        "manifest": f"sha256:{summary['manifest']}",
        "text": f"{summary['text']['name']} sha256:{summary['text']['sha256']}",
        "bits": f"{summary['bits']:.2f}",
        "KL divergence": f"{result.lost.divergence:.6f}",
        "perplexity": f"{result.lost.perplexity:.3f}",
        "perplexity of the checkpoint": f"{result.lost.source_perplexity:.3f}",
        **summary["machine"],
    }


def _allowed(text: str) -> str:
    """Replace what XML 1.0 cannot hold."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def page(artifact: str, result: Verification) -> Page:
    """Return a page of whether it is right, how good it is, and where it differs."""
    failed = [name for name, check in result.checks.items() if not check.passed]
    verdict = f"Wrong: {', '.join(failed)}." if failed else "It computes what transformers does with the same weights."
    shown = Page(f"doit verify: {artifact}", verdict)
    shown.add("Checks", *_checks(result))
    shown.add("Against the checkpoint", *_quality(result))
    prompts = (block for comparison in result.comparisons for block in _prompt(comparison))
    shown.add("Prompts", note(_PROMPTS), *prompts)
    shown.add("Weights", *_weights(result))
    return shown


_PROMPTS = (
    f"Each prompt is continued greedily by {TOKENS} tokens. Transformers, in bf16, chooses after the same tokens. "
    f"Where it chooses another one, the token is marked, and each side's choice must be among the other's best {TOP}."
)
_DIFFERENCES = [">token", "side", "chose", ">id", ">rank for the other", ">probability, runtime", ">transformers"]
_TENSORS = ["tensor", "format", ">relative error", ">of rounding alone", "outcome"]


def _checks(result: Verification) -> Iterator[Markup]:
    for name, check in result.checks.items():
        seconds = tag("span", f"{result.seconds[name]:.1f} s", class_="muted")
        yield note(_verdict(check.passed), " ", tag("strong", name), f": {check}. ", seconds)


def _verdict(passed: bool) -> Markup:
    return tag("strong", "pass" if passed else "FAIL", style=f"color: {colour('good' if passed else 'bad')}")


def _quality(result: Verification) -> Iterator[Markup]:
    lost = result.lost
    low, high = lost.interval
    yield note(
        f"The loss of the formats of weights and KV cache, over {lost.tokens} tokens of {result.text.name}, against "
        f"the checkpoint in float32. A weight of a matrix takes {result.weights.bits:.2f} bits on average."
    )
    yield facts(
        {
            "mean KL divergence, nats": f"{lost.divergence:.6f}",
            "its 95 % interval": f"{low:.6f} to {high:.6f}",
            "99.9th percentile": f"{lost.tail:.4f}",
            "same best token": f"{lost.same:.2%}",
            "perplexity": f"{lost.perplexity:.3f}",
            "the checkpoint's": f"{lost.source_perplexity:.3f}",
        }
    )


def _prompt(comparison: Comparison) -> Iterator[Markup]:
    """Yield the text with its differences marked, the first one side by side, and figures of each."""
    prompt, differences = comparison.prompt, comparison.differences
    yield tag("h3", f"{prompt.name}: {comparison.equal} of {TOKENS} equal ", _verdict(comparison.passed))
    differing = {difference.position for difference in differences}
    pieces = (tag("mark", text) if at in differing else text for at, text in enumerate(comparison.pieces))
    yield _text(tag("strong", prompt.text), *pieces)
    if differences:
        yield from first_difference(comparison)
        rows = [row for difference in differences for row in _choices(difference)]
        yield details(f"{len(differences)} differences", table(_DIFFERENCES, rows, f"differences of {prompt.name}"))


def _choices(difference: Difference) -> Iterator[tuple[object, ...]]:
    for side, choice in (("runtime", difference.ours), ("transformers", difference.theirs)):
        shares = (f"{probability:.2%}" for probability in (choice.ours, choice.theirs))
        yield difference.position + 1, side, repr(choice.text), choice.token, choice.rank + 1, *shares


def first_difference(comparison: Comparison) -> Iterator[Markup]:
    """Yield how each side continues the same words."""
    first = comparison.differences[0]
    before = (comparison.prompt.text + "".join(comparison.pieces[: first.position]))[-CONTEXT:]
    for side, choice in (("runtime", first.ours), ("transformers", first.theirs)):
        yield _text(tag("strong", f"{side}, token {first.position + 1}: "), before, tag("mark", choice.text))


def _text(*parts: object) -> Markup:
    """Return a paragraph that keeps blanks and line ends."""
    return tag("p", *parts, style="white-space: pre-wrap")


def _weights(result: Verification) -> Iterator[Markup]:
    """Yield a table of all tensors, and a chart where any is rounded."""
    rows = [
        (tensor.tensor, tensor.format, f"{tensor.error:.6f}", f"{tensor.rounded:.6f}", _verdict(tensor.passed))
        for tensor in result.tensors
    ]
    numbers = table(_TENSORS, rows, "rounding of each tensor")
    yield note(
        "The relative error of a tensor is the root mean square of its differences from the checkpoint's, divided by "
        "that of its values. Next to it is the error that rounding some of its rows to its format makes by itself."
    )
    if any(tensor.error for tensor in result.tensors):
        series = [
            Series("the artifacts'", "series-1", [tensor.error for tensor in result.tensors]),
            Series("rounding alone", "series-2", [tensor.rounded for tensor in result.tensors]),
        ]
        y = Axis.of("relative error", [error for one in series for error in one.values])
        names = [tensor.tensor for tensor in result.tensors]
        label = "Error of each tensor, in the order in which layers read them"
        yield columns(names, series, "", y, label, numbers, stacked=False)
    else:
        yield numbers
