"""The parts of each model family: one module a family, named by its `model_type`, with the table `PARTS`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from stages.model.part import Joined, Part, PartKey
from stages.model.policy import BF16, Policy
from stages.model.stored import stored
from stages.weights.formats import formats


def family_parts(family: str) -> Any:
    """Return the module with the parts of a family."""
    return importlib.import_module(f"{__name__}.{family}")


@functools.cache
def part(family: str, name: str, policy: Policy = BF16, overrides: tuple[tuple[str, str], ...] = ()) -> Part:
    """Return a part of a family with its weights and caches in the formats of a policy.

    KeyError if the family has none of that name.

    Args:
        overrides: slots whose format is not the policy's, each with its format.
    """
    policy = with_overrides(policy, overrides)
    module = family_parts(family)
    fused = getattr(module, "FUSED", {}) if shared_weights(family, policy) else {}
    plain: Part = fused.get(name, module.PARTS[name])()
    return plain if policy == BF16 else replace(stored(plain, policy), key=PartKey(name, overrides))


def layer_part(family: str, name: str, layer: int, policy: Policy = BF16) -> Part:
    """Return a part of one layer, whose weights may have other formats than those of other layers."""
    usual, others = part(family, name, policy), policy.of_layer(layer)
    return part(family, name, policy, tuple((s.name, others[s.name]) for s in usual.slots if s.name in others))


def with_overrides(policy: Policy, overrides: Iterable[tuple[str, str]]) -> Policy:
    """Return a policy with other formats of some slots."""
    return replace(policy, exceptions={**policy.exceptions, **dict(overrides)})


def joined_weights(family: str) -> tuple[Joined, ...]:
    """Return the weights that parts of a family may have as one slot."""
    joined: tuple[Joined, ...] = getattr(family_parts(family), "JOINED", ())
    return joined


def joins(family: str, policy: Policy) -> bool:
    """Whether all weights that can be joined are stored alike, in a format that the array takes as it is stored."""
    stored_as = [{policy.of(slot, j.slot.shape, "bf16") for slot in j.parts} for j in joined_weights(family)]
    alike = all(len(names) == 1 and formats()[next(iter(names))].cut for names in stored_as)
    return bool(stored_as) and not policy.layers and alike


def shared_weights(family: str, policy: Policy) -> tuple[str, ...]:
    """Return the slots of a feed-forward network's weights where a token's parts have the network as one launch.

    Its cores share the inner width, so all weights have to be stored alike, in a format whose layouts can be cut so.
    """
    slots: tuple[str, ...] = getattr(family_parts(family), "SHARED", ())
    names = {policy.of(slot, ("rows", "cols"), "bf16") for slot in slots}
    return slots if len(names) == 1 and formats()[names.pop()].feed_forward else ()
