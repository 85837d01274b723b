"""The weights of an artifact directory as values: the numbers that its programs multiply with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.artifact.dtypes import DTYPES
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.errors import REMEDY, UserError
from stages.engine.places import CONFIG
from stages.model import families
from stages.model.buffers import tensors_of
from stages.model.policy import BF16
from stages.weights.formats import formats, w8a8


class ArtifactWeights:
    """The tensors of an artifact directory, by their names in the checkpoint."""

    def __init__(self, directory: Path) -> None:
        """Raise UserError where the directory is not complete, or holds formats or layouts that are unknown here."""
        self.manifest = Manifest.open(directory)
        self.shapes = families.tensors(families.read_config(directory / CONFIG))
        buffers = self.manifest.buffers
        self._places = {tensor: name for name in buffers for tensor in tensors_of(name) if tensor in self.shapes}
        for name in self.shapes:
            self._check(name)

    def _check(self, name: str) -> None:
        where = f"{self.manifest.directory}/manifest.json"
        if name not in self._places:
            raise UserError(f"{where} has no {name}: {REMEDY}")
        form, layout = self.format(name), self._spec(name)["layout"]
        if form not in formats() or layout not in ("plain", *formats()[form].layouts):
            raise UserError(f"{where} has {name} as {form} in {layout}, which is unknown here: run doit compile")

    def format(self, name: str) -> str:
        """Return the format that a tensor is stored in."""
        return str(self._spec(name)["format"])

    @property
    def rounds_activations(self) -> bool:
        """Whether products round what they multiply with a weight to 8 bits."""
        activations = self.manifest.model.get("activations", BF16.activations)
        return w8a8.FORMAT.name in self.formats or activations != BF16.activations

    @property
    def held(self) -> set[str]:
        """The names of the buffers of weights. A bias may be in two: alone, and joined with others."""
        return {name for name in self.manifest.buffers if all(tensor in self.shapes for tensor in tensors_of(name))}

    def values(self, name: str) -> np.ndarray:
        """Return a tensor's values, f32 of its shape."""
        joined = tensors_of(self._places[name])
        rows = [self.shapes[tensor][0] for tensor in joined]
        first, form = sum(rows[: joined.index(name)]), formats()[self.format(name)]
        return form.dequantise(self.stored(self._places[name])[first:][: self.shapes[name][0]], self.shapes[name][-1])

    def stored(self, buffer: str) -> np.ndarray:
        """Return the content of a buffer of weights in its format without a layout: the rows of all its tensors."""
        spec, shapes = self.manifest.buffers[buffer], [self.shapes[tensor] for tensor in tensors_of(buffer)]
        packed = np.memmap(
            self.manifest.directory / spec["file"], DTYPES[spec["dtype"]], "r", spec["offset"], tuple(spec["shape"])
        )
        form, shape = formats()[spec["format"]], (sum(rows for rows, *_ in shapes), *shapes[0][1:])
        return form.layout(spec["layout"]).unpack(packed, form.stored_shape(shape))

    def _spec(self, name: str) -> Mapping[str, Any]:
        """Return the manifest's entry of the buffer that a tensor lies in."""
        return self.manifest.buffers[self._places[name]]

    @property
    def formats(self) -> set[str]:
        return {self.format(name) for name in self.shapes}

    @property
    def bits(self) -> float:
        """Mean bits of a weight of a product: bytes in memory x 8 / weights, the vocabulary's included."""
        matrices = {place for name, place in self._places.items() if len(self.shapes[name]) == 2}
        size = sum(map(self.manifest.nbytes, matrices))
        return 8 * size / sum(self.manifest.buffers[name]["values"] for name in matrices)
