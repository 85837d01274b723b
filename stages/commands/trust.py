"""`doit trust`: whose native code this user runs, and links into programs; `key=` takes a key or a directory."""

from __future__ import annotations

from pathlib import Path

from llama_npu2.cli import allow
from llama_npu2.errors import printable
from stages.engine.project import Project
from stages.graph import Build


def run(build: Build) -> None:
    """Raises UserError."""
    options = build.options
    for line in allow.changed(options.key, options.name, options.remove):
        print(printable(line), flush=True)
    if options.key and Path(options.key).is_dir():
        Project(Path(options.key).absolute(), build.project.digests, build.project.lock).adopt()
