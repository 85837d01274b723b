"""Write a profile as a Perfetto trace (https://perfetto.dev/docs/reference/trace-packet-proto), for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

_SEQUENCE = 1
"""The only writer of packets."""
_PROCESS, _SERIES, _THREADS = 1, 2, 3
"""Numbers of tracks; those of threads begin with the last one."""


def trace(profile: Mapping[str, Any]) -> bytes:
    """Return a profile (`llama_npu2.cli.profile.profile`) as a Perfetto trace.

    It has the slices of each thread's timeline, those of the first thread inside their prompt or token, and a counter
    with the milliseconds of each token. Times are nanoseconds from the beginning of the prompt.
    """
    # Half a second to import, with protobuf.
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder, timeline = TraceProtoBuilder(), profile["timeline"]
    threads = sorted({span[1] for span in timeline["spans"]})
    _describe_tracks(builder, profile["machine"], threads)
    _intern(builder, timeline)
    for thread in threads:
        for packet in _slices(timeline, thread):
            _add(builder, _THREADS + thread, **packet)
    for number, (start, end) in enumerate(pairwise(timeline["edges"])):
        if number:
            _add(builder, _SERIES, start, "COUNTER", double_counter_value=(end - start) / 1e6)
    return bytes(builder.serialize())


def _describe_tracks(builder: Any, machine: Mapping[str, str], threads: Iterable[int]) -> None:
    process = builder.add_packet().track_descriptor
    process.uuid, process.name = _PROCESS, f"{machine['model']}; {machine['device']}; {machine['cpu']}"
    for thread in threads:
        track = builder.add_packet().track_descriptor
        track.uuid, track.parent_uuid = _THREADS + thread, _PROCESS
        track.name = f"thread {thread} of the team" if thread else "thread 0: Python, and of the team"
    counter = builder.add_packet().track_descriptor
    counter.uuid, counter.parent_uuid, counter.name = _SERIES, _PROCESS, "token"
    counter.counter.unit_name = "ms"


def _kinds(timeline: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of each category."""
    return {kind: number for number, kind in enumerate(dict.fromkeys(name[0] for name in timeline["names"]), 1)}


def _windows(timeline: Mapping[str, Any]) -> list[str]:
    """Return the names of the intervals between edges."""
    return ["prompt", *(f"token {number}" for number in range(1, len(timeline["edges"]) - 1))]


def _intern(builder: Any, timeline: Mapping[str, Any]) -> None:
    """Add the names of slices, each once: those of spans from 1 on, then those of windows."""
    packet = builder.add_packet()
    packet.trusted_packet_sequence_id = _SEQUENCE
    packet.sequence_flags = packet.SEQ_INCREMENTAL_STATE_CLEARED
    for number, (_, name, _, _) in enumerate(timeline["names"], 1):
        packet.interned_data.event_names.add(iid=number, name=name)
    for number, name in enumerate(_windows(timeline), len(timeline["names"]) + 1):
        packet.interned_data.event_names.add(iid=number, name=name)
    for kind, number in _kinds(timeline).items():
        packet.interned_data.event_categories.add(iid=number, name=kind)


def _slices(timeline: Mapping[str, Any], thread: int) -> Iterator[dict[str, Any]]:
    """Yield beginnings and ends on a track, in order; an inner slice begins after its outer one and ends before it."""
    names, kinds = timeline["names"], _kinds(timeline)
    mine = (span for span in timeline["spans"] if span[1] == thread)
    spans = [(start, start + length, name, waited) for name, _, start, length, waited in mine]
    if not thread:
        spans += [(*edges, number, 0) for number, edges in enumerate(pairwise(timeline["edges"]), len(names))]
    open_ends: list[int] = []
    for start, end, name, waited in sorted(spans, key=lambda span: (span[0], -span[1], -span[2])):
        while open_ends and open_ends[-1] <= start:
            yield {"timestamp": open_ends.pop(), "event": "SLICE_END"}
        about: dict[str, int] = {"waited": waited} if waited else {}
        categories: list[int] = []
        if name < len(names):
            kind, _, layer, _ = names[name]
            about |= {} if layer is None else {"layer": layer}
            categories = [kinds[kind]]
        more = {"name_iid": name + 1, "category_iids": categories, "about": about}
        yield {"timestamp": start, "event": "SLICE_BEGIN", **more}
        open_ends.append(end)
    yield from ({"timestamp": end, "event": "SLICE_END"} for end in reversed(open_ends))


def _add(
    builder: Any,
    track: int,
    timestamp: int,
    event: str,
    about: Mapping[str, int] | None = None,
    category_iids: Sequence[int] = (),
    **fields: Any,
) -> None:
    packet = builder.add_packet()
    packet.timestamp, packet.trusted_packet_sequence_id = timestamp, _SEQUENCE
    packet.sequence_flags = packet.SEQ_NEEDS_INCREMENTAL_STATE
    track_event = packet.track_event
    track_event.track_uuid, track_event.type = track, track_event.Type.Value(f"TYPE_{event}")
    track_event.category_iids.extend(category_iids)
    for name, value in fields.items():
        setattr(track_event, name, value)
    for name, number in (about or {}).items():
        track_event.debug_annotations.add(name=name, int_value=number)
