"""`doit profile`: where the time of a prompt and of a token goes.

The runtime measures. This command writes a page and a trace, adds the estimate to what an NPU or its simulator did, and
with `against=FILE` compares with another profile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from doit.exceptions import TaskFailed

from llama_npu2.cli.profile import FORMAT, described
from llama_npu2.errors import UserError
from llama_npu2.schema import Check, Invalid, list_of, load_json, mapping, positive, record, string, text, whole
from stages.commands.runtime import captured_runtime, runtime_arguments
from stages.engine.files import write_atomic
from stages.engine.places import CONFIG
from stages.graph import Build
from stages.model.families import read_config
from stages.model.grouping import programs

NAME = "profile"
"""The name of the report's directory, and of the files in it."""


def run(build: Build) -> TaskFailed | None:
    """Measure, write the report, and print its tables. Raises UserError."""
    options = build.options
    other = read_profile(Path(options.against)) if options.against else None
    measured = captured_runtime(runtime_arguments(NAME, build, replace(options, json=True), options.prompt))
    if isinstance(measured, TaskFailed):
        return measured
    found = json.loads(measured)
    if build.target.static:
        found["estimate"] = estimates(build, {name for phase in found["phases"] for name in phase["calls"]})
    page = write_report(found, build.report(NAME), other)
    print(json.dumps(found) if options.json else f"{described(found)}\n\n{page}")
    return None


def write_report(found: Mapping[str, Any], directory: Path, other: Mapping[str, Any] | None = None) -> Path:
    """Write JSON, trace and page of a profile, and return the path of the page."""
    # They load jinja2 and protobuf.
    from stages.reports.perfetto_trace import trace
    from stages.reports.profile_page import profile_page

    write_atomic(directory / f"{NAME}.json", json.dumps(found).encode())
    page = directory / f"{NAME}.html"
    profile_page(found, other).write(page)
    write_atomic(directory / f"{NAME}.pftrace", trace(found))  # last: it takes a package of an extra
    return page


def estimates(build: Build, names: set[str]) -> dict[str, Any]:
    """Return the estimate of a call of each device program among `names`: `milliseconds` and `launches`."""
    from stages.estimate import price
    from stages.targets.npu2.modules import build_module

    config = read_config(build.directory / CONFIG)
    grouping = build.whole_grouping
    entries = programs(config, grouping, build.buckets, build.policy, build.positions)
    return {
        program.name: price.description(build_module(program, config.dimensions()))
        for program in entries
        if program.name in names and not program.host
    }


def read_profile(path: Path) -> dict[str, Any]:
    """Read and check a `profile.json` of another run. Raises UserError."""
    try:
        found: dict[str, Any] = load_json(path.read_bytes())
        _PROFILE(found)
    except OSError as error:
        raise UserError(f"against={path}: {error.strerror}: give a profile.json that doit profile wrote") from None
    except ValueError as error:
        raise UserError(f"against={path} is not a profile ({error}): give one that doit profile wrote") from None
    return found


_MOST = 1e18


def _number(value: Any) -> None:
    """Check that a value is a number from 0 to `_MOST`."""
    if type(value) not in (int, float) or not 0 <= value <= _MOST:
        raise Invalid(value, f"a number from 0 to {_MOST:g}")


_COUNT = whole(0, 1 << 40)
_PART: Check = record(
    {"kind": string, "name": string, "calls": _number, "seconds": _number},
    {"program": string, "layer": _COUNT, "launch": _COUNT}
    | dict.fromkeys(("waited", "busy", "bytes", "operations", "runs"), _number),
)
_PHASE: Check = record(
    {
        "name": text("prompt|token|step of [0-9]{1,4} sequences", "prompt, token or step of N sequences"),
        "rows": _COUNT,
        "position": _COUNT,
        "seconds": list_of(_number, least=1),
        "mean": positive,
        "parts": list_of(_PART),
    }
)
_PROFILE: Check = record(
    {
        "format": whole(FORMAT, FORMAT),
        "machine": record(dict.fromkeys(("model", "device", "cpu"), string)),
        "peaks": mapping(string, positive),
        "phases": list_of(_PHASE, 2, 64),
        "series": list_of(list_of(_number, 3, 3), least=1),
    }
)
"""The parts of another profile that are read."""
