"""`doit why` names the thing itself, whatever changed, and the steps that only wait for others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_npu2.errors import UserError
from stages.commands import why
from stages.engine.changes import differences
from stages.engine.definitions import definitions
from stages.engine.steps import Step
from stages.engine.why import BEHIND, CURRENT, MISSING, STALE, examine
from stages.graph import Build
from stages.graph.options import parse_options


@pytest.fixture(scope="module")
def compiled(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The demo's artifacts, each change of which is undone."""
    artifacts = tmp_path_factory.mktemp("why")
    shutil.copytree(demo, artifacts / "demo/cpu")
    return Build(parse_options({"artifacts": str(artifacts), "target": "cpu"}))


def states(build: Build) -> dict[str, str]:
    return {name: finding.state for name, finding in examine(build.steps).items()}


def recorded(build: Build, part: str) -> Iterator[tuple[str, str]]:
    """Steps and the labels of their inputs or outputs."""
    for name, step in build.steps.items():
        receipt = step.receipt()
        assert receipt
        yield from ((name, label) for label in receipt[part])


def sentences(step: Step) -> list[str]:
    return examine({step.name: step})[step.name].sentences


def test_nothing_is_said_of_what_is_current(compiled: Build) -> None:
    assert set(states(compiled).values()) == {CURRENT}


def test_each_output_that_is_deleted_truncated_or_flipped(compiled: Build) -> None:
    for name, label in [*recorded(compiled, "outputs")][::3]:
        path = compiled.directory / label
        content = path.read_bytes()
        size, middle = len(content), len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        cases = {
            "is missing": None,
            f"was truncated from {size} to {middle} bytes": content[:middle],
            f"was extended from {size} to {size + 1} bytes": content + b" ",
            f"was altered: it has its {size} bytes, not all as they were": flipped,
        }
        for text, damaged in cases.items():
            path.unlink() if damaged is None else path.write_bytes(damaged)
            assert sentences(compiled.steps[name]) == [f"output {label} {text}"]
        others = [finding for step, finding in examine(compiled.steps).items() if step != name]
        assert {finding.state for finding in others} <= {CURRENT, BEHIND}
        assert all(finding.behind == [name] for finding in others if finding.state == BEHIND)
        path.write_bytes(content)
    assert set(states(compiled).values()) == {CURRENT}


def test_each_input_and_header(compiled: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """That no step makes: those are outputs of others. A file reads as another one, or as none."""
    digests, headers = compiled.project.digests, set()
    of, made = digests.of_file, {label for _, label in recorded(compiled, "outputs")}
    cases = {(name, label) for name, label in recorded(compiled, "inputs") if label not in made | {"tokenizer"}}
    for name, label in cases:
        step = compiled.steps[name]
        for digest, text in (("other", "changed"), (None, "is missing")):
            path = step.located(label)
            monkeypatch.setattr(digests, "of_file", lambda p, of=of, at=path, to=digest: to if p == at else of(p))
            noun = "header" if label.endswith(".h") else "input"
            assert sentences(step) == [f"{noun} {label} {text}"]
            headers |= {label} if noun == "header" else set()
    assert "kernel_src/cpu/kernel.h" in headers and "models/demo/model.safetensors" in {label for _, label in cases}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every parameter and where it is, with all of it but that one changed."""
    if isinstance(value, dict):
        for key, each in value.items():
            for where, changed in leaves(each, f"{path}.{key}" if path else key):
                yield where, {**value, key: changed}
    else:
        yield path, "another"


def test_each_parameter(compiled: Build) -> None:
    seen = set()
    for step in compiled.steps.values():
        for path, changed in leaves(json.loads(json.dumps(step.params))) if step.params else ():
            lines = sentences(replace(step, params=changed))
            assert len(lines) == 1 and lines[0].startswith(f"parameter {path}: ") and lines[0].endswith(' -> "another"')
            seen.add(path)
    assert {"weights", "kv", "buckets", "target.name", "programs.o_ffn.file", "calibrated"} <= seen


def test_each_tool(compiled: Build) -> None:
    users = [step for step in compiled.steps.values() if step.tool and step.tool()]
    assert {step.name.partition(":")[0] for step in users} == {"object", "elf"}
    for step in users:
        assert step.tool
        now = replace(step, tool=lambda: "c++ 99")
        assert sentences(now) == [f'its tool: {json.dumps(step.tool())} -> "c++ 99"']


def test_a_parameter_that_comes_and_one_that_goes() -> None:
    was, now = {"a": [1, 2], "b": {"c": 1, "d": 2}}, {"a": [1, 2, 3], "b": {"c": 1}, "e": None}
    assert [(path, type(old), type(new)) for path, old, new in differences(was, now)] == [
        ("a", list, list),
        ("b.d", int, object),
        ("e", object, type(None)),
    ]


SOURCE = b'''"""A module."""

import os

LIMIT = 1
"""Of something."""


def first(a):
    return a


class Thing:
    size: int = 2

    @property
    def area(self):
        return 1
'''


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        (b"return a", b"return -a", {"first"}),
        (b"return a", b"return a  # comment", {"first"}),
        (b"LIMIT = 1", b"LIMIT = 2", {"LIMIT"}),
        (b"Of something", b"Of nothing", {"LIMIT"}),
        (b"int = 2", b"int = 3", {"Thing.size"}),
        (b"@property", b"@cached_property", {"Thing.area"}),
        (b"class Thing:", b"class Thing(Base):", {"Thing"}),
        (b"import os", b"import sys", {""}),
        (b"def first", b"def other", {"first", "other"}),
        (b"import os\n", b"import os\n\n\n", set()),
    ],
)
def test_definitions_tell_changes_apart(before: bytes, after: bytes, changed: set[str]) -> None:
    assert SOURCE.count(before) == 1
    assert {name for name, _ in definitions(SOURCE).items() ^ definitions(SOURCE.replace(before, after)).items()} == (
        changed
    )


def test_each_flipped_bit_of_a_receipt(compiled: Build) -> None:
    step = compiled.steps["elf:o_ffn"]
    content = step.receipt_path.read_bytes()
    step.receipt_path.write_bytes(content[:100])
    assert sentences(step) == ["receipt build/receipts/elf-o_ffn.json is damaged"]
    for place in range(len(content)):
        step.receipt_path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert sentences(step) == ["receipt build/receipts/elf-o_ffn.json is damaged"]
    step.receipt_path.unlink()
    assert sentences(step) == ["not built yet"]
    assert states(compiled)["elf:o_ffn"] == MISSING and states(compiled)["manifest"] == BEHIND
    step.receipt_path.write_bytes(content)


def test_who_may_run_behind_whom(
    compiled: Build, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(compiled.steps, "plan", replace(compiled.steps["plan"], params={"context": 1}))
    found = examine(compiled.steps)
    assert found["plan"].state == STALE
    assert {name for name, finding in found.items() if finding.state == BEHIND} == {"weights", "manifest"}
    assert all(finding.behind == ["plan"] for finding in found.values() if finding.state == BEHIND)
    why.run(compiled, "plan")
    said = capsys.readouterr().out
    assert said.startswith("plan is stale.") and "  may change what weights, manifest read\n" in said
    with pytest.raises(UserError, match=r"no step elf:offn: did you mean elf:o_ffn\?"):
        why.run(compiled, "elf:offn")
