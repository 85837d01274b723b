"""A source with adapters: `lora=DIR|hub id`, several in order with weights, as in `lora=a:0.5,org/b`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.engine.files import write_atomic
from stages.model.importers.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, COMPOSED, Adapter, compose
from stages.model.sources.hub import HubSource
from stages.model.sources.source import Listed, Source, listed


@frozen
class HubAdapter(HubSource):
    """An adapter on the hub."""

    patterns = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)

    def check(self, path: Path) -> None:
        _ = Adapter(path).files


@frozen
class Chosen:
    """One adapter of `lora=`, with its weight."""

    where: Path | HubAdapter
    weight: float

    @property
    def name(self) -> str:
        name = self.where.name if isinstance(self.where, HubAdapter) else self.where.resolve().name
        return re.sub(r"[^\w.-]+", "-", name) + (f"-{self.weight:g}" if self.weight != 1 else "")

    def identity(self) -> dict[str, Any]:
        """Return what is recorded of it, besides the digests of its files."""
        where = self.where.identity() if isinstance(self.where, HubAdapter) else {"kind": "directory"}
        return {"name": self.name, "weight": self.weight, **where}

    def fetch(self) -> Adapter:
        """Return the adapter, which is then on this machine. Raises UserError."""
        return Adapter(self.where.fetch() if isinstance(self.where, HubAdapter) else self.where, self.weight)

    def files(self) -> list[Path]:
        return [] if isinstance(self.where, HubAdapter) else Adapter(self.where).files


@frozen
class AdaptedSource(Source):
    """A source whose checkpoint gets adapters."""

    base: Source
    adapters: Sequence[Chosen]
    artifacts: Path

    @property
    def name(self) -> str:  # type: ignore[override]
        return "-".join([self.base.name, "lora", *(each.name for each in self.adapters)])

    @property
    def pinned(self) -> bool:
        sources = (each.where for each in self.adapters)
        return self.base.pinned and all(each.pinned for each in sources if isinstance(each, HubAdapter))

    def identity(self) -> Mapping[str, Any]:
        return {**self.base.identity(), "adapters": [each.identity() for each in self.adapters]}

    def is_public(self) -> bool:
        hubs = [each.where for each in self.adapters if isinstance(each.where, HubAdapter)]
        return len(hubs) == len(self.adapters) and all(hub.is_public() for hub in hubs) and self.base.is_public()

    def files(self) -> list[Path]:
        return [*self.base.files(), *(file for each in self.adapters for file in each.files())]

    def config_files(self) -> list[Path]:
        return self.base.config_files()

    def fetch(self) -> Path:
        checkpoint = self.base.fetch()
        if not checkpoint.is_dir():
            raise UserError(f"lora= needs a checkpoint in Hugging Face format, and {checkpoint} is a file")
        content = json.dumps(compose(checkpoint, [each.fetch() for each in self.adapters]), indent=1).encode()
        path = self.artifacts / self.name / COMPOSED
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
        return path

    def inventory(self) -> Mapping[str, Listed]:
        found = dict(self.base.inventory())
        for number, each in enumerate(self.adapters):
            files = each.where.inventory() if isinstance(each.where, HubAdapter) else listed(each.files())
            found |= {f"{number}/{name}": file for name, file in files.items()}
        return found


def adapted(base: Source, lora: str, artifacts: Path) -> Source:
    """Return a source with the adapters of `lora=`, or `base` if it names none. Raises UserError."""
    chosen = [_chosen(text, lora) for text in lora.split(",") if text]
    return AdaptedSource(base, tuple(chosen), artifacts) if chosen else base


def _chosen(text: str, lora: str) -> Chosen:
    match = re.fullmatch(r"(.+):([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)", text)
    name, weight = (match[1], float(match[2])) if match and not Path(text).is_dir() else (text, 1.0)
    path = Path(name).expanduser()
    if path.is_dir():
        return Chosen(path, weight)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return Chosen(HubAdapter(name, "main"), weight)
    raise UserError(f"lora={lora}: {name} is no directory and no hub id: give adapters as in lora=DIR:0.5,org/name")
