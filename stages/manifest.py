"""Writes `manifest.json`, the whole interface between build time and run time."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.manifest import FORMAT
from stages.config import LlamaConfig, read_config, read_json, token_ids
from stages.elfs import Elf, all_elfs
from stages.files import file_digests, write_json
from stages.tile_objects import FEATURES

_CALL = ("program", "buffers", "layer")
"""Of a planned call; only calls of the NPU's programs say the layer (from 0), for messages."""


def write_manifest(
    directory: Path, model: str, target: str, work: Path, programs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Step action: collect what is in the artifact `directory`. `programs`: name -> file, entry point, on the host?"""
    config = read_config(directory / "build/config.json")
    plan = read_json(directory / "build/plan.json")
    weights = read_json(directory / "build/weights.json")
    tokenizer = sorted(p.relative_to(directory).as_posix() for p in (directory / "tokenizer").iterdir())
    files = dict(weights["files"])
    for name in [*sorted({str(program["file"]) for program in programs.values()}), *tokenizer]:
        files[name] = file_digests(directory / name)
    elfs = all_elfs()
    manifest = {
        "format": FORMAT,
        "model": {"name": model, **asdict(config), "eos": end_tokens(directory, config)},
        "target": {"name": target, **_machine(directory, target)},
        "buffers": {name: _buffer(name, spec, weights["buffers"]) for name, spec in plan["buffers"].items()},
        "programs": {
            name: {**program, "slots": _slots(directory, config, elfs.get(str(program["entry"])), name)}
            for name, program in programs.items()
        },
        "plans": {
            phase: [dict(zip(_CALL, call, strict=False)) for call in calls] for phase, calls in plan["calls"].items()
        },
        "files": files,
    }
    write_json(work / "manifest.json", manifest)


def _machine(directory: Path, target: str) -> dict[str, Any]:
    """What must be equal where this runs and, for the simulator, what the CPU must have: host kernels choose at load,
    its objects are for the CPU that made them."""
    machine = {"system": sys.platform, "machine": platform.machine()}
    return machine | ({"features": json.loads((directory / FEATURES).read_text())} if target == "npu2-sim" else {})


def _slots(directory: Path, config: LlamaConfig, elf: Elf | None, program: str) -> Any:
    """A program's slots: the module's own if it has one, because groupings join and rearrange them.

    Dimensions are numbers but for `seq` and `max_seq`, which say what a call touches of a longer buffer.
    """
    module = directory / "build/modules" / f"{program}.json"
    if module.is_file():
        return read_json(module)["slots"]
    assert elf is not None
    known = {name: size for name, size in config.dimensions().items() if name != "max_seq"}
    return [asdict(slot) | {"shape": [known.get(str(dim), dim) for dim in slot.shape]} for slot in elf.slots]


def _buffer(name: str, spec: dict[str, Any], packed: dict[str, Any]) -> dict[str, Any]:
    if name in packed:
        return {"kind": spec["kind"], "layout": spec["layout"], **packed[name]}
    return {"kind": spec["kind"], "dtype": spec["dtype"], "shape": spec["shape"]}


def end_tokens(directory: Path, config: LlamaConfig) -> tuple[int, ...]:
    """Ids that end a reply: `generation_config.json` decides where it says something, as in transformers."""
    path = directory / "tokenizer/generation_config.json"
    if path.is_file() and (ids := read_json(path).get("eos_token_id")) is not None:
        return token_ids(ids, config.vocab, f"{path}: eos_token_id")
    return config.eos
