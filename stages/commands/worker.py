"""`doit worker on=ADDRESS cache=REMOTE`: run steps of builds that others start with the same on= and cache=."""

from __future__ import annotations

import shutil
import sys

from llama_npu2.errors import UserError
from llama_npu2.trust.envelopes import own_key
from stages.engine.room import at_a_time
from stages.graph import Build
from stages.graph.build import LOCAL
from stages.graph.worker import local_settings
from stages.sharing.cluster import serve


def run(build: Build) -> bool:
    """Run workers until they are stopped. Raises UserError."""
    options = build.options
    if not options.on or options.on == LOCAL:
        raise UserError("a worker needs the address of a scheduler: on=tcp://HOST:PORT; dask scheduler starts one")
    if not options.cache:
        raise UserError("a worker needs the store of the builds that it works for: cache=REMOTE")
    here, count = local_settings(options.cache, build.artifacts), at_a_time()
    try:
        print(f"{count} steps at a time; what they make is signed by {own_key()}", file=sys.stderr, flush=True)
        return serve(options.on, here, count) == 0
    finally:
        shutil.rmtree(here.scratch, ignore_errors=True)
