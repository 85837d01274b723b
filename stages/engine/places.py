"""Where things are: the project, whatever the working directory, and what steps leave in an artifact directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "runtime"
KERNELS = ROOT / "kernel_src"

CONFIG = Path("build/config.json")
"""The model's configuration. This and what follows: relative to an artifact directory."""
CHECKPOINT = Path("build/checkpoint.json")
"""What identifies the checkpoint's content."""
PLAN = Path("build/plan.json")
PACKING = Path("build/packing.json")
"""Of the plan, what packing reads: weights and tables."""
CALIBRATED = Path("build/calibrated")
"""Weights that were rounded for the inputs that a text gives them, and activations between layers."""
CALIBRATION = Path("build/calibration.json")
"""Which text that was."""
WEIGHTS = Path("build/weights.json")
"""Which weight was packed where."""
MODULES = Path("build/modules")
LOGS = Path("build/logs")
"""What compilers of programs said."""
INCOMING = Path("build/incoming")
"""What is being received from a remote."""
PULLED = Path("build/pulled.json")
"""What was pulled last: when it was pushed, and by whom."""
GENERATED = "generated-from"
"""In a checkpoint that can be made again."""
CACHE = Path(".cache/objects")
"""Objects of all models, below `artifacts/`."""
OBJECTS = Path("build/objects")
"""In it `<kernel set>/<stem>/<object>`."""
MANIFEST = Path("manifest.json")
PROVENANCE = "provenance.json"
NATIVE = (MODULES, OBJECTS, Path("elf"), MANIFEST)
"""What native code is made of, it itself, and what says which of it runs."""


def lock_file(artifacts: Path, *names: str) -> Path:
    """What a process holds that changes something below `artifacts`: a model and a directory of it, or one of both."""
    return artifacts / ".locks" / f"{'-'.join(filter(None, names))}.lock"


def kernel_files(paths: Iterable[Path]) -> list[Path]:
    """Those of `paths` that are kernel sources, which receipts follow. A compiler's headers are its fingerprint's."""
    return sorted({path for path in (p.resolve() for p in paths) if path.is_relative_to(KERNELS)})


def python_environment() -> dict[str, str]:
    """For a Python process that imports the project's packages, wherever it is started."""
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(RUNTIME), *given])}
