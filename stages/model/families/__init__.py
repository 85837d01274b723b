"""The table of model families, one module each: what a `config.json` describes, and where a checkpoint's tensors are.

A family reads its configuration into a decoder (`stages.model.decoder`), from which everything else is derived. Every
module of this package that has `FAMILY` is in the table: to add a family is to add a module.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llama_npu2.errors import REMEDY
from llama_npu2.frozen import frozen
from stages.engine.files import read_json
from stages.model.config import Config, ConfigFields
from stages.model.decoder import EMBEDDING, FINAL_NORM, HEAD, STACKED, TURNED, VOCABULARY, Attention, Layer, Shape
from stages.model.families.gguf import Gguf
from stages.model.families.place import Location, Place


@frozen(eq=False)
class Family:
    """One model family."""

    model_type: str
    architectures: tuple[str, ...]
    parse: Callable[[ConfigFields], Config]
    """Returns the configuration of a checkpoint, or raises UserError that names the field that cannot be run."""
    tensors: Mapping[str, Place]
    """Where each slot of weights is."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that exporters write next to the weights."""
    wrapped: tuple[str, ...] = ()
    """Architectures that have this family's fields in `text_config`, next to a part that does not see text."""
    title: str = ""
    """What people call it."""
    of_layers: tuple[str, ...] = ("layer_types",)
    """Fields that are lists with an entry for each layer."""
    alone: Callable[[Layer], Mapping[str, Any]] = lambda layer: {}
    """Returns fields with which transformers runs a layer by itself as it is in the model."""
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
        inner = fields.nested("text_config").values.get("model_type")
        named = [(name, f) for f in families().values() for name in (*f.architectures, *f.wrapped)]
        known = [f for name, f in named if architectures == [name]]
        # Several families may be the text part of one architecture.
        family = next((f for f in known if len(known) == 1 or f.model_type == inner), None)
        if known and family is None:
            types = ", ".join(f.model_type for f in known)
            raise fields.fails("text_config: model_type", inner, f"only {types} is supported")
        if family is None:
            names = ", ".join(dict.fromkeys(name for name, _ in named))
            raise fields.fails("architectures", architectures, f"only {names} is supported")
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
    first = {"architectures": [family.architectures[0]]} if values.get("architectures") else {}
    return {**values, **first}


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
    """The weights of a slot of a layer."""

    slot: str
    layer: int | None
    name: str
    """The tensor's name. Where other weights lie in the same tensor, the slot's name follows it."""
    shape: Shape
    """In dimension names."""
    offset: float = 0.0
    """The number that is added to its values."""


def weights(config: Config) -> Iterator[Weight]:
    """Yield all weights of a model, in model order. An embedding that is the LM head too comes once."""
    decoder = config.decoder

    def weight(slot: str, layer: int | None, shape: Shape, offset: float = 0.0) -> Weight:
        return Weight(slot, layer, tensor(config, slot).format(layer=layer), shape, offset)

    yield weight(EMBEDDING, None, VOCABULARY)
    for number, layer in enumerate(decoder.layers):
        yield from (weight(slot, number, shape, layer.offset(slot)) for slot, shape in layer.slots())
    yield weight(FINAL_NORM, None, ("emb",), decoder.norm.offset)
    if not decoder.tied:
        yield weight(HEAD, None, VOCABULARY)


def tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Return name and shape of all weights of a model, in model order."""
    sizes = config.dimensions()
    return {weight.name: _resolved(weight.shape, sizes) for weight in weights(config)}


def _resolved(shape: Shape, sizes: Mapping[str, float]) -> tuple[int, ...]:
    return tuple(int(sizes[dim]) if isinstance(dim, str) else dim for dim in shape)


def tensor(config: Config, slot: str) -> str:
    """Return the name of the weights of a slot, with `{layer}` in those of layers."""
    slot = EMBEDDING if slot == HEAD and config.tied else slot
    return of(config).tensors[slot].name(slot)


def location(
    config: Config, weight: Weight, places: Mapping[str, Place] | None = None, interleaved: bool | None = None
) -> Location:
    """Return where weights lie in a checkpoint.

    Args:
        places: where each slot of weights is; None: as in the family's own checkpoints.
        interleaved: whether neighbouring rows of a head turn together; None: as in these checkpoints.
    """
    sizes, place, head = config.dimensions(), (places or of(config).tensors)[weight.slot], None
    shapes: dict[str, Shape] = {weight.slot: weight.shape}
    if weight.layer is not None:
        layer = config.decoder.layers[weight.layer]
        shapes |= layer.slots()
        if weight.slot in TURNED and isinstance(layer.mixer, Attention):
            head = layer.mixer.rope.rows(config.head_dim, interleaved)
    matrices = {slot: _of_one(slot, _resolved(shape, sizes), sizes) for slot, shape in shapes.items()}
    counts = {slot: shape[0] for slot, shape in matrices.items()}
    rows = sum(counts[slot] for slot in place.among or (weight.slot,))
    stack = (int(sizes["experts"]),) if weight.slot in STACKED and "{expert}" not in place.tensor else ()
    return Location(
        place.tensor.format(layer=weight.layer, expert="{expert}"),
        (*stack, rows, *matrices[weight.slot][1:]),
        functools.partial(place.rows, weight.slot, counts, head),
        axis=len(stack),
        transposed=place.transposed,
    )


def _of_one(slot: str, shape: tuple[int, ...], sizes: Mapping[str, float]) -> tuple[int, ...]:
    """Return the shape of a slot's weights, of stacked experts that of one's."""
    if slot not in STACKED:
        return shape
    return shape[1:] if len(shape) > 1 else (shape[0] // int(sizes["experts"]),)


def locations(
    config: Config, find: Callable[[Config, Weight], Location] = location
) -> dict[str, list[tuple[Weight, Location]]]:
    """Return the tensors of a checkpoint by name, each with the weights that lie in it, in model order.

    `find`: where weights lie.
    """
    found: dict[str, list[tuple[Weight, Location]]] = {}
    count = config.decoder.experts.count if config.decoder.experts else 0
    for weight in weights(config):
        for at in find(config, weight).of_experts(count):
            found.setdefault(at.tensor, []).append((weight, at))
    return found


def token_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the weights that a decoded token reads in full: all but an embedding that is not the LM head as well."""
    gathered = {tensor(config, EMBEDDING)} - {tensor(config, HEAD)}
    return {name: shape for name, shape in tensors(config).items() if name not in gathered}


def stored_names(name: str, wrapped: bool) -> Iterator[str]:
    """Yield the names that a tensor may have in a checkpoint.

    They are its own, that in a model without an LM head, and those inside of a wrapped model.
    """
    headless = name.removeprefix("model.")
    yield name
    yield headless
    if wrapped:
        yield f"language_model.{name}"
        yield f"model.language_model.{headless}"
