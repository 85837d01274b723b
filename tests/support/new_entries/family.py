"""Llama under another name, its tensors too."""

from dataclasses import replace

from stages.model.config import Config, ConfigFields
from stages.model.families import llama


def renamed(name: str) -> str:
    return name.replace("model.layers.", "decoder.").replace("model.embed_tokens", "tokens")


def parse(fields: ConfigFields) -> Config:
    return replace(llama.parse(fields), family="toy")


FAMILY = replace(
    llama.FAMILY,
    model_type="toy",
    architectures=("ToyForCausalLM",),
    parse=parse,
    tensors={slot: renamed(name) for slot, name in llama.TENSORS.items()},
)
