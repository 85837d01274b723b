"""The table of model families, one module each: their configurations and their tensors.

What a family computes stands in a module of the same name in `stages.model.parts`. Every module of this package that
has `FAMILY` is in the table: to add a family is to add a module.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_npu2.errors import REMEDY
from stages.engine.files import read_json
from stages.model.config import Config, ConfigFields


@dataclass(frozen=True, eq=False)
class Family:
    """One model family."""

    model_type: str
    architectures: tuple[str, ...]
    parse: Callable[[ConfigFields], Config]
    """Returns the configuration of a checkpoint, or raises UserError that names the field that cannot be run."""
    tensors: Callable[[Config], dict[str, tuple[int, ...]]]
    """Returns name and shape of all tensors that a checkpoint must hold, in model order."""
    embedding: str
    """The tensor of the embedding."""
    head: Callable[[Config], str]
    """Returns the tensor of the LM head."""
    ignored: tuple[str, ...]
    """Patterns of tensors that old exporters wrote next to the weights."""
    residual: tuple[str, ...]
    """Patterns of tensors whose products are added to the residual stream; random ones are kept small."""
    matrices: Mapping[str, str]
    """For each slot of a layer's matrices the name of the tensor, with `{layer}` in it."""


@functools.cache
def families() -> dict[str, Family]:
    """Return every family by the `model_type` of its configurations."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    members = (module.FAMILY for module in modules if hasattr(module, "FAMILY"))
    return {family.model_type: family for family in members}


def family_of(values: Mapping[str, Any], where: str) -> Family:
    """Return the family of a `config.json`. Raises UserError.

    `architectures` decides, or `model_type` where that is missing, as in transformers.
    """
    fields = ConfigFields(values, where)
    architectures, model_type = values.get("architectures"), values.get("model_type")
    if architectures:
        by_architecture = {name: family for family in families().values() for name in family.architectures}
        family = next((family for name, family in by_architecture.items() if architectures == [name]), None)
        if family is None:
            raise fields.fails("architectures", architectures, f"only {', '.join(by_architecture)} is supported")
        if model_type not in (None, family.model_type):
            raise fields.fails("model_type", model_type, f"only {family.model_type} is supported")
        return family
    if model_type not in [*families()]:
        raise fields.fails("model_type", model_type, f"only {', '.join(families())} is supported")
    return families()[model_type]


def parse_config(values: Mapping[str, Any], where: str) -> Config:
    """Return the configuration in the fields of a `config.json`, the file `where` in messages. Raises UserError."""
    return family_of(values, where).parse(ConfigFields(values, where))


def read_config(path: Path, remedy: str = REMEDY) -> Config:
    """Read and check a `config.json`.

    `remedy`: what to do where it cannot be read. Raises UserError naming the file, the field and the value.
    """
    return parse_config(read_json(path, remedy), str(path))


def of(config: Config) -> Family:
    """Return the family that a configuration was read as."""
    return families()[config.family]


def tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a model, in model order."""
    return of(config).tensors(config)


def token_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a decoded token reads in full: all but an embedding that is not the LM head as well."""
    family = of(config)
    gathered = {family.embedding} - {family.head(config)}
    return {name: shape for name, shape in tensors(config).items() if name not in gathered}
