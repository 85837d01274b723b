"""`doit provenance`: from what, by what and how the artifacts were built, who vouches for them, what was measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from llama_npu2 import trust
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.cli.table import Column, fitted
from llama_npu2.errors import UserError, printable
from stages.engine.files import read_json
from stages.engine.places import KERNELS, PROVENANCE
from stages.graph import Build
from stages.sharing.provenance import verified

SHOWN = 16
"""Hexadecimal digits of a digest."""


def run(build: Build) -> None:
    """Raises UserError."""
    manifest = Manifest.open(build.directory)
    said = _statement(manifest)
    if build.options.json:
        print(json.dumps(said, indent=1), flush=True)
        return
    rows = [("directory", str(build.directory_as_given)), ("vouched for by", _voucher(manifest))]
    rows += _rows(said["predicate"]["buildDefinition"], said["predicate"]["runDetails"])
    rows += [("measured", text) for text in _proof(verified(build.directory))]
    print(fitted([Column(""), Column("")], [(name, printable(text)) for name, text in rows]).lstrip(), flush=True)


def _statement(manifest: Manifest) -> dict[str, Any]:
    """What a trusted signer said, else what lies beside the manifest."""
    try:
        return trust.signed_statement(manifest.directory, manifest.content, manifest.signature)[0]
    except UserError:
        path = manifest.directory / PROVENANCE
        said = read_json(path, "run doit compile")
        if said["subject"][0]["digest"]["sha256"] != hashlib.sha256(manifest.content).hexdigest():
            raise UserError(f"{path} is of another manifest: run doit compile") from None
        return said


def _rows(definition: Mapping[str, Any], details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a predicate says, in lines; of the kernels' sources how many there are."""
    yield from ((name, _text(value)) for name, value in definition["externalParameters"].items() if value)
    for tool, steps in definition["internalParameters"]["tools"].items():
        yield "tool", f"{tool}: {len(steps)} steps"
    yield from (("package", f"{name} {version}") for name, version in details["builder"]["version"].items())
    sources = [each for each in definition["resolvedDependencies"] if each["name"].startswith(f"{KERNELS.name}/")]
    others = [each for each in definition["resolvedDependencies"] if each not in sources]
    yield from (("from", f"{each['name']} {each['digest']['sha256'][:SHOWN]}") for each in others)
    yield "from", f"{KERNELS.name}, {len(sources)} files"


def _voucher(manifest: Manifest) -> str:
    try:
        return trust.allowed(manifest.directory, manifest.content, manifest.mark, manifest.signature)
    except UserError as error:
        return f"nobody whom you trust: {error}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _proof(found: dict[str, Any] | None) -> list[str]:
    """What `doit verify` found of this very manifest."""
    if found is None:
        return ["nothing: doit verify measures it"]
    outcome = "passed" if found["passed"] else "FAILED"
    on = found["text"]
    return [f"doit verify {outcome} on {on['name']} ({on['sha256'][:SHOWN]})", *map(json.dumps, found["results"])]
