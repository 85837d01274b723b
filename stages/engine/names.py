"""Names that people type."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def suggestion(name: str, known: Sequence[str], alike: float = 0.5) -> str:
    """What to say of a name that is not known: the nearest one, if it is at least so `alike` (0 to 1), or all."""
    close = difflib.get_close_matches(name, known, 1, alike)
    return f"did you mean {close[0]}?" if close else f"one of {', '.join(known)}"
