"""Pages: what they escape, what they hold, what a browser says of one with every block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markupsafe import Markup

from stages.graph import Build
from stages.graph.options import parse_options
from stages.reports.pages import (
    Axis,
    Curve,
    Dot,
    Page,
    Series,
    Span,
    bars,
    colour,
    columns,
    details,
    facts,
    lines,
    note,
    svg,
    table,
    tag,
    time_line,
)
from stages.reports.pages.blocks import scrolling
from tests.conftest import ROOT
from tests.support import browser

HOSTILE = "</script><script>alert(1)</script>\"' onload='x"


def numbers() -> Markup:
    return table(("layer", ">ms"), [("o_ffn", 0.25), (HOSTILE, 0.5)], "Milliseconds by layer")


def chart() -> Markup:
    series = [Series(HOSTILE, "series-2", [0.25, 0.5])]
    return bars(["o_ffn", HOSTILE], series, "ms", f"Bars {HOSTILE}", numbers())


def charts() -> list[Markup]:
    series = [Series(HOSTILE, "series-2", [0.25, 0.5]), Series("b", "series-3", [0.25, 0.5])]
    axis = Axis.of(HOSTILE, [0.25, 0.5])
    dots = [Dot("series-4", 0.3, 0.4, 20, HOSTILE), Dot("series-5", 0.4, 0.4, 20, HOSTILE, diamond=True)]
    curve = Curve(HOSTILE, "series-1", [(0.25, 0.25), (0.5, 0.5)], dashed=True, marked=True)
    return [
        *(
            columns(["o_ffn", HOSTILE], series, "", axis, HOSTILE, numbers(), stacked=stacked)
            for stacked in (True, False)
        ),
        lines([curve], axis, axis, HOSTILE, numbers(), dots),
        time_line(
            ["host", HOSTILE], [Span("host", "host", 0, 1, HOSTILE), Span(HOSTILE, "muted", 1, 1, "")], 2, HOSTILE
        ),
    ]


def drawing() -> Markup:
    box = tag("rect", x=0, y=0, width=900, height=100, fill=colour("raised"), stroke=colour("series-1"))
    return svg(900, 100, f"A box {HOSTILE}", box, tag("text", HOSTILE, x=8, y=50), zoom=True)


@pytest.fixture
def page() -> Page:
    """Every block, with text that nobody should trust in each."""
    made = Page(HOSTILE, f"Lead {HOSTILE}")
    made.add("Facts", facts({"tokens/s": 12, HOSTILE: HOSTILE}), note("See ", tag("strong", HOSTILE)), numbers())
    made.add(HOSTILE, chart(), details("Closed", chart()), *charts())
    made.add("Drawing", drawing(), scrolling(tag("pre", HOSTILE), "A listing"))
    made.add("Drawing", table([f"column {n}" for n in range(30)], [range(30)], "A wide table"))
    return made


def test_text_of_others_is_never_markup(page: Page) -> None:
    html = page.html()
    assert "alert(1)" in html and "<script>alert(1)" not in html
    assert not re.search(r"<[^>]* onload='x", html)


def test_axes() -> None:
    """Figures of axes are round, and a logarithmic one goes from power to power of ten."""
    assert Axis.of("ms", [0.2, 0.37]).ticks() == pytest.approx([0, 0.1, 0.2, 0.3])
    axis = Axis.of("ms", [0.2, 37], log=True)
    assert axis.ticks() == [0.1, 1, 10, 100] and axis.place(0) == 0
    assert [axis.place(value) for value in axis.ticks()] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert Axis.of("ms", []).ticks() and Axis.of("ms", [0], log=True).ticks()


def test_bars_are_as_long_as_their_values() -> None:
    drawn = bars(
        ["a", "b"], [Series("x", "series-1", [1, 3]), Series("y", "series-2", [1, 0])], "ms", "Bars", numbers()
    )
    assert re.findall(r'x="([^"]*)%" width="([^"]*)%"', drawn) == [
        ("0.000", "33.333"),
        ("33.333", "33.333"),
        ("0.000", "100.000"),
        ("100.000", "0.000"),
    ]


def test_a_page_fetches_nothing_and_says_so(page: Page) -> None:
    html = page.html()
    assert "default-src 'none'" in html
    assert not re.findall(r"""<[^>]+\b(?:src|href)=["'](?!#|data:)[^>]*>""", html)


def test_a_page_is_small(page: Page) -> None:
    assert len(page.html()) < 60_000


def test_sections_of_one_heading_have_names_of_their_own(page: Page) -> None:
    names = re.findall(r'<section id="([^"]+)"', page.html())
    assert len(names) == len(set(names)) == 4


def test_colours_are_variables_of_the_page(page: Page) -> None:
    """Each that drawings and charts use is there; so is no other colour."""
    own, shared = ROOT / "stages/reports/pages", ROOT / "runtime/llama_npu2/serve/page"
    style = (own / "page.css").read_text() + (shared / "look.css").read_text()
    known = set(re.findall(r"--([a-z0-9-]+): light-dark", style))
    assert {f"series-{n}" for n in range(1, 9)} | {"text", "muted", "surface", "raised", "rule"} <= known
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", page.html())) <= known
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
            fills.append(shown.evaluate("getComputedStyle(document.querySelector('.plot rect')).fill"))
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
            shown.get_by_role("button", name=name).last.press("Enter")
            widths.append(round(shown.locator(".zoom svg").last.bounding_box()["width"]))
    assert widths == [1125, 1406, 1125, 900]


def test_time_lines_stretch_and_text_keeps_its_size(page: Page, tmp_path: Path, opened: browser.Opened) -> None:
    page.write(tmp_path / "page.html")
    with opened(tmp_path / "page.html", width="narrow") as shown:
        line = shown.locator(".zoom svg").first

        def sizes() -> tuple[float, float]:
            return line.bounding_box()["width"], line.locator("text").first.bounding_box()["height"]

        (fitted, letters), frame = sizes(), line.locator("..").bounding_box()["width"]
        assert fitted == frame
        shown.get_by_role("button", name="Zoom in").first.click()
        assert sizes() == (pytest.approx(1.25 * fitted), letters)
        shown.get_by_role("button", name="Zoom to fit").first.click()
        assert sizes() == (fitted, letters)


@pytest.mark.parametrize("value", [10.0, 30.0])
def test_an_axis_in_powers_of_ten_has_room_for_a_value_alone(value: float) -> None:
    axis = Axis.of("tokens", [value], log=True)
    assert axis.low <= value < axis.high and 0 <= axis.place(value) < 1
