"""Many sequences on one set of weights: whatever shares their blocks and steps, each has the tokens it has alone."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pytest

from llama_npu2.engine.batch import prefix_tree, scheduler, sequence
from llama_npu2.engine.batch.chances import Agreement, Chances, Evidence
from llama_npu2.engine.batch.drafts import Drafts, Wanted
from llama_npu2.engine.batch.gain import LONGEST
from llama_npu2.engine.batch.lookup import Lookup
from llama_npu2.engine.batch.pace import Pace
from llama_npu2.engine.batch.pool import BlockPool
from llama_npu2.engine.batch.prefix_tree import PrefixTree
from llama_npu2.engine.batch.scheduler import Scheduler
from llama_npu2.engine.batch.sequence import Counts
from llama_npu2.engine.batch.small_model import Asked, SmallModel
from llama_npu2.errors import UserError
from tests.support.hashed_steps import POSITIONS, VOCAB, HashedSteps, logits_after
from tests.support.schedule_faults import freed_early, kept_draft, no_owner, off_by_one
from tests.support.schedules import all_back, drain, prompts, run, total

CONTEXT = 96


@dataclass
class Drawn:
    """A reply whose tokens are drawn, one number of a generator for each, in order."""

    prompt: list[int]
    seed: int
    length: int
    ids: list[int] = field(init=False)
    ended: list[Exception | None] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    replies, hidden = True, False

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)
        self._random = random.Random(self.seed)

    @property
    def wanted_from(self) -> int:
        return len(self.ids) - 1

    @property
    def finished(self) -> bool:
        return len(self.ids) - len(self.prompt) >= self.length or len(self.ids) > CONTEXT

    def take(self, logits: np.ndarray) -> None:
        assert not self.finished and np.isfinite(logits).all()
        self.rows.append(logits.copy())
        hot = self._random.random() < 0.2 and self.seed % 2
        self.ids.append(int(np.argsort(logits)[-2 if hot else -1]))

    def start(self, processed: int) -> None:
        self.processed.append(processed)

    def end(self, error: Exception | None) -> None:
        self.ended.append(error)

    def alone(self) -> Drawn:
        other = Drawn(self.prompt, self.seed, self.length)
        while not other.finished:
            other.take(logits_after(other.ids))
        return other


@dataclass
class Processed:
    """A text that is not continued: what follows its tokens from one on, or the hidden state after the last."""

    ids: list[int]
    first: int
    hidden: bool = False
    ended: list[Exception | None] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    replies = False

    @property
    def wanted_from(self) -> int:
        return self.first + len(self.rows)

    @property
    def finished(self) -> bool:
        return self.wanted_from == len(self.ids)

    def take(self, row: np.ndarray) -> None:
        assert not self.finished
        self.rows.append(row.copy())

    start, end = Drawn.start, Drawn.end

    def alone(self) -> Processed:
        sign = -1 if self.hidden else 1
        rows = [sign * logits_after(self.ids[: end + 1]) for end in range(self.first, len(self.ids))]
        return Processed(self.ids, self.first, self.hidden, rows=rows)


def clock_of(seconds: float) -> Callable[[], float]:
    """A clock in which that much time passes from call to call."""
    return (seconds * tick for tick in range(10**9)).__next__


def small_model(blocks: int, clock: Callable[[], float]) -> SmallModel:
    return SmallModel(HashedSteps(blocks), POSITIONS, 24, CONTEXT - 9, VOCAB, 1, clock)


def scheduled(steps: HashedSteps, **options: Any) -> Scheduler:
    usual = {"rows": 12, "context": CONTEXT, "least_shared": 1, "clock": clock_of(1)}
    return Scheduler(steps, POSITIONS, **usual | options)


def checked(replies: Sequence[Drawn | Processed], cancelled: set[int]) -> None:
    for number, reply in enumerate(replies):
        alone = reply.alone()
        count = len(reply.ids)
        assert reply.ids == alone.ids[:count]
        assert all(map(np.array_equal, reply.rows, alone.rows))
        if number not in cancelled:
            assert count == len(alone.ids) and len(reply.rows) == len(alone.rows) and reply.ended == [None]


def drawn(draw: random.Random, prompt: list[int], seed: int) -> Drawn | Processed:
    """What is asked of a prompt: most often a reply."""
    kind = draw.random()
    if kind < 0.15:
        return Processed(prompt, draw.randrange(len(prompt)))
    return Processed(prompt, len(prompt) - 1, True) if kind < 0.3 else Drawn(prompt, seed, draw.randint(1, 30))


def schedule(seed: int) -> Counts:
    """Run a random schedule of 2 to 12 sequences, and check each against itself alone."""
    draw = random.Random(seed)
    steps = HashedSteps(draw.choice([13, 16, 24, 80]))
    model = small_model(draw.choice([13, 30, 90]), clock_of(1)) if draw.random() < 0.5 else None
    work = scheduled(steps, rows=draw.choice([3, 7, 12, 40]), speculate=draw.random() < 0.7, model=model)
    asked = prompts(draw, draw.randint(2, 12), VOCAB, 60)
    replies = [drawn(draw, prompt, seed * 100 + at) for at, prompt in enumerate(asked)]
    cancelled = run(draw, work, replies)
    checked(replies, cancelled)
    assert max(steps.rows) <= work._rows
    all_back(work.cache)
    if model:
        assert not model._texts
        all_back(model.cache)
    return work.cache.counts


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, 20))])
def test_whatever_is_beside_a_sequence_changes_no_token(part: int) -> None:
    counts = total(schedule, range(25 * part, 25 * part + 25))
    print(counts)
    assert all(count for name, count in vars(counts).items() if not name.startswith("joined"))
    assert counts.rejected < counts.drafted


def no_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HashedSteps, "copy_blocks", lambda self, pairs: None)


def never_freed(patch: pytest.MonkeyPatch) -> None:
    real = prefix_tree.PrefixTree.match

    def match(self: PrefixTree, ids: list[int], namespace: str) -> Any:
        blocks, matched = real(self, ids, namespace)
        for block in blocks[:1]:
            self._pool.share(block)
        return blocks, matched

    patch.setattr(prefix_tree.PrefixTree, "match", match)


def last_token_kept(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: sequence.Cache, one: sequence.Sequence, remember: bool = True) -> None:
        if self.reach(one, 1):
            one.done = min(one.done + 1, len(one.ids))
        real(self, one, remember)

    real = sequence.Cache.give_up
    patch.setattr(sequence.Cache, "give_up", give_up)


@pytest.mark.parametrize(
    "fault", [freed_early, off_by_one, kept_draft, no_copy, no_owner, never_freed, last_token_kept]
)
def test_faults_show(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        total(schedule, range(40))


@pytest.mark.parametrize("split", range(1, 3 * POSITIONS + 1))
def test_prompts_that_part_anywhere_share_what_they_can(split: int) -> None:
    first = list(range(3 * POSITIONS + 1))
    second = first[:split] + [token + 1 for token in first[split:]]
    work = scheduled(HashedSteps(40), speculate=False)
    replies = [Drawn(first, 0, 3), Drawn(second, 2, 3)]
    for reply in replies:
        work.add(reply)
        drain(work)
    checked(replies, set())
    assert replies[1].processed == [len(second) - split]
    assert (work.cache.counts.copies > 2) == bool(split % POSITIONS)


@pytest.mark.parametrize("length", [POSITIONS - 1, POSITIONS, POSITIONS + 1, 2 * POSITIONS, 2 * POSITIONS + 1])
def test_a_prompt_that_is_cached_processes_its_last_token(length: int) -> None:
    prompt = [3 * token % VOCAB for token in range(length)]
    work = scheduled(HashedSteps(40), speculate=False)
    replies = [Drawn(prompt, number, 2) for number in range(2)]
    for reply in replies:
        work.add(reply)
        drain(work)
    checked(replies, set())
    assert replies[1].processed == [1]


def test_prompts_that_begin_alike_at_the_same_time_are_processed_once() -> None:
    steps = HashedSteps(80)
    work = scheduled(steps, rows=4, speculate=False)
    replies = [Drawn([7 * at % VOCAB for at in range(64)] + [number], number, 1) for number in range(4)]
    for reply in replies:
        work.add(reply)
    drain(work)
    checked(replies, set())
    assert sum(steps.rows) < 2 * 64


def test_replies_go_on_while_a_long_prompt_is_processed_in_chunks() -> None:
    work = scheduled(HashedSteps(80), rows=6, speculate=False)
    talking, long = Drawn([1, 2], 0, 40), Drawn([at % VOCAB for at in range(80)], 2, 2)
    work.add(talking)
    work.step()
    work.add(long)
    for before in range(1, 17):
        assert len(talking.ids) == 2 + before
        work.step()
    assert len(long.ids) == 81
    drain(work)
    checked([talking, long], set())


def test_prompts_take_turns() -> None:
    work = scheduled(HashedSteps(80), rows=4, speculate=False)
    long = [Drawn([(at + number) % VOCAB for at in range(80)], number, 1) for number in (0, 2)]
    short = Drawn([23, 22, 21], 4, 1)
    for reply in [*long, short]:
        work.add(reply)
    for _ in range(3):
        work.step()
    assert short.ended == [None] and not any(reply.ended for reply in long)
    drain(work)


def test_few_rows_of_a_step_have_logits_where_texts_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply beside them does not wait for long, and their logits do not fill the memory."""
    monkeypatch.setattr(scheduler, "_MOST_WANTED", 5)
    steps = HashedSteps(80)
    work = scheduled(steps, rows=40, speculate=False)
    talking = Drawn([1, 2], 0, 60)
    texts = [Processed([(at + number) % VOCAB for at in range(40)], 10) for number in range(3)]
    work.add(talking)
    work.step()
    for text in texts:
        work.add(text)
    work.step()
    assert steps.rows[-1] == 17 and steps.wanted[-1] == 6 and len(talking.ids) == 4
    drain(work)
    checked([talking, *texts], set())
    assert max(steps.wanted) == 6
    again = Processed(texts[0].ids, 30)
    work.add(again)
    drain(work)
    checked([again], set())
    assert again.processed == [10], "what comes before the tokens that count is in the cache"


@pytest.mark.parametrize("after", range(5))
def test_a_cancelled_prompt_leaves_its_blocks_to_others(after: int) -> None:
    work = scheduled(HashedSteps(12), rows=16)
    gone = work.add(Drawn([5] * 80, 0, 5))
    for _ in range(after):
        work.step()
    work.cancel(gone)
    work.cancel(gone)
    assert not work.busy
    reply = Drawn([at % VOCAB for at in range(90)], 2, 5)
    work.add(reply)
    drain(work)
    checked([reply], set())
    all_back(work.cache)


def test_pinned_beginnings_stay() -> None:
    work = scheduled(HashedSteps(14), rows=40)
    prompt = [at % VOCAB for at in range(33)]
    work.add(Drawn(prompt, 0, 1))
    drain(work)
    assert work.cache.tree.pin(prompt) == 33
    for number in range(2, 12, 2):
        work.add(Drawn([(at + number) % VOCAB for at in range(70)], number, 1))
    drain(work)
    again = Drawn(prompt, 4, 1)
    work.add(again)
    drain(work)
    assert again.processed == [1]
    work.cache.tree.pin(prompt, -1)
    all_back(work.cache)


@pytest.mark.parametrize("at_once", [True, False])
def test_nothing_is_shared_between_namespaces(at_once: bool) -> None:
    model = small_model(90, clock_of(1))
    work = scheduled(HashedSteps(90), rows=40, model=model)
    prompt = [at % VOCAB for at in range(70)]
    replies = {name: [Drawn(prompt, number, 12) for number in (1, 3)] for name in ("", "one", "another")}
    for at in range(2):
        for name, of_name in replies.items():
            work.add(of_name[at], name)
            if not at_once:
                drain(work)
        drain(work)
    for first, again in replies.values():
        assert (first.processed, again.processed) == ([70], [1])
        checked([first, again], set())
    assert work.cache.tree.pin(prompt, namespace="one") == 70 and not work.cache.tree.pin(prompt, namespace="none")
    work.cache.tree.pin(prompt, -1, "one")
    texts = [text for name in replies for text in model.draft([Asked(name, prompt, 3, name)])]
    assert len(texts) == 3
    for cache in (work.cache, model.cache):
        blocks = [set(cache.tree.held(prompt, name)) for name in replies]
        assert all(blocks) and len(set.union(*blocks)) == sum(map(len, blocks))
    for name in replies:
        model.release(name)
    all_back(work.cache)
    all_back(model.cache)


def test_a_block_that_the_tree_alone_shares_is_written_where_no_other_is_free() -> None:
    """The text takes all blocks, and another one that begins alike was processed before."""
    work = scheduled(HashedSteps(5), rows=40, speculate=False)
    prompt = [at % VOCAB for at in range(36)]
    first, again = Drawn(prompt, 0, 1), Drawn(prompt, 2, 3)
    for reply in (first, again):
        work.add(reply)
        drain(work)
    checked([first, again], set())
    assert again.processed == [1] and not work.cache.counts.copies
    all_back(work.cache)


def test_a_text_without_room_beside_pinned_ones_is_refused_and_others_go_on() -> None:
    work = scheduled(HashedSteps(8), rows=40)
    prompt = [at % VOCAB for at in range(33)]
    work.add(Drawn(prompt, 0, 1))
    drain(work)
    work.cache.tree.pin(prompt)
    large, small = Drawn([9] * 60, 2, 1), Drawn([8] * 3, 4, 1)
    for reply in (large, small):
        work.add(reply)
    drain(work)
    assert isinstance(large.ended[0], UserError) and "unpin" in str(large.ended[0])
    checked([small], set())


def test_logits_that_are_no_numbers_end_their_sequence_alone() -> None:
    class Broken(Drawn):
        def take(self, logits: np.ndarray) -> None:
            raise UserError("not finite")

    work = scheduled(HashedSteps(40))
    broken, whole = Broken([1, 2, 3], 0, 4), Drawn([1, 2, 4], 2, 4)
    for reply in (broken, whole):
        work.add(reply)
    drain(work)
    assert [str(error) for error in broken.ended] == ["not finite"]
    checked([whole], set())


def test_drafts_save_steps_where_a_text_repeats_itself() -> None:
    def steps_of(speculate: bool) -> int:
        steps = HashedSteps(40)
        work = scheduled(steps, speculate=speculate)
        reply = Repeating([1, 2, 3, 4], 0, 60)
        work.add(reply)
        drain(work)
        assert reply.ids == [at % 4 + 1 for at in range(64)]
        return len(steps.rows)

    class Repeating(Drawn):
        def take(self, logits: np.ndarray) -> None:
            self.ids.append(self.ids[-1] % 4 + 1)

    assert 3 * steps_of(True) < steps_of(False)


def paced(times: Callable[[int], float]) -> Pace:
    """What steps of 1 to 16 rows were measured to take."""
    pace = Pace()
    for _ in range(20):
        for rows in range(1, LONGEST + 2):
            pace.note(rows, rows, times(rows))
    return pace


def drafts_of(seconds_a_row: float, accepted: int, model: SmallModel | None = None) -> int:
    """How many drafts are made for 400 tokens if a step of a row takes a second and `accepted` tokens come true.

    Without a model the text repeats itself, so that they are looked up.
    """
    ids, drafted = [1, 2, 3] * 4, 0
    drafts = Drafts(paced(lambda rows: 1 + seconds_a_row * (rows - 1)), model)
    for at in range(400):
        if found := drafts.draft([Wanted("text", ids, LONGEST)], LONGEST)[0]:
            drafts.note("text", len(found), min(accepted, len(found)))
            drafted += 1
        ids += [at if model else len(ids) % 3 + 1]
    return drafted


def test_drafts_are_made_where_they_pay() -> None:
    assert drafts_of(0.01, LONGEST) == drafts_of(0.5, LONGEST) == 400
    assert drafts_of(1.1, LONGEST) == 0


MACHINES: dict[str, Callable[[int], float]] = {
    "reads weights": lambda rows: 1 + 0.05 * (rows - 1),
    "multiplies": lambda rows: 1 + 0.6 * (rows - 1),
    "six rows at a time": lambda rows: 1 + 0.8 * ((rows - 1) // 6),
    "slow with several": lambda rows: 1 + 3.0 * (rows > 1),
}


TEXTS = ["what is drafted never comes", "what is found never comes", "anything"]


def seconds_of(text: str, times: Callable[[int], float], pace: Pace, draw: random.Random) -> float:
    """How much longer than without drafts a reply of 200 tokens takes, a second each. Its text knows of each draft."""
    drafts, ids, seconds = Drafts(pace), [draw.randrange(6) for _ in range(30)], 0.0
    end = len(ids) + 200
    while len(ids) < end:
        (found,) = drafts.draft([Wanted("text", ids, LONGEST)], LONGEST)
        likely, _ = next(drafts._texts["text"].lookup.find(ids), (draw.randrange(6), 0.0))
        other = (likely + 1 + draw.randrange(5)) % 6
        never = found if text == "what is drafted never comes" else text == "what is found never comes"
        came = draw.randrange(6) if text == "anything" else other if never else likely
        accepted = int(found[:1] == [came])
        seconds += times(1 + len(found)) - 1 - accepted
        pace.note(1 + len(found), 1 + len(found), times(1 + len(found)))
        if found:
            drafts.note("text", len(found), accepted)
        ids += [came] + [draw.randrange(6)] * accepted
    return seconds


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", TEXTS)
def test_drafts_lose_no_more_than_a_bound(machine: str, text: str) -> None:
    times, pace, draw = MACHINES[machine], paced(MACHINES[machine]), random.Random(1)
    for _ in range(4):
        assert seconds_of(text, times, pace, draw) <= 0.7 + 0.015 * 200 + 0.1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", TEXTS)
def test_learning_how_long_steps_take_costs_little(machine: str, text: str) -> None:
    pace, draw = Pace(), random.Random(2)
    lost = [seconds_of(text, MACHINES[machine], pace, draw) for _ in range(10)]
    assert sum(lost) <= 10 * (0.7 + 0.015 * 200) + 8


def drafted(pace: Pace, seconds: float, steps: int) -> list[int]:
    """Return the lengths of the drafts of a text that repeats, which come true, where each row more takes so long."""
    drafts, ids, lengths = Drafts(pace), [1, 2, 3] * 4, list[int]()
    for _ in range(steps):
        (found,) = drafts.draft([Wanted("text", ids, LONGEST)], LONGEST)
        lengths.append(len(found))
        pace.note(1 + len(found), 1 + len(found), 1 + seconds * len(found))
        if found:
            drafts.note("text", len(found), len(found))
        ids += [(len(ids) + at) % 3 + 1 for at in range(1 + len(found))]
    return lengths


def pace_of_tokens() -> Pace:
    """Return the pace of 50 steps of a row each, which took a second each."""
    pace = Pace()
    for _ in range(50):
        pace.note(1, 1, 1.0)
    return pace


def test_a_number_of_rows_that_was_slow_once_is_tried_again() -> None:
    pace = pace_of_tokens()
    pace.note(4, 4, 40.0)
    assert max(drafted(pace, 0.1, 400)) == LONGEST


def test_steps_with_drafts_take_three_times_as_long_at_most() -> None:
    """More rows would bring more tokens a second here, but these would come all at once."""
    times = [1 + 0.35 * length for length in drafted(pace_of_tokens(), 0.35, 600)][100:]
    assert 2 < statistics.median(times) <= 3
    assert sum(seconds > 3 for seconds in times) <= 5, "a hundredth, when it is tried how long they take"


class Agreeing(HashedSteps):
    """A model that processes nothing: its next token is always the same."""

    def step(self, runs: Any) -> np.ndarray:
        self.rows.append(sum(len(run.tokens) for run in runs))
        return np.tile(np.eye(1, VOCAB, 5, dtype=np.float32), (sum(run.logits for run in runs), 1))


def agreeing(seconds: float) -> SmallModel:
    return SmallModel(Agreeing(90), POSITIONS, 24, 1000, VOCAB, 1, clock_of(seconds))


def test_a_small_models_own_time_is_part_of_what_its_drafts_cost() -> None:
    """A token of a draft takes it 0.1 s, or longer than a token of the model that the drafts are for."""
    assert drafts_of(0.01, LONGEST, agreeing(0.1)) > 380
    assert drafts_of(0.01, LONGEST, agreeing(1.1)) < 20
    assert drafts_of(0.01, 0, agreeing(0.1)) < 40


def test_a_small_model_reads_a_text_once_the_reply_has_taken_as_long() -> None:
    model, pace = agreeing(20.0), Pace()
    pace.note(1, 1, 1.0)
    model.draft([Asked("another", [*range(24)], 1)])  # 20 s for 24 rows
    ids, drafts, steps = [*range(48)], Drafts(pace, model), model._steps.rows
    while len(steps) == 1 and len(ids) < 500:
        drafts.draft([Wanted("text", ids, 4)], 8)
        ids.append(len(ids))
    assert model.behind("another", ids) > 0 and len(ids) == 48 + 241


def test_a_small_model_drafts_what_it_finds_most_likely_after_any_rejection() -> None:
    model, draw = small_model(90, clock_of(1)), random.Random(3)
    texts = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))] for _ in range(5)]
    for _ in range(12):
        drafts = model.draft([Asked(number, text, 4) for number, text in enumerate(texts)])
        for text, made in zip(texts, drafts, strict=True):
            expected = list(text)
            for token in made:
                assert token == int(np.argmax(logits_after(expected)))
                expected.append(token)
            text += made[: draw.randint(0, len(made))]
            text.append(draw.randrange(VOCAB))
        assert sum(map(bool, drafts)) > 2
    for number in range(5):
        model.release(number)
    all_back(model.cache)


def looked_up(ids: list[int], lookup: Lookup | None = None, most: int = 8) -> list[int]:
    """What may follow a text, whatever its chances."""
    lookup = lookup or Lookup(Chances())
    lookup.read(ids)
    return [token for token, _ in islice(lookup.find(ids), most)]


def test_a_draft_is_what_followed_the_longest_match() -> None:
    assert looked_up([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3]) == [9, 7, 2, 3, 8, 1, 2, 3]
    assert looked_up([5, 2, 3, 9, 7, 2, 3, 8, 6, 2, 3, 9, 4, 2, 3])[:1] == [9], "what follows most often"
    assert looked_up([1, 2, 3, 4, 5]) == []


def test_a_part_that_reaches_the_end_is_repeated_on_and_on() -> None:
    assert looked_up([7, 1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_draft_goes_on_behind_tokens_that_were_replaced() -> None:
    given = [*range(40), 50, 3, 4, 5]
    lookup, text = Lookup(Chances()), list(given)
    assert looked_up(text, lookup)[:3] == [6, 7, 8]
    text += [60]  # in place of 6
    assert looked_up(text, lookup)[:3] == [7, 8, 9]
    text += [7, 8, 9]
    assert looked_up(text, lookup)[:3] == [10, 11, 12]
    text += [61, 62, 63, 64, 65, 66]
    assert looked_up(text, lookup)[:3] == [16, 17, 18]
    text += [67]
    assert looked_up(text, lookup) == looked_up([*text, 68], lookup) == []


@pytest.mark.parametrize(("written", "follows"), [([60, 61, 6], 7), ([9], 10), ([60, 6], 7)])
def test_a_draft_goes_on_behind_tokens_that_were_put_in_or_left_out(written: list[int], follows: int) -> None:
    lookup, text = Lookup(Chances()), [*range(40), 50, 3, 4, 5]
    lookup.read(text)
    for token in written:
        text.append(token)
        lookup.read(text)
    assert looked_up(text, lookup)[:2] == [follows, follows + 1]


def test_a_draft_stays_in_the_part_that_is_repeated() -> None:
    """Tokens may stand twice in the part; later ones that are found are those of the repetition itself."""
    part = [1, 2, 3, 10, 1, 2, 3, 20, 1, 2, 3, 30]
    lookup, text = Lookup(Chances()), [*part, 99, 1, 2, 3]
    lookup.read(text)
    text.append(10)
    assert looked_up(text, lookup)[:2] == [1, 2]
    text += [1, 2, 3]
    assert looked_up(text, lookup)[:2] == [20, 1]


def test_chances_follow_what_came() -> None:
    others = Chances()
    one, another = Chances(others), Chances(others)
    why = Evidence(3, Agreement.ALONE)
    before = one.of(why)
    for _ in range(40):
        one.note(why, True)
    assert one.of(why) > 0.95 and before < another.of(why) < one.of(why)
    for _ in range(20):
        one.note(why, False)
    assert one.of(why) < 0.5
    assert (
        one.of(Evidence(99, Agreement.ALL)) == one.of(Evidence(16, Agreement.ALL)) > one.of(Evidence(2, Agreement.SOME))
    )


def test_a_block_is_not_freed_twice() -> None:
    blocks = BlockPool(2)
    block = blocks.take()
    assert block is not None and blocks.share(block) == block
    blocks.release(block)
    assert blocks.free == 1
    blocks.release(block)
    for use in (blocks.release, blocks.share):
        with pytest.raises(ValueError, match="is free"):
            use(block)


def test_what_was_asked_for_longest_ago_is_forgotten_first() -> None:
    pool, texts = BlockPool(3), [[number] * POSITIONS for number in range(3)]
    tree = PrefixTree(pool, POSITIONS)
    for text in texts:
        block = pool.take()
        assert block is not None
        tree.insert(text, [block])
        pool.release(block)
    (shared,), _ = tree.match(texts[0])
    pool.release(shared)
    assert tree.evict()
    assert [bool(tree.held(text)) for text in texts] == [True, False, True]
