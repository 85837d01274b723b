"""Checks a manifest as a whole, against itself and against its files, before anything in it is used.

A manifest that passes refers only to what is there, names files inside its directory, and binds each argument (slot) of
a program to a buffer that is large enough for every call that the runtime makes. The slots that native code declares
are compared with the manifest where it is loaded (`memory.load_programs`). Errors are ValueErrors whose message follows
a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from llama_npu2.artifact.dtypes import SAFETENSORS, SIZES, nbytes
from llama_npu2.artifact.plan import (
    BLOCK_POSITIONS,
    DECODE,
    FROM_POSITION,
    MOST_SEQUENCES,
    PHASE_TEXT,
    PREFILL,
    PREFILL_CHUNK,
    SEQUENCES,
    WINDOW,
    BufferRef,
    PlannedCall,
    Plans,
    Spec,
    View,
    furthest,
    parse_plans,
    sizes,
    slot_bytes,
)
from llama_npu2.artifact.regular import can_be_a_path
from llama_npu2.artifact.storage import File
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

ALIGNMENT = 64
"""Bytes to a multiple of which buffers begin: kernels load whole cache lines of weights."""

_MOST_BYTES = 1 << 46
"""The largest buffer. A process can address twice as much."""
_LONGEST_HEADER = 100_000_000
"""The most bytes that the safetensors format allows for a file's header."""

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
"""Kinds of buffers that lie in a file, and the roles of slots that take them."""
_WRITTEN = ("output", "scratch")
_READ_AT_ANY_TIME = ("tokens", "logits")
"""Activations that the runtime itself writes or reads."""


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
    {
        **dict.fromkeys(("kv", "activations"), _WORDS),
        **dict.fromkeys(("longest", "attention_layers", "experts", "experts_of_a_row"), _COUNT),
        "adapters": list_of(record({"name": _WORDS})),
        "windows": list_of(_COUNT),
    },
)
_TARGET = record(
    dict.fromkeys(("device", "name", "system", "machine"), _WORDS),
    dict.fromkeys(("features", "instruction_sets"), list_of(_WORDS)),
)
_BUFFER = {"dtype": _DTYPE, "shape": list_of(_SIZE, 1, 8)}
_WORKING = record(
    {"kind": one_of("activation", "cache"), **_BUFFER},
    {
        "at": whole(0, _MOST_BYTES),
        "row_positions": whole(1, BLOCK_POSITIONS),
        "sequences": whole(2, MOST_SEQUENCES),
    },
)
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
_CALL = record({"program": _NAME, "buffers": list_of(string, 1, 1000)}, {"layer": whole(0, 1 << 31)})


def _buffer(value: Any) -> None:
    (_STORED if isinstance(value, dict) and value.get("kind") in _CONSTANT else _WORKING)(value)


_SECTIONS = record(
    {
        "model": record({}),
        "target": _TARGET,
        "buffers": mapping(_NAME, _buffer),
        "programs": mapping(_NAME, _PROGRAM),
        "plans": mapping(PHASE_TEXT, list_of(_CALL, 1)),
        "milliseconds": mapping(PHASE_TEXT, positive),
        "files": mapping(
            file_inside, record({"size": whole(0, _MOST_BYTES), "sha256": text("[0-9a-f]{64}", "a SHA-256")})
        ),
    },
    {"copied_milliseconds": mapping(PHASE_TEXT, positive)},
)


def check_manifest(content: Spec) -> Plans:
    """Check types, ranges and references of a manifest's sections; return its plans, parsed.

    A manifest without plans describes programs, and no model. Raises ValueError.
    """
    _SECTIONS(content)
    _check_programs(content)
    _check_buffers(content)
    plans = parse_plans(content["plans"])
    if plans:
        inside("model", _MODEL, content["model"])
        _check_model(content)
        _check_phases(content, plans)
        _check_caches(content)
        _check_calls(content, plans)
    return plans


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


def _check_model(content: Spec) -> None:
    """Check the model's sizes, its buffers of tokens and logits, and that the host has programs."""
    model, buffers = content["model"], content["buffers"]
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


def _check_phases(content: Spec, plans: Plans) -> None:
    """Check that a prompt and a token have phases, whose sizes fit the buffers and the context."""
    model, phases, rows = content["model"], plans.keys(), content["buffers"]["tokens"]["shape"][0]
    buckets, contexts = (sizes(phases, phase.kind) for phase in (PREFILL, DECODE))
    if not (contexts or DECODE in phases) or not (buckets or {PREFILL, PREFILL_CHUNK} <= phases):
        raise ValueError("plans lacks the phases of a prompt or of a token")
    if contexts and contexts[-1] < model["max_seq"]:
        raise ValueError(f"plans.{DECODE._replace(context=contexts[-1])} is for fewer positions than model.max_seq")
    if buckets and buckets[-1] > rows:
        bucket = PREFILL._replace(rows=buckets[-1])
        raise ValueError(f"plans.{bucket} has more rows than buffers.tokens, which has {rows}")
    for phase in phases:
        if furthest(phase, rows, model["max_seq"])[0][1] < 0:
            raise ValueError(f"plans.{phase} is for fewer positions than rows")
    for section in ("milliseconds", "copied_milliseconds") if buckets else ():
        if section in content and (odd := sorted(content["plans"].keys() ^ content[section].keys())):
            raise ValueError(f"{odd[0]} is not in both plans and {section}")


def _check_calls(content: Spec, plans: Plans) -> None:
    """Check that each slot of each call gets a buffer of its dtype and kind, which holds what the slot may touch."""
    programs, buffers = content["programs"], content["buffers"]
    rows, positions = buffers["tokens"]["shape"][0], content["model"]["max_seq"]
    bound: dict[BufferRef, _Bound] = {}
    sound: set[tuple[Any, ...]] = set()
    for phase, calls in plans.items():
        reach, sequences = furthest(phase, rows, positions), phase.rows if phase.kind == SEQUENCES else 1
        for index, call in enumerate(calls):
            try:
                program = _named(programs, call.program, "programs")
                _check_layer(call, content["model"])
                references = [bound.get(reference) or _bound(bound, buffers, reference) for reference in call.buffers]
                if any(each.view.sequence >= sequences for each in references):
                    raise ValueError(f"sees another sequence than its {sequences}")
                _check_aliases(program["slots"], call, buffers)
                # Most layers are alike.
                if (kind := (phase, call.program, *references)) not in sound:
                    _check_slots(program["slots"], references, reach)
                    sound.add(kind)
            except ValueError as error:
                raise ValueError(f"plans.{phase}[{index}] {error}") from None


def _check_caches(content: Spec) -> None:
    """Check that caches in blocks hold the context, in rows that divide a block, and others equal rows."""
    context = content["model"]["max_seq"]
    for name, spec in content["buffers"].items():
        positions = spec.get("row_positions", 0)
        if positions and (
            spec["kind"] != "cache" or BLOCK_POSITIONS % positions or positions * spec["shape"][0] < context
        ):
            raise ValueError(f"buffers.{name} is no cache of {context} positions in blocks of {BLOCK_POSITIONS}")
        count = spec.get("sequences", 1)
        if count > 1 and (spec["kind"] != "cache" or positions or spec["shape"][0] % count):
            raise ValueError(f"buffers.{name} is no cache of {count} sequences")


class _Bound(NamedTuple):
    """The properties of a buffer that decide whether it may be bound to a slot."""

    kind: str
    dtype: str
    nbytes: int
    row_bytes: int
    view: View
    blocks: Sequence[int]
    """The shape of a cache in blocks; nothing for others."""
    sequences: int
    """How many sequences it has rows for."""
    sequence_bytes: int
    """The bytes that each has in it: all of them where they share its rows."""


def _bound(seen: dict[BufferRef, _Bound], buffers: Spec, reference: BufferRef) -> _Bound:
    spec = _named(buffers, reference.name, "buffers")
    size = _bytes(spec)
    blocks = tuple(spec["shape"]) if "row_positions" in spec else ()
    row, count, view = size // spec["shape"][0], spec.get("sequences", 1), reference.view
    seen[reference] = _Bound(spec["kind"], spec["dtype"], size, row, view, blocks, count, size // count)
    return seen[reference]


def _named(section: Spec, name: str, which: str) -> Any:
    if name not in section:
        raise ValueError(f"calls for {name}, which is not among the {which}")
    return section[name]


def _check_layer(call: PlannedCall, model: Spec) -> None:
    if call.layer is not None and call.layer >= model["layers"]:
        raise ValueError(f"is of layer {call.layer}, the model has {model['layers']}")


def _check_aliases(slots: Sequence[Spec], call: PlannedCall, buffers: Spec) -> None:
    """Check that a buffer that a call writes is bound once, except for the row of a cache that it then reads."""
    if len(slots) != len(call.buffers):
        raise ValueError(f"binds {len(call.buffers)} buffers to {len(slots)} slots")
    places = [(name, view.sequence) for name, view in call.buffers]
    if len({*places}) < len(places):
        for slot, (name, view), place in zip(slots, call.buffers, places, strict=True):
            row = view.kind == FROM_POSITION.kind and places.count(place) == 2 and buffers[name]["kind"] == "cache"
            if slot["role"] in _WRITTEN and places.count(place) > 1 and not row:
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
        if buffer.view.kind == WINDOW and not all(type(size) is int for size in slot["shape"]):
            raise ValueError(f"binds the view of a window to slot {name}, whose shape is not fixed")
        if buffer.blocks and (buffer.view or tuple(slot["shape"]) != buffer.blocks):
            raise ValueError(f"binds a cache of other blocks, or a view of one, to slot {name}")
        view, is_shared = buffer.view, buffer.kind == "table"
        each = 0 if is_shared else buffer.sequence_bytes // buffer.row_bytes
        if view.sequence and (view.rows != each or not (is_shared or view.sequence < buffer.sequences)):
            raise ValueError(f"binds another sequence's rows to slot {name}")
        for seq, pos in reach:
            end = view._replace(sequence=0).row(seq, pos) * buffer.row_bytes + slot_bytes(slot, seq, pos)
            if end > buffer.sequence_bytes:
                there = buffer.sequence_bytes
                raise ValueError(f"binds {there} bytes to slot {name}, which needs {end} for {seq} rows from {pos} on")


def _bytes(spec: Spec) -> int:
    return nbytes(spec["dtype"], spec["shape"])


def check_blob(file: File, buffers: Spec) -> None:
    """Compare the header of a safetensors file with the `buffers` that it holds. Raises ValueError, OSError."""
    header, start = _header(file)
    for name, spec in buffers.items():
        begin = spec["offset"] - start
        expected = {
            "dtype": SAFETENSORS[spec["dtype"]],
            "shape": spec["shape"],
            "data_offsets": [begin, begin + _bytes(spec)],
        }
        if header.get(name) != expected:
            raise ValueError(f"has {name} not as the manifest says")


def _header(file: File) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file and the offset of its data."""
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
