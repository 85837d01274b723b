"""The differences since a step ran: what changed, its old value, and its new value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from llama_npu2.frozen import frozen

NOTHING = object()
"""Stands for a value that is missing."""

_SHOWN = 60
"""Most characters of a value in a sentence."""


@frozen
class Change:
    """A reason to run a step."""

    kind: str
    """`receipt`, `code`, `params`, `tool`, `input`, `output` or `trust`."""
    text: str
    """The reason in a few words."""
    what: str = ""
    """The label of the file that changed, if the reason is a file."""
    was: Any = None
    """The old value of that part of the key, or the file's digest; None if there was no such file."""
    now: Any = None


def key_change(part: str, was: Any, now: Any) -> Change:
    """Return the change of a part of a step's key."""
    return Change(part, f"its {part} changed", "", was, now)


def input_change(label: str, was: Any, now: str | None) -> Change:
    """Return the change of a file that a step reads."""
    noun = "header" if label.endswith(".h") else "input"
    return Change("input", f"{noun} {label} {'is missing' if now is None else 'changed'}", label, was, now)


def output_change(label: str, was: str, now: str | None, sizes: tuple[int | None, int]) -> Change:
    """Return the change of a file that a step wrote.

    Args:
        sizes: its bytes when the step had written it, None if they are not known, and its bytes now.
    """
    then, here = sizes
    if now is None:
        text = "is missing"
    elif then is None:
        text = "was altered"
    elif here == then:
        text = f"was altered: it has its {then} bytes, not all as they were"
    else:
        text = f"was {'truncated' if here < then else 'extended'} from {then} to {here} bytes"
    return Change("output", f"output {label} {text}", label, was, now)


def differences(was: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences of two JSON values: the path to each (`programs.decode.buckets[1]`) and both values.

    A value that only one side has differs from `NOTHING`. A short list is one difference, as a whole.
    """
    if was == now:
        return
    short = max(len(shown(was)), len(shown(now))) <= _SHOWN
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in sorted({*was, *now}):
            yield from differences(was.get(key, NOTHING), now.get(key, NOTHING), f"{path}.{key}" if path else key)
    elif isinstance(was, list) and isinstance(now, list) and not (short and path):
        for index, (before, after) in enumerate(zip_longest(was, now, fillvalue=NOTHING)):
            yield from differences(before, after, f"{path}[{index}]")
    else:
        yield path, was, now


def shown(value: Any) -> str:
    """Return a value as JSON, in one line."""
    return "nothing" if value is NOTHING else json.dumps(value, ensure_ascii=False)


def plain(text: str) -> str:
    """Return text with unprintable characters escaped.

    Labels come with directories that others made, and may contain characters that move a terminal's cursor.
    """
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def abridged(value: Any) -> str:
    """Return a value as JSON in one line, cut where it is long."""
    text = shown(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
