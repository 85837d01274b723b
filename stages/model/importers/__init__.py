"""How checkpoints hold their tensors: a module per kind of file or of quantisation.

`stages.model.checkpoint` is what others read by. A *container* (a directory of safetensors, a GGUF file) says which
tensors there are; those of a quantised safetensors checkpoint come in parts, which a *method* puts together. Every
module of this package that has `METHOD` is in the table of methods, by the `quant_method` of a `config.json`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from stages.weights.formats import Shape

if TYPE_CHECKING:
    from stages.model.config import ConfigFields
    from stages.model.importers.directory import Tensors

PLAIN = ("bf16", "f16", "f32")
"""What a tensor can be held as that is not quantised."""


@dataclass(frozen=True)
class Held:
    """A tensor of logical `shape`. `format`: one of `PLAIN`, or of ours the one that holds its values exactly; f32
    where none of the quantised ones does. `read`: its elements as `Format.quantise` makes them; UserError with tensor
    and reason where they cannot be right. `parts`: the file's tensors that it is made of."""

    shape: Shape
    format: str
    read: Callable[[], np.ndarray]
    parts: tuple[str, ...]


class Container(Protocol):
    """Where tensors are. `where`: what complaints call its configuration; `fields`: those of a `config.json`; `names`:
    of all its tensors, as they are called there."""

    where: str

    @property
    def fields(self) -> Mapping[str, Any]: ...

    @property
    def names(self) -> frozenset[str]: ...

    def files(self) -> list[Path]:
        """That hold weights or tokenizer."""

    def held(self, name: str, shape: Shape) -> Held | None:
        """A tensor of the model, which has that shape by the configuration. None: it is not there. Raises UserError."""

    def where_is(self, name: str) -> str:
        """What a complaint about one of `names` begins with."""

    def tokenizer(self) -> Mapping[str, bytes]:
        """The tokenizer in Hugging Face files, by name. Raises UserError."""


@dataclass(frozen=True)
class Method:
    """`open`: the fields of a `quantization_config` -> what finds a tensor in its parts: (tensors, name, shape) ->
    held, or None. Both raise UserError."""

    name: str
    open: Callable[[ConfigFields], Callable[[Tensors, str, Shape], Held | None]]


@functools.cache
def methods() -> dict[str, Method]:
    """Every method by its `quant_method`."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    found = (module.METHOD for module in modules if hasattr(module, "METHOD"))
    return {method.name: method for method in found}
