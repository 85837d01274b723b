"""Runs a checkpoint's template, somebody else's program: what it sees is harmless (jinja's sandbox), and it ends."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

LONGEST = 2.0
"""Seconds of this thread that a template may take. Those of checkpoints take milliseconds."""
MOST_MEMORY = 256 << 20
"""Bytes by which a template may let the process grow."""
_LARGEST = 1 << 20
"""Of a number that makes something as long as it says."""
_WIDTH = re.compile(r"\d{1,4000}")
_PADDING = ("center", "indent", "format", "tojson")
"""Filters whose result is as long as an argument says."""


class Sandbox(ImmutableSandboxedEnvironment):
    """As transformers sets it up, but that no single operation, which `bounded` cannot interrupt, takes long."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self) -> None:
        # Constants are computed when it is rendered, too.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False)
        self.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        for name in _PADDING:
            self.filters[name] = _modest(self.filters[name])

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_numbers(*args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        found = super().wrap_str_format(value)
        if found is not None:
            _check_width(value.__self__)
        return found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _check_width(left)
        elif _size(operator, left, right) > _LARGEST:
            raise SecurityError(f"its {operator} makes too much")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """About what * or ** makes: bits of a number, elements of anything else."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits * right if operator == "**" else bits + right.bit_length()
    counts = [value if isinstance(value, int) else len(value) for value in (left, right) if _counts(value)]
    return counts[0] * counts[1] if operator == "*" and len(counts) == 2 else 0


def _counts(value: Any) -> bool:
    return isinstance(value, int) or hasattr(value, "__len__")


def _modest(filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(*args, *kwargs.values())
        if filter.__name__ == "do_format":
            _check_width(args[0])
        return filter(*args, **kwargs)

    return checked


def _check_width(form: Any) -> None:
    """Of what a format pads to."""
    if isinstance(form, str) and any(int(width) > _LARGEST for width in _WIDTH.findall(form)):
        raise SecurityError("its format is too wide")


def _check_numbers(*values: Any) -> None:
    if any(isinstance(value, int) and value > _LARGEST for value in values):
        raise SecurityError(f"it calls something with a number above {_LARGEST}")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise SecurityError in what runs too long or takes too much memory, between two lines of Python."""
    stop = time.thread_time() + LONGEST
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + (MOST_MEMORY >> 10)

    def look(frame: Any, event: str, argument: Any) -> Any:
        if time.thread_time() > stop:
            raise SecurityError(f"it takes longer than {LONGEST:g} s")
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > most:
            raise SecurityError(f"it takes more than {MOST_MEMORY >> 20} MiB")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
