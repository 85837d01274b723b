"""Logits of whole models against transformers, over shapes that real checkpoints have and some that they might."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llama_npu2 import load
from stages.model import families
from stages.model.checkpoint import Checkpoint
from stages.proof.comparison import transformers_model
from tests.conftest import ODD_WIDTHS, ROOT, build, write_checkpoint
from tests.support.later import later

pytestmark = pytest.mark.verify
later("torch", "needs the verify extra: pip install -e '.[verify]'")
later("transformers", "needs the verify extra: pip install -e '.[verify]'")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.5}

CASES: dict[str, dict] = {
    "gqa": {},
    "mha_by_default": {"num_key_value_heads": None, "head_dim": None, "vocab_size": 1001},
    "mqa": {"num_key_value_heads": 1, "vocab_size": 263, "tie_word_embeddings": False},
    "head_64_llama3_large_eps": {
        "head_dim": 64,
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "rms_norm_eps": 0.03,
        "tie_word_embeddings": False,
        "vocab_size": 257,
    },
    "head_80_linear": {"head_dim": 80, "rope_scaling": LINEAR, "hidden_size": 160},
    "head_128": {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "odd_hidden": ODD_WIDTHS,
    "group_of_three": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
    "group_of_eight_sharded_f16": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "shards": 2,
        "dtype": np.float16,
        "tie_word_embeddings": False,
    },
    "wide": {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "head_dim": 64},
    "one_layer_sharded_f32": {"num_hidden_layers": 1, "shards": 3, "dtype": np.float32},
    "rope_parameters": {
        "rope_theta": None,
        "rope_parameters": LLAMA3 | {"rope_theta": 20000.0},
        "num_key_value_heads": 1,
    },
}


@pytest.fixture(params=CASES, scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, artifacts: Path
) -> tuple[Path, Path, int]:
    """Checkpoint directory, artifact directory, vocabulary size."""
    checkpoint = tmp_path_factory.mktemp("checkpoints") / request.param
    config = write_checkpoint(checkpoint, **({"dtype": bfloat16} | CASES[request.param]))
    return checkpoint, build(checkpoint, artifacts, portable=True), config.vocab


def transformers_logits(checkpoint: Path, ids: list[int], dtype: str) -> np.ndarray:
    """Float32 logits of every position."""
    import torch

    from stages.proof.comparison.transformers_model import load_transformers

    with torch.no_grad():
        return load_transformers(checkpoint, dtype)(torch.tensor([ids])).logits[0].float().numpy()


def bf16_values(checkpoint: Path, root: Path) -> Path:
    """The checkpoint with its weights rounded to bf16: what both bf16 pipelines start from."""
    import torch

    from stages.proof.comparison.transformers_model import load_transformers

    if not root.exists():
        load_transformers(checkpoint, "bfloat16").to(torch.float32).save_pretrained(root)
    return root


def error(logits: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((logits - exact) ** 2)))


LENGTHS = (1, 2, 17, 64, 99)
"""Prompts that are compared, each followed by one decoded token."""

_OUR_LOGITS = """
import json, sys
import numpy as np
from llama_npu2 import load
directory, out, ids, lengths = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
llm, rows = load(directory), []
for length in lengths:
    llm.reset()
    rows += [llm.prefill(ids[:length]), llm.decode(ids[length])]
print(llm.description)
np.save(out, rows)
"""


def our_logits(artifacts: Path, ids: list[int], isa: str, out: Path) -> tuple[np.ndarray, str]:
    """Float32 logits of prompt and next token for all lengths, and the device's description. In a process of its own:
    the instruction set is chosen once."""
    arguments = [str(artifacts), str(out), json.dumps(ids), json.dumps(LENGTHS)]
    run = subprocess.run(
        [sys.executable, "-c", _OUR_LOGITS, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"LLAMA_NPU2_ISA": isa},
    )
    assert run.returncode == 0, run.stderr
    return np.load(out), run.stdout


@pytest.mark.sampled(1)
def test_error_is_that_of_bf16(case: tuple[Path, Path, int], tmp_path: Path) -> None:
    """Against the fp32 model our error is at most 1.5x that of transformers' own bf16 run, in every instruction set."""
    checkpoint, artifacts, vocab = case
    ids = np.random.default_rng(1).integers(0, vocab, 100).tolist()
    exact = transformers_logits(bf16_values(checkpoint, checkpoint.with_name("rounded")), ids, "float32")
    theirs = transformers_logits(checkpoint, ids, "bfloat16")
    rows = [position for length in LENGTHS for position in (length - 1, length)]
    for isa in ("best", "avx2", "portable"):
        ours, device = our_logits(artifacts, ids, isa, tmp_path / "logits.npy")
        assert isa == "best" or f" {isa}," in device or platform.machine() != "x86_64"
        assert error(ours, exact[rows]) <= 1.5 * error(theirs[rows], exact[rows]), device


@pytest.mark.sampled(1)
def test_prefill_agrees_with_single_steps(case: tuple[Path, Path, int]) -> None:
    """n tokens at once and n tokens one by one differ by no more than bf16 differs from fp32."""
    checkpoint, artifacts, vocab = case
    ids = np.random.default_rng(2).integers(0, vocab, 23).tolist()
    exact = transformers_logits(bf16_values(checkpoint, checkpoint.with_name("rounded")), ids, "float32")[-1]
    theirs = transformers_logits(checkpoint, ids, "bfloat16")[-1]
    llm = load(artifacts)
    at_once = llm.prefill(ids)
    llm.reset()
    one_by_one = [llm.decode(token) for token in ids][-1]
    llm.close()
    assert error(at_once, one_by_one) <= 2 * error(theirs, exact)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [True, False])
def test_one_layer_at_a_time_is_the_whole_model(tied: bool, tmp_path: Path) -> None:
    """The same bits in float32 and in bf16, for texts of several lengths; each weight is asked for once."""
    write_checkpoint(tmp_path, dtype=bfloat16, tie_word_embeddings=tied, rope_scaling=LLAMA3)
    checkpoint, asked = Checkpoint.open(tmp_path), list[str]()

    def values(name: str) -> np.ndarray:
        asked.append(name)
        return checkpoint.tensor(name)

    texts = [np.random.default_rng(length).integers(0, 300, length).tolist() for length in (33, 1, 100)]
    found = list(transformers_model.logits(checkpoint, values, texts[:2], texts))
    whole = [transformers_logits(tmp_path, ids, "float32") for ids in texts[:2]]
    whole += [transformers_logits(tmp_path, ids, "bfloat16") for ids in texts]
    for ours, theirs in zip(found, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert sorted(asked) == sorted(families.tensors(checkpoint.config))
