"""`doit bench`: speed against the machine's limits, and against other programs on the same checkpoint."""

from __future__ import annotations

import os
from functools import partial

from llama_npu2.bench import run_bench
from stages.commands.peers import open_peers
from stages.engine.files import content_digest
from stages.engine.places import CHECKPOINT
from stages.graph import Build


def run(build: Build) -> None:
    options = build.options
    gguf = build.artifacts / ".cache/gguf" / f"{content_digest(build.directory / CHECKPOINT)}.gguf"
    cpus = options.threads or len(os.sched_getaffinity(0))
    peers = partial(open_peers, options.peer_list(), build.source, gguf, cpus)
    run_bench(str(build.directory_as_given), options.threads, options.repeats, options.json, peers)
