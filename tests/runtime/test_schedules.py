"""Random schedules in every format of weights and cache, and faults that they must show.

Twenty schedules of short prompts run by default, 500 of prompts up to 1,500 tokens with `pytest -m slow`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import Llama, load
from llama_npu2.artifact.plan import BLOCK_POSITIONS
from llama_npu2.engine.batch.pace import Pace
from llama_npu2.engine.batch.scheduler import Scheduler
from llama_npu2.engine.batch.sequence import Counts
from llama_npu2.engine.native_steps import NativeSteps
from stages.kernels import KV_FORMATS
from stages.model.policy import matrix_formats
from tests.conftest import build
from tests.kernels.test_families import FAMILIES, write
from tests.support.model_schedules import Reply, alone, schedule
from tests.support.schedule_faults import freed_early, kept_draft, no_owner, off_by_one
from tests.support.schedules import all_back, drain, total

Format = tuple[str, str]
"""A format of weights and one of the KV cache."""
USUAL: Sequence[Format] = (("bf16", "bf16"), ("int4", "int8"), ("w8a8", "bf16"))
"""Formats of weights and of the KV cache that other tests build, too."""
ROOM = 1 << 24
"""Bytes of a KV cache with more blocks than a context of the demo has."""


class Models:
    """The demo in several formats, each with a number of threads. All are closed together."""

    def __init__(self, artifacts: Path, closed: ExitStack) -> None:
        self._artifacts, self._closed = artifacts, closed
        self._built: dict[Format, Path] = {}
        self._open: dict[tuple[Format, int, Format | None], Llama] = {}

    def of(self, form: Format, threads: int, draft: Format | None = None) -> Llama:
        """`draft`: the format in which the demo drafts for itself."""
        if (key := (form, threads, draft)) not in self._open:
            small = self._directory(draft) if draft else ""
            model = load(self._directory(form), threads, kv_memory=ROOM * (2 if draft else 1), draft=small)
            self._open[key] = self._closed.enter_context(closing(model))
        return self._open[key]

    def _directory(self, form: Format) -> Path:
        if form not in self._built:
            weights, kv = form
            self._built[form] = build("demo", self._artifacts, weights=weights, kv=kv)
        return self._built[form]


@pytest.fixture(scope="module")
def models(artifacts: Path) -> Iterator[Models]:
    """Models whose steps seem to take as long whatever their rows.

    So drafts pay, on busy machines too, and schedules are the same in every run.
    """
    note = Pace.note

    def constant(pace: Pace, rows: int, wanted: int, seconds: float) -> None:
        note(pace, rows, wanted, 1e-3)

    with ExitStack() as closed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "note", constant)
        yield Models(artifacts, closed)


def check_counted(counts: Counts) -> None:
    """Check that all that could go wrong was there: swaps, shared blocks, copies, rejected drafts and more.

    Steps are joined where sequences take turns alone.
    """
    print(counts)
    assert all(count for name, count in vars(counts).items() if not name.startswith("joined"))
    assert counts.rejected < counts.drafted


def usual(models: Models, seed: int) -> Counts:
    """Every other schedule has a small model that drafts: the demo in int4."""
    model = models.of(USUAL[seed % len(USUAL)], 1 + seed % 4, USUAL[1] if seed % 2 else None)
    return schedule(model, seed, most=12, blocks=(5, 8, 16, 40))


@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.thorough)])
def test_schedules_change_no_bit(models: Models, count: int) -> None:
    check_counted(total(lambda seed: usual(models, seed), range(1000, 1000 + count)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_five_hundred_schedules_change_no_bit(models: Models, part: int) -> None:
    formats = [(weights, kv) for weights in matrix_formats() for kv in KV_FORMATS]

    def one(seed: int) -> Counts:
        draw = random.Random(seed)
        model = models.of(draw.choice(formats), draw.randint(1, 4), draw.choice([None, USUAL[1]]))
        return schedule(model, seed, 12, draw.choice([60, 400, 1500, 1500]), (13, 16, 24, 64))

    check_counted(total(one, range(2000 + 25 * part, 2025 + 25 * part)))


@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gemma3_text", "gpt_oss"))]
)
def test_convolutions_windows_and_experts(family: str, tmp_path: Path, artifacts: Path) -> None:
    raw = FAMILIES[family][1](np.random.default_rng(3)) | {"max_position_embeddings": 512}
    write(tmp_path / family, family, raw)
    check_built(build(tmp_path / family, artifacts), 2, range(200, 203))


def check_built(directory: Path, threads: int, seeds: range) -> None:
    with closing(load(directory, threads)) as model:
        check_counted(total(lambda seed: schedule(model, seed), seeds))


@pytest.mark.parametrize(
    ("weights", "kv", "step"),
    [(*USUAL[0], 9), *(pytest.param(*form, 1, marks=pytest.mark.thorough) for form in USUAL[:2])],
)
def test_prompts_may_part_at_every_position_of_a_block(models: Models, weights: str, kv: str, step: int) -> None:
    """Two prompts that part there run after one another and together; a third one begins with all of the first."""
    llm, draw = models.of((weights, kv), 2), random.Random(1)
    vocab = llm.manifest.model["vocab"]
    base = [draw.randrange(vocab) for _ in range(2 * BLOCK_POSITIONS)]
    copies, splits = 0, [*range(BLOCK_POSITIONS, 2 * BLOCK_POSITIONS - 1, step), 2 * BLOCK_POSITIONS - 1]
    for split in splits:
        other = (base[split] + 1) % vocab
        texts = [base[: split + 1], [*base[:split], other, 1, 2], [*base[:split], other, 3]]
        work = Scheduler(llm.steps, BLOCK_POSITIONS, 64, llm.context_length, least_shared=1)
        replies = [Reply(llm._asked(text, max_tokens=2)) for text in texts]
        work.add(replies[0])
        drain(work)
        for reply in replies[1:]:
            work.add(reply)
        drain(work)
        copies += work.cache.counts.copies
        all_back(work.cache)
        for text, reply in zip(texts, replies, strict=True):
            expected = alone(llm, text, {"max_tokens": 2}, len(reply.rows))
            assert reply.ids == expected.ids and all(map(np.array_equal, reply.rows, expected.rows)), split
    assert copies >= len(splits) - 1


def no_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NativeSteps, "copy_blocks", lambda self, pairs: None)


@pytest.mark.parametrize("fault", [freed_early, off_by_one, kept_draft, no_copy, no_owner])
def test_faults_show(
    fault: Callable[[pytest.MonkeyPatch], None], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        total(lambda seed: usual(models, seed), range(1000, 1020))
