"""Records of steps' runs: outputs, and everything from which they were made, in terms that all machines share."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.trust import LOCAL
from stages.engine.project import RECEIPTS, WORK, Project, is_inside
from stages.engine.steps import Step

FORMAT = 1
"""The version of records, which is part of every address."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MODULE = re.compile(r"\w+(\.\w+)*")
_RESERVED = (RECEIPTS.as_posix(), WORK.as_posix(), LOCAL)
_LARGEST = 1 << 50
"""Most bytes of a file. More is a mistake."""


@frozen
class Blob:
    """The identity of a file's content."""

    sha256: str
    size: int

    @property
    def name(self) -> str:
        """Its name on a remote."""
        return f"objects/sha256/{self.sha256[:2]}/{self.sha256[2:]}"


@frozen
class Record:
    """The record of a step's run."""

    step: str
    key: Mapping[str, Any]
    """The code of the step's module, its parameters, its tool, and properties of the machine."""
    declared: Mapping[str, str]
    """The SHA-256 of the inputs that the step declares, by label; empty for a file that was missing."""
    found: Mapping[str, str]
    """The SHA-256 of the inputs that its action discovered, by label."""
    outputs: Mapping[str, Blob]
    """The outputs by path in the artifact directory."""

    @property
    def address(self) -> str | None:
        """The address of the step that was run, see `address`."""
        known = _circumstances(self.step, self.key, self.declared)
        return address_of(known) if known else None

    @classmethod
    def of_json(cls, value: Any) -> Record:
        """Return the record in a JSON value. Raises UserError if it is none."""
        match value:
            case {"step": str(step), "key": dict(key), "declared": dict(declared), "found": dict(found)}:
                match key:
                    case {"module": str(module), "code": str(), "params": _, "tool": _, "elsewhere": _}:
                        sound = step.isprintable() and _MODULE.fullmatch(module)
                        if sound and all(map(_is_input, declared.items())) and all(map(_is_input, found.items())):
                            return cls(step, key, declared, found, blobs_of_json(value.get("outputs")))
        raise UserError("a record is malformed: push it again")


def _is_input(item: tuple[Any, Any]) -> bool:
    """Return whether this is a label, which may name a file of the project, and a digest, which may be empty."""
    label, sha256 = item
    return is_inside(label) and isinstance(sha256, str) and (not sha256 or bool(_SHA256.fullmatch(sha256)))


def blobs_of_json(value: Any) -> dict[str, Blob]:
    """Return the blobs in a JSON value by their paths in an artifact directory.

    Raises UserError if a path could leave the directory, lie where the build keeps its state, or name the same file as
    another one on a file system that ignores case or Unicode forms.
    """
    blobs = {}
    for label, blob in value.items() if isinstance(value, dict) else ():
        match blob:
            case {"sha256": str(sha256), "size": int(size)} if _SHA256.fullmatch(sha256) and 0 <= size <= _LARGEST:
                blobs[label] = Blob(sha256, size)
    if not isinstance(value, dict) or len(blobs) != len(value):
        raise UserError("a list of files is malformed: push it again")
    check_labels(blobs)
    return blobs


def check_labels(labels: Iterable[str]) -> None:
    """Raise UserError if a label is no plain relative path, or two name one file on some machines."""
    seen: dict[str, str] = {}
    for label in labels:
        parts = label.split("/")
        plain = label.isprintable() and not re.search(r'[\\:*?"<>|]', label) and unicodedata.is_normalized("NFC", label)
        if not plain or any(part in ("", ".", "..") or part.strip() != part for part in parts):
            raise UserError(f"{label!r} is no path for a file of an artifact directory")
        if label.startswith(_RESERVED):
            raise UserError(f"{label!r} is where the build keeps its state")
        other = seen.setdefault(unicodedata.normalize("NFKC", label).casefold(), label)
        if other != label:
            raise UserError(f"{label!r} and {other!r} are one file on some machines")


def address(step: Step) -> str | None:
    """Return the SHA-256, hex, of everything that can change a step's outputs but for inputs that its action discovers.

    None if that is not known: a tool is missing here, or the checkpoint.
    """
    known = circumstances(step)
    return address_of(known) if known else None


def circumstances(step: Step) -> dict[str, Any] | None:
    """Return, as JSON, all that a step's address is the digest of; None as for `address`."""
    if step.params is None:
        return None
    key, project = _key(step, None), step.project
    return _circumstances(step.name, key, {_label(project, p): project.digests.sha256(p) or "" for p in step.inputs})


def _circumstances(step: str, key: Mapping[str, Any], declared: Mapping[str, str]) -> dict[str, Any] | None:
    if key["tool"] is None or key["elsewhere"] is None or "" in declared.values():
        return None
    return {"format": FORMAT, "step": step, "key": key, "declared": declared}


def address_of(known: Mapping[str, Any]) -> str:
    """Return the address of a step in these circumstances."""
    return hashlib.sha256(canonical(known)).hexdigest()


def record_of(step: Step) -> Record | None:
    """Return the record of the run in a step's receipt; None if the step is not current."""
    receipt, project = step.receipt(), step.project
    if receipt is None or not step.is_current():
        return None
    digests = project.digests
    labels = {label: step.located(label) for label in receipt["inputs"]}
    shas = {label: digests.sha256(path) or "" for label, path in labels.items()}
    outputs = {label: blob_of(project, project.directory / label) for label in receipt["outputs"]}
    declared = {project.label(path) for path in step.inputs} if step.params is not None else set(receipt["declared"])
    return Record(
        step.name,
        _key(step, receipt),
        {_label(project, labels[label]): shas[label] for label in declared & shas.keys()},
        {label: sha for label, sha in shas.items() if label not in declared},
        outputs,
    )


def blob_of(project: Project, path: Path) -> Blob:
    """Return the identity of a file of the artifact directory. It is read unless its digest is remembered."""
    sha256 = project.sha256(path.relative_to(project.directory).as_posix())
    if sha256 is None:
        raise UserError(f"{path} is gone: run the command again")
    return Blob(sha256, path.stat().st_size)


def is_here(project: Project, label: str, wanted: Blob) -> bool:
    """Return whether a file of the artifact directory has this content."""
    path = project.directory / label
    if path.is_symlink() or not path.is_file() or path.stat().st_size != wanted.size:
        return False
    return project.sha256(label) == wanted.sha256


def fits_here(step: Step, record: Record) -> bool:
    """Return whether the inputs that a run discovered are the same here."""
    digests = step.project.digests
    return all(sha and digests.sha256(step.located(label)) == sha for label, sha in record.found.items())


def _key(step: Step, receipt: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a step's key. The receipt of a current run has the parameters and the tool, if they are not known here."""
    recorded = receipt["key"] if receipt else {}
    params = recorded.get("params") if step.params is None else json.loads(json.dumps(step.params))
    tool = step.tool() if step.tool else ""
    machine_key = step.machine_key()
    return {
        "module": step.module,
        "code": step.project.code.sha256(step.module),
        "params": params,
        "tool": recorded.get("tool") if tool is None else tool,
        "elsewhere": None if machine_key is None else dict(machine_key),
    }


def _label(project: Project, path: Path) -> str:
    """Return the label of an input on every machine.

    For a checkpoint or a text it is only the file name, as its directory is a matter of each machine.
    """
    label = project.label(path)
    return path.name if Path(label).is_absolute() else label


def local_receipt(project: Project, record: Record, step: Step | None) -> dict[str, Any]:
    """Return the receipt, without outputs, for a run on another machine.

    An input or code that differs here gets an empty digest, so that the step is stale.

    Args:
        project: the artifact directory.
        record: the run.
        step: the same step here, if there is one.
    """
    digests = project.digests
    here = {_label(project, path): path for path in step.inputs} if step else {}
    paths = {label: here.get(label) or project.located(label) for label in (*record.declared, *record.found)}
    shas = {**record.declared, **record.found}
    inputs = {
        project.label(path): (digests.of(path) or "") if digests.sha256(path) == shas[label] else ""
        for label, path in paths.items()
    }
    module = record.key["module"]
    same = project.code.sha256(module) == record.key["code"]
    return {
        "key": {
            "code": project.code.digest(module) if same else "",
            "params": record.key["params"],
            "tool": record.key["tool"],
        },
        "declared": sorted(project.label(paths[label]) for label in record.declared),
        "inputs": inputs,
    }


def canonical(value: Any) -> bytes:
    """Return a value as JSON in a canonical form: equal values are equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
