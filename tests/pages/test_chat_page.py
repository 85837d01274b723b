"""The page at `/` of the server: conversations as the API has them, in a browser, whatever the model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support import browser
from tests.support.serving import Server, serving

CHAT = "/v1/chat/completions"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FIRST, SECOND = "The capital of France is", "The capital of Spain is"
ON_AND_ON = {"logit_bias": {"2039": -100, "2047": -100}}
"""Makes replies that end by their length alone."""


@pytest.fixture(scope="module")
def server(demo: Path) -> Iterator[Server]:
    with serving(demo) as running:
        yield running


# Without a browser


def test_its_files_need_no_key_and_are_asked_for_anew(strict: Server) -> None:
    page = strict.ask("/", **BROWSER)
    assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    names = [path.name for path in (ROOT / "runtime/llama_npu2/serve/page").iterdir() if path.suffix in (".js", ".css")]
    kinds = {".js": "text/javascript", ".css": "text/css"}
    for path in ("/", "/page/icon.svg", *(f"/page/{name}" for name in names)):
        found = strict.ask(path, **BROWSER)
        assert found.status == 200 and found.headers["cache-control"] == "no-cache"
        assert found.headers["content-security-policy"] == page.headers["content-security-policy"]
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["content-type"].startswith(kinds.get(Path(path).suffix, ""))
        head = strict.ask(path, method="HEAD", **BROWSER)
        assert (head.status, head.content) == (200, b"") and head.headers["content-length"] == str(len(found.content))
        tag = found.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = strict.ask(path, If_None_Match=known, **BROWSER)
            assert (again.status, again.content) == (304, b"") and again.headers["etag"] == tag
        assert strict.ask(path, If_None_Match='"other"', **BROWSER).status == 200
    for path in ("/page", "/page/", "/page/__init__.py", "/page/../gate.py", "/index.html"):
        assert strict.ask(path).status == 401
    assert strict.ask("/", {}, **BROWSER).status == 405
    assert strict.ask("/", Host="evil.example").status == 403
    assert strict.ask("/").content == strict.ask("/", Accept="*/*").content == b"Ollama is running"


def test_nothing_but_its_own_server_is_allowed(server: Server) -> None:
    policy = server.ask("/", **BROWSER).headers["content-security-policy"]
    rules = dict(each.strip().partition(" ")[::2] for each in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    allowed = {value for name, value in rules.items() if name.endswith("-src") and name != "default-src"}
    assert allowed == {"'self'"} and rules["require-trusted-types-for"] == "'script'"
    html = server.ask("/", **BROWSER).content.decode()
    assert not re.search(r"<style|style=|<script>|\son\w+=|https?://", html)


# In a browser

Talk = Callable[..., AbstractContextManager[Any]]


@pytest.fixture
def talk(chromium: Any, server: Server) -> Iterator[Talk]:
    """The page in a browser that knows nothing of it, with the most likely tokens; a fault of it fails the test."""
    faults: list[str] = []

    @contextmanager
    def open_page(path: str = "/", **how: str) -> Iterator[Any]:
        with browser.opened(chromium, server.url + path, faults, **how) as page:
            choose(page, Temperature="0")
            yield page

    yield open_page
    assert not faults


def choose(page: Any, **settings: str) -> None:
    page.get_by_role("button", name="Settings").click()
    for name, value in settings.items():
        page.get_by_label(name.replace("_", " ")).fill(value)
    page.get_by_role("button", name="Done").click()


def send(page: Any, text: str, replies: int) -> str:
    """Send a message; return the reply, once it is the last of so many."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    return complete(page, replies)


def complete(page: Any, replies: int) -> str:
    page.wait_for_selector(f":nth-match(.reply, {replies}):not(.running)")
    assert page.locator(".reply").count() == replies
    return str(page.locator(".reply > .text").last.inner_text())


def asked_by(page: Any) -> list[dict[str, Any]]:
    """The bodies of the requests for replies, as they are sent."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    return bodies


def answer(page: Any, *chunks: Mapping[str, Any] | str, status: int = 200) -> None:
    """Have each request for a reply answered by these deltas, errors, or lines as they are."""

    def line(chunk: Mapping[str, Any] | str) -> str:
        if isinstance(chunk, str):
            return chunk
        content = chunk if "error" in chunk else {"choices": [{"index": 0, "delta": chunk, "finish_reason": None}]}
        return f"data: {json.dumps(content)}\n\n"

    body = "".join(map(line, chunks))
    page.route(f"**{CHAT}", lambda route: route.fulfill(status=status, body=body, content_type="text/event-stream"))


def go_on(page: Any) -> None:
    """Have replies end by their length alone."""

    def changed(route: Any) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | ON_AND_ON))

    page.route(f"**{CHAT}", changed)


END = 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


def test_a_conversation_is_what_the_api_says(talk: Talk, server: Server) -> None:
    def said(*messages: str) -> Any:
        roles = ("user", "assistant") * len(messages)
        asked = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
        return server.ask(CHAT, {"model": "demo", "temperature": 0, "messages": asked}).json

    with talk() as page:
        bodies = asked_by(page)
        assert page.get_by_label("Model").input_value() == "demo"
        first = said(FIRST)["choices"][0]["message"]["content"]
        assert send(page, FIRST, 1) == first.strip()
        second = said(FIRST, first, SECOND)
        assert send(page, SECOND, 2) == second["choices"][0]["message"]["content"].strip()
        figures = page.locator(".reply .figures").last.inner_text()
        prompt, cached = map(int, re.findall(r"prompt of (\d+), (\d+) cached", figures)[0])
        assert prompt == second["usage"]["prompt_tokens"] and cached > len(FIRST.split())
        assert figures.startswith(f"{second['usage']['completion_tokens']} tokens \u00b7")
        story = send(page, "Tell me a story.", 3)
        assert len(story) > 100 and re.search(
            r"\d tokens/s \u00b7 first after", page.locator(".figures").last.inner_text()
        )
        choose(page, System_prompt="Be brief.", Max_tokens="2", Seed="7", Top_p="0.5")
        send(page, SECOND, 4)
        assert "Cut off" in page.locator(".ended").last.inner_text()
    assert bodies[0] == {
        "model": "demo",
        "messages": [{"role": "user", "content": FIRST}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": first}
    assert bodies[3].items() >= {"max_completion_tokens": 2, "seed": 7, "top_p": 0.5}.items()
    assert bodies[3]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_reply_that_is_stopped_ends_there_and_stays(talk: Talk, server: Server) -> None:
    before = len(server.lines)
    with talk() as page:
        go_on(page)
        for end in (lambda: page.keyboard.press("Escape"), lambda: page.get_by_role("button", name="Stop").click()):
            page.get_by_label("Message", exact=True).fill("Once upon a time")
            page.keyboard.press("Enter")
            page.locator(".running .text", has_text=re.compile(".{20}")).wait_for()
            assert page.get_by_role("button", name="Send").is_hidden()
            end()
            page.locator(".reply:not(.running) .ended").last.wait_for()
            assert page.locator(".ended").last.inner_text() == "Stopped."
            text = page.locator(".reply > .text").last.inner_text()
            assert len(text) > 20 and page.locator(".figures").last.inner_text().startswith("about ")
            assert page.get_by_label("Message", exact=True).evaluate("(each) => each === document.activeElement")
            page.wait_for_timeout(300)
            assert page.locator(".reply > .text").last.inner_text() == text
            assert b'llama_npu2_replies_under_way{model="demo"} 0' in server.ask("/metrics").content
    gone = [line for line in server.lines[before:] if f"POST {CHAT} 499," in line]
    assert len(gone) == 2 and all(int(line.split()[-2]) < 1900 for line in gone)


def test_a_message_is_changed_and_what_follows_is_dropped(talk: Talk) -> None:
    with talk() as page:
        bodies = asked_by(page)
        first = send(page, SECOND, 1)
        send(page, "Thank you.", 2)
        page.get_by_role("button", name="Edit message").first.click()
        assert page.evaluate("document.activeElement.value") == SECOND
        page.keyboard.press("Escape")
        assert page.locator(".said").first.inner_text() == SECOND and page.locator(".reply").count() == 2
        page.keyboard.press("Enter")  # Edit has the focus again
        page.keyboard.press("ControlOrMeta+a")
        page.keyboard.type(FIRST)
        page.keyboard.press("Enter")
        assert complete(page, 1) == "Paris." != first
        assert page.get_by_role("heading", level=1).inner_text() == FIRST
        page.get_by_role("button", name="Ask again").click()
        assert complete(page, 1) == "Paris."
    assert [body["messages"] for body in bodies[2:]] == 2 * [[{"role": "user", "content": FIRST}]]


def test_conversations_are_kept_until_they_are_deleted(talk: Talk) -> None:
    with talk() as page:
        send(page, FIRST, 1)
        choose(page, System_prompt="Of the first")
        page.get_by_role("link", name="New conversation").click()
        assert page.locator(".reply").count() == 0
        choose(page, System_prompt="")
        reply = send(page, SECOND, 1)
        page.reload()
        assert complete(page, 1) == reply
        assert page.locator(".said").inner_text() == SECOND
        links = page.get_by_role("navigation").get_by_role("listitem").get_by_role("link")
        assert links.all_inner_texts() == [SECOND, FIRST]
        links.last.click()
        page.wait_for_selector(f".said:text-is('{FIRST}')")
        assert page.locator(".reply > .text").inner_text() == "Paris."
        page.get_by_role("button", name="Settings").click()
        assert page.get_by_label("System prompt").input_value() == "Of the first"
        page.keyboard.press("Escape")
        page.go_back()
        page.wait_for_selector(f".said:text-is('{SECOND}')")

        other = page.context.new_page()
        other.goto(page.url)
        other.get_by_role("button", name=f"Delete {FIRST}").click()
        other.get_by_role("button", name="Cancel").click()
        assert links.count() == 2
        other.get_by_role("button", name=f"Delete {FIRST}").click()
        other.get_by_role("button", name="Delete", exact=True).click()
        page.wait_for_selector("#list li:only-child")
        assert links.all_inner_texts() == [SECOND]
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Delete all").click()
        page.get_by_role("button", name="Delete", exact=True).click()
        page.wait_for_selector(".empty")
        page.reload()
        page.wait_for_selector(".empty")
        assert links.count() == 0
        assert not page.evaluate("Object.keys(localStorage).filter((each) => each.includes('conversation')).length")


def test_what_a_browser_has_kept_may_be_anything(talk: Talk) -> None:
    with talk() as page:
        for value in ("{", "null", "7", '{"id": "b", "messages": []}', '{"id": "a", "messages": [{"role": "user"}]}'):
            page.evaluate("(value) => localStorage.setItem('llama-npu2-conversation-a', value)", value)
            page.evaluate("(value) => localStorage.setItem('llama-npu2-settings', value)", value)
            page.reload()
            page.wait_for_selector(".empty")
            assert page.locator("#list li").count() == 0
        page.evaluate("localStorage.clear()")
        page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
        send(page, FIRST, 1)
        assert "storage is full" in page.get_by_role("alert").inner_text()


def test_reasoning_is_folded_and_given_back(talk: Talk) -> None:
    with talk() as page:
        bodies = asked_by(page)
        answer(
            page, {"reasoning_content": "First, *this*. "}, {"reasoning_content": "Then."}, {"content": "Done."}, END
        )
        assert send(page, FIRST, 1) == "Done."
        thought = page.locator(".reasoning")
        assert (
            thought.get_by_text("Thought for 1 second").is_visible() and not thought.get_by_text("Then.").is_visible()
        )
        thought.locator("summary").press("Enter")
        assert thought.locator(".text").inner_text() == "First, this. Then."
        send(page, SECOND, 2)
        assert bodies[1]["messages"][1]["reasoning_content"] == "First, *this*. Then."


def test_a_conversation_keeps_its_model(talk: Talk) -> None:
    with talk() as page:
        bodies = asked_by(page)
        listed = {"object": "list", "data": [{"id": "demo"}, {"id": "other"}]}
        page.route("**/v1/models", lambda route: route.fulfill(json=listed))
        page.reload()
        model = page.get_by_label("Model")
        model.select_option("other")
        answer(page, {"content": "Done."}, END)
        send(page, FIRST, 1)
        model.select_option("demo")
        page.get_by_role("link", name="New conversation").click()
        send(page, SECOND, 1)
        model.select_option("other")
        page.reload()
        page.get_by_role("link", name=FIRST).click()
        page.wait_for_selector(f".said:text-is('{FIRST}')")
        assert model.input_value() == "demo"
        listed["data"] = [{"id": "third"}]
        page.reload()
        page.locator("#model option[value=third]").wait_for(state="attached")
        send(page, "Thank you.", 2)
        assert page.get_by_role("heading", level=2).all_inner_texts()[1::2] == ["Reply of other", "Reply of third"]
    assert [body["model"] for body in bodies] == ["other", "demo", "third"]


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        (({"content": "So far"}, {"error": {"message": "the engine has ended"}}), "the engine has ended"),
        (({"content": "So far"},), "The connection broke"),
        (({"content": "So far"}, "data: {nonsense\n\n"), "The connection broke"),
    ],
)
def test_a_reply_that_breaks_stays_as_far_as_it_came(talk: Talk, chunks: Any, words: str) -> None:
    with talk() as page:
        answer(page, ": ping\n\n", *chunks)
        assert send(page, FIRST, 1) == "So far" and words in page.locator(".ended").inner_text()
        page.unroute(f"**{CHAT}")
        page.get_by_role("button", name="Ask again").click()
        assert complete(page, 1) == "Paris." and page.locator(".ended").is_hidden()


@pytest.fixture(scope="module")
def strict(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("s3cret\n")
    with serving(demo, f"--api-key-file={key}", "--queue=1") as running:
        yield running


def test_a_key_is_asked_for_and_what_the_server_refuses_is_said(chromium: Any, strict: Server) -> None:
    faults: list[str] = []
    with browser.opened(chromium, f"{strict.url}/", faults) as page:
        key = page.get_by_role("textbox", name="Key")
        key.wait_for()
        page.keyboard.press("Escape")
        assert "wants a key" in page.get_by_role("alert").inner_text()
        page.get_by_role("button", name="Try again").click()
        key.fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("The server does not take this key.").wait_for()
        key.fill("s3cret")
        page.keyboard.press("Enter")
        page.locator("#model option[value=demo]").wait_for(state="attached")
        assert page.get_by_role("alert").is_hidden()
        page.reload()
        page.locator("#model option[value=demo]").wait_for(state="attached")
        choose(page, Temperature="0")
        assert send(page, FIRST, 1) == "Paris."
        assert not page.evaluate("JSON.stringify(localStorage).includes('s3cret')")
        send(page, "word " * 3000, 2)
        assert "the context is 2048" in page.locator(".ended").last.inner_text()
        page.get_by_role("link", name="New conversation").click()
        go_on(page)
        page.get_by_label("Message", exact=True).fill("Once upon a time")
        page.keyboard.press("Enter")
        page.wait_for_selector(".running .text:not(:empty)")
        page.get_by_role("link", name="New conversation").click()  # the reply goes on
        send(page, FIRST, 1)
        assert page.locator(".ended").inner_text().startswith("The server is busy: 1 replies are under way")
        page.get_by_role("link", name="Once upon a time").click()
        page.wait_for_selector(".running .text:not(:empty)")
        strict.process.kill()
        complete(page, 1)
        assert page.locator(".ended").inner_text() == "The connection broke before the reply was complete."
        page.get_by_role("button", name="Ask again").click()
        page.get_by_text("The server cannot be reached. Is it still running?").first.wait_for()
    assert all(re.match(r"console: Failed to load resource: (the server responded|net::)", each) for each in faults)


WRITTEN = {
    "a\nb\n\nc": "<p>a<br>b</p><p>c</p>",
    "### A #\n###### b\n# c\n#c": "<h3>A</h3><h4>b</h4><h3>c</h3><p>#c</p>",
    "**a** _b_ ***c*** ~~d~~ `e`": "<p><strong>a</strong> <em>b</em> <em><strong>c</strong></em> <del>d</del>"
    " <code>e</code></p>",
    "a_b_c 2*3*4 __f__ ~g~": "<p>a_b_c 2<em>3</em>4 <strong>f</strong> <del>g</del></p>",
    "**a *b* c** *d **e***": "<p><strong>a <em>b</em> c</strong> <em>d <strong>e</strong></em></p>",
    "* a * b ** c ** \\*d\\* &lt;": "<ul><li>a * b ** c ** *d* &lt;</li></ul>",
    "``a ` b`` `` ` `` `c": "<p><code>a ` b</code> <code>`</code> `c</p>",
    "- a\n- b\n  - c\n\n  d": "<ul><li>a</li><li>b<ul><li>c</li></ul>d</li></ul>",
    "3. a\n4. b\n  - c\n    - d": '<ol start="3"><li>a</li><li>b<ul><li>c<ul><li>d</li></ul></li></ul></li></ol>',
    "- a\n\n- b\n1) c": "<ul><li><p>a</p></li><li><p>b</p></li></ul><ol><li>c</li></ol>",
    "- [x] a\n- [ ] b\n- [c]": "<ul><li>\u2611 a</li><li>\u2610 b</li><li>[c]</li></ul>",
    "> a\nb\n> - c\n\nd": "<blockquote><p>a<br>b</p><ul><li>c</li></ul></blockquote><p>d</p>",
    "a\n---\nb\n***": "<p>a</p><hr><p>b</p><hr>",
    "In 1980\n1980. b": "<p>In 1980<br>1980. b</p>",
    '[a *b*](https://x.y/z "t") ![c](http://d.e)': '<p><a href="https://x.y/z">a <em>b</em></a> <a href="http://d.e/">c</a></p>',
    "(https://x.y/a_b_(c)), **http://z.z**.": '<p>(<a href="https://x.y/a_b_(c)">https://x.y/a_b_(c)</a>), <strong>'
    '<a href="http://z.z/">http://z.z</a></strong>.</p>',
    "<mailto:a@b.c> a<br/>b": '<p><a href="mailto:a@b.c">mailto:a@b.c</a> a<br>b</p>',
    "\\(a_1 * b_2\\) 5$": '<p><code class="formula">\\(a_1 * b_2\\)</code> 5$</p>',
    "$$c*d*$$ $$": '<p><code class="formula">$$c*d*$$</code> $$</p>',
    "| a | b |\n|---|--:|\n| 1 \\| 2 | `c` |\n| 3 |\n\nd": "<table><thead><tr><th>a</th>"
    '<th class="number">b</th></tr></thead><tbody><tr><td>1 | 2</td><td class="number"><code>c</code></td></tr>'
    "<tr><td>3</td></tr></tbody></table><p>d</p>",
    "```py x\na  <b>\n\n  b\n```\nc": "<pre><code>a  &lt;b&gt;\n\n  b</code></pre><p>c</p>",
    "- ```\n  a\n\n  b\n  ```\n- c": "<ul><li><pre><code>a\n\nb</code></pre></li><li>c</li></ul>",
    "~~~~\n```\n~~~\n": "<pre><code>```\n~~~\n</code></pre>",
    "- a\n\t- b\n\n```\n\ta\tb\n```\n\tc": "<ul><li>a<ul><li>b</li></ul></li></ul><pre><code>\ta\tb</code></pre>"
    "<pre><code>c</code></pre>",
    "    a\n     b": "<pre><code>a\n b</code></pre>",
    "<b>a</b> <!-- c --> <a href='x'>": "<p>&lt;b&gt;a&lt;/b&gt; &lt;!-- c --&gt; &lt;a href='x'&gt;</p>",
}
"""Markdown, and the elements that it becomes, without what code and tables are framed by and links have besides."""

RENDER = """async (texts) => {
    const { Markdown } = await import("/page/markdown.js");
    return texts.map((text) => {
        const element = document.createElement("div");
        const begun = performance.now();
        new Markdown(element).show(text);
        const seconds = (performance.now() - begun) / 1000;
        element.querySelectorAll(".bar").forEach((each) => each.remove());
        element.querySelectorAll(".scroll, .code").forEach((each) => each.replaceWith(...each.childNodes));
        for (const each of element.querySelectorAll("a")) {
            for (const name of ["title", "target", "rel"]) each.removeAttribute(name);
        }
        const depth = (each) => 1 + [...each.children].reduce((most, child) => Math.max(most, depth(child)), 0);
        return { html: text.length < 1000 ? element.innerHTML : "", seconds, depth: depth(element) };
    });
}"""


def test_markdown_becomes_elements(talk: Talk) -> None:
    with talk() as page:
        found = page.evaluate(RENDER, [*WRITTEN])
    assert dict(zip(WRITTEN, (each["html"] for each in found), strict=True)) == WRITTEN


SIZE = 30_000
REPEATED = r"""
*a **a |_a__a|a*b_|**_~~|a**b|~|`a|[|[a](|[a](b|![|[a]|]|[a](http://b)*|\(|$$|$|\|&|&#x|<|<br |<http://|http://[|h|www.|a@|a
""".strip().split("|")


def hostile(size: int) -> list[str]:
    repeated = ("> ", "- ", "1. ", "> - ", "|", "|-", "# ", "\n", " \t", "=\n", "```\n", "a|b\n-|-\n", *REPEATED)
    return [
        *(each * (size // len(each)) for each in repeated),
        "*a " * (size // 6) + "a* " * (size // 6),
        "".join("`" * length + "a" for length in range(int((2 * size) ** 0.5))),
        "\n".join(" " * (2 * depth) + "- a" for depth in range(int(size**0.5))),
        "|a" * (size // 12) + "|\n" + "|-" * (size // 12) + "|\n" + "|b|\n" * (size // 12),
        "[a](" + "(" * size,
        "x" + " " * size + "y",
    ]


def test_hostile_markdown_takes_no_time(talk: Talk) -> None:
    """Neither more than in proportion to its length, nor so deep that browsers fail."""
    with talk() as page:
        short, long = (page.evaluate(RENDER, hostile(size)) for size in (SIZE // 4, SIZE))
        assert max(each["depth"] for each in long) < 100
        slow = [*range(len(long))]
        for _ in range(4):  # the machine may do something else meanwhile
            slow = [at for at in slow if long[at]["seconds"] > max(0.5, 10 * short[at]["seconds"])]
            for at in slow:
                for measured, size in ((short, SIZE // 4), (long, SIZE)):
                    measured[at] = min(
                        measured[at], *page.evaluate(RENDER, [hostile(size)[at]]), key=lambda e: e["seconds"]
                    )
    assert not [(hostile(SIZE)[at][:20], short[at]["seconds"], long[at]["seconds"]) for at in slow]


ATTACKS = r"""
<script>window.attacked = 1</script><img src=x onerror="window.attacked = 1"><svg onload=attacked=1><iframe src="/">
[a](javascript:window.attacked=1) [b](JaVaScRiPt&#58;alert(1)) [c]( java
script:alert(1)) [d](data:text/html,<script>alert(1)</script>) [e](/metrics) [f](//evil.example) [g](vbscript:x)
<javascript:alert(1)> ![h](https://evil.example/pixel.png) ![i](x"onerror="attacked=1) [j](https://e.e"onclick="a)
<style>body { display: none }</style><base href="https://evil.example/"><meta http-equiv=refresh content="0;url=/">

```"><script>attacked=1</script>
</code></pre><script>window.attacked = 1</script>
```
| <img src=x onerror=attacked=1> | b |
|--|--|
| [k](javascript:1) | <details open ontoggle=attacked=1> |
"""


def test_what_a_model_writes_does_nothing(talk: Talk) -> None:
    with talk() as page:
        answer(page, {"reasoning_content": ATTACKS}, {"content": ATTACKS}, END)
        send(page, ATTACKS, 1)
        page.locator(".reasoning summary").click()
        assert page.evaluate("window.attacked") is None
        names = (
            "script, img, svg, iframe, style, base, meta, object, embed, form, input, [onerror], [onload], [onclick]"
        )
        assert page.locator(f"#messages :is({names})").count() == 0
        links = page.locator("#messages a").evaluate_all("(all) => all.map((each) => [each.href, each.rel])")
        assert {re.split(r"[:/]+", href)[0] for href, _ in links} == {"https"} and len(links) >= 2
        assert all("noopener" in rel and "noreferrer" in rel for _, rel in links)
        assert "window.attacked = 1</script><img" in page.locator(".reply > .text").inner_text()


LONG = (
    "An answer with `code`, a [link](https://example.com/) and a word"
    + "-of-some-length" * 20
    + """

## A table
| """
    + " | ".join(f"column {number}" for number in range(12))
    + """ |
"""
    + "|---" * 12
    + """|
"""
    + "| a cell " * 12
    + """|

```python
print("a line that is wider than a phone, and than the column of a laptop, too, so that it has to be scrolled sideways")
```

> What somebody said.

1. One
2. Two
"""
)


def test_its_look(talk: Talk) -> None:
    with talk() as page:
        page.locator("#model option[value=demo]").wait_for(state="attached")
        assert browser.faults_of(page, "chat-empty") == []
        page.emulate_media(color_scheme="light")
        answer(
            page, {"reasoning_content": "What is a table?"}, {"content": LONG}, {"error": {"message": "it has ended"}}
        )
        send(page, "What is a table? " + "w" * 300, 1)
        send(page, "Again, please.\nOn two lines.", 2)
        page.locator("#scroller").evaluate("(each) => { each.scrollTop = 0; }")
        assert browser.faults_of(page, "chat") == []
        page.get_by_role("button", name="Edit message").first.click()
        page.get_by_role("button", name="Settings").click()
        assert browser.faults_of(page, "chat-settings") == []


def test_on_a_phone_conversations_are_behind_a_button(talk: Talk) -> None:
    with talk(width="narrow", theme="dark") as page:
        assert send(page, FIRST, 1) == "Paris."
        nav = page.get_by_role("navigation")
        assert nav.is_hidden()
        page.get_by_role("button", name="Conversations").click()
        nav.get_by_role("link", name="New conversation").click()
        assert nav.is_hidden() and page.locator(".empty").is_visible()
        page.get_by_role("button", name="Conversations").click()
        nav.get_by_role("link", name=FIRST).click()
        page.wait_for_selector(".reply")
        assert nav.is_hidden() and page.locator(".reply > .text").inner_text() == "Paris."
        page.get_by_role("button", name="Conversations").click()
        page.keyboard.press("Escape")
        assert nav.is_hidden()


def test_by_keyboard_alone(talk: Talk) -> None:
    """A message of two lines, which is sent, copied and changed; what a screen reader is told."""
    with talk() as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.reload()
        page.locator("#model option").wait_for(state="attached")
        page.keyboard.type("Hello")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("there")
        page.keyboard.press("Enter")
        reply = complete(page, 1)
        assert page.locator(".said").inner_text() == "Hello\nthere"
        assert reply in page.get_by_role("status").inner_text()
        for name in ("Ask again", "Copy reply"):
            page.keyboard.press("Shift+Tab")
            assert page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent") == name
        page.keyboard.press("Enter")
        page.get_by_text("Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()").strip() == reply
        hidden = "() => { window.board = navigator.clipboard; Object.defineProperty(navigator, 'clipboard', {}); }"
        page.evaluate(hidden)  # as where the page comes from another machine
        page.get_by_role("button", name="Copy message").click()
        page.get_by_text("Copied").nth(1).wait_for()
        assert page.evaluate("board.readText()") == "Hello\nthere"
