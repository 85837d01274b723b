"""`doit quality`: how much a model loses by each format of its weights, against its checkpoint, over a text.

Formats are compared alone: their values in float32, ours and those of files that llama.cpp makes
(`stages.proof.comparison.divergence`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import numpy as np

from llama_npu2 import UserError
from llama_npu2.artifact.dtypes import DTYPES
from llama_npu2.artifact.storage import Directory
from llama_npu2.cli.table import Column, Table
from llama_npu2.text.tokenizer import Tokenizer
from stages.graph import Build
from stages.model import calibration
from stages.model.buffers import Buffer
from stages.model.calibrated import calibrated_weights, read_calibrated
from stages.model.checkpoint import Checkpoint
from stages.model.plan import make_plan
from stages.model.policy import Policy, matrix_formats, parse_policy
from stages.proof.comparison import gguf_file, peers, transformers_model
from stages.proof.comparison.divergence import ALL_WINDOWS, TEXT, WINDOWS, Quality, measure, read_text, windows
from stages.targets import targets
from stages.weights.formats import formats

TABLE = Table(
    [
        Column("weights", 24),
        Column("bits", 5, right=True),
        Column("mean KL divergence", 32),
        Column("99.9th percentile", right=True),
        Column("same best token", right=True),
        Column("perplexity", right=True),
    ],
    markdown=True,
)


@dataclass(frozen=True)
class Rounded:
    """Weights in some format. `bits`: of a weight of a matrix, on average; `values`: of a tensor, by name."""

    name: str
    bits: float
    values: transformers_model.Values


def run(build: Build) -> None:
    """`doit quality`: the formats that weights= names, or all; with peers=llama.cpp those of its files, too."""
    options, source = build.options, Checkpoint.open(build.source.fetch())
    tokenizer = Tokenizer.open(Directory(build.directory))
    ids = tokenizer.encode(read_text(Path(options.text) if options.text else TEXT), special_tokens=True)
    parts = windows(ids, ALL_WINDOWS if options.full else WINDOWS, source.config.max_seq)
    chosen = [options.weights] if options.weights else [name for name in matrix_formats() if name != "bf16"]
    policies = [parse_policy(text) for text in chosen]
    # All of them at first, so that what cannot be had is refused at once.
    compared = [*_ours(build, source, policies), *_peers(build, policies)]
    exact, found = list(transformers_model.logits(source, source.tensor, parts)), []
    if not options.json:
        print(f"against the checkpoint in float32, {sum(map(len, parts))} tokens\n{TABLE.header()}", flush=True)
    for each in compared:
        lost = measure(transformers_model.logits(source, each.values, parts), exact, parts)
        found.append({"weights": each.name, "bits": each.bits} | asdict(lost))
        if not options.json:
            print(_row(each, lost), flush=True)
    if options.json:
        print(json.dumps(found))


def _row(each: Rounded, lost: Quality) -> str:
    low, high = lost.interval
    mean = f"{lost.divergence:.6f} ({low:.6f} to {high:.6f})"
    return TABLE.row(
        each.name, f"{each.bits:.2f}", mean, f"{lost.tail:.4f}", f"{lost.same:.2%}", f"{lost.perplexity:.3f}"
    )


def _ours(build: Build, source: Checkpoint, policies: Iterable[Policy]) -> Iterator[Rounded]:
    """As the CPU's kernels read them."""
    target, calibrated = targets()["cpu"], dict[str, Path]()
    if build.calibration:
        files = calibration.weights_files(source.config.layers)
        calibrated = calibrated_weights([build.directory / file for file in files])
    grouping = target.grouping(target.default_grouping)
    for policy in policies:
        buffers = make_plan(source.config, grouping, target.kernel_set, policy=policy).buffers
        name = policy.text + (", calibrated" if calibrated else "")
        yield Rounded(name, _bits(buffers), _Values(source, buffers, calibrated))


def _bits(buffers: Mapping[str, Buffer]) -> float:
    matrices = [(formats()[b.format], b) for b in buffers.values() if b.kind == "weight" and len(b.shape) == 2]
    sizes = [prod(form.packed_shape(b.shape, b.layout)) * DTYPES[form.dtype].itemsize for form, b in matrices]
    return 8 * sum(sizes) / sum(prod(b.shape) for _, b in matrices)


@dataclass(frozen=True)
class _Values:
    """A checkpoint's, stored as `buffers` say and read again."""

    source: Checkpoint
    buffers: Mapping[str, Buffer]
    calibrated: Mapping[str, Path]

    def __call__(self, name: str) -> np.ndarray:
        form = formats()[self.buffers[name].format]
        if name in self.calibrated:
            return form.dequantise(read_calibrated(self.calibrated[name], name), self.buffers[name].shape[-1])
        tensor = self.source.tensor(name)
        same = self.source.stored_format(name) == form.name
        return tensor if same else form.dequantise(form.quantise(tensor), tensor.shape[-1])


def _peers(build: Build, policies: Iterable[Policy]) -> Iterator[Rounded]:
    """The files of llama.cpp that are nearest to `policies`, as our importer reads them."""
    names = build.options.peer_list()
    if other := [name for name in names if name != "llama.cpp"]:
        raise UserError(f"peers={other[0]}: it has no formats of its own: leave it out")
    cache = peers.conversions(build.artifacts, build.directory)
    nearest = [peers.entrants(names, policy.matrices, build.source, cache) for policy in policies]
    for entrant in dict.fromkeys(each for found in nearest for each in found):
        values = Checkpoint.open(entrant.model).tensor
        yield Rounded(f"{entrant.program} {entrant.format}", gguf_file.bits(entrant.model), values)
