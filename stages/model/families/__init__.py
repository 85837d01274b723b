"""The table of model families, one module each: what a `config.json` describes, and where a checkpoint's tensors are.

A family reads its configuration into a decoder (`stages.model.decoder`), from which everything else is derived. Every
module of this package that has `FAMILY` is in the table: to add a family is to add a module.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llama_npu2.errors import REMEDY
from stages.engine.files import read_json
from stages.model.config import Config, ConfigFields
from stages.model.decoder import EMBEDDING, FINAL_NORM, HEAD, VOCABULARY, Shape
from stages.model.families.gguf import Gguf


@dataclass(frozen=True, eq=False)
class Family:
    """One model family."""

    model_type: str
    architectures: tuple[str, ...]
    parse: Callable[[ConfigFields], Config]
    """Returns the configuration of a checkpoint, or raises UserError that names the field that cannot be run."""
    tensors: Mapping[str, str]
    """The tensor of each slot of weights, with `{layer}` in those of layers."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that exporters write next to the weights."""
    wrapped: tuple[str, ...] = ()
    """Architectures that have this family's fields in `text_config`, next to a part that does not see text."""
    title: str = ""
    """What people call it."""
    gguf: Gguf | None = None
    """How GGUF files hold its models; None: they are not read."""


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
        by_architecture = {name: f for f in families().values() for name in (*f.architectures, *f.wrapped)}
        family = next((family for name, family in by_architecture.items() if architectures == [name]), None)
        if family is None:
            raise fields.fails("architectures", architectures, f"only {', '.join(by_architecture)} is supported")
        if architectures[0] in family.architectures and model_type not in (None, family.model_type):
            raise fields.fails("model_type", model_type, f"only {family.model_type} is supported")
        return family
    if model_type not in [*families()]:
        raise fields.fails("model_type", model_type, f"only {', '.join(families())} is supported")
    return families()[model_type]


_OUTER = ("tie_word_embeddings", "eos_token_id", "quantization_config")
"""Fields that a configuration with `text_config` may have outside of it. The outer ones count."""


def text_fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a `config.json` that are about text, without the others of a wrapped one.

    Raises UserError.
    """
    family = family_of(values, where)
    if values.get("architectures") and values["architectures"][0] in family.wrapped:
        inner = ConfigFields(values, where).nested("text_config").values
        outer = {name: values[name] for name in _OUTER if values.get(name) is not None}
        return {**inner, **outer, "architectures": [family.architectures[0]], "model_type": family.model_type}
    return dict(values)


def parse_config(values: Mapping[str, Any], where: str) -> Config:
    """Return the configuration in the fields of a `config.json`, the file `where` in messages. Raises UserError."""
    return family_of(values, where).parse(ConfigFields(text_fields(values, where), where))


def read_config(path: Path, remedy: str = REMEDY) -> Config:
    """Read and check a `config.json`.

    `remedy`: what to do where it cannot be read. Raises UserError naming the file, the field and the value.
    """
    return parse_config(read_json(path, remedy), str(path))


def of(config: Config) -> Family:
    """Return the family that a configuration was read as."""
    return families()[config.family]


class Weight(NamedTuple):
    """A tensor of a model."""

    slot: str
    layer: int | None
    name: str
    shape: Shape
    """In dimension names."""
    offset: float = 0.0
    """The number that is added to its values."""


def weights(config: Config) -> Iterator[Weight]:
    """Yield every tensor of a model, in model order. An embedding that is the LM head too comes once."""
    names, decoder = of(config).tensors, config.decoder
    yield Weight(EMBEDDING, None, names[EMBEDDING], VOCABULARY)
    for number, layer in enumerate(decoder.layers):
        for slot, shape in layer.slots():
            yield Weight(slot, number, names[slot].format(layer=number), shape, layer.offset(slot))
    yield Weight(FINAL_NORM, None, names[FINAL_NORM], ("emb",), decoder.norm.offset)
    if not decoder.tied:
        yield Weight(HEAD, None, names[HEAD], VOCABULARY)


def tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a model, in model order."""
    sizes = config.dimensions()
    return {
        weight.name: tuple(int(sizes[dim]) if isinstance(dim, str) else dim for dim in weight.shape)
        for weight in weights(config)
    }


def tensor(config: Config, slot: str) -> str:
    """Return the tensor of a slot, with `{layer}` in those of layers."""
    return of(config).tensors[EMBEDDING if slot == HEAD and config.tied else slot]


def token_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a decoded token reads in full: all but an embedding that is not the LM head as well."""
    gathered = {tensor(config, EMBEDDING)} - {tensor(config, HEAD)}
    return {name: shape for name, shape in tensors(config).items() if name not in gathered}


def stored_names(name: str, wrapped: bool) -> Iterator[str]:
    """Yield the names that a tensor may have in a checkpoint: its own, and those inside of a wrapped model."""
    yield name
    if not wrapped:
        return
    yield f"language_model.{name}"
    if name.startswith("model."):
        yield f"model.language_model.{name.removeprefix('model.')}"
