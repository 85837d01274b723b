"""The one exception for mistakes a user can mend."""


class UserError(Exception):
    """One line that says what is wrong, where, and what to do. Shown without a traceback, exit status 1."""

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """One line that does nothing to a terminal: names may come from elsewhere, with control characters in them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
