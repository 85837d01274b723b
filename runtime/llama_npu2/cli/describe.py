"""Describes an artifact directory for `llama-npu2 info DIR`."""

from __future__ import annotations

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.cli.table import amount
from llama_npu2.errors import UserError
from llama_npu2.trust import allowed


def described(manifest: Manifest) -> dict[str, str]:
    """Return what a manifest says of the model, its formats and its programs, and who vouches for it."""
    model, target = manifest.model, manifest.target
    try:
        trusted = f"yes: {allowed(manifest.directory, manifest.content, manifest.mark, manifest.signature)}"
    except UserError as error:
        trusted = f"no: {error}"
    buckets = sorted({phase.rows for phase in manifest.plans if phase.rows})
    calibrated = ", calibrated" if "calibration" in model else ""
    adapters = ", ".join(each["name"] for each in model.get("adapters", ()))
    longest = model.get("longest", model["max_seq"])
    return {
        "model": f"{model['name']} ({model['family']})",
        "target": f"{target['name']} ({target['system']}, {target['machine']})",
        "weights": f"{model['weights']}{calibrated}" + (f", with {adapters}" if adapters else ""),
        "activations": model.get("activations", "bf16"),
        "KV cache": model.get("kv", "bf16"),
        "context": f"{model['max_seq']} tokens" + (f" of {longest}" if longest > model["max_seq"] else ""),
        "shape": f"{model['layers']} layers, hidden size {model['emb']}, {model['vocab']} tokens in the vocabulary",
        "prompts": f"in {', '.join(map(str, buckets))} rows" if buckets else "of any length",
        "programs": str(len(manifest.programs)),
        "files": f"{len(manifest.files)}, {amount(sum(entry['size'] for entry in manifest.files.values()))}",
        "trusted": trusted,
    }
