"""Whether artifacts are right: what `doit verify` finds, and how it says so."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.storage import Directory
from llama_npu2.text.tokenizer import Tokenizer
from stages.commands import verify
from stages.graph import Build
from stages.graph.options import parse_options
from stages.model.sources import DEMO
from stages.proof.comparison import continuations, divergence, verification
from stages.proof.comparison.continuations import SHIPPED, TOKENS, Prompt, read_prompts
from stages.proof.comparison.verification import Verification
from stages.reports import verify_report
from stages.sharing.provenance import VERIFIED
from tests.npu.printed import missing
from tests.support.browser import Look

needs_transformers = pytest.mark.skipif(
    not (find_spec("torch") and find_spec("transformers")), reason="needs the verify extra: pip install -e '.[verify]'"
)
HOSTILE = [
    Prompt("1", "The capital of France is"),
    Prompt("a<b>&\"'\uffff", "<script>alert('\x1b[31m')</script>]]>\x00 & so on"),
]


def logits(*best: int) -> np.ndarray:
    """Of nine tokens, in this order of preference, the others equal."""
    row = np.zeros(9, np.float32)
    row[list(best)] = range(len(best), 0, -1)
    return row


class Choosing:
    """As much of a model as decoding takes: it has these logits, and notes what it is fed."""

    def __init__(self, rows: list[np.ndarray]) -> None:
        self._rows, self.fed = iter(rows), list[int]()

    def encode(self, prompt: str, raw: bool) -> list[int]:
        return [0, 7]

    def reset(self) -> None:
        pass

    def prefill(self, ids: list[int]) -> np.ndarray:
        return next(self._rows)

    def decode(self, token: int) -> np.ndarray:
        self.fed.append(token)
        return next(self._rows)


@pytest.mark.parametrize(("last", "passed"), [((1, 2), True), ((2, 3, 4, 5, 6, 1), False)])
def test_every_position_counts_after_a_difference(last: tuple[int, ...], passed: bool) -> None:
    """Transformers judges what the runtime goes on with, and a bad rank in the very last position still fails."""
    ours = [logits(1, 2)] * TOKENS
    ours[3], ours[10], ours[-1] = logits(2, 1), logits(5, 1), logits(*last)
    llm = Choosing(ours)
    made = continuations.continued(llm, Prompt("1", "prompt"))  # type: ignore[arg-type]
    assert made.ids == [0, 7, *llm.fed] and llm.fed == [1, 1, 1, 2, *[1] * 6, 5, *[1] * (TOKENS - 12)]
    comparison = made.compared(np.stack([logits(8), *[logits(1, 2)] * TOKENS]), lambda before, token: f" {token}")
    assert (comparison.equal, comparison.first) == (30 if passed else 29, 3)
    assert comparison.ranks == ((2, 1) if passed else (2, 5))
    assert comparison.passed == passed
    assert comparison.pieces == tuple(f" {row.argmax()}" for row in ours)
    first = comparison.differences[0]
    assert (first.position, first.ours.token, first.theirs.token, first.ours.rank) == (3, 2, 1, 1)
    # Two logits of 2 and 1 among seven of 0, and the other way round.
    best, second = np.exp([2, 1]) / (np.exp(2) + np.exp(1) + 7)
    assert np.allclose([first.ours.ours, first.ours.theirs], [best, second])
    assert np.allclose([first.theirs.ours, first.theirs.theirs], [second, best])


def test_a_token_is_what_it_adds_to_the_text(demo: Path) -> None:
    """One that ends a text has a name, and so has a part of a character, until the last of them adds it."""
    tokenizer = Tokenizer.open(Directory(demo))
    ids = tokenizer.encode("Here is \N{SNOWMAN}<|end_of_text|>", special_tokens=False)
    pieces = [continuations.piece(tokenizer, ids[:at], token) for at, token in enumerate(ids)]
    snow = next(at for at, piece in enumerate(pieces) if piece.endswith("\N{SNOWMAN}"))
    assert pieces[-1] == "<|end_of_text|>" and snow == len(ids) - 2
    assert "".join(pieces[: snow - 2]).strip() == "Here is"
    assert all(piece and "\ufffd" not in piece for piece in pieces)


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What `verified` printed."""
    return []


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the text that ships."""
    text = tmp_path_factory.mktemp("verify") / "text"
    text.write_text(divergence.TEXT.read_text()[:3000])
    return text


@pytest.fixture(scope="module")
def verified(demo: Path, said: list[str], text: Path) -> Verification:
    """All that ships, on a part of the text."""

    def say(*lines: object) -> None:
        said.extend(line for each in lines for line in str(each).splitlines())

    return verification.verify(demo, DEMO, verify.shipped(full=True), full=True, text=text, say=say)


@pytest.fixture(scope="module")
def wrong(demo: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Verification:
    """Half of a layer's weights and all angles but the first are 0; prompts that nobody expects."""
    copy = shutil.copytree(demo, tmp_path_factory.mktemp("verify") / "cpu")
    (table,) = (spec for spec in Manifest.open(copy).buffers.values() if spec["kind"] == "table")
    for name, kept in (("weights/layer_001.safetensors", 0.5), (table["file"], 0.01)):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[: int(kept * len(content))].ljust(len(content), b"\0"))
    return verification.verify(copy, DEMO, HOSTILE, text=text)


@needs_transformers
@pytest.mark.verify
def test_the_demo_is_right(verified: Verification, demo: Path) -> None:
    assert verified.passed and verified.weights.bits == 16
    summary = verified.summary()
    assert json.loads((demo / VERIFIED).read_text()) == json.loads(json.dumps(summary))
    kinds = [result["kind"] for result in summary["results"]]
    assert kinds == ["quality", "rounding", "exactness", *["comparison"] * len(read_prompts(SHIPPED))]
    assert {len(comparison.pieces) for comparison in verified.comparisons} == {TOKENS}
    assert "".join(verified.comparisons[0].pieces).startswith(" Paris")


@needs_transformers
@pytest.mark.verify
def test_the_tutorial_quotes_verify(verified: Verification, said: list[str]) -> None:
    del verified
    assert missing("verify", said) == []


@needs_transformers
@pytest.mark.verify
def test_other_weights_are_wrong(wrong: Verification) -> None:
    assert not wrong.passed
    assert not any(check.passed for check in wrong.checks.values())
    assert {each.tensor.split(".")[2] for each in wrong.tensors if not each.passed} == {"1"}


# What junit-10.xsd of Jenkins' xUnit plugin allows: attributes, of which those with ! must be there, and children.
JUNIT = {
    "testsuites": ("name time tests failures errors", "testsuite"),
    "testsuite": (
        "name! tests! failures! errors! group time skipped timestamp hostname id package file log url version",
        "testsuite properties testcase system-out system-err",
    ),
    "properties": ("", "property"),
    "property": ("name! value!", ""),
    "testcase": ("name! time classname group", "skipped errors failure system-out system-err"),
    "failure": ("type message", ""),
    "system-out": ("", ""),
}


def check_junit(element: ElementTree.Element) -> None:
    attributes, children = (part.split() for part in JUNIT[element.tag])
    assert {name[:-1] for name in attributes if name.endswith("!")} <= set(element.attrib)
    assert set(element.attrib) <= {name.rstrip("!") for name in attributes}
    if "time" in element.attrib:
        assert element.get("time") == f"{float(element.attrib['time']):.3f}"
    for child in element:
        assert child.tag in children
        check_junit(child)


@needs_transformers
@pytest.mark.verify
@pytest.mark.parametrize("which", ["verified", "wrong"])
def test_ci_is_told(which: str, request: pytest.FixtureRequest) -> None:
    """A case per check, a failure for each that did not pass, and names with what XML cannot hold replaced."""
    found = request.getfixturevalue(which)
    root = ElementTree.fromstring(verify_report.junit("demo/cpu", found))
    assert root.tag == "testsuites"
    check_junit(root)
    (suite,) = root
    failed = [name for name, check in found.checks.items() if not check.passed]
    assert (suite.get("tests"), suite.get("failures")) == (str(len(found.checks)), str(len(failed)))
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [name.replace("\uffff", "\ufffd") for name in found.checks]
    assert [case.find("failure") is not None for case in cases] == [name in failed for name in found.checks]
    assert bool(failed) == (which == "wrong")
    waited = sum(float(case.attrib["time"]) for case in cases if case.get("name") != "weights")
    assert 0 < waited < float(suite.attrib["time"])


@needs_transformers
@pytest.mark.verify
def test_a_page_shows_what_differs(verified: Verification, wrong: Verification) -> None:
    """Whatever prompts and tokens hold is text; the first difference stands in its context."""
    page = verify_report.page("demo/cpu", wrong).html()
    assert "<script>alert" not in page and "&lt;script&gt;alert(" in page
    differing = wrong.comparisons[0]
    first = differing.differences[0]
    for side, choice in zip(verify_report.first_difference(differing), (first.ours, first.theirs), strict=True):
        assert side in page and side.endswith(f"{differing.prompt.text}<mark>{choice.text}</mark></p>")
    assert "It computes what transformers does" in verify_report.page("demo/cpu", verified).html()


@needs_transformers
@pytest.mark.verify
def test_the_page_in_a_browser(wrong: Verification, tmp_path: Path, look_at: Look) -> None:
    assert not look_at(verify_report.write(tmp_path, "demo/cpu", wrong))


@pytest.mark.thorough
@needs_transformers
@pytest.mark.verify
def test_prompts_of_ones_own(demo: Path, artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As doit runs it: the files lie where the output says, and JSON on the output is the file's."""
    (tmp_path / "text").write_text("The capital of France is Paris. " * 4)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "One,\u2028two,", "id": "count"}\n\n{"prompt": "Hot"}\n')
    given = {name: str(tmp_path / name) for name in ("text", "output")} | {"prompts": str(tmp_path / "prompts.jsonl")}
    assert verify.run(Build(parse_options({"artifacts": str(artifacts), **given}))) is None
    *_, last = capsys.readouterr().out.splitlines()
    assert Path(last) == tmp_path / "output/verify.html"
    said = json.loads((tmp_path / "output/verify.json").read_text())
    assert said["artifact"] == "demo/cpu" and said["passed"]
    prompts = [comparison["prompt"] for comparison in said["comparisons"]]
    assert prompts == [{"id": "count", "text": "One,\u2028two,"}, {"id": "3", "text": "Hot"}]
    assert {path.name for path in (tmp_path / "output").iterdir()} == {"verify.html", "verify.json", "verify.xml"}
