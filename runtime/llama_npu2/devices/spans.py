"""Spans of time for a profile: what ran when. Outside of `Llama.profile` a timed call costs one comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

NOTHING: Mapping[str, int] = MappingProxyType({})


class Span(NamedTuple):
    """Something that ran for a time. Two spans of one thread lie one after the other, or one inside the other."""

    kind: str
    """`phase` (one run of it), `host` (the runtime's own work), `native` (a call of the team), `program`, `launch`,
    `sync` (of memory with the NPU), `submit` or `wait` (for the NPU)."""
    name: str
    start: int
    """Nanoseconds of `time.perf_counter_ns`."""
    end: int
    thread: int = 0
    """0 for the thread of Python, others are the team's."""
    about: Mapping[str, int] = NOTHING
    """Numbers: `layer` from 0, `rows`, `position`, `bytes`, `operations`, `launch` from 0 in its program, and, in
    nanoseconds, `waited` at barriers inside a launch and `busy`, the time that all threads worked on it."""


class Noted(Protocol):
    """A record from which spans are made when somebody asks for them."""

    def spans(self) -> Iterable[Span]:
        """Return the spans, in any order."""


class Recorder:
    """Collects spans."""

    def __init__(self) -> None:
        self._notes: list[Span | Noted] = []

    def note(self, what: Span | Noted) -> None:
        """Add a span, or a record of spans."""
        self._notes.append(what)

    def spans(self) -> list[Span]:
        """Return all spans so far, ordered by their beginning; a span that encloses others comes before them."""
        spans = (span for note in self._notes for span in ((note,) if isinstance(note, Span) else note.spans()))
        return sorted(spans, key=lambda span: (span.start, -span.end))


class Timer:
    """Calls functions, and notes a span of each call if it has a recorder."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def __call__(
        self,
        kind: str,
        name: object,
        function: Callable[..., Any],
        *arguments: Any,
        about: Mapping[str, int] | None = None,
    ) -> Any:
        """Return `function(*arguments)`. The name is that of the span as text, which is made only if there is one."""
        recorder = self.recorder
        if recorder is None:
            return function(*arguments)
        started = time.perf_counter_ns()
        try:
            return function(*arguments)
        finally:
            recorder.note(Span(kind, str(name), started, time.perf_counter_ns(), 0, about or NOTHING))


class Part(NamedTuple):
    """A span among others of its thread."""

    span: Span
    alone: int
    """Nanoseconds in it that are not in a span inside it."""
    inside: int
    """Index of the part that encloses it, -1 if none does."""


def nested(spans: Iterable[Span]) -> list[Part]:
    """Return the parts of one thread's spans, which are ordered as `Recorder.spans` returns them.

    The sum of their times `alone` is that of the spans that nothing encloses.
    """
    parts: list[Part] = []
    enclosing: list[int] = []
    for span in spans:
        while enclosing and parts[enclosing[-1]].span.end <= span.start:
            enclosing.pop()
        duration, inside = span.end - span.start, enclosing[-1] if enclosing else -1
        if enclosing:
            parts[inside] = parts[inside]._replace(alone=parts[inside].alone - duration)
        enclosing.append(len(parts))
        parts.append(Part(span, duration, inside))
    return parts
