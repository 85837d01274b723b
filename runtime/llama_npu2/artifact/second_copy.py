"""What the host makes of weights alone, again and again for every prompt: made once and kept, where asked for.

An NPU may multiply a prompt with weights in another format than a token, which the host makes of them layer by layer,
in memory that layers share. A copy of all layers takes more memory, and prompts do not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llama_npu2.artifact.plan import BufferRef, Phase, PlannedCall, Plans, Spec


@dataclass(frozen=True)
class SecondCopy:
    """Sections of a manifest as they are with a copy for each layer. `calls` make it; no plan has them any more."""

    buffers: Mapping[str, Spec]
    plans: dict[Phase, list[PlannedCall]]
    calls: list[PlannedCall]


def second_copy(programs: Spec, buffers: Mapping[str, Spec], plans: Plans) -> SecondCopy:
    """Of these sections of a manifest. Without `calls` where weights are used as they are stored."""
    shared: set[str] = set()
    copied: dict[str, Spec] = {}
    once: dict[tuple[str, tuple[BufferRef, ...]], PlannedCall] = {}
    kept: dict[Phase, list[PlannedCall]] = {}
    for phase, calls in plans.items():
        kept[phase], current = [], dict[BufferRef, BufferRef]()
        for call in calls:
            made = dict(_made(programs, call))
            current |= {BufferRef(name): BufferRef(own) for name, own in made.items()}
            shared |= made.keys()
            bound = call._replace(buffers=tuple(current.get(reference, reference) for reference in call.buffers))
            copied |= {own: {k: v for k, v in buffers[name].items() if k != "at"} for name, own in made.items()}
            if made:
                once[bound.program, bound.buffers] = bound
            else:
                kept[phase].append(bound)
    others = {name: spec for name, spec in buffers.items() if name not in shared}
    return SecondCopy(others | copied, kept, list(once.values()))


def _made(programs: Spec, call: PlannedCall) -> Iterator[tuple[str, str]]:
    """What a call makes, if it does of one layer's weights alone: the buffer, and its name when it has that of all."""
    program = programs[call.program]
    roles = [slot["role"] for slot in program["slots"]]
    if program["host"] and call.layer is not None and {*roles} <= {"weight", "output"}:
        for role, name in zip(roles, call.names, strict=True):
            if role == "output":
                yield name, f"{name}.{call.layer}"
