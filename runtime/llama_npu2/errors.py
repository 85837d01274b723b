"""The exception for mistakes that a user can mend, and how texts of errors are shortened."""

from collections.abc import Sequence

REMEDY = "run doit compile or copy the directory again"
"""The remedy that errors name for an artifact directory that differs from what was built."""

PROGRAM = program = "llama-npu2"
"""The command line that works here, for messages: an exported file runs under a name of its own."""

_SHOWN = 60
"""Number of characters of a value that a message shows."""

CLOSED = 141
"""Exit status when the reader of the output has closed it: that of a program in a shell that SIGPIPE ended."""


class UserError(Exception):
    """One line that says what is wrong, where, and what to do. Shown without a traceback, exit status 1."""

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Return text with control characters escaped, so that a name from elsewhere cannot control a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def closest(name: str, names: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar of `names` if its similarity, from 0 to 1, reaches `cutoff`."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, names, 1, cutoff)), None)


def suggestion(name: str, names: Sequence[str], cutoff: float = 0.5) -> str:
    """Return the remedy for an unknown name: a question for the nearest name, or a list of all.

    Args:
        name: the unknown name.
        names: all names.
        cutoff: the similarity, from 0 to 1, that the nearest name must reach.
    """
    close = closest(name, names, cutoff)
    return f"did you mean {close}?" if close else f"one of {', '.join(names)}"


def shortened(text: str) -> str:
    """Return a text as messages show values that may be long."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, at most 200 characters of it, or the name of its type."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def unwritable(error: OSError) -> str:
    """Return the message for output that cannot be written."""
    return f"the output cannot be written: {error.strerror}: make room, or write it elsewhere"


def unreadable(error: PermissionError) -> str:
    """Return the message for a file that this user may not use."""
    return f"{error.filename}: {error.strerror}: choose a place that you may use, or have it opened for you"


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Return why a text file cannot be read, without its name, which the message says already."""
    return error.strerror or "no reason is known" if isinstance(error, OSError) else "it is not text in UTF-8"
