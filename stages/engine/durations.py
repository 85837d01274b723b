"""How long steps took when they ran last, for people: nothing depends on it, and no artifact holds it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from llama_npu2.artifact.regular import read_regular
from llama_npu2.errors import UserError
from llama_npu2.schema import load_json
from stages.engine.files import write_atomic
from stages.engine.lock import ProcessLock
from stages.engine.places import lock_file


class Durations:
    """Of one artifact directory, in a JSON file of all, which may be deleted at any time."""

    def __init__(self, artifacts: Path, directory: Path) -> None:
        self._path = artifacts / ".durations.json"
        self._directory = directory.relative_to(artifacts).as_posix()
        self._lock = lock_file(artifacts, "durations")

    @cached_property
    def last(self) -> Mapping[str, float]:
        """Seconds by step, as they were known when this was asked first."""
        return self._seconds()

    def _seconds(self) -> dict[str, float]:
        known = self._all().get(self._directory)
        pairs = known.items() if isinstance(known, dict) else ()
        return {step: seconds for step, seconds in pairs if isinstance(seconds, (int, float)) and 0 <= seconds < 1e9}

    def note(self, step: str, seconds: float) -> None:
        """Remember that of a step. Where that cannot be written, it is not known."""
        with contextlib.suppress(OSError, UserError):
            with ProcessLock(self._lock):  # a new one: steps run in threads and forks
                every = self._all() | {self._directory: self._seconds() | {step: round(seconds, 3)}}
                write_atomic(self._path, json.dumps(every, indent=1, sort_keys=True).encode())

    def _all(self) -> dict[str, object]:
        try:
            known = load_json(read_regular(self._path))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def clock(seconds: float) -> str:
    """`4.2 s`, `1:07`, `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
