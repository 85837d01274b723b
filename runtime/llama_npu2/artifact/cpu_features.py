"""The instruction sets of this machine's CPU, by the names that Linux gives them."""

from __future__ import annotations

import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

_COMPILED_FOR = re.compile(r"(s?sse|avx|fma|f16c|bmi|abm|lzcnt|popcnt|movbe|adx|gfni|amx|asimd|sve|sme|i8mm|bf16)\w*")
"""Names of the features that a compiler uses unasked; a CPU without one of the others need not be refused."""


def cpu_features() -> list[str]:
    """Return the sorted names of the features; none where the kernel does not list them."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return []
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return sorted(name for name in (line[1].split() if line else ()) if _COMPILED_FOR.fullmatch(name))
