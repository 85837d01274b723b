"""A checkpoint directory in Hugging Face format, checked. Only safetensors are read, never pickle and never code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2.errors import UserError
from stages.engine.files import read_json
from stages.model import families
from stages.model.config import Config
from stages.model.families import read_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_FLOAT_DTYPES = {"BF16": bfloat16, "F16": np.float16, "F32": np.float32}


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint directory: its configuration and where each tensor is."""

    directory: Path
    config: Config
    files: Mapping[str, str]
    """Tensor name -> file name."""

    @classmethod
    def open(cls, directory: Path, ignore: Sequence[str] = ("*",)) -> Checkpoint:
        """Read the configuration and every safetensors header; check names, shapes and dtypes. Raises UserError.

        `ignore`: patterns of tensors that may be there besides the model's; any, unless something else is said.
        """
        config = read_config(directory / "config.json")
        wanted = families.tensors(config)
        files = _tensor_files(directory)
        found = {}
        for file in sorted(set(files.values())):
            for name, shape in _checked_header(directory / file, wanted, (*families.of(config).ignored, *ignore)):
                found[name] = file
                if shape != wanted[name]:
                    raise UserError(
                        f"{directory / file}: tensor {name} has shape {list(shape)}, config.json implies "
                        f"{list(wanted[name])}"
                    )
        missing = [name for name in wanted if name not in found]
        if missing:
            raise UserError(
                f"{directory}: {len(missing)} tensors are missing, first {missing[0]}: "
                "the checkpoint is incomplete or not the model that config.json describes"
            )
        return cls(directory, config, found)

    def weight_files(self) -> list[Path]:
        return [self.directory / name for name in sorted(set(self.files.values()))]

    def tensor(self, name: str) -> np.ndarray:
        """The named tensor as bf16, converted with round-to-nearest-even if the file holds another float type."""
        from safetensors import safe_open

        with safe_open(self.directory / self.files[name], framework="numpy") as file:
            return file.get_tensor(name).astype(bfloat16, copy=False)


def _tensor_files(directory: Path) -> dict[str, str]:
    """Tensor or shard names to files in the directory, from the index if there is one."""
    index = directory / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: weight_map must be a non-empty object")
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise UserError(
                    f"{index}: weight_map names {json.dumps(file)}: only plain *.safetensors names are read"
                )
            if not (directory / file).is_file():
                raise UserError(f"{directory / file} is missing, {INDEX} names it: download the checkpoint again")
        return weight_map
    if (directory / SINGLE).is_file():
        return {"": SINGLE}
    pickled = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pth", ".pt", ".ckpt"))
    if pickled:
        raise UserError(
            f"{directory} holds only pickle files ({pickled[0]}): convert it to safetensors, pickle is not read"
        )
    raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}: not a complete checkpoint")


def _checked_header(
    path: Path, wanted: Mapping[str, tuple[int, ...]], ignore: Sequence[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each wanted tensor in a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({first_line(error)}): download it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    with file:
        for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
            if name not in wanted:
                if any(fnmatchcase(name, pattern) for pattern in ignore):
                    continue
                raise UserError(
                    f"{path}: unexpected tensor {name}: not part of the model that config.json describes; "
                    f"ignore={name} leaves it out"
                )
            view = file.get_slice(name)
            if view.get_dtype() not in _FLOAT_DTYPES:
                raise UserError(
                    f"{path}: tensor {name} is {view.get_dtype()}: only {', '.join(_FLOAT_DTYPES)} are supported"
                )
            yield name, tuple(view.get_shape())


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
