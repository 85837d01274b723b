"""Adapters (LoRA, rsLoRA, DoRA) as PEFT writes them, merged into the tensors of a checkpoint as they are read.

Hu et al. 2021 (LoRA), Kalajdzievski 2023 (rsLoRA: a scale by the root of the rank), Liu et al. 2024 (DoRA: a magnitude
for each row). A merged tensor is f32, so that it is rounded once, where it is packed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.engine.files import read_json
from stages.engine.lazy import np
from stages.model.importers import PLAIN, Held
from stages.model.importers.directory import Directory, Tensors
from stages.weights.format import Shape
from stages.weights.formats import formats

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
COMPOSED = ".adapted.json"
"""The name of a file that says which adapters are merged into which checkpoint."""

_TAKEN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Values of fields that say how an adapter is merged. Other initial weights go with another checkpoint."""
_IGNORED = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core"),
    *("eva_config", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
)
"""Fields about training, or about what the tensors say themselves."""
_READ = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
_PREFIX = "base_model.model."
_PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


@frozen
class Adapter:
    """A directory that PEFT wrote, and by how much its change of the weights is multiplied."""

    path: Path
    weight: float = 1.0

    @property
    def files(self) -> list[Path]:
        """The files that it is read from. Raises UserError if they are not there."""
        files = [self.path / ADAPTER_CONFIG, self.path / ADAPTER_WEIGHTS]
        if missing := next((path.name for path in files if not path.is_file()), None):
            why = "only safetensors are read: save it with safe_serialization=True"
            other = f" ({why})" if (self.path / "adapter_model.bin").is_file() else ""
            raise UserError(f"lora={self.path}: there is no {missing}{other}: give a directory that PEFT wrote")
        return files

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """Its configuration. Raises UserError that names the field that cannot be merged."""
        where = self.files[0]
        fields = read_json(where, "give a directory that PEFT wrote")
        for name, value in fields.items():
            if name in _TAKEN and value not in _TAKEN[name]:
                taken = ", ".join(str(each) for each in _TAKEN[name] if each is not None)
                raise UserError(f"{where}: {name} = {value} is not supported: only {taken}")
            if name not in {*_TAKEN, *_IGNORED, *_READ} and value not in (None, False, [], {}):
                raise UserError(f"{where}: {name} = {value} is not supported: merge this adapter with PEFT")
        if fields.get("peft_type") != "LORA":
            raise UserError(f"{where}: peft_type is missing: only LORA is supported")
        return fields

    @cached_property
    def modules(self) -> Mapping[str, Mapping[str, str]]:
        """The names of its tensors by module and part. Raises UserError for one that is no part."""
        found: dict[str, dict[str, str]] = {}
        for name in self._tensors.entries:
            part = next((part for part in _PARTS if f".{part}" in name), None)
            if part is None:
                raise UserError(f"{self.files[1]}: tensor {name} is not supported: only {', '.join(_PARTS)}")
            found.setdefault(module_of(name.partition(f".{part}")[0]), {})[part] = name
        for module, parts in found.items():
            dora = [_PARTS[2]] * bool(self.fields.get("use_dora"))
            if missing := next((part for part in (*_PARTS[:2], *dora) if part not in parts), None):
                raise UserError(f"{self.files[1]}: module {module} has no {missing}: save the adapter again")
        return found

    @cached_property
    def _tensors(self) -> Tensors:
        return Tensors(self.path, [self.files[1]])

    def check(self, module: str, shape: Shape) -> None:
        """Raise UserError unless its change of a module has this shape, `[out, in]`."""
        rank, _ = self._rank_and_scale(module)
        wanted = dict(zip(_PARTS, ((rank, shape[-1]), (shape[0], rank), (shape[0],)), strict=True))
        for part, name in self.modules[module].items():
            if (found := self._tensors.entries[name].shape) != wanted[part]:
                raise self._tensors.fails(name, f"has shape {[*found]}, this model and its rank need {[*wanted[part]]}")

    def merged(self, module: str, values: np.ndarray) -> np.ndarray:
        """Return the f32 values of a module's matrix with its change."""
        parts = {part: self._tensors.read(name).astype(np.float32) for part, name in self.modules[module].items()}
        _, scale = self._rank_and_scale(module)
        values = values + np.float32(scale * self.weight) * (parts[_PARTS[1]] @ parts[_PARTS[0]])
        if _PARTS[2] in parts:
            values *= (parts[_PARTS[2]] / np.linalg.norm(values, axis=1))[:, None]
        return values

    def _rank_and_scale(self, module: str) -> tuple[int, float]:
        name = self.modules[module][_PARTS[0]].removeprefix(_PREFIX).partition(f".{_PARTS[0]}")[0]
        rank = _of_pattern(self.fields.get("rank_pattern"), name, self.fields.get("r", 8))
        alpha = _of_pattern(self.fields.get("alpha_pattern"), name, self.fields.get("lora_alpha", 8))
        if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
            raise UserError(f"{self.files[0]}: r = {rank} and lora_alpha = {alpha} must be numbers")
        return rank, alpha / (rank**0.5 if self.fields.get("use_rslora") else rank)


def _of_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with, as PEFT finds it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def module_of(name: str) -> str:
    """Return the name of a module without the models that it is inside of, which differ between programs."""
    name = name.removeprefix(_PREFIX).replace("language_model.", "")
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name


class Adapted(Directory):
    """A checkpoint directory with adapters merged into it."""

    def __init__(self, path: Path, adapters: Sequence[Adapter]) -> None:
        super().__init__(path)
        self.adapters = adapters
        known = {module_of(name.rpartition(".")[0]) for name in self.names}
        for adapter in adapters:
            if unknown := next((module for module in adapter.modules if module not in known), None):
                raise UserError(f"{adapter.files[1]}: {path} has no module {unknown}: the adapter is another model's")

    @classmethod
    def read(cls, path: Path) -> Adapted:
        """Return what a file that `compose` wrote describes."""
        said = read_json(path)
        return cls(Path(said["checkpoint"]), [Adapter(Path(each["path"]), each["weight"]) for each in said["adapters"]])

    def files(self) -> list[Path]:
        return [*super().files(), *(file for adapter in self.adapters for file in adapter.files)]

    def held(self, name: str, shape: Shape) -> Held | None:
        module = module_of(name.removesuffix(".weight"))
        base, adapters = super().held(name, shape), [each for each in self.adapters if module in each.modules]
        if base is None or not adapters or not name.endswith(".weight"):
            return base
        for adapter in adapters:
            adapter.check(module, shape)
        return Held(shape, "f32", lambda: _merged(base, module, adapters), base.parts, base.origin or base.format)


def _merged(base: Held, module: str, adapters: Sequence[Adapter]) -> np.ndarray:
    stored = base.read()
    plain = base.format in PLAIN
    values = stored.astype(np.float32) if plain else formats()[base.format].dequantise(stored, base.shape[-1])
    for adapter in adapters:
        values = adapter.merged(module, values)
    return values


def compose(checkpoint: Path, adapters: Sequence[Adapter]) -> Mapping[str, Any]:
    """Return what `Adapted.read` takes as JSON."""
    merged: Iterator[dict[str, Any]] = ({"path": str(each.path.absolute()), "weight": each.weight} for each in adapters)
    return {"checkpoint": str(checkpoint.absolute()), "adapters": [*merged]}
