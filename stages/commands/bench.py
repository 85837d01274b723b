"""`doit bench`: speed against the machine's limits, and against other programs on the same checkpoint.

With `divergence=1` also the cost of the format of the weights, ours and theirs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from llama_npu2 import Llama
from llama_npu2.cli.bench import Result, run_bench
from llama_npu2.options import Running, chosen
from stages.graph import Build
from stages.model.checkpoint import Checkpoint
from stages.model.sources import GgufSource, HubGguf
from stages.proof.comparison import divergence, transformers_model, verification
from stages.proof.comparison.peers import AS_IT_IS, Peer, conversions, entrants, open_peers


def run(build: Build) -> None:
    """Measure, and print a table or JSON. Raises UserError."""
    options = build.options
    as_it_is = isinstance(build.source, GgufSource | HubGguf) and not options.weights
    weights = AS_IT_IS if as_it_is else build.policy.matrices
    chosen_peers = entrants(options.peer_list(), weights, build.source, conversions(build.artifacts, build.directory))
    peers = partial(open_peers, chosen_peers, options.threads or len(os.sched_getaffinity(0)))
    more = {"more": partial(losses, build)} if options.divergence else {}
    run_bench(str(build.directory_as_given), chosen(Running, options), options.json, peers, **more)


def losses(build: Build, llm: Llama, peers: Sequence[Peer]) -> Iterator[Result]:
    """Yield rows about the quality of all engines, against the checkpoint in float32. Raises UserError."""
    source = Checkpoint.open(build.source.fetch()).within(llm.context_length)
    text = Path(build.options.text) if build.options.text else divergence.TEXT
    parts = verification.windows(llm, text, full=True)
    exact = list(transformers_model.logits(source, source.tensor, parts))
    ours = divergence.measure((divergence.artifact_logits(llm, ids) for ids in parts), exact, parts)
    theirs = {peer.name: divergence.measure(map(peer.logits, parts), exact, parts) for peer in peers}

    def row(test: str, unit: str, field: str, scale: float = 1.0) -> Result:
        others = {name: [scale * getattr(quality, field)] for name, quality in theirs.items()}
        return Result(test, unit, [scale * getattr(ours, field)], peers=others)

    yield row("KL divergence", "nats", "divergence")
    yield row("KL 99.9 percentile", "nats", "tail")
    yield row("same best token", "%", "same", 100)
