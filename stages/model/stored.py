"""Parts whose weights and caches are stored as a policy says: other formats of slots, and the kernels for these."""

from __future__ import annotations

from dataclasses import replace

from stages.kernels import kernel_for, kv_rows
from stages.model.part import KV, KV_ROW, Launch, Part, Shape, Slot
from stages.model.policy import Policy


def stored_slots(part: Part, policy: Policy) -> tuple[Slot, ...]:
    """Return the slots of a part of bf16 weights and caches in the formats of a policy."""
    formats = ((slot, _format(slot, policy)) for slot in part.slots)
    return tuple(replace(slot, format=form, shape=_shape(slot, form)) for slot, form in formats)


def stored(part: Part, policy: Policy) -> Part:
    """Return a part of bf16 weights and caches with the formats of a policy and the kernels of these formats."""
    slots = stored_slots(part, policy)
    by_name = {slot.name: slot for slot in slots}

    def with_kernel(launch: Launch) -> Launch:
        bound = [(arg, by_name[launch.args[arg.name]]) for arg in launch.kernel.args]
        matrices = {slot.format for arg, slot in bound if arg.matrix}
        (name,) = matrices or {slot.format for _, slot in bound if slot.keeps == KV} or {"bf16"}
        chosen = kernel_for(launch.kernel.operation, name, policy.activations)
        assert chosen is not None, f"{launch.kernel.operation} with {name}"
        return replace(launch, kernel=chosen)

    return replace(part, slots=slots, launches=tuple(map(with_kernel, part.launches)))


def _shape(slot: Slot, form: str) -> Shape:
    """Return the shape of a slot in a format; rows of a cache that have scales are those of K or V of a head."""
    by_head = slot.keeps == KV and slot.shape[-1:] == KV_ROW and kv_rows.in_numbers(form)
    return (*slot.shape[:-1], "kv_halves", "head_dim") if by_head else slot.shape


def _format(slot: Slot, policy: Policy) -> str:
    if slot.keeps == KV:
        return policy.cache
    if slot.role != "weight":
        return slot.format
    (name,) = {policy.of(weight, slot.shape, slot.format) for weight in slot.joins or (slot.name,)}
    return name
