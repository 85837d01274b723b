"""A checkpoint directory in Hugging Face format. Only safetensors are read, never pickle and never code."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError, first_line
from llama_npu2.frozen import frozen
from llama_npu2.schema import load_json
from llama_npu2.text.chat_template import TEMPLATES
from llama_npu2.text.pooling import EMBEDDING, LAST_TOKEN
from stages.engine.files import read_json
from stages.engine.lazy import np
from stages.model import families
from stages.model.config import Config, ConfigFields
from stages.model.families.place import Location
from stages.model.importers import PLAIN, Held, methods
from stages.weights.format import Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG_FILES = ("config.json", "quantize_config.json")
"""The second is AutoGPTQ's, which others keep inside the first."""
POOLING = "*_Pooling/config.json"
"""What sentence-transformers writes about how hidden states become an embedding."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "modules.json",
    POOLING,
)
"""Patterns of the names of files that are taken over."""

_OF_A_BYTE = {"F8_E4M3": "float8_e4m3fn"}
"""Names of dtypes in safetensors -> in ml_dtypes."""

_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", LAST_TOKEN)

DAMAGED = "the checkpoint is incomplete or damaged, download it again"


@frozen
class Entry:
    """A tensor of a file; `dtype` is the name that safetensors has for it."""

    file: Path
    dtype: str
    shape: Shape


class Tensors:
    """The tensors of a directory's safetensors files, by name. Raises UserError where a header cannot be read."""

    def __init__(self, directory: Path, files: Sequence[Path] = ()) -> None:
        """Args: `files`: those of the directory that are read; nothing: the checkpoint's."""
        self.directory = directory
        self.files = files or _files(directory)
        self.entries = {name: entry for file in self.files for name, entry in _header(file)}

    def read(self, name: str) -> np.ndarray:
        import ml_dtypes  # noqa: F401 - tells numpy what bfloat16 is, which safetensors asks for by name
        from safetensors import safe_open

        if self.entries[name].dtype in _OF_A_BYTE:
            return self._bytes(name).view(_OF_A_BYTE[self.entries[name].dtype])
        with safe_open(self.entries[name].file, framework="numpy") as file:
            return file.get_tensor(name)

    def _bytes(self, name: str) -> np.ndarray:
        """Return a tensor whose elements are bytes, u8. The library knows their dtypes, but numpy does not."""
        entry = self.entries[name]
        with entry.file.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            begin, _ = json.loads(file.read(size))[name]["data_offsets"]
        return np.memmap(entry.file, np.uint8, "r", 8 + size + begin, entry.shape)

    def fails(self, name: str, why: str) -> UserError:
        return UserError(f"{self.entries[name].file}: tensor {name} {why}")

    def part(self, name: str, dtypes: tuple[str, ...], shape: Shape | None = None) -> Entry:
        """Return the entry of a part, which has to be there with one of `dtypes`, and with `shape` unless that is None.

        Raises UserError.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise UserError(f"{self.directory}: tensor {name} is missing: the checkpoint is incomplete")
        if entry.dtype not in dtypes:
            raise self.fails(name, f"is {entry.dtype}: only {', '.join(dtypes)} are supported")
        if shape is not None and entry.shape != shape:
            raise self.fails(name, f"has shape {list(entry.shape)}, its configuration implies {list(shape)}")
        return entry

    def plain(self, name: str) -> Held:
        """Return a tensor that is not quantised. Raises UserError."""
        entry = self.part(name, tuple(form.upper() for form in PLAIN))
        return Held(entry.shape, entry.dtype.lower(), partial(self.read, name), (name,))


class Directory:
    """A container: see `stages.model.importers`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path / "config.json")
        self.fields = _config(path)

    @cached_property
    def tensors(self) -> Tensors:
        return Tensors(self.path)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.tensors.entries)

    def files(self) -> list[Path]:
        return [*self.tensors.files, *self._tokenizer_files()]

    def _tokenizer_files(self) -> list[Path]:
        return [path for pattern in TOKENIZER_FILES for path in sorted(self.path.glob(pattern)) if path.is_file()]

    def where_is(self, name: str) -> str:
        return str(self.tensors.entries[name].file)

    def location(self, config: Config, weight: families.Weight) -> Location:
        return families.location(config, weight)

    def held(self, name: str, shape: Shape) -> Held | None:
        if self._find_quantised and (tensor := self._find_quantised(self.tensors, name, shape)):
            return tensor
        return self.tensors.plain(name) if name in self.names else None

    @cached_property
    def _find_quantised(self) -> Callable[[Tensors, str, Shape], Held | None] | None:
        """The function of the method in `quantization_config` that finds quantised tensors; None without a method."""
        values = self.fields.get("quantization_config")
        if values is None:
            return None
        where = f"{self.where}: quantization_config"
        if not isinstance(values, dict):
            raise UserError(f"{where} must be an object or null")
        fields, method = ConfigFields(values, where), values.get("quant_method")
        if not isinstance(method, str) or method not in methods():
            raise fields.fails("quant_method", method, f"only {', '.join(methods())} are read")
        if all(entry.dtype.lower() in PLAIN for entry in self.tensors.entries.values()):
            # Other readers take such weights for damaged ones, and quantised numbers may have lost their scales.
            raise fields.fails("quant_method", method, "no tensor is quantised: take quantization_config out")
        return methods()[method].open(fields)

    def tokenizer(self) -> Mapping[str, bytes]:
        if not (self.path / "tokenizer.json").is_file():
            raise UserError(
                f"{self.path} has no tokenizer.json: convert its tokenizer with "
                "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        files = self._tokenizer_files()
        for path in files:
            if path.suffix == ".json" and path.name != "modules.json":
                read_json(path, DAMAGED)
        found = {path.name: path.read_bytes() for path in files if path.parent == self.path}
        if further := {
            path.stem: path.read_text(encoding="utf-8")
            for path in files
            if path.suffix != ".json" and path.name not in found
        }:
            found[Path(TEMPLATES).name] = json.dumps(further).encode()
        if modules := found.pop("modules.json", None):
            found[Path(EMBEDDING).name] = json.dumps(self._embedding(modules)).encode()
        return found

    def _embedding(self, modules: bytes) -> Mapping[str, Any]:
        """Return how sentence-transformers makes an embedding, from the content of its `modules.json`.

        Raises UserError.
        """
        try:
            kinds = [module["type"].rpartition(".")[2] for module in load_json(modules)]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{self.path / 'modules.json'} cannot be read: {DAMAGED}") from None
        pooling = []
        for path in self.path.glob(POOLING):
            fields = read_json(path, DAMAGED)
            old = [name.removeprefix("pooling_mode_") for name, value in fields.items() if value is True]
            pooling += (
                [fields["pooling_mode"]] if "pooling_mode" in fields else [each for each in old if each in _POOLINGS]
            )
        others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
        return {"pooling": pooling, "normalised": "Normalize" in kinds, "others": others}


def _config(directory: Path) -> dict[str, Any]:
    """Return the fields of `config.json`, with those that old tools wrote into a file next to it."""
    main, second = (directory / name for name in CONFIG_FILES)
    fields = read_json(main, DAMAGED)
    if fields.get("quantization_config") is None and second.is_file():
        fields["quantization_config"] = {"quant_method": "gptq", **read_json(second, DAMAGED)}
    return fields


def _files(directory: Path) -> list[Path]:
    """Return the files of the index if there is one, else the only file. Raises UserError.

    The file may have any name (AutoGPTQ's says bits and group size).
    """
    index = directory / INDEX
    if index.is_file():
        return _indexed(index)
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    files = sorted(p for p in directory.iterdir() if p.suffix == ".safetensors" and p.is_file())
    if len(files) == 1:
        return files
    pickled = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pth", ".pt", ".ckpt"))
    if pickled:
        raise UserError(
            f"{directory} holds only pickle files ({pickled[0]}): convert it to safetensors, pickle is not read"
        )
    raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}: not a complete checkpoint")


def _indexed(index: Path) -> list[Path]:
    weight_map = read_json(index, DAMAGED).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map must be a non-empty object")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{index}: weight_map names {json.dumps(file)[:99]}: only plain *.safetensors names are read"
            )
        # Not Path.is_file, which raises where a name is longer than names can be.
        if not os.path.isfile(index.parent / file):  # noqa: PTH113
            raise UserError(f"{index.parent / file[:99]} is missing, {INDEX} names it: download the checkpoint again")
    return [index.parent / file for file in sorted(set(weight_map.values()))]


def _header(path: Path) -> list[tuple[str, Entry]]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({first_line(error)}): download it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    with file:
        slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - safe_open is not a mapping
        return [(name, Entry(path, view.get_dtype(), tuple(view.get_shape()))) for name, view in slices]
