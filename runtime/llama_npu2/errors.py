"""The one exception for mistakes a user can mend."""

REMEDY = "run doit compile or copy the directory again"
"""For an artifact directory that is not what was built."""

program = "llama-npu2"
"""The command line that works here, for messages: an exported file runs under a name of its own."""

CLOSED = 141
"""Exit status where whoever read the output has gone: what a shell says of a program that SIGPIPE ended."""


class UserError(Exception):
    """One line that says what is wrong, where, and what to do. Shown without a traceback, exit status 1."""

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """One line that does nothing to a terminal: names may come from elsewhere, with control characters in them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def first_line(error: BaseException) -> str:
    """What an error of a library says, short."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
