"""Llama under another name, its tensors too."""

from dataclasses import replace

from stages.model.config import Config, ConfigFields
from stages.model.families import llama
from stages.model.families.place import Place


def renamed(place: Place) -> Place:
    tensor = place.tensor.replace("model.layers.", "decoder.").replace("model.embed_tokens", "tokens")
    return replace(place, tensor=tensor)


def parse(fields: ConfigFields) -> Config:
    return replace(llama.parse(fields), family="toy")


FAMILY = replace(
    llama.FAMILY,
    model_type="toy",
    architectures=("ToyForCausalLM",),
    parse=parse,
    tensors={slot: renamed(place) for slot, place in llama.TENSORS.items()},
)
