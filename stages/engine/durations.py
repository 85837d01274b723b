"""The durations of steps when they ran last, for people: nothing depends on them, and no artifact holds them."""

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
from stages.engine.saving import Saving


class Durations:
    """The durations of one artifact directory, in a JSON file of all directories, which may be deleted at any time."""

    def __init__(self, artifacts: Path, directory: Path) -> None:
        self._path = artifacts / ".durations.json"
        self._directory = directory.relative_to(artifacts).as_posix()
        self._lock = lock_file(artifacts, "durations")
        self._noted: dict[str, float] = {}
        self._saving = Saving(self._save)

    @cached_property
    def last(self) -> Mapping[str, float]:
        """Seconds by step, as the file had them when this was first asked for."""
        return self._seconds()

    def _seconds(self) -> dict[str, float]:
        entry = self._all().get(self._directory)
        pairs = entry.items() if isinstance(entry, dict) else ()
        return {step: seconds for step, seconds in pairs if isinstance(seconds, (int, float)) and 0 <= seconds < 1e9}

    def note(self, step: str, seconds: float) -> None:
        """Write down the duration of a step soon (`Saving`), unless the file cannot be written."""
        self._noted[step] = round(seconds, 3)
        self._saving.soon()

    def save(self) -> None:
        """Write down now what was noted."""
        self._saving.now()

    def _save(self) -> None:
        if self._noted and self._path.parent.is_dir():
            with contextlib.suppress(OSError, UserError):
                with ProcessLock(self._lock):  # a new one, because steps run in threads and forks
                    entries = self._all() | {self._directory: self._seconds() | self._noted}
                    write_atomic(self._path, json.dumps(entries, indent=1, sort_keys=True).encode())

    def _all(self) -> dict[str, object]:
        try:
            entries = load_json(read_regular(self._path))
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}


def clock(seconds: float) -> str:
    """Return a duration as `4.2 s`, `1:07` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
