"""The table of model families, one Python module each: which configurations and which tensors. What they compute stands
in a module of the same name in `stages.model.parts`.

Every module of this package that has `FAMILY` is in the table: to add a family is to add a module.
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
    """`parse`: the configuration of a checkpoint, or UserError naming the field that cannot be run. `tensors`: name and
    shape of all that a checkpoint must hold, in model order. `embedding`: the tensor of the embedding; `head`: the one
    that makes the logits. `ignored`: patterns of tensors that old exporters wrote beside the weights. `residual`:
    patterns of those whose products are added to the activations, which random ones keep small. `matrices`: slots of
    weights of products of the layers, and what `{layer}` makes their tensors' names."""

    model_type: str
    architectures: tuple[str, ...]
    parse: Callable[[ConfigFields], Config]
    tensors: Callable[[Config], dict[str, tuple[int, ...]]]
    embedding: str
    head: Callable[[Config], str]
    ignored: tuple[str, ...]
    residual: tuple[str, ...]
    matrices: Mapping[str, str]


@functools.cache
def families() -> dict[str, Family]:
    """Every family by the `model_type` of its configurations."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    found = (module.FAMILY for module in modules if hasattr(module, "FAMILY"))
    return {family.model_type: family for family in found}


def family_of(values: Mapping[str, Any], where: str) -> Family:
    """The family of a `config.json`: by `architectures`, or as transformers does by `model_type` where that is not
    said. Raises UserError."""
    fields = ConfigFields(values, where)
    architectures, model_type = values.get("architectures"), values.get("model_type")
    known = families().values()
    if architectures:
        found = [family for family in known if architectures in [[name] for name in family.architectures]]
        if not found:
            names = ", ".join(name for family in known for name in family.architectures)
            raise fields.fails("architectures", architectures, f"only {names} is supported")
        if model_type not in (None, found[0].model_type):
            raise fields.fails("model_type", model_type, f"only {found[0].model_type} is supported")
        return found[0]
    if model_type not in [*families()]:
        raise fields.fails("model_type", model_type, f"only {', '.join(families())} is supported")
    return families()[model_type]


def parse_config(values: Mapping[str, Any], where: str) -> Config:
    """The configuration in the fields of a `config.json`. `where` names the file in complaints. Raises UserError."""
    return family_of(values, where).parse(ConfigFields(values, where))


def read_config(path: Path, remedy: str = REMEDY) -> Config:
    """Read and check a `config.json`. `remedy`: what to do where it cannot be read. Raises UserError naming the file,
    the field and the value."""
    return parse_config(read_json(path, remedy), str(path))


def of(config: Config) -> Family:
    """The family that a configuration was read as."""
    return families()[config.family]


def tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model, in model order."""
    return of(config).tensors(config)


def token_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Of those, what a decoded token reads in full: not an embedding that is not the LM head as well."""
    family = of(config)
    gathered = {family.embedding} - {family.head(config)}
    return {name: shape for name, shape in tensors(config).items() if name not in gathered}
