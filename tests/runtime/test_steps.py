"""Steps of rows of many sequences: the bits of each sequence alone, and what a step refuses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import load
from llama_npu2.engine.completion import Logprob
from llama_npu2.engine.llama import Llama
from llama_npu2.engine.native_steps import NativeSteps
from llama_npu2.engine.step import Run
from llama_npu2.errors import UserError
from tests.conftest import build

LENGTHS = (5, 127, 128, 129, 300, 1)
REPLIES = 3


@pytest.fixture(scope="module")
def llm(demo: Path) -> Llama:
    return load(demo, 2)


def texts(llm: Llama, rng: random.Random) -> list[list[int]]:
    """Tokens of several sequences: prompts of `LENGTHS`, each with so many tokens of a reply."""
    vocab = llm.manifest.model["vocab"]
    return [[rng.randrange(vocab) for _ in range(length + REPLIES)] for length in LENGTHS]


def alone(llm: Llama, text: Sequence[int]) -> np.ndarray:
    """Logits after a prompt and each token of the reply, `[1 + REPLIES, vocab]`."""
    llm.reset()
    return np.stack([llm.prefill(text[:-REPLIES]), *map(llm.decode, text[-REPLIES:])])


class Sequences:
    """Sequences that share steps. Their blocks lie anywhere."""

    def __init__(self, steps: NativeSteps, lengths: Sequence[int], rng: random.Random) -> None:
        free = rng.sample(range(steps.blocks), steps.blocks)
        self.steps, self.rng = steps, rng
        self.tables = [[free.pop() for _ in range(-(-length // 128))] for length in lengths]

    def run(self, number: int, text: Sequence[int], first: int, last: int, logits: int) -> Run:
        return Run(text[first:last], first, self.tables[number], logits)

    def processed(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The logits after each prompt. Steps have chunks of some of the prompts."""
        at, logits = [0] * len(texts), [np.empty(0)] * len(texts)
        while left := [i for i, text in enumerate(texts) if at[i] < len(text) - REPLIES]:
            runs = {}
            for i in self.rng.sample(left, self.rng.randint(1, len(left))):
                end = len(texts[i]) - REPLIES
                last = min(end, at[i] + self.rng.randint(1, 80))
                runs[i], at[i] = self.run(i, texts[i], at[i], last, int(last == end)), last
            rows = iter(self.steps.step(list(runs.values())))
            for i in runs:
                if runs[i].logits:
                    logits[i] = next(rows).copy()
        return logits


def compare(llm: Llama, seed: int) -> None:
    rng = random.Random(seed)
    given = texts(llm, rng)
    expected = [alone(llm, text) for text in given]
    together = Sequences(llm.steps, [*map(len, given)], rng)
    for row, logits in zip(together.processed(given), expected, strict=True):
        assert row.tobytes() == logits[0].tobytes()
    starts = [len(text) - REPLIES for text in given]
    for token in range(REPLIES):
        runs = [
            together.run(i, text, at + token, at + token + 1, 1)
            for i, (text, at) in enumerate(zip(given, starts, strict=True))
        ]
        for row, logits in zip(llm.steps.step(runs), expected, strict=True):
            assert row.tobytes() == logits[1 + token].tobytes()
    # Drafts: several tokens of a sequence with the logits after each, once more over the same positions.
    runs = [together.run(i, text, len(text) - REPLIES, len(text), REPLIES) for i, text in enumerate(given)]
    assert llm.steps.step(runs).tobytes() == np.concatenate([logits[1:] for logits in expected]).tobytes()
    llm.reset()


def test_rows_have_the_bits_of_their_sequence_alone(llm: Llama) -> None:
    compare(llm, 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "weights, kv, activations", [("int4", "int8", "bf16"), ("w8a8", "bf16", "bf16"), ("int4", "bf16", "int8")]
)
def test_formats(weights: str, kv: str, activations: str, artifacts: Path) -> None:
    with closing(load(build("demo", artifacts, weights=weights, kv=kv, activations=activations), 2)) as llm:
        compare(llm, 2)


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_logits_of_many_rows_are_those_of_each(weights: str, artifacts: Path) -> None:
    """Those of more rows than are computed at once, too."""
    with closing(load(build("demo", artifacts, weights=weights), 2)) as llm:
        rng = random.Random(5)
        ids = [rng.randrange(llm.manifest.model["vocab"]) for _ in range(131)]
        expected = np.stack([llm.prefill(ids[:1]), *map(llm.decode, ids[1:])])
        for count in (*range(1, 18), 63, 64, 65, len(ids)):
            logits = llm.steps.step([Run(ids[:count], 0, [1, 0], count)])
            assert logits.tobytes() == expected[:count].tobytes(), count
        # Rows of several runs, in the order of the runs.
        runs = [Run(ids[:90], 0, [1, 0], 30), Run(ids[:7], 0, [2], 0), Run(ids[:80], 0, [3], 70)]
        assert llm.steps.step(runs).tobytes() == np.concatenate([expected[60:90], expected[10:80]]).tobytes()
        llm.reset()
        scored = llm.score(ids, 2)
        llm.reset()
        assert [each.logprob for each in scored] == [
            Logprob.of(token, row, 0).logprob for token, row in zip(ids[2:], expected[1:], strict=False)
        ]


def test_one_row_is_a_token(llm: Llama) -> None:
    text = texts(llm, random.Random(3))[0]
    expected = alone(llm, text)
    table = [7]
    llm.steps.step([Run(text[:-REPLIES], 0, table, 0)])
    row = llm.steps.step([Run(text[-REPLIES : 1 - REPLIES], len(text) - REPLIES, table)])
    assert row.tobytes() == expected[1].tobytes()
    llm.reset()


def test_blocks_are_copied_and_kept_elsewhere(llm: Llama) -> None:
    text = texts(llm, random.Random(4))[2]
    end, steps = len(text) - REPLIES, llm.steps
    expected = alone(llm, text)[1]
    steps.step([Run(text[:end], 0, [3, 4], 0)])
    steps.copy_blocks([(3, 9)])
    kept = steps.read_block(9)
    steps.step([Run(text[:end][::-1], 0, [9, 3], 0)])
    steps.write_block(5, kept)
    assert steps.step([Run(text[end : end + 1], end, [5, 4])]).tobytes() == expected.tobytes()
    with pytest.raises(ValueError, match="a block has"):
        steps.write_block(5, kept[:-1])
    llm.reset()


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [Run([], 0, [0])],
        [Run([1] * 513, 0, [*range(5)])],
        [Run([1], -1, [0])],
        [Run([1], 128, [0])],
        [Run([1], 0, [16])],
        [Run([1], 0, [-1])],
        [Run([1], 0, [0]), Run([1], 0, [0])],
        [Run([1] * 129, 0, [2, 2])],
        [Run([1, 2], 0, [0], 3)],
        [Run([2048], 0, [0])],
    ],
)
def test_what_a_step_refuses(llm: Llama, runs: list[Run]) -> None:
    before = [llm.steps.read_block(block) for block in range(3)]
    with pytest.raises(ValueError):
        llm.steps.step(runs)
    assert [llm.steps.read_block(block) for block in range(3)] == before


def test_memory_bounds_the_blocks(demo: Path) -> None:
    with closing(load(demo, 2)) as whole:
        each = len(whole.steps.read_block(0))
        longest = whole.context_length
    with closing(load(demo, 2, kv_memory=3 * each + 1)) as llm:
        assert (llm.steps.blocks, llm.context_length) == (3, 384)
        with pytest.raises(UserError, match="exceed the context of 384"):
            llm.prefill([1] * 385)
    with closing(load(demo, 2, kv_memory=100 * each)) as llm:
        assert (llm.steps.blocks, llm.context_length) == (100, longest)
        compare(llm, 5)
    with pytest.raises(UserError, match="kv_memory=5: 128 positions take"):
        load(demo, 2, kv_memory=5)
