"""What every source of a model offers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


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


def listed(files: Iterable[Path]) -> dict[str, Listed]:
    return {path.name: Listed(path.stat().st_size, here=True) for path in files}
