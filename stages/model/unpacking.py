"""The parts with which the host unpacks weights for a prompt, and the parts that multiply with the results.

The products of a prompt take weights in the format `Policy.matmul`, whatever their own format is. What the host unpacks
lies in buffers that layers share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from stages.kernels import format_kernel
from stages.kernels.unpacking import unpack_kernel
from stages.model.config import Config
from stages.model.part import UNPACK_JOINED, Joined, Part, PartBuilder, PartKey, Slot
from stages.model.parts import joined_weights, part, plain_part, shared_weights, with_overrides
from stages.model.policy import BF16, Policy
from stages.model.stored import stored, stored_slots

UNPACKED = "unpacked."
"""The names of the buffers of unpacked weights begin so."""


def keyed_part(config: Config, key: PartKey, policy: Policy) -> Part:
    """Return the part that a key names. KeyError if there is none of that name."""
    return unpacking_part(config, key, policy) if key.unpacks else part(config, key, policy)


def unpacked(config: Config, key: PartKey, policy: Policy, how: str) -> tuple[Part | None, Part]:
    """Return a part whose products take `policy.matmul`, and the part that unpacks its weights for it.

    The latter is None where there is nothing to unpack.

    Args:
        how: `UNPACK` or `UNPACK_JOINED`.
    """
    unpacking, products = unpacking_part(config, key._replace(unpacks=how), policy), _products(config, key, policy)
    buffers = {slot.name: slot.buffer for slot in unpacking.slots if slot.role == "output"}

    def bound(slot: Slot) -> Slot:
        buffer = buffers.get(_unpacked_slot(slot.name, policy))
        return replace(slot, role="input", buffer=buffer, joins=()) if buffer else slot

    return (unpacking if buffers else None), replace(products, slots=tuple(map(bound, products.slots)))


@functools.cache
def unpacking_part(config: Config, key: PartKey, policy: Policy) -> Part:
    """Return the part that unpacks the weights of another; it has no launches where there are none to unpack."""
    policy = with_overrides(policy, key.overrides)
    joined = joined_weights(config) if key.unpacks == UNPACK_JOINED else ()
    shared = shared_weights(config, policy) if joined else ()
    products = _products(config, key, policy)
    joined_of = {weight: entry for entry in joined for weight in entry.parts}
    targets = {weight: slot for slot in products.slots for weight in slot.joins or (slot.name,)}
    b = PartBuilder()
    plain = plain_part(config, key, policy)
    assert plain
    for slot in _packed_slots(stored_slots(plain, policy), policy):
        source, target = joined_of.get(slot.name, Joined(slot, {slot.name: 0})), targets[slot.name]
        weight = replace(source.slot, format=slot.format)
        buffer = f"{UNPACKED}{target.name}"
        out = replace(target, name=_unpacked_slot(target.name, policy), role="output", buffer=buffer, joins=())
        b.slots += [new for new in (weight, out) if new not in b.slots]
        kernel, scalars = source.unpack(slot, slot.name in shared)
        place = {"to": (target.joins or (slot.name,)).index(slot.name), "apart": max(len(target.joins), 1)}
        args = {"weight": weight.name, "out": out.name}
        b.launch(format_kernel(unpack_kernel(kernel, policy.matmul), slot.format), args, **scalars, **place)
    return b.build_keyed(key)


def _products(config: Config, key: PartKey, policy: Policy) -> Part:
    """Return a part with the weights of its products in the format of `policy.matmul`, and caches in that of `kv`.

    Weights that parts may have as pairs are one slot where both are unpacked.
    """
    plain, paired = (plain_part(config, key, policy, pairs) for pairs in (False, True))
    assert plain
    if paired:
        packed = {slot.name for slot in _packed_slots(stored_slots(plain, policy), policy)}
        if {weight for slot in paired.slots for weight in slot.joins} <= packed:
            plain = paired
    products = Policy(policy.matmul, kv=policy.kv)
    return plain if products == BF16 else stored(plain, products)


def _packed_slots(slots: Iterable[Slot], policy: Policy) -> Iterator[Slot]:
    """Yield the slots of matrices that are stored in another format than a prompt's products take."""
    return (slot for slot in slots if slot.role == "weight" and len(slot.shape) == 2 and slot.format != policy.matmul)


def _unpacked_slot(name: str, policy: Policy) -> str:
    return f"{name}_{policy.matmul}"
