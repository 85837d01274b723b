"""The report that a user attaches to a bug report: one JSON file, and the same as text.

It does not say who or where: it holds no user name, host name or path.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import socket
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_npu2.cli.table import fitted
from llama_npu2.errors import UserError
from stages.engine.files import write_atomic
from stages.engine.places import ROOT
from stages.proof.selftest.ladder import Outcome, Rung

FORMAT = 1
FILE = "report.json"
PAGE = "report.txt"

_PATH = re.compile(r"https?://\S+|(?<![\w.])~?(?:/[^\s/:;,'\"()<>]+)+/?")
"""A path, or the address of a page, which stays."""


def report(found: Outcome, machine: Iterable[Mapping[str, str]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report for JSON. `machine` are rows of doctor's table, `about` says what was run."""
    content = {
        "format": FORMAT,
        "about": dict(about),
        "machine": [dict(row) for row in machine],
        "rungs": [asdict(rung) for rung in found.rungs],
        "measured": found.measured,
        "observed": found.observed,
        "seconds": found.times,
    }
    return scrubbed(content, names_of_here())


def names_of_here() -> list[str]:
    """Return what no report may hold: names of the user and the machine, and paths of this checkout."""
    host = socket.gethostname()
    names = [*map(str, (Path.cwd(), Path.home(), ROOT)), host, host.partition(".")[0], Path.home().name]
    with contextlib.suppress(KeyError, OSError):
        names.append(getpass.getuser())
    return sorted({name for name in names if name.strip("/")}, key=len, reverse=True)


def scrubbed(value: Any, names: Iterable[str]) -> Any:
    """Return the value without paths, of which the last part stays, and without names that stand as words."""
    if isinstance(value, str):
        for name in names:
            value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "someone", value)
        return _PATH.sub(_last_part, value)
    if isinstance(value, Mapping):
        return {key: scrubbed(inner, names) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(inner, names) for inner in value]
    return value


def _last_part(path: re.Match[str]) -> str:
    return path[0] if path[0].startswith("http") else path[0].rstrip("/").rpartition("/")[2]


def write(directory: Path, content: Mapping[str, Any]) -> Path:
    """Write both files, and return the JSON's path. Raises UserError."""
    path = directory / FILE
    try:
        write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())
        write_atomic(directory / PAGE, page(content).encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}: give artifacts= a directory that can") from None
    return path


def page(content: Mapping[str, Any]) -> str:
    """Return a report as text."""
    rungs = [Rung(**rung) for rung in content["rungs"]]
    parts = [summary(rungs), _about(content["about"]), _rungs(rungs), _numbers("measured", content["measured"])]
    parts += [_numbers("observed", content["observed"]), _machine(content["machine"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(rungs: Iterable[Rung]) -> str:
    """Return how it ended; for each rung that is broken or limited, what this means and what to try."""
    listed = list(rungs)
    broken = next((rung for rung in listed if rung.cause and rung.result == "broken"), None)
    end = (
        f"broken at {broken.rung}: {broken.what}"
        if broken
        else f"all {len(listed)} checks passed"
        if all(rung.result == "passed" for rung in listed)
        else _counts(listed)
    )
    lines = [end]
    for rung in listed:
        if rung.cause:
            lines += [f"{rung.rung}, {rung.what}: {rung.result}: {rung.cause}: {rung.detail}"]
            lines += [f"  meaning: {rung.meaning}", f"  try: {rung.remedy}"]
    return "\n".join(lines)


def _counts(rungs: list[Rung]) -> str:
    """Return how many of the checks had each result, none of which is broken."""
    counts = Counter(rung.result for rung in rungs)
    return f"no check failed: {', '.join(f'{count} {result}' for result, count in counts.items())}"


def _about(about: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in about.items())


def _rungs(rungs: Iterable[Rung]) -> str:
    columns = ["rung", "result", ">s", "what", "seen"]
    shorten = textwrap.shorten
    rows = [(r.rung, r.result, f"{r.seconds:.2f}", shorten(r.what, 48), shorten(r.detail, 80)) for r in rungs]
    return fitted(columns, rows)


def _numbers(title: str, values: Mapping[str, Any], indent: str = "  ") -> str:
    lines = [f"{title}:"] if values else []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines.append(indent + _numbers(name, value, indent + "  "))
        else:
            lines.append(f"{indent}{name}: {f'{value:.6g}' if isinstance(value, float) else value}")
    return "\n".join(lines)


def _machine(rows: Iterable[Mapping[str, str]]) -> str:
    columns = ["machine", "found", "version"]
    return fitted(columns, [(row["what"], row["found"], row["version"]) for row in rows])
