"""OLMo 3 (OLMo team 2025): OLMo 2 with windows in most layers, whose rotation is not scaled."""

from __future__ import annotations

from stages.model.config import MOST_LAYERS, Config, ConfigFields, sliding_kinds
from stages.model.families import Family, olmo2
from stages.model.families.llama import IGNORED


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of an `Olmo3ForCausalLM`. Raises UserError that names field and value."""
    fields.require(olmo2.REQUIRED)
    head_dim = fields.heads().head_dim
    max_seq = fields.positions(head_dim)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = fields.kinds(sliding_kinds(count, olmo2.PERIOD))
    windows, theta = fields.windows(kinds, max_seq), fields.number("rope_theta", 5e5)
    ropes = fields.ropes(max_seq, head_dim, theta, theta)
    layers = {kind: olmo2.layer(fields, ropes[kind], windows[kind]) for kind in {*kinds}}
    return olmo2.described(fields, "olmo3", [layers[kind] for kind in kinds], max_seq)


FAMILY = Family("olmo3", ("Olmo3ForCausalLM",), parse, olmo2.NAMES, IGNORED, title="OLMo 3", gguf=olmo2.GGUF)
"""In GGUF files it is an OLMo 2 with windows."""
