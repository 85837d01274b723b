"""Pages: what they escape, what they hold, what a browser says of one with every block."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from llama_npu2.cli.table import Column
from stages.graph import Build
from stages.graph.options import parse_options
from stages.reports.pages import Page, chart, colour, details, facts, note, preformatted, svg, table, tag
from stages.reports.pages.blocks import CHART
from tests import browser
from tests.conftest import ROOT

HOSTILE = "</script><script>alert(1)</script>\"' onload='x"

COLUMNS = Column("layer"), Column("ms", right=True)


def numbers() -> Markup:
    return table(COLUMNS, [("o_ffn", 0.25), (HOSTILE, 0.5)], "Milliseconds by layer")


def bars() -> Markup:
    trace: dict[str, Any] = {"type": "bar", "x": ["o_ffn", HOSTILE], "y": [0.25, 0.5], "name": HOSTILE}
    return chart([trace | {"marker": {"color": colour("series-2")}}], {"height": 320}, f"Bars {HOSTILE}", numbers())


def drawing() -> Markup:
    box = tag("rect", x=0, y=0, width=900, height=100, fill=colour("raised"), stroke=colour("series-1"))
    return svg(900, 100, f"A box {HOSTILE}", box, tag("text", HOSTILE, x=8, y=50), zoom=True)


@pytest.fixture
def page() -> Page:
    """Every block, with text that nobody should trust in each."""
    made = Page(HOSTILE, f"Lead {HOSTILE}")
    made.add("Facts", facts({"tokens/s": 12, HOSTILE: HOSTILE}), note("See ", tag("strong", HOSTILE)), numbers())
    made.add(HOSTILE, bars(), details("Closed", bars()))
    made.add("Drawing", drawing(), preformatted(HOSTILE, "A listing"))
    made.add("Drawing", table([Column(f"column {n}") for n in range(30)], [range(30)], "A wide table"))
    return made


def test_text_of_others_is_never_markup(page: Page) -> None:
    html = page.html()
    assert "alert(1)" in html and "<script>alert(1)" not in html
    assert not re.search(r"<[^>]* onload='x", html)


def test_texts_in_charts_are_no_links() -> None:
    """Plotly's own reading of texts as markup comes after the browser's."""
    drawn = chart([{"name": "<a href='//x'>", "text": Markup("<br>")}], {"title": ["<b>"]}, "x", numbers())
    shown = json.loads(drawn.partition(CHART)[2].partition("</script>")[0])
    assert shown["data"] == [{"name": "&lt;a href=&#39;//x&#39;&gt;", "text": "<br>"}]
    assert shown["layout"] == {"title": ["&lt;b&gt;"]}


def test_a_page_fetches_nothing_and_says_so(page: Page) -> None:
    html = page.html()
    assert "default-src 'none'" in html
    assert not re.findall(r"""<[^>]+\b(?:src|href)=["'](?!#|data:)[^>]*>""", html.partition("plotly.js v")[0])


def test_the_library_of_charts_comes_once_and_only_with_a_chart(page: Page) -> None:
    assert page.html().count("plotly.js v") == 1
    plain = Page("Plain")
    plain.add("Text", note(CHARTLIKE := str(CHART)), numbers())
    assert CHARTLIKE not in plain.html() and len(plain.html()) < 20_000


def test_sections_of_one_heading_have_names_of_their_own(page: Page) -> None:
    names = re.findall(r'<section id="([^"]+)"', page.html())
    assert len(names) == len(set(names)) == 4


def test_colours_are_variables_of_the_page(page: Page) -> None:
    """Each that drawings and charts use is there; so is no other colour."""
    style = (ROOT / "stages/reports/pages/page.css").read_text()
    known = set(re.findall(r"--([a-z0-9-]+): light-dark", style))
    assert {f"series-{n}" for n in range(1, 9)} | {"text", "muted", "surface", "raised", "rule"} <= known
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", page.html().partition("plotly.js v")[0])) <= known
    assert not re.findall(r"#[0-9a-f]{3,6}\b", re.sub(r"light-dark\([^)]*\)", "", style))


def test_reports_lie_beside_the_artifacts(tmp_path: Path) -> None:
    given = {"target": "cpu", "artifacts": f"{tmp_path}/artifacts", "weights": "int8"}
    assert Build(parse_options(given)).report("estimate") == tmp_path / "reports/demo/cpu-int8/estimate"
    assert Build(parse_options(given | {"output": "there"})).report("estimate") == Path("there")


# in a browser


def test_a_page_with_every_block(page: Page, tmp_path: Path, look_at: browser.Look) -> None:
    page.write(tmp_path / "every-block.html")
    assert look_at(tmp_path / "every-block.html") == []


FAULTS = {
    "JavaScript: ": "<script>undefined_name</script>",
    "console: ": "<script>console.error('x')</script>",
    "asks for http://127.0.0.1:9/": "<img src='http://127.0.0.1:9/x.png' alt='x'>",
    "no Tab reaches <button tabindex": "<button tabindex='-1'>x</button>",
    "no Tab reaches <button style": "<button style='outline: none'>x</button>",
    "narrow: the body is": "<div style='width: 500px'>x</div>",
    'light: contrast 2.85 of "too pale': "<p style='color: #999'>too pale</p>",
    'dark: contrast 1.42 of "too dark': "<p style='color: #333'>too dark</p>",
    "image-alt in 1": "<img src='data:,'>",
    'dark: contrast 2.96 of "on grey': "<svg><rect width='99' height='99' fill='#888'></rect><text y='9'>on grey</text>"
    "</svg>",
    "not drawn: x": "<div class='plot' role='img' aria-label='x'></div>",
}


def test_a_look_finds_what_is_wrong(tmp_path: Path, look_at: browser.Look) -> None:
    """All faults at once: each is named. The page forbids what it would fetch, so that this one allows it."""
    made = Page("Wrong")
    made.add("Faults", *map(Markup, FAULTS.values()))
    path = tmp_path / "wrong.html"
    path.write_text(made.html().replace("img-src data:", "img-src data: http:"))
    found = look_at(path)
    assert not [start for start in FAULTS if not any(each.startswith(start) for each in found)], found


def test_a_chosen_theme_is_remembered_and_charts_follow_it(page: Page, tmp_path: Path, opened: browser.Opened) -> None:
    page.write(tmp_path / "page.html")
    fills = []
    with opened(tmp_path / "page.html") as shown:
        for _ in range(2):
            fills.append(shown.evaluate("getComputedStyle(document.querySelector('.plot .point path')).fill"))
            shown.get_by_role("button", name="colours").click()
        shown.click("text=Dark colours")
        shown.reload()
        assert shown.get_by_role("button", name="Light colours").is_visible()
    assert len(set(fills)) == 2


def test_what_is_printed_is_light_and_open_and_the_page_stays_as_it_was(
    page: Page, tmp_path: Path, opened: browser.Opened
) -> None:
    page.write(tmp_path / "page.html")
    with opened(tmp_path / "page.html", theme="dark") as shown:
        state = "[document.documentElement.dataset.theme, document.querySelectorAll('details[open]').length]"
        shown.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = {state}; }})")
        before = shown.evaluate(state)
        shown.pdf()
        assert shown.evaluate("printed") == ["light", shown.evaluate("document.querySelectorAll('details').length")]
        assert shown.evaluate(state) == before == [None, 0]


def test_zoom(page: Page, tmp_path: Path, opened: browser.Opened) -> None:
    page.write(tmp_path / "page.html")
    with opened(tmp_path / "page.html") as shown:
        widths = []
        for name in ("Zoom in", "Zoom in", "Zoom out", "Zoom to fit"):
            shown.get_by_role("button", name=name).press("Enter")
            widths.append(round(shown.locator(".zoom svg").bounding_box()["width"]))
    assert widths == [1125, 1406, 1125, 900]
