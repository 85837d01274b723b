"""Llama's parts over the tensors of `toy`."""

from collections.abc import Callable
from dataclasses import replace

from stages.model.families.toy import renamed

from stages.model.part import Part
from stages.model.parts import llama


def over_toy(make: Callable[[], Part]) -> Callable[[], Part]:
    def build() -> Part:
        part = make()
        return replace(part, slots=tuple(replace(slot, buffer=renamed(slot.buffer)) for slot in part.slots))

    return build


PARTS = {name: over_toy(make) for name, make in llama.PARTS.items()}
