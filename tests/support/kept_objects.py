"""Objects that earlier runs of the tests in this checkout compiled: a run compiles what has changed since.

They lie in pytest's cache with the secret that vouches for them, apart from what the user of this machine built. A run
copies them into its own `artifacts`, whose object cache checks each before it is used, and copies new ones back. With
`--cache-clear` everything is compiled.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from llama_npu2.trust import own_mac, settings
from stages.engine.places import CACHE

KEPT = "LLAMA_NPU2_TEST_OBJECTS"
"""Environment variable, for workers: the directory in pytest's cache."""
_SECRET = "secret"
_UNUSED = 14 * 86400
"""Seconds after which objects that no run used are removed."""


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not getattr(config, "cache", None):
        return
    kept = config.cache.mkdir("llama-npu2-objects")
    os.environ[KEPT] = str(kept)
    if (kept / _SECRET).exists():
        shutil.copy(kept / _SECRET, settings.directory() / _SECRET)
    else:
        own_mac(b"", "tests")  # makes one
        shutil.copy(settings.directory() / _SECRET, kept / _SECRET)


def give(artifacts: Path) -> None:
    """Fill the object cache of a run's artifacts, unless it is there."""
    if KEPT in os.environ and not (artifacts / CACHE).exists():
        copy_new(Path(os.environ[KEPT]), artifacts / CACHE)


def cache_of_runs(name: str, otherwise: Path) -> Path:
    """Return the directory of an object cache that runs share, `otherwise` where nothing is kept."""
    return Path(os.environ[KEPT]) / name if KEPT in os.environ else otherwise / name


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or KEPT not in os.environ:
        return
    kept, used = Path(os.environ[KEPT]), session.config._tmp_path_factory.getbasetemp() / "artifacts" / CACHE
    if used.exists():
        copy_new(used, kept)
    for entry in kept.rglob("*.json"):
        if time.time() - entry.stat().st_mtime > _UNUSED:
            entry.unlink()
            entry.with_suffix(".o").unlink(missing_ok=True)


def copy_new(source: Path, to: Path) -> None:
    """Copy what a cache has and the other has not, or used before: an entry after its object, each as a whole."""
    to.mkdir(parents=True, exist_ok=True)
    for entry in source.glob("*.json"):
        known = to / entry.name
        if not known.exists() or known.stat().st_mtime < entry.stat().st_mtime:
            for path in (entry.with_suffix(".o"), entry):
                part = to / f"{path.name}.{os.getpid()}"
                shutil.copy2(path, part)
                part.replace(to / path.name)
