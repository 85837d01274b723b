"""Weights in the host's memory are what their files have, in huge pages or mapped."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import UserError, load
from llama_npu2.artifact.storage import File
from llama_npu2.devices import HostBuffer, StoredWeight, weights
from llama_npu2.devices.cpu import CpuDevice
from stages.model.families import parse_config
from stages.model.random_weights import write_byte_tokenizer, write_random_weights
from tests.conftest import CONFIG, build

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def stored(tmp_path: Path) -> list[StoredWeight]:
    """Weights of two files, one of which is a part of a larger one. Of the fourth, rows are looked up."""
    rng = np.random.default_rng(3)
    for name, nbytes in ("one", 40 * MIB + 123), ("two", 9 * MIB):
        (tmp_path / name).write_bytes(rng.bytes(nbytes))
    one = File.at(tmp_path / "one")
    part = File(tmp_path / "two.part", tmp_path / "two", 3 * PAGE, 5 * MIB)
    return [
        StoredWeight(one, PAGE, 1),
        StoredWeight(one, 2 * PAGE, 17 * MIB + 5),
        StoredWeight(part, PAGE, 5 * MIB - PAGE),
        StoredWeight(part, 64, 4096, in_full=False),
        StoredWeight(one, 30 * MIB, 10 * MIB + 123),
    ]


def content(weight: StoredWeight) -> bytes:
    start = weight.file.start + weight.offset
    return weight.file.container.read_bytes()[start : start + weight.nbytes]


def about(buffer: HostBuffer) -> str:
    """What the kernel says of the mapping that a buffer is in."""
    for each in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(address, 16) for address in each.split(maxsplit=1)[0].split("-"))
        if begin <= buffer.address < end:
            return each
    raise AssertionError("it is in no mapping")


def is_copied(buffer: HostBuffer) -> bool:
    return "/" not in about(buffer).partition("\n")[0]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_copies(threads: int, stored: Sequence[StoredWeight]) -> None:
    loaded = weights.load(stored, threads).buffers
    assert [buffer.bytes.tobytes() for buffer in loaded] == list(map(content, stored))
    assert list(map(is_copied, loaded)) == [weight.in_full for weight in stored]
    assert not any(buffer.address % 64 for buffer in loaded)
    for buffer in loaded:
        with pytest.raises(ValueError, match="read-only"):
            buffer.bytes[0] = 0
    flags = next(line for line in about(loaded[1]).splitlines() if line.startswith("VmFlags"))
    assert " hg" in flags  # the kernel was asked for huge pages


@pytest.mark.parametrize("lacking", ["memory", "huge pages", "the kernel's setting"])
def test_mapped_where_copies_do_no_good(
    lacking: str, stored: Sequence[StoredWeight], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "memory":
        monkeypatch.setattr(weights, "available_memory", lambda: 60 * MIB)
    else:
        (setting := tmp_path / "enabled").write_text("always madvise [never]\n")
        monkeypatch.setattr(weights, "_HUGE_PAGES", setting if lacking == "huge pages" else tmp_path / "missing")
    loaded = weights.load(stored, 2).buffers
    assert [buffer.bytes.tobytes() for buffer in loaded] == list(map(content, stored))
    assert not any(map(is_copied, loaded))


def test_half_of_the_memory_is_left(stored: Sequence[StoredWeight], monkeypatch: pytest.MonkeyPatch) -> None:
    pages = sum(-(-weight.nbytes // PAGE) for weight in stored if weight.in_full)
    for available, copied in (2 * pages * PAGE, True), (2 * pages * PAGE - 1, False):
        monkeypatch.setattr(weights, "available_memory", lambda available=available: available)
        assert is_copied(weights.load(stored, 1).buffers[1]) == copied


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("which", [1, 4])
def test_a_file_that_ends_early(threads: int, which: int, stored: Sequence[StoredWeight]) -> None:
    some = list(stored)
    some[which] = some[which]._replace(offset=some[which].file.size - some[which].nbytes + 7)
    with pytest.raises(UserError, match="one ends 7 bytes early: copy it again or run doit compile"):
        weights.load(some, threads)


def test_a_file_that_is_gone(stored: Sequence[StoredWeight]) -> None:
    stored[0].file.container.unlink()
    with pytest.raises(UserError, match="one: No such file or directory: copy it again or run doit compile"):
        weights.load(stored, 2)


def test_copies_are_given_back_at_once(stored: Sequence[StoredWeight]) -> None:
    """Even while somebody has a buffer, who finds new pages then."""
    loaded = weights.load(stored, 2)
    loaded.release()
    assert [buffer.bytes.any() for buffer in loaded.buffers] == [not weight.in_full for weight in stored]
    assert loaded.buffers[3].bytes.tobytes() == content(stored[3])


def test_a_model_that_is_closed_has_no_copies(demo: Path) -> None:
    with closing(load(demo)) as llm:
        weight = next(llm.memory.buffer(name) for name in llm.manifest.buffers if "up_proj" in name)
        assert is_copied(weight) and weight.bytes.any()
    assert not weight.bytes.any()


def test_few_bytes_are_mapped(stored: Sequence[StoredWeight]) -> None:
    assert not is_copied(weights.load(stored[:1], 2).buffers[0])


def test_rows_and_experts_stay_in_the_file(tmp_path: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding that the LM head does not share, the tables of angles, and experts, of which a token takes some."""
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "tie_word_embeddings": False}
    raw = CONFIG | experts | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (where := tmp_path / "model").mkdir()
    (where / "config.json").write_text(json.dumps(raw))
    write_random_weights(config := parse_config(raw, "test"), where / "model.safetensors")
    write_byte_tokenizer(config, where)
    directory = build(where, artifacts)
    seen: list[StoredWeight] = []
    own = CpuDevice.load_weights

    def noted(device: CpuDevice, stored: Sequence[StoredWeight]) -> list[HostBuffer]:
        seen.extend(stored)
        return own(device, stored)

    monkeypatch.setattr(CpuDevice, "load_weights", noted)
    with closing(load(directory)) as llm:
        names = [name for name, spec in llm.manifest.buffers.items() if "file" in spec]
    rows = {name for name, weight in zip(names, seen, strict=True) if not weight.in_full}
    assert rows == {name for name in names if "embed_tokens" in name or "experts" in name or "table" in name}
    assert len(rows) == 2 + 2 * 3
