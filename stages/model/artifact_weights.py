"""The weights that an artifact directory holds, as values again: what its programs multiply with."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llama_npu2.dtypes import DTYPES
from llama_npu2.manifest import Manifest
from stages.engine.places import CONFIG
from stages.model import families
from stages.weights.formats import formats


class ArtifactWeights:
    """Tensors of the model of an artifact directory, by the names of its checkpoint."""

    def __init__(self, directory: Path) -> None:
        """Raises UserError where the directory is not complete."""
        self.manifest = Manifest.open(directory)
        self.shapes = families.tensors(families.read_config(directory / CONFIG))

    def values(self, name: str) -> np.ndarray:
        """f32, of the tensor's shape."""
        buffer = self.manifest.buffers[name]
        packed = np.memmap(
            self.manifest.directory / buffer["file"],
            DTYPES[buffer["dtype"]],
            "r",
            buffer["offset"],
            tuple(buffer["shape"]),
        )
        return formats()[buffer["format"]].unpack(packed, buffer["layout"], self.shapes[name])

    @property
    def formats(self) -> set[str]:
        return {self.manifest.buffers[name]["format"] for name in self.shapes}

    @property
    def bits(self) -> float:
        """Of a weight of a product, on average: bytes in memory x 8 / weights, the vocabulary's included."""
        matrices = [spec for name, spec in self.manifest.buffers.items() if len(self.shapes.get(name, ())) == 2]
        size = sum(self.manifest.nbytes(name) for name, shape in self.shapes.items() if len(shape) == 2)
        return 8 * size / sum(spec["values"] for spec in matrices)
