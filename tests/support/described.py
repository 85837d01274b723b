"""A model family whose `config.json` is a description: what no released model has can be built and run.

Tests add this file to the families, in their process or in a copy of the checkout.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from stages.model import decoder
from stages.model.config import Config, ConfigFields
from stages.model.decoder import EMBEDDING, FINAL_NORM, HEAD, LAYER_SLOTS, Decoder
from stages.model.families import Family
from stages.model.families.place import Place


def as_json(value: Any) -> Any:
    """Return a description as JSON. Each object has the name of its class."""
    if is_dataclass(value):
        return {"class": type(value).__name__} | {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, frozenset)):
        return [as_json(each) for each in value]
    # JSON has no infinity.
    return "inf" if value == math.inf else value


def of_json(value: Any) -> Any:
    """Return the description in JSON."""
    if isinstance(value, dict):
        kept = {name: of_json(each) for name, each in value.items() if name != "class"}
        return getattr(decoder, value["class"])(**kept)
    if isinstance(value, list):
        return tuple(map(of_json, value))
    return math.inf if value == "inf" else value


def parse(values: ConfigFields) -> Config:
    """Return the configuration of a description."""
    found: Decoder = of_json(values.values["decoder"])
    return Config("described", found, values.integer("max_position_embeddings"), (2,))


_OUTSIDE = {slot: Place(slot) for slot in (EMBEDDING, FINAL_NORM, HEAD)}

FAMILY = Family(
    "described",
    ("DescribedForCausalLM",),
    parse,
    _OUTSIDE | {slot: Place(f"layers.{{layer}}.{slot}") for slot in LAYER_SLOTS},
    title="Descriptions",
)
