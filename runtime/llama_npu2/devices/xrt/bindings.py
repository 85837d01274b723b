"""Imports XRT's Python bindings, and turns their exceptions into errors of one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from llama_npu2.errors import UserError

FAILURES = (RuntimeError, OSError, MemoryError, IndexError)
"""The exceptions into which the bindings turn those of C++."""


TOO_OLD = "the installed XRT cannot load ELF programs from Python: see doit doctor"


def import_pyxrt() -> Any:
    """Return the module. Raises UserError if it is missing or too old."""
    try:
        import pyxrt
    except ImportError as error:
        raise UserError(
            f"target npu2 needs XRT's Python bindings ({error}): install XRT and run its setup.sh, see doit doctor"
        ) from None
    if not hasattr(pyxrt, "ext"):
        raise UserError(TOO_OLD)
    return pyxrt


@contextlib.contextmanager
def failures(what: str, remedy: str = "see dmesg and doit doctor") -> Iterator[None]:
    """Turn an exception of the bindings into a UserError: `what` failed, the exception's first line, `remedy`."""
    try:
        yield
    except FAILURES as error:
        raise UserError(f"{what}: {first_line(error)}: {remedy}") from None


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, or the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
