"""GLM-4 of 2024 (GLM team 2024), GLM-Edge: half of each head's rows turn, and Q, K and V have biases."""

from __future__ import annotations

from stages.model.config import Config, ConfigFields
from stages.model.families import Family, glm4
from stages.model.families.llama import IGNORED


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `GlmForCausalLM`. Raises UserError that names field and value."""
    return glm4.described(fields, "glm", sandwich=False)


FAMILY = Family("glm", ("GlmForCausalLM",), parse, glm4.NAMES, IGNORED, title="GLM-4, GLM-Edge")
