"""Writes `manifest.json`, the whole interface between build time and run time."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_npu2.errors import REMEDY, UserError
from stages.engine.files import file_digests, read_checked, read_json, write_json
from stages.engine.places import CALIBRATION, CONFIG, PLAN, WEIGHTS
from stages.model.buffers import PACKED, PLANNED
from stages.model.config import Config, ConfigFields
from stages.model.families import read_config
from stages.weights.formats import formats

Spec = Mapping[str, Any]


def write_manifest(
    directory: Path,
    work: Path,
    programs: Mapping[str, Spec],
    target: Spec,
    model: str,
    calibrated: bool,
    adapters: Sequence[Spec] = (),
) -> None:
    """Step action: describe the artifact `directory` in its manifest.

    Args:
        programs: by name; file, entry point, whether the host runs it, and the files with the rest: its slots, and the
            counts and estimates of a device's build.
        target: name, device, and its requirements on a machine.
        calibrated: whether the weights were rounded for a text.
        adapters: what was merged into the weights.
    """
    from llama_npu2.artifact.validation import check_manifest  # a build that is up to date needs none of it

    plan = read_checked(directory / PLAN, PLANNED)
    weights = read_checked(directory / WEIGHTS, PACKED)
    tokenizer = sorted(p.relative_to(directory).as_posix() for p in (directory / "tokenizer").iterdir())
    described = describe(directory, programs, target)
    described["model"] = {
        **{"name": model, **{field: plan[field] for field in ("weights", "kv", "activations")}},
        **({"calibration": read_json(directory / CALIBRATION)} if calibrated else {}),
        **({"adapters": adapters} if adapters else {}),
        **_read_model(directory, plan),
    }
    described["buffers"] = {name: _buffer(name, spec, weights["buffers"]) for name, spec in plan["buffers"].items()}
    described["plans"] = plan["phases"]
    described |= _milliseconds(described)
    described["files"] |= weights["files"] | {name: file_digests(directory / name) for name in tokenizer}
    write_json(work / "manifest.json", described)
    try:
        check_manifest(read_json(work / "manifest.json"))
    except ValueError as error:
        raise UserError(f"{directory}: what was built does not fit together ({error}): {REMEDY}") from None


def _read_model(directory: Path, plan: Spec) -> dict[str, Any]:
    """Return what the runtime has to know of the model's configuration and its context."""
    config = read_config(directory / CONFIG)
    limits = {"max_seq": plan["context"], "longest": config.max_seq, "eos": end_tokens(directory, config)}
    return {**config.summary(), **limits}


def _milliseconds(described: Spec) -> dict[str, Any]:
    """Return the fields with the estimates of phases, of the plan as it is and of the one with a second copy."""
    from llama_npu2.artifact.plan import parse_plans
    from llama_npu2.artifact.second_copy import second_copy
    from stages.estimate.phases import phase_milliseconds  # it loads the runtime's devices

    plans = parse_plans(described["plans"])
    estimates = {"milliseconds": phase_milliseconds(described, plans)}
    copied = second_copy(described["programs"], described["buffers"], plans)
    if copied.calls and estimates["milliseconds"]:
        estimates["copied_milliseconds"] = phase_milliseconds({**described, "buffers": copied.buffers}, copied.plans)
    return estimates


def describe(directory: Path, programs: Mapping[str, Spec], target: Spec) -> dict[str, Any]:
    """Return the sections of a manifest of programs alone: without model, buffers and plans."""
    from llama_npu2.artifact.manifest import FORMAT

    files = sorted({str(program["file"]) for program in programs.values()})
    return {
        "format": FORMAT,
        "model": {},
        "target": {**target, "system": sys.platform, "machine": platform.machine()},
        "buffers": {},
        "programs": {name: _program(directory, name, **program) for name, program in programs.items()},
        "plans": {},
        "milliseconds": {},
        "files": {name: file_digests(directory / name) for name in files},
    }


_FACTS = ("kernel", "instruction_bytes", "milliseconds")
"""Fields of a device program besides its slots: `stages.targets.npu2` says how each is found."""


def _program(directory: Path, name: str, described: Sequence[str], **entry: Any) -> dict[str, Any]:
    for facts in (read_json(directory / path) for path in described):
        entry |= facts["programs"][name] if "programs" in facts else {key: facts[key] for key in _FACTS if key in facts}
    return entry


def _buffer(name: str, spec: dict[str, Any], packed: dict[str, Any]) -> dict[str, Any]:
    """Return a buffer as the manifest has it.

    Dtype and shape are those of the elements in memory; `values` counts the values of a weight or table; `at` is where
    an activation begins in the memory that activations share; `row_positions` are those of a row of a cache in blocks;
    `sequences` is how many a cache without blocks has rows for.
    """
    if name in packed:
        about = {"kind": spec["kind"], "format": spec["format"], "layout": spec["layout"]}
        return {**about, "values": math.prod(spec["shape"]), **packed[name]}
    place = {} if spec["at"] is None else {"at": spec["at"]}
    paged = {"row_positions": spec["row_positions"]} if spec["row_positions"] else {}
    many = {"sequences": spec["sequences"]} if spec["sequences"] > 1 else {}
    dtype = formats()[spec["format"]].dtype
    return {"kind": spec["kind"], "dtype": dtype, "shape": spec["shape"], **place, **paged, **many}


def end_tokens(directory: Path, config: Config) -> tuple[int, ...]:
    """Return the ids that end a reply: those of `generation_config.json` if it has any, as in transformers."""
    path = directory / "tokenizer/generation_config.json"
    if path.is_file() and (values := read_json(path)).get("eos_token_id") is not None:
        return ConfigFields(values, str(path)).token_ids("eos_token_id", config.vocab)
    return config.eos
