"""Many sequences on built models: what many have at once is what each has alone, to the bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.artifact.plan import BLOCK_POSITIONS
from llama_npu2.engine.batch.scheduler import Scheduler
from llama_npu2.engine.batch.sequence import Counts
from llama_npu2.engine.completion import Completion
from llama_npu2.engine.generation import Generation
from llama_npu2.engine.serving import Serving
from tests.conftest import build
from tests.kernels.test_families import FAMILIES, write
from tests.support.schedules import all_back, prompts, run, total

LONGEST = 400


class Reply:
    """A reply with the logits of each of its tokens."""

    def __init__(self, generation: Generation) -> None:
        self.generation, self.ids = generation, generation.ids
        self.rows: list[np.ndarray] = []
        self.errors: list[Exception | None] = []

    @property
    def finished(self) -> bool:
        return self.generation.finished

    def start(self, processed: int) -> None:
        pass

    def take(self, logits: np.ndarray) -> None:
        self.rows.append(logits.copy())
        self.generation.take(logits)

    def end(self, error: Exception | None) -> None:
        self.errors.append(error)


class Fewer:
    """Steps with fewer blocks, so that they run out."""

    def __init__(self, steps: Any, blocks: int) -> None:
        self.steps, self.blocks = steps, blocks
        self.step, self.copy_blocks = steps.step, steps.copy_blocks
        self.read_block, self.write_block = steps.read_block, steps.write_block


def options(llm: Llama, draw: random.Random, number: int) -> dict[str, Any]:
    """What is asked of a reply, which no end token ends early."""
    return {
        "max_tokens": draw.randint(1, 24),
        "number": number,
        "seed": draw.randrange(100),
        "logprobs": draw.choice([None, 2]),
        "temperature": draw.choice([0.0, 0.0, 1.5]),
        "repetition_penalty": draw.choice([1.0, 1.0, 1.2]),
        "logit_bias": dict.fromkeys(llm.eos, -100.0),
    }


def alone(llm: Llama, prompt: list[int], asked: dict[str, Any], rows: int) -> Reply:
    """The reply of one sequence, as `Llama.generate` makes it; so many tokens of it."""
    reply = Reply(llm._asked(prompt, **asked))
    llm.reset()
    while not reply.finished and len(reply.rows) < rows:
        reply.take(llm._logits_after(reply.ids))
    return reply


def schedule(llm: Llama, seed: int) -> Counts:
    """Run a random schedule on a model, and check each sequence against itself alone."""
    draw = random.Random(seed)
    blocks = min(llm.steps.blocks, draw.choice([5, 8, 16]))
    asked = [
        (prompt, options(llm, draw, number))
        for number, prompt in enumerate(prompts(draw, draw.randint(2, 8), llm.manifest.model["vocab"], LONGEST))
    ]
    work = Scheduler(
        Fewer(llm.steps, blocks), BLOCK_POSITIONS, draw.choice([9, 64, 300]), llm.context_length, draw.random() < 0.7
    )
    replies = [Reply(llm._asked(prompt, **each)) for prompt, each in asked]
    cancelled = run(draw, work, replies)
    all_back(work)
    for number, ((prompt, each), reply) in enumerate(zip(asked, replies, strict=True)):
        expected = alone(llm, prompt, each, len(reply.rows))
        assert reply.ids == expected.ids and all(map(np.array_equal, reply.rows, expected.rows))
        assert number in cancelled or reply.errors == [None]
        assert expected.generation.completion.logprobs == reply.generation.completion.logprobs
    return work.cache.counts


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[Llama]:
    model = load(demo)
    yield model
    model.close()


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, 20))])
def test_whatever_is_beside_a_sequence_changes_no_bit(llm: Llama, part: int) -> None:
    counts = total(lambda seed: schedule(llm, seed), range(5 * part, 5 * part + 5))
    print(counts)
    assert all(vars(counts).values())


def thorough(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.thorough) for case in cases]


@pytest.mark.parametrize(
    ("weights", "kv"), [("int4", "int8"), *thorough(("int8", "bf16"), ("int4", "bf16"), ("mxfp4", "int8"))]
)
def test_other_formats(weights: str, kv: str, artifacts: Path) -> None:
    check_built(build("demo", artifacts, weights=weights, kv=kv), 1, range(100, 105))


@pytest.mark.parametrize("family", ["lfm2", *thorough(("gemma3_text",), ("gpt_oss",))])
def test_convolutions_windows_and_experts(family: str, tmp_path: Path, artifacts: Path) -> None:
    raw = FAMILIES[family][1](np.random.default_rng(3)) | {"max_position_embeddings": 512}
    write(tmp_path / family, family, raw)
    check_built(build(tmp_path / family, artifacts), 2, range(200, 205))


def check_built(directory: Path, threads: int, seeds: range) -> None:
    model = load(directory, threads)
    counts = total(lambda seed: schedule(model, seed), seeds)
    model.close()
    print(counts)
    assert counts.swaps and counts.shared and counts.copies


async def collected(engine: Serving, prompt: Any, **asked: Any) -> Completion:
    return await engine.submit(prompt, raw=True, **asked).whole()


def test_streams_are_what_generate_gives(llm: Llama) -> None:
    texts = ["The capital of France is", "The capital of Spain is", "Once upon a time"]
    expected = [llm.generate(text, raw=True, max_tokens=12).whole() for text in texts]

    async def main() -> list[Completion]:
        with llm.engine() as engine:
            return list(await asyncio.gather(*(collected(engine, text, max_tokens=12) for text in texts)))

    for found, wanted in zip(asyncio.run(main()), expected, strict=True):
        assert (found.text, found.tokens, found.finish_reason) == (wanted.text, wanted.tokens, wanted.finish_reason)
        assert found.stats.prompt_tokens + found.stats.reused_tokens == wanted.stats.prompt_tokens
        assert found.stats.ttft > 0


def test_a_stream_can_be_cancelled_and_an_engine_closed_at_any_time(llm: Llama) -> None:
    async def main() -> None:
        with llm.engine() as engine:
            with pytest.raises(UserError, match="an engine is open"):
                llm.generate("a")
            with pytest.raises(UserError, match="an engine is open"):
                llm.engine()
            stream = engine.submit("Once upon a time", raw=True, max_tokens=2000)
            pieces = [await anext(stream) for _ in range(3)]
            stream.cancel()
            pieces += [piece async for piece in stream]  # those that had come
            assert stream.completion.text == "".join(pieces) and len(stream.ids) < 1000
            left = engine.submit([5] * 1500, max_tokens=9)
            await asyncio.sleep(0.02)
        with pytest.raises(UserError, match="closed"):
            await left.whole()
        with pytest.raises(UserError, match="closed"):
            engine.submit("a")

    asyncio.run(main())
    assert llm.generate("The capital of France is", raw=True, max_tokens=2).text


def test_prompts_that_cannot_be_processed_are_refused(llm: Llama) -> None:
    async def main() -> None:
        with llm.engine() as engine:
            for prompt, asked, message in (
                ([5] * 5000, {}, "the context is"),
                ([10**6], {}, "outside the vocabulary"),
                ("a", {"n": 2}, "n"),
                ("", {}, "empty"),
            ):
                with pytest.raises(UserError, match=message):
                    engine.submit(prompt, **asked)

    asyncio.run(main())


def test_a_saved_context_goes_on_as_if_it_had_been_processed(llm: Llama, tmp_path: Path) -> None:
    prompt, more = [at % 500 for at in range(300)], [7, 8, 9]
    fresh = llm.generate(prompt + more, max_tokens=8).whole()
    llm.reset()
    llm.prefill(prompt)
    assert llm.save_context(tmp_path / "context") == 300
    llm.generate([3] * 700, max_tokens=1).whole()
    assert llm.load_context(tmp_path / "context") == 300
    found = llm.generate(prompt + more, max_tokens=8, keep_context=True).whole()
    assert found.tokens == fresh.tokens and found.stats.reused_tokens == 300

    async def again() -> Completion:
        with llm.engine() as engine:
            assert engine.load_context(tmp_path / "context") == 300
            assert engine.save_context(tmp_path / "other", prompt) == 300
            return await collected(engine, prompt + more, max_tokens=8)

    llm.generate([3] * 700, max_tokens=1).whole()
    found = asyncio.run(again())
    assert found.tokens == fresh.tokens and found.stats.reused_tokens == 300
    assert (tmp_path / "other").read_bytes() == (tmp_path / "context").read_bytes()
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o600
