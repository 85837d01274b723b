"""The process that renders one chat template, which is a program of a stranger. `sandbox.py` starts it and talks to it.

Jinja's sandbox keeps the template from the machine. The kernel limits the template's resources, whatever it calls: the
address space of this process by `RLIMIT_AS`, the CPU time of each request by a timer whose signal ends the process.
Once the process has the template, it cannot open files any more.

It ends when its standard input does. `rendering.py` describes the messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama_npu2.errors import first_line
from llama_npu2.text.rendering import (
    DONE,
    FAILED,
    HEADER,
    LONGEST_ERROR,
    OUT_OF_MEMORY,
    REFUSED,
    UNKNOWN,
    Request,
    Setup,
    encoded,
    header,
    marked,
    most_text,
)


class _RefusedError(Exception):
    """The template called `raise_exception`."""


class _UnknownError(Exception):
    """The template reads no variable of a name that it was given."""


def main() -> None:
    """Answer requests until there are no more, or the template does not compile."""
    _close_files()
    _send(DONE, b"")
    setup: Setup = json.loads(_read(_length()))
    environment = _environment()
    _warm_up(environment)
    _limit(setup["most_memory"])
    signal.setitimer(signal.ITIMER_PROF, setup["longest"])
    template: Any = None

    def compile_template() -> str:
        nonlocal template
        template = environment.from_string(setup["source"])
        return ""

    def render() -> str:
        text: str = template.render(_variables(json.loads(_read(length)), setup, environment))
        return text

    going = _answer(compile_template, setup["most_added"])
    while going:
        signal.setitimer(signal.ITIMER_PROF, 0)
        length = _length()
        signal.setitimer(signal.ITIMER_PROF, setup["longest"])
        _answer(render, most_text(setup["most_added"], length))


def _environment() -> ImmutableSandboxedEnvironment:
    """Return jinja's environment, set up as transformers does.

    One thing differs: constants are computed when the template is rendered, not when it is compiled, where their errors
    would be taken for errors of syntax.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], optimized=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_SAMPLES = (
    "{% for text in messages %}{{ 'é\\n' ~ text | pprint }}{{ strftime_now('%d %b %Y %Z') | tojson }}{% endfor %}",
    "{{ lipsum(1) | wordwrap | urlize | striptags }}",
    "{{ messages.absent.absent }}",
    "{% generation %}{% endgeneration %}{% if %}",
)
"""Templates that work, one that fails, and one that does not compile."""


def _warm_up(environment: ImmutableSandboxedEnvironment) -> None:
    """Let jinja import the modules that it imports at first use: later, this process cannot open files any more."""
    for source in _SAMPLES:
        with contextlib.suppress(Exception):
            environment.from_string(source).render(messages=["hello"])


class _Generation(Extension):
    """The tag `{% generation %}`, in which transformers finds the tokens of replies: here its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _variables(request: Request, setup: Setup, environment: ImmutableSandboxedEnvironment) -> dict[str, Any]:
    """Return all variables of a rendering. Raises _UnknownError."""
    names = ("tools", "documents")
    given = {name: request[name] for name in names if request[name] is not None} | dict(request["variables"])  # type: ignore[literal-required]
    texts: dict[str, Any] = {"messages": request["messages"], **dict.fromkeys(names), **given}
    controls, parts = request["controls"], any(isinstance(each.get("content"), list) for each in request["messages"])
    if given or request["if_read"] or controls or parts:
        tree = environment.parse(setup["source"])
        own = {"messages", "add_generation_prompt", *setup["special_tokens"], *environment.globals}
        read = find_undeclared_variables(tree) - own
        _check_read(given, read)
        texts |= {name: value for name, value in request["if_read"].items() if name in read}
        words = _words(tree)
        if not {"type", "text"} <= words:
            texts["messages"] = [_with_plain_content(message) for message in request["messages"]]
        texts = marked(texts, [text for text, special in controls.items() if special or _said(text, words)])
    return setup["special_tokens"] | texts | {"add_generation_prompt": request["reply"]}


def _check_read(given: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise _UnknownError for a variable that the template does not read."""
    if unknown := next((name for name in given if name not in read), None):
        raise _UnknownError(f"reads no variable {unknown}: it reads {', '.join(sorted(read)) or 'only messages'}")


def _words(tree: nodes.Template) -> set[str]:
    """Return the texts that a template writes or compares with, and the attributes that it reads."""
    found = {node.data for node in tree.find_all(nodes.TemplateData)}
    found |= {node.attr for node in tree.find_all(nodes.Getattr)}
    return found | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}


def _said(token: str, words: Collection[str]) -> bool:
    return any(token in word for word in words)


def _with_plain_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text: for a template that knows nothing of parts."""
    content = message.get("content")
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        return message
    return message | {"content": "".join(part["text"] for part in content)}


def _to_json(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _close_files() -> None:
    """Close the descriptors that the parent left open for its children, as libraries in C do by mistake."""
    for number in [int(entry.name) for entry in os.scandir("/proc/self/fd")]:
        if number > 2:
            with contextlib.suppress(OSError):  # the descriptor that listed them is closed already
                os.close(number)


def _limit(most_memory: int) -> None:
    """Limit the resources of this process from here on. What it needs from files is loaded by now."""
    time.localtime()  # it reads the time zone
    # If the parent ignored or blocked the timer's signal, so would this process, and the timer would end nothing.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name, most in {"AS": most_memory, "CORE": 0, "FSIZE": 0, "NOFILE": 0}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        inherited = resource.getrlimit(kind)[1]
        allowed = most if inherited == resource.RLIM_INFINITY else min(most, inherited)
        resource.setrlimit(kind, (allowed, allowed))


def _answer(work: Callable[[], str], most: int) -> bool:
    """Send the text that `work` returns, of at most `most` bytes, or the reason why there is none.

    Ends the process if that takes too much memory.

    Returns:
        Whether a text was sent.
    """
    try:
        outcome, text = _outcome(work)
        content = encoded(text)
        if len(content) > most:
            outcome, content = FAILED, f"it makes more than {most} bytes of text".encode()
        _send(outcome, content)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    return outcome == DONE


def _outcome(work: Callable[[], str]) -> tuple[bytes, str]:
    """Return the outcome of `work`, and its text or error. Raises MemoryError."""
    try:
        try:
            return DONE, work()
        except _RefusedError as error:
            return REFUSED, str(error)[:LONGEST_ERROR]
        except _UnknownError as error:
            return UNKNOWN, str(error)[:LONGEST_ERROR]
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            return FAILED, first_line(error)
    except MemoryError:
        raise
    except Exception as error:  # making the text of the error failed as well
        return FAILED, type(error).__name__


def _length() -> int:
    """Read the length of the next message's content."""
    return int.from_bytes(_read(HEADER), "little")


def _read(count: int) -> bytes:
    """Read `count` bytes from standard input. Ends the process where the input ends."""
    parts = []
    while count:
        part = os.read(0, count)
        if not part:
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _send(outcome: bytes, content: bytes) -> None:
    left = memoryview(outcome + header(content) + content)
    while left:
        left = left[os.write(1, left) :]
