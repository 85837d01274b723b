"""Which instruction sets this machine's CPU has, by the kernel's names for them."""

from __future__ import annotations

import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

_COMPILED_FOR = re.compile(r"(s?sse|avx|fma|f16c|bmi|abm|lzcnt|popcnt|movbe|adx|gfni|amx|asimd|sve|sme|i8mm|bf16)\w*")
"""Names of what a compiler uses on its own; other features of a CPU are no reason to refuse one."""


def cpu_features() -> list[str]:
    """Sorted; empty where the kernel does not say."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return []
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return sorted(name for name in (line[1].split() if line else ()) if _COMPILED_FOR.fullmatch(name))
