"""Opens and checks an artifact directory. Knows the manifest's format, nothing of how it came to be."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.cpu_features import cpu_features
from runtime.errors import UserError

FORMAT = 1
"""Raised whenever an older runtime could misread a newer manifest."""

_SECTIONS = ("model", "target", "buffers", "programs", "plans", "files")


@dataclass(frozen=True)
class Manifest:
    """`manifest.json` of an opened artifact directory."""

    directory: Path
    model: Mapping[str, Any]
    target: Mapping[str, Any]
    buffers: Mapping[str, Mapping[str, Any]]
    programs: Mapping[str, Mapping[str, Any]]
    plans: Mapping[str, list[Mapping[str, Any]]]
    files: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, directory: str | Path) -> Manifest:
        """Read the manifest and check format, machine and that every file has its size. Raises UserError."""
        root = Path(directory)
        manifest = cls(root, **_read(root))
        manifest._check_machine()
        manifest._check_files()
        manifest._check_plans()
        return manifest

    def weights_read(self, call: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Name and shape of the weights that a call of a plan reads in full; an embedding only picks rows."""
        specs = {name: self.buffers[name] for name in call["buffers"] if "@" not in name}
        weights = {name: tuple(spec["shape"]) for name, spec in specs.items() if spec["kind"] == "weight"}
        return {} if "tokens" in specs else weights

    def _check_machine(self) -> None:
        here = {"system": sys.platform, "machine": platform.machine()}
        built = {key: self.target.get(key) for key in here}
        if built != here:
            raise UserError(
                f"{self.directory} was built for {built['system']} {built['machine']}, this machine is "
                f"{here['system']} {here['machine']}: build it here with doit compile"
            )
        needed = self.target.get("features", ())
        if missing := sorted(set(needed) - set(cpu_features()) if needed else ()):
            raise UserError(
                f"{self.directory} was built for a CPU with {', '.join(missing)}, which this one does not have: "
                "build it here with doit compile"
            )

    def _check_plans(self) -> None:
        """Every call names a program and, slot by slot, buffers of this manifest."""
        for call in (call for calls in self.plans.values() for call in calls):
            program = self.programs.get(call["program"])
            unknown = [ref for ref in call["buffers"] if ref.partition("@")[0] not in self.buffers]
            if program is None or unknown or len(program["slots"]) != len(call["buffers"]):
                what = unknown[0] if unknown else call["program"]
                raise UserError(
                    f"{self.directory}/manifest.json: a plan calls for {what}, which is not there as it is "
                    "called: run doit compile or copy the directory again"
                )

    def _check_files(self) -> None:
        for name, entry in self.files.items():
            path = self.directory / name
            size = path.stat().st_size if path.is_file() else None
            if size != entry["size"]:
                state = "is missing" if size is None else f"has {size} bytes instead of {entry['size']}"
                raise UserError(f"{path} {state}: copy the directory again or run doit compile")


def _read(root: Path) -> dict[str, Any]:
    path = root / "manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is not a directory" if not root.is_dir() else "has no manifest.json, so it is not complete"
        raise UserError(f"{root} {what}: give an artifact directory made by doit compile") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): run doit compile or copy the directory again") from None
    version = content.get("format") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise UserError(f"{path} is not a manifest: run doit compile or copy the directory again")
    if version != FORMAT:
        remedy = "update llama-npu2" if version > FORMAT else "run doit compile"
        raise UserError(f"{path} has format {version}, this runtime reads format {FORMAT}: {remedy}")
    if missing := [section for section in _SECTIONS if not isinstance(content.get(section), dict)]:
        raise UserError(f"{path} lacks the section {missing[0]}: run doit compile or copy the directory again")
    return {section: content[section] for section in _SECTIONS}
