"""Opens and checks an artifact directory. Knows the manifest's format, nothing of how it came to be."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llama_npu2.cpu_features import cpu_features
from llama_npu2.dtypes import DTYPES, nbytes
from llama_npu2.errors import UserError
from llama_npu2.storage import Directory, File, Listed, Storage
from llama_npu2.trust import LOCAL, SIGNATURE, check_trusted
from llama_npu2.trust.envelopes import MAX_BYTES

FORMAT = 4
"""Raised whenever an older runtime could misread a newer manifest."""

_SECTIONS = ("model", "target", "buffers", "programs", "plans", "files")


@dataclass(frozen=True)
class Weight:
    """A weight as a call reads it. `values`: how many a row of its input is multiplied with, none for a vector."""

    nbytes: int
    values: int


@dataclass(frozen=True)
class NpuProgram:
    """What submitting a program to the NPU needs to know of it."""

    kernel: str = "main"
    """XRT's name of the kernel in the ELF; `main` is what the compiler calls every one."""
    instruction_bytes: int = 0
    """Length of the instruction stream, of which every run holds a copy."""
    milliseconds: float = 0.0
    """Time of one call by the estimate."""

    @staticmethod
    def of(spec: Mapping[str, Any]) -> NpuProgram:
        """From an entry of `programs`. ValueError, naming the field, if it is not there as it must be."""
        checks = {
            "kernel": lambda value: isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*", value),
            "instruction_bytes": lambda value: type(value) is int and value > 0,
            "milliseconds": lambda value: type(value) in (int, float) and math.isfinite(value) and value > 0,
        }
        for name, valid in checks.items():
            if not valid(spec.get(name)):
                raise ValueError(f"{name} {spec.get(name)!r}")
        return NpuProgram(**{name: spec[name] for name in checks})


@dataclass(frozen=True)
class Manifest:
    """`manifest.json` of an opened artifact directory."""

    storage: Storage
    """Of the files that it lists."""
    content: bytes
    """What all that follows was read from."""
    beside: tuple[bytes, bytes]
    """Of `manifest.local` and `manifest.sig`, empty where there is none."""
    model: Mapping[str, Any]
    target: Mapping[str, Any]
    buffers: Mapping[str, Mapping[str, Any]]
    programs: Mapping[str, Mapping[str, Any]]
    plans: Mapping[str, list[Mapping[str, Any]]]
    files: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, directory: str | Path) -> Manifest:
        """Read the manifest; check format, machine, dtypes, calls and the size of every file. Raises UserError."""
        storage = Directory(Path(directory))
        content = _read(storage)
        sections = _sections(storage.path / "manifest.json", content)
        listed = Listed(storage, {name: str(entry.get("sha256")) for name, entry in sections["files"].items()})
        manifest = cls(listed, content, (_start(storage, LOCAL), _start(storage, SIGNATURE)), **sections)
        manifest._check_machine()
        manifest._check_files()
        manifest._check_dtypes()
        manifest._check_plans()
        _ = manifest.npu_programs
        return manifest

    @property
    def directory(self) -> Path:
        return self.storage.path

    def file(self, name: str) -> File:
        """One of `files`."""
        return self.storage.find(name) or File(self.directory / name, self.directory / name, 0, 0, "")

    def native_file(self, name: str) -> File:
        """One of `files` that holds native code. Raises UserError if nobody whom the user trusts vouches for it."""
        _ = self._trusted
        return self.file(name)

    @cached_property
    def _trusted(self) -> None:
        native = sorted({spec["file"] for spec in self.programs.values()})
        check_trusted(self.directory, self.content, *self.beside, native)

    @property
    def host_library(self) -> File:
        """The shared object with the programs of the host."""
        return self.native_file(min((spec["file"] for spec in self.programs.values() if spec["host"]), default=""))

    @cached_property
    def npu_programs(self) -> dict[File, NpuProgram]:
        """The programs that the NPU runs, by file. Raises UserError."""
        found = {}
        if self.target.get("device") == "xrt":
            for name, spec in self.programs.items():
                if not spec["host"]:
                    try:
                        found[self.file(spec["file"])] = NpuProgram.of(spec)
                    except ValueError as error:
                        raise UserError(
                            f"{self.directory}/manifest.json: the program {name} has {error}: run doit compile"
                        ) from None
        return found

    def nbytes(self, buffer: str) -> int:
        """Bytes of a buffer."""
        return nbytes(self.buffers[buffer]["dtype"], self.buffers[buffer]["shape"])

    def weights_read(self, call: Mapping[str, Any]) -> dict[str, Weight]:
        """The weights that a call of a plan reads in full, by name; an embedding only picks rows."""
        if "tokens" in call["buffers"]:
            return {}
        bound = {name: self.buffers[name] for name in call["buffers"] if name in self.buffers}
        return {
            name: Weight(self.nbytes(name), spec["values"] if len(spec["shape"]) > 1 else 0)
            for name, spec in bound.items()
            if spec["kind"] == "weight"
        }

    def rows(self, program: str, seq: int) -> int:
        """Rows that a program multiplies its weights with in a call of `seq` rows."""
        slots = self.programs[program]["slots"]
        rows = [
            slot["shape"][0] for slot in slots if slot["role"] not in ("weight", "table") and len(slot["shape"]) == 2
        ]
        return seq if any(count in ("seq", seq) for count in rows) else 1

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

    def _check_dtypes(self) -> None:
        slots = (slot for program in self.programs.values() for slot in program["slots"])
        if unknown := {spec.get("dtype") for spec in (*self.buffers.values(), *slots)} - DTYPES.keys():
            raise UserError(
                f"{self.directory}/manifest.json: dtype {min(map(str, unknown))} is none of {', '.join(DTYPES)}: "
                "update llama-npu2, or run doit compile"
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
            file = self.storage.find(name)
            size = file.size if file else None
            if size != entry["size"]:
                state = "is missing" if size is None else f"has {size} bytes instead of {entry['size']}"
                raise UserError(f"{self.directory / name} {state}: copy the directory again or run doit compile")


def _read(storage: Storage) -> bytes:
    root, path = storage.path, storage.path / "manifest.json"
    file = storage.find(path.name)
    if file is None:
        what = "has no manifest.json, so it is not complete" if root.is_dir() else "is not a directory"
        raise UserError(f"{root} {what}: give an artifact directory made by doit compile")
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}): run doit compile or copy the directory again") from None


def _sections(path: Path, manifest: bytes) -> dict[str, Any]:
    try:
        content = json.loads(manifest)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): run doit compile or copy the directory again") from None
    version = content.get("format") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise UserError(f"{path} is not a manifest: run doit compile or copy the directory again")
    if version != FORMAT:
        remedy = "update llama-npu2" if version > FORMAT else "run doit compile to bring the directory up to date"
        raise UserError(f"{path} has format {version}, this runtime reads format {FORMAT}: {remedy}")
    if missing := [section for section in _SECTIONS if not isinstance(content.get(section), dict)]:
        raise UserError(f"{path} lacks the section {missing[0]}: run doit compile or copy the directory again")
    return {section: content[section] for section in _SECTIONS}


def _start(storage: Storage, name: str) -> bytes:
    """A small file's content; none if there is no such file. What is too large is cut, and so not what it must be."""
    file = storage.find(name)
    return next(file.chunks(MAX_BYTES + 1), b"") if file else b""
