"""Where a model comes from: `model=demo | hub id | local directory | GGUF file | random:<shapes>`.

Every source ends as a path that `stages.model.checkpoint` opens.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llama_npu2 import tokenizer_limits
from llama_npu2.errors import UserError, first_line
from llama_npu2.regular import read_regular
from llama_npu2.schema import load_json
from stages.engine.files import atomic_directory, read_json, require_space, write_json
from stages.engine.places import CHECKPOINT, CONFIG, GENERATED, ROOT, lock_file
from stages.engine.progress import Bar
from stages.engine.room import no_room
from stages.engine.turn import Turn
from stages.model import families
from stages.model.checkpoint import Checkpoint, container
from stages.model.config import Config
from stages.model.families import Family, family_of, parse_config
from stages.model.importers.directory import CONFIG_FILES, DAMAGED, INDEX, SINGLE, TOKENIZER_FILES
from stages.model.presets import PRESETS
from stages.model.random_weights import RECIPE, random_tensors, write_byte_tokenizer, write_random_weights
from stages.weights.blobs import safetensors_bytes

DEMO = ROOT / "models/demo"
_HUB_PATTERNS = (*CONFIG_FILES, "model*.safetensors", "gptq_model*.safetensors", INDEX, *TOKENIZER_FILES)


@dataclass(frozen=True)
class Listed:
    """A file of a checkpoint. `here`: on this machine already."""

    nbytes: int
    here: bool


class Source(Protocol):
    """A place that can provide a checkpoint."""

    @property
    def name(self) -> str:
        """Directory name below `artifacts/`."""

    def identity(self) -> Mapping[str, Any]:
        """What the user asked for; part of the build key."""

    @property
    def pinned(self) -> bool:
        """Whether identity and files decide on the content: what a hub calls by a branch's name may change."""

    def is_public(self) -> bool:
        """Whether anybody may have its weights, as far as that is known. A hub is asked."""

    def files(self) -> list[Path]:
        """Local files whose content decides whether the checkpoint changed (none for remote and generated ones)."""

    def config_files(self) -> list[Path]:
        """Those of `CONFIG_FILES`, without the weights; none where there are no such files. Raises UserError."""

    def fetch(self) -> Path:
        """Make the checkpoint present on this machine and return its path. Raises UserError."""

    def inventory(self) -> Mapping[str, Listed]:
        """The files that `fetch` leaves here, without fetching them. Raises UserError."""


def _listed(files: Iterable[Path]) -> dict[str, Listed]:
    return {path.name: Listed(path.stat().st_size, here=True) for path in files}


@dataclass(frozen=True)
class LocalSource:
    name: str
    directory: Path
    pinned = True

    def is_public(self) -> bool:
        return self.directory == DEMO

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "directory"}

    def files(self) -> list[Path]:
        names = {*CONFIG_FILES, SINGLE, INDEX, *TOKENIZER_FILES}
        found = {*self.directory.glob("*.safetensors"), *(self.directory / n for n in names)}
        return sorted(p for p in found if p.is_file())

    def config_files(self) -> list[Path]:
        return [path for path in self.files() if path.name in CONFIG_FILES]

    def fetch(self) -> Path:
        if not (self.directory / "config.json").is_file():
            raise UserError(f"{self.directory} has no config.json: model= needs a directory in Hugging Face format")
        return self.directory

    def inventory(self) -> Mapping[str, Listed]:
        return _listed(self.files())


@dataclass(frozen=True)
class GgufSource:
    name: str
    file: Path
    pinned = True

    def is_public(self) -> bool:
        return False

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "gguf"}

    def files(self) -> list[Path]:
        return [self.file]

    def config_files(self) -> list[Path]:
        return []

    def fetch(self) -> Path:
        return self.file

    def inventory(self) -> Mapping[str, Listed]:
        return _listed(self.files())


@dataclass(frozen=True)
class HubSource:
    repo: str
    revision: str

    @property
    def name(self) -> str:
        return self.repo.replace("/", "--")

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "hub", "repo": self.repo, "revision": self.revision}

    @property
    def pinned(self) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None

    def is_public(self) -> bool:
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(self.repo, revision=self.revision, timeout=10, token=False)
        except Exception:  # whatever keeps it from being seen without a token
            return False
        return not info.private and not info.gated

    def files(self) -> list[Path]:
        return []

    def config_files(self) -> list[Path]:
        directory = self._download(CONFIG_FILES)
        return [path for name in CONFIG_FILES if (path := directory / name).is_file()]

    def fetch(self) -> Path:
        """Download what is missing into the Hugging Face cache (resumes; token from the usual places)."""
        return self._download(_HUB_PATTERNS)

    def inventory(self) -> Mapping[str, Listed]:
        from huggingface_hub import HfApi, try_to_load_from_cache
        from huggingface_hub.utils import filter_repo_objects

        with self._explained():
            info = HfApi().model_info(self.repo, revision=self.revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        return {
            name: Listed(sizes[name], isinstance(try_to_load_from_cache(self.repo, name, revision=info.sha), str))
            for name in filter_repo_objects(sizes, allow_patterns=list(_HUB_PATTERNS))
        }

    def _download(self, patterns: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download

        with self._explained():
            wanted = list(patterns)
            return Path(snapshot_download(self.repo, revision=self.revision, allow_patterns=wanted, tqdm_class=Bar))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What the hub's client raises, as UserError."""
        from huggingface_hub import constants, errors

        where = f"model {self.repo} (revision {self.revision})"
        try:
            yield
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
            cache = Path(constants.HF_HUB_CACHE)
            if full := no_room(error, [cache], elsewhere="set HF_HOME to another place"):
                raise UserError(f"{where}: {full}") from None
            raise UserError(
                f"{where}: download failed ({first_line(error)}): run the command again to resume"
            ) from None


@dataclass(frozen=True)
class RandomSource:
    """Seeded random weights in given shapes, generated once; for size and speed work."""

    name: str
    raw_config: Mapping[str, Any]
    directory: Path
    pinned = True

    def is_public(self) -> bool:
        return True

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "random", "config": dict(self.raw_config), "recipe": RECIPE}

    def files(self) -> list[Path]:
        return []

    def config_files(self) -> list[Path]:
        return []

    @property
    def config(self) -> Config:
        """Raises UserError."""
        return parse_config(self.raw_config, f"model=random:{self.name}")

    def inventory(self) -> Mapping[str, Listed]:
        if self._made:
            return _listed(path for path in self.directory.iterdir() if path.is_file())
        with tempfile.TemporaryDirectory() as beside:
            write_byte_tokenizer(self.config, Path(beside))
            sizes = {path.name: path.stat().st_size for path in Path(beside).iterdir()}
        sizes[SINGLE] = safetensors_bytes(random_tensors(self.config))
        return {name: Listed(size, here=False) for name, size in sizes.items()}

    @property
    def _wanted(self) -> str:
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    @property
    def _stamp(self) -> Path:
        """Says what the weights were made from."""
        return self.directory / GENERATED

    @property
    def _made(self) -> bool:
        try:
            return read_regular(self._stamp, len(self._wanted)).decode() == self._wanted
        except (OSError, ValueError):
            return False

    def fetch(self) -> Path:
        config = self.config
        if self._made:
            return self.directory
        require_space(self.directory, safetensors_bytes(random_tensors(config)), f"model=random:{self.name}")
        with (
            Turn(lock_file(self.directory.parents[1], self.name)),
            atomic_directory(self.directory, GENERATED) as temporary,
        ):
            (temporary / "config.json").write_text(json.dumps(dict(self.raw_config), indent=2))
            write_random_weights(config, temporary / SINGLE)
            write_byte_tokenizer(config, temporary)
            (temporary / self._stamp.name).write_text(self._wanted)
        return self.directory


@dataclass(frozen=True)
class ArtifactsOnly:
    """A name under `artifacts/` whose source is not on this machine: usable as it is, not rebuildable."""

    name: str
    pinned = False

    def is_public(self) -> bool:
        return False

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "artifacts"}

    def files(self) -> list[Path]:
        return []

    def config_files(self) -> list[Path]:
        return []

    def fetch(self) -> Path:
        raise UserError(
            f"model={self.name}: artifacts/{self.name} needs a rebuild but its checkpoint is not on this machine: "
            "name the checkpoint it was built from"
        )

    def inventory(self) -> Mapping[str, Listed]:
        return {}


def resolve(model: str, artifacts: Path, revision: str = "main", elsewhere: bool = False) -> Source:
    """The source that `model=` names. `elsewhere`: a name may be that of artifacts that are not here yet. Raises
    UserError when it names nothing."""
    if model == "demo":
        return LocalSource("demo", DEMO)
    if model.startswith("random:"):
        return _random_source(model.removeprefix("random:"), artifacts)
    path = Path(model).expanduser()
    if path.is_dir():
        return LocalSource(safe_name(path.resolve().name), path)
    if path.suffix == ".gguf" and path.is_file():
        return GgufSource(safe_name(path.stem), path)
    if ((artifacts / model).is_dir() or elsewhere) and safe_name(model) == model:
        return ArtifactsOnly(model)
    if path.is_file():
        raise UserError(
            f"model={model}: is a file, and not one that ends in .gguf: give the directory that holds it, {path.parent}"
        )
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model) and not model.startswith((".", "/")):
        return HubSource(model, revision)
    raise UserError(
        f"model={model}: no such directory or GGUF file; use demo, a local checkpoint, a hub id such as "
        f"meta-llama/Llama-3.2-1B-Instruct, or random:<{'|'.join(sorted(PRESETS))}|config.json>"
    )


def _random_source(shapes: str, artifacts: Path) -> RandomSource:
    if shapes in PRESETS:
        name, raw = f"random-{shapes}", PRESETS[shapes]
    elif Path(shapes).is_file():
        path = Path(shapes).resolve()
        stem = path.parent.name if path.name == "config.json" else path.stem
        name, raw = f"random-{safe_name(stem)}", read_json(Path(shapes), "give a config.json")
    else:
        raise UserError(
            f"model=random:{shapes}: neither a known shape ({', '.join(sorted(PRESETS))}) nor a config.json file"
        )
    return RandomSource(name, raw, artifacts / name / "checkpoint")


def safe_name(text: str) -> str:
    """A text as part of a directory's name."""
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "model"


def config_of(source: Source) -> Config:
    """Of a model whose weights may not be here: none are fetched or made. Raises UserError."""
    if isinstance(source, ArtifactsOnly):
        raise UserError(f"model={source.name}: it is built, and its checkpoint is not here: see doit du")
    if isinstance(source, RandomSource):
        return source.config
    if isinstance(source, HubSource):
        files = {path.name: path for path in source.config_files()}
        if CONFIG_FILES[0] not in files:
            raise UserError(f"model {source.repo} has no {CONFIG_FILES[0]}: model= needs one in Hugging Face format")
        return families.read_config(files[CONFIG_FILES[0]], DAMAGED)
    held = container(source.fetch())
    return parse_config(held.fields, held.where)


def known_family(source: Source, recorded: Path) -> Family:
    """The family of a model before its checkpoint is there: by the configuration that `recorded` or the source has, the
    first of the table where neither has one yet."""
    for path in (recorded, *(p for p in source.files() if p.name == recorded.name)):
        if path.is_file():
            with contextlib.suppress(UserError):
                return family_of(read_json(path), str(path))
    return next(iter(families.families().values()))


def known_positions(source: Source, recorded: Path) -> int | None:
    """How long a context the model knows, before its checkpoint is there; None where that is not known yet. `recorded`
    as in `known_family`."""
    if isinstance(source, RandomSource):
        return source.config.max_seq
    files = [recorded] if recorded.is_file() else []
    with contextlib.suppress(UserError):
        files = files or [path for path in source.config_files() if path.name == recorded.name]
    for path in files:
        with contextlib.suppress(UserError):
            return families.read_config(path).max_seq
    return None


def quantised(source: Source, recorded: Path) -> bool:
    """Whether a checkpoint may hold quantised weights, as far as that is known without them. `recorded`: its
    configuration, where it was seen before."""
    if isinstance(source, GgufSource):
        return True
    files = [recorded] if isinstance(source, HubSource) and recorded.is_file() else []
    # Whoever builds is told why it cannot be had.
    with contextlib.suppress(UserError):
        files = files or source.config_files()
        return any(path.name != recorded.name or read_json(path).get("quantization_config") for path in files)
    return False


def record_checkpoint(source: Source, digest: Callable[[Path], str | None], ignore: Sequence[str], work: Path) -> None:
    """Step action: check the checkpoint, in which tensors that match a pattern of `ignore` may be besides the model's;
    write its configuration and what identifies its content."""
    opened = Checkpoint.open(source.fetch(), ignore)
    write_json(work / CONFIG, opened.fields)
    write_json(
        work / CHECKPOINT,
        {"source": source.identity(), "files": {p.name: digest(p) for p in opened.files}},
    )


def copy_tokenizer(source: Source, work: Path) -> None:
    """Step action: write the tokenizer's files, each checked to be readable, and to be harmless to whoever runs it."""
    (work / "tokenizer").mkdir()
    checkpoint = source.fetch()
    for name, content in container(checkpoint).tokenizer().items():
        if name == "tokenizer.json":
            _judge_tokenizer(checkpoint, content)
        (work / "tokenizer" / name).write_bytes(content)


def _judge_tokenizer(checkpoint: Path, content: bytes) -> None:
    """Raises UserError for one that the runtime would refuse."""
    path = checkpoint / "tokenizer.json" if checkpoint.is_dir() else checkpoint
    try:
        with tokenizer_limits.explained(path):
            tokenizer_limits.judged(io.BytesIO(content))
            model = load_json(content).get("model")
            tokenizer_limits.judge_model(model if isinstance(model, dict) else {})
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}): download it again") from None
