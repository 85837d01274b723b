"""The interface of sources of models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from llama_npu2.frozen import frozen
from stages.model.importers.directory import CONFIG_FILES


@frozen
class Listed:
    """A file of a checkpoint."""

    nbytes: int
    here: bool
    """Whether it is on this machine already."""


class Source(Protocol):
    """A place that can provide a checkpoint. The methods that have a body suit files on this machine."""

    name: str
    """The name of its directory below `artifacts/`."""

    @property
    def pinned(self) -> bool:
        """Whether identity and files determine the content. That of a hub's branch may change."""
        return True

    @property
    def anywhere(self) -> bool:
        """Whether any machine gets the very same checkpoint by the same `model=` and `revision=`, if it may."""
        return False

    def identity(self) -> Mapping[str, Any]:
        """Return what the user asked for, as JSON. It is part of the build key."""

    def is_public(self) -> bool:
        """Return whether anybody may have its weights, as far as that is known. A hub is asked."""
        return False

    def files(self) -> list[Path]:
        """Return the local files that make up the checkpoint; none for remote and generated ones."""
        return []

    def config_files(self) -> list[Path]:
        """Return those of `CONFIG_FILES` that it has, without fetching weights. Raises UserError."""
        return [path for path in self.files() if path.name in CONFIG_FILES]

    def fetch(self) -> Path:
        """Make the checkpoint present on this machine and return its path. Raises UserError."""

    def inventory(self) -> Mapping[str, Listed]:
        """Return the files that `fetch` would leave on this machine, by name. Raises UserError."""
        return listed(self.files())


def listed(files: Iterable[Path]) -> dict[str, Listed]:
    """Return the inventory of files on this machine."""
    return {path.name: Listed(path.stat().st_size, here=True) for path in files}
