"""What the host makes of weights alone, again and again for every prompt: made once and kept, where asked for.

An NPU may multiply a prompt with weights in another format than a token, which the host makes of them layer by layer,
in memory that layers share. A copy of all layers takes more memory, and prompts do not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Spec = Mapping[str, Any]


@dataclass(frozen=True)
class SecondCopy:
    """Sections of a manifest as they are with a copy for each layer. `calls` make it; no plan has them any more."""

    buffers: Mapping[str, Spec]
    plans: Mapping[str, list[Spec]]
    calls: list[Spec]


def second_copy(programs: Spec, buffers: Mapping[str, Spec], plans: Mapping[str, Sequence[Spec]]) -> SecondCopy:
    """Of these sections of a manifest. Without `calls` where weights are used as they are stored."""
    shared: set[str] = set()
    copied: dict[str, Spec] = {}
    once: dict[tuple[str, ...], Spec] = {}
    kept: dict[str, list[Spec]] = {}
    for phase, calls in plans.items():
        kept[phase], current = [], dict[str, str]()
        for call in calls:
            made = dict(_made(programs, call))
            current |= made
            shared |= made.keys()
            bound = [current.get(name, name) for name in call["buffers"]]
            copied |= {own: {k: v for k, v in buffers[name].items() if k != "at"} for name, own in made.items()}
            if made:
                once[call["program"], *bound] = {**call, "buffers": bound}
            else:
                kept[phase].append({**call, "buffers": bound})
    others = {name: spec for name, spec in buffers.items() if name not in shared}
    return SecondCopy(others | copied, kept, list(once.values()))


def _made(programs: Spec, call: Spec) -> Iterator[tuple[str, str]]:
    """What a call makes, if it does of one layer's weights alone: the buffer, and its name when it has that of all."""
    program = programs[call["program"]]
    roles = [slot["role"] for slot in program["slots"]]
    if program["host"] and "layer" in call and {*roles} <= {"weight", "output"}:
        for role, name in zip(roles, call["buffers"], strict=True):
            if role == "output":
                yield name, f"{name}.{call['layer']}"
