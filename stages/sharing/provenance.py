"""The provenance of an artifact directory: an in-toto statement with a SLSA predicate.

https://in-toto.io/Statement/v1, https://slsa.dev/spec/v1.0/provenance. It lies next to the manifest, which is its
subject, and signing the directory signs the statement. It has no times and no names of machines, so that equal builds
have equal statements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llama_npu2 import trust
from llama_npu2.errors import UserError
from stages.engine.files import content_sha256, read_json
from stages.engine.places import CHECKPOINT, KERNELS, MANIFEST, PROVENANCE, ROOT
from stages.engine.project import Project
from stages.engine.steps import Step
from stages.engine.vouching import is_native

BUILD_TYPE = "urn:llama-npu2:build:1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
PACKAGES = ("llama-npu2", "ml_dtypes", "numpy", "tokenizers", "xdsl")
"""The packages that compute or write outputs, besides the steps' tools."""
VERIFIED = "verified.json"


def statement(project: Project, steps: Iterable[Step], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statement about a complete directory, which `steps` built. Raises UserError.

    Args:
        recipe: the variables that decided what was built.
    """
    directory = project.directory
    receipts = {step.name: receipt for step in steps if (receipt := step.receipt())}
    checkpoint: dict[str, Any] = {"files": {}, "source": None}
    if (directory / CHECKPOINT).is_file():  # a selftest has none
        checkpoint = read_json(directory / CHECKPOINT)
    read = {path for receipt in receipts.values() for path in map(ROOT.__truediv__, receipt["inputs"])}
    sources = sorted(path for path in read if path.is_relative_to(KERNELS))
    outputs = {label for receipt in receipts.values() for label in receipt["outputs"]} - {MANIFEST.as_posix()}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [_resource(MANIFEST.as_posix(), content_sha256(directory / MANIFEST))],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {**recipe, "source": checkpoint["source"]},
                "internalParameters": {"tools": _tools(receipts)},
                "resolvedDependencies": [
                    *(_resource(f"checkpoint/{name}", digest) for name, digest in sorted(checkpoint["files"].items())),
                    *(_resource(path.relative_to(ROOT).as_posix(), project.digests.sha256(path)) for path in sources),
                    _resource("stages", project.code.sha256("stages.graph")),
                ],
            },
            "runDetails": {
                "builder": {
                    "id": "urn:llama-npu2",
                    "version": {name: version(name) for name in PACKAGES if name != "xdsl" or find_spec(name)},
                },
                "byproducts": [
                    _resource(label, project.sha256(label)) for label in sorted(outputs) if is_native(label)
                ],
            },
        },
    }


def _resource(name: str, sha256: str | None) -> dict[str, Any]:
    """Return an in-toto ResourceDescriptor."""
    return {"name": name, "digest": {"sha256": sha256}}


def _tools(receipts: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the steps that ran each tool, by the tool's fingerprint."""
    steps: dict[str, list[str]] = {}
    for name, receipt in sorted(receipts.items()):
        if tool := receipt["key"].get("tool"):
            steps.setdefault(tool, []).append(name)
    return steps


def signed(directory: Path) -> bytes:
    """Return the content of `manifest.sig`, signed with the user's key. Raises UserError.

    It is the provenance and the results of `doit verify`.
    """
    content = read_json(directory / PROVENANCE)
    if proof := verified(directory):
        name, digest = VERIFIED, content_sha256(directory / VERIFIED)
        content["predicate"]["runDetails"]["byproducts"].append({**_resource(name, digest), "annotations": proof})
    return trust.signature((directory / MANIFEST).read_bytes(), content)


def verified(directory: Path) -> dict[str, Any] | None:
    """Return the results of `doit verify` for the present manifest, None if there are none."""
    try:
        proof = read_json(directory / VERIFIED)
    except UserError:
        return None
    return proof if proof.get("manifest") == content_sha256(directory / MANIFEST) else None
