"""What `doit verify` found, in files: `verify.html` for people, `verify.json`, and `verify.xml` as JUnit, for CI."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

from llama_npu2.cli.table import Column
from stages.engine.files import write_atomic
from stages.proof.comparison.continuations import TOKENS, TOP, Choice, Comparison, Difference
from stages.reports.pages import Page, chart, colour, details, facts, note, table, tag

if TYPE_CHECKING:
    from stages.proof.comparison.verification import Verification

CONTEXT = 60
"""Characters in front of a difference."""


def write(directory: Path, artifact: str, found: Verification) -> Path:
    """All three files; `artifact`: what was verified, as `model/target`. Returns the page."""
    write_atomic(directory / "verify.json", (json.dumps(described(artifact, found), indent=1) + "\n").encode())
    write_atomic(directory / "verify.xml", junit(artifact, found))
    page(artifact, found).write(directory / "verify.html")
    return directory / "verify.html"


def described(artifact: str, found: Verification) -> dict[str, Any]:
    """All of it, as JSON."""
    return {
        "artifact": artifact,
        **found.summary(),
        "comparisons": [asdict(comparison) | {"passed": comparison.passed} for comparison in found.comparisons],
        "tensors": [asdict(tensor) | {"passed": tensor.passed} for tensor in found.tensors],
        "seconds": found.seconds,
    }


def junit(artifact: str, found: Verification) -> bytes:
    """A suite with a case per check, in the vocabulary of `junit-10.xsd` of Jenkins' xUnit plugin. A prompt's time is
    the runtime's; that of transformers, which takes all texts at once, is with the logits."""
    suite = ElementTree.Element("testsuite", _counts(found))
    suite.attrib |= {"name": _allowed(artifact), "timestamp": datetime.now(UTC).isoformat(timespec="seconds")}
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(found).items():
        ElementTree.SubElement(properties, "property", name=name, value=_allowed(value))
    for name, check in found.checks.items():
        time = f"{found.seconds[name]:.3f}"
        case = ElementTree.SubElement(suite, "testcase", classname="verify", name=_allowed(name), time=time)
        said = _allowed(str(check))
        if check.passed:
            ElementTree.SubElement(case, "system-out").text = said
        else:
            ElementTree.SubElement(case, "failure", type="mismatch", message=said).text = said
    whole = ElementTree.Element("testsuites", _counts(found), name="doit verify")
    whole.append(suite)
    ElementTree.indent(whole)
    return ElementTree.tostring(whole, "utf-8", xml_declaration=True) + b"\n"


def _counts(found: Verification) -> dict[str, str]:
    failures = sum(not check.passed for check in found.checks.values())
    # What takes the weights is a part of what takes the logits.
    time = sum(seconds for name, seconds in found.seconds.items() if name != "weights")
    return {"tests": str(len(found.checks)), "failures": str(failures), "errors": "0", "time": f"{time:.3f}"}


def _properties(found: Verification) -> dict[str, str]:
    """What was verified, on what, and what has no bound."""
    summary = found.summary()
    return {
        "manifest": f"sha256:{summary['manifest']}",
        "text": f"{summary['text']['name']} sha256:{summary['text']['sha256']}",
        "bits": f"{summary['bits']:.2f}",
        "KL divergence": f"{found.lost.divergence:.6f}",
        "perplexity": f"{found.lost.perplexity:.3f}",
        "perplexity of the checkpoint": f"{found.lost.source_perplexity:.3f}",
        **summary["machine"],
    }


def _allowed(text: str) -> str:
    """What XML 1.0 has no way to say is replaced."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def page(artifact: str, found: Verification) -> Page:
    """Whether it is right, how good it is, and where it differs."""
    failed = [name for name, check in found.checks.items() if not check.passed]
    verdict = f"Wrong: {', '.join(failed)}." if failed else "It does what transformers does with the same weights."
    made = Page(f"doit verify: {artifact}", verdict)
    made.add("Checks", table(_CHECKS, list(_checks(found)), "Checks"))
    made.add("Against the checkpoint", *_quality(found))
    made.add("Prompts", note(_PROMPTS), *(block for each in found.comparisons for block in _prompt(each)))
    made.add("Weights", *_weights(found))
    return made


_PROMPTS = (
    f"Each prompt is continued greedily by {TOKENS} tokens. Transformers, in bf16, chooses behind the same tokens. "
    f"Where it chooses another one, the token is marked, and the choice of each must be among the other's best {TOP}."
)
_CHECKS = [Column("check"), Column("outcome"), Column("what was found"), Column("seconds", right=True)]
_DIFFERENCES = [
    Column("token", right=True),
    Column("side"),
    Column("chose"),
    Column("id", right=True),
    Column("rank for the other", right=True),
    Column("probability, runtime", right=True),
    Column("transformers", right=True),
]
_TENSORS = [
    Column("tensor"),
    Column("format"),
    Column("off by", right=True),
    Column("rounding alone", right=True),
    Column("outcome"),
]


def _checks(found: Verification) -> Iterator[tuple[object, ...]]:
    for name, check in found.checks.items():
        yield name, _verdict(check.passed), str(check), f"{found.seconds[name]:.2f}"


def _verdict(passed: bool) -> Markup:
    return tag("strong", "pass" if passed else "FAIL", style=f"color: {colour('good' if passed else 'bad')}")


def _quality(found: Verification) -> Iterator[Markup]:
    lost = found.lost
    low, high = lost.interval
    yield note(
        f"What the formats of weights and KV cache cost over {lost.tokens} tokens of {found.text.name}, beside the "
        f"checkpoint in float32; weights of matrices take {found.weights.bits:.2f} bits."
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
    """The text with what differs, the first difference side by side, and the figures of each."""
    prompt, differences = comparison.prompt, comparison.differences
    yield tag("h3", f"{prompt.name}: {comparison.equal} of {TOKENS} equal ", _verdict(comparison.passed))
    differing = {difference.position for difference in differences}
    pieces = (tag("mark", text) if at in differing else text for at, text in enumerate(comparison.pieces))
    yield _text(tag("strong", prompt.text), *pieces)
    if differences:
        yield from first_difference(comparison)
        rows = [
            row
            for each in differences
            for row in (_choice(each, "runtime", each.ours), _choice(each, "transformers", each.theirs))
        ]
        yield details(f"{len(differences)} differences", table(_DIFFERENCES, rows, f"differences of {prompt.name}"))


def _choice(difference: Difference, side: str, choice: Choice) -> tuple[object, ...]:
    shares = (f"{probability:.2%}" for probability in (choice.ours, choice.theirs))
    return difference.position + 1, side, repr(choice.text), choice.token, choice.rank + 1, *shares


def first_difference(comparison: Comparison) -> Iterator[Markup]:
    """What each side goes on with, behind the same words."""
    first = comparison.differences[0]
    before = (comparison.prompt.text + "".join(comparison.pieces[: first.position]))[-CONTEXT:]
    for side, choice in (("runtime", first.ours), ("transformers", first.theirs)):
        yield _text(tag("strong", f"{side}, token {first.position + 1}: "), before, tag("mark", choice.text))


def _text(*parts: object) -> Markup:
    """With blanks and line ends as they are."""
    return tag("p", *parts, style="white-space: pre-wrap")


def _weights(found: Verification) -> Iterator[Markup]:
    """Of every tensor; a picture where any is rounded."""
    rows = [
        (each.tensor, each.format, f"{each.error:.6f}", f"{each.rounded:.6f}", _verdict(each.passed))
        for each in found.tensors
    ]
    numbers = table(_TENSORS, rows, "rounding of each tensor")
    yield note(
        "Root mean square of what each tensor is off from the checkpoint's, over that of its values; beside it, what "
        "rounding some of its rows to its format costs by itself."
    )
    if any(each.error for each in found.tensors):
        names = [each.tensor for each in found.tensors]
        traces = [
            _bars("the artifacts'", names, [each.error for each in found.tensors], "series-1"),
            _bars("rounding alone", names, [each.rounded for each in found.tensors], "series-2"),
        ]
        yield chart(traces, _LAYOUT, "Error of each tensor, in the order in which layers read them", numbers)
    else:
        yield numbers


_LAYOUT = {"barmode": "group", "xaxis": {"showticklabels": False}, "yaxis": {"title": {"text": "relative error"}}}


def _bars(name: str, x: list[str], y: list[float], shade: str) -> dict[str, Any]:
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour(shade)}}
