"""A checkpoint's weights as formats round them, ours and llama.cpp's, in float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from llama_npu2 import UserError
from llama_npu2.artifact.dtypes import DTYPES
from llama_npu2.frozen import frozen
from stages.graph import Build
from stages.kernels import kernel_for
from stages.model import calibration
from stages.model.buffers import Buffer
from stages.model.calibrated import calibrated_weights, read_calibrated
from stages.model.checkpoint import Checkpoint
from stages.model.plan import make_plan
from stages.model.policy import BF16, Policy
from stages.proof.comparison import gguf_file, peers, transformers_model
from stages.targets import targets
from stages.weights.formats import formats, w8a8


@frozen
class Rounded:
    """Weights in a format."""

    name: str
    bits: float
    """Mean bits of a matrix's weight, scales included."""
    values: transformers_model.Values
    inputs: transformers_model.Inputs = transformers_model.not_rounded
    """How products with these weights take their other operand."""


def ours(build: Build, source: Checkpoint, policies: Iterable[Policy]) -> Iterator[Rounded]:
    """Yield the weights of each policy, as the CPU's kernels read them."""
    target, calibrated = targets()["cpu"], dict[str, Path]()
    if build.calibration:
        files = calibration.weights_files(source.config.layers)
        calibrated = calibrated_weights([build.directory / file for file in files])
    grouping = target.grouping(target.default_grouping)
    for policy in policies:
        buffers = make_plan(source.config, grouping, target.kernel_set, policy=policy).buffers
        name = policy.text + (", calibrated" if calibrated else "")
        name += "" if policy.activations == BF16.activations else f", activations {policy.activations}"
        values = partial(_value, source, buffers, calibrated)
        yield Rounded(name, _bits(buffers), values, partial(_inputs, buffers, policy.activations))


def _bits(buffers: Mapping[str, Buffer]) -> float:
    """Return the mean bits of a matrix's weight."""
    matrices = [(formats()[b.format], b) for b in buffers.values() if b.kind == "weight" and len(b.shape) == 2]
    sizes = [prod(form.packed_shape(b.shape, b.layout)) * DTYPES[form.dtype].itemsize for form, b in matrices]
    return 8 * sum(sizes) / sum(prod(b.shape) for _, b in matrices)


def _inputs(buffers: Mapping[str, Buffer], activations: str, name: str) -> int:
    """Return how many values of a row share a scale when a product with a weight rounds them: `Inputs`."""
    form = formats()[buffers[name].format]
    if form is w8a8.FORMAT:
        return transformers_model.WHOLE_ROW
    product = kernel_for("gemv", form.name, activations)
    return form.values if product and product.activations != BF16.activations else 0


def _value(source: Checkpoint, buffers: Mapping[str, Buffer], calibrated: Mapping[str, Path], name: str) -> np.ndarray:
    """Return a checkpoint's weight, stored in its format in `buffers` and read again."""
    form = formats()[buffers[name].format]
    if name in calibrated:
        return form.dequantise(read_calibrated(calibrated[name], name), buffers[name].shape[-1])
    tensor = source.tensor(name)
    same = source.stored_format(name) == form.name
    return tensor if same else form.dequantise(form.quantise(tensor), tensor.shape[-1])


def of_peers(build: Build, policies: Iterable[Policy]) -> Iterator[Rounded]:
    """Yield the weights of the files of llama.cpp that are nearest to `policies`, as our importer reads them."""
    names = build.options.peer_list()
    if other := [name for name in names if name != "llama.cpp"]:
        raise UserError(f"peers={other[0]}: it has no formats of its own: leave it out")
    cache = peers.conversions(build.artifacts, build.directory)
    config = Checkpoint.open(build.source.fetch()).config
    nearest = [peers.entrants(names, policy.matrices, build.source, cache) for policy in policies]
    for entrant in dict.fromkeys(entrant for entrants in nearest for entrant in entrants):
        values = gguf_file.values(entrant.model, config)
        yield Rounded(f"{entrant.program} {entrant.format}", gguf_file.bits(entrant.model), values)
