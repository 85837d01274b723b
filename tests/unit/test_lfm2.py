"""LFM2's configurations: what each spelling says, and what is refused by its name."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from llama_npu2.errors import UserError
from stages.model import families
from stages.model.config import Config
from stages.model.decoder import Attention, ShortConv
from stages.model.families import parse_config
from stages.model.presets import PRESETS


def parsed(**changes: Any) -> Config:
    raw = PRESETS["lfm2-350m"] | changes
    return parse_config({name: value for name, value in raw.items() if value is not None}, "test")


@pytest.mark.parametrize(
    "name, inner, parameters",
    [
        ("lfm2-350m", 4608, 354_483_968),
        ("lfm2-700m", 6912, 742_489_344),
        ("lfm2-1.2b", 8192, 1_170_340_608),
        ("lfm2-2.6b", 10752, 2_569_272_320),
    ],
)
def test_sizes_are_the_published_ones(name: str, inner: int, parameters: int) -> None:
    """Two thirds of the width, up to a multiple, unless that is switched off."""
    config = parse_config(PRESETS[name], "test")
    assert config.ffn == inner
    assert sum(map(prod, families.tensors(config).values())) == parameters


@pytest.mark.parametrize(
    "changes, inner",
    [
        ({"block_ff_dim": 100, "block_multiple_of": 8}, 72),
        ({"block_ff_dim": 100, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3}, 88),
        ({"block_ff_dim": None, "intermediate_size": 100, "block_auto_adjust_ff_dim": False}, 100),
        ({"block_ff_dim": 100, "intermediate_size": 7, "block_auto_adjust_ff_dim": False}, 100),
        ({"block_ff_dim": None}, 8192),
    ],
)
def test_inner_width(changes: dict[str, Any], inner: int) -> None:
    assert parsed(**changes).ffn == inner


def test_kinds_of_layers_in_either_spelling() -> None:
    attending = [2, 5, 8, 10, 12, 14]
    kinds = ["full_attention" if layer in attending else "conv" for layer in range(16)]
    config = parsed(full_attn_idxs=None, layer_types=kinds)
    assert config == parsed()
    found = [isinstance(layer.mixer, Attention) for layer in config.decoder.layers]
    assert [layer for layer, attends in enumerate(found) if attends] == attending
    assert config.decoder.layers[0].mixer == ShortConv(3)
    assert not parsed(full_attn_idxs=None).decoder.taps, "without either all layers attend"


def test_the_head_is_tied_unless_it_is_said() -> None:
    assert parsed().tied and parsed(tie_word_embeddings=False, tie_embedding=True).tied
    assert not parsed(tie_embedding=False).tied and not parsed(tie_word_embeddings=False).tied


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"conv_bias": True}, "conv_bias = true"),
        ({"full_attn_idxs": []}, "layer_types.*attention"),
        ({"full_attn_idxs": 3}, "full_attn_idxs = 3"),
        ({"layer_types": ["conv"] * 15}, "layer_types.*16 times full_attention or conv"),
        ({"layer_types": ["mamba"] * 16}, "layer_types.*rewound"),
        ({"conv_L_cache": 0}, "conv_L_cache = 0"),
        ({"block_ff_dim": 1}, "intermediate_size"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        parsed(**changes)
