"""A manifest is checked as a whole before anything in it is used: whatever is wrong is one line that says where."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_npu2 import load
from llama_npu2.artifact.manifest import FORMAT, Manifest
from llama_npu2.artifact.validation import check_manifest
from llama_npu2.errors import UserError
from llama_npu2.trust import mark_own

Change = Callable[[dict[str, Any]], Any]

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
O_FFN = "programs.o_ffn.slots"


@pytest.fixture(scope="module")
def manifest(demo: Path) -> str:
    return (demo / "manifest.json").read_text()


def put(value: Any, *path: Any) -> Change:
    """A value at a path."""

    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def drop(*path: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


def rename(section: str, old: str, new: str) -> Change:
    return lambda content: content[section].update({new: content[section].pop(old)})


def size(*path: Any) -> Change:
    """The shape of a buffer."""
    name, *shape = path
    return put([*shape], "buffers", name, "shape")


def slot(program: str, which: str, **fields: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        next(each for each in content["programs"][program]["slots"] if each["name"] == which).update(fields)

    return change


def bind(place: int, reference: Any, call: int = 1, phase: str = "prefill") -> Change:
    return put(reference, "plans", phase, call, "buffers", place)


CHANGES: dict[str, tuple[Change, str]] = {
    # types and ranges
    "section is a list": (put([], "buffers"), "buffers = [] must be an object"),
    "shape is text": (put("512", "buffers", "x.0", "shape"), 'buffers.x.0.shape = "512" must be a list'),
    "shape is empty": (size("x.0"), "buffers.x.0.shape = [] must be a list of 1 to 8"),
    "size is true": (size("x.0", True, 256), "buffers.x.0.shape[0] = true must be a whole number"),
    "size is a fraction": (size("x.0", 512.0, 256), "buffers.x.0.shape[0] = 512.0 must be a whole number"),
    "size is 0": (size("x.0", 0, 256), "buffers.x.0.shape[0] = 0 must be a whole number from 1"),
    "size is negative": (size("x.0", -512, 256), "buffers.x.0.shape[0] = -512 must be a whole number from 1"),
    "sizes overflow": (size("x.0", *[1 << 40] * 3), "buffers.x.0 has 2658455991569831745807614120560689152 bytes"),
    "size is huge": (size("x.0", 10**400, 256), "buffers.x.0.shape[0] = 1000"),
    "dtype": (put("f8", "buffers", "x.0", "dtype"), 'dtype = "f8" must be one of bf16, f32, i32, i8'),
    "dtype is a list": (put(["bf16"], "buffers", "x.0", "dtype"), 'dtype = ["bf16"] must be one of'),
    "kind": (put("input", "buffers", "x.0", "kind"), 'kind = "input" must be one of'),
    "weight without a file": (drop("buffers", NORM, "file"), f"buffers.{NORM} = "),
    "offset is negative": (put(-64, "buffers", NORM, "offset"), "offset = -64 must be a whole number from 0"),
    "values are none": (put(0, "buffers", NORM, "values"), "values = 0 must be a whole number from 1"),
    "entry is no symbol": (put("o_ffn; rm", "programs", "o_ffn", "entry"), "must be the name of a C function"),
    "host is a number": (put(1, "programs", "o_ffn", "host"), "programs.o_ffn.host = 1 must be true or false"),
    "no slots": (put([], "programs", "o_ffn", "slots"), f"{O_FFN} = [] must be a list of 1"),
    "slot without a role": (drop("programs", "o_ffn", "slots", 0, "role"), f"{O_FFN}[0] = "),
    "role": (slot("o_ffn", "wo", role="w"), 'role = "w" must be one of'),
    "slot of unknown rows": (slot("o_ffn", "down", shape=["rows", 256]), 'shape[0] = "rows" must be a size, seq or'),
    "phase": (rename("plans", "decode", "generate"), "generate"),
    "phase of no rows": (rename("plans", "prefill", "prefill@0"), "prefill@0"),
    "call is a list": (put([], "plans", "decode", 0), "plans.decode[0] = [] must be an object"),
    "layer": (put(4, "plans", "decode", 1, "layer"), "plans.decode[1] is of layer 4, the model has 4"),
    "layer is text": (put("0", "plans", "decode", 1, "layer"), 'layer = "0" must be a whole number'),
    "vocabulary": (put(None, "model", "vocab"), "model.vocab = null must be a whole number"),
    "eps": (put(-1e-5, "model", "eps"), "model.eps = -1e-05 must be a positive number"),
    "heads": (put(3, "model", "kv_heads"), "model has 4 heads for 3 of keys and values"),
    "end token": (put([2048], "model", "eos"), "model.eos names a token outside of the vocabulary of 2048"),
    "name": (put("de\nmo", "model", "name"), "must be a line of text"),
    "digest": (put("00", "files", "elf/host.so", "sha256"), 'sha256 = "00" must be a SHA-256'),
    "file size": (put(-1, "files", "elf/host.so", "size"), "size = -1 must be a whole number from 0"),
    # names of files
    **{
        f"file {name!r}": (rename("files", "elf/host.so", name), "must be the name of a file inside the directory")
        for name in (
            *("", ".", "..", "/etc/passwd", "../host.so", "elf/../../host.so", "elf/..", "elf//host.so", "elf/"),
            *("./elf/host.so", "elf\\host.so", "elf/ho\0st.so", "elf/ho\nst.so", "elf/\ud800"),
            *("x" * 256, "elf/" + "\u00e4" * 128 + "/host.so", "/".join(["elf"] * 251)),
        )
    },
    "program outside": (put("../host.so", "programs", "o_ffn", "file"), "must be the name of a file inside"),
    "blob outside": (put("/dev/zero", "buffers", NORM, "file"), "must be the name of a file inside"),
    # references
    "no such program": (drop("programs", "o_ffn"), "plans.prefill[3] calls for o_ffn, which is not among the programs"),
    "no such buffer": (drop("buffers", "swiglu"), "calls for swiglu, which is not among the buffers"),
    "program of no file": (drop("files", "elf/o_ffn.so"), "programs.o_ffn is in elf/o_ffn.so, which is not among the"),
    "blob of no file": (drop("files", "weights/head.safetensors"), f"buffers.{NORM} is in weights/head.safetensors,"),
    "unknown view": (bind(0, "x.0@first"), "plans.prefill[1] binds x.0@first: a view is @pos, @last or @window:SEES:"),
    **{
        f"window {sizes!r}": (bind(0, f"x.0@window{sizes}"), f"plans.prefill[1] binds x.0@window{sizes}: a view is")
        for sizes in ("", ":", ":4", ":0:4", ":4:0", ":-4:4", ":4:4:4", ":٤:4", ":1e3:4", ":4:9999999999")
    },
    "no buffer's name": (bind(0, ""), "calls for , which is not among the buffers"),
    "reference is a list": (bind(0, ["x.0"]), "must be a string"),
    "two slots of a name": (slot("o_ffn", "gate", name="up"), "programs.o_ffn has two slots of one name"),
    "too few buffers": (drop("plans", "decode", 1, "buffers", 0), "plans.decode[1] binds 15 buffers to 16 slots"),
    "two host libraries": (put(True, "programs", "o_ffn", "host"), "the host's programs are in more than one file"),
    "no host program": (
        lambda m: [program.update(host=False) for program in m["programs"].values()],
        "programs has none for the host",
    ),
    "no token phase": (drop("plans", "decode"), "plans lacks the phases of a prompt or of a token"),
    "no prompt phase": (drop("plans", "prefill_chunk"), "plans lacks the phases of a prompt or of a token"),
    "bucket in a short window": (rename("plans", "prefill", "prefill@512@256"), "plans.prefill@512@256 is for fewer"),
    "bucket of no time": (rename("plans", "prefill", "prefill@512"), "decode is not in both plans and milliseconds"),
    "time": (put({"decode": -1.0}, "milliseconds"), "milliseconds.decode = -1.0 must be a positive number"),
    "time with copies": (
        put({"decode": 0}, "copied_milliseconds"),
        "copied_milliseconds.decode = 0 must be a positive",
    ),
    "bucket": (rename("plans", "prefill", "prefill@513"), "plans.prefill@513 has more rows than buffers.tokens"),
    "no tokens": (drop("buffers", "tokens"), "buffers.tokens must be an activation of i32"),
    "tokens in a file": (put("weight", "buffers", "tokens", "kind"), "buffers.tokens = "),
    "logits of bf16": (put("bf16", "buffers", "logits", "dtype"), "buffers.logits must be an activation of f32"),
    "few logits": (size("logits", 2047), "buffers.logits has 2047 values, the vocabulary has 2048"),
    "place below 0": (put(-64, "buffers", "x.0", "at"), "at = -64 must be a whole number from 0"),
    "place not aligned": (put(32, "buffers", "x.0", "at"), "buffers.x.0 is not at a multiple of 64"),
    "place far away": (put(1 << 46, "buffers", "x.0", "at"), "buffers.x.0 has"),
    "logits lie in shared memory": (put(0, "buffers", "logits", "at"), "buffers.logits must have memory of its own"),
    "a cache lies in shared memory": (put(0, "buffers", "k_cache.0", "at"), "buffers.k_cache.0 must have memory"),
    # what is bound
    "another dtype": (slot("o_ffn", "down", dtype="f32"), "binds bf16 to slot down of f32"),
    "weight into an input": (bind(0, NORM), "binds a buffer of kind weight to slot x_in of role input"),
    "activation as a weight": (bind(1, "final_normed"), "binds a buffer of kind activation to slot norm_w of role"),
    "view of a weight": (bind(1, f"{NORM}@last"), "binds a view to slot norm_w of role weight"),
    "written twice": (bind(11, "normed"), "binds normed, which it writes, to two slots"),
    "written and read": (bind(2, "x.0"), "binds x.0, which it writes, to two slots"),
    "few rows": (size("swiglu", 511, 768), "binds 784896 bytes to slot swiglu, which needs 786432 for 512 rows from"),
    "narrow": (size("up", 512, 767), "binds 785408 bytes to slot up, which needs 786432"),
    "last row behind": (bind(0, "x.0@last"), "to slot x_in, which needs 523776 for 512 rows"),
    "window of rows": (bind(0, "x.0@window:4:4"), "binds the view of a window to slot x_in, whose shape is not fixed"),
    "rows from a position": (bind(0, "x.0@pos"), "to slot x_in, which needs"),
    "a longer context": (put(2049, "model", "max_seq"), "is no cache of 2049 positions in blocks of 128"),
    "longer chunks": (size("tokens", 513), "needs"),
    # caches in blocks
    "few blocks": (
        put(64, "buffers", "k_cache.0", "row_positions"),
        "k_cache.0 is no cache of 2048 positions in blocks",
    ),
    "rows that blocks do not hold": (
        put(127, "buffers", "k_cache.0", "row_positions"),
        "is no cache of 2048 positions",
    ),
    "blocks of an activation": (put(1, "buffers", "logits", "row_positions"), "logits is no cache of 2048 positions"),
    "view of blocks": (
        bind(13, "k_cache.0@pos", 1, "decode"),
        "binds a cache of other blocks, or a view of one, to slot",
    ),
    # blobs
    "weight behind its file": (put(1 << 40, "buffers", NORM, "offset"), "lies outside weights/head.safetensors"),
    "weight not aligned": (put(4104, "buffers", NORM, "offset"), "or not at a multiple of 64"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_one_line(name: str, manifest: str) -> None:
    change, fragment = CHANGES[name]
    content = json.loads(manifest)
    check_manifest(content)
    change(content)
    with pytest.raises(ValueError) as caught:
        check_manifest(content)
    assert fragment in str(UserError(str(caught.value)))


@pytest.mark.parametrize("sees, tile, row", [(2048, 1, 0), (3000, 1, 0), (2047, 2, 0), (2047, 1, 1), (1, 64, 1984)])
def test_the_view_of_a_window_stays_in_its_buffer(sees: int, tile: int, row: int, manifest: str) -> None:
    """A token at the last position, 2047, whose slot has as many rows as the buffer."""
    content = json.loads(manifest)
    call = content["plans"]["decode"][1]
    place = [slot["name"] for slot in content["programs"][call["program"]]["slots"]].index("k_cache")
    block = 2 * 128 * 64 * 2
    assert content["buffers"]["k_cache.0"]["shape"] == [16, 2, 128, 64]
    contiguous(content)
    bind(place, f"k_cache.0@window:{sees}:{tile}", 1, "decode")(content)
    if not row:
        check_manifest(content)
        return
    with pytest.raises(ValueError, match=f"slot k_cache, which needs {(row + 16) * block} for 1 rows from 2047 on"):
        check_manifest(content)


def contiguous(content: dict[str, Any]) -> None:
    """Caches whose positions lie in order, without a table of blocks."""
    for spec in content["buffers"].values():
        spec.pop("row_positions", None)


def edited(demo: Path, directory: Path, text: str) -> Path:
    """The artifacts with another manifest, for which the user vouches."""
    shutil.copytree(demo, directory, copy_function=os.link, ignore=shutil.ignore_patterns("build"))
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").write_text(text)
    mark_own(directory, text.encode())
    return directory


def refused(demo: Path, directory: Path, change: Change) -> str:
    """What `load` says."""
    content = json.loads((demo / "manifest.json").read_text())
    change(content)
    with pytest.raises(UserError) as caught:
        load(edited(demo, directory, json.dumps(content)), 1)
    return str(caught.value)


def shrink_caches(content: dict[str, Any]) -> None:
    """Slots and buffers say the same, and not what the code was compiled for."""
    contiguous(content)
    for name, spec in content["buffers"].items():
        if spec["kind"] == "cache":
            size(name, 1, *spec["shape"][1:])(content)
    for program in ("flash_attn_panels", "rms_gemv_attn_panels"):
        for cache in ("k_cache", "v_cache"):
            slot(program, cache, shape=[1, 2, 128, 64])(content)


def longer_context(content: dict[str, Any]) -> None:
    """In all that the manifest says; the table is another of the same bytes."""
    contiguous(content)
    content["model"]["max_seq"] = 4096
    for program in ("rms_gemms_rope", "rms_gemv_attn_panels"):
        for table in ("lut_q", "lut_k"):
            slot(program, table, shape=["max_seq", 32])(content)


def other_host_library(content: dict[str, Any]) -> None:
    """One whose programs are the device's: it is not that of the host."""
    for program in content["programs"].values():
        program["host"] = program["file"] == "elf/o_ffn.so"


AGAINST_CODE: dict[str, tuple[Change, str]] = {
    "no model": (put({}, "plans"), "manifest.json has programs and no model"),
    "another library as the host's": (other_host_library, "o_ffn.so is not the library of the host's programs"),
    "smaller caches": (shrink_caches, "program flash_attn_panels was not compiled for the slots in manifest.json"),
    "longer context": (longer_context, "was compiled for a context of 2048, manifest.json says 4096"),
    "another program's entry": (
        put("o_gemv_ffn", "programs", "rms_gemms_rope", "entry"),
        "rms_gemms_rope.so has no program o_gemv_ffn",
    ),
    "no program's entry": (put("team_create", "programs", "final_norm", "entry"), "host.so has no program team_create"),
    "a member of Python's": (put("_handle", "programs", "final_norm", "entry"), "host.so has no program _handle"),
    "output as an input": (slot("final_norm", "normed", role="input"), "program final_norm was not compiled for the"),
}


@pytest.mark.parametrize("name", AGAINST_CODE)
def test_native_code_says_what_it_takes(name: str, demo: Path, tmp_path: Path) -> None:
    change, fragment = AGAINST_CODE[name]
    assert fragment in refused(demo, tmp_path / "cpu", change)


TEXTS = {
    "nested too deeply": ("[" * 100_000, "it is nested too deeply"),
    "not a number": ('{"format": NaN}', "is not a manifest"),
    "thousands of digits": ('{"format": ' + "9" * 5000 + "}", "cannot be read"),
    "not UTF-8": ('{"format": "\udcff"}', "cannot be read"),
    "older": (json.dumps({"format": FORMAT - 1}), f"has format {FORMAT - 1}, this runtime reads format {FORMAT}: run"),
    "version is true": ('{"format": true}', "is not a manifest"),
    "too large": (" " * ((64 << 20) + 1), "a manifest has at most"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_no_manifest(name: str, tmp_path: Path) -> None:
    text, fragment = TEXTS[name]
    (tmp_path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        Manifest.open(tmp_path)
    assert fragment in str(caught.value)


@pytest.mark.parametrize("name", ["weights/head.safetensors", "tokenizer", "elf/host.so"])
def test_a_link_out_of_the_directory(name: str, demo: Path, tmp_path: Path) -> None:
    directory = edited(demo, tmp_path / "cpu", (demo / "manifest.json").read_text())
    moved = (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(moved)
    with pytest.raises(UserError, match="is a link out of the directory"):
        Manifest.open(directory)


def test_a_link_within_the_directory(demo: Path, tmp_path: Path) -> None:
    directory = edited(demo, tmp_path / "cpu", (demo / "manifest.json").read_text())
    (directory / "elf/host.so").rename(directory / "host.so")
    (directory / "elf/host.so").symlink_to("../host.so")
    (tmp_path / "link").symlink_to(directory)
    assert Manifest.open(tmp_path / "link")


DEEP = "it is nested too deeply" if sys.version_info < (3, 13) else "Expecting value"
"""What Python says of a header of JSON lists that are nested 4,088 deep."""

BLOBS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "header is long": (lambda b: (1 << 40).to_bytes(8, "little") + b[8:], "is not a safetensors file"),
    "header is empty": (lambda b: bytes(8) + b[8:], "is not a safetensors file"),
    "header is a list": (lambda b: b[:8] + b"[" * 4088 + b[4096:], DEEP),
    "other dtype": (lambda b: b.replace(b'"BF16"', b'"F16" ', 1), f"has {NORM} not as the manifest says"),
    "other shape": (lambda b: b.replace(b"[256]", b"[255]", 1), f"has {NORM} not as the manifest says"),
    "other place": (lambda b: b.replace(b"[0,512]", b"[2,512]", 1), f"has {NORM} not as the manifest says"),
    "other name": (lambda b: b.replace(b"model.norm", b"model.morn", 1), f"has {NORM} not as the manifest says"),
}


@pytest.mark.parametrize("name", BLOBS)
def test_a_blob_that_says_something_else(name: str, demo: Path, tmp_path: Path) -> None:
    directory = edited(demo, tmp_path / "cpu", (demo / "manifest.json").read_text())
    change, fragment = BLOBS[name]
    blob = directory / "weights/head.safetensors"
    content = change(blob.read_bytes())
    assert len(content) == blob.stat().st_size
    blob.unlink()
    blob.write_bytes(content)
    with pytest.raises(UserError, match=rf"head.safetensors .*{fragment}"):
        Manifest.open(directory)
