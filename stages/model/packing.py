"""Packs a checkpoint's tensors into blobs, each weight once, in the layout that the target's kernels read."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stages.engine.files import file_digests, write_json
from stages.engine.lazy import np
from stages.engine.places import WEIGHTS
from stages.model.buffers import Buffer, read_buffers, tensors_of
from stages.model.calibrated import calibrated_weights, read_calibrated
from stages.model.checkpoint import Checkpoint
from stages.model.config import table
from stages.model.importers import PLAIN
from stages.model.sources import Source
from stages.weights.blobs import PAGE, Tensor, write_safetensors
from stages.weights.formats import formats

WRITERS = 2
"""The number of files that are written at the same time."""


def pack_weights(source: Source, wanted: Path, calibrated: Sequence[Path], work: Path) -> None:
    """Step action: pack the buffers that the file `wanted` lists.

    Args:
        calibrated: files of rounded weights, which are taken instead of the checkpoint's.
    """
    buffers = read_buffers(wanted)
    checkpoint = Checkpoint.open(source.fetch())
    for line in conversions(checkpoint, buffers):
        print(line, file=sys.stderr, flush=True)
    pack(checkpoint, buffers, work, calibrated_weights(calibrated))


def pack(checkpoint: Checkpoint, buffers: Mapping[str, Buffer], out: Path, calibrated: Mapping[str, Path]) -> None:
    """Write `buffers`, weights and tables, below `out`, with an index of where each is.

    Args:
        calibrated: for each rounded weight, the file that holds it.
    """
    from stages.engine.bar import Bar

    files = blobs(buffers)
    (out / "weights").mkdir(parents=True)
    with (
        ThreadPoolExecutor(WRITERS) as pool,
        Bar(total=len(files), desc="packing weights", unit="file") as bar,
    ):

        def write(item: tuple[str, list[Tensor]]) -> dict:
            entry = _write_blob(checkpoint, buffers, calibrated, out, *item)
            bar.update()
            return entry

        entries = list(pool.map(write, sorted(files.items())))
    index = {
        "buffers": {name: place for entry in entries for name, place in entry["buffers"].items()},
        "files": {entry["file"]: entry["digests"] for entry in entries},
    }
    write_json(out / WEIGHTS, index)


def blobs(buffers: Mapping[str, Buffer]) -> dict[str, list[Tensor]]:
    """Return the files that weights and tables are packed into, each with its tensors in order."""
    files: dict[str, list[Tensor]] = {}
    for name, buffer in buffers.items():
        files.setdefault(f"weights/{buffer.blob}.safetensors", []).append((name, buffer.dtype, buffer.stored_shape))
    return files


def _write_blob(
    checkpoint: Checkpoint,
    buffers: Mapping[str, Buffer],
    calibrated: Mapping[str, Path],
    out: Path,
    file: str,
    tensors: list[Tensor],
) -> dict:
    contents = _contents(checkpoint, buffers, calibrated, [name for name, *_ in tensors])
    offsets = write_safetensors(out / file, tensors, contents, alignment=PAGE)
    return {
        "file": file,
        "buffers": {
            name: {"file": file, "offset": offsets[name], "dtype": dtype, "shape": list(shape)}
            for name, dtype, shape in tensors
        },
        "digests": file_digests(out / file),
    }


def _contents(
    checkpoint: Checkpoint, buffers: Mapping[str, Buffer], calibrated: Mapping[str, Path], names: list[str]
) -> Iterator[np.ndarray]:
    for name in names:
        buffer = buffers[name]
        stored = formats()[buffer.format]
        if buffer.kind == "table":
            yield stored.pack(table(checkpoint.config, name, buffer.shape[0]), buffer.layout)
        elif calibrated.keys() >= {*tensors_of(name)}:
            rows = [read_calibrated(calibrated[tensor], tensor) for tensor in tensors_of(name)]
            yield stored.arrange(np.concatenate(rows), buffer.layout)
        elif checkpoint.stored_format(name) == buffer.format:
            yield stored.arrange(checkpoint.stored(name), buffer.layout)
        else:
            yield stored.pack(checkpoint.tensor(name), buffer.layout)


def conversions(checkpoint: Checkpoint, buffers: Mapping[str, Buffer]) -> list[str]:
    """Return a line for each pair of formats, of the checkpoint and of storage, in which values are rounded."""
    pairs = Counter(
        (checkpoint.held[tensor].origin or checkpoint.stored_format(tensor), buffer.format)
        for name, buffer in buffers.items()
        if buffer.kind == "weight" and len(buffer.shape) >= 2
        for tensor in tensors_of(name)
    )
    return [
        f"{count} matrices that the checkpoint holds as {held} are rounded to {stored}"
        for (held, stored), count in sorted(pairs.items())
        if held != stored and (stored != "bf16" or held not in PLAIN)
    ]
