"""Allocates every buffer of a manifest once, loads its programs, and binds the calls of each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from llama_npu2.artifact.dtypes import DTYPES
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import BLOCK_POSITIONS, BufferRef, Phase, PlannedCall
from llama_npu2.devices import Binding, Call, Declared, Device, StoredWeight
from llama_npu2.errors import REMEDY, UserError


class CacheBlocks(NamedTuple):
    """Where the blocks of a cache lie."""

    front: int
    """Bytes in front of the first block."""
    each: int
    """Bytes of a block."""

    @staticmethod
    def of(manifest: Manifest, name: str) -> CacheBlocks:
        """Return those of a cache in blocks."""
        spec, context = manifest.buffers[name], manifest.model["max_seq"]
        row, positions = manifest.nbytes(name) // spec["shape"][0], spec["row_positions"]
        return CacheBlocks((spec["shape"][0] - -(-context // positions)) * row, BLOCK_POSITIONS // positions * row)

    def end(self, blocks: int) -> int:
        """Return the bytes of a cache of so many blocks."""
        return self.front + blocks * self.each


def cache_blocks(manifest: Manifest) -> dict[str, CacheBlocks]:
    """Return the caches of a manifest that are in blocks."""
    return {name: CacheBlocks.of(manifest, name) for name, spec in manifest.buffers.items() if "row_positions" in spec}


class CacheRows(NamedTuple):
    """Where the positions of a contiguous cache lie."""

    row: int
    """Bytes of a position."""
    extra: int
    """Rows that it has beside those of the context. A position's row may be as many rows behind its number."""
    each: int
    """Rows of each sequence: those of the next one follow."""

    @staticmethod
    def of(manifest: Manifest) -> dict[str, CacheRows]:
        """Return the caches of a manifest that are not in blocks."""
        contiguous = {
            name: (spec["shape"][0], spec.get("sequences", 1))
            for name, spec in manifest.buffers.items()
            if spec["kind"] == "cache" and "row_positions" not in spec
        }
        context = manifest.model["max_seq"]
        return {
            name: CacheRows(manifest.nbytes(name) // rows, max(rows // count - context, 0), rows // count)
            for name, (rows, count) in contiguous.items()
        }

    @property
    def block(self) -> int:
        """The bytes of a block's positions."""
        return self.range(0, BLOCK_POSITIONS)[1]

    def range(self, first: int, end: int) -> tuple[int, int]:
        """Return the first byte of some positions and the byte after the last, wherever in the extra rows they lie."""
        return first * self.row, (end + self.extra) * self.row


def blocks_within(kv_memory: int, *manifests: Manifest) -> int:
    """Return how many blocks of all caches fit in `kv_memory` bytes, the same number for each of several models.

    Raises UserError if none does.
    """
    front, block = (sum(memory_of_blocks(manifest, count) for manifest in manifests) for count in (0, 1))
    if kv_memory < block:
        beside = f"{BLOCK_POSITIONS} positions" + (f" beside {front} of the device" if front > block - front else "")
        raise UserError(f"kv_memory={kv_memory}: {beside} take {block} bytes: give more")
    return (kv_memory - front) // (block - front)


def context_within(manifest: Manifest, blocks: int) -> int:
    """Return how many positions a sequence can have with so many blocks; 0: as many as it can use."""
    longest = int(manifest.model["max_seq"])
    return min(longest, blocks * BLOCK_POSITIONS) if blocks else longest


def memory_of_blocks(manifest: Manifest, blocks: int) -> int:
    """Return the bytes that so many blocks of all caches take, beside the device's caches if those are contiguous."""
    in_blocks = sum(at.front + at.each * blocks for at in cache_blocks(manifest).values())
    contiguous = CacheRows.of(manifest)
    return in_blocks + sum(manifest.nbytes(name) + rows.block * blocks for name, rows in contiguous.items())


def memory_needed(manifest: Manifest, blocks: int = 0) -> int:
    """Return the bytes that weights, activations and caches of so many blocks take, once all of them were used.

    Caches have room for at least as many sequences that fill the context as the device takes at once.
    """
    own = (name for name, spec in manifest.buffers.items() if "at" not in spec and spec["kind"] != "cache")
    caches = memory_of_blocks(manifest, max(blocks, _least_blocks(manifest)))
    return sum(map(manifest.nbytes, own)) + caches + _shared_bytes(manifest)


def _least_blocks(manifest: Manifest) -> int:
    """Return how many blocks the sequences take that the device takes at once, if each fills the context."""
    sequences = max((spec.get("sequences", 1) for spec in manifest.buffers.values()), default=1)
    return sequences * -(-int(manifest.model["max_seq"]) // BLOCK_POSITIONS)


def _shared_bytes(manifest: Manifest) -> int:
    """Return the bytes of the memory that buffers share."""
    ends = (spec["at"] + manifest.nbytes(name) for name, spec in manifest.buffers.items() if "at" in spec)
    return max(ends, default=0)


class Memory:
    """The buffers of a manifest, by name, on one device.

    The content of a buffer in shared memory is defined only for calls in the order of a plan. With `shared_from`,
    another memory of the manifest, each of these buffers has memory of its own instead and keeps its content until it
    is written again; all others are those of `shared_from`.

    Caches in blocks have room for `blocks` of them, and at least for those of as many sequences that fill the context
    as the device takes at once.
    """

    def __init__(self, manifest: Manifest, device: Device, shared_from: Memory | None = None, blocks: int = 0) -> None:
        self._device = device
        self.blocks = max(blocks, _least_blocks(manifest))
        self._in_blocks = cache_blocks(manifest)
        self._manifest, self._specs = manifest, manifest.buffers
        self._on_device = {
            name
            for calls in manifest.plans.values()
            for call in calls
            if not manifest.programs[call.program]["host"]
            for name in call.names
        }
        shared = 0 if shared_from else _shared_bytes(manifest)
        self._shared: Any = device.alloc(shared) if shared else None
        loaded = {} if shared_from else self._load_weights()
        rest = (name for name in manifest.buffers if name not in loaded)
        self._buffers = loaded | {name: self._create(name, shared_from) for name in rest}

    def _create(self, name: str, shared_from: Memory | None) -> Any:
        manifest, device, spec = self._manifest, self._device, self._specs[name]
        host, nbytes = name not in self._on_device, manifest.nbytes(name)
        if shared_from and "at" not in spec:
            return shared_from._buffers[name]
        if "at" in spec and not shared_from:
            return self._shared.part(spec["at"], nbytes)
        if name in self._in_blocks:
            return device.alloc(max(nbytes, self._in_blocks[name].end(self.blocks)), host)
        return device.alloc(nbytes, host)

    def _load_weights(self) -> dict[str, Any]:
        """Return the buffers of weights and tables, by name."""
        manifest, places = self._manifest, {name: spec for name, spec in self._specs.items() if "file" in spec}
        read = {name for calls in manifest.plans.values() for call in calls for name in manifest.weights_read(call)}
        in_full = {name for name in read if manifest.share(name) == 1}

        def stored(name: str, spec: Mapping[str, Any]) -> StoredWeight:
            file, nbytes = manifest.file(spec["file"]), manifest.nbytes(name)
            return StoredWeight(file, spec["offset"], nbytes, name not in self._on_device, name in in_full)

        loaded = self._device.load_weights(list(starmap(stored, places.items())))
        return dict(zip(places, loaded, strict=True))

    def block(self, number: int) -> list[np.ndarray]:
        """Return the bytes of a block in every cache, in the order of the manifest's buffers."""
        return [self._buffers[name].bytes[at.end(number) : at.end(number + 1)] for name, at in self._in_blocks.items()]

    def unaliased(self) -> Memory:
        """Return memory with the same buffers, but none that share memory: each has its own."""
        return self if self._shared is None else Memory(self._manifest, self._device, self)

    def array(self, name: str) -> np.ndarray:
        """Return the host's view of a buffer, in its dtype and shape. ValueError for one in shared memory."""
        spec = self._specs[name]
        if "at" in spec and self._shared is not None:
            raise ValueError(f"{name} shares its memory with others: look at it in Memory.unaliased()")
        return self._viewed(name)

    def latest(self, name: str) -> np.ndarray:
        """Return a copy of a buffer that the host has just written: in shared memory, others overwrite it soon."""
        return self._viewed(name).copy()

    def _viewed(self, name: str) -> np.ndarray:
        spec = self._specs[name]
        buffer = self._buffers[name]
        if name in self._in_blocks:
            buffer = buffer.part(0, self._manifest.nbytes(name))
        array: np.ndarray = self._device.array(buffer, DTYPES[spec["dtype"]], tuple(spec["shape"]))
        return array

    def buffer(self, name: str) -> Any:
        """Return the device's buffer of that name."""
        return self._buffers[name]

    def bind(self, reference: BufferRef) -> Binding:
        """Return the buffer that a call refers to, in the view that it asks for."""
        rows = self._specs[reference.name]["shape"][0]
        return Binding(self._buffers[reference.name], reference.view, self._manifest.nbytes(reference.name) // rows)


def load_programs(manifest: Manifest, device: Device) -> dict[str, Any]:
    """Load every program of a manifest, by name. Raises UserError."""
    programs = {
        name: device.load_program(manifest.native_file(spec["file"]), spec["entry"], spec["host"])
        for name, spec in manifest.programs.items()
    }
    for name, program in programs.items():
        if declared := device.declared(program):
            _check_declared(manifest, name, declared)
    return programs


def bind_plans(manifest: Manifest, programs: Mapping[str, Any], memory: Memory) -> dict[Phase, list[Call]]:
    """Return the calls of the manifest's plans with buffers bound to their arguments (slots)."""
    return {phase: bind_calls(manifest, programs, memory, calls) for phase, calls in manifest.plans.items()}


def bind_calls(
    manifest: Manifest, programs: Mapping[str, Any], memory: Memory, calls: Sequence[PlannedCall]
) -> list[Call]:
    """Return `calls` with buffers of `memory` bound to their slots."""

    def bind(call: PlannedCall) -> Call:
        place = "" if call.layer is None else f"layer {call.layer + 1} of {manifest.model['layers']}"
        slots = manifest.programs[call.program]["slots"]
        return Call(
            programs[call.program], list(map(memory.bind, call.buffers)), slots, place, call.program, call.layer
        )

    return list(map(bind, calls))


def _check_declared(manifest: Manifest, name: str, declared: Declared) -> None:
    """Check that a program was compiled for the slots and the context of the manifest. Raises UserError."""
    slots, where = manifest.programs[name]["slots"], manifest.file(manifest.programs[name]["file"]).path
    same = len(slots) == len(declared.slots) and all(
        slot[key] == value for slot, code in zip(slots, declared.slots, strict=True) for key, value in code.items()
    )
    if not same:
        raise UserError(f"{where}: program {name} was not compiled for the slots in manifest.json: {REMEDY}")
    if declared.positions is not None and manifest.model["max_seq"] > declared.positions:
        raise UserError(
            f"{where}: program {name} was compiled for a context of {declared.positions}, manifest.json says "
            f"{manifest.model['max_seq']}: {REMEDY}"
        )
