"""What the compiler made is refused where it would hang or compute garbage: each fault put into what passes."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from llama_npu2.errors import UserError
from stages import air
from stages.air import analysis, limits
from stages.air.access import Coverage, Runs, Way, accesses, walk
from stages.kernels import gemm, gemv, kernels
from stages.targets.npu2 import audit as judge
from stages.targets.npu2.compiled import (
    Buffer,
    Channel,
    Command,
    Configuration,
    Descriptor,
    Task,
    read_compiled,
    read_lines,
)
from stages.targets.npu2.liveness import HELD, check_liveness
from stages.targets.npu2.modules import build_module
from stages.weights.scalars import ALL
from tests.support.npu_ir import lowered, stream, write_made
from tests.support.npu_shapes import DEMO, FAMILIES, device_programs, family_programs
from tests.support.objects import core_elf

Edit = Callable[[str], str]


def norm_and_settle(cols: int = 1024) -> str:
    """A small program of two launches."""
    kernel = kernels()["rms_norm"]
    assert kernel.tiling and kernel.program
    made = kernel.program(kernel.tiling({"rows": 1, "cols": cols, "eps": 1e-5}))
    slots = ("x", "weight", "out")
    return air.to_mlir(air.stitch("norm", slots, [(made, {slot: slot for slot in slots})]).module)


SMALL = norm_and_settle()


def findings(made: Path, mlir: str = SMALL, function: str = "norm", edit: Edit = lambda text: text) -> judge.Findings:
    write_made(made, mlir, function, edit)
    return judge.audit_made("norm.16", air.parse_mlir(mlir), made, function)


def test_what_the_module_says_passes(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert (found.resets, found.launches, found.settled, found.in_flight, found.notes) == (2, 2, True, 1, [])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grouping", ["fused", "separate"])
def test_every_program_of_the_model_passes(grouping: str) -> None:
    for program in device_programs(grouping, 128):
        module = build_module(program, DEMO.dimensions()).air.module
        compiled = read_compiled(lowered(module), program.entry)
        assert judge.audit(program.name, module, compiled).resets == len(analysis.launches(module))


COMPILED = Path(__file__).parents[1] / "support/compiled"
"""What aircc of mlir-air 4216fa496 (may) and 5c49b46c0 (july) left of `norm_and_settle(64)` with a stack of 4096."""


@pytest.mark.parametrize("version", ["may", "july"])
def test_what_the_real_compiler_leaves_is_read(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STACK_BYTES", 4096)
    module = air.parse_mlir(norm_and_settle(64))
    found = judge.audit_made("norm", module, COMPILED / version, "norm", linked=False)
    assert (found.resets, found.in_flight, found.core_descriptors, found.notes) == (2, 1, 3, [])
    text = (COMPILED / version / judge.LOWERED).read_text()
    starts = [match.span() for match in re.finditer(r" +aiex\.dma_start_task.*\n", text)]
    assert len(starts) == 5, "three of the norm's, two that settle"
    for start, end in starts:
        with pytest.raises(UserError, match="2 times instead of 1"):
            judge.audit("norm", module, read_compiled(text[:end] + text[start:], "norm"))


def sub(pattern: str, to: str, count: int = 1) -> Edit:
    def edit(text: str) -> str:
        changed, times = re.subn(pattern, to, text, count=count)
        assert times, pattern
        return changed

    return edit


def doubled(pattern: str) -> Edit:
    """The first match twice."""
    return sub(f"({pattern})", r"\1\1")


_TASK = r" +(%\d+) = aiex\.dma_configure_task_for @{} \{{\n.*\n.*\n.*\n.*\n.*\n"
_START = r" +aiex\.dma_start_task\(%0\)\n"
_AWAIT = r" +aiex\.dma_await_task\(%0\)\n"


def in_pieces(text: str, count: int) -> str:
    """The input x in so many tasks at a time, and one for what is left."""
    task = re.search(_TASK.format("stream_1"), text)
    assert task
    size, pieces = 1024 // (count + 1) // 2 * 2, []
    places = [(i * size, size if i < count else 1024 - count * size) for i in range(count + 1)]
    for i, (start, length) in enumerate(places):
        made = (
            task[0]
            .replace(task[1], f"%{100 + i}")
            .replace(", 0, 1024, [<size = 1024", f", {start}, {length}, [<size = {length}")
        )
        *started, awaited = made.splitlines(keepends=True)
        pieces.append(("".join(started), awaited))
    together = [start for start, _ in pieces[:count]] + [end for _, end in pieces[:count]] + list(pieces[count])
    return text.replace(task[0], "".join(together))


def swapped(text: str) -> str:
    """The halves of x one before the other."""
    made = in_pieces(text, 1)
    first, second = (match for match in re.findall(r"%arg0 : \S+, (\d+, \d+, \[<size = \d+), stride", made)[:2])
    return made.replace(first, "HERE").replace(second, first).replace("HERE", second)


FAULTS: dict[str, tuple[Edit, str]] = {
    "a slot is read twice": (
        doubled(_START),
        r"launch 2 of 2 \(launch0_\w+\): reads 4096 bytes of weight, the module says 2048: element 0 2 times",
    ),
    "a slot is not read": (
        sub(_TASK.format("stream_0"), ""),
        "reads 0 bytes of weight, the module says 2048: element 0 0 times",
    ),
    "a slot is not written": (sub(_TASK.format("stream_2"), ""), r"writes 0 bytes of out, the module says 2048"),
    "too little is written": (
        sub(r"(aie\.dma_bd\(%arg2 : \S+), 0, 1024, \[<size = 1024", r"\1, 0, 512, [<size = 512"),
        "writes 1024 bytes of out, the module says 2048: element 512 0 times instead of 1",
    ),
    "another place is written": (
        sub(r"(aie\.dma_bd\(%arg2 : \S+), 0, 1024", r"\1, 32, 1024"),
        "element 0 0 times instead of 1",
    ),
    "a slot is taken for another": (
        sub(r"dma_bd\(%arg1", "dma_bd(%arg0"),
        "reads 4096 bytes of x, the module says 2048",
    ),
    "every column reads all of it": (
        sub(r"\{issue_token = true\}", "{issue_token = true, repeat_count = 7 : i32}"),
        r"reads 16384 bytes of weight, the module says 2048: element 0 8 times instead of 1",
    ),
    "more tasks than a channel holds": (
        lambda text: in_pieces(text, 5),
        r"needs 5 of tasks at channel MM2S 0 of tile \(0, 0\), the NPU has 4",
    ),
    "a descriptor is given away unread": (
        sub(_AWAIT, "      aiex.dma_free_task(%0)\n"),
        "descriptors of channel MM2S 0 of tile .* are given away while they may be read",
    ),
    "an output is not awaited": (
        sub(r"( +aiex\.dma_start_task\((%\d+)\)\n) +aiex\.dma_await_task\(\2\)\n    \}", r"\1    }"),
        "1 outputs are never awaited, of channel S2MM 0",
    ),
    "a reset while an output is under way": (
        sub(
            r"( +aiex\.dma_await_task\((%\d+)\)\n)    \}",
            r"      aiex.npu.load_pdi {device_ref = @launch0_rms_norm_segment_1_reset}\n\1    }",
        ),
        "outputs are never awaited",
    ),
    "more repetitions than eight bits hold": (
        sub(r"\{issue_token = true\}", "{issue_token = true, repeat_count = 256 : i32}"),
        "needs 257 of runs of a descriptor, the NPU has 256|reads .* bytes of weight",
    ),
    "too long a dimension": (
        sub(r"0, 64\) \{task_id", "0, 64, [<size = 300, stride = 2>, <size = 2, stride = 1>]) {task_id"),
        "needs 300 of steps of a dimension, the NPU has 255",
    ),
    "too long a stride": (
        sub(r"0, 64\) \{task_id", "0, 64, [<size = 32, stride = 32768>, <size = 2, stride = 1>]) {task_id"),
        "needs 16384 of words from step to step, the NPU has 8192",
    ),
    "a lock beyond its value": (
        sub("AcquireGreaterEqual, 1", "AcquireGreaterEqual, 64"),
        "needs 64 of the value of a lock",
    ),
    "the stack's size did not arrive": (sub(r", stack_size = \d+ : i32", ""), "cores have 1024 bytes of stack, not"),
    "an unknown command": (
        sub(_START, "      aiex.npu.write32 {address = 1 : ui32}\n"),
        "line .* a command that is not known: aiex.npu.write32",
    ),
    "an unknown part of a configuration": (
        sub(r" +aie\.flow", "    aie.objectfifo @x\n    aie.flow"),
        "an operation of a configuration that is not known",
    ),
    "a launch is missing": (
        sub(r" +aiex\.configure @launch1.*\n.*\n.*\n", ""),
        "norm.16: has 2 launches, aircc made 1",
    ),
    "launches in another order": (
        sub(r"( +aiex\.configure @launch1.*\n.*\n.*\n)( +aiex\.configure.*\n.*\n.*\n)", r"\2\1"),
        r"launch 1 of 2 \(launch0_\w+\): reads 2048 bytes of x, the module says 0",
    ),
    "arguments in another order": (
        sub(r"(aiex\.run @launch0_rms_norm_segment_1_sequence)\(%arg0, %arg1", r"\1(%arg1, %arg0"),
        "is not handed the program's arguments in their order",
    ),
    "an output that nobody sends": (
        sub(r" +aie\.flow\(%tile_0_2.*\n", ""),
        r"never ends: the commands wait for channel S2MM 0 of tile \(0, 0\)",
    ),
    "a lock that nobody gives": (
        sub(r"(\^bb3:.*\n)", r"\1      aie.use_lock(%lock_0_2, AcquireGreaterEqual, 2)\n"),
        "never ends",
    ),
    "a stream to what is no DMA": (
        sub(r"%tile_0_2, DMA : 1\)", "%tile_0_2, Core : 0)"),
        "a stream that is not between DMAs",
    ),
    "another order of reading": (lambda text: swapped(text), "reads x in another order than the module, in 1 inputs"),
    "a buffer over the stack": (lambda text: text, r"%buf0 at 0 begins below \d+, where others end"),
    "a buffer off its vectors": (lambda text: text, r"%buf0 at \d+ is not aligned to the 64 bytes of its vectors"),
}

MOVED = {"a buffer over the stack": 0, "a buffer off its vectors": limits.STACK_BYTES + 16}
"""Where these faults put the first buffer behind the stack."""


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_by_name(tmp_path: Path, fault: str) -> None:
    edit, message = FAULTS[fault]
    write_made(tmp_path, SMALL, "norm", edit)
    if fault in MOVED:
        path = tmp_path / judge.PLACED
        path.write_text(path.read_text().replace(f"address = {limits.STACK_BYTES}", f"address = {MOVED[fault]}"))
    with pytest.raises(UserError, match=message) as caught:
        judge.audit_made("norm.16", air.parse_mlir(SMALL), tmp_path, "norm")
    assert str(caught.value).startswith("norm.16") and "\n" not in str(caught.value)


def test_as_many_tasks_as_a_channel_holds_pass(tmp_path: Path) -> None:
    assert findings(tmp_path, edit=lambda text: in_pieces(text, limits.QUEUE_DEPTH)).in_flight == limits.QUEUE_DEPTH


def blocks(count: int, channel: str = "S2MM, 0") -> str:
    """A chain of so many descriptors on one channel."""
    made = [f"      %0 = aie.dma_start({channel}, ^chain1, ^end)"]
    for i in range(1, count + 1):
        made += [
            f"    ^chain{i}:",
            "      aie.dma_bd(%buf0 : memref<64xbf16, 2 : i32>, 0, 64)",
            f"      aie.next_bd ^chain{i + 1}",
        ]
    return "\n".join([*made, f"    ^chain{count + 1}:", "      aie.end", "    ^end:", "      aie.end", ""])


@pytest.mark.parametrize(
    ("tile", "engine", "count", "message"),
    [
        ("aie.tile(0, 2)", "aie.mem(", 17, r"needs 17 of descriptors of tile \(0, 2\), the NPU has 16"),
        (
            "aie.tile(0, 1)",
            "aie.memtile_dma(",
            25,
            r"needs 25 of descriptors of the even channels of tile \(0, 1\), the NPU has 24",
        ),
        ("aie.tile(0, 1)", "aie.memtile_dma(", 49, r"needs 49 of descriptors of tile \(0, 1\), the NPU has 48"),
    ],
)
def test_descriptors_of_a_tile_are_counted(tmp_path: Path, tile: str, engine: str, count: int, message: str) -> None:
    def edit(text: str) -> str:
        start = text.index("    %mem_0_2 = aie.mem(")
        end = text.index("    }\n", start)
        head = f"    %mem_0_2 = {engine}%tile_0_2) {{\n"
        return (text[:start] + head + blocks(count) + text[end:]).replace("aie.tile(0, 2)", tile)

    with pytest.raises(UserError, match=message):
        findings(tmp_path, edit=edit)


def test_a_chain_of_descriptors_that_fits_passes(tmp_path: Path) -> None:
    def edit(text: str) -> str:
        start, rest = (text.index(f"      %{i} = aie.dma_start") for i in (0, 1))
        return text[:start] + blocks(15, "S2MM, 1").replace("next_bd ^chain16", "next_bd ^chain1") + text[rest:]

    assert findings(tmp_path, edit=edit).core_descriptors == 16


def test_resets_are_counted_from_the_commands(tmp_path: Path) -> None:
    """The compiler adds some where a DMA of a memory tile repeats; one in front of the same is dropped."""
    reset = "      aiex.npu.load_pdi {device_ref = @launch1_settle_segment_1_reset}\n"
    end = r"(      aiex\.dma_await_task\(%\d+\)\n)(    \})"
    assert findings(tmp_path, edit=sub(end, rf"\1{reset}\2")).resets == 3
    assert read_compiled(sub(end, rf"\1{reset * 2}\2")(lowered(air.parse_mlir(SMALL))), "norm").resets == 3


STREAMS = {
    "one image": (struct.pack("<8I", 8 | 2 << 16, *[0] * 3, 8 | 2 << 16, *[0] * 3), "loads image 2 while it is loaded"),
    "too few": (stream(1)[16:], "its instructions load 1 images, its commands 2"),
    "unknown": (struct.pack("<2I", 77, 0), "operation 77 of the instruction stream is not known"),
}


@pytest.mark.parametrize("fault", STREAMS)
def test_instructions_that_would_not_reset_are_refused(fault: str) -> None:
    content, message = STREAMS[fault]
    with pytest.raises(UserError, match=message):
        judge.audit_stream("norm", bytes(16) + content, 2)


def test_a_compiler_that_evens_resets_by_itself_is_taken_at_its_word() -> None:
    assert judge.audit_stream("norm", stream(4), 3) == 4
    assert judge.audit_stream("norm", stream(3), 3) == 3, "which is odd, for the link step to see"


def test_a_core_whose_code_does_not_fit_is_refused(tmp_path: Path) -> None:
    core = tmp_path / "main_core_0_2.elf"
    core.write_bytes(core_elf(judge.PROGRAM_BYTES))
    judge.audit_core("norm", core, [])
    core.write_bytes(core_elf(judge.PROGRAM_BYTES + 4))
    with pytest.raises(
        UserError, match=r"norm, main_core_0_2.elf: needs 16388 of bytes of program memory, the NPU has 16384"
    ):
        judge.audit_core("norm", core, [])


BUFFER = Buffer("%buf0", 0, 2, 1024, 8192, 0)
PLACES = {
    "after the buffer": ((9216, 128), ""),
    "before it": ((limits.STACK_BYTES, 8192 - limits.STACK_BYTES), ""),
    "up to the end": ((limits.L1_BYTES - 128, 128), ""),
    "in the stack": ((limits.STACK_BYTES - 64, 128), ".data at 4032 of 128 bytes overlaps the stack at 0"),
    "in the buffer": ((9152, 128), ".data at 9152 of 128 bytes overlaps %buf0 at 8192"),
    "around the buffer": ((8128, 2048), ".data at 8128 of 2048 bytes overlaps %buf0 at 8192"),
    "beyond the end": ((limits.L1_BYTES - 64, 128), ".data at 0x7ffc0 is not in the core's own memory"),
    "in another core": ((-64, 64), ".data at 0x6ffc0 is not in the core's own memory"),
}
"""(place and size of static data, what is said of it)"""


@pytest.mark.parametrize("place", PLACES)
def test_static_data_lies_apart_from_stack_and_buffers(tmp_path: Path, place: str) -> None:
    data, message = PLACES[place]
    core = tmp_path / "main_core_0_2.elf"
    core.write_bytes(core_elf(data=data))
    if message:
        with pytest.raises(UserError, match=f"^norm, main_core_0_2.elf: {re.escape(message)}"):
            judge.audit_core("norm", core, [BUFFER])
    else:
        assert judge.audit_core("norm", core, [BUFFER]).static == data[1]


def test_a_core_without_an_elf_is_refused(tmp_path: Path) -> None:
    """Where the compiler names them otherwise, nothing would be checked."""
    findings(tmp_path)
    first, second = sorted(tmp_path.glob("*.elf"))
    module = air.parse_mlir(SMALL)
    renamed = first.rename(tmp_path / f"elfs_{first.name}")
    found = judge.audit_made("norm", module, tmp_path, "norm")
    assert found.static_bytes == 0, "its name since July 2026"
    assert found.code_bytes == [64, 64], "one core in each launch"
    second.write_bytes(core_elf(256))
    assert sorted(judge.audit_made("norm", module, tmp_path, "norm").code_bytes) == [64, 256]
    second.write_bytes(core_elf(data=(32768, 128)))
    assert judge.audit_made("norm", module, tmp_path, "norm").static_bytes == 128
    second.write_bytes(core_elf(data=(limits.STACK_BYTES, 64)))
    with pytest.raises(UserError, match=r"overlaps %buf0 at 4096$"):
        judge.audit_made("norm", module, tmp_path, "norm")
    for missing, left in ((second, 1), (renamed, 0)):
        missing.unlink()
        with pytest.raises(UserError, match=rf"^norm: aiecc left {left} ELFs of 2 cores, none of \w+_core_0_2, to"):
            judge.audit_made("norm", module, tmp_path, "norm")
    assert judge.audit_made("norm", module, tmp_path, "norm", linked=False).code_bytes == []


def test_lost_banks_are_a_note(tmp_path: Path) -> None:
    write_made(tmp_path, SMALL, "norm")
    path = tmp_path / judge.PLACED
    path.write_text(path.read_text().replace("mem_bank = 0 : i32, ", "", 1))
    found = judge.audit_made("norm", air.parse_mlir(SMALL), tmp_path, "norm")
    assert found.notes == ["launch0_rms_norm_segment_1: buffers of 1 compute tiles share banks of memory"]


def test_lost_banks_are_counted_by_kind_of_tile() -> None:
    places = [(0, 1), (0, 2), (0, 2), (1, 1), (1, 2), (1, 3)]
    buffers = [Buffer(f"b{i}", *place, 64, 1024 * (i + 4), None) for i, place in enumerate(places)]
    kept = Buffer("kept", 2, 1, 64, 0, 0)
    found = judge.audit_buffers("norm", {"norm_segment": [*buffers, kept], "all kept": [kept]})
    assert found == ["norm_segment: buffers of 3 compute tiles and 2 memory tiles share banks of memory"]


@pytest.mark.parametrize("name", [judge.LOWERED, judge.PLACED])
def test_what_the_compiler_did_not_leave_is_no_pass(tmp_path: Path, name: str) -> None:
    write_made(tmp_path, SMALL, "norm")
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"norm.16: aircc left no {name} to audit"):
        judge.audit_made("norm.16", air.parse_mlir(SMALL), tmp_path, "norm")


@pytest.mark.parametrize("text", ["module {", "}\n", "module {\n  aie.device(npu2) @x {\n"])
def test_text_that_is_cut_off_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"of what aircc made|what aircc made ends"):
        read_lines(text)


# what a module says


def brute_force(runs: Runs) -> np.ndarray:
    counted = np.zeros(4096, int)
    for start in runs.starts:
        counted[start : start + runs.length] += runs.times
    return counted


@pytest.mark.parametrize("seed", range(20))
def test_coverage_counts_every_element(seed: int) -> None:
    random = np.random.default_rng(seed)
    pieces = []
    for _ in range(random.integers(1, 5)):
        dims = tuple((int(random.integers(1, 6)), int(random.integers(1, 40))) for _ in range(random.integers(1, 4)))
        pieces.append(walk(random.integers(0, 2000, 7), dims, int(random.integers(1, 4))))
    expected = sum(brute_force(runs) for runs in pieces)
    found = Coverage.of(pieces)
    assert [found.at(element) for element in range(4096)] == list(expected)
    assert (found.elements, found.most) == (expected.sum(), expected.max())
    assert found == Coverage.of([*pieces[1:], pieces[0]]) and found.first_difference(found) is None
    more = Coverage.of([*pieces, Runs(np.array([4000]), 3)])
    assert found != more and found.first_difference(more) == 4000


def test_a_walk_is_every_address_of_its_pattern() -> None:
    runs = walk(np.array([5, 1000]), ((2, 100), (3, 10), (4, 1)), 2)
    inside = (np.arange(2)[:, None, None] * 100 + np.arange(3)[:, None] * 10 + np.arange(4)).ravel()
    expected = np.zeros(4096, int)
    expected[np.concatenate([5 + inside, 1000 + inside])] = 2
    assert np.array_equal(brute_force(runs), expected)


@pytest.mark.parametrize(
    "made",
    [lambda: gemm.build(gemm.tile(128, 256, 256)), lambda: gemv.build(gemv.tile(512, 256))],
    ids=["gemm", "gemv"],
)
def test_accesses_are_what_traffic_counts(made: Callable[[], air.AirModule]) -> None:
    module = made()
    (traffic,) = air.count(module)
    for counter, written in ((traffic.read, False), (traffic.written, True)):
        for slot, size in counter.items():
            runs = [a.runs for a in accesses(module.launches[0], "") if (a.slot, a.written) == (slot, written)]
            assert sum(r.elements for r in runs) * 2 == size == Coverage.of(runs).elements * 2


def test_ways_of_more_streams_than_there_are_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a feed-forward network in one launch could go to a hundred thousand places, a part to each."""
    program = next(p for p in family_programs("qwen3-8b", "fused", "int4") if p.entry == "decode_layer")
    launches = build_module(program, FAMILIES["qwen3-8b"].dimensions()).air.launches
    found = [access for launch in launches for access in accesses(launch, "")]
    most = max(found, key=lambda access: max(map(len, access.ways)))
    assert max(map(len, most.ways)) > 100_000
    walked: list[int] = []

    def streams(way: Way) -> Iterator[Runs]:
        walked.append(len(way))
        yield most.runs

    monkeypatch.setattr(Way, "streams", streams)
    judge.check_order("launch", (most.slot, most.written), [most], [[most.runs]])
    assert walked == [1]
    with pytest.raises(UserError, match="in another order than the module, in 1 inputs"):
        judge.check_order("launch", (most.slot, most.written), [most], [[Runs(most.runs.starts + 1, most.runs.length)]])


TOLD = "      aiex.npu.rtp_write(@__air_herd_rtp_0_2, 0, {0})\n      aiex.set_lock(%lock_0_2, 1)\n"


def telling(*before: int) -> Edit:
    """The core is told a step in front of the tasks of these numbers."""

    def edit(text: str) -> str:
        pieces = re.split(r"(?<=\n)(?= +%\d+ = aiex\.dma_configure_task_for)", text)
        for step, number in enumerate(before):
            pieces[1 + number] = TOLD.format(step) + pieces[1 + number]
        return "".join(pieces)

    return edit


TELLING = {
    "of the next step before the last is done": ((0, 0), "told of several steps at once, by @__air_herd_rtp_0_2"),
    "of more steps than there are": ((0, 1), r"told of 2 of 1 steps, by @__air_herd_rtp_0_2"),
}


def test_a_core_may_be_told_its_step(tmp_path: Path) -> None:
    assert findings(tmp_path, edit=telling(0)).resets == 2


@pytest.mark.parametrize("fault", TELLING)
def test_cores_that_miss_what_they_are_told_are_refused(tmp_path: Path, fault: str) -> None:
    before, message = TELLING[fault]
    with pytest.raises(UserError, match=message):
        findings(tmp_path, edit=telling(*before))


STALE = "uses %buf0 where its DMA is at %buf2"


def core_of(steps: int, buffers: int, last: str = "%buf2") -> str:
    """A core that is sent so many pieces, as the compiler unrolls the loop in which it takes them."""
    kind = "memref<64xbf16, 2 : i32>"
    filled = [
        line
        for i in range(buffers)
        for line in (
            f"^bb{i + 1}:",
            "aie.use_lock(%empty, AcquireGreaterEqual, 1)",
            f"aie.dma_bd(%buf{i} : {kind}, 0, 64)",
            "aie.use_lock(%full, Release, 1)",
            f"aie.next_bd ^bb{(i + 1) % buffers + 1}",
        )
    ]
    call = f"func.call @f({{}}) : ({kind}) -> ()"
    used = f"aie.use_lock(%full, AcquireGreaterEqual, 1)\n{call}\naie.use_lock(%empty, Release, 1)"
    return "\n".join(
        [
            "aie.device(npu2) @core {",
            "%shim = aie.tile(0, 0)",
            "%tile = aie.tile(0, 2)",
            f"%empty = aie.lock(%tile, 0) {{init = {buffers} : i32}}",
            "%full = aie.lock(%tile, 1) {init = 0 : i32}",
            "%sent = aie.lock(%tile, 2) {init = 0 : i32}",
            *(f"%buf{i} = aie.buffer(%tile) : memref<64xbf16, 2 : i32>" for i in range(buffers)),
            "%mem = aie.mem(%tile) {",
            "  %0 = aie.dma_start(S2MM, 0, ^bb1, ^out)",
            *filled,
            "^out:",
            "  %1 = aie.dma_start(MM2S, 0, ^send, ^end)",
            "^send:",
            "  aie.use_lock(%sent, AcquireGreaterEqual, 1)",
            "  aie.dma_bd(%buf0 : memref<64xbf16, 2 : i32>, 0, 2)",
            "  aie.next_bd ^send",
            "^end:",
            "  aie.end",
            "}",
            "%core = aie.core(%tile) {",
            "  %c0 = arith.constant 0 : index",
            "  %c2 = arith.constant 2 : index",
            f"  %n = arith.constant {steps - steps % 2} : index",
            "  cf.br ^bb1",
            "^bb1:",
            "  scf.for %i = %c0 to %n step %c2 {",
            used.format("%buf0"),
            used.format("%buf1"),
            "  }",
            *([used.format(last)] if steps % 2 else []),
            "  aie.use_lock(%sent, Release, 1)",
            "  cf.br ^bb1",
            "}",
            "aie.flow(%shim, DMA : 0, %tile, DMA : 0)",
            "aie.flow(%tile, DMA : 0, %shim, DMA : 0)",
            "aie.shim_dma_allocation @in(%shim, MM2S, 0)",
            "aie.shim_dma_allocation @out(%shim, S2MM, 0)",
            f"aie.runtime_sequence @core_sequence(%arg0: memref<{64 * steps}xbf16>, %arg1: memref<2xbf16>) {{",
            "%0 = aiex.dma_configure_task_for @in {",
            f"aie.dma_bd(%arg0 : memref<{64 * steps}xbf16>, 0, {64 * steps})",
            "}",
            "aiex.dma_start_task(%0)",
            "%1 = aiex.dma_configure_task_for @out {",
            "aie.dma_bd(%arg1 : memref<2xbf16>, 0, 2)",
            "} {issue_token = true}",
            "aiex.dma_start_task(%1)",
            "aiex.dma_await_task(%1)",
            "}",
            "}",
            "aie.device(npu2) {",
            "aie.runtime_sequence @f(%arg0: memref<2xbf16>) {",
            "aiex.configure @core {",
            "aiex.run @core_sequence(%arg0, %arg0) : (memref<2xbf16>, memref<2xbf16>)",
            "}",
            "}",
            "}",
        ]
    )


@pytest.mark.parametrize(
    ("steps", "buffers", "message"),
    [(4, 2, ""), (3, 3, ""), (5, 3, STALE), (15, 3, STALE)],
)
def test_a_core_uses_its_buffers_in_the_order_of_its_dma(steps: int, buffers: int, message: str) -> None:
    """Why an odd number of steps reads what is there from before."""
    assert limits.in_turn(steps) == (not message) and limits.copies(steps) == buffers
    ((configuration, _),) = read_compiled(core_of(steps, buffers), "f").steps
    if message:
        with pytest.raises(UserError, match=message):
            check_liveness("f", configuration)
    else:
        check_liveness("f", configuration)


TAKE, GIVE = "aie.use_lock(%full, AcquireGreaterEqual, 1)", "aie.use_lock(%empty, Release, 1)"
CALL = "func.call @f(%buf{}) : (memref<64xbf16, 2 : i32>) -> ()"
BOTH = "func.call @f(%buf1, %buf0) : (memref<64xbf16, 2 : i32>, memref<64xbf16, 2 : i32>) -> ()"
TRADES = {
    "takes both, in another order than its DMA": ([TAKE, TAKE, BOTH, GIVE, GIVE], ""),
    "keeps one while it gives the other": ([TAKE, CALL.format(0), TAKE, BOTH, GIVE, GIVE], ""),
    "takes one of two": ([TAKE, BOTH, TAKE, GIVE, GIVE], "uses %buf1 where its DMA is at %buf0"),
    "takes none": ([CALL.format(0), TAKE, TAKE, GIVE, GIVE], "uses %buf0 where its DMA is at none"),
    "never uses one": (
        [TAKE, CALL.format(0), TAKE, CALL.format(0), GIVE, GIVE],
        r"core \(0, 2\) has not used what its DMA brought to %buf1, where more comes",
    ),
    "uses what it gave": ([TAKE, TAKE, GIVE, BOTH, GIVE], "uses %buf0 where its DMA is at %buf1"),
}


@pytest.mark.parametrize("trade", TRADES)
def test_a_core_uses_what_it_took_and_has_not_given(trade: str) -> None:
    """A channel may fill several buffers, each with something else, that one call takes."""
    actions, message = TRADES[trade]
    pairs = [line for number in (0, 1) for line in (TAKE, CALL.format(number), GIVE)]
    text = core_of(4, 2).replace("\n".join(pairs), "\n".join(actions))
    ((configuration, _),) = read_compiled(text, "f").steps
    if "gave" in trade:
        # Right where the channel never fills them again.
        ((once, _),) = read_compiled(core_of(2, 2).replace("\n".join(pairs), "\n".join(actions)), "f").steps
        check_liveness("f", once)
    if message:
        with pytest.raises(UserError, match=message):
            check_liveness("f", configuration)
    else:
        check_liveness("f", configuration)


def through_l2(buffers: int) -> str:
    """A core that is sent four pieces through buffers of a memory tile, which take turns."""
    kind = "memref<64xbf16, 1 : i32>"
    turns = [
        line
        for channel, takes, gives in (("S2MM", "free", "ready"), ("MM2S", "ready", "free"))
        for line in (
            f"%{channel} = aie.dma_start({channel}, 0, ^{channel}0, ^{channel}end)",
            *(
                line
                for i in range(buffers)
                for line in (
                    f"^{channel}{i}:",
                    f"aie.use_lock(%{takes}, AcquireGreaterEqual, 1)",
                    f"aie.dma_bd(%l2_{i} : {kind}, 0, 64)",
                    f"aie.use_lock(%{gives}, Release, 1)",
                    f"aie.next_bd ^{channel}{(i + 1) % buffers}",
                )
            ),
            f"^{channel}end:",
        )
    ]
    memory = [
        "%tile_0_1 = aie.tile(0, 1)",
        f"%free = aie.lock(%tile_0_1, 0) {{init = {buffers} : i32}}",
        "%ready = aie.lock(%tile_0_1, 1) {init = 0 : i32}",
        *(f"%l2_{i} = aie.buffer(%tile_0_1) : {kind}" for i in range(buffers)),
        "%mem_0_1 = aie.memtile_dma(%tile_0_1) {",
        *turns,
        "aie.end",
        "}",
        "aie.flow(%shim, DMA : 0, %tile_0_1, DMA : 0)",
        "aie.flow(%tile_0_1, DMA : 0, %tile, DMA : 0)",
    ]
    return core_of(4, 2).replace("aie.flow(%shim, DMA : 0, %tile, DMA : 0)", "\n".join(memory))


@pytest.mark.parametrize(("buffers", "notes"), [(1, 1), (2, 0)])
def test_ddr_that_waits_for_l2_is_a_note(buffers: int, notes: int) -> None:
    ((configuration, _),) = read_compiled(through_l2(buffers), "f").steps
    found = judge.Findings(0, 0, False)
    judge._Launch("f", configuration, {}, found)._note_waits(check_liveness("f", configuration))
    assert (
        found.notes == ["core: 1 channels from DDR wait for L2: each fills one buffer 4 times with 128 bytes"] * notes
    )


def test_a_core_that_is_sent_too_little_waits_for_ever() -> None:
    """What a memory tile sends once, though the core takes it once per block of columns."""
    text = core_of(4, 2).replace("0, 256)", "0, 128)")
    ((configuration, _),) = read_compiled(text, "f").steps
    with pytest.raises(
        UserError, match=r"f: never ends: the commands wait for channel S2MM 0 of tile \(0, 0\), core \(0, 2\)"
    ):
        check_liveness("f", configuration)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (4, ""),
        (5, r"f: core \(0, 2\) waits for more when all is over: it was sent too much"),
        (9, r"f: core \(0, 2\) waits for more when all is over: it was sent too much"),
    ],
)
def test_a_core_that_is_sent_more_than_it_takes_is_refused(pieces: int, message: str) -> None:
    """What is left over would begin another pass of the core, of which the launch knows nothing."""
    text = core_of(4, 2).replace("0, 256)", f"0, {64 * pieces})").replace("<256x", f"<{64 * pieces}x")
    ((configuration, _),) = read_compiled(text, "f").steps
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_liveness("f", configuration)


def test_what_a_channel_does_not_take_is_refused() -> None:
    """A channel that stops before all has come: the stream stays full, and the shim never ends."""
    text = core_of(4, 2).replace("next_bd ^bb1", "next_bd ^stop").replace("^out:", "^stop:\naie.end\n^out:")
    ((configuration, _),) = read_compiled(text.replace("scf.for %i = %c0 to %n", "scf.for %i = %c0 to %c2"), "f").steps
    with pytest.raises(UserError, match=r"f: channel S2MM 0 of tile \(0, 2\) is sent 256 bytes that nobody takes"):
        check_liveness("f", configuration)


def test_a_descriptor_may_be_longer_than_what_a_stream_holds() -> None:
    steps = 1024
    text = core_of(steps, 2).replace("(%empty, Release, 1)", "(%empty, Release, 1)\naie.use_lock(%sent, Release, 1)")
    text = text.replace("}\naie.use_lock(%sent, Release, 1)", "}").replace("0, 2)", "0, 64)")
    text = text.replace("memref<2xbf16>, 0, 64)", f"memref<{64 * steps}xbf16>, 0, {64 * steps})")
    assert 2 * 64 * steps > HELD
    ((configuration, _),) = read_compiled(text, "f").steps
    check_liveness("f", configuration)


def test_slots_that_share_a_channel_keep_their_turns() -> None:
    """What a channel brings has no name, so a cache in the place of another's would be taken for it."""
    sizes = {"heads": 2, "kv_heads": 2, "head_dim": 64, "window": 128, "scalar": 64, "sees": ALL}
    kernel = kernels()["sequences2_token_attention"]
    assert kernel.tiling and kernel.program
    made = kernel.program(kernel.tiling(sizes | {"sequences": 2, "sequence": 0}))
    launch, at = made.launches[0], Channel(0, 0, "MM2S", 0)
    turns = [[slot for slot, _ in each] for each in judge.turns_of(launch, "launch")]
    assert ["kv", "kv1"] in turns and ["row", "row1"] in turns and ["table", "table1"] in turns

    def check(*slots: str) -> None:
        given = [Descriptor(slot, 64, 2, 0, 64, (), 1) for slot in slots]
        commands = tuple(Command("start", Task(at, "stream", (each,), 1, False)) for each in given)
        configuration = Configuration("launch", (), (), {}, (), frozenset(), (), (), commands)
        audited = judge._Launch("launch", configuration, {}, judge.Findings(0, 0, False))
        audited._check_turns(launch, {slot: slot for slot in slots})

    check("x", "kv", "kv", "kv1")
    check("kv1", "table")
    for wrong in (("kv1", "kv"), ("kv", "kv1", "kv")):
        with pytest.raises(UserError, match=rf"tile \(0, 0\) has {', '.join(wrong)} in another order than the module"):
            check(*wrong)
