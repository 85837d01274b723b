"""Every model family against transformers and the numpy reference, over random configurations of all its axes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from llama_npu2 import load
from llama_npu2.artifact.plan import DECODE, PREFILL
from llama_npu2.engine.llama import Llama
from llama_npu2.engine.step import Run
from stages.model import families
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.model.config import Config, table
from stages.model.decoder import ADDENDS
from stages.model.families import parse_config
from stages.model.grouping import programs
from stages.model.plan import make_plan
from stages.model.random_weights import write_byte_tokenizer
from stages.model.reference import Model
from stages.proof.comparison import transformers_model
from stages.targets.npu2.groupings import GROUPINGS
from tests.conftest import build
from tests.support.later import later

pytestmark = pytest.mark.verify
torch = later("torch", "needs the verify extra: pip install -e '.[verify]'")
transformers = later("transformers", "needs the verify extra: pip install -e '.[verify]'")

Raw = dict[str, Any]
POSITIONS = 400


def common(rng: np.random.Generator) -> Raw:
    """Sizes that every family has."""
    kv_heads = int(rng.choice([1, 2, 3]))
    heads = kv_heads * int(rng.choice([1, 2, 3]))
    return {
        # Transformers asks Gemma's for a multiple of the heads.
        "hidden_size": heads * 2 * int(rng.integers(8, 20)),
        "intermediate_size": int(rng.integers(40, 150)),
        "num_hidden_layers": int(rng.choice([1, 2, 3, 5])),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": int(rng.choice([10, 16, 48, 96])),
        "vocab_size": int(rng.integers(257, 400)),
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5, 0.02])),
        "rope_theta": float(rng.choice([1e4, 5e5])),
        "tie_word_embeddings": bool(rng.integers(2)),
        "eos_token_id": 2,
    }


def window(rng: np.random.Generator) -> int:
    return int(rng.choice([1, 2, 15, 16, 17, 100, 127, 128, 129, 200]))


def llama(rng: np.random.Generator) -> Raw:
    return common(rng)


def mistral(rng: np.random.Generator) -> Raw:
    return common(rng) | {"sliding_window": window(rng) if rng.integers(4) else None}


def qwen2(rng: np.random.Generator) -> Raw:
    raw = common(rng)
    raw |= {"head_dim": None, "hidden_size": raw["num_attention_heads"] * int(rng.choice([10, 16, 48]))}
    windows = {"use_sliding_window": bool(rng.integers(2)), "sliding_window": window(rng)}
    return raw | windows | {"max_window_layers": int(rng.integers(3))}


def qwen3(rng: np.random.Generator) -> Raw:
    windows = {"use_sliding_window": bool(rng.integers(2)), "sliding_window": window(rng)}
    return common(rng) | windows | {"max_window_layers": int(rng.integers(3))}


def gemma3(rng: np.random.Generator) -> Raw:
    raw = common(rng) | {"num_hidden_layers": int(rng.choice([2, 3, 7]))}
    raw |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": int(rng.choice([8, 24, 168]))}
    raw |= {"sliding_window": window(rng), "rope_local_base_freq": 1e4, "rope_theta": 1e6}
    raw |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0} if rng.integers(2) else None}
    if rng.integers(2):
        raw["layer_types"] = kinds(rng, raw["num_hidden_layers"])
    return raw


def lfm2(rng: np.random.Generator) -> Raw:
    raw = common(rng) | {"norm_eps": 1e-5, "conv_L_cache": int(rng.choice([2, 3, 4]))}
    raw |= {"block_auto_adjust_ff_dim": bool(rng.integers(2)), "block_multiple_of": int(rng.choice([8, 30]))}
    raw |= {"block_ffn_dim_multiplier": float(rng.choice([1.0, 1.3])), "num_hidden_layers": int(rng.choice([2, 3, 6]))}
    attending = sorted(rng.choice(raw["num_hidden_layers"], int(rng.choice([1, 2])), replace=False).tolist())
    if rng.integers(2):
        return raw | {"full_attn_idxs": attending}
    kinds = ["full_attention" if layer in attending else "conv" for layer in range(raw["num_hidden_layers"])]
    return raw | {"layer_types": kinds}


def lfm2_moe(rng: np.random.Generator) -> Raw:
    own = {"norm_topk_prob": bool(rng.integers(2)), "num_dense_layers": int(rng.choice([0, 1, 2])), "pad_token_id": 0}
    raw = lfm2(rng) | experts(rng, "num_experts") | {"moe_intermediate_size": int(rng.integers(20, 70)), **own}
    if attending := raw.pop("full_attn_idxs", None):
        layers = range(raw["num_hidden_layers"])
        raw["layer_types"] = ["full_attention" if layer in attending else "conv" for layer in layers]
    return {name: value for name, value in raw.items() if not name.startswith("block_")}


def phi3(rng: np.random.Generator) -> Raw:
    """Factors for short texts, for long ones, and a model that knows no long ones; partial rotation of each kind."""
    raw = common(rng)
    heads, head_dim, share = (
        raw["num_attention_heads"],
        int(rng.choice([16, 48, 96])),
        float(rng.choice([0.75, 1, 0.5])),
    )
    # Transformers checks the factors against the hidden size over the heads.
    raw |= {"head_dim": None, "hidden_size": heads * head_dim, "partial_rotary_factor": share, "pad_token_id": 0}
    raw |= {"original_max_position_embeddings": int(rng.choice([100, 350, 4096]))}
    raw |= {"sliding_window": window(rng) if rng.integers(2) else None}
    short, long = np.sort(rng.uniform(1, 3, (2, int(head_dim * share) // 2)), axis=1)
    factors = {"short_factor": short.tolist(), "long_factor": (4 * long).tolist()}
    raw |= {"rope_scaling": {"type": "longrope", **factors} if rng.integers(4) else None}
    return raw


def yarn(rng: np.random.Generator) -> Raw:
    scaling = {"rope_type": "yarn", "factor": float(rng.choice([2.0, 16.0])), "rope_theta": 1e4}
    scaling |= {"original_max_position_embeddings": int(rng.choice([64, 100, 1000])), "beta_fast": 4.0}
    scaling |= [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"attention_factor": 1.3}, {"mscale": 0.7}][rng.integers(4)]
    return scaling | ({"truncate": False} if rng.integers(2) else {})


def ministral3(rng: np.random.Generator) -> Raw:
    raw = common(rng) | {"rope_theta": None, "sliding_window": window(rng) if rng.integers(2) else None}
    return raw | {"rope_parameters": yarn(rng) | {"llama_4_scaling_beta": float(rng.choice([0.1, 1.0]))}}


def smollm3(rng: np.random.Generator) -> Raw:
    raw = common(rng) | {"pad_token_id": 0}
    raw |= {"use_sliding_window": bool(rng.integers(2)), "sliding_window": window(rng)}
    if rng.integers(2):
        return raw | {"no_rope_layer_interval": int(rng.choice([1, 2, 3]))}
    return raw | {"no_rope_layers": rng.integers(0, 2, raw["num_hidden_layers"]).tolist()}


def granite(rng: np.random.Generator) -> Raw:
    raw = common(rng) | {"residual_multiplier": float(rng.choice([0.22, 1.0, 0.5]))}
    # An epsilon as large as the squares of small rows shows in every norm.
    raw |= {"embedding_multiplier": rng.choice([12.0, 3.0]).item(), "rms_norm_eps": rng.choice([1e-5, 0.1]).item()}
    # Transformers derives the head size.
    raw |= {"head_dim": None, "hidden_size": raw["num_attention_heads"] * int(rng.choice([10, 16, 48]))}
    scores, logits = rng.choice([0.25, 0.0625]).item(), rng.choice([8.0, 3.0]).item()
    return raw | {"attention_multiplier": scores, "logits_scaling": logits}


def granitemoehybrid(rng: np.random.Generator) -> Raw:
    raw = granite(rng) | {"num_local_experts": 0, "shared_intermediate_size": int(rng.integers(40, 150))}
    # A size of Mamba's layers, which are not there, has to fit all the same.
    raw |= {"mamba_n_heads": raw["num_attention_heads"]}
    kinds = [["attention", "full_attention"][rng.integers(2)]] * raw["num_hidden_layers"]
    return raw | {"layer_types": kinds, "position_embedding_type": ["rope", None][rng.integers(2)]}


def glm4(rng: np.random.Generator) -> Raw:
    share = float(rng.choice([0.5, 1.0]))
    raw = common(rng) | {"attention_bias": bool(rng.integers(4)), "pad_token_id": 0, "rope_theta": None}
    raw |= {"head_dim": int(rng.choice([8, 16, 48, 96]))}
    return raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}}


def olmo2(rng: np.random.Generator) -> Raw:
    return common(rng) | {"pad_token_id": 0}


def gemma(rng: np.random.Generator) -> Raw:
    return common(rng) | {"hidden_act": ["gelu", "gelu_pytorch_tanh"][rng.integers(2)], "pad_token_id": 0}


def ernie4_5(rng: np.random.Generator) -> Raw:
    return common(rng) | {"pad_token_id": 0}


def seed_oss(rng: np.random.Generator) -> Raw:
    return common(rng) | {"attention_bias": bool(rng.integers(4)), "pad_token_id": 0}


def kinds(rng: np.random.Generator, count: int) -> list[str]:
    return [("sliding_attention", "full_attention")[int(rng.integers(2))] for _ in range(count)]


def olmo3(rng: np.random.Generator) -> Raw:
    # Of rotations of kinds of layers, transformers does not see `truncate`.
    scaling = yarn(rng) | {"rope_theta": 5e5, "truncate": True} if rng.integers(3) else None
    raw = common(rng) | {"rope_theta": 5e5, "rope_scaling": scaling, "sliding_window": window(rng), "pad_token_id": 0}
    raw |= {"num_hidden_layers": int(rng.choice([2, 3, 5]))}
    return raw | ({"layer_types": kinds(rng, raw["num_hidden_layers"])} if rng.integers(2) else {})


def exaone4(rng: np.random.Generator) -> Raw:
    windows = {"sliding_window": window(rng) if rng.integers(3) else None}
    raw = common(rng) | windows
    if windows["sliding_window"] is None:
        return raw | {"layer_types": ["full_attention"] * raw["num_hidden_layers"]}
    if rng.integers(2):
        return raw | {"layer_types": kinds(rng, raw["num_hidden_layers"])}
    return raw | {"sliding_window_pattern": int(rng.choice([2, 3, 4]))}


def experts(rng: np.random.Generator, count: str) -> Raw:
    """Sizes of experts. `count`: the name of their number."""
    chosen = int(rng.choice([1, 3, 8, 17]))
    return {count: chosen, "num_experts_per_tok": int(rng.integers(1, chosen + 1))}


def qwen3_moe(rng: np.random.Generator) -> Raw:
    raw = common(rng) | experts(rng, "num_experts") | {"moe_intermediate_size": int(rng.integers(20, 70))}
    raw |= {"norm_topk_prob": bool(rng.integers(2)), "decoder_sparse_step": int(rng.choice([1, 1, 2]))}
    if rng.integers(2):
        raw["mlp_only_layers"] = [int(rng.integers(raw["num_hidden_layers"]))]
    return raw | {"use_sliding_window": bool(rng.integers(2)), "sliding_window": window(rng)}


def mixtral(rng: np.random.Generator) -> Raw:
    windows = {"sliding_window": window(rng) if rng.integers(2) else None}
    return common(rng) | experts(rng, "num_local_experts") | windows


def olmoe(rng: np.random.Generator) -> Raw:
    # Transformers derives the head size.
    raw = common(rng) | experts(rng, "num_experts") | {"norm_topk_prob": bool(rng.integers(2)), "pad_token_id": 0}
    return raw | {"head_dim": None, "hidden_size": raw["num_attention_heads"] * int(rng.choice([10, 16, 48]))}


def granitemoe(rng: np.random.Generator) -> Raw:
    return granite(rng) | experts(rng, "num_local_experts")


def gpt_oss(rng: np.random.Generator) -> Raw:
    raw = (
        common(rng) | experts(rng, "num_local_experts") | {"sliding_window": window(rng), "tie_word_embeddings": False}
    )
    raw |= {"rope_theta": 150000.0, "head_dim": int(rng.choice([16, 48, 64]))}
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 100}
    raw |= {"rope_scaling": {**yarn, "beta_fast": 32.0, "beta_slow": 1.0} if rng.integers(3) else None}
    if rng.integers(2):
        raw["layer_types"] = kinds(rng, raw["num_hidden_layers"])
    return raw


FAMILIES: dict[str, tuple[str, Callable[[np.random.Generator], Raw]]] = {
    "llama": ("LlamaForCausalLM", llama),
    "mistral": ("MistralForCausalLM", mistral),
    "qwen2": ("Qwen2ForCausalLM", qwen2),
    "qwen3": ("Qwen3ForCausalLM", qwen3),
    "gemma3_text": ("Gemma3ForCausalLM", gemma3),
    "lfm2": ("Lfm2ForCausalLM", lfm2),
    "phi3": ("Phi3ForCausalLM", phi3),
    "ministral3": ("Ministral3ForCausalLM", ministral3),
    "smollm3": ("SmolLM3ForCausalLM", smollm3),
    "granite": ("GraniteForCausalLM", granite),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", granitemoehybrid),
    "glm4": ("Glm4ForCausalLM", glm4),
    "olmo2": ("Olmo2ForCausalLM", olmo2),
    "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe),
    "gpt_oss": ("GptOssForCausalLM", gpt_oss),
    "gemma": ("GemmaForCausalLM", gemma),
    "ernie4_5": ("Ernie4_5ForCausalLM", ernie4_5),
    "seed_oss": ("SeedOssForCausalLM", seed_oss),
    "glm": ("GlmForCausalLM", glm4),
    "olmo3": ("Olmo3ForCausalLM", olmo3),
    "exaone4": ("Exaone4ForCausalLM", exaone4),
    "mixtral": ("MixtralForCausalLM", mixtral),
    "olmoe": ("OlmoeForCausalLM", olmoe),
    "granitemoe": ("GraniteMoeForCausalLM", granitemoe),
    "lfm2_moe": ("Lfm2MoeForCausalLM", lfm2_moe),
}


USUAL = dict.fromkeys(FAMILIES, 0) | {"qwen2": 2, "phi3": 1, "ministral3": 3, "smollm3": 2, "glm": 5, "exaone4": 1}
USUAL |= {"mixtral": 1, "olmoe": 4, "lfm2_moe": 2}
"""The configuration of each family that runs by default, with what the family has beside others: windows, factors of
long rotations, layers without rotation, experts of which rows take some."""


BUILT = ("gemma3_text", "gpt_oss")
"""Families whose usual configuration is built by default: between them they have windows, sandwich norms, experts with
biases, sinks and a rotation of long texts. Of every family the references run (`test_references`)."""


def _marks(family: str, seed: int) -> list[pytest.MarkDecorator]:
    if seed == USUAL[family] and family in BUILT:
        return []
    return [pytest.mark.thorough if seed < 3 or seed == USUAL[family] else pytest.mark.slow]


CASES = [
    pytest.param(family, seed, id=f"{family}-{seed}", marks=_marks(family, seed))
    for family in FAMILIES
    for seed in range(12)
]


def weights(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Tensors of which none is without effect: norms and biases are random, and as large as results are."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, ((weight, at), *_) in families.locations(config).items():
        values = rng.standard_normal(at.plain_shape, np.float32)
        if weight.slot not in ADDENDS and len(at.shape) > 1:
            values *= SPREAD.get(weight.slot, 1) / np.sqrt(at.shape[-1])
        elif weight.slot not in ADDENDS:
            values = 1 + 0.4 * values - config.decoder.norm.offset
        else:
            values *= SPREAD.get(weight.slot, 1)
        tensors[name] = values.astype(bfloat16)
    return tensors


SPREAD = dict.fromkeys(("w_router", "b_choice"), 4)
"""Factors of weights that scores of experts come from: these are far apart, so that rounding changes few choices."""


def write(directory: Path, family: str, raw: Raw, seed: int = 0) -> Config:
    """Write a checkpoint of a family."""
    architecture, _ = FAMILIES[family]
    raw = {"architectures": [architecture], "model_type": family} | {k: v for k, v in raw.items() if v is not None}
    if family in ("mistral", "exaone4"):
        raw.setdefault("sliding_window", None)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(raw))
    config = parse_config(raw, "test")
    save_file(weights(config, seed), directory / "model.safetensors", {"format": "pt"})
    write_byte_tokenizer(config, directory)
    return config


SURE = 0.1
"""Logits of a router that are so far apart are in the same order after roundings to bf16."""


def routed(directory: Path, ids: list[int], dtype: Any) -> tuple[np.ndarray, list[tuple[np.ndarray, int]]]:
    """Returns transformers' logits f32 of every position, and for each router its scores `[positions, experts]` and how
    many experts a row takes. Transformers finds the weights by itself."""
    # Other implementations of experts than the plain one take no odd sizes.
    more = {"experts_implementation": "eager"} if "experts" in (directory / "config.json").read_text() else {}
    found = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **more).eval()
    embedding = found.get_input_embeddings()
    if hasattr(embedding, "embed_scale"):
        # Transformers rounds it to the weights' type: models are trained and run in bf16.
        embedding.embed_scale = embedding.embed_scale.to(torch.bfloat16).to(dtype)
    routers: list[tuple[np.ndarray, int]] = []

    def keep(router: Any, inputs: Any, outputs: Any) -> None:
        scores = outputs[0].float().reshape(len(ids), -1)
        for bias in inputs[1:]:
            scores = scores.sigmoid() + bias
        routers.append((scores.numpy(), router.top_k))

    for module in found.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(keep)
    with torch.no_grad():
        logits: np.ndarray = found(torch.tensor([ids])).logits[0].float().numpy()
    return logits, routers


def theirs(directory: Path, ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns transformers' logits in f32 and in bf16, and in which rows it is sure which experts they take."""
    (exact, routers), (rounded, routers_of_rounded) = (
        routed(directory, ids, t) for t in (torch.float32, torch.bfloat16)
    )
    sure = np.ones(len(ids), bool)
    for (scores, top), (others, _) in zip(routers, routers_of_rounded, strict=True):
        ordered = -np.sort(-scores, axis=-1)
        if top < ordered.shape[1]:
            sure &= ordered[:, top - 1] - ordered[:, top] > SURE
        taken = [np.sort(np.argsort(-each, axis=-1)[:, :top], axis=-1) for each in (scores, others)]
        sure &= (taken[0] == taken[1]).all(axis=-1)
    return exact, rounded, sure


def error(logits: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((np.asarray(logits) - exact) ** 2)))


ROWS = 384


def numpy_logits(opened: Checkpoint, ids: list[int], tokens: int) -> list[np.ndarray]:
    """Logits of the parts' references, wired as the NPU's plan says, after a prompt and after each of `tokens`."""
    config, grouping = opened.config, GROUPINGS["separate"]

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return opened.tensor(name) if name in opened.held else table(config, name, shape[0])

    plans = make_plan(config, grouping, "aie2p", [ROWS]).phases
    model = Model(plans, programs(config, grouping, [ROWS]), config.dimensions(), tensor, POSITIONS)
    first = len(ids) - tokens
    return [model.run(PREFILL._replace(rows=ROWS), ids[:first]), *(model.run(DECODE, [i]) for i in ids[first:])]


def in_steps(llm: Llama, pieces: Sequence[list[int]], rng: np.random.Generator) -> np.ndarray:
    """Logits after each piece of a text, two sequences of which share steps: one is a piece behind. Both are equal."""
    tables = np.split(rng.permutation(llm.steps.blocks)[:16], 2)
    starts = [0, *accumulate(map(len, pieces))]
    made: list[list[np.ndarray]] = [[], []]
    for turn in range(len(pieces) + 1):
        at = {who: turn - who for who in (0, 1) if 0 <= turn - who < len(pieces)}
        runs = {who: Run(pieces[i], starts[i], tables[who].tolist()) for who, i in at.items()}
        for who, row in zip(runs, llm.steps.step([*runs.values()]), strict=True):
            made[who].append(row.copy())
    assert (np.array(made[0]) == made[1]).all()
    return np.array(made[0])


REFERENCES = 16
"""Tokens that kernels' references compute after a prompt: of a few, the errors differ by twice."""

CACHES = ("llama", "lfm2", "gpt_oss")
"""Families whose usual configuration runs with a KV cache in 8 bits, too: with plain attention, layers that have none,
windows with sinks. Of others the thorough configurations do."""


@dataclass
class Case:
    """A random configuration of a family, and a text."""

    rng: np.random.Generator
    checkpoint: Path
    ids: list[int]
    context: dict[str, int]
    """The variable of the build, where transformers chooses the factors of long rotations by the length of the text."""
    opened: Checkpoint


def usual(family: str, seed: int, directory: Path) -> Case:
    rng = np.random.default_rng([seed, *map(ord, family)])
    checkpoint = directory / f"{family}-{seed}"
    config = write(checkpoint, family, FAMILIES[family][1](rng), seed)
    ids = rng.integers(0, config.vocab, 310).tolist()
    context = {"context": 320} if (config.decoder.short_context or POSITIONS) < len(ids) else {}
    return Case(rng, checkpoint, ids, context, Checkpoint.open(checkpoint).within(context.get("context", 0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_references(family: str, tmp_path: Path) -> None:
    """What a family is as data, computed by the kernels' references: no further from the f32 model than transformers'
    own run in bf16, after a prompt and two tokens."""
    case = usual(family, USUAL[family], tmp_path)
    exact, rounded, sure = theirs(case.checkpoint, case.ids)
    places = np.arange(297, 300)
    assert sure[places].any()
    ours = np.array(numpy_logits(case.opened, case.ids[:300], 2))
    judged = places[sure[places]]
    assert error(ours[sure[places]], exact[judged]) <= 1.5 * error(rounded[judged], exact[judged])


@pytest.mark.parametrize("family, seed", CASES)
def test_logits(family: str, seed: int, tmp_path: Path, artifacts: Path) -> None:
    """A prompt in three pieces, tokens, a rewind; and with a KV cache in 8 bits.

    Against the f32 model our error is at most 1.5x that of transformers' own bf16 run. However a text is cut into
    pieces, the bits are the same.
    """
    case = usual(family, seed, tmp_path)
    rng, checkpoint, ids, context, opened = case.rng, case.checkpoint, case.ids, case.context, case.opened
    exact, rounded, sure = theirs(checkpoint, ids)
    layer_by_layer = next(transformers_model.logits(opened, opened.tensor, [ids]))
    np.testing.assert_allclose(layer_by_layer, exact, atol=1e-5 * np.abs(exact).max())
    first, second, end = sorted(rng.choice(np.arange(1, 300), 3, replace=False).tolist())
    places = np.array([first - 1, second - 1, end - 1, *range(end, 304)])
    judged = sure[places]
    assert judged.any()
    places = places[judged]
    least = error(rounded[places], exact[places])
    for kv in ("bf16", "int8") if seed != USUAL[family] or family in CACHES else ("bf16",):
        llm = load(build(checkpoint, artifacts, kv=kv, **context), kv_memory=1 << 28)
        ours = [llm.prefill(ids[:first]), llm.prefill(ids[first:second]), llm.prefill(ids[second:end])]
        ours += [llm.decode(token) for token in ids[end:304]]
        assert error(np.array(ours)[judged], exact[places]) <= (1.5 if kv == "bf16" else 3) * least, kv
        cuts = [0, first, second, *range(end, 305)]
        assert (in_steps(llm, [ids[at:to] for at, to in pairwise(cuts)], rng) == ours).all()
        llm.reset()
        llm.prefill(ids[:second])
        assert (llm.prefill(ids[second:end]) == ours[2]).all()
        llm.rewind(max(second - 3, 1))
        tokens = [llm.decode(token) for token in ids[max(second - 3, 1) : end]][-1]
        llm.reset()
        assert (llm.prefill(ids[:304]) == ours[-1]).all()
        if kv == "bf16":
            assert (tokens == ours[2]).all()
            begin = max(end - REFERENCES, 0)
            last = np.arange(begin, end + 1)[sure[begin : end + 1]]
            computed = np.array(numpy_logits(opened, ids[: end + 1], end - begin))[last - begin]
            # A row may read one behind which experts differ: then transformers' is as far off.
            assert not len(last) or error(computed, exact[last]) <= 1.5 * max(least, error(rounded[last], exact[last]))


@pytest.mark.parametrize("family", FAMILIES)
def test_names(family: str, tmp_path: Path) -> None:
    """Tensors are those of a model of transformers, and those that it writes."""
    rng = np.random.default_rng(0)
    config = write(tmp_path / "ours", family, FAMILIES[family][1](rng))
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    found.save_pretrained(tmp_path / "theirs")
    shapes = {name: pieces[0][1].plain_shape for name, pieces in families.locations(config).items()}
    written = load_file(tmp_path / "theirs/model.safetensors")
    assert {name: tensor.shape for name, tensor in written.items()} == shapes
    inside = {name: tuple(tensor.shape) for name, tensor in found.state_dict().items()}
    tied = {"lm_head.weight": shapes["model.embed_tokens.weight"]} if config.tied else {}
    # Experts are one each on disk, and stacked in memory.
    assert inside == shapes | tied or config.decoder.experts
    ours = load_file(tmp_path / "ours/model.safetensors")
    assert all((written[name] == ours[name]).all() for name in ours)


def on_array(rng: np.random.Generator, raw: Raw) -> Raw:
    """Sizes that blocks of the array divide, else as odd as they may be; windows that end inside tiles of keys."""
    head_dim, kv_heads = int(rng.choice([32, 64, 96])), int(rng.choice([2, 4]))
    heads = kv_heads * int(rng.choice([1, 2, 3]))
    layers = min(raw["num_hidden_layers"], 3)
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": layers}
    fields |= {"hidden_size": heads * 32, "intermediate_size": 64 * int(rng.choice([3, 5, 6]))}
    if raw.get("head_dim") is None:
        fields["hidden_size"], head_dim = heads * 64, 64
    if "sliding_window" in raw:
        fields["sliding_window"] = int(rng.choice([17, 40, 64, 65]))
    if "layer_types" in raw:
        fields["layer_types"] = raw["layer_types"][:layers]
    if "conv_L_cache" in raw:
        fields |= {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "layer_types": None, "block_multiple_of": 64}
    if "partial_rotary_factor" in raw:
        pairs = int(head_dim * raw["partial_rotary_factor"]) // 2
        factors = {"short_factor": [1.0] * pairs, "long_factor": rng.uniform(1, 8, pairs).tolist()}
        fields |= {"original_max_position_embeddings": 100, "rope_scaling": {"type": "longrope", **factors}}
    if "rope_parameters" in raw:
        # Queries have no factor where the array's cache ends.
        fields["rope_parameters"] = raw["rope_parameters"] | {"original_max_position_embeddings": ARRAY_POSITIONS}
    if "no_rope_layers" in raw:
        fields["no_rope_layers"] = [0, 1, 1]
    return raw | fields | {"head_dim": raw.get("head_dim") and head_dim}


ARRAY_POSITIONS = 256

ON_ARRAY = ("qwen2", "qwen3", "mistral", "gemma3_text", "lfm2", "phi3", "ministral3", "smollm3", "granite")
TABLES = ("ministral3", "smollm3")
"""Families that differ from others by tables alone, which the numpy reference takes as the array does."""

ARRAYS = [
    ({"weights": "int4", "matmul": "bf16"}, 1.5),
    ({"grouping": "separate"}, 1.5),
    ({"weights": "int8", "matmul": "bfp16"}, 3),
]
"""How each of the first seeds is built, and its error as a multiple of that of transformers in bf16."""

ON_ARRAY_CASES = [
    pytest.param(
        family,
        seed,
        id=f"{family}-{seed}",
        marks=pytest.mark.slow if seed or family in TABLES else pytest.mark.thorough,
    )
    for family in ON_ARRAY
    for seed in range(len(ARRAYS))
]


@pytest.mark.parametrize("family, seed", ON_ARRAY_CASES)
def test_logits_of_the_array(family: str, seed: int, tmp_path: Path, artifacts: Path) -> None:
    """As of the host, with the weights that the artifact has; also in another context bucket."""
    rng = np.random.default_rng([seed, *map(ord, family)])
    checkpoint = tmp_path / f"{family}-{seed}"
    config = write(checkpoint, family, on_array(rng, FAMILIES[family][1](rng)), seed)
    ids = rng.integers(0, config.vocab, 140).tolist()
    variables, most = ARRAYS[seed]
    directory = build(checkpoint, artifacts, target="npu2-sim", buckets="64", context=ARRAY_POSITIONS, **variables)
    opened = Checkpoint.open(checkpoint).within(ARRAY_POSITIONS)
    found = transformers_model.logits(opened, ArtifactWeights(directory).values, [ids], [ids])
    exact, rounded = found
    with closing(load(directory)) as llm:
        ours = [llm.prefill(ids[:50]), llm.prefill(ids[50:53]), llm.prefill(ids[53:126])]
        ours += [llm.decode(token) for token in ids[126:132]]
        llm.rewind(53)
        assert (llm.prefill(ids[53:126]) == ours[2]).all()
    places = [49, 52, *range(125, 132)]
    least = error(rounded[places], exact[places])
    for at, logits in zip(places, ours, strict=True):
        assert error(logits, exact[at]) <= 2 * most * least, at
    assert error(ours, exact[places]) <= most * least


# Rows, columns and times have angles of their own: of text they are all the position.
SECTIONS = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 2, 4]}


@pytest.mark.parametrize(
    "family, outer, inner, seeing",
    [
        ("gemma3_text", ("Gemma3ForConditionalGeneration", "gemma3"), {}, "vision_tower.x"),
        (
            "qwen3",
            ("Qwen3VLForConditionalGeneration", "qwen3_vl"),
            {"head_dim": 16, "rope_scaling": SECTIONS, "model_type": "qwen3_vl_text"},
            "model.visual.x",
        ),
    ],
)
def test_wrapped_configurations(family: str, outer: tuple[str, str], inner: Raw, seeing: str, tmp_path: Path) -> None:
    """The text part inside of a model that sees: fields in `text_config`, tensors under either prefix."""
    rng = np.random.default_rng(1)
    config = write(tmp_path / "plain", family, FAMILIES[family][1](rng) | {"tie_word_embeddings": True, "head_dim": 16})
    plain = Checkpoint.open(tmp_path / "plain")
    inside = json.loads((tmp_path / "plain/config.json").read_text()) | inner
    fields = {"architectures": [outer[0]], "model_type": outer[1], "vision_config": {}, "text_config": inside}
    for prefix in ("language_model.model.", "model.language_model."):
        directory = tmp_path / prefix
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(fields))
        tensors = load_file(tmp_path / "plain/model.safetensors")
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        save_file(renamed | {seeing: np.zeros(1, np.float32)}, directory / "model.safetensors")
        wrapped = Checkpoint.open(directory, ())
        assert wrapped.config == config
        assert all((wrapped.tensor(name) == plain.tensor(name)).all() for name in plain.held)
