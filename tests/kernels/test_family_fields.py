"""What families make of the fields of a `config.json`, against transformers' classes: defaults, spellings, tables."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llama_npu2 import UserError
from stages.model.checkpoint import Checkpoint
from stages.model.config import ANGLES, Config, table
from stages.model.families import families, parse_config
from stages.model.plan import make_plan
from stages.model.presets import PRESETS
from stages.targets import targets
from tests.kernels.test_families import FAMILIES, ministral3, torch, transformers, write

pytestmark = pytest.mark.verify

SIZES = {
    "vocab_size": 400_000,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
}
NEEDED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"hidden_activation": "gelu_pytorch_tanh"},
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["attention"] * 6, "position_embedding_type": "rope"},
    "olmo3": {"max_position_embeddings": 8192},
    "exaone4": {"max_position_embeddings": 8192},
}
"""Fields without which a family refuses the class's defaults, or has no window, as it would hold the whole context."""


def parsed(family: str, **fields: Any) -> tuple[Config, Any]:
    """A configuration as we and as transformers read it."""
    architecture = families()[family].architectures[0]
    raw = {"architectures": [architecture], "model_type": family} | SIZES | NEEDED.get(family, {}) | fields
    return parse_config(raw, "test"), getattr(transformers, architecture).config_class.from_dict(copy.deepcopy(raw))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) & set(families())))
def test_defaults_are_those_of_the_class(family: str) -> None:
    """Fields that are absent: tied or not, epsilon, window, base of the rotation, heads, context, end of text."""
    ours, theirs = parsed(family)
    decoder, rope = ours.decoder, theirs.rope_parameters
    nested = rope.get("full_attention", rope)
    full = next(mixer for mixer in decoder.attentions if mixer.rope.kind in ("", "long"))
    ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    assert decoder.tied == theirs.tie_word_embeddings
    assert decoder.eps == getattr(theirs, "rms_norm_eps", None) or decoder.eps == theirs.norm_eps
    assert full.rope.theta == nested["rope_theta"]
    assert (ours.kv_heads, ours.max_seq) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    windows = {mixer.window for mixer in decoder.attentions} - {None}
    uses = getattr(theirs, "use_sliding_window", True) and theirs.to_dict().get("sliding_window")
    assert windows == ({uses} if uses else set())
    if family not in ("llama", "qwen2", "qwen3"):  # which have none, and need one in their files
        assert ours.eos == tuple(end for end in ends if end is not None)


def test_rotations_are_those_of_the_class() -> None:
    """In both regimes of Phi, with its factor of attention on what turns alone; YaRN; a share; from 0 to the end."""
    cases = [
        ("phi-4-mini", 4096, 96),
        ("phi-4-mini", 8192, 96),
        ("ministral3-3b", 20_000, 128),
        ("smollm3-3b", 300, 128),
    ]
    for name, positions, turned in cases:
        config = parse_config(PRESETS[name], name).within(positions)
        architecture = getattr(transformers, PRESETS[name]["architectures"][0])
        found = architecture.config_class.from_dict(copy.deepcopy(PRESETS[name]))
        module = __import__(architecture.__module__, fromlist=["_"])
        rotary = getattr(module, architecture.__name__.replace("ForCausalLM", "RotaryEmbedding"))(found)
        numbers = torch.arange(positions)[None]
        cos, sin = (part[0].numpy() for part in rotary(torch.zeros(1), numbers))
        rows = table(config, f"{ANGLES}{config.decoder.layers[0].mixer.rope.suffix}", positions)  # type: ignore[union-attr]
        half, pairs = config.head_dim // 2, turned // 2
        # Angles of transformers are f32 products, up to half a unit of the position off.
        bound = 2.0**-23 * positions
        np.testing.assert_allclose(rows[:, :pairs], cos[:, :pairs], atol=bound)
        np.testing.assert_allclose(rows[:, half : half + pairs], sin[:, :pairs], atol=bound)
        assert (rows[:, pairs:half] == 1).all() and (rows[:, half + pairs :] == 0).all()


def test_long_rotations_are_chosen_by_the_context() -> None:
    """Short factors up to the original context, which is the default; long ones beyond, at every position."""
    config = parse_config(PRESETS["phi-4-mini"], "test")
    cpu = targets()["cpu"]
    for context, length, name in ((0, 4096, ANGLES), (4096, 4096, ANGLES), (4097, 4097, f"{ANGLES}.long")):
        within = config.within(context)
        plan = make_plan(within, cpu.grouping(cpu.default_grouping), cpu.kernel_set)
        assert within.max_seq == length
        assert [buffer for buffer in plan.buffers if buffer.startswith(ANGLES)] == [name]
    short, long = (table(config, f"{ANGLES}{kind}", 3) for kind in ("", ".long"))
    assert (short[0] == long[0]).all() and (short[1] != long[1]).any()
    assert short[0, 0] == pytest.approx(np.sqrt(1 + np.log(32) / np.log(4096)), rel=1e-6)
    assert short[0, 63] == 1


def test_spellings_of_phi() -> None:
    """Older files call LongRoPE su or yarn; the original context outside counts, also where only the class has it."""
    raw = PRESETS["phi-4-mini"]
    config = parse_config(raw, "test")
    for kind in ("su", "yarn"):
        assert parse_config(raw | {"rope_scaling": raw["rope_scaling"] | {"type": kind}}, "test") == config
    inside = raw["rope_scaling"] | {"original_max_position_embeddings": 77, "rope_theta": 1e4}
    without = {name: value for name, value in raw.items() if not name.startswith(("original", "rope"))}
    assert parse_config(without | {"rope_parameters": inside}, "test") == config
    assert parse_config(PRESETS["phi-3-mini"], "test").decoder.attention.window == 2047
    with pytest.raises(UserError, match=r"partial_rotary_factor = 0\.51: must be an even part of head_dim = 128"):
        parse_config(raw | {"partial_rotary_factor": 0.51}, "test")
    with pytest.raises(UserError, match=r"short_factor = .*: must be 48 positive numbers"):
        parse_config(raw | {"rope_scaling": raw["rope_scaling"] | {"short_factor": [1.0] * 47}}, "test")


def test_queries_of_ministral_grow_from_16384_on() -> None:
    config = parse_config(PRESETS["ministral3-3b"], "test")
    keys, queries = (table(config, f"{ANGLES}{kind}", 40_000) for kind in ("", ".q"))
    assert (queries[:16_384] == keys[:16_384]).all()
    for position in (16_384, 32_767, 32_768, 39_999):
        factor = 1 + 0.1 * np.log(1 + position // 16_384)
        np.testing.assert_allclose(queries[position], factor * keys[position], rtol=1e-6)
    array = targets()["npu2"]
    array.check(config.within(16_384))
    with pytest.raises(UserError, match="ministral3: target npu2 has no kernels for queries that grow"):
        array.check(config.within(16_385))
    spelled = PRESETS["ministral3-3b"]["rope_parameters"]
    other = {name: value for name, value in spelled.items() if name != "rope_type"} | {"type": "yarn"}
    assert parse_config(PRESETS["ministral3-3b"] | {"rope_parameters": other}, "test") == config
    half = parse_config(PRESETS["ministral3-3b"] | {"rope_parameters": spelled | {"mscale": 0.5}}, "test")
    factor = half.decoder.attention.rope.scaling.attention_factor
    assert factor == pytest.approx((0.05 * np.log(16) + 1) / (0.1 * np.log(16) + 1))


def test_ministral_within_a_model_that_sees(tmp_path: Path) -> None:
    """Its kind is in `text_config`; whether the head is tied, outside; tensors have either prefix."""
    rng = np.random.default_rng(3)
    config = write(tmp_path / "plain", "ministral3", ministral3(rng) | {"tie_word_embeddings": False})
    inner = json.loads((tmp_path / "plain/config.json").read_text()) | {"tie_word_embeddings": True}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    outer |= {"text_config": inner, "tie_word_embeddings": False}
    tensors, plain = load_file(tmp_path / "plain/model.safetensors"), Checkpoint.open(tmp_path / "plain")
    for prefix, head in (("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")):
        directory = tmp_path / prefix
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(outer))
        renamed = {
            name.replace("lm_head.", head) if "lm_head" in name else name.replace("model.", prefix, 1): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed | {"vision_tower.x": np.zeros(1, np.float32)}, directory / "model.safetensors")
        wrapped = Checkpoint.open(directory, ())
        assert wrapped.config == config
        assert all((wrapped.tensor(name) == plain.tensor(name)).all() for name in plain.held)
    with pytest.raises(UserError, match='text_config: model_type = "llama": only ministral3, mistral is supported'):
        parse_config(outer | {"text_config": {"model_type": "llama"}}, "test")


@pytest.mark.parametrize("family", ["gemma3_text", "granite", "lfm2", "phi3", "qwen3", "smollm3"])
def test_a_tied_head_may_be_stored_as_well(family: str, tmp_path: Path) -> None:
    """A stored head that is tied is the embedding, and no unexpected tensor."""
    raw = FAMILIES[family][1](np.random.default_rng(2)) | {"tie_word_embeddings": True}
    config = write(tmp_path / "model", family, raw)
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, file, {"format": "pt"})
    opened = Checkpoint.open(tmp_path / "model", ())
    assert opened.config == config and config.decoder.tied
    assert {name for tensor in opened.held.values() for name in tensor.parts} == {*tensors}


REFUSED = [
    ("granitemoehybrid", {"num_local_experts": 8}, "num_local_experts = 8: only 0"),
    ("granitemoehybrid", {"layer_types": ["mamba", *["attention"] * 5]}, "layer_types = .*: only attention"),
    ("granitemoehybrid", {"layer_types": None}, "layer_types = null: only attention"),
    ("granitemoehybrid", {"layer_types": ["attention"]}, "layer_types = .*: must have an entry for each"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier = 0: must be a positive number"),
    ("granite", {"attention_bias": True}, "attention_bias = true: only false"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers = .*: must be 6 times 0 or 1"),
    ("smollm3", {"mlp_bias": True}, "mlp_bias = true: only false"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 6}, "use_sliding_window = null: must be true"),
    ("ministral3", {"layer_types": ["sliding_attention"] * 6}, "layer_types = .*: only null"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias = true: only false"),
]


@pytest.mark.parametrize("family, fields, line", REFUSED, ids=[f"{case[0]}-{next(iter(case[1]))}" for case in REFUSED])
def test_what_changes_arithmetic_is_refused(family: str, fields: dict[str, Any], line: str) -> None:
    raw = {"architectures": [families()[family].architectures[0]], "model_type": family}
    with pytest.raises(UserError, match=line):
        parse_config(raw | SIZES | NEEDED.get(family, {}) | fields, "test")
