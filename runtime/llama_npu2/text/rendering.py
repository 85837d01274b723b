"""The messages between `sandbox.py` and `renderer.py`.

A message is `HEADER` bytes, which say how long its content is, and the content. Those of the renderer begin with one
byte more, the outcome. The first message to the renderer is a `Setup`, each other one is a `Request`. The renderer
answers once when it has started, once when the template is compiled, and then to each request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

HEADER = 8
"""Number of bytes that say how long the content of a message is, the lowest byte first."""
DONE, REFUSED, UNKNOWN, FAILED = b"+", b"!", b"?", b"-"
"""Outcomes: it worked, the template called `raise_exception`, it reads no such variable, something else went wrong."""
LONGEST_ERROR = 1000
"""Most characters of an error."""
OUT_OF_MEMORY = 77
"""Exit status of a renderer that reached its limit of memory."""


class Setup(TypedDict):
    """The renderer's template and limits."""

    source: str
    special_tokens: dict[str, str]
    longest: float
    """Seconds of CPU time for each request."""
    most_memory: int
    """Bytes of address space."""
    most_added: int
    """Bytes that a text may have beyond twice those of its request."""


class Request(TypedDict):
    """One rendering."""

    messages: Sequence[Any]
    tools: Sequence[Any] | None
    documents: Sequence[Any] | None
    variables: Mapping[str, Any]
    """Further variables of the template, by name."""
    if_read: Mapping[str, Any]
    """Variables that a template gets only if it reads them."""
    reply: bool
    """Whether the text ends where the assistant's reply begins."""
    controls: Mapping[str, bool]
    """The added tokens that the texts of all these spell out; whether each is a special one."""


def header(content: bytes) -> bytes:
    """Return the header of a message with this content."""
    return len(content).to_bytes(HEADER, "little")


def encoded(text: str) -> bytes:
    """Encode a text, which may hold lone surrogates, as JSON may."""
    return text.encode("utf-8", "surrogatepass")


def decoded(content: bytes) -> str:
    """Decode a text. Raises UnicodeDecodeError."""
    return content.decode("utf-8", "surrogatepass")


def most_text(most_added: int, request: int) -> int:
    """Return the most bytes that the answer to a request of `request` bytes may have."""
    return most_added + 2 * request


# Control tokens that the texts of messages spell out stand between two marks (private-use characters, as transformers
# has them), so that they can be told from those that the template writes.
_START, _END = "\U000f0000", "\U000f0001"
_FOUND = [rf"(?:{mark}|\\+U000f000{n}|\\+udb80\\+udc0{n})" for n, mark in enumerate((_START, _END))]
"""Patterns of a mark as it is, as Python's `repr` spells it, and as JSON does."""


def without_marks(text: str) -> str:
    """Return a text without the marks that somebody may have put into it."""
    return text.replace(_START, "").replace(_END, "")


def marked(value: Any, controls: Iterable[str]) -> Any:
    """Return a JSON value with marks around the control tokens in its texts and keys."""
    longest_first = sorted(controls, key=len, reverse=True)
    found = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return found.sub(f"{_START}\\g<0>{_END}", without_marks(value))
        if isinstance(value, dict):
            return {mark(key): mark(item) for key, item in value.items()}
        return [mark(item) for item in value] if isinstance(value, list) else value

    return mark(value)


def split_at_marks(text: str, controls: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a rendered text without marks, and whether each is a control token that a message spells out.

    A mark that has lost its other one separates texts, so that those around it cannot become a control token.
    """
    longest_first = sorted(controls, key=len, reverse=True)
    start, end = _FOUND
    parts = re.split(f"{start}({'|'.join(map(re.escape, longest_first))}){end}|{start}|{end}", text)
    return ((part, index % 2 == 1) for index, part in enumerate(parts) if part)
