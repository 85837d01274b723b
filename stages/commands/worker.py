"""`doit worker on=ADDRESS cache=REMOTE`: run steps of builds that others start with the same on= and cache=."""

from __future__ import annotations

import sys

from llama_npu2.errors import UserError
from llama_npu2.trust.envelopes import own_key
from stages.graph import Build
from stages.graph.worker import crew_here
from stages.sharing.cluster import serve


def run(build: Build) -> bool:
    """Run workers until they are stopped. Raises UserError."""
    options = build.options
    if ":" not in options.on:
        raise UserError("a worker needs the address of a scheduler: on=tcp://HOST:PORT; dask scheduler starts one")
    if not options.cache:
        raise UserError("a worker needs the store of the builds that it works for: cache=REMOTE")
    crew = crew_here(options.cache, build.artifacts)
    print(f"{crew.count} steps at a time; what they make is signed by {own_key()}", file=sys.stderr, flush=True)
    return serve(options.on, crew) == 0
