"""Holds a manifest against itself and against its files, as a whole, before anything in it is used.

What passes refers to nothing that is not there, names files inside its directory, and binds each slot to a buffer that
is large enough for every call that the runtime makes. What native code says of its own slots is held against the
manifest where it is loaded (`memory.load_programs`). Errors are ValueError, in words that go behind a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from llama_npu2.dtypes import SAFETENSORS, SIZES, nbytes
from llama_npu2.regular import can_be_a_path
from llama_npu2.schema import (
    Invalid,
    either,
    flag,
    inside,
    list_of,
    load_json,
    mapping,
    one_of,
    positive,
    record,
    string,
    text,
    whole,
)
from llama_npu2.storage import File

Spec = Mapping[str, Any]

ALIGNMENT = 64
"""Bytes: kernels load whole lines of weights."""

_MOST_BYTES = 1 << 46
"""Of a buffer. What a process can address is twice that."""
_LONGEST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, by its format."""

_SIZE = whole(1, _MOST_BYTES)
_COUNT = whole(1, 1 << 31)
_NAME = text(r"[\w.+-]{1,1000}", "a name of letters, digits and . + - _")
_A_FILE = "the name of a file inside the directory"
_FILE_TEXT = text(
    r"(?!.*(^|/)\.{1,2}(/|$))[^/\\\x00-\x1f\x7f\ud800-\udfff]+(/[^/\\\x00-\x1f\x7f\ud800-\udfff]+)*", _A_FILE
)
_SYMBOL = text(r"[A-Za-z_]\w{0,1000}", "the name of a C function")
_WORDS = text(r"[^\x00-\x1f\x7f\ud800-\udfff]{0,100000}", "a line of text")
_DTYPE = one_of(*SIZES)

_CONSTANT = ("weight", "table")
"""Kinds of buffers that are part of a file, and roles of the slots that take them."""
_WRITTEN = ("output", "scratch")
_READ_AT_ANY_TIME = ("tokens", "logits")
"""Activations that the runtime itself writes and reads."""


def file_inside(value: Any) -> None:
    """A relative path that does not leave the directory, and that file systems take."""
    _FILE_TEXT(value)
    if not can_be_a_path(value):
        raise Invalid(value, _A_FILE)


_MODEL = record(
    {
        **dict.fromkeys(("name", "weights"), _WORDS),
        **dict.fromkeys(("vocab", "emb", "ffn", "layers", "heads", "kv_heads", "head_dim", "max_seq"), _COUNT),
        "eps": positive,
        "eos": list_of(whole(0, 1 << 31)),
    },
    {"kv": _WORDS, "longest": _COUNT},
)
_TARGET = record(dict.fromkeys(("device", "name", "system", "machine"), _WORDS), {"features": list_of(_WORDS)})
_BUFFER = {"dtype": _DTYPE, "shape": list_of(_SIZE, 1, 8)}
_WORKING = record({"kind": one_of("activation", "cache"), **_BUFFER}, {"at": whole(0, _MOST_BYTES)})
_STORED = record(
    {
        "kind": one_of(*_CONSTANT),
        **_BUFFER,
        "file": file_inside,
        "offset": whole(0, _MOST_BYTES),
        "values": _SIZE,
        **dict.fromkeys(("format", "layout"), _WORDS),
    }
)
_SLOT = record(
    {
        "name": _NAME,
        "dtype": _DTYPE,
        "role": one_of("input", *_CONSTANT, *_WRITTEN),
        "shape": list_of(either(_SIZE, one_of("seq", "max_seq"), "a size, seq or max_seq"), 1, 8),
    }
)
_PROGRAM = record({"file": file_inside, "entry": _SYMBOL, "host": flag, "slots": list_of(_SLOT, 1, 1000)})
_NPU_PROGRAM = record({"kernel": _SYMBOL, "instruction_bytes": _SIZE, "milliseconds": positive})
_PHASE = text(
    r"decode(@[1-9]\d{0,8})?|prefill(_chunk|@[1-9]\d{0,6}(@[1-9]\d{0,8})?)?",
    "decode, decode@POSITIONS, prefill, prefill_chunk, prefill@ROWS or prefill@ROWS@POSITIONS",
)
_CALL = record({"program": _NAME, "buffers": list_of(string, 1, 1000)}, {"layer": whole(0, 1 << 31)})


def _buffer(value: Any) -> None:
    (_STORED if isinstance(value, dict) and value.get("kind") in _CONSTANT else _WORKING)(value)


_SECTIONS = record(
    {
        "model": record({}),
        "target": _TARGET,
        "buffers": mapping(_NAME, _buffer),
        "programs": mapping(_NAME, _PROGRAM),
        "plans": mapping(_PHASE, list_of(_CALL, 1)),
        "milliseconds": mapping(_PHASE, positive),
        "files": mapping(
            file_inside, record({"size": whole(0, _MOST_BYTES), "sha256": text("[0-9a-f]{64}", "a SHA-256")})
        ),
    },
    {"copied_milliseconds": mapping(_PHASE, positive)},
)


def check_manifest(content: Spec) -> None:
    """Types, ranges and references of a manifest's sections. Raises ValueError.

    One without plans describes programs, and no model.
    """
    _SECTIONS(content)
    _check_programs(content)
    _check_buffers(content)
    if content["plans"]:
        inside("model", _MODEL, content["model"])
        _check_phases(content)
        _check_calls(content)


def _check_programs(content: Spec) -> None:
    for name, spec in content["programs"].items():
        where = f"programs.{name}"
        if spec["file"] not in content["files"]:
            raise ValueError(f"{where} is in {spec['file']}, which is not among the files")
        names = [slot["name"] for slot in spec["slots"]]
        if len({*names}) < len(names):
            raise ValueError(f"{where} has two slots of one name")
        if content["target"]["device"] == "xrt" and not spec["host"]:
            inside("programs", partial(inside, name, _NPU_PROGRAM), spec)
    if len({spec["file"] for spec in content["programs"].values() if spec["host"]}) > 1:
        raise ValueError("the host's programs are in more than one file")


def _check_buffers(content: Spec) -> None:
    for name, spec in content["buffers"].items():
        size, where = _bytes(spec), f"buffers.{name}"
        if spec.get("at", 0) + size > _MOST_BYTES:
            raise ValueError(f"{where} has {size} bytes")
        if "at" in spec and (spec["kind"] == "cache" or name in _READ_AT_ANY_TIME):
            raise ValueError(f"{where} must have memory of its own")
        if spec.get("at", 0) % ALIGNMENT:
            raise ValueError(f"{where} is not at a multiple of {ALIGNMENT}")
        if "file" in spec:
            if spec["file"] not in content["files"]:
                raise ValueError(f"{where} is in {spec['file']}, which is not among the files")
            if spec["offset"] % ALIGNMENT or spec["offset"] + size > content["files"][spec["file"]]["size"]:
                raise ValueError(f"{where} lies outside {spec['file']}, or not at a multiple of {ALIGNMENT}")


def _check_phases(content: Spec) -> None:
    """What the runtime asks of any model: tokens, logits, a prompt's phases and a token's."""
    model, buffers, phases = content["model"], content["buffers"], content["plans"].keys()
    for name, dtype, least in (("tokens", "i32", 1), ("logits", "f32", model["vocab"])):
        spec = buffers.get(name)
        if not spec or spec["kind"] != "activation" or spec["dtype"] != dtype or len(spec["shape"]) != 1:
            raise ValueError(f"buffers.{name} must be an activation of {dtype} with one dimension")
        if spec["shape"][0] < least:
            raise ValueError(f"buffers.{name} has {spec['shape'][0]} values, the vocabulary has {least}")
    if any(token >= model["vocab"] for token in model["eos"]):
        raise ValueError(f"model.eos names a token outside of the vocabulary of {model['vocab']}")
    if model["heads"] % model["kv_heads"]:
        raise ValueError(f"model has {model['heads']} heads for {model['kv_heads']} of keys and values")
    if not any(spec["host"] for spec in content["programs"].values()):
        raise ValueError("programs has none for the host")
    rows = buffers["tokens"]["shape"][0]
    buckets, windows = (sizes(phases, kind) for kind in ("prefill", "decode"))
    if not (windows or "decode" in phases) or not (buckets or {"prefill", "prefill_chunk"} <= phases):
        raise ValueError("plans lacks the phases of a prompt or of a token")
    if windows and max(windows) < model["max_seq"]:
        raise ValueError(f"plans.decode@{max(windows)} is for fewer positions than model.max_seq")
    if buckets and max(buckets) > rows:
        raise ValueError(f"plans.prefill@{max(buckets)} has more rows than buffers.tokens, which has {rows}")
    for phase in phases:
        if furthest(phase, rows, model["max_seq"])[0][1] < 0:
            raise ValueError(f"plans.{phase} is for fewer positions than rows")
    for section in ("milliseconds", "copied_milliseconds") if buckets else ():
        if section in content and (odd := sorted(phases ^ content[section].keys())):
            raise ValueError(f"{odd[0]} is not in both plans and {section}")


def _check_calls(content: Spec) -> None:
    """Each slot of each call gets a buffer of its dtype and kind, which holds what the slot may touch."""
    programs, buffers = content["programs"], content["buffers"]
    rows, positions = buffers["tokens"]["shape"][0], content["model"]["max_seq"]
    bound: dict[str, _Bound] = {}
    sound: set[tuple[Any, ...]] = set()
    for phase, calls in content["plans"].items():
        reach = furthest(phase, rows, positions)
        for index, call in enumerate(calls):
            try:
                program = _known(programs, call["program"], "programs")
                _check_layer(call, content["model"])
                references = [bound.get(name) or _bound(bound, buffers, name) for name in call["buffers"]]
                _check_aliases(program["slots"], call["buffers"], buffers)
                # Most layers are alike.
                if (kind := (phase, call["program"], *references)) not in sound:
                    _check_slots(program["slots"], references, reach)
                    sound.add(kind)
            except ValueError as error:
                raise ValueError(f"plans.{phase}[{index}] {error}") from None


def sizes(phases: Iterable[str], kind: str) -> list[int]:
    """Of the phases of a kind that come in sizes (`prefill@128`), ascending; of those in several windows
    (`prefill@128@512`) once."""
    named = (phase.split("@") for phase in phases)
    return sorted({int(size[0]) for name, *size in named if name == kind and size})


def furthest(phase: str, rows: int, positions: int) -> list[tuple[int, int]]:
    """Rows and first position of the calls of a phase that reach furthest. What a call touches grows with both, and
    linearly, so that no call between them reaches further."""
    kind, *size = phase.split("@")
    if kind == "decode":
        return [(1, min(positions, int(size[0]) if size else positions) - 1)]
    if size:
        return [(int(size[0]), int(size[-1]) - int(size[0]))]
    most = min(rows, positions)
    return [(most, positions - most), (1, positions - 1)]


class _Bound(NamedTuple):
    """What of a buffer decides whether it may be bound to a slot."""

    kind: str
    dtype: str
    nbytes: int
    row_bytes: int
    view: str


def _bound(seen: dict[str, _Bound], buffers: Spec, reference: str) -> _Bound:
    name, at, view = reference.partition("@")
    if at and view not in ("pos", "last"):
        raise ValueError(f"binds {reference}: a view is @pos or @last")
    spec = _known(buffers, name, "buffers")
    size = _bytes(spec)
    seen[reference] = _Bound(spec["kind"], spec["dtype"], size, size // spec["shape"][0], view)
    return seen[reference]


def _known(section: Spec, name: str, which: str) -> Any:
    if name not in section:
        raise ValueError(f"calls for {name}, which is not among the {which}")
    return section[name]


def _check_layer(call: Spec, model: Spec) -> None:
    if call.get("layer", 0) >= model["layers"]:
        raise ValueError(f"is of layer {call['layer']}, the model has {model['layers']}")


def _check_aliases(slots: Sequence[Spec], references: Sequence[str], buffers: Spec) -> None:
    """What a call writes is nothing else to it, but for the row of a cache that it reads afterwards."""
    if len(slots) != len(references):
        raise ValueError(f"binds {len(references)} buffers to {len(slots)} slots")
    names = [reference.partition("@")[0] for reference in references]
    if len({*names}) < len(names):
        for slot, reference in zip(slots, references, strict=True):
            name, _, view = reference.partition("@")
            row = view == "pos" and names.count(name) == 2 and buffers[name]["kind"] == "cache"
            if slot["role"] in _WRITTEN and names.count(name) > 1 and not row:
                raise ValueError(f"binds {name}, which it writes, to two slots")


def _check_slots(slots: Sequence[Spec], bound: Sequence[_Bound], reach: Sequence[tuple[int, int]]) -> None:
    for slot, buffer in zip(slots, bound, strict=True):
        name, role = slot["name"], slot["role"]
        if slot["dtype"] != buffer.dtype:
            raise ValueError(f"binds {buffer.dtype} to slot {name} of {slot['dtype']}")
        if (role in _CONSTANT or buffer.kind in _CONSTANT) and role != buffer.kind:
            raise ValueError(f"binds a buffer of kind {buffer.kind} to slot {name} of role {role}")
        if role == "weight" and buffer.view:
            raise ValueError(f"binds a view to slot {name} of role {role}")
        for seq, pos in reach:
            end = view_offset(buffer.view, buffer.row_bytes, seq, pos) + slot_bytes(slot, seq, pos)
            if end > buffer.nbytes:
                raise ValueError(
                    f"binds {buffer.nbytes} bytes to slot {name}, which needs {end} for {seq} rows from {pos} on"
                )


def view_offset(view: str, row_bytes: int, seq: int, pos: int) -> int:
    """Where a view of a buffer begins, in bytes, in a call of `seq` rows from position `pos` on: "" whole, "pos" from
    the row of the first position on, "last" the last row."""
    return {"": 0, "pos": pos, "last": seq - 1}[view] * row_bytes


def slot_bytes(slot: Spec, seq: int, pos: int) -> int:
    """What a call of `seq` rows from position `pos` on may touch of a slot: `seq` are its rows, `max_seq` all positions
    up to its last."""
    known = {"seq": seq, "max_seq": pos + seq}
    return nbytes(slot["dtype"], (known.get(size, size) for size in slot["shape"]))


def _bytes(spec: Spec) -> int:
    return nbytes(spec["dtype"], spec["shape"])


def check_blob(file: File, buffers: Spec) -> None:
    """Hold those `buffers` that a safetensors file has against its header. Raises ValueError, OSError."""
    header, start = _header(file)
    for name, spec in buffers.items():
        found, begin = header.get(name), spec["offset"] - start
        wanted = {
            "dtype": SAFETENSORS[spec["dtype"]],
            "shape": spec["shape"],
            "data_offsets": [begin, begin + _bytes(spec)],
        }
        if found != wanted:
            raise ValueError(f"has {name} not as the manifest says")


def _header(file: File) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begin."""
    content = next(file.chunks(1 << 14), b"")
    start = 8 + int.from_bytes(content[:8], "little")
    if not 8 < start <= min(_LONGEST_HEADER, file.size):
        raise ValueError("is not a safetensors file")
    if start > len(content):
        content = next(file.chunks(start))
    header = load_json(content[8:start])
    if not isinstance(header, dict):
        raise ValueError("is not a safetensors file")
    return header, start
