"""Where a model comes from: `model=demo | hub id | local directory | random:<shapes>`.

Every source ends as a directory in Hugging Face format; `Checkpoint` is the checked view of one. Only safetensors are
read, never pickle and never code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2.errors import UserError
from stages.engine.files import Turn, atomic_directory, read_json, write_json
from stages.engine.places import ROOT
from stages.model import families
from stages.model.config import Config
from stages.model.families import Family, family_of, parse_config, read_config
from stages.model.presets import PRESETS

DEMO = ROOT / "models/demo"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_HUB_PATTERNS = ("config.json", "model*.safetensors", INDEX, *TOKENIZER_FILES)
_FLOAT_DTYPES = {"BF16": bfloat16, "F16": np.float16, "F32": np.float32}


class Source(Protocol):
    """A place that can provide a checkpoint directory."""

    @property
    def name(self) -> str:
        """Directory name below `artifacts/`."""

    def identity(self) -> Mapping[str, Any]:
        """What the user asked for; part of the build key."""

    def files(self) -> list[Path]:
        """Local files whose content decides whether the checkpoint changed (none for remote and generated ones)."""

    def fetch(self) -> Path:
        """Make the checkpoint directory present on this machine and return it. Raises UserError."""


@dataclass(frozen=True)
class LocalSource:
    name: str
    directory: Path

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "directory"}

    def files(self) -> list[Path]:
        names = {"config.json", SINGLE, INDEX, *TOKENIZER_FILES}
        found = {*self.directory.glob("*.safetensors"), *(self.directory / n for n in names)}
        return sorted(p for p in found if p.is_file())

    def fetch(self) -> Path:
        if not (self.directory / "config.json").is_file():
            raise UserError(f"{self.directory} has no config.json: model= needs a directory in Hugging Face format")
        return self.directory


@dataclass(frozen=True)
class HubSource:
    repo: str
    revision: str

    @property
    def name(self) -> str:
        return self.repo.replace("/", "--")

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "hub", "repo": self.repo, "revision": self.revision}

    def files(self) -> list[Path]:
        return []

    def fetch(self) -> Path:
        """Download what is missing into the Hugging Face cache (resumes; token from the usual places)."""
        from huggingface_hub import errors, snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        where = f"model {self.repo} (revision {self.revision})"
        try:
            return Path(snapshot_download(self.repo, revision=self.revision, allow_patterns=list(_HUB_PATTERNS)))
        except errors.GatedRepoError:
            raise UserError(
                f"{where} is gated: accept its licence at https://huggingface.co/{self.repo}, then run "
                "`hf auth login` or set HF_TOKEN"
            ) from None
        except errors.RevisionNotFoundError:
            raise UserError(f"{where}: no such revision, check revision=") from None
        except errors.RepositoryNotFoundError:
            raise UserError(
                f"{where} does not exist or is private: check the name, or run `hf auth login` / set HF_TOKEN"
            ) from None
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
            raise UserError(
                f"{where} is not in the local cache and the hub cannot be reached: check the network"
            ) from None
        except (errors.HfHubHTTPError, OSError, RuntimeError) as error:
            raise UserError(
                f"{where}: download failed ({_first_line(error)}): run the command again to resume"
            ) from None


@dataclass(frozen=True)
class RandomSource:
    """Seeded random weights in given shapes, generated once; for size and speed work."""

    name: str
    raw_config: Mapping[str, Any]
    directory: Path

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "random", "config": dict(self.raw_config)}

    def files(self) -> list[Path]:
        return []

    def fetch(self) -> Path:
        config = parse_config(self.raw_config, f"model=random:{self.name}")
        wanted = hashlib.sha256(json.dumps(self.raw_config, sort_keys=True).encode()).hexdigest()
        stamp = self.directory / "generated-from"
        if stamp.is_file() and stamp.read_text() == wanted:
            return self.directory
        with (
            Turn(self.directory.parents[1] / f".locks/{self.name}.lock"),
            atomic_directory(self.directory) as temporary,
        ):
            (temporary / "config.json").write_text(json.dumps(dict(self.raw_config), indent=2))
            write_random_weights(config, temporary / SINGLE)
            write_byte_tokenizer(config, temporary)
            (temporary / stamp.name).write_text(wanted)
        return self.directory


@dataclass(frozen=True)
class ArtifactsOnly:
    """A name under `artifacts/` whose source is not on this machine: usable as it is, not rebuildable."""

    name: str

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "artifacts"}

    def files(self) -> list[Path]:
        return []

    def fetch(self) -> Path:
        raise UserError(
            f"model={self.name}: artifacts/{self.name} needs a rebuild but its checkpoint is not on this machine: "
            "name the checkpoint it was built from"
        )


def resolve(model: str, artifacts: Path, revision: str = "main") -> Source:
    """The source that `model=` names. Raises UserError when it names nothing."""
    if model == "demo":
        return LocalSource("demo", DEMO)
    if model.startswith("random:"):
        return _random_source(model.removeprefix("random:"), artifacts)
    path = Path(model).expanduser()
    if path.is_dir():
        return LocalSource(_safe_name(path.resolve().name), path)
    if (artifacts / model).is_dir() and "/" not in model:
        return ArtifactsOnly(model)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model) and not model.startswith((".", "/")):
        return HubSource(model, revision)
    raise UserError(
        f"model={model}: no such directory; use demo, a local checkpoint directory, a hub id such as "
        f"meta-llama/Llama-3.2-1B-Instruct, or random:<{'|'.join(sorted(PRESETS))}|config.json>"
    )


def _random_source(shapes: str, artifacts: Path) -> RandomSource:
    if shapes in PRESETS:
        name, raw = f"random-{shapes}", PRESETS[shapes]
    elif Path(shapes).is_file():
        path = Path(shapes).resolve()
        stem = path.parent.name if path.name == "config.json" else path.stem
        name, raw = f"random-{_safe_name(stem)}", read_json(Path(shapes))
    else:
        raise UserError(
            f"model=random:{shapes}: neither a known shape ({', '.join(sorted(PRESETS))}) nor a config.json file"
        )
    return RandomSource(name, raw, artifacts / name / "checkpoint")


def _safe_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "model"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


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
        raise UserError(f"{path} is damaged ({_first_line(error)}): download it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {_first_line(error)}") from None
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


def write_random_weights(config: Config, path: Path) -> None:
    """Seeded weights, uniform with variance `1 / fan_in`, so that activations keep their scale through the layers."""
    from stages.weights.blobs import write_safetensors

    def tensor(item: tuple[int, tuple[str, tuple[int, ...]]]) -> np.ndarray:
        seed, (name, shape) = item
        if len(shape) == 1:
            return np.ones(shape, bfloat16)
        limit = np.float32(np.sqrt(3.0 / shape[1]))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            limit /= np.float32(np.sqrt(2.0 * config.layers))
        generator = np.random.Generator(np.random.SFC64(seed))
        out = np.empty(shape, bfloat16)
        rows = max(1, (1 << 22) // shape[1])
        for start in range(0, shape[0], rows):
            part = out[start : start + rows]
            part[...] = generator.random(part.shape, np.float32) * (2 * limit) - limit
        return out

    shapes = families.tensors(config)
    with ThreadPoolExecutor() as pool:
        window = _windowed(pool, tensor, list(enumerate(shapes.items())))
        write_safetensors(path, ((n, "bf16", s) for n, s in shapes.items()), window)


def _windowed(pool: ThreadPoolExecutor, work: Callable, items: list, ahead: int = 4) -> Iterator[np.ndarray]:
    """Results in order, at most `ahead` computed in advance, so that memory stays bounded."""
    pending = [pool.submit(work, item) for item in items[:ahead]]
    for i in range(len(items)):
        yield pending.pop(0).result()
        if i + ahead < len(items):
            pending.append(pool.submit(work, items[i + ahead]))


def write_byte_tokenizer(config: Config, directory: Path) -> None:
    """A tokenizer of single bytes for random weights; ids past the bytes decode to `<id>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: config.vocab]
    vocab = {token: i for i, token in enumerate(alphabet)}
    vocab |= {f"<{i}>": i for i in range(len(alphabet), config.vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=alphabet[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": False}))


def known_family(source: Source, recorded: Path) -> Family:
    """The family of a model before its checkpoint is there: by the configuration that `recorded` or the source has, the
    first of the table where neither has one yet."""
    for path in (recorded, *(p for p in source.files() if p.name == recorded.name)):
        if path.is_file():
            with contextlib.suppress(UserError):
                return family_of(read_json(path), str(path))
    return next(iter(families.families().values()))


def record_checkpoint(source: Source, digest: Callable[[Path], str | None], ignore: Sequence[str], work: Path) -> None:
    """Step action: check the checkpoint, in which tensors that match a pattern of `ignore` may be besides the model's;
    write its configuration and what identifies its content."""
    directory = source.fetch()
    opened = Checkpoint.open(directory, ignore)
    if not (directory / "tokenizer.json").is_file():
        raise UserError(
            f"{directory} has no tokenizer.json: convert its tokenizer with "
            "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    files = [*opened.weight_files(), *(p for name in TOKENIZER_FILES if (p := directory / name).is_file())]
    write_json(work / "build/config.json", read_json(directory / "config.json"))
    write_json(
        work / "build/checkpoint.json",
        {"source": source.identity(), "files": {p.name: digest(p) for p in files}},
    )


def copy_tokenizer(source: Source, work: Path) -> None:
    """Step action: copy the tokenizer's files, each checked to be readable."""
    directory = source.fetch()
    (work / "tokenizer").mkdir()
    for name in TOKENIZER_FILES:
        if (path := directory / name).is_file():
            if path.suffix == ".json":
                read_json(path)
            shutil.copyfile(path, work / "tokenizer" / name)
