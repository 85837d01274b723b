"""The artifact directory that steps build: its receipts, and how outputs are put into it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Protocol

import xxhash

from llama_npu2 import trust
from llama_npu2.artifact.regular import can_be_a_path, read_regular
from llama_npu2.schema import anything, list_of, load_json, mapping, record, text, whole
from stages.engine.changes import Change
from stages.engine.code import Code
from stages.engine.digests import Digests
from stages.engine.durations import Durations
from stages.engine.files import content_digest, content_sha256, fsync_path
from stages.engine.leftovers import Leftovers
from stages.engine.lock import ProcessLock
from stages.engine.places import INCOMING, MANIFEST, PROVENANCE, ROOT
from stages.engine.tree import Linked, Tree
from stages.engine.vouching import MAC, Vouching, is_native

FOREIGN = Change("trust", "was not built by you, and nobody whom you trust signed it")
"""The reason why native code of others is not current."""
BESIDE = (trust.LOCAL, trust.SIGNATURE, PROVENANCE)
"""The files about the manifest."""
RECEIPTS = Path("build/receipts")
WORK = Path("build/work")

_ARENA_MAX = -8
"""`M_ARENA_MAX` of glibc's malloc.h."""
_libc = ctypes.CDLL(None)

_TEXT = text(r"[^\x00\ud800-\udfff]*", "text")
CHECKSUM = "xxh3"
"""The key of a receipt's checksum, hex, over all other keys. A receipt that was damaged, but not forged, is as good as
none."""

_PARTS = {"key", "declared", "inputs", "outputs", "sizes", MAC}
_RECEIPT = record(
    {
        "key": mapping(_TEXT, anything),
        "declared": list_of(_TEXT),
        "inputs": mapping(_TEXT, anything),
        "outputs": mapping(_TEXT, _TEXT),
    },
    {MAC: _TEXT, CHECKSUM: _TEXT, "sizes": mapping(_TEXT, whole(0, 1 << 60))},
)


class Shared(Protocol):
    """A cache with outputs of steps (`stages.engine.steps.Step`) that any machine made before."""

    def fetch(self, step: Any, work: Path) -> list[Path] | None:
        """Write the outputs of `step` below the empty directory `work`, and say so.

        Returns:
            The inputs that its action would have discovered; None, with `work` empty, if the cache has no outputs.

        Raises:
            UserError: if the step was run elsewhere and failed.
        """

    def offer(self, step: Any) -> None:
        """Add the outputs that `step` just made here."""

    def tool(self, find: Callable[[], str | None]) -> Callable[[], str | None]:
        """Return a function that returns a tool's fingerprint: what `find` returns, or that of those who run steps."""

    def close(self) -> None:
        """Stop what still runs elsewhere for this build."""


@dataclass
class Project:
    """The artifact directory of one model and target, and the digests that all directories share."""

    directory: Path
    digests: Digests
    lock: ProcessLock
    """Held from the first look at a step until the build is done, so that one process at a time builds a directory."""
    shared: Shared | None = None
    at_once: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    """Entered while the action of a step runs here, if fewer may run than steps are begun at the same time."""
    accepted: Path | None = None
    """A file that the directory has once the model was accepted. A new directory without it is of no use."""
    lasting: bool = True
    """Whether the directory outlives the process; else nothing in it is flushed to disk, or kept for messages."""
    needed: Callable[[], int] | None = None
    """Returns the bytes of the directory when it is complete, if known. It may raise OSError or UserError."""

    def __post_init__(self) -> None:
        with contextlib.suppress(AttributeError):
            # `free_memory` gives back nothing that is free at the end of another arena.
            _libc.mallopt(_ARENA_MAX, 1)

    @functools.cached_property
    def code(self) -> Code:
        return Code(self.digests)

    @functools.cached_property
    def durations(self) -> Durations:
        return Durations(self.digests.path.parent, self.directory)

    @functools.cached_property
    def vouching(self) -> Vouching:
        return Vouching(self.directory)

    @functools.cached_property
    def tree(self) -> Tree:
        """The directory, in which no link is followed to change files, because it may have come from elsewhere.

        It may be a link itself, as may its model's directory, which then leads to artifacts on a larger disk. Raises
        Linked where the link leads to something else, which must not be overwritten.
        """
        tree = Tree(self.directory)
        if (self.directory.is_symlink() or self.directory.parent.is_symlink()) and not self._may_be_built(tree):
            raise Linked(f"{self.directory} leads through a link to what is not an artifact directory: remove the link")
        return tree

    def _may_be_built(self, tree: Tree) -> bool:
        """Return whether a directory is empty, or has the files of a build."""
        built = any(load_receipt(self.directory / RECEIPTS / name) for name in tree.names(RECEIPTS))
        stopped = {*tree.names()} <= {"build"} and {*tree.names("build")} <= {WORK.name, INCOMING.name}
        return built or stopped

    @functools.cached_property
    def leftovers(self) -> Leftovers:
        """The possible leftovers of this build, noted when this is first asked for."""
        accepted = self.accepted and self.directory / self.accepted
        return Leftovers(self.directory, self.directory / WORK, self.lock, self.digests.path, accepted)

    def label(self, path: Path) -> str:
        """Return the name of a file in receipts.

        It is relative to the artifact directory or the project if the file is inside, so that both can be copied.
        """
        text = path.as_posix()
        for root in (self.directory, ROOT):
            if text.startswith(inside := f"{root.as_posix()}/"):  # pathlib's own way takes ten times as long
                return text.removeprefix(inside)
        return text

    def located(self, label: str) -> Path:
        """Return the file that a label names here."""
        inside = os.path.join(self.directory, label)  # noqa: PTH118 - pathlib takes several times as long
        return Path(inside) if os.path.exists(inside) else ROOT / label  # noqa: PTH110

    def receipt_path(self, step: str) -> Path:
        """Return the path of the receipt of a step, by its name."""
        return self.directory / RECEIPTS / f"{file_name(step)}.json"

    def prune(self, steps: Iterable[str]) -> None:
        """Remove the outputs of steps that are not among `steps`, and files whose transfer was never finished."""
        names = self.tree.names(RECEIPTS)
        current = set(map(self.receipt_path, steps))
        gone = [RECEIPTS / name for name in names if name.endswith(".json") and name[0] != "."]
        gone = [label for label in gone if self.directory / label not in current]
        kept = {label for path in current for label in (load_receipt(path) or {}).get("outputs", ())} if gone else ()
        # Files that cannot be removed do no harm.
        with contextlib.suppress(OSError):
            self.tree.remove(INCOMING)
        for half in (name for name in names if name[0] == "."):  # half-written by a process that was killed
            self.tree.remove(RECEIPTS / half)
        for receipt in gone:
            with contextlib.suppress(OSError):
                for label in (load_receipt(self.directory / receipt) or {"outputs": ()})["outputs"]:
                    if label not in kept:
                        self.tree.remove_file(label)
                        self.tree.remove_empty(PurePath(label).parent)
                self.tree.remove(receipt)

    def commit(self, step: str, work: Path, receipt: Mapping[str, Any]) -> None:
        """Move the files that a step left below `work` into place, each by a rename, as its outputs.

        Outputs of its last run that are not among them are removed. At last `receipt` is written, to which digests and
        sizes of the outputs are added.
        """
        path, tree = self.receipt_path(step), self.tree
        old = (load_receipt(path) or {"outputs": {}})["outputs"]
        produced = sorted(p for p in work.rglob("*") if p.is_file())
        outputs = {p.relative_to(work).as_posix(): content_digest(p) for p in produced}
        for output in produced if self.lasting else ():
            fsync_path(output)
        root, gone = self.directory, [label for label in old if label not in outputs]
        for label in (*outputs, *gone, self.label(path)):
            tree.check(label)
        tree.remove_file(self.label(path))
        changed = [label for label, digest in outputs.items() if not self._is_present(label, digest, work / label)]
        if any(not label.startswith("build/") and Path(label) != MANIFEST for label in changed + gone):
            # Until the manifest is written again, its absence says that the directory is incomplete.
            tree.remove_file(MANIFEST)
        for label in changed:
            tree.take(work / label, label)
        for label in gone:
            tree.remove_file(label)
        sizes = {label: (root / label).stat().st_size for label in outputs}
        self._write_receipt(path, {**receipt, "outputs": outputs, "sizes": sizes})

    def adopt(self) -> None:
        """Treat the outputs of all steps as if they had been built here. Raises UserError."""
        for path in sorted((self.directory / RECEIPTS).glob("*.json")):
            if receipt := load_receipt(path):
                self._write_receipt(path, receipt)

    def _write_receipt(self, path: Path, receipt: Mapping[str, Any]) -> None:
        """Write a receipt as this user's own, with an authentication code and a checksum."""
        own = {**receipt, MAC: self.vouching.mac(path.stem, receipt)}
        content = {**own, CHECKSUM: _checksum(own)}
        self.tree.write(self.label(path), json.dumps(content, indent=1, sort_keys=True).encode())

    def sha256(self, label: str) -> str | None:
        """Return the SHA-256, hex, of a file of the directory, None where there is none.

        Files from which native code is made are read each time; digests of others are remembered by stat signature.
        """
        return self.vouching.sha256(label) if is_native(label) else self.digests.sha256(self.directory / label)

    def _is_present(self, label: str, digest: str, output: Path) -> bool:
        """Return whether an output is in place already. For native code a digest that can be forged is not enough."""
        existing = self.directory / label
        if not existing.is_file() or existing.stat().st_size != output.stat().st_size:
            return False
        if is_native(label):
            return self.sha256(label) == content_sha256(output)
        return self.digests.of(existing) == digest


def free_memory() -> None:
    """Give freed memory back to the system.

    After packing, glibc would keep hundreds of MB, which the compilers of later steps could use. Other C libraries have
    no such call and give memory back on their own.
    """
    with contextlib.suppress(AttributeError):
        _libc.malloc_trim(0)


def file_name(step: str) -> str:
    """Return a step's name as a file name."""
    return re.sub("[:/]", "-", step)


def load_receipt(path: Path) -> dict[str, Any] | None:
    """Return a step's receipt, None if it is missing or damaged."""
    try:
        receipt: dict[str, Any] = load_json(read_regular(path))
        _RECEIPT(receipt)
        intact = receipt.pop(CHECKSUM, None) in (None, _checksum(receipt)) and receipt.keys() <= _PARTS
    except (OSError, ValueError, RecursionError):
        return None
    if not intact:
        return None
    labels = {*receipt["inputs"], *receipt["outputs"], *receipt["declared"]}
    return receipt if all(map(can_be_a_path, labels)) and all(map(is_inside, receipt["outputs"])) else None


def _checksum(receipt: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(receipt, sort_keys=True).encode())


def is_inside(label: str) -> bool:
    """Return whether a label stays in its directory: receipts come with directories that others made."""
    return not Path(label).is_absolute() and ".." not in Path(label).parts
