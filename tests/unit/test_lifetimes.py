"""Memory that activations share: nothing is lost before it is read for the last time, and little is left free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.model.lifetimes import LaunchAccess, places
from stages.model.plan import _Planner, make_plan
from stages.model.policy import Policy, parse_policy
from stages.targets import targets
from stages.targets.npu2.groupings import CONTEXT
from stages.weights.blobs import PAGE
from tests.support.npu_shapes import JUDGED

BUCKETS = (128, 512, 2048)


def device(reads: str, writes: str) -> LaunchAccess:
    return LaunchAccess(False, frozenset(reads.split()), frozenset(writes.split()))


def host(reads: str, writes: str, partly: str = "") -> LaunchAccess:
    return LaunchAccess(True, frozenset(reads.split()), frozenset(writes.split()), frozenset(partly.split()))


def placed(*steps: LaunchAccess, sizes: Mapping[str, int] | None = None, **formats: str) -> dict[str, int]:
    names = {name for step in steps for name in step.touched}
    return places(sizes or dict.fromkeys(names, PAGE), {name: formats.get(name, "bf16") for name in names}, [steps])


def test_what_is_read_for_the_last_time_makes_room() -> None:
    chain = device("in", "a"), device("a", "b"), device("b", "c"), device("c", "out")
    found = placed(*chain)
    assert found["a"] == found["c"] != found["b"]
    assert found.keys() == {"a", "b", "c"}, "what comes in and what goes out is somebody else's, too"


def test_a_buffer_lives_as_often_as_it_is_written() -> None:
    steps = device("", "a"), device("a", "b"), device("b", "c"), device("c", "a"), device("a", "out")
    found = placed(*steps)
    assert found["b"] != found["a"] != found["c"]
    assert len({found[name] for name in "bc"}) == 2


def test_what_the_host_does_beside_the_device_has_its_own_room() -> None:
    """Unless it has to wait, since the device works on what it takes or makes."""
    steps = device("in", "a"), device("a", "b"), host("weight", "w"), device("b w", "out")
    assert placed(*steps)["w"] not in (placed(*steps)["a"], placed(*steps)["b"])
    waits = device("in", "a"), device("a", "b"), host("weight b", "w"), device("b w", "out")
    assert placed(*waits)["w"] == placed(*waits)["a"]


def test_launches_make_a_buffer_together() -> None:
    steps = host("", "w"), host("", "w"), device("w", "a"), device("a", "out")
    assert placed(*steps)["w"] != placed(*steps)["a"]


def test_rows_that_nobody_writes_hold_numbers() -> None:
    """What lay there were values of the same format: bytes of another may be no number."""
    steps = host("", "x", partly="x"), device("x", "a"), device("a", "w"), device("w", "out")
    assert placed(*steps)["x"] == placed(*steps)["w"]
    assert placed(*steps, w="bfp16")["x"] != placed(*steps, w="bfp16")["w"]
    whole = host("", "x"), *steps[1:]
    assert placed(*whole, w="bfp16")["x"] == placed(*whole, w="bfp16")["w"]


def replay(sizes: Mapping[str, int], found: Mapping[str, int], steps: Sequence[LaunchAccess], early: bool) -> None:
    """Every launch, with the memory as it is: what it reads is what was written last. `early`: what the host does
    beside the device comes before it."""
    unit = 1 << 12
    memory = np.zeros(-(-max(found[name] + sizes[name] for name in found) // unit), np.int64)
    spans = {name: slice(found[name] // unit, -(-(found[name] + sizes[name]) // unit)) for name in found}
    written: dict[str, int] = {}
    unread: set[str] = set()
    for number, step in enumerate(_ordered(steps) if early else steps, 1):
        for name in (step.reads | step.writes & unread) & found.keys():
            assert (memory[spans[name]] == written[name]).all(), f"{name} is lost before launch {number}"
        for name in step.writes & found.keys():
            memory[spans[name]] = written[name] = number
        unread = (unread | step.writes) - step.reads


def _ordered(steps: Iterable[LaunchAccess]) -> list[LaunchAccess]:
    made: list[LaunchAccess] = []
    busy: frozenset[str] = frozenset()
    begin = 0
    for of_host, group in groupby(steps, lambda step: step.host):
        stretch = list(group)
        touched = frozenset().union(*(step.touched for step in stretch))
        if not of_host:
            begin, busy = len(made), touched
            made += stretch
        elif touched & busy:
            made += stretch
        else:
            made[begin:begin] = stretch
    return made


NAMES = st.sets(st.sampled_from("abcdefgh"), max_size=3)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), NAMES, NAMES), min_size=1, max_size=24),
    st.lists(st.integers(1, 5 * PAGE), min_size=8, max_size=8),
)
def test_nothing_is_lost_before_it_is_read(launches: list[tuple[bool, set[str], set[str]]], lengths: list[int]) -> None:
    steps = [LaunchAccess(of_host, frozenset(reads), frozenset(writes)) for of_host, reads, writes in launches]
    sizes = dict(zip("abcdefgh", lengths, strict=True))
    used = {name: size for name, size in sizes.items() if any(name in step.touched for step in steps)}
    found = places(used, dict.fromkeys(used, "bf16"), [steps])
    if found:
        replay(used, found, steps, early=False)
        replay(used, found, steps, early=True)


def planner(model: str, policy: Policy, grouping: str) -> _Planner:
    npu2 = targets()["npu2"]
    return _Planner(JUDGED[model].within(CONTEXT), npu2.grouping(grouping), npu2.kernel_set, BUCKETS, policy)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("grouping", ["fused", "separate"])
@pytest.mark.parametrize("weights", ["int4", "bf16"])
@pytest.mark.parametrize("model", ["demo", "smollm2-135m", "llama-3.2-1b"])
def test_no_phase_of_a_model_loses_anything(model: str, weights: str, grouping: str) -> None:
    made = planner(model, parse_policy(weights, matmul="bfp16"), grouping)
    buffers = made.plan().buffers
    sizes = {name: buffer.nbytes for name, buffer in buffers.items() if buffer.at is not None}
    found = {name: buffers[name].at for name in sizes}
    assert {"swiglu", "unpacked.w_down", "res1", "x.0"} <= found.keys()
    assert not {"tokens", "logits"} & found.keys()
    for steps in made.accesses.values():
        replay(sizes, found, steps, early=False)
        replay(sizes, found, steps, early=True)


def test_a_prompts_memory_is_what_is_needed_at_once() -> None:
    """Of 1B in the largest bucket: while the array makes gate and up, its result, what goes into it and the residual,
    besides the weights of that and of what comes next; what the residual takes after it; and what attention leaves no
    room for."""
    rows, config = max(BUCKETS), JUDGED["llama-3.2-1b"]
    weights = config.emb * config.ffn * 9 // 8
    least = 3 * weights + 2 * rows * (config.ffn + 2 * config.emb)
    npu2 = targets()["npu2"]
    policy = parse_policy("int4", matmul="bfp16")
    buffers = make_plan(config.within(CONTEXT), npu2.grouping("fused"), npu2.kernel_set, BUCKETS, policy).buffers
    shared = [buffer for buffer in buffers.values() if buffer.at is not None]
    end = max(buffer.at + buffer.nbytes for buffer in shared)
    assert least <= end < 1.05 * least
    assert end < 0.62 * sum(buffer.nbytes for buffer in shared)


def test_the_host_alone_shares_nothing() -> None:
    """Its memory is not locked."""
    cpu = targets()["cpu"]
    plan = make_plan(JUDGED["demo"], cpu.grouping(cpu.default_grouping), cpu.kernel_set)
    assert all(buffer.at is None for buffer in plan.buffers.values())
    assert plan.nbytes(plan.buffers) == sum(buffer.nbytes for buffer in plan.buffers.values())
