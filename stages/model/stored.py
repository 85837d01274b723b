"""Parts whose weights and caches are stored as a policy says: other formats of slots, and the kernels for these."""

from __future__ import annotations

from dataclasses import replace

from stages.kernels import kernel_for
from stages.model.part import KV, Launch, Part, Slot
from stages.model.policy import Policy


def stored_slots(part: Part, policy: Policy) -> tuple[Slot, ...]:
    """Return the slots of a part of bf16 weights and caches in the formats of a policy."""
    return tuple(replace(slot, format=_format(slot, policy)) for slot in part.slots)


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


def _format(slot: Slot, policy: Policy) -> str:
    if slot.keeps == KV:
        return policy.cache
    if slot.role != "weight":
        return slot.format
    (name,) = {policy.of(weight, slot.shape, slot.format) for weight in slot.joins or (slot.name,)}
    return name
