"""The sources of models: `model=demo | hub id | GGUF file on the hub | local directory | GGUF file | random:<shapes>`.

Every source provides a path that `stages.model.checkpoint` opens.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError, closest
from llama_npu2.schema import load_json
from llama_npu2.text import tokenizer_limits
from stages.engine.files import read_json, write_json
from stages.engine.places import CHECKPOINT, CONFIG
from stages.model import families
from stages.model.checkpoint import Checkpoint, container
from stages.model.config import Config
from stages.model.families import parse_config
from stages.model.importers.directory import CONFIG_FILES, DAMAGED
from stages.model.importers.gguf_parts import parts, whole_name
from stages.model.sources.adapted import AdaptedSource, adapted
from stages.model.sources.generated import RandomSource
from stages.model.sources.hub import HubGguf, HubSource
from stages.model.sources.local import DEMO, ArtifactsOnly, GgufSource, LocalSource
from stages.model.sources.source import Listed, Source


def resolve(model: str, artifacts: Path, revision: str = "main", elsewhere: bool = False) -> Source:
    """Return the source that `model=` names. UserError if it names nothing.

    Args:
        elsewhere: Whether a name may be that of artifacts that are not on this machine yet.
    """
    if model == "demo":
        return LocalSource("demo", DEMO)
    if model.startswith("random:"):
        return _random_source(model.removeprefix("random:"), artifacts)
    path = Path(model).expanduser()
    if path.is_dir():
        return LocalSource(safe_name(path.resolve().name), path)
    if path.suffix == ".gguf" and path.is_file():
        return GgufSource(safe_name(whole_name(path.name).removesuffix(".gguf")), parts(path)[0])
    if ((artifacts / model).is_dir() or elsewhere) and safe_name(model) == model:
        return ArtifactsOnly(model)
    if path.is_file():
        raise UserError(
            f"model={model}: is a file, and not one that ends in .gguf: give the directory that holds it, {path.parent}"
        )
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model) and not model.startswith((".", "/")):
        return HubSource(model, revision)
    if match := re.fullmatch(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/((?:[\w-][\w.-]*/)*[\w-][\w.-]*\.gguf)", model):
        return HubGguf(match[1], revision, match[2])
    built = [each.name for each in artifacts.iterdir() if each.name[0] != "."] if artifacts.is_dir() else []
    close = closest(model, ["demo", *sorted(built)])
    use = (
        "use demo, a local checkpoint, a hub id such as meta-llama/Llama-3.2-1B-Instruct or "
        "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf, or random:SHAPES"
    )
    hint = f"did you mean {close}?" if close else use
    raise UserError(f"model={model}: no such directory or GGUF file: {hint}")


def _random_source(shapes: str, artifacts: Path) -> RandomSource:
    from stages.model.presets import PRESETS  # few builds need them

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
    """Return a text with the characters that a directory's name can have."""
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "model"


def config_of(source: Source) -> Config:
    """Return the configuration of a model without fetching a hub's weights, or making any. Raises UserError."""
    return parse_config(*config_fields(source))


def config_fields(source: Source) -> tuple[Mapping[str, Any], str]:
    """Return the fields of a model's `config.json`, and where they were found, as `config_of` finds them."""
    if isinstance(source, ArtifactsOnly):
        raise UserError(f"model={source.name}: it is built, and its checkpoint is not here: see doit du")
    if isinstance(source, AdaptedSource):
        return config_fields(source.base)
    if isinstance(source, RandomSource):
        return source.raw_config, f"model=random:{source.name}"
    if isinstance(source, HubSource) and not isinstance(source, HubGguf):
        files = {path.name: path for path in source.config_files()}
        if CONFIG_FILES[0] not in files:
            raise source.other_format()
        return read_json(files[CONFIG_FILES[0]], DAMAGED), str(files[CONFIG_FILES[0]])
    within = container(source.fetch())
    return within.fields, within.where


def known_config(source: Source, recorded: Path) -> Config:
    """Return the configuration of a model before its checkpoint is on this machine.

    It is the one that the source or `recorded` has. If neither has one that can be read, it is a Llama's: a build will
    say why it cannot be read.
    """
    return _known(source, recorded) or _a_llama()


def known_positions(source: Source, recorded: Path) -> int | None:
    """Return the longest context of a model before its checkpoint is on this machine; None if it is not known yet.

    `recorded` as in `known_config`.
    """
    config = _known(source, recorded)
    return config.max_seq if config else None


def _known(source: Source, recorded: Path) -> Config | None:
    if isinstance(source, AdaptedSource):
        return _known(source.base, recorded)
    if isinstance(source, RandomSource):
        return source.config
    with contextlib.suppress(UserError):
        if isinstance(source, GgufSource) or (isinstance(source, HubGguf) and not recorded.is_file()):
            # The configuration is in the file: what was recorded may be that of another one.
            return _read_inside(source.fetch(), source.fetch().stat().st_mtime_ns)
        here = source.config_files() if source.files() else []
        files = [path for path in (*here, recorded) if path.name == recorded.name and path.is_file()]
        files = files or [path for path in source.config_files() if path.name == recorded.name]
        return _read_once(files[0], files[0].stat().st_mtime_ns) if files else None
    return None


@functools.cache
def _read_inside(path: Path, changed: int) -> Config:
    within = container(path)
    return parse_config(within.fields, within.where)


@functools.cache
def _read_once(path: Path, changed: int) -> Config:
    return families.read_config(path)


@functools.cache
def _a_llama() -> Config:
    from stages.model.presets import PRESETS

    return parse_config(PRESETS["llama-3.2-1b"], "model=random:llama-3.2-1b")


def quantised(source: Source, recorded: Path) -> bool:
    """Return whether a checkpoint may hold quantised weights, as far as its configuration tells.

    `recorded` has the configuration if it was read before.
    """
    if isinstance(source, AdaptedSource):
        return quantised(source.base, recorded)
    if isinstance(source, GgufSource | HubGguf):
        return True
    files = [recorded] if isinstance(source, HubSource) and recorded.is_file() else []
    # A build will say why the configuration cannot be read.
    with contextlib.suppress(UserError):
        files = files or source.config_files()
        return any(path.name != recorded.name or read_json(path).get("quantization_config") for path in files)
    return False


def record_checkpoint(source: Source, digest: Callable[[Path], str | None], ignore: Sequence[str], work: Path) -> None:
    """Check the checkpoint, and write its configuration and what identifies its content (step action).

    Args:
        ignore: Patterns of tensors that it may have besides the model's.
    """
    opened = Checkpoint.open(source.fetch(), ignore)
    write_json(work / CONFIG, opened.fields)
    write_json(
        work / CHECKPOINT,
        {"source": source.identity(), "files": _digests(opened.files, digest)},
    )


def _digests(files: Sequence[Path], digest: Callable[[Path], str | None]) -> dict[str, str | None]:
    """Return the digest of each file by its name. Of those that share a name, later ones get their number."""
    found: dict[str, str | None] = {}
    for number, path in enumerate(files):
        found[f"{number}/{path.name}" if path.name in found else path.name] = digest(path)
    return found


def copy_tokenizer(source: Source, work: Path) -> None:
    """Write the tokenizer's files, of which each is checked to be readable and harmless (step action)."""
    (work / "tokenizer").mkdir()
    checkpoint = source.fetch()
    for name, content in container(checkpoint).tokenizer().items():
        if name == "tokenizer.json":
            _judge_tokenizer(checkpoint, content)
        (work / "tokenizer" / name).write_bytes(content)


def _judge_tokenizer(checkpoint: Path, content: bytes) -> None:
    """Raise UserError for a tokenizer that the runtime would refuse."""
    path = checkpoint / "tokenizer.json" if checkpoint.is_dir() else checkpoint
    try:
        with tokenizer_limits.explained(path):
            tokenizer_limits.judged(io.BytesIO(content))
            model = load_json(content).get("model")
            tokenizer_limits.judge_model(model if isinstance(model, dict) else {})
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}): download it again") from None
