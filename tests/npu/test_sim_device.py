"""The simulator behind the runtime's device interface: slots, views, counts, and what it refuses."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llama_npu2.artifact.plan import FROM_POSITION, LAST_ROW, WHOLE, WINDOW, Positions, View
from llama_npu2.artifact.storage import File
from llama_npu2.devices import Binding, Call, HostBuffer
from llama_npu2.devices.cpu import CpuDevice
from llama_npu2.devices.libraries import open_library
from llama_npu2.devices.sim import SimProgram, SimSubmission
from llama_npu2.devices.spans import Timer
from llama_npu2.errors import UserError
from stages.air import L1, Builder, memref_type, to_mlir
from stages.kernels import add
from stages.targets.npu2_sim import programs
from tests.support.sim_support import aligned, compile_module

ROWS, COLS = 8, 64


class Memory(HostBuffer):
    """A buffer as the device hands it out."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = aligned(array)
        super().__init__(self.array.reshape(-1).view(np.uint8))


def program() -> SimProgram:
    (kernel,) = add.KERNELS
    assert kernel.tiling and kernel.program
    return compile_module(kernel.program(kernel.tiling({"rows": ROWS, "cols": COLS})).module)


def bind(memory: Memory, view: View = WHOLE) -> Binding:
    return Binding(memory, view, memory.array.strides[0])


def submission(calls: list[Call]) -> SimSubmission:
    return SimSubmission(cast(CpuDevice, None), calls, Timer())


def rows(count: int, seed: int) -> Memory:
    return Memory(np.random.default_rng(seed).normal(size=(count, COLS)).astype(bfloat16))


def test_calls_run_in_order_on_shared_buffers() -> None:
    a, b, c, d = (rows(ROWS, seed) for seed in range(4))
    code = program()
    calls = [Call(code, [bind(a), bind(b), bind(c)]), Call(code, [bind(c), bind(b), bind(d)])]
    submission(calls).run(ROWS, 0)
    once = add.reference(a.array, b.array)
    assert (c.array == once).all()
    assert (d.array == add.reference(once, b.array)).all()


VIEWS = [
    *((FROM_POSITION, ROWS, 3, 3), (LAST_ROW, ROWS + 5, 0, ROWS + 4), (WHOLE, 1, 7, 0)),
    *((view, ROWS, (2, 3), 3) for view in (FROM_POSITION._replace(sequence=1), View("", sequence=1, rows=3))),
    (View(WINDOW, 5, 4, 1, 5), ROWS, (0, 8), 5 + 4),
    *((View(WINDOW, 5, 4), ROWS, at, first) for at, first in ((0, 0), (7, 0), (8, 4), (11, 4), (12, 8))),
]


@pytest.mark.parametrize("view, seq, pos, first", VIEWS)
def test_views_start_where_the_position_says(view: View, seq: int, pos: Positions, first: int) -> None:
    assert view == WHOLE or View.parse(str(view)) == view
    long, b, out = rows(4 * ROWS, 1), rows(ROWS, 2), rows(ROWS, 3)
    submission([Call(program(), [bind(long, view), bind(b), bind(out)])]).run(seq, pos)
    assert (out.array == add.reference(long.array[first : first + ROWS], b.array)).all()


def test_a_buffer_shorter_than_its_slot_is_refused() -> None:
    long, b, out = rows(ROWS + 2, 1), rows(ROWS, 2), rows(ROWS, 3)
    run = submission([Call(program(), [bind(long, FROM_POSITION), bind(b), bind(out)])])
    run.run(ROWS, 2)
    with pytest.raises(UserError, match=r"add: slot a needs 1024 bytes from 384 on, its buffer has 1280"):
        run.run(ROWS, 3)


def copy_twice(count: int) -> SimProgram:
    """The first `count` rows of `a` to `scratch`, then all of `scratch` to `out`."""
    kind = memref_type((ROWS, COLS))
    b = Builder("copy_twice", {"a": kind, "scratch": kind, "out": kind})
    for source, target, moved in (("a", "scratch", count), ("scratch", "out", ROWS)):
        with b.launch(), b.segment(), b.herd(1, 1) as _, b.alloc(L1, (moved, COLS)) as (x,):
            b.dma(x, b.args[source].at((0, moved, COLS), (0, COLS, 1)))
            b.dma(b.args[target].at((0, moved, COLS), (0, COLS, 1)), x)
    return compile_module(b.finish().module)


def test_what_earlier_runs_left_is_not_read() -> None:
    """On the array it is, and passes for right as long as nothing changes."""
    a, scratch, out = (rows(ROWS, seed) for seed in range(3))
    submission([Call(copy_twice(ROWS), [bind(a), bind(scratch), bind(out)])]).run(ROWS, 0)
    assert (out.array == a.array).all()
    with pytest.raises(UserError, match=r"copy_twice launch 1 .*reads bytes that were never written"):
        submission([Call(copy_twice(ROWS - 1), [bind(a), bind(scratch), bind(out)])]).run(ROWS, 0)


def test_an_output_may_replace_an_input() -> None:
    a, b = rows(ROWS, 1), rows(ROWS, 2)
    want = add.reference(a.array, b.array)
    submission([Call(program(), [bind(a), bind(b), bind(a)])]).run(ROWS, 0)
    assert (a.array == want).all()


def test_counters_add_up_over_runs() -> None:
    code, memory = program(), [rows(ROWS, seed) for seed in range(3)]
    for _ in range(2):
        code.run([m.address for m in memory])
    counters = code.counters()
    size = memory[0].bytes.nbytes
    assert counters.submissions == 2
    assert counters.slots == [{"a": (2 * size, 0), "b": (2 * size, 0), "out": (0, 2 * size)}]
    assert (counters.read, counters.written) == (4 * size, 2 * size)
    assert sum(counters.calls) == 2 * 8


def test_missing_files_and_programs_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.so cannot be loaded .* rebuild it with doit compile"):
        open_library(File.at(tmp_path / "nothing.so"))
    libc: Any = ctypes.CDLL(None)
    libc._name = "some.so"
    with pytest.raises(UserError, match=r"some\.so has no program add"):
        SimProgram(libc, "add")


def test_a_module_is_lowered_again_where_it_or_what_lowers_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel,) = add.KERNELS
    assert kernel.tiling and kernel.program
    module, code, lowered = tmp_path / "add.mlir", tmp_path / "code/__init__.py", list[str]()
    code.parent.mkdir()
    monkeypatch.setattr(programs.air, "__file__", str(code))
    lower = programs._lowered
    monkeypatch.setattr(programs, "_lowered", lambda *given: (lowered.append("once more"), lower(*given))[1])
    contents = []
    for cols, text in ((COLS, ""), (COLS, ""), (2 * COLS, ""), (2 * COLS, "# another"), (COLS, "")):
        module.write_text(to_mlir(kernel.program(kernel.tiling({"rows": ROWS, "cols": cols})).module))
        code.write_text(text)
        source = programs._cached_source(module, "add", tmp_path / "artifacts/.cache/objects")
        contents.append((len(lowered), source.path.read_text()))
    assert [count for count, _ in contents] == [1, 1, 2, 3, 3]
    assert contents[0] == contents[1] and contents[4][1] == contents[0][1] != contents[2][1] == contents[3][1]
