"""`doit pull remote=...`: get an artifact directory that somebody whom the user trusts has pushed."""

from __future__ import annotations

from llama_npu2 import trust
from stages.commands.push import exchanged, megabytes
from stages.engine.places import MANIFEST
from stages.graph import Build


def run(build: Build) -> None:
    """Pull, and print how much was received. Raises UserError."""
    exchange = exchanged(build)
    with build.project.lock:
        offer, received = exchange.pull(build.steps)
        if not offer.withheld:
            # Its signer was trusted when it arrived: from now on it counts as an own build.
            trust.mark_own(build.directory, (build.directory / MANIFEST).read_bytes())
        build.project.digests.save()
    total = sum(blob.size for blob in set(offer.files.values()))
    print(
        f"{build.directory_as_given} is as {offer.signer} pushed it at {offer.pushed}: {megabytes(received)} received "
        f"of {megabytes(total)}",
        flush=True,
    )
    if offer.withheld:
        print(f"without {', '.join(offer.withheld)}: doit compile makes them from your checkpoint", flush=True)
