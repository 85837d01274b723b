"""The messages between `sandbox.py` and `renderer.py`.

A message is `HEADER` bytes, which say how long its content is, and the content. Those of the renderer begin with one
byte more, the outcome. The first message to the renderer is a `Setup`, each other one is a `Request`. The renderer
answers once when it has started, once when the template is compiled, and then to each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

HEADER = 8
"""Number of bytes that say how long the content of a message is, the lowest byte first."""
DONE, REFUSED, FAILED = b"+", b"!", b"-"
"""Outcomes: it worked, the template called `raise_exception`, something else went wrong."""
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
    reply: bool
    """Whether the text ends where the assistant's reply begins."""


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
