"""`doit fleet FILE`: build, verify, push and measure every entry of a catalogue; write a page of what there is.

A catalogue is a TOML file of `[[build]]` tables with variables of `doit compile`, each a value or a list of values; a
table stands for every combination of them. What is done already is not done again. An entry that fails stops no other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from doit.exceptions import TaskFailed

from llama_npu2 import trust
from llama_npu2.errors import UserError, reason
from llama_npu2.schema import load_json
from stages.engine.code import Code
from stages.engine.digests import Digests
from stages.engine.files import content_sha256, write_atomic
from stages.engine.places import MANIFEST, ROOT, STORE
from stages.graph import Build
from stages.graph.build import LOCAL
from stages.graph.options import parse_options
from stages.graph.trial import complaint, times
from stages.reports import fleet_page
from stages.sharing.provenance import verified

AT_ONCE = 4
"""Entries that are built at the same time where others do the work."""
_FOR_EACH = ("on", "cache", "include", "artifacts")
"""Variables of this command that each entry's commands get."""


def run(build: Build, *names: str) -> TaskFailed | None:
    """Bring a catalogue up to date, and write its page. Raises UserError."""
    if len(names) != 1:
        raise UserError("doit fleet takes one catalogue, as in doit fleet catalogue.toml")
    options, path = build.options, Path(names[0])
    entries = read_catalogue(path, {name: value for name in _FOR_EACH if (value := getattr(options, name))})
    directory = Path(options.output) if options.output else Path(options.artifacts).parent / "reports/fleet"
    record = directory / f"{path.stem}.json"
    with Catalogue(entries, _known(record), options.remote, options.measure) as catalogue:
        rows = catalogue.brought_up_to_date(AT_ONCE if options.on else 1)
    write_atomic(record, (json.dumps(rows, indent=1) + "\n").encode())
    page = directory / f"{path.stem}.html"
    fleet_page.page(path.name, rows).write(page)
    missing = [f"{row['artifact']}: {row['why']}" for row in rows if row["why"]]
    print(json.dumps(rows) if options.json else f"{len(rows) - len(missing)} of {len(rows)} entries are done: {page}")
    return TaskFailed(f"{len(missing)} of {len(rows)} entries are not done: {'; '.join(missing)}") if missing else None


def read_catalogue(path: Path, shared: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables of each entry. `shared`: those that all get. Raises UserError."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError | UnicodeDecodeError) else error
        raise UserError(f"{path} cannot be read ({why}): give a TOML file of [[build]] tables") from None
    builds = tables.pop("build", None)
    if tables or not builds or not isinstance(builds, list):
        raise UserError(f"{path}: {next(iter(tables), 'it')} is no list of [[build]] tables, which it must have alone")
    entries = []
    for table in builds:
        values = [value if isinstance(value, list) else [value] for value in table.values()]
        for chosen in itertools.product(*values):
            entry = {**dict(zip(table, map(_text, chosen), strict=True)), **shared}
            try:
                parse_options(entry, ["compile"])
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
            entries.append(entry)
    return list({json.dumps(entry, sort_keys=True): entry for entry in entries}.values())


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _known(path: Path) -> dict[str, Any]:
    """Return what the last run wrote, by artifact; nothing if that is missing or damaged."""
    try:
        return {row["artifact"]: row for row in load_json(path.read_bytes())}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class Catalogue(contextlib.ExitStack):
    """The entries of a catalogue, and what the last run wrote about each."""

    def __init__(
        self, entries: Sequence[Mapping[str, str]], known: Mapping[str, Any], remote: str, measure: bool
    ) -> None:
        super().__init__()
        self._entries, self._known, self._remote, self._measure = entries, known, remote, measure
        self._fleet: Any = None
        """Workers that measure, from the first time on that some are asked to."""
        self._environment: Mapping[str, str] = {}
        self._local: Mapping[str, str] = {}
        """The variables of commands for which a cluster was started here."""
        self._digests: Digests | None = None
        self._code: Code | None = None
        self._current: dict[str, Build] = {}
        """The builds that are current, by their entries."""

    def brought_up_to_date(self, at_once: int) -> list[dict[str, Any]]:
        """Return a row for each entry, after all that can be done is done."""
        stale = [entry for entry in self._entries if not self._is_current(entry)]
        if stale and stale[0].get("on") == LOCAL:
            self._start_workers(Path(parse_options(stale[0]).artifacts).absolute(), stale[0].get("cache", ""))
        with ThreadPoolExecutor(at_once) as pool:
            try:
                errors = list(pool.map(lambda entry: self._doit("compile", entry), stale))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        failed = {json.dumps(entry): error for entry, error in zip(stale, errors, strict=True) if error}
        return [self._row(entry, failed.get(json.dumps(entry), "")) for entry in self._entries]

    def _start_workers(self, artifacts: Path, cache: str) -> None:
        """Start one cluster for all commands. Raises UserError."""
        # Nothing of it is imported without on=.
        from stages.graph.worker import crew_here
        from stages.sharing.cluster import Cluster, Lost

        store = cache or str(artifacts / STORE)
        cluster = Cluster(LOCAL, lambda: crew_here(store, artifacts))
        self.callback(cluster.close)
        try:
            cluster.connect()
        except Lost as error:
            raise UserError(f"on={LOCAL}: {error}") from None
        self._local = {"on": cluster.place.address, "cache": store}
        self._environment = cluster.environment

    def _doit(self, command: str, entry: Mapping[str, str]) -> str:
        """Run a command for an entry; return the line with which it failed, nothing if it did not."""
        return _doit(command, {**entry, **self._local}, self._environment)

    def _build(self, entry: Mapping[str, str]) -> Build:
        """Return an entry's build; all share what they know of files."""
        build = Build(parse_options({name: value for name, value in entry.items() if name != "on"}, ["compile"]))
        if self._digests is None or self._code is None:
            self._digests, self._code = build.digests, build.project.code
        build.digests = self._digests
        build.project.code = self._code
        return build

    def _is_current(self, entry: Mapping[str, str]) -> bool:
        try:
            build = self._build(entry)
            if (build.directory / MANIFEST).is_file() and all(step.is_current() for step in build.steps.values()):
                self._current[json.dumps(entry)] = build
                return True
        except UserError:
            pass  # building it says why
        return False

    def _row(self, entry: Mapping[str, str], error: str) -> dict[str, Any]:
        """Verify, push and measure an entry that is built; return what there is to say of it."""
        try:
            build = self._current.get(json.dumps(entry)) or self._build(entry)
            row = {"artifact": build.artifact, "entry": dict(entry), **dict.fromkeys(_FIELDS), "why": error}
        except UserError as refusal:
            why = str(refusal).removeprefix(f"model={entry.get('model')}: ")
            return {"artifact": _named(entry), "entry": dict(entry), **dict.fromkeys(_FIELDS), "why": why}
        if error:
            return row
        directory, before = build.directory, self._known.get(build.artifact, {})
        row["manifest"] = manifest = content_sha256(directory / MANIFEST)
        same = before.get("manifest") == manifest
        row["bytes"] = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        row["seconds"] = sum(build.project.durations.last.values())
        problems = []
        if verified(directory) is None and all(map(find_spec, ("torch", "transformers"))):
            problems.append(self._doit("verify", entry))
        if (proof := verified(directory)) is not None:
            row["verified"], lost = bool(proof["passed"]), proof["results"][0]
            row["divergence"], row["perplexity"] = lost.get("divergence"), lost.get("perplexity")
        row["pushed"] = before.get("pushed") if same else None
        if self._remote and row["pushed"] != self._remote:
            problems.append(problem := self._doit("push", {**entry, "remote": self._remote}))
            row["pushed"] = None if problem else self._remote
        row["measured"] = before.get("measured") if same else None
        if self._measure and row["measured"] is None:
            try:
                row["measured"] = self._measured(build, entry)
            except UserError as refusal:
                problems.append(f"not measured: {refusal}")
        row["signer"] = _signer(directory)
        row["why"] = "; ".join(filter(None, problems))
        return row

    def _measured(self, build: Build, entry: Mapping[str, str]) -> dict[str, Any]:
        """Return the times of a short reply on a worker that has the device, else here. Raises UserError."""
        here = build.target.runs_here()
        if entry.get("on", LOCAL) != LOCAL:
            from stages.graph.measuring import on_a_worker
            from stages.sharing.cluster import Lost

            if self._fleet is None:
                self._fleet = Build(parse_options(entry)).project.shared
                self.callback(self._fleet.close)
            shareable = build.is_shareable(build.steps["manifest"])
            try:
                measured = on_a_worker(build.project, build.target.device, shareable, self._fleet)
            except (Lost, UserError) as error:
                if not here:
                    raise UserError(str(error)) from None
                measured = None
            if measured:
                return {**asdict(measured.times), "where": measured.where}
        if not here:
            raise UserError(f"neither this machine nor a worker has the device {build.target.device}")
        return {**asdict(times(build.directory)), "where": os.uname().nodename}


_FIELDS = ("manifest", "bytes", "seconds", "verified", "divergence", "perplexity", "pushed", "measured", "signer")


def _named(entry: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in entry.items() if name not in _FOR_EACH)


def _signer(directory: Path) -> str:
    """Return who vouches for a directory."""
    try:
        return trust.vouching(directory)
    except UserError as error:
        return f"nobody whom you trust: {error}"


def _doit(command: str, entry: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Run a command for an entry; return the line with which it failed, nothing if it did not."""
    words = [sys.executable, "-m", "doit", command, *(f"{name}={value}" for name, value in entry.items())]
    print(f"doit {' '.join(words[3:])}\n", end="", file=sys.stderr, flush=True)
    run = subprocess.run(words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    return complaint(run) if run.returncode else ""
