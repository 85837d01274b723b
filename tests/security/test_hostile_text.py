"""Chat templates and tokenizers of an author who means harm: each ends in one line, soon and in little memory, and the
process that met it goes on."""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_npu2 import UserError
from llama_npu2.artifact.storage import Directory
from llama_npu2.text import sandbox
from llama_npu2.text.chat_template import ChatTemplate
from llama_npu2.text.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.fuzz.run import in_child

MOST_MEMORY = 512 << 20
"""Bytes by which this process may grow."""
MOST_SECONDS = 20
"""Seconds of the clock, with room for other programs that run here as well."""
MESSAGES = [{"role": "user", "content": "hi"}]
ORDINARY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ANSWER = "[user]hi"

NESTED = (
    "{% set a = namespace(x=[]) %}{% set b = namespace(x=[]) %}"
    "{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}"
)
"""Two equal lists of 2 to the power of 60 lists."""
MIB = "{% set s = namespace(x='x') %}{% for i in range(20) %}{% set s.x = s.x + s.x %}{% endfor %}"

LONG, LARGE = "it takes longer than 0.25 s", "it takes more than 256 MiB"
EITHER = f"({LONG}|{LARGE}|it makes more than)"

TEMPLATES: dict[str, tuple[str, str]] = {
    # One call of C that compares, or writes, 2 to the power of 60 values.
    "equal": (NESTED + "{{ a.x == b.x }}", LONG),
    "unequal": (NESTED + "{{ a.x != b.x }}", LONG),
    "less": (NESTED + "{{ a.x < b.x }}", LONG),
    "in": (NESTED + "{{ a.x in [b.x] }}", LONG),
    "sort": (NESTED + "{{ [a.x, b.x] | sort }}", LONG),
    "sort_attribute": (NESTED + "{{ [{'k': a.x}, {'k': b.x}] | sort(attribute='k') }}", LONG),
    "dictsort": (NESTED + "{{ {'a': a.x, 'b': b.x} | dictsort(by='value') }}", LONG),
    "max": (NESTED + "{{ [a.x, b.x] | max }}", LONG),
    "groupby": (NESTED + "{{ [{'k': a.x}, {'k': b.x}] | groupby('k') }}", LONG),
    "unique": (NESTED + "{{ ((a.x, 1), (b.x, 1)) | unique(attribute=1) | sort | list }}", EITHER),
    "count": (NESTED + "{{ [a.x].count(b.x) }}", LONG),
    "index": (NESTED + "{{ [a.x].index(b.x) }}", LONG),
    "eq_test": (NESTED + "{{ [a.x] | select('eq', b.x) | list }}", LONG),
    "hash": (
        "{% set a = namespace(x=(1,)) %}{% for i in range(60) %}{% set a.x = (a.x, a.x) %}{% endfor %}{{ {a.x: 1} }}",
        LONG,
    ),
    "string": (NESTED + "{{ a.x | string }}", EITHER),
    "print": (NESTED + "{{ a.x }}", EITHER),
    "tojson": (NESTED + "{{ a.x | tojson }}", EITHER),
    "pprint": (NESTED + "{{ a.x | pprint }}", EITHER),
    "format_nested": (NESTED + "{{ '%s' | format(a.x) }}", EITHER),
    "error_nested": (NESTED + "{{ {}[a.x] }}{{ raise_exception(a.x) }}", EITHER),
    "error_key": (NESTED + "{{ [1].index(a.x) }}", EITHER),
    # One call that takes memory.
    "loop_output": (MIB + "{% for i in range(100000) %}{{ s.x }}{% endfor %}", EITHER),
    "tilde": (MIB + "{% for i in range(20) %}{% set s.x = s.x ~ s.x %}{% endfor %}", LARGE),
    "plus": (MIB + "{% for i in range(20) %}{% set s.x = s.x + s.x %}{% endfor %}", LARGE),
    "replace": (MIB + "{{ s.x | replace('x', s.x) }}", LARGE),
    "replace_method": (MIB + "{{ s.x.replace('x', s.x) }}", LARGE),
    "join": (MIB + "{{ range(100000) | join(s.x) }}", LARGE),
    "join_method": (MIB + "{{ s.x.join(s.x) }}", LARGE),
    "translate": (MIB + "{{ s.x.translate({120: s.x}) }}", LARGE),
    "expandtabs": ("{{ ('\t' * 1000).expandtabs(1000000) }}", LARGE),
    "indent": ("{{ ('\n' * 1000) | indent(1000000, blank=true) }}", LARGE),
    "center": ("{{ 'x' | center(9999999999) }}", LARGE),
    "ljust": ("{{ 'x'.ljust(9999999999) }}", LARGE),
    "zfill": ("{{ '1'.zfill(9999999999) }}", LARGE),
    "repeat": ("{{ 'x' * 9999999999 }}", LARGE),
    "repeat_list": ("{{ [1] * 9999999999 }}", LARGE),
    "width_of_text": ("{{ '{0:{1}}'.format('a', '8000000000') }}", LARGE),
    "width_of_number": ("{{ '%*s' % (2000000000, 'a') }}", LARGE),
    "width_filter": ("{{ '%9999999999d' | format(1) }}", LARGE),
    "precision": ("{{ '{:.9999999999f}'.format(0.1) }}", "cannot render"),
    "wordwrap": (MIB + "{{ s.x | wordwrap(1) }}", EITHER),
    "urlize": (MIB + "{{ ('www.x.com ' * 1000000) | urlize }}", EITHER),
    "escape": (MIB + "{{ ('<' * 60000000) | escape }}", LARGE),
    "upper": ("{{ ('ŉ' * 90000000).upper() }}", LARGE),
    "split": ("{{ ('a ' * 60000000).split() | length }}", LARGE),
    "list": ("{{ ('a' * 60000000) | list | length }}", LARGE),
    "encode": ("{{ ('ÿ' * 60000000).encode('unicode_escape') }}", "(it takes more than|cannot render)"),
    "batch": ("{{ [1] | batch(999999999, 'x') | list }}", LARGE),
    "slice": ("{{ [1] | slice(99999999) | list | length }}", EITHER),
    "strftime": ("{{ strftime_now('%c' * 30000000) }}", EITHER),
    "lipsum": ("{{ lipsum(n=100000, max=99999) }}", EITHER),
    "namespace": (
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + [i] %}{% endfor %}",
        EITHER,
    ),
    "json_indent": ("{{ range(9999) | list | tojson(indent=100000) }}", EITHER),
    # Time in Python, and in numbers.
    "endless": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", LONG),
    "power": ("{{ 9 ** 9999999 }}", LONG),
    "power_of_power": (
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        EITHER,
    ),
    "shift": ("{{ (2 ** 3000000000) % 7 }}", EITHER),
    "big_number_text": (
        "{% set x = 7 ** 3000000 %}{{ x | string | length }}{{ '%d' % x }}",
        "(cannot render|it takes)",
    ),
    "division": ("{% set x = 7 ** 4000000 %}{% set y = 3 ** 2000000 %}{{ (x // y) % 2 }}", EITHER),
    "range": ("{{ range(99999999999) | list }}", "cannot render .*Range too big"),
    "ranges": ("{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}", LONG),
    "search": (
        "{{ ('a' * 3000000).count('a' * 1500000 ~ 'b') }}{{ ('a' * 2000000).find('b' * 2) }}"
        "{% for i in range(99999) %}{{ ('a' * 1000000).rfind('b' ~ 'a' * 5000) }}{% endfor %}",
        LONG,
    ),
    "striptags": ("{{ ('<' * 300000) | striptags }}{{ ('<!--' * 200000) | striptags }}", "(cannot render|it takes)"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "recursion_twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        LONG,
    ),
    "recursive_loop": ("{% set a = [] %}{% for i in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}", "recursion"),
    "caller": (
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call m() %}" * 40
        + "x"
        + "{% endcall %}" * 40,
        "(it takes|nested|cannot)",
    ),
    # Sources.
    "huge_source": ("{{ 1 }}" * 200_000, "at most 1048576 are read"),
    "long_source": ("{{ x }}" * 140_000, EITHER),
    "parentheses": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "(not valid jinja|it takes)"),
    "brackets": ("{{ " + "[" * 150 + "1" + "]" * 150 + " }}", "(not valid jinja|it takes)"),
    "nested_ifs": ("{% if 1 %}" * 5_000 + "{% endif %}" * 5_000, "(not valid jinja|it takes)"),
    "nested_loops": ("{% for a in 'abcd' %}" * 19 + "x" + "{% endfor %}" * 19, "(it takes|not valid jinja)"),
    "many_terms": ("{{ " + "1+" * 100_000 + "1 }}", "(not valid jinja|it takes)"),
    "unclosed": ("{{ '" + "x" * 900_000, "not valid jinja"),
    # Output.
    "output": (MIB + "{{ s.x * 64 }}", "it makes more than 1048"),
    "refusal": (MIB + "{{ raise_exception(s.x * 64) }}", "refuses these messages: x{1000}$"),
    # Outside.
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render .*unsafe"),
    "globals": ("{{ raise_exception.__globals__ }}{{ cycler.__init__.__globals__.os }}", "cannot render"),
    "include": ("{% include '/etc/passwd' %}", "cannot render .*no loader"),
    "mutate": ("{{ messages.append(1) }}", "cannot render .*unsafe"),
}


def held(act: Callable[[], object]) -> str:
    """What an action is refused with, empty where it is done; in little time, and memory of this process."""
    before, started = peak_memory(), time.monotonic()
    try:
        act()
        refusal = ""
    except UserError as error:
        refusal = str(error)
    assert time.monotonic() - started < MOST_SECONDS
    assert peak_memory() - before < MOST_MEMORY
    assert refusal.isprintable() and len(refusal) < 2000
    return refusal


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_takes_little_whatever_it_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LONGEST", 0.25)
    source, complaint = TEMPLATES[name]
    refusal = held(lambda: ChatTemplate(source, {}).render(MESSAGES))
    # What takes too much memory takes time to get it: with less time, either limit may be met first.
    assert re.search(EITHER if complaint == LARGE else complaint, refusal), refusal
    assert ChatTemplate(ORDINARY, {}).render(MESSAGES) == ANSWER


@pytest.mark.parametrize(("name", "complaint"), [("equal", "it takes longer than [28] s"), ("plus", LARGE)])
def test_limits_as_they_are(name: str, complaint: str) -> None:
    assert re.search(complaint, held(lambda: ChatTemplate(TEMPLATES[name][0], {}).render(MESSAGES)))


def test_a_template_renders_again_after_it_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LONGEST", 0.25)
    loop = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages | length > 1 %}" + loop + "{% endif %}{{ messages[0].content }}", {})
    assert template.render(MESSAGES) == "hi"
    with pytest.raises(UserError, match=LONG):
        template.render(MESSAGES * 2)
    assert template.render(MESSAGES) == "hi"


def test_threads_render_beside_a_hostile_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LONGEST", 0.25)
    template, texts = ChatTemplate(ORDINARY, {}), []

    def render() -> None:
        texts.extend(template.render(MESSAGES) for _ in range(50))

    threads = [threading.Thread(target=render) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert LONG in held(lambda: ChatTemplate(TEMPLATES["equal"][0], {}).render(MESSAGES))
    for thread in threads:
        thread.join()
    assert texts == [ANSWER] * 200


def test_no_process_is_left_behind() -> None:
    """Neither of a template that is gone nor of one that was ended."""
    before = set(Path("/proc/self/task").parent.glob("task/*/children"))
    template = ChatTemplate(ORDINARY, {})
    assert template.render(MESSAGES) == ANSWER
    template.close()
    children = [child for path in before for child in path.read_text().split()]
    assert not [child for child in children if "renderer" in Path(f"/proc/{child}/cmdline").read_text()]


def child_of(template: ChatTemplate) -> Path:
    return Path(f"/proc/{template._sandboxes['default']._renderer._pid}")


def test_what_the_process_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel holds its limits, whatever this process has open, blocks, ignores, or has in its environment."""
    monkeypatch.setenv("SECRET", "a token")
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        template = ChatTemplate(ORDINARY, {})
        assert template.render(MESSAGES) == ANSWER
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.signal(signal.SIGPROF, before)
        os.close(reading)
        os.close(writing)
    process = child_of(template)
    limits = re.findall(r"^Max (.+?) {2,}(\w+) +(\w+)", (process / "limits").read_text(), re.MULTILINE)
    held_to = {name: most for name, *both in limits for most in {*both}}
    assert int(held_to["address space"]) <= 256 << 20
    assert {held_to[name] for name in ("core file size", "file size", "open files")} == {"0"}
    assert {path.name for path in (process / "fd").iterdir()} == {"0", "1", "2"}
    assert b"SECRET" not in (process / "environ").read_bytes()
    status = dict(line.split(":\t") for line in (process / "status").read_text().splitlines())
    profiled = 1 << signal.SIGPROF - 1
    assert not (int(status["SigBlk"], 16) | int(status["SigIgn"], 16)) & profiled
    template.close()


def test_ctrl_c_does_not_end_the_process() -> None:
    """The signal comes as the process starts, before Python has said what to do with it, and later."""
    for moment in (0.0, 0.003, 0.01, 0.02):
        renderer = sandbox.Renderer()
        time.sleep(moment)
        os.kill(renderer._pid, signal.SIGINT)
        template = sandbox.Sandbox(ORDINARY, {}, renderer)
        template.check()
        os.kill(renderer._pid, signal.SIGINT)
        time.sleep(0.01)
        assert not renderer.has_ended()
        template.close()


def test_time_in_which_nothing_happens_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PATIENCE", 0.5)
    template = ChatTemplate(ORDINARY, {})
    template.check()
    os.kill(template._sandboxes["default"]._renderer._pid, signal.SIGSTOP)
    assert held(lambda: template.render(MESSAGES)).endswith("it takes longer than 0.5 s")
    monkeypatch.undo()
    assert template.render(MESSAGES) == ANSWER


def test_time_is_counted_for_each_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has been idle, or has answered often, has as long as a new one."""
    monkeypatch.setattr(sandbox, "LONGEST", 0.3)
    template = ChatTemplate("{% for i in range(30000) %}{% endfor %}" + ORDINARY, {})
    texts, process = {template.render(MESSAGES)}, child_of(template)

    def taken() -> float:
        return sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13])) / os.sysconf(
            "SC_CLK_TCK"
        )

    while taken() < 0.6:
        texts.add(template.render(MESSAGES))
    assert texts == {ANSWER} and child_of(template) == process


def test_messages_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_MESSAGES", 200)
    template = ChatTemplate(ORDINARY, {})
    assert "at most 200 are rendered" in held(lambda: template.render([{"role": "user", "content": "x" * 200}]))
    assert template.render(MESSAGES) == ANSWER


def test_a_process_that_says_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has taken it over: what it says is not read."""
    started = "import os; os.write(1, b'+' + bytes(8) + b'+' + b'\\xff' * 5 + bytes(3))"
    endless = f"{started}\nwhile True: os.write(1, bytes(1 << 16))"
    monkeypatch.setattr(sandbox, "_PROGRAM", endless)
    template = ChatTemplate(ORDINARY, {})
    assert "its process ended" in held(template.check)


def test_no_process_is_left_of_one_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PATIENCE", 0.2)
    template = ChatTemplate(ORDINARY, {})
    template.check()
    process = child_of(template)
    os.kill(template._sandboxes["default"]._renderer._pid, signal.SIGSTOP)
    held(lambda: template.render(MESSAGES))
    assert not process.exists()


def test_a_fork_has_a_process_of_its_own() -> None:
    template = ChatTemplate(ORDINARY, {})
    assert template.render(MESSAGES) == ANSWER

    process = child_of(template)

    def render() -> None:
        assert template.render(MESSAGES) == ANSWER and child_of(template) != process

    assert in_child(render) == ""
    assert template.render(MESSAGES) == ANSWER and child_of(template) == process and process.exists()


def replacing(content: str, pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def sequence(kind: str, *components: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(components)}


def inserting(uses: int, count: int, token: str = "<s>") -> dict[str, Any]:
    """A post-processor that inserts so many times so many tokens."""
    special = {"id": "<s>", "ids": [1] * count, "tokens": [token] * count}
    piece = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * uses
    return {"type": "TemplateProcessing", "single": piece, "pair": piece, "special_tokens": {"<s>": special}}


def charsmap(text: bytes) -> dict[str, Any]:
    """A normalizer that puts a text in the place of some characters."""
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + text).decode()}


def words(**settings: Any) -> dict[str, Any]:
    """A model that looks for words in a vocabulary."""
    vocab = {"<s>": 0, "a": 1, "##a": 2}
    model = {"type": "WordPiece", "unk_token": "<s>", "continuing_subword_prefix": "##", "vocab": vocab}
    return {"model": model | {"max_input_chars_per_word": 100} | settings}


LONG_TOKEN = {"type": "WordLevel", "unk_token": "<s>", "vocab": {"<s>": 0, "x" * 20_000: 1}}

TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "replace": ({"normalizer": replacing("x" * 5000)}, "normalizer may make a text 5e+03 times as long"),
    "replace all": ({"normalizer": replacing("x" * 5000, "")}, "normalizer may make"),
    "replacements": (
        {"normalizer": sequence("normalizers", *[replacing("a" * 50)] * 8)},
        "normalizer.normalizers[1] may make",
    ),
    "expression": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 5000}},
        "normalizer may make",
    ),
    "prepend": ({"normalizer": {"type": "Prepend", "prepend": "x" * 9999}}, "normalizer may make"),
    "nested sequences": (
        {"normalizer": sequence("normalizers", sequence("normalizers", *[replacing("a" * 99)] * 4))},
        "normalizer.normalizers[0].normalizers[1] may make",
    ),
    "many normalizers": (
        {"normalizer": sequence("normalizers", *[{"type": "Nmt"}] * 9999)},
        "normalizer has more than 64 components",
    ),
    "unknown normalizer": ({"normalizer": {"type": "Explode"}}, "normalizer must be of a type among"),
    "key of another normalizer": (
        {"normalizer": {"type": "NFC", "content": "x"}},
        "normalizer.content belongs to the type Replace",
    ),
    "map of characters": ({"normalizer": charsmap(b"x" * 61)}, "has a text of 61 bytes for a character"),
    "map of characters, times": ({"normalizer": sequence("normalizers", *[charsmap(b"x" * 60)] * 2)}, "may make"),
    "map that is no base64": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "\n"}},
        "precompiled_charsmap must be base64",
    ),
    "metaspace": (
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁" * 9999, "prepend_scheme": "always", "split": True}},
        "pre_tokenizer may make",
    ),
    "normalizer and pre-tokenizer": (
        {
            "normalizer": replacing("a" * 99),
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        },
        "pre_tokenizer may make a text 396 times as long",
    ),
    "long expression": (
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "a" * 99999},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        "pre_tokenizer.pattern has 99999 characters",
    ),
    "template": ({"post_processor": inserting(1, 10_000)}, "post_processor inserts 20000 tokens"),
    "template, times": ({"post_processor": inserting(100, 100)}, "post_processor inserts 20000 tokens"),
    "templates": (
        {"post_processor": sequence("processors", *[inserting(30, 30)] * 4)},
        "post_processor.processors[0] inserts 1800 tokens",
    ),
    "template with the text": (
        {"post_processor": inserting(1, 1) | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 3}},
        "post_processor.single has the text 3 times",
    ),
    "template with long tokens": (
        {"post_processor": inserting(1, 1, "x" * 1001)},
        "post_processor.special_tokens must have texts of at most 1000",
    ),
    "decoder": ({"decoder": replacing("x" * 5000)}, "decoder may make"),
    "decoders": ({"decoder": sequence("decoders", *[replacing("a" * 9)] * 9)}, "decoder.decoders[0] may make"),
    "padding": ({"padding": {"strategy": {"Fixed": 10**9}, **{"direction": "Right", "pad_to_multiple_of": None}}}, ""),
    "padding to a multiple": (
        {"padding": {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 10**10}},
        "",
    ),
    "truncation": (
        {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}},
        "",
    ),
    "added tokens": (
        {"added_tokens": [{"id": i, "content": "x" * 99_999} for i in range(50)]},
        "added_tokens[0].content has 99999 bytes",
    ),
    "many added tokens": (
        {"added_tokens": [{"id": i, "content": f"{i:01000}"} for i in range(5000)]},
        "added_tokens may take",
    ),
    "long token": ({"model": LONG_TOKEN}, "model has more than 8192 bytes without a quote"),
    "long token, not at the end": (
        {"model": LONG_TOKEN, "after": 0, "decoder": None},
        "model.vocab has a token of 20000 characters",
    ),
    "many values": ({"model": {"vocab": [0] * 1_600_000}}, "values, at most 1500000"),
    "long word": (words(max_input_chars_per_word=1001), "model.max_input_chars_per_word is 1001"),
    "long unknown token": (words(unk_token="x" * 1001), "model.unk_token has 1001 characters"),
    "long prefix": (words(continuing_subword_prefix="x" * 1001), "model.continuing_subword_prefix has 1001 characters"),
    "model that is a list": ({"model": [0] * 100_000}, "model has more than 8192 bytes without a quote"),
    "normalizer that is a list": ({"normalizer": [0] * 1_000_000}, "normalizer must be of a type among"),
    "nothing": ({"model": None}, "cannot be read"),
}
_PADDING = {"pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_takes_little(name: str, tmp_path: Path) -> None:
    """It is refused by the name of the field, or tokenises as it would without what is asked for."""
    changes, complaint = TOKENIZERS[name]
    sound = json.loads((ROOT / "tests/fuzz/corpus/tokenizer/bytes.json").read_text())
    if "padding" in changes:
        changes = {"padding": changes["padding"] | _PADDING}
    (tmp_path / "tokenizer").mkdir()
    path = tmp_path / "tokenizer/tokenizer.json"
    path.write_text(json.dumps(sound))
    expected = len(Tokenizer.open(Directory(tmp_path)).encode("a banana", True))
    if "after" in changes:
        del sound["decoder"]  # where a section is missing the whole file is parsed
    path.write_text(json.dumps(sound | changes))

    def use() -> None:
        ids = Tokenizer.open(Directory(tmp_path)).encode("a banana", True)
        assert len(ids) < 100 * expected + 1024
        Tokenizer.open(Directory(tmp_path)).decode(ids)

    assert complaint in held(use)
    if name.startswith(("padding", "truncation")):
        assert len(Tokenizer.open(Directory(tmp_path)).encode("a banana", True)) == expected


def test_a_tokenizer_of_any_size(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    with (tmp_path / "tokenizer/tokenizer.json").open("wb") as file:
        file.truncate(6 << 30)
    assert "it has 6442450944 bytes, at most 67108864 are read" in held(lambda: Tokenizer.open(Directory(tmp_path)))


@pytest.mark.parametrize("path", ["models/demo/tokenizer.json", "tests/fuzz/corpus/tokenizer/llama3.json"])
def test_ordinary_tokenizers_are_not_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_bytes((ROOT / path).read_bytes())
    assert Tokenizer.open(Directory(tmp_path)).encode("a banana", True)
