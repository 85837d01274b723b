"""What `sandbox.py` and `renderer.py` say to each other.

A message is `HEADER` bytes, which say how long its content is, and the content. Those of the renderer begin with one
byte more, the outcome. The first message to the renderer is a `Setup`, each other one is a `Request`. The renderer says
once that it started, once how the template compiled, and then how each rendering went.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

HEADER = 8
"""Bytes that say how long the content of a message is, the lowest first."""
DONE, REFUSED, FAILED = b"+", b"!", b"-"
"""Outcomes: it worked, the template called `raise_exception`, something else went wrong."""
LONGEST_ERROR = 1000
"""Characters of an error."""
OUT_OF_MEMORY = 77
"""Exit status of a renderer that met the limit of its memory."""


class Setup(TypedDict):
    """What the renderer is for, and its limits: `longest` in seconds of CPU time per request, the others in bytes."""

    source: str
    special_tokens: dict[str, str]
    longest: float
    most_memory: int
    most_added: int


class Request(TypedDict):
    """One rendering. `reply`: whether the text ends where the assistant's reply begins."""

    messages: Sequence[Any]
    reply: bool


def header(content: bytes) -> bytes:
    """What goes before a content."""
    return len(content).to_bytes(HEADER, "little")


def encoded(text: str) -> bytes:
    """A text that may hold halves of characters, as JSON may."""
    return text.encode("utf-8", "surrogatepass")


def decoded(content: bytes) -> str:
    """Raises UnicodeDecodeError."""
    return content.decode("utf-8", "surrogatepass")


def most_text(most_added: int, request: int) -> int:
    """Bytes that the answer to a request of so many bytes has at most."""
    return most_added + 2 * request
