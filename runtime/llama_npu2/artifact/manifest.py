"""Opens an artifact directory after checking all that its manifest says. It does not know how one is built."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llama_npu2.artifact.cpu_features import cpu_features
from llama_npu2.artifact.dtypes import nbytes
from llama_npu2.artifact.plan import Phase, PlannedCall, Plans
from llama_npu2.artifact.regular import LARGEST_JSON
from llama_npu2.artifact.second_copy import second_copy
from llama_npu2.artifact.storage import File, Listed, Storage, open_storage
from llama_npu2.artifact.validation import check_blob, check_manifest
from llama_npu2.errors import REMEDY, UserError
from llama_npu2.frozen import frozen
from llama_npu2.schema import load_json
from llama_npu2.trust import LOCAL, SIGNATURE, check_trusted
from llama_npu2.trust.envelopes import MAX_BYTES

FORMAT = 7
"""Raised whenever an older runtime could misread a newer manifest."""

_SECTIONS = ("model", "target", "buffers", "programs", "files")
_MILLISECONDS = ("milliseconds", "copied_milliseconds")


@frozen
class Weight:
    """A weight as a call reads it."""

    nbytes: int
    values: int
    """Number of weights that a row of the input is multiplied with; 0 for a vector."""


@frozen
class NpuProgram:
    """The properties of a program that matter for submitting it to the NPU."""

    kernel: str = "main"
    """XRT's name of the kernel in the ELF; the compiler calls every kernel `main`."""
    instruction_bytes: int = 0
    """Length of the instruction stream, of which every run holds a copy."""
    milliseconds: float = 0.0
    """Estimated time of one call."""


@frozen
class Manifest:
    """`manifest.json` of an opened artifact directory."""

    storage: Storage
    """The files that it lists."""
    content: bytes
    """The text of `manifest.json`."""
    mark: bytes
    """The content of `manifest.local`, empty if there is none."""
    signature: bytes
    """The content of `manifest.sig`, empty if there is none."""
    model: Mapping[str, Any]
    target: Mapping[str, Any]
    buffers: Mapping[str, Mapping[str, Any]]
    programs: Mapping[str, Mapping[str, Any]]
    plans: Plans
    milliseconds: Mapping[Phase, float]
    """Estimated time of a call of each phase of `plans`; empty where rows are known at run time only."""
    files: Mapping[str, Mapping[str, Any]]
    copied_milliseconds: Mapping[Phase, float] = field(default_factory=dict)
    """The `milliseconds` with a second copy of weights; empty where a copy is of no use."""

    @classmethod
    def open(cls, directory: str | Path) -> Manifest:
        """Read and check the manifest, the machine, and the files but for their content. Raises UserError."""
        storage = open_storage(Path(directory))
        content = _read(storage)
        sections = _sections(storage.path / "manifest.json", content)
        listed = Listed(storage, {name: entry["sha256"] for name, entry in sections["files"].items()})
        manifest = cls(listed, content, _read_start(storage, LOCAL), _read_start(storage, SIGNATURE), **sections)
        manifest._check_machine()
        manifest._check_files()
        manifest._check_blobs()
        return manifest

    def with_second_copy(self) -> tuple[Manifest, list[PlannedCall]]:
        """Return the manifest with a second copy of weights for prompts, and the calls that unpack the copy.

        Raises UserError.
        """
        copy = second_copy(self.programs, self.buffers, self.plans)
        if not copy.calls:
            raise UserError(
                f"npu.second_copy=1: prompts of {self.directory} take weights as they are stored: leave it out"
            )
        milliseconds = self.copied_milliseconds or self.milliseconds
        return replace(self, buffers=copy.buffers, plans=copy.plans, milliseconds=milliseconds), copy.calls

    @property
    def directory(self) -> Path:
        return self.storage.path

    def file(self, name: str) -> File:
        """Return the file of that name in `files`; it is empty if there is none."""
        return self.storage.find(name) or File(self.directory / name, self.directory / name, 0, 0, "")

    def native_file(self, name: str) -> File:
        """Return a file of `files` that holds native code. Raises UserError as `check_trusted` does."""
        self.check_trusted()
        return self.file(name)

    def check_trusted(self) -> None:
        """Raise UserError if nobody whom the user trusts vouches for the artifact."""
        _ = self._trusted

    @cached_property
    def _trusted(self) -> None:
        native = sorted({spec["file"] for spec in self.programs.values()})
        check_trusted(self.directory, self.content, self.mark, self.signature, native)

    @property
    def host_library(self) -> File:
        """The shared object with the programs of the host."""
        return self.native_file(min((spec["file"] for spec in self.programs.values() if spec["host"]), default=""))

    @cached_property
    def npu_programs(self) -> dict[File, NpuProgram]:
        """The programs that the NPU runs, by file."""
        if self.target["device"] != "xrt":
            return {}
        return {
            self.file(spec["file"]): NpuProgram(spec["kernel"], spec["instruction_bytes"], spec["milliseconds"])
            for spec in self.programs.values()
            if not spec["host"]
        }

    def nbytes(self, buffer: str) -> int:
        """Return the bytes of a buffer."""
        return nbytes(self.buffers[buffer]["dtype"], self.buffers[buffer]["shape"])

    def weights_read(self, call: PlannedCall) -> dict[str, Weight]:
        """Return the weights that a call of a plan reads in full, by name; an embedding only picks rows."""
        names = call.names
        if "tokens" in names:
            return {}
        return {
            name: Weight(self.nbytes(name), spec["values"] if len(spec["shape"]) > 1 else 0)
            for name in names
            if (spec := self.buffers[name])["kind"] == "weight"
        }

    def share(self, name: str) -> float:
        """Return the share of a weight that a row is multiplied with: of stacked experts those that it takes."""
        (first, *rest), experts = self.buffers[name]["shape"], self.model.get("experts", 0)
        # Panels of a matrix have four dimensions in bf16, and two as bytes; those of a stack have one more.
        stacked = first == experts and len(rest) == (4 if self.buffers[name]["dtype"] == "bf16" else 2)
        return float(self.model["experts_of_a_row"] / experts) if stacked else 1.0

    def rows(self, program: str, seq: int) -> int:
        """Return the number of rows that a program multiplies its weights with in a call of `seq` rows."""
        slots = self.programs[program]["slots"]
        rows = [
            slot["shape"][0] for slot in slots if slot["role"] not in ("weight", "table") and len(slot["shape"]) == 2
        ]
        return seq if any(count in ("seq", seq) for count in rows) else 1

    def _check_machine(self) -> None:
        here = sys.platform, platform.machine()
        built = self.target["system"], self.target["machine"]
        if built != here:
            raise UserError(
                f"{self.directory} was built for {' '.join(built)}, this machine is {' '.join(here)}: "
                "build it here with doit compile"
            )
        needed = self.target.get("features", ())
        if missing := sorted(set(needed) - set(cpu_features()) if needed else ()):
            raise UserError(
                f"{self.directory} was built for a CPU with {', '.join(missing)}, which this one does not have: "
                "build it here with doit compile"
            )

    def _check_files(self) -> None:
        root = self.directory.resolve()
        for name, entry in self.files.items():
            file = self.storage.find(name)
            if not file or file.size != entry["size"]:
                state = f"has {file.size} bytes instead of {entry['size']}" if file else "is missing"
                raise UserError(f"{self.directory / name} {state}: copy the directory again or run doit compile")
            if not file.container.resolve().is_relative_to(root):
                raise UserError(f"{self.directory / name} is a link out of the directory: copy what it points to")

    def _check_blobs(self) -> None:
        """Check that weights lie in their files where the manifest says."""
        by_file: dict[str, dict[str, Any]] = {}
        for name, spec in self.buffers.items():
            if "file" in spec:
                by_file.setdefault(spec["file"], {})[name] = spec
        for name, buffers in by_file.items():
            try:
                check_blob(self.file(name), buffers)
            except (OSError, ValueError) as error:
                raise UserError(f"{self.directory / name} {error}: {REMEDY}") from None


def _read(storage: Storage) -> bytes:
    root, path = storage.path, storage.path / "manifest.json"
    file = storage.find(path.name)
    if file is None:
        what = "has no manifest.json, so it is not complete" if root.is_dir() else "is not a directory"
        raise UserError(f"{root} {what}: give an artifact directory made by doit compile")
    if file.size > LARGEST_JSON:
        raise UserError(f"{path} has {file.size} bytes, a manifest has at most {LARGEST_JSON}: {REMEDY}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}): {REMEDY}") from None


def _sections(path: Path, manifest: bytes) -> dict[str, Any]:
    """Return the checked sections of a manifest's text, as fields of `Manifest`."""
    try:
        content = load_json(manifest)
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}): {REMEDY}") from None
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is not int:
        raise UserError(f"{path} is not a manifest: {REMEDY}")
    if version != FORMAT:
        remedy = "update llama-npu2" if version > FORMAT else "run doit compile to bring the directory up to date"
        raise UserError(f"{path} has format {version}, this runtime reads format {FORMAT}: {remedy}")
    try:
        plans = check_manifest(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}: {REMEDY}") from None
    estimates = {
        section: {Phase.parse(phase): milliseconds for phase, milliseconds in content[section].items()}
        for section in _MILLISECONDS
        if section in content
    }
    return {**{section: content[section] for section in _SECTIONS}, "plans": plans, **estimates}


def _read_start(storage: Storage, name: str) -> bytes:
    """Return the content of a small file, empty if there is none.

    A file that is too large is cut, and then fails its check.
    """
    file = storage.find(name)
    return next(file.chunks(MAX_BYTES + 1), b"") if file else b""
