"""`doit provenance`: what the artifacts were built from, with what and how, who vouches for them, what was measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from llama_npu2 import trust
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.cli.table import fitted
from llama_npu2.errors import UserError, printable
from stages.engine.files import read_json
from stages.engine.places import KERNELS, PROVENANCE
from stages.graph import Build
from stages.sharing.provenance import verified

SHOWN = 16
"""Hexadecimal digits of a digest that are shown."""


def run(build: Build) -> None:
    """Print the provenance as a table or as JSON. Raises UserError."""
    manifest = Manifest.open(build.directory)
    statement = _statement(manifest)
    if build.options.json:
        print(json.dumps(statement, indent=1), flush=True)
        return
    rows = [("directory", str(build.directory_as_given)), ("vouched for by", _voucher(manifest))]
    rows += _rows(statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"])
    rows += [("measured", text) for text in _proof(verified(build.directory))]
    print(fitted(["", ""], [(name, printable(text)) for name, text in rows]).lstrip(), flush=True)


def _statement(manifest: Manifest) -> dict[str, Any]:
    """Return the statement of a trusted signer, or else the one next to the manifest."""
    try:
        return trust.signed_statement(manifest.directory, manifest.content, manifest.signature)[0]
    except UserError:
        path = manifest.directory / PROVENANCE
        statement = read_json(path, "run doit compile")
        if statement["subject"][0]["digest"]["sha256"] != hashlib.sha256(manifest.content).hexdigest():
            raise UserError(f"{path} is of another manifest: run doit compile") from None
        return statement


def _rows(definition: Mapping[str, Any], details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of a predicate; kernels' sources are counted."""
    yield from ((name, _text(value)) for name, value in definition["externalParameters"].items() if value)
    for tool, steps in definition["internalParameters"]["tools"].items():
        yield "tool", f"{tool}: {len(steps)} steps"
    yield from (("package", f"{name} {version}") for name, version in details["builder"]["version"].items())
    resources = definition["resolvedDependencies"]
    sources = [entry for entry in resources if entry["name"].startswith(f"{KERNELS.name}/")]
    others = [entry for entry in resources if entry not in sources]
    yield from (("from", f"{entry['name']} {entry['digest']['sha256'][:SHOWN]}") for entry in others)
    yield "from", f"{KERNELS.name}, {len(sources)} files"


def _voucher(manifest: Manifest) -> str:
    try:
        return trust.allowed(manifest.directory, manifest.content, manifest.mark, manifest.signature)
    except UserError as error:
        return f"nobody whom you trust: {error}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _proof(found: dict[str, Any] | None) -> list[str]:
    """Return lines of what `doit verify` measured of this manifest."""
    if found is None:
        return ["nothing yet: doit verify measures it"]
    outcome = "passed" if found["passed"] else "FAILED"
    text = found["text"]
    return [f"doit verify {outcome} on {text['name']} ({text['sha256'][:SHOWN]})", *map(_result, found["results"])]


def _result(result: Mapping[str, Any]) -> str:
    """Return the figures of one result as people read them."""
    numbers = (f"{name} {_figure(value)}" for name, value in result.items() if name != "kind")
    return f"{result['kind']}: {', '.join(numbers)}"


def _figure(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "none"
        case float():
            return f"{value:.4g}"
        case list():
            return " to ".join(map(_figure, value))
        case dict():
            return " ".join(map(_figure, value.values()))
    return str(value)
