"""Where time goes: spans of what ran, noted while `Llama.profile` is entered. Otherwise a call costs one comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

NOTHING: Mapping[str, int] = MappingProxyType({})


class Span(NamedTuple):
    """Something that ran from `start` to `end`, in nanoseconds of `time.perf_counter_ns`. Spans of one thread lie one
    behind the other or inside each other; thread 0 is that of Python, others are the team's.

    `kind`: phase (one run of it), host (the runtime's own work), native (a call of the team), program, launch, sync (of
    memory with the NPU), submit and wait (for the NPU). `about`: numbers, of them `layer` from 0, `rows`, `position`,
    `bytes`, `operations`, `launch` from 0 in its program, and in nanoseconds `waited` at barriers inside a launch and
    `busy`, what all threads worked on it.
    """

    kind: str
    name: str
    start: int
    end: int
    thread: int = 0
    about: Mapping[str, int] = NOTHING


class Noted(Protocol):
    """What is made spans of when somebody looks."""

    def spans(self) -> Iterable[Span]:
        """Any order."""


class Recorder:
    """Collects spans."""

    def __init__(self) -> None:
        self._noted: list[Span | Noted] = []

    def note(self, what: Span | Noted) -> None:
        self._noted.append(what)

    def spans(self) -> list[Span]:
        """All so far, by beginning; what encloses others before them."""
        found = (span for noted in self._noted for span in ((noted,) if isinstance(noted, Span) else noted.spans()))
        return sorted(found, key=lambda span: (span.start, -span.end))


class Timer:
    """Calls functions, and notes spans of them if it has a recorder."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def __call__(
        self,
        kind: str,
        name: str,
        function: Callable[..., Any],
        *arguments: Any,
        about: Mapping[str, int] | None = None,
    ) -> Any:
        """What `function(*arguments)` returns."""
        recorder = self.recorder
        if recorder is None:
            return function(*arguments)
        started = time.perf_counter_ns()
        try:
            return function(*arguments)
        finally:
            recorder.note(Span(kind, name, started, time.perf_counter_ns(), 0, about or NOTHING))


class Part(NamedTuple):
    """A span and the time in it that no span inside it has: `alone`, in nanoseconds. `inside`: its place in the list of
    parts, -1 if nothing encloses it."""

    span: Span
    alone: int
    inside: int


def nested(spans: Iterable[Span]) -> list[Part]:
    """The spans of one thread, ordered as `Recorder.spans` has them. Their times `alone` add up to that of those that
    nothing encloses."""
    found: list[tuple[Span, int]] = []
    alone: list[int] = []
    open_spans: list[int] = []
    for span in spans:
        while open_spans and found[open_spans[-1]][0].end <= span.start:
            open_spans.pop()
        inside = open_spans[-1] if open_spans else -1
        if open_spans:
            alone[inside] -= span.end - span.start
        open_spans.append(len(found))
        found.append((span, inside))
        alone.append(span.end - span.start)
    return [Part(span, own, inside) for (span, inside), own in zip(found, alone, strict=True)]
