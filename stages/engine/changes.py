"""What is not as it was when a step ran: the thing itself, what it was, what it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

NOTHING = object()
"""In place of a value that is not there."""

_SHOWN = 60
"""Characters of a value in a sentence."""


@dataclass(frozen=True)
class Change:
    """A reason to run. `kind`: receipt, code, params, tool, input, output or trust. `what`: the file's label, where it
    is about one. `was`, `now`: values of that part of the key, or a file's digest (None: there is no such file).
    `text`: in a few words."""

    kind: str
    text: str
    what: str = ""
    was: Any = None
    now: Any = None


def key_change(part: str, was: Any, now: Any) -> Change:
    """Of a part of a step's key."""
    return Change(part, f"its {part} changed", "", was, now)


def input_change(label: str, was: Any, now: str | None) -> Change:
    """Of a file that a step reads."""
    noun = "header" if label.endswith(".h") else "input"
    return Change("input", f"{noun} {label} {'is missing' if now is None else 'changed'}", label, was, now)


def output_change(label: str, was: str, now: str | None, sizes: tuple[int | None, int]) -> Change:
    """Of a file that a step wrote. `sizes`: its bytes as the step left it, where that is known, and as it is."""
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
    """Where two JSON values differ: the path to it (`programs.decode.buckets[1]`) and both values, NOTHING where one
    has none. What is short is shown as a whole."""
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
    """A value as JSON, in one line."""
    return "nothing" if value is NOTHING else json.dumps(value, ensure_ascii=False)


def plain(text: str) -> str:
    """For a terminal: labels come with directories that others made, and may hold what moves the cursor."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


def abridged(value: Any) -> str:
    """The same, the end of what is long left out."""
    text = shown(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
