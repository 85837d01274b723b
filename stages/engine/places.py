"""Paths: of the project, whatever the working directory, and of files in an artifact directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "runtime"
KERNELS = ROOT / "kernel_src"

CONFIG = Path("build/config.json")
"""The model's configuration. This path and those below are relative to an artifact directory."""
CHECKPOINT = Path("build/checkpoint.json")
"""The identity of the checkpoint's content."""
PLAN = Path("build/plan.json")
PACKING = Path("build/packing.json")
"""The part of the plan that packing reads: weights and tables."""
CALIBRATED = Path("build/calibrated")
"""Weights that were rounded for their inputs from a text, and activations between layers."""
CALIBRATION = Path("build/calibration.json")
"""The identity of that text."""
WEIGHTS = Path("build/weights.json")
"""The place of each packed weight."""
MODULES = Path("build/modules")
LOGS = Path("build/logs")
"""Messages of the compilers of programs."""
INCOMING = Path("build/incoming")
"""Files that are being received from a remote."""
PULLED = Path("build/pulled.json")
"""When the offer that was pulled last was pushed, and by whom."""
GENERATED = "generated-from"
"""A file in checkpoints that can be made again."""
CACHE = Path(".cache/objects")
"""Objects of all models, below `artifacts/`."""
STORE = Path(".store")
"""What `on=local` leaves for later builds, below `artifacts/`."""
SCRATCH = ".worker-"
"""The beginning of the names of directories below `artifacts/` in which workers run steps."""
OBJECTS = Path("build/objects")
"""Objects, at `<kernel set>/<stem>/<object>`."""
MANIFEST = Path("manifest.json")
PROVENANCE = "provenance.json"
NATIVE = (MODULES, OBJECTS, Path("elf"), MANIFEST)
"""The places of native code, of the files from which it is made, and of the file that says which of it runs."""


def lock_file(artifacts: Path, *names: str) -> Path:
    """Return the lock file of whoever changes something below `artifacts`.

    Args:
        artifacts: the directory of all artifacts.
        *names: a model and a directory of it, or one of both.
    """
    return artifacts / ".locks" / f"{'-'.join(filter(None, names))}.lock"


def kernel_files(paths: Iterable[Path]) -> list[Path]:
    """Return those of `paths` that are kernel sources, which receipts list.

    A compiler's own headers are part of its fingerprint.
    """
    return sorted({path for path in (p.resolve() for p in paths) if path.is_relative_to(KERNELS)})


def python_environment() -> dict[str, str]:
    """Return the environment of a Python process that imports the project's packages, wherever it is started."""
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(RUNTIME), *inherited])}
