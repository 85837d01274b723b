"""Reads the tensors of checkpoints: one module for each kind of file or of quantisation.

Others read through `stages.model.checkpoint`. A *container* (a directory of safetensors, a GGUF file) lists its
tensors; those of a quantised safetensors checkpoint come in parts, which a *method* puts together. Every module of this
package that has `METHOD` is in the table of methods, by the `quant_method` of a `config.json`.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llama_npu2.frozen import frozen
from stages.engine.lazy import np
from stages.weights.format import Shape

if TYPE_CHECKING:
    from stages.model.config import Config, ConfigFields
    from stages.model.families import Weight
    from stages.model.families.place import Location
    from stages.model.importers.directory import Tensors

PLAIN = ("bf16", "f16", "f32")
"""Formats of tensors that are not quantised."""


@frozen
class Held:
    """A tensor of a checkpoint."""

    shape: Shape
    """Its logical shape."""
    format: str
    """One of `PLAIN`, or our format that holds its values exactly; f32 where no quantised one does."""
    read: Callable[[], np.ndarray]
    """Returns its elements as `Format.quantise` makes them. Raises UserError with tensor and reason where they cannot
    be right."""
    parts: tuple[str, ...]
    """The file's tensors that it is made of."""
    origin: str = ""
    """What the file holds where that is another format, of which no format of ours holds the values."""

    def taken(self, rows: slice | np.ndarray, axis: int = 0) -> Held:
        """Return some of its rows, which are along an axis, as a tensor: one slice, or the number of each."""
        if isinstance(rows, slice) and rows == slice(None):
            return self
        count = len(range(self.shape[axis])[rows]) if isinstance(rows, slice) else len(rows)
        shape, at = (*self.shape[:axis], count, *self.shape[axis + 1 :]), (*(slice(None),) * axis, rows)
        return replace(self, shape=shape, read=lambda: self.read()[at])

    def transposed(self) -> Held:
        """Return it with its last two axes swapped."""
        *outer, rows, columns = self.shape
        return replace(
            self, shape=(*outer, columns, rows), read=lambda: np.ascontiguousarray(self.read().swapaxes(-1, -2))
        )

    def flat(self) -> Held:
        """Return its values in one row."""
        return replace(self, shape=(math.prod(self.shape),), read=lambda: self.read().reshape(-1))


def stacked(tensors: Sequence[Held]) -> Held:
    """Return tensors of one shape and format as one, `[tensors, ...]`."""
    first = tensors[0]
    return Held(
        (len(tensors), *first.shape),
        first.format,
        lambda: np.stack([tensor.read() for tensor in tensors]),
        tuple(part for tensor in tensors for part in tensor.parts),
    )


class Container(Protocol):
    """A directory or file that holds a checkpoint."""

    where: str
    """The name of its configuration in messages."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Its configuration as the fields of a `config.json`."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all its tensors, as they are called there."""

    def files(self) -> list[Path]:
        """Return the files that hold weights or tokenizer."""

    def location(self, config: Config, weight: Weight) -> Location:
        """Return where weights of the model lie in it."""

    def held(self, name: str, shape: Shape) -> Held | None:
        """Return a tensor, which has that shape by the configuration; None if it is not there.

        Raises UserError.
        """

    def where_is(self, name: str) -> str:
        """Return the beginning of a message about one of `names`."""

    def tokenizer(self) -> Mapping[str, bytes]:
        """Return the tokenizer in Hugging Face files, by name. Raises UserError."""


@frozen
class Method:
    """A method of quantised safetensors."""

    name: str
    """Its `quant_method`."""
    open: Callable[[ConfigFields], Callable[[Tensors, str, Shape], Held | None]]
    """Takes the fields of a `quantization_config`; returns the function that puts a tensor of a name and shape together
    from its parts, or returns None where they are not there. Both raise UserError."""


@functools.cache
def methods() -> dict[str, Method]:
    """Return every method by its `quant_method`."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    members = (module.METHOD for module in modules if hasattr(module, "METHOD"))
    return {method.name: method for method in members}
