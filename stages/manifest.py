"""Writes `manifest.json`, the whole interface between build time and run time."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_npu2.manifest import FORMAT
from stages.engine.files import file_digests, read_json, write_json
from stages.engine.places import CONFIG, MODULES, PLAN, WEIGHTS
from stages.model.config import Config, ConfigFields
from stages.model.families import read_config
from stages.weights.formats import formats


def write_manifest(
    directory: Path,
    model: str,
    work: Path,
    programs: Mapping[str, Mapping[str, Any]],
    target: Mapping[str, Any],
) -> None:
    """Step action: collect what is in the artifact `directory`.

    `programs`: name -> file, entry point, on the host?, and the module in whose description its slots are. `target`:
    name, device, and what it asks of a machine.
    """
    config = read_config(directory / CONFIG)
    plan = read_json(directory / PLAN)
    weights = read_json(directory / WEIGHTS)
    tokenizer = sorted(p.relative_to(directory).as_posix() for p in (directory / "tokenizer").iterdir())
    files = dict(weights["files"])
    for name in [*sorted({str(program["file"]) for program in programs.values()}), *tokenizer]:
        files[name] = file_digests(directory / name)
    manifest = {
        "format": FORMAT,
        "model": {"name": model, **asdict(config), "eos": end_tokens(directory, config)},
        "target": {**target, "system": sys.platform, "machine": platform.machine()},
        "buffers": {name: _buffer(name, spec, weights["buffers"]) for name, spec in plan["buffers"].items()},
        "programs": {name: _program(directory, name, **program) for name, program in programs.items()},
        "plans": {phase: [_call(**call) for call in calls] for phase, calls in plan["phases"].items()},
        "files": files,
    }
    write_json(work / "manifest.json", manifest)


def _program(directory: Path, name: str, module: str, **entry: Any) -> dict[str, Any]:
    described = read_json(directory / MODULES / f"{module}.json")["programs"]
    return {**entry, **described[name]}


def _call(layer: int | None, **call: Any) -> dict[str, Any]:
    return call if layer is None else {**call, "layer": layer}


def _buffer(name: str, spec: dict[str, Any], packed: dict[str, Any]) -> dict[str, Any]:
    """Dtype and shape are those of the elements in memory; `values` counts the values of a weight or table."""
    if name in packed:
        about = {"kind": spec["kind"], "format": spec["format"], "layout": spec["layout"]}
        return {**about, "values": math.prod(spec["shape"]), **packed[name]}
    return {"kind": spec["kind"], "dtype": formats()[spec["format"]].dtype, "shape": spec["shape"]}


def end_tokens(directory: Path, config: Config) -> tuple[int, ...]:
    """Ids that end a reply: `generation_config.json` decides where it says something, as in transformers."""
    path = directory / "tokenizer/generation_config.json"
    if path.is_file() and (values := read_json(path)).get("eos_token_id") is not None:
        return ConfigFields(values, str(path)).token_ids("eos_token_id", config.vocab)
    return config.eos
