"""`doit push remote=...`: share the artifact directory with others, and the outputs of its steps with their builds."""

from __future__ import annotations

from llama_npu2.errors import UserError
from llama_npu2.trust import SIGNATURE
from stages.engine.files import write_atomic
from stages.engine.places import PROVENANCE
from stages.graph import Build
from stages.sharing.provenance import VERIFIED, signed
from stages.sharing.remotes import open_remote
from stages.sharing.store import Store
from stages.sharing.travel import Exchange


def run(build: Build) -> None:
    """Push, and print how much was sent. Raises UserError."""
    exchange = exchanged(build)
    with build.project.lock:
        if build.is_shareable(build.steps["manifest"]):
            write_atomic(build.directory / SIGNATURE, signed(build.directory))
        offer, sent = exchange.push(build.steps.values(), build.is_shareable)
        build.project.digests.save()
    total = sum(blob.size for blob in set(offer.files.values()))
    print(f"{build.artifact} is on {build.options.remote}: {megabytes(sent)} sent of {megabytes(total)}", flush=True)
    if offer.withheld:
        print(
            f"without {', '.join(offer.withheld)}, as the checkpoint is not known to be public: whoever pulls makes "
            "them from a checkpoint of their own; include=weights sends them too",
            flush=True,
        )


def exchanged(build: Build) -> Exchange:
    """Return the exchange with `remote=`. Raises UserError."""
    if not build.options.remote:
        raise UserError("no remote: name one, as in remote=file:///mnt/shared, s3://BUCKET/PATH or hf://ORG/NAME")
    store = Store(open_remote(build.options.remote), build.project.digests)
    return Exchange(store, build.project, build.artifact, (SIGNATURE, PROVENANCE, VERIFIED))


def megabytes(count: int) -> str:
    """Return bytes in MB, for people."""
    return f"{count / 1e6:.1f} MB"
