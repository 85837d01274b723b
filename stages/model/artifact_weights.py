"""The weights that an artifact directory holds, as values again: what its programs multiply with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.dtypes import DTYPES
from llama_npu2.errors import REMEDY, UserError
from llama_npu2.manifest import Manifest
from stages.engine.places import CONFIG
from stages.model import families
from stages.model.buffers import tensors_of
from stages.weights.formats import formats


class ArtifactWeights:
    """Tensors of the model of an artifact directory, by the names of its checkpoint."""

    def __init__(self, directory: Path) -> None:
        """Raises UserError where the directory is not complete, or holds what is unknown here."""
        self.manifest = Manifest.open(directory)
        self.shapes = families.tensors(families.read_config(directory / CONFIG))
        buffers = self.manifest.buffers
        self._places = {part: name for name in buffers for part in tensors_of(name) if part in self.shapes}
        for name in self.shapes:
            self._check(name)

    def _check(self, name: str) -> None:
        where = f"{self.manifest.directory}/manifest.json"
        if name not in self._places:
            raise UserError(f"{where} has no {name}: {REMEDY}")
        held, layout = self.format(name), self._spec(name)["layout"]
        if held not in formats() or layout not in ("plain", *formats()[held].layouts):
            raise UserError(f"{where} has {name} as {held} in {layout}, which is unknown here: run doit compile")

    def format(self, name: str) -> str:
        """That a tensor is stored in."""
        found: str = self._spec(name)["format"]
        return found

    @property
    def held(self) -> set[str]:
        """Names of the buffers."""
        return set(self._places.values())

    def values(self, name: str) -> np.ndarray:
        """f32, of the tensor's shape."""
        together = tensors_of(self._places[name])
        rows = [self.shapes[part][0] for part in together]
        first, form = sum(rows[: together.index(name)]), formats()[self.format(name)]
        return form.dequantise(self.stored(self._places[name])[first:][: self.shapes[name][0]], self.shapes[name][-1])

    def stored(self, buffer: str) -> np.ndarray:
        """What a buffer of weights holds, in its format without a layout: of tensors that lie together, the rows of
        all."""
        spec, together = self.manifest.buffers[buffer], [self.shapes[part] for part in tensors_of(buffer)]
        packed = np.memmap(
            self.manifest.directory / spec["file"], DTYPES[spec["dtype"]], "r", spec["offset"], tuple(spec["shape"])
        )
        form, shape = formats()[spec["format"]], (sum(rows for rows, *_ in together), *together[0][1:])
        return form.layout(spec["layout"]).unpack(packed, form.stored_shape(shape))

    def _spec(self, name: str) -> Mapping[str, Any]:
        """Of the buffer that a tensor lies in."""
        return self.manifest.buffers[self._places[name]]

    @property
    def formats(self) -> set[str]:
        return {self.format(name) for name in self.shapes}

    @property
    def bits(self) -> float:
        """Of a weight of a product, on average: bytes in memory x 8 / weights, the vocabulary's included."""
        matrices = {place for name, place in self._places.items() if len(self.shapes[name]) == 2}
        size = sum(map(self.manifest.nbytes, matrices))
        return 8 * size / sum(self.manifest.buffers[name]["values"] for name in matrices)
