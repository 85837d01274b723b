"""`doit fleet`: what a catalogue stands for, what is done of it, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doit.exceptions import TaskFailed

from llama_npu2.errors import UserError
from stages.commands import fleet
from stages.graph import Build
from stages.graph.options import parse_options
from stages.reports import fleet_page
from tests.support import browser

CATALOGUE = """
[[build]]
model = "demo"
target = "cpu"

[[build]]
model = ["nowhere", "neither"]
target = "cpu"
weights = ["int4", "int8"]
"""


def written(directory: Path, content: str) -> Path:
    path = directory / "catalogue.toml"
    path.write_text(content)
    return path


def test_a_table_stands_for_every_combination(tmp_path: Path) -> None:
    entries = fleet.read_catalogue(written(tmp_path, CATALOGUE), {"artifacts": "a"})
    assert [(entry["model"], entry.get("weights")) for entry in entries] == [
        ("demo", None),
        *((model, weights) for model in ("nowhere", "neither") for weights in ("int4", "int8")),
    ]
    assert all(entry["artifacts"] == "a" for entry in entries)
    assert len(fleet.read_catalogue(written(tmp_path, CATALOGUE + CATALOGUE), {})) == 5, "each once"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[[build]", "cannot be read"),
        ("", "it is no list of"),
        ("models = 1", "models is no list of"),
        ("build = 1", "it is no list of"),
        ('[[build]]\nmodle = "demo"', "modle= is not a variable"),
        ('[[build]]\ntarget = ["cpu", "gpu"]', "gpu"),
        ('[[build]]\nprompt = "x"', "prompt= is for doit"),
    ],
)
def test_a_catalogue_that_says_something_else_is_refused(content: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        fleet.read_catalogue(written(tmp_path, content), {})


def test_an_entry_that_fails_stops_no_other(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet, "find_spec", lambda name: None)  # without transformers nothing is verified
    ran: list[str] = []
    really = fleet._doit
    monkeypatch.setattr(fleet, "_doit", lambda command, *more: (ran.append(command), really(command, *more))[1])
    catalogue = written(tmp_path, CATALOGUE.replace('["nowhere", "neither"]', '"nowhere"').replace(', "int8"', ""))
    given = {"artifacts": str(demo.parents[1]), "output": str(tmp_path / "out"), "remote": f"{tmp_path}/store"}
    for again in (False, True):
        failed = fleet.run(Build(parse_options(given, ["fleet"])), str(catalogue))
        assert isinstance(failed, TaskFailed)
        assert failed.message.startswith("1 of 2 entries are not done: model=nowhere target=cpu weights=int4: ")
        assert ran == (["compile"] if again else ["compile", "push"]), "what is built and pushed stays as it is"
        ran.clear()
    good, bad = json.loads((tmp_path / "out/catalogue.json").read_text())
    assert good["artifact"] == "demo/cpu" and good["pushed"] == given["remote"] and good["bytes"] > 1e6
    assert bad["why"].startswith("no such directory"), "its name is said once"
    assert good["signer"] and bad["manifest"] is None
    page = (tmp_path / "out/catalogue.html").read_text()
    assert "1 of 2 entries are not done" in page and "demo/cpu" in page and "model=nowhere" in page
    assert "1 of 2 entries are done" in capsys.readouterr().out


def test_the_page_can_be_read(look_at: browser.Look, tmp_path: Path) -> None:
    nothing = {"artifact": "model=nowhere", **dict.fromkeys(fleet._FIELDS), "why": "there is no such model"}
    figures = {"bytes": 2_000_000_000, "seconds": 3000.0, "verified": True, "divergence": 0.0123, "perplexity": 12.5}
    times = {"measured": {"ttft": 0.05, "tpot": 0.01}, "pushed": "s3://bucket/path", "signer": "you", "manifest": "0"}
    rows = [nothing | figures | times | {"artifact": "demo/npu2", "why": ""}, nothing]
    fleet_page.page("catalogue.toml", rows).write(tmp_path / "fleet.html")
    assert look_at(tmp_path / "fleet.html") == []


def test_doit_fleet_takes_one_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes one catalogue"):
        fleet.run(Build(parse_options({"artifacts": str(tmp_path)}, ["fleet"])))
