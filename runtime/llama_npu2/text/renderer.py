"""The process that renders one chat template, which is a program of a stranger. `sandbox.py` starts it and talks to it.

Jinja's sandbox keeps the template from the machine. The kernel bounds what the template takes, whatever it calls: the
address space of this process by `RLIMIT_AS`, the CPU time of each request by a timer whose signal ends the process. The
process cannot open files any more once it knows the template.

It ends when its standard input does. `rendering.py` says what is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama_npu2.errors import first_line
from llama_npu2.text.rendering import (
    DONE,
    FAILED,
    HEADER,
    LONGEST_ERROR,
    OUT_OF_MEMORY,
    REFUSED,
    Request,
    Setup,
    encoded,
    header,
    most_text,
)


class _RefusedError(Exception):
    """The template called `raise_exception`."""


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
        request: Request = json.loads(_read(length))
        messages, reply = request["messages"], request["reply"]
        text: str = template.render(messages=messages, add_generation_prompt=reply, **setup["special_tokens"])
        return text

    going = _answer(compile_template, setup["most_added"])
    while going:
        signal.setitimer(signal.ITIMER_PROF, 0)
        length = _length()
        signal.setitimer(signal.ITIMER_PROF, setup["longest"])
        _answer(render, most_text(setup["most_added"], length))


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up, but that constants are computed when the template is rendered, not when it is
    compiled: their errors would be taken for those of its syntax."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_SAMPLES = (
    "{% for text in messages %}{{ 'é\\n' ~ text | pprint }}{{ strftime_now('%d %b %Y %Z') | tojson }}{% endfor %}",
    "{{ lipsum(1) | wordwrap | urlize | striptags }}",
    "{{ messages.absent.absent }}",
    "{% if %}",
)
"""Templates that work, one that fails, and one that does not compile."""


def _warm_up(environment: ImmutableSandboxedEnvironment) -> None:
    """Let jinja import what it imports at first use: later, this process cannot open files any more."""
    for source in _SAMPLES:
        with contextlib.suppress(Exception):
            environment.from_string(source).render(messages=["hello"])


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _close_files() -> None:
    """Close what the parent left open for its children, as libraries in C do by mistake."""
    for number in [int(entry.name) for entry in os.scandir("/proc/self/fd")]:
        if number > 2:
            with contextlib.suppress(OSError):  # the one that lists them is closed
                os.close(number)


def _limit(most_memory: int) -> None:
    """Bound what this process may take from here on. What it needs from files is loaded by now."""
    time.localtime()  # it reads the time zone
    # If the parent ignores or blocks the timer's signal, then so does this process, and the timer ends nothing.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name, most in {"AS": most_memory, "CORE": 0, "FSIZE": 0, "NOFILE": 0}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        inherited = resource.getrlimit(kind)[1]
        allowed = most if inherited == resource.RLIM_INFINITY else min(most, inherited)
        resource.setrlimit(kind, (allowed, allowed))


def _answer(work: Callable[[], str], most: int) -> bool:
    """Send the text that `work` makes, of at most so many bytes, or why it makes none. Returns whether it makes one.
    Ends the process if that takes too much memory."""
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
    """Raises MemoryError."""
    try:
        try:
            return DONE, work()
        except _RefusedError as error:
            return REFUSED, str(error)[:LONGEST_ERROR]
        except MemoryError:
            raise
        except Exception as error:  # a template's mistakes are any
            return FAILED, first_line(error)
    except MemoryError:
        raise
    except Exception as error:  # the text of the error cannot be made either
        return FAILED, type(error).__name__


def _length() -> int:
    """Of the content of the next message."""
    return int.from_bytes(_read(HEADER), "little")


def _read(count: int) -> bytes:
    """So many bytes of standard input. Ends the process where that ends."""
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
