"""Measures artifacts where the hardware is (`doit fleet measure=1`): on a worker that has the device of their target.

That is a step that makes no artifact. Its result is an entry of the store, which the worker signs, like records of
steps: one that is there already is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.errors import UserError, printable
from llama_npu2.frozen import frozen
from llama_npu2.schema import positive, record, string
from llama_npu2.trust import SIGNATURE
from stages.engine.files import content_sha256, write_atomic
from stages.engine.places import MANIFEST
from stages.engine.project import Project
from stages.graph.trial import Times, times
from stages.sharing.cluster import Has, fits
from stages.sharing.fleet import MADE, Fleet, Order
from stages.sharing.provenance import signed
from stages.sharing.records import FORMAT, address_of, blob_of
from stages.sharing.store import Store

MEASURE = "measure"
"""The step in the order."""


@frozen
class Measured:
    """The times of a short reply, and who measured them."""

    times: Times
    where: str
    """The name of the machine and process."""
    signer: str


_ENTRY = record({"address": string, "times": record({"ttft": positive, "tpot": positive}), "where": string})


def device_of(name: str) -> Has:
    """Return a device as what a worker has, and as what measuring needs."""
    return {f"device {name}": 1}


def entry_name(where: str) -> str:
    """Return the name of the folder with the entries about an address."""
    return f"measured/{where[:2]}/{where[2:]}"


def on_a_worker(project: Project, device: str, is_shareable: bool, fleet: Fleet) -> Measured | None:
    """Return what a worker measures, or measured; None if none has the device.

    Args:
        project: a complete artifact directory.
        device: the device that it is for.
        is_shareable: whether others may have it.
        fleet: the workers.

    Raises:
        Lost: if the cluster cannot be used.
        UserError: if the directory may not go to workers, or does not run there.
    """
    directory = project.directory
    key = {"manifest": content_sha256(directory / MANIFEST), "device": device}
    known: dict[str, Any] = {"format": FORMAT, "step": MEASURE, "key": key, "declared": {}}
    store, where = fleet.cache.store(project), address_of(known)
    if found := _taken(store, where):
        return found
    if not any(fits(device_of(device), has) for has in fleet.workers().values()):
        return None
    if not is_shareable:
        raise UserError("its checkpoint is not known to be public, so no worker gets it: include=weights")
    if not (directory / SIGNATURE).is_file():
        write_atomic(directory / SIGNATURE, signed(directory))
    labels = [MANIFEST.as_posix(), SIGNATURE, *Manifest.open(directory).files]
    order = Order(known, {}, {label: blob_of(project, directory / label) for label in labels})
    answer = fleet.ask(project, order, device_of(device))
    if answer.outcome != MADE:
        raise UserError(f"{printable(answer.why)} (on {printable(answer.worker)})")
    if found := _taken(store, where):
        return found
    raise UserError(
        f"{printable(answer.worker)} says that it measured, but {store.remote.url} has no such entry of a signer whom "
        "you trust"
    )


def _taken(store: Store, where: str) -> Measured | None:
    for entry in store.entries(entry_name(where)):
        try:
            _ENTRY(entry.content)
        except ValueError:
            continue
        if entry.content["address"] == where:
            return Measured(Times(**entry.content["times"]), printable(entry.content["where"]), entry.signer)
    return None


def measure(directory: Path, order: Order, store: Store, worker: str) -> None:
    """Run the artifact directory of an order, and leave its times in the store. Raises UserError.

    Its native code runs only if somebody signed it whom the worker's user trusts.
    """
    if content_sha256(directory / MANIFEST) != order.known["key"].get("manifest"):
        raise UserError("the manifest is another one than the order says")
    entry: Mapping[str, Any] = {"address": order.address, "times": asdict(times(directory)), "where": worker}
    store.write({entry_name(order.address): dict(entry)})
