"""The host programs in numpy against the native ones, over shapes that are multiples of nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_npu2.artifact.dtypes import DTYPES
from llama_npu2.artifact.storage import File
from llama_npu2.devices import Binding, Call
from llama_npu2.devices.cpu import CpuDevice
from llama_npu2.devices.host_numpy import PROGRAMS, NumpyDevice, wide
from llama_npu2.errors import UserError
from stages.model.config import Config, RopeScaling
from stages.model.grouping import programs
from stages.targets import targets
from stages.targets.cpu.modules import cpu_source, described_slots
from stages.targets.cpu.programs import link_host
from tests.conftest import build

NPU2 = targets()["npu2"]
GROUPING = NPU2.groupings[NPU2.default_grouping]
PARTS = {program.entry: program.parts[0] for program in programs("llama", GROUPING) if program.host}
SHAPES = [(33, 17, 3, 1, 10), (300, 64, 4, 2, 16), (5001, 95, 6, 6, 46)]
POSITIONS = 300
ROWS = 7

Native = Callable[[dict[str, Any]], CpuDevice]


def model_of(shape: tuple[int, ...]) -> dict[str, Any]:
    vocab, emb, heads, kv_heads, head_dim = shape
    sizes = {"vocab": vocab, "emb": emb, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    others = {"ffn": 8, "layers": 1, "max_seq": POSITIONS, "eps": 1e-5, "tied": True, "eos": (), "family": "llama"}
    return dict(Config(rope_theta=1e4, rope_scaling=RopeScaling(), **sizes, **others).dimensions())  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def model(request: pytest.FixtureRequest) -> dict[str, Any]:
    return model_of(request.param)


@pytest.fixture(scope="module")
def native(model: dict[str, Any], artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`host.so` for the model's shape, from the objects of the demo model's."""
    objects = build("demo", artifacts, target="npu2-sim", buckets="64,128") / "build/objects/cpu"
    directory = tmp_path_factory.mktemp("host")
    (directory / "host.cc").write_text(cpu_source(list(PARTS.values()), model))
    link_host(directory / "host.cc", sorted(objects.rglob("*.o")), directory / "host.so")
    return directory / "host.so"


def execute(
    device: Any, path: Path, name: str, slots: list[dict[str, Any]], values: dict[str, np.ndarray], pos: int
) -> None:
    """Run one program; `values` are the slots' arrays, before and after."""
    buffers = {slot["name"]: device.alloc(values[slot["name"]].nbytes) for slot in slots}
    for slot, buffer in buffers.items():
        buffer.bytes[:] = values[slot].view(np.uint8).reshape(-1)
    call = Call(device.load_program(File.at(path), name, True), [Binding(b, "", 0) for b in buffers.values()], slots)
    device.prepare([call]).run(len(values.get("tokens", [0])), pos)
    for slot in slots:
        array = values[slot["name"]]
        values[slot["name"]] = device.array(buffers[slot["name"]], DTYPES[slot["dtype"]], array.shape).copy()


def random_values(slots: list[dict[str, Any]], vocab: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """An array per slot; of tokens, some that are none."""
    sizes = {"seq": ROWS, "max_seq": POSITIONS}
    values = {}
    for slot in slots:
        shape = [sizes.get(dim, dim) for dim in slot["shape"]]
        values[slot["name"]] = rng.standard_normal(shape, np.float32).astype(DTYPES[slot["dtype"]])
    if "tokens" in values:
        values["tokens"] = np.array([0, vocab - 1, 3, -1, vocab, 3, 1], np.int32)
    return values


def both(native: Path, name: str, model: dict[str, Any], pos: int) -> list[dict[str, np.ndarray]]:
    results = []
    for device in (CpuDevice(File.at(native), 2), NumpyDevice(model)):
        slots = described_slots(PARTS[name], model)
        values = random_values(slots, model["vocab"], np.random.default_rng(pos))
        execute(device, native, name, slots, values, pos)
        results.append(values)
        device.close()
    return results


def assert_same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_every_host_program_exists() -> None:
    assert PROGRAMS.keys() == PARTS.keys()
    with pytest.raises(UserError, match="program other exists only natively"):
        NumpyDevice({}).load_program(File.at(Path("host.so")), "other")


def test_slots_are_those_of_the_native_programs(model: dict[str, Any]) -> None:
    device = NumpyDevice(model)
    for name, part in PARTS.items():
        slots = [{key: slot[key] for key in ("name", "shape", "dtype")} for slot in described_slots(part, model)]
        assert device.declared(PROGRAMS[name]).slots == slots


def test_embedding_is_the_same(native: Path, model: dict[str, Any]) -> None:
    ours, theirs = both(native, "embed_token_rows", model, 0)
    assert_same(ours["x"], theirs["x"])


def test_norm_rounds_where_the_kernel_does(native: Path, model: dict[str, Any]) -> None:
    ours, theirs = both(native, "final_norm", model, 0)
    np.testing.assert_allclose(wide(ours["normed"]), wide(theirs["normed"]), rtol=2**-7)
    assert (ours["normed"] == theirs["normed"]).mean() > 0.9, "but for sums on the other side of a tie"


def test_logits_agree_to_the_rounding_of_their_sums(native: Path, model: dict[str, Any]) -> None:
    ours, theirs = both(native, "lm_head_rows", model, 0)
    sizes = np.abs(wide(theirs["w_vocab"])) @ np.abs(wide(theirs["x"]))
    assert (np.abs(ours["logits"] - theirs["logits"]) <= 2 * model["emb"] * 2.0**-24 * sizes).all()


@pytest.mark.parametrize("pos", [0, 1, 31, 299])
def test_attention_appends_and_attends(native: Path, model: dict[str, Any], pos: int) -> None:
    ours, theirs = both(native, "decode_attn_kv", model, pos)
    assert_same(ours["kv"], theirs["kv"])
    # Each rounds the weights and the result to bf16.
    np.testing.assert_allclose(wide(ours["attn_out"]), wide(theirs["attn_out"]), rtol=2**-7, atol=2**-8)
