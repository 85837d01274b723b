"""`doit graph`: how a graph is laid out, what the page and the JSON say of each step, and how one walks through it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from stages.commands import graph as command
from stages.commands.graph import survey
from stages.engine.why import BEHIND, CURRENT, MISSING, STALE
from stages.graph import Build
from stages.graph.options import parse_options
from stages.reports.graph_page import Entry, page
from stages.reports.pages.graph import JOINT, Graph, joined, layout, reduced
from stages.targets.cpu.instruction_sets import objects_of
from tests.support.browser import Look, Opened


def random_graph(seed: int, nodes: int = 40) -> dict[str, list[str]]:
    generator = random.Random(seed)
    names = [f"n{number}" for number in range(nodes)]
    count = {name: min(number, generator.randrange(4)) for number, name in enumerate(names)}
    return {name: generator.sample(names[:number], count[name]) for number, name in enumerate(names)}


def earlier(graph: Graph) -> dict[str, set[str]]:
    """All that leads to each node, joints left out."""
    found: dict[str, set[str]] = {}
    for node, before in graph.items():
        found[node] = set(before).union(*(found[each] for each in before))
    return {node: {each for each in all_ if each[0] != JOINT} for node, all_ in found.items() if node[0] != JOINT}


@pytest.mark.parametrize("seed", range(5))
def test_only_what_follows_from_the_rest_is_left_out(seed: int) -> None:
    graph = random_graph(seed)
    less = reduced(graph)
    assert earlier(less) == earlier(graph) == earlier(joined(less))
    for node, before in less.items():
        for each in before:
            assert earlier({**less, node: [other for other in before if other != each]})[node] != earlier(graph)[node]


def test_lines_run_together_where_they_lead_to_the_same() -> None:
    modules = [f"module:{number}" for number in range(5)]
    graph = {**dict.fromkeys(modules, ()), **{f"object:{number}": modules for number in range(7)}}
    lines = joined(graph)
    assert sum(map(len, lines.values())) == 5 + 7 and earlier(lines) == earlier(graph)


@pytest.mark.parametrize("seed", range(5))
def test_nodes_have_room_and_lines_lead_to_the_right(seed: int) -> None:
    graph = joined(reduced(random_graph(seed)))
    placed = layout(graph)
    assert placed.keys() == graph.keys() and layout(graph) == placed
    for (x, y), (other_x, other_y) in combinations(placed.values(), 2):
        assert x != other_x or abs(y - other_y) > 0.999
    assert all(placed[each][0] < placed[node][0] for node, before in graph.items() for each in before)
    assert min(placed.values())[0] == 0 <= min(y for _, y in placed.values())


def test_a_long_chain_goes_down_and_tall_columns_are_split() -> None:
    chain = [f"layer_{number:02d}" for number in range(64)]
    graph = {"first": [], **{node: [before] for before, node in pairwise(["first", *chain])}, "last": [chain[-1]]}
    placed = layout(graph)
    assert {column for column, _ in placed.values()} == set(range(5))
    below = [placed[node][1] - placed[before][1] == 1 for before, node in pairwise(graph)]
    assert below.count(False) == 4, "each is below the one before it, or begins a column"


def test_every_step_is_there(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = Build(parse_options({"artifacts": str(demo.parents[1]), "target": "cpu", "output": str(tmp_path)}))
    command.run(build)
    assert capsys.readouterr().out == f"{tmp_path / 'graph.html'}\n"
    steps = {step["step"]: step for step in json.loads((tmp_path / "graph.json").read_text())["steps"]}
    assert steps.keys() == build.steps.keys()
    linked = steps["elf:o_ffn"]
    objects = [f"object:{name}" for stem in ("gemm", "rms_norm") for name in objects_of(stem)]
    assert linked["reads"] == ["module:o_ffn", *sorted(objects)]
    assert linked["read_by"] == ["manifest"] and linked["depend"] == 1
    assert linked["nbytes"] == (demo / "elf/o_ffn.so").stat().st_size and linked["seconds"] > 0
    assert (linked["state"], linked["why"]) == (CURRENT, [])
    assert steps["object:cpu/gemm.portable"]["depend"] == len(steps["object:cpu/gemm.portable"]["read_by"]) + 1
    command.run(Build(replace(build.options, json=True)))
    assert json.loads(capsys.readouterr().out)["artifact"] == "demo/cpu"
    html = (tmp_path / "graph.html").read_text()
    assert "Every step is current" in html and html.count("data-node=") == len(steps)


@pytest.fixture
def shown(demo: Path, tmp_path: Path) -> Path:
    """A page with steps in every state."""
    build = Build(parse_options({"artifacts": str(demo.parents[1]), "target": "cpu"}))
    state = {"plan": STALE, "elf:o_ffn": MISSING, "weights": BEHIND, "manifest": BEHIND}

    def changed(entry: Entry) -> Entry:
        why = ["parameter context: 0 -> 512"] if entry.step == "plan" else []
        return replace(entry, state=state.get(entry.step, entry.state), why=why)

    page("demo/cpu", [changed(entry) for entry in survey(build)]).write(tmp_path / "graph.html")
    return tmp_path / "graph.html"


def test_the_page_in_a_browser(shown: Path, look_at: Look) -> None:
    assert look_at(shown) == []


def test_walking_through_it(shown: Path, opened: Opened) -> None:
    with opened(shown) as page:
        page.locator("[data-node='plan'] .box").click()
        assert page.locator(".chosen h3").inner_text() == "plan"
        assert "parameter context: 0 -> 512" in page.locator(".chosen").inner_text()

        def among(kind: str) -> set[str]:
            found = page.locator(f".node.{kind}").evaluate_all("nodes => nodes.map((each) => each.dataset.node)")
            return set(found)

        assert (among("picked"), among("earlier"), among("later")) == (
            {"plan"},
            {"checkpoint"},
            {"weights", "manifest"},
        )
        page.locator("[data-node='plan']").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator(".chosen h3").inner_text() == "weights"
        assert page.evaluate("document.activeElement.dataset.node") == "weights"
        page.keyboard.press("ArrowLeft")
        assert among("picked") == {"plan"}

        def width() -> float:
            return float(page.locator(".graph svg").bounding_box()["width"])

        fitted = width()
        frame = page.locator(".graph .scroll").first.bounding_box()
        assert fitted <= frame["width"], "it opens as large as fits"
        page.keyboard.press("+")
        assert width() == pytest.approx(1.25 * fitted, rel=1e-3)
        page.keyboard.down("Control")
        page.mouse.wheel(0, 200)
        page.keyboard.up("Control")
        page.wait_for_function(f"document.querySelector('.graph svg').clientWidth < {fitted}")
        page.get_by_label("Zoom to fit").click()
        assert width() == pytest.approx(fitted, rel=1e-3) and page.locator("table").count() == 1
