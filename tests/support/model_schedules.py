"""Random schedules of sequences on a built model, each held against the sequence alone, to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from llama_npu2 import Llama
from llama_npu2.artifact.plan import BLOCK_POSITIONS
from llama_npu2.engine.batch.scheduler import Scheduler
from llama_npu2.engine.batch.sequence import Counts
from llama_npu2.engine.generation import Generation
from tests.support.schedules import Noted, all_back, prompts, run


class Reply(Noted):
    """A reply of a model."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation.ids)
        self.generation = generation

    @property
    def finished(self) -> bool:
        return self.generation.finished

    def take(self, logits: np.ndarray) -> None:
        super().take(logits)
        self.generation.take(logits)


class Fewer:
    """Steps with fewer blocks, so that they run out."""

    def __init__(self, steps: Any, blocks: int) -> None:
        self._steps, self.blocks = steps, blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)


def options(llm: Llama, draw: random.Random, number: int, longest: int) -> dict[str, Any]:
    """What is asked of a reply, which no end token ends early; some end at a stop text."""
    ordinary = draw.randrange(llm.manifest.model["vocab"])
    return {
        "max_tokens": draw.randint(1, longest),
        "number": number,
        "seed": draw.randrange(100),
        "logprobs": draw.choice([None, 2]),
        "temperature": draw.choice([0.0, 0.0, 1.5]),
        "repetition_penalty": draw.choice([1.0, 1.0, 1.2]),
        "presence_penalty": draw.choice([0.0, 0.0, 0.5]),
        "frequency_penalty": draw.choice([0.0, 0.0, 0.2]),
        "logit_bias": dict.fromkeys(llm.eos, -100.0) | draw.choice([{}, {ordinary: 3.0}]),
        "stop": (draw.choice("aeint"),) if draw.random() < 0.1 else (),
    }


def alone(llm: Llama, prompt: list[int], asked: dict[str, Any], rows: int) -> Reply:
    """The reply of one sequence without drafts, of so many tokens."""
    reply = Reply(llm._asked(prompt, **asked))
    llm.reset()
    while not reply.finished and len(reply.rows) < rows:
        reply.take(llm._logits_after(reply.ids))
    return reply


def schedule(
    llm: Llama,
    seed: int,
    most: int = 8,
    longest: int = 400,
    blocks: Sequence[int] = (5, 8, 16),
) -> Counts:
    """Run a random schedule on a model, and check each sequence against itself alone.

    Args:
        llm: the model.
        seed: which schedule.
        most: sequences.
        longest: prompt.
        blocks: how many blocks there may be.
    """
    draw = random.Random(seed)
    texts = prompts(draw, draw.randint(2, most), llm.manifest.model["vocab"], longest)
    tight = draw.random() < 0.3  # replies grow until blocks run out
    asked = [
        (prompt, options(llm, draw, number, 2 * BLOCK_POSITIONS if tight and number < 3 else 24))
        for number, prompt in enumerate(texts)
    ]
    needed = 1 + max((len(prompt) + each["max_tokens"]) // BLOCK_POSITIONS for prompt, each in asked)
    real: Any = llm.steps if llm.holds_many else llm.turns
    usable = [count for count in blocks if needed <= count <= real.blocks]
    steps = Fewer(real, needed if tight or not usable else draw.choice(usable))
    rows = draw.choice([9, 64, 300])
    small, turns = llm._drafting.model if llm._drafting else None, None if llm.holds_many else steps
    work = Scheduler(steps, BLOCK_POSITIONS, rows, llm.context_length, draw.random() < 0.7, model=small, turns=turns)
    replies = [Reply(llm._asked(prompt, **each)) for prompt, each in asked]
    cancelled = run(draw, work, replies)
    all_back(work.cache)
    if small:
        assert not small._texts
        all_back(small.cache)
    for number, ((prompt, each), reply) in enumerate(zip(asked, replies, strict=True)):
        expected = alone(llm, prompt, each, len(reply.rows))
        assert reply.ids == expected.ids and all(map(np.array_equal, reply.rows, expected.rows)), number
        assert number in cancelled or (reply.finished and reply.errors == [None])
        assert expected.generation.completion.logprobs == reply.generation.completion.logprobs
        assert expected.generation.completion.stats.finish_reason == reply.generation.completion.stats.finish_reason
    return work.cache.counts
