"""Models that every program of the array must exist for, and the array's programs by name."""

from __future__ import annotations

import random
from dataclasses import replace

from llama_npu2.errors import UserError
from stages.graph.options import Options
from stages.kernels.tokens import COUNTS
from stages.model.config import Config
from stages.model.families import parse_config
from stages.model.grouping import CONTEXT_BUCKET, Program, programs
from stages.model.policy import parse_policy
from stages.model.presets import PRESETS
from stages.targets.npu2 import TARGET
from stages.targets.npu2.groupings import GROUPINGS
from tests.conftest import A_LLAMA


def model(
    vocab: int, emb: int, ffn: int, heads: int, kv_heads: int, head_dim: int, layers: int = 1, eps: float = 1e-5
) -> Config:
    fields = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": emb,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "rms_norm_eps": eps,
    }
    return parse_config(fields, "a test's config.json")


BUCKETS = Options().bucket_list()
"""What a prompt's programs are built for by default."""

DEMO = model(2000, 256, 768, 4, 2, 64, layers=4)
"""The shipped model's, but for a vocabulary that is no whole number of blocks."""

_LLAMAS = {name: fields for name, fields in PRESETS.items() if fields["model_type"] == "llama"}
MODELS = {"demo": DEMO, **{name: parse_config(fields, name) for name, fields in _LLAMAS.items()}}


JUDGED = {
    **MODELS,
    "llama-3.1-8b": model(128256, 4096, 14336, 32, 8, 128, layers=32),
    "one kv head": model(32000, 2048, 5632, 32, 1, 64, layers=22),
}
"""Whose programs the real compiler is to accept."""


def _on_array(config: Config) -> bool:
    try:
        TARGET.check(config.within(4096))
        return True
    except UserError:
        return False


_OTHERS = {name: parse_config(fields, name) for name, fields in PRESETS.items() if name not in _LLAMAS}
FAMILIES = {name: config for name, config in _OTHERS.items() if _on_array(config)}
"""Models of other families that the array runs."""


def family_programs(name: str, grouping: str, weights: str) -> list[Program]:
    """What runs on the array, a prompt's programs for 512 rows, in all windows of a cache of 4096 positions."""
    made = programs(FAMILIES[name], GROUPINGS[grouping], (512,), parse_policy(weights), 4096)
    return [program for program in made if not program.host]


def device_programs(grouping: str, *buckets: int, positions: int = 0) -> list[Program]:
    """What runs on the array, a prompt's programs once per bucket (128 if none is given), in windows of a cache of so
    many positions: each just in its first, if nothing is said."""
    buckets = buckets or (CONTEXT_BUCKET,)
    made = programs(A_LLAMA, GROUPINGS[grouping], buckets, positions=positions or min(buckets))
    return [program for program in made if not program.host]


def device_program(name: str, grouping: str = "fused", bucket: int = 128, positions: int = 0) -> Program:
    """By its entry; of a prompt in the smallest window that has so many positions."""
    found = [each for each in device_programs(grouping, bucket, positions=positions) if each.entry == name]
    return next(each for each in found if not (each.bucket and each.context) or each.context >= positions)


def layout(program: Program, slot: str) -> str:
    """In which the kernels of the array take a slot."""
    (found,) = {
        part.layout_of(own, TARGET.kernel_set)
        for part, wired in zip(program.parts, program.wiring, strict=True)
        for own, name in wired.items()
        if name == slot
    }
    return found


FEW: dict[str, object] = {"buckets": "64", "context": 256}
"""Choices with which the demo has few programs: each takes seconds to build for the simulator."""


def drawn_program(seed: int) -> tuple[str, Config, Program]:
    """Return what a draw stands for, its model and a program of it: of a prompt, a token, several tokens or a token of
    several sequences, in `int4` or `int8`, at any context bucket up to 32k. A quarter of the models are made up.

    Draws that the planner refuses are drawn again.
    """
    draw = random.Random(seed)
    while True:
        name = "made up" if draw.random() < 0.25 else draw.choice([*MODELS, *FAMILIES])
        config = _made_up(draw) if name == "made up" else {**MODELS, **FAMILIES}[name]
        weights, kv = draw.choice(["int4", "int8"]), draw.choice(["bf16", "int8"])
        rows, together = draw.choice([0, 1, *COUNTS]), draw.random() < 0.5
        chosen = (rows,) if rows > 1 else ()
        grouping = replace(GROUPINGS["fused"], **{"together" if together else "counts": chosen})
        try:
            made = programs(config, grouping, BUCKETS, parse_policy(weights, kv=kv), draw.choice([4096, 32768]))
        except UserError:
            continue
        kinds = [each for each in made if not each.host and _rows(each) == rows]
        if kinds:
            program = draw.choice(kinds)
            return f"{name} {weights} kv={kv} {program.name}", config, program


def _rows(program: Program) -> int:
    """Return how many tokens a program takes; 0 for one of a prompt."""
    return (program.bucket or 0) if program.several else int(program.bucket is None)


def _made_up(draw: random.Random) -> Config:
    """Return a model whose sizes no preset has."""
    kv_heads, head_dim = draw.choice([1, 2, 3, 4, 5, 8]), draw.choice([32, 64, 96, 128])
    heads = kv_heads * draw.choice([1, 2, 3, 4, 6, 7])
    emb, ffn = (32 * draw.randint(4, longest) for longest in (128, 400))
    return model(draw.randint(1000, 140_000), emb, ffn, heads, kv_heads, head_dim, layers=draw.randint(1, 3))
