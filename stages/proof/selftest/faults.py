"""Names what a broken rung means and what to try; the texts are in `faults.toml`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from llama_npu2.frozen import frozen


@frozen
class Fault:
    """A cause, explained."""

    meaning: str
    remedy: str


class Failure(Exception):
    """A rung breaks. `cause` names an entry of the table, `detail` has numbers or a tool's message."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


DEVICE, CONTEXT, KERNEL, TILE, LISTS = "device", "context", "first kernel", "tile function", "run list"
SWITCH, TIMES, HEAP, PROGRAM = "context switch", "times", "heap", "program"
LAYER, PROMPT, TOKEN, WATCHDOG = "layer", "prompt", "token", "watchdog"
"""Rungs."""

SEVERAL = {"token": "tokens at once", "sequence": "sequences at once"}
"""Rungs of programs that take several rows, by what a row is of."""

_ANY = "any"
"""Stands for rungs without an entry of their own."""

FAULTS = {
    (rung, cause): Fault(*texts)
    for rung, causes in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
    for cause, texts in causes.items()
}
"""The table, by (rung, cause)."""


def fault(rung: str, cause: str) -> Fault:
    """Return the rung's own entry, or that for any rung."""
    return FAULTS.get((rung, cause)) or FAULTS.get((_ANY, cause)) or FAULTS[_ANY, "failed"]


_MESSAGES = (
    ("timeout", r"TIMEOUT|did not finish|timed out"),
    ("stuck", r"CREATE_HWCTX.*(err=-22\b|Invalid argument)"),
    ("gone", r"No such device|err=-19\b|Could not open device"),
    ("no memory", r"Cannot allocate memory|err=-12\b|No space left|err=-28\b|no .* more beside"),
    ("no bindings", r"needs XRT's Python bindings"),
    ("old bindings", r"cannot load ELF|incompatible constructor"),
    ("no kernel", r"no ELF found with|Unable to find group|kernel instance"),
)


def cause_of(message: str) -> str:
    """Return the cause that an error line of the runtime or of the driver points to."""
    return next((cause for cause, pattern in _MESSAGES if re.search(pattern, message)), "failed")
