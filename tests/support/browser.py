"""Pages as people meet them, in headless Chromium, alone or with their server: wide, narrow, light, dark, by keyboard.

`look_at` says what is wrong with a page; the fixture of that name in `conftest.py` is what tests take. Where
`LLAMA_NPU2_SCREENSHOTS` names a directory, each look leaves four pictures there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

WIDTHS = {"wide": 1280, "narrow": 390}
"""In pixels: a laptop, a phone."""
THEMES = ("light", "dark")
PATIENCE = 180_000
"""Milliseconds that anything may take: machines that run tests do much else."""
Look = Callable[[Path], list[str]]
Opened = Callable[..., AbstractContextManager[Any]]


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser, of the machine. Skips the test where either is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install -e '.[test]'")
    pytest.importorskip("axe_playwright_python", reason="axe is missing: pip install -e '.[test]'")
    known = ("chromium", "chromium-browser", "google-chrome")
    executable = next(filter(None, map(shutil.which, known)), None)
    if executable is None:
        pytest.skip(f"no {', '.join(known)} on PATH")
    with playwright.sync_playwright() as started:
        # The sandbox of Chromium does not start for root, as which tests run in containers.
        browser = started.chromium.launch(executable_path=executable, args=["--no-sandbox"], timeout=PATIENCE)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Any, path: Path | str, faults: list[str], width: str = "wide", theme: str = "light"
) -> Iterator[Any]:
    """A page of Playwright's that shows a file, or what a server has at a URL.

    Errors are added to `faults`, and requests, failed or not: any request of a file, those to other servers of a URL.
    """
    viewport, alone = {"width": WIDTHS[width], "height": 800}, isinstance(path, Path)
    context = browser.new_context(offline=alone, viewport=viewport, color_scheme=theme)
    context.set_default_timeout(PATIENCE)
    page, address = context.new_page(), path.absolute().as_uri() if isinstance(path, Path) else path
    own = f"{address}#" if alone else "/".join([*address.split("/")[:3], ""])

    def requested(request: Any) -> None:
        if request.url != address and not request.url.startswith(("data:", own)):
            faults.append(f"asks for {request.url}")

    page.on("console", lambda said: faults.append(f"console: {said.text}") if said.type in _LOUD else None)
    page.on("pageerror", lambda error: faults.append(f"JavaScript: {error}"))
    page.on("request", requested)
    page.goto(address)
    yield page
    context.close()


_LOUD = ("error", "warning", "assert")


def look_at(browser: Any, path: Path) -> list[str]:
    """What is wrong with a page, in words; nothing for one that is as it should be."""
    faults: list[str] = []
    with opened(browser, path, faults) as page:
        faults += faults_of(page, path.stem)
    return faults


def faults_of(page: Any, name: str) -> list[str]:
    """What is wrong with a page as it is shown; `name` is that of its pictures."""
    faults = [f"no Tab reaches {each}" for each in _unreached(page)]
    for width, pixels in WIDTHS.items():
        page.set_viewport_size({"width": pixels, "height": 800})
        if directory := os.environ.get("LLAMA_NPU2_SCREENSHOTS"):
            _photograph(page, Path(directory, f"{name}-{width}"))
        faults += [f"{width}: {each}" for each in page.evaluate(_OVERFLOW)]
    page.set_viewport_size({"width": WIDTHS["wide"], "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    faults += _inaccessible(page)
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        faults += [f"{theme}: {each}" for each in page.evaluate(_CONTRAST)]
    return faults


def _photograph(page: Any, to: Path) -> None:
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        page.screenshot(path=f"{to}-{theme}.png", full_page=True)


def _unreached(page: Any) -> list[str]:
    """Controls that Tab does not come to, or that do not show it."""
    for _ in range(page.evaluate(_WATCH_FOCUS)):
        page.keyboard.press("Tab")
    missed: list[str] = page.evaluate("watched.filter((each) => !reached.has(each)).map((each) => each.outerHTML)")
    return [html[:120] for html in missed]


def _inaccessible(page: Any) -> Iterator[str]:
    """What breaks rules of WCAG 2.2 AA, but that of contrast: axe leaves out drawings, and takes minutes for tables."""
    from axe_playwright_python.sync_playwright import Axe

    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    rules = {"runOnly": {"type": "tag", "values": tags}, "rules": {"color-contrast": {"enabled": False}}}
    for found in Axe().run(page, options={**rules, "resultTypes": ["violations"]}).response["violations"]:
        places = [node["html"][:120] for node in found["nodes"]]
        yield f"{found['id']} in {len(places)} places: {found['help']}: {places[0]}"


_OVERFLOW = """(() => {
    const { scrollWidth, clientWidth } = document.documentElement;
    return scrollWidth > clientWidth ? [`the body is ${scrollWidth} wide in a window of ${clientWidth}`] : [];
})()"""

_WATCH_FOCUS = """(() => {
    const controls = 'a[href], button, summary, input, select, textarea, [tabindex="0"]';
    const top = document.querySelector('dialog[open]') ?? document;
    window.watched = [...top.querySelectorAll(controls)].filter((each) => each.checkVisibility());
    window.reached = new Set();
    addEventListener('focusin', ({ target }) => {
        const { outlineStyle, outlineWidth } = getComputedStyle(target);
        if (outlineStyle !== 'none' && parseFloat(outlineWidth) >= 2) reached.add(target);
    });
    return watched.length + 1;
})()"""

# Of all text that is shown, against what is painted below it: WCAG's 4.5, or 3 where it is large.
_CONTRAST = """(() => {
    const rgba = (text) => {
        const [red, green, blue, alpha = 1] = (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
        const most = text.startsWith('color(') ? 255 : 1;  // of mixed colours
        return { channels: [most * red, most * green, most * blue], alpha };
    };
    const over = (below, { channels, alpha }) => channels.map((each, at) => alpha * each + (1 - alpha) * below[at]);
    const luminance = (channels) => {
        const [red, green, blue] = channels.map((each) => each / 255)
            .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const styles = new Map();
    const style = (element) => styles.get(element) || styles.set(element, getComputedStyle(element)).get(element);
    const opacity = (element) => element ? style(element).opacity * opacity(element.parentElement) : 1;
    const ground = (element) => {
        if (!element) return [255, 255, 255];
        return over(ground(element.parentElement), rgba(style(element).backgroundColor));
    };
    const found = new Set();
    const compare = (text, colour, below) => {
        const [dark, bright] = [below, over(below, colour)].map(luminance).sort((a, b) => a - b);
        const ratio = (bright + 0.05) / (dark + 0.05);
        const { fontSize, fontWeight } = style(text);
        const large = parseFloat(fontSize) >= (fontWeight >= 700 ? 18.66 : 24);
        const said = text.textContent.trim();
        if (ratio < (large ? 3 : 4.5)) found.add(`contrast ${ratio.toFixed(2)} of "${said.slice(0, 40)}"`);
    };

    const shown = { visibilityProperty: true };
    const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    for (const text of document.querySelectorAll('body *:not(script, style, noscript, svg, svg *)')) {
        if (!own(text) || !text.checkVisibility(shown)) continue;
        const { channels, alpha } = rgba(style(text).color);
        compare(text, { channels, alpha: alpha * opacity(text) }, ground(text));
    }

    const paint = (shape) => {
        const { fill, fillOpacity } = style(shape);
        const { channels, alpha } = fill === 'none' ? { channels: [0, 0, 0], alpha: 0 } : rgba(fill);
        return { shape, channels, alpha: alpha * fillOpacity * opacity(shape), box: shape.getBoundingClientRect() };
    };
    const covers = ({ shape, box }, x, y) => {
        if (x < box.left || x > box.right || y < box.top || y > box.bottom) return false;
        return shape.isPointInFill(new DOMPoint(x, y).matrixTransform(shape.getScreenCTM().inverse()));
    };
    for (const drawing of document.querySelectorAll('svg:not(svg svg)')) {
        const shapes = [...drawing.querySelectorAll('rect, path, circle, ellipse, polygon')]
            .filter((each) => each.checkVisibility(shown)).map(paint).filter(({ alpha }) => alpha > 0);
        for (const text of drawing.querySelectorAll('text')) {
            const { left, top, width, height } = text.getBoundingClientRect();
            const colour = paint(text);
            if (!text.textContent.trim() || !width || !colour.alpha || !text.checkVisibility(shown)) continue;
            const [x, y] = [left + width / 2, top + height / 2];
            const before = (each) => each.shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING;
            const below = shapes.filter((each) => before(each) && covers(each, x, y)).reduce(over, ground(drawing));
            compare(text, colour, below);
        }
    }
    return [...found];
})()"""
