"""A second copy of the weights, in the format in which an NPU multiplies a prompt with them.

That format may differ from the stored one. Then the host unpacks the weights of each layer, for every prompt, into
memory that the layers share. A copy of all layers takes more memory, but is unpacked once, and prompts do not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llama_npu2.artifact.plan import BufferRef, Phase, PlannedCall, Plans, Spec
from llama_npu2.frozen import frozen


@frozen
class SecondCopy:
    """The sections of a manifest that change when every layer has a copy of its own."""

    buffers: Mapping[str, Spec]
    plans: dict[Phase, list[PlannedCall]]
    """The plans without `calls`."""
    calls: list[PlannedCall]
    """The calls that unpack the copy; none where prompts take weights as they are stored."""


def second_copy(programs: Spec, buffers: Mapping[str, Spec], plans: Plans) -> SecondCopy:
    """Return these sections of a manifest with a buffer per layer in place of each one that layers share."""
    shared: set[str] = set()
    copies: dict[str, Spec] = {}
    unpacking: dict[tuple[str, tuple[BufferRef, ...]], PlannedCall] = {}
    remaining: dict[Phase, list[PlannedCall]] = {}
    for phase, calls in plans.items():
        remaining[phase], current = [], dict[BufferRef, BufferRef]()
        for call in calls:
            unpacked = dict(_unpacked(programs, call))
            current |= {BufferRef(name): BufferRef(own) for name, own in unpacked.items()}
            shared |= unpacked.keys()
            bound = call._replace(buffers=tuple(current.get(reference, reference) for reference in call.buffers))
            copies |= {own: {k: v for k, v in buffers[name].items() if k != "at"} for name, own in unpacked.items()}
            if unpacked:
                unpacking[bound.program, bound.buffers] = bound
            else:
                remaining[phase].append(bound)
    others = {name: spec for name, spec in buffers.items() if name not in shared}
    return SecondCopy(others | copies, remaining, list(unpacking.values()))


def _unpacked(programs: Spec, call: PlannedCall) -> Iterator[tuple[str, str]]:
    """Yield the buffers that a call computes from the weights of one layer alone, each with its name in that layer."""
    program = programs[call.program]
    roles = [slot["role"] for slot in program["slots"]]
    if program["host"] and call.layer is not None and {*roles} <= {"weight", "output"}:
        for role, name in zip(roles, call.names, strict=True):
            if role == "output":
                yield name, f"{name}.{call.layer}"
