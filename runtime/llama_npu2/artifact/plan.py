"""The meaning of a plan: its phases, its calls, and which bytes of a buffer a call may touch.

In JSON a phase and a reference to a buffer are texts; they are parsed and printed here alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from llama_npu2.artifact.dtypes import nbytes
from llama_npu2.schema import text

Spec = Mapping[str, Any]

BLOCK_POSITIONS = 128
"""Positions of a block of a KV cache, which a table of blocks says the place of."""

MOST_SEQUENCES = 64
"""Sequences that a cache without blocks has rows for at most."""

WINDOW = "window"
"""The kind of views that begin where a window does."""

_VIEW_TEXT = re.compile(
    rf"(pos|last|{WINDOW}:[1-9][0-9]{{0,8}}:[1-9][0-9]{{0,8}}|)(?:\+([1-9][0-9]?)x(0|[1-9][0-9]{{0,8}}))?"
)

Positions = int | Sequence[int]
"""The position of a call's first row. Where its rows are tokens of several sequences, that of each."""


def first_of(positions: Positions) -> int:
    """Return the position of the first row."""
    return positions if isinstance(positions, int) else positions[0]


class View(NamedTuple):
    """The rows of a buffer that a call sees: all, or those from one on that follows from its position and its rows.

    As text nothing, `pos`, `last` or `window:SEES:TILE`, and for a sequence but the first `+SEQUENCExROWS` after it.
    """

    kind: str = ""
    """Nothing for all rows; `pos`: from that of the call's first position on; `last`: the call's last row; `WINDOW`:
    from the tile on that has the first position that the call's first row attends to."""
    sees: int = 0
    """`WINDOW`: how many positions a row attends to, its own included."""
    tile: int = 0
    """`WINDOW`: rows of a tile. The first begins at the buffer's first row."""
    sequence: int = 0
    """The number of the sequence whose position counts, from 0, where a call's rows are tokens of several."""
    rows: int = 0
    """The rows of each sequence in the buffer, which begin where those of the one before it end; 0 where they share
    them."""

    @staticmethod
    def parse(view: str) -> View:
        """Return the view that a text stands for. Raises ValueError."""
        matched = _VIEW_TEXT.fullmatch(view)
        if not matched or not view:
            raise ValueError(f"a view is @pos, @last or @{WINDOW}:SEES:TILE, with +SEQUENCExROWS after it or alone")
        kind, *sizes = matched[1].split(":")
        seen = View(kind, *map(int, sizes))
        return seen._replace(sequence=int(matched[2]), rows=int(matched[3])) if matched[2] else seen

    def __str__(self) -> str:
        seen = ":".join([self.kind, *(str(size) for size in (self.sees, self.tile) if size)])
        return f"{seen}+{self.sequence}x{self.rows}" if self.sequence else seen

    def __bool__(self) -> bool:
        return bool(self.kind or self.sequence)

    def row(self, seq: int, pos: Positions) -> int:
        """Return the first row that a call of `seq` rows from position `pos` on sees."""
        kind, first, at = self.kind, self.sequence * self.rows, pos if isinstance(pos, int) else pos[self.sequence]
        if kind == "pos":
            return first + at
        if kind == WINDOW:
            return first + max(at + 1 - self.sees, 0) // self.tile * self.tile
        return seq - 1 if kind == "last" else first


WHOLE, FROM_POSITION, LAST_ROW = View(), View("pos"), View("last")

PHASE_TEXT = text(
    r"decode(@[1-9][0-9]{0,8})?|prefill(_chunk|@[1-9][0-9]{0,6}(@[1-9][0-9]{0,8})?)?|logits@[1-9][0-9]{0,6}"
    r"|(tokens|sequences)@[1-9][0-9]{0,6}@[1-9][0-9]{0,8}",
    "decode, decode@POSITIONS, prefill, prefill_chunk, prefill@ROWS, prefill@ROWS@POSITIONS, logits@ROWS, "
    "tokens@ROWS@POSITIONS or sequences@ROWS@POSITIONS",
)
"""Checks that a JSON value is the text of a phase."""


class Phase(NamedTuple):
    """Prefill, decode or logits in one size; phases of one kind are ordered by size.

    As text `prefill`, `prefill_chunk`, `prefill@ROWS`, `prefill@ROWS@CONTEXT`, `decode`, `decode@CONTEXT`,
    `logits@ROWS`, `tokens@ROWS@CONTEXT` or `sequences@ROWS@CONTEXT`.
    """

    kind: str
    """`prefill`, `prefill_chunk` (a prefill without logits), `decode`, `logits` (of several rows at once, which a
    prefill has processed), `tokens` (several tokens of a text, each with the bits that `decode` gives it), or
    `sequences` (a token of each of several sequences, with these bits, too)."""
    rows: int = 0
    """The bucket of a prefill: the rows that its programs are compiled for. 0: any number of rows. Of `logits` the most
    rows."""
    context: int = 0
    """The context bucket: the positions of the KV cache that its programs read. 0 in a prefill with a bucket: its own
    rows, which begin at position 0."""

    @staticmethod
    def parse(phase: str) -> Phase:
        """Return the phase that a text names. Raises ValueError."""
        PHASE_TEXT(phase)
        kind, *texts = phase.split("@")
        sizes = map(int, texts)
        return Phase(kind, 0, *sizes) if kind == DECODE.kind else Phase(kind, *sizes)

    def __str__(self) -> str:
        return "@".join([self.kind, *(str(size) for size in (self.rows, self.context) if size)])

    @property
    def positions(self) -> int:
        """Positions up to which its calls reach at most, where programs are compiled for that; else 0."""
        return self.context or self.rows


PREFILL, PREFILL_CHUNK, DECODE = Phase("prefill"), Phase("prefill_chunk"), Phase("decode")
"""The phases of programs that take any number of rows and positions."""

TOKENS = "tokens"
"""The kind of the phases that process several tokens of a text, and compute the logits after each."""

SEQUENCES = "sequences"
"""The kind of the phases that process a token of each of several sequences, and compute the logits after each."""

LOGITS = Phase("logits")
"""The kind of the phase that computes logits of several rows: the first ones of what the last layer has written."""


class BufferRef(NamedTuple):
    """A buffer as a call sees it. As text `NAME` or `NAME@VIEW`."""

    name: str
    view: View = WHOLE

    @staticmethod
    def parse(reference: str) -> BufferRef:
        """Return the reference that a text stands for. Raises ValueError."""
        name, at, view = reference.partition("@")
        try:
            return BufferRef(name, View.parse(view) if at else WHOLE)
        except ValueError as error:
            raise ValueError(f"{reference}: {error}") from None

    def __str__(self) -> str:
        return f"{self.name}@{self.view}" if self.view else self.name


class PlannedCall(NamedTuple):
    """One program and the buffers that are bound to its arguments (slots), in their order."""

    program: str
    buffers: tuple[BufferRef, ...]
    layer: int | None = None
    """From 0; None outside of the layers."""

    @property
    def names(self) -> list[str]:
        """Names of the buffers, in the order of the slots."""
        return [reference.name for reference in self.buffers]


Plans = Mapping[Phase, Sequence[PlannedCall]]
"""The calls of each phase, in order."""


def parse_plans(content: Mapping[str, Sequence[Spec]]) -> dict[Phase, list[PlannedCall]]:
    """Return the plans of a manifest's JSON, whose types have been checked. Raises ValueError."""
    references: dict[str, BufferRef] = {}

    def parsed(reference: str) -> BufferRef:
        return references.get(reference) or references.setdefault(reference, BufferRef.parse(reference))

    plans: dict[Phase, list[PlannedCall]] = {}
    for name, calls in content.items():
        plan = plans[Phase.parse(name)] = []
        for index, call in enumerate(calls):
            try:
                plan.append(PlannedCall(call["program"], tuple(map(parsed, call["buffers"])), call.get("layer")))
            except ValueError as error:
                raise ValueError(f"plans.{name}[{index}] binds {error}") from None
    return plans


def plans_json(plans: Plans) -> dict[str, list[dict[str, Any]]]:
    """Return plans as JSON has them."""

    def encoded(call: PlannedCall) -> dict[str, Any]:
        layer = {} if call.layer is None else {"layer": call.layer}
        return {"program": call.program, "buffers": [str(reference) for reference in call.buffers], **layer}

    return {str(phase): [encoded(call) for call in calls] for phase, calls in plans.items()}


def sizes(phases: Iterable[Phase], kind: str) -> list[int]:
    """Return the buckets of a kind of phases, ascending: rows of prefill, positions of decode."""
    return sorted({phase.rows or phase.context for phase in phases if phase.kind == kind} - {0})


def furthest(phase: Phase, rows: int, positions: int) -> list[tuple[int, int]]:
    """Return rows and first position of those calls of a phase that reach furthest.

    No call between them reaches further: the bytes that a call touches grow linearly with both, or, in the view of a
    window, with the position alone.

    Args:
        rows: rows that the buffers have room for.
        positions: positions that the KV cache has room for.
    """
    if phase.kind == DECODE.kind:
        return [(1, min(positions, phase.context or positions) - 1)]
    if phase.kind == SEQUENCES:
        return [(phase.rows, phase.context - 1)]
    if phase.rows:
        return [(phase.rows, phase.positions - phase.rows)]
    most = min(rows, positions)
    return [(most, positions - most), (1, positions - 1)]


def slot_bytes(slot: Spec, seq: int, pos: int) -> int:
    """Return the bytes of an argument (slot) that a call of `seq` rows from position `pos` on may touch.

    In its shape `seq` stands for the rows, `max_seq` for all positions up to the last row's.
    """
    extents = {"seq": seq, "max_seq": pos + seq}
    return nbytes(slot["dtype"], (extents.get(size, size) for size in slot["shape"]))
