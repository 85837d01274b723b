"""The parts of models, derived from their descriptions: `builders.py` makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

from llama_npu2.errors import UserError
from stages.kernels import kv_rows
from stages.model.config import Config
from stages.model.decoder import Attention, Experts, Layer
from stages.model.part import Joined, Part, PartBuilder, PartKey
from stages.model.parts.builders import BUILDERS, FUSED, MIXES, PAIRED, QUANTISED, SHARED, SPLIT, Build, Described
from stages.model.policy import BF16, Policy
from stages.model.stored import stored
from stages.weights.cut import FeedForward
from stages.weights.formats import formats


@functools.cache
def part(config: Config, key: PartKey, policy: Policy = BF16) -> Part:
    """Return a part of a model with its weights and caches in the formats of a policy.

    KeyError if there is none of that name.
    """
    policy = with_overrides(policy, key.overrides)
    others = _sharing(config, policy) | _quantised(policy)
    plain = _built(config, key, others.get(key.name, BUILDERS[key.name]))
    return plain if policy == BF16 else replace(stored(plain, policy), key=key)


def plain_part(config: Config, key: PartKey, policy: Policy, paired: bool = False) -> Part | None:
    """Return a part with weights and caches in bf16, as it is built for a policy.

    `paired`: one with gate and up as one product; None if it has none.
    """
    build = (PAIRED if paired else BUILDERS | _quantised(policy)).get(key.name)
    return build and _built(config, PartKey(key.name, key.variant), build)


def _sharing(config: Config, policy: Policy) -> dict[str, Build]:
    """Return the parts that are others where cores share the weights of a feed-forward network."""
    if not shared_weights(config, policy):
        return {}
    network = None if _is_sandwich(config) else _network(config, policy)
    return FUSED | (SPLIT if network and network.divides(config.emb, config.ffn) else {})


def _quantised(policy: Policy) -> dict[str, Build]:
    """Return the parts that are others where rows of a KV cache have scales."""
    return QUANTISED if kv_rows.in_numbers(policy.cache) else {}


@functools.cache
def _built(config: Config, key: PartKey, build: Build) -> Part:
    layer = next(layer for layer, variant in variants(config, key.name).items() if variant == key.variant)
    return build(Described(config, layer)).build_keyed(PartKey(key.name, key.variant))


@functools.cache
def variants(config: Config, name: str) -> dict[Layer, str]:
    """Return, for each kind of layer that has a part, what tells it from the same part of others.

    It is nothing where all are equal; else what their layers have in common that others do not have, and a number where
    that does not tell them apart.
    """
    having = [layer for layer in config.decoder.kinds if MIXES.get(name, layer.mixer.kind) == layer.mixer.kind]
    builds: list[tuple[PartBuilder, list[Layer]]] = []
    for layer in having:
        built = BUILDERS[name](Described(config, layer))
        alike = next((layers for other, layers in builds if other == built), None)
        if alike is None:
            builds.append((built, [layer]))
        else:
            alike.append(layer)
    everywhere, found = _traits(having), dict[Layer, str]()
    for number, (_, layers) in enumerate(builds):
        variant = "_".join(trait for trait in _traits(layers) if trait not in everywhere)
        taken = variant in found.values()
        found |= dict.fromkeys(layers, "_".join(filter(None, (variant, str(number)))) if taken else variant)
    return found


def _traits(layers: Iterable[Layer]) -> list[str]:
    """Return what layers have in common, besides what most models have."""
    each = [
        [
            *(
                [f"w{mixer.window}"] * bool(mixer.window)
                if isinstance(mixer := layer.mixer, Attention)
                else [mixer.kind]
            ),
            *["experts"] * isinstance(layer.feed_forward, Experts),
        ]
        for layer in layers
    ]
    return [trait for trait in each[0] if all(trait in traits for traits in each)] if each else []


def key_of(config: Config, name: str, layer: int = 0) -> PartKey:
    """Return the key of a part of a layer, past the last the last, or of one outside of the layers."""
    layers = config.decoder.layers
    return PartKey(name, variants(config, name)[layers[min(layer, len(layers) - 1)]])


def layer_part(config: Config, name: str, layer: int, policy: Policy = BF16) -> Part:
    """Return a part of one layer, whose weights may have other formats than those of other layers."""
    key, others = key_of(config, name, layer), policy.of_layer(layer)
    usual = part(config, key, policy)
    overrides = tuple((s.name, others[s.name]) for s in usual.slots if s.name in others)
    return part(config, key._replace(overrides=overrides), policy) if overrides else usual


def with_overrides(policy: Policy, overrides: Iterable[tuple[str, str]]) -> Policy:
    """Return a policy with other formats of some slots."""
    return replace(policy, exceptions={**policy.exceptions, **dict(overrides)}) if overrides else policy


def joined_weights(config: Config) -> tuple[Joined, ...]:
    """Return the weights that parts may have as one slot."""
    layer: Layer = config.decoder.layers[0]
    return Described(config, layer).joined()


def joins(config: Config, policy: Policy) -> bool:
    """Whether all weights that can be joined are stored alike, in a format that the array takes as it is stored."""
    stored_as = [{policy.of(slot, j.slot.shape, "bf16") for slot in j.parts} for j in joined_weights(config)]
    alike = all(len(names) == 1 and formats()[next(iter(names))].cut for names in stored_as)
    return not policy.layers and alike


def shared_weights(config: Config, policy: Policy) -> tuple[str, ...]:
    """Return the slots of a feed-forward network's weights where a token's parts have the network as one launch.

    Its cores share the inner width, so all weights have to be stored alike, in a format whose layouts can be cut so,
    and a core needs room for the weight of the norm of a sandwich.
    """
    if not _is_sandwich(config):
        return SHARED if _cut(policy) else ()
    network = _network(config, policy)
    return SHARED if network and network.has_room(config.emb) else ()


def _is_sandwich(config: Config) -> bool:
    return any(layer.sandwich for layer in config.decoder.kinds)


def _cut(policy: Policy) -> Callable[..., FeedForward] | None:
    """Return what cuts the weights of a feed-forward network among cores, if they are stored alike."""
    names = {policy.of(slot, ("rows", "cols"), "bf16") for slot in SHARED}
    return formats()[names.pop()].feed_forward if len(names) == 1 else None


def _network(config: Config, policy: Policy) -> FeedForward | None:
    """Return how these weights are cut; None if they are not, or a core has no room: hosts take them all the same."""
    cut = _cut(policy)
    try:
        return cut and cut(config.emb, config.ffn)
    except UserError:
        return None
