"""Llama under another name, its tensors too."""

from dataclasses import replace

from stages.model.config import Config, ConfigFields
from stages.model.families import llama


def renamed(name: str) -> str:
    return name.replace("model.layers.", "decoder.").replace("model.embed_tokens", "tokens")


def parse(fields: ConfigFields) -> Config:
    return replace(llama.parse(fields), family="toy")


def tensors(config: Config) -> dict[str, tuple[int, ...]]:
    return {renamed(name): shape for name, shape in llama.tensors(config).items()}


def head(config: Config) -> str:
    return renamed(llama.head(config))


FAMILY = replace(
    llama.FAMILY,
    model_type="toy",
    architectures=("ToyForCausalLM",),
    parse=parse,
    tensors=tensors,
    embedding=renamed(llama.EMBED),
    head=head,
    matrices={slot: renamed(name) for slot, name in llama.FAMILY.matrices.items()},
)
