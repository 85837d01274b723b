"""Tile functions whose stack or static data would overflow into a core's buffers are refused when they are compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_npu2.errors import UserError
from stages.air import limits
from stages.targets import forget_tools
from stages.targets.npu2 import objects, stack, static
from tests.support.npu_tools import install
from tests.support.objects import PEANO_OBJECT, stack_object

LIMIT = limits.STACK_BYTES - limits.CALLER_STACK_BYTES


@pytest.fixture(autouse=True)
def _fresh_tools() -> Iterator[None]:
    forget_tools()
    yield
    forget_tools()


@pytest.mark.parametrize(
    "frames, refusal",
    [
        ({"step": LIMIT, "out": LIMIT}, None),
        ({"step": LIMIT - 300, "_multiply": 200, "_load": 100}, None),
        ({"step": LIMIT + 1}, f"needs {LIMIT + 1} bytes of stack, {LIMIT + 1} of them in step, and has {LIMIT}"),
        ({"out": 64, "step": 9, "_all": LIMIT}, f"needs {LIMIT + 64} bytes of stack, {LIMIT} of them in _all"),
        ({"step": 64, "_gather": None}, "how much stack _gather takes is not fixed"),
    ],
)
def test_frames_of_tile_functions(tmp_path: Path, frames: dict[str, int | None], refusal: str | None) -> None:
    """One exported function runs at a time; whatever it may call lies on top of it."""
    made = tmp_path / "gemm.o"
    made.write_bytes(stack_object(frames))
    if refusal is None:
        stack.check_stack(made, "gemm.o")
    else:
        with pytest.raises(UserError, match=f"^gemm.o: {re.escape(refusal)}"):
            stack.check_stack(made, "gemm.o")
    assert {frame.function: frame.bytes for frame in stack.frames(made, "")} == frames


@pytest.mark.parametrize("content", [b"", b"text", PEANO_OBJECT[:200]])
def test_what_is_no_object_is_named(tmp_path: Path, content: bytes) -> None:
    made = tmp_path / "gemm.o"
    made.write_bytes(content)
    with pytest.raises(UserError, match=r"^gemm\.o: the stack of its functions cannot be read"):
        stack.check_stack(made, "gemm.o")


def test_an_object_that_overflows_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peano is asked for the frames, and what it says decides."""
    made = tmp_path / "made.o"
    compiler = f"""
if "--version" in args:
    sys.exit(print("fake 22.1.0"))
source = next(a for a in args if a.endswith(".cc"))
assert "-fstack-size-section" in args
pathlib.Path(args[args.index("-o") + 1]).write_bytes(pathlib.Path({str(made)!r}).read_bytes())
pathlib.Path(args[args.index("-MF") + 1]).write_text(f"x.o: {{source}}")
"""
    for name, value in install(tmp_path / "tools", compiler, "", "").items():
        monkeypatch.setenv(name, value)
    cache = tmp_path / "cache"
    made.write_bytes(stack_object({"add": LIMIT + 16}))
    with pytest.raises(UserError, match=f"^add_count64.o: needs {LIMIT + 16} bytes of stack"):
        objects.compile_tile("aie2p/add", cache, "add_count64.o", ["-DCOUNT=64"])
    assert not list(cache.glob("*.o"))
    made.write_bytes(stack_object({"add": LIMIT}))
    kept = objects.compile_tile("aie2p/add", cache, "add_count64.o", ["-DCOUNT=64"]).path
    assert kept.read_bytes() == made.read_bytes()


DATA = """
    .section {section}
    .zero {size}
"""


@pytest.mark.parametrize(
    ("section", "size", "refusal"),
    [
        ('.rodata,"a",@progbits', 4096, ""),
        ('.rodata.cst64,"aM",@progbits,64', 128, ""),
        ('.data,"aw",@progbits', 64, ""),
        ('.bss,"aw",@nobits', 4, "4 bytes of .bss, which nothing clears"),
    ],
)
def test_memory_without_a_value_is_refused(tmp_path: Path, section: str, size: int, refusal: str) -> None:
    """How much static data has room is for the linker to say."""
    made = tmp_path / "gemm.o"
    made.write_bytes(stack_object({"step": 64}, DATA.format(section=section, size=size)))
    if refusal:
        with pytest.raises(UserError, match=f"^gemm.o: {re.escape(refusal)}"):
            static.check_static(made, "gemm.o")
    else:
        static.check_static(made, "gemm.o")


def test_an_object_with_memory_that_nothing_clears_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = stack_object({"add": 64}, DATA.format(section='.bss,"aw",@nobits', size=4))
    compiler = f"""
if "--version" in args:
    sys.exit(print("fake 22.1.0"))
pathlib.Path(args[args.index("-o") + 1]).write_bytes({content!r})
pathlib.Path(args[args.index("-MF") + 1]).write_text("x.o: x.cc")
"""
    for name, value in install(tmp_path / "tools", compiler, "", "").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"^add_count64.o: 4 bytes of .bss"):
        objects.compile_tile("aie2p/add", tmp_path / "cache", "add_count64.o", ["-DCOUNT=64"])
    assert not list((tmp_path / "cache").glob("*.o"))


def test_tilings_leave_room_for_stack_and_static_data() -> None:
    most = limits.L1_BYTES - limits.STACK_BYTES - limits.STATIC_BYTES
    assert limits.fits_l1(most - 64, 64)
    assert not limits.fits_l1(most, 4)
