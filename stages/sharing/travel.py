"""Pushes a whole artifact directory as runs of steps, and pulls one into place with receipts of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.engine.files import read_json
from stages.engine.places import PULLED
from stages.engine.project import WORK, Project
from stages.engine.steps import Step
from stages.sharing.cache import Arrivals, step_entries
from stages.sharing.records import (
    Blob,
    Record,
    blob_of,
    blobs_of_json,
    canonical,
    check_labels,
    local_receipt,
    record_of,
)
from stages.sharing.store import Store, warn

_FOLDER = "artifacts/"
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_PULL = "pull"
"""The name of the directories in which pulled files lie until they are in place."""


@frozen
class Offer:
    """An artifact directory on a remote."""

    name: str
    pushed: str
    """When it was pushed, in UTC."""
    runs: Sequence[Record]
    """The runs of its steps, in their order."""
    withheld: Sequence[str]
    """The steps whose outputs were not pushed."""
    beside: Mapping[str, Blob]
    """The files about the directory, which no step made, by label."""
    signer: str = ""

    @property
    def files(self) -> dict[str, Blob]:
        """All files, by label."""
        return {
            label: blob for part in (*(run.outputs for run in self.runs), self.beside) for label, blob in part.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return the offer as JSON; its signer is that of the entry."""
        return {
            "artifact": self.name,
            "pushed": self.pushed,
            "runs": [asdict(run) for run in self.runs],
            "withheld": list(self.withheld),
            "beside": {label: vars(blob) for label, blob in self.beside.items()},
        }

    @classmethod
    def of_json(cls, value: dict[str, Any], signer: str, name: str) -> Offer:
        """Return the offer in a JSON value. Raises UserError if it is none, or not one of `name`."""
        match value:
            case {"artifact": str(about), "pushed": str(pushed), "runs": list(runs), "withheld": list(withheld)}:
                # Both are printed.
                plain = pushed.isprintable() and all(isinstance(step, str) and step.isprintable() for step in withheld)
                if about == name and plain:
                    records = [Record.of_json(run) for run in runs]
                    offer = cls(name, pushed, records, withheld, blobs_of_json(value.get("beside")), signer)
                    check_labels(offer.files)
                    if len(offer.files) == sum(len(part) for part in (*(r.outputs for r in records), offer.beside)):
                        return offer
        raise UserError(f"the entry of {signer} about {name} is malformed: push it again")


@frozen
class Exchange:
    """Pushes and pulls the artifact directory of a project."""

    store: Store
    project: Project
    name: str
    """The directory's name on the remote."""
    beside: Sequence[str]
    """Labels of files that the directory may have besides outputs of steps."""

    def push(self, steps: Iterable[Step], is_shareable: Callable[[Step], bool]) -> tuple[Offer, int]:
        """Push the directory, whose steps are current; the runs also become entries of the cache.

        Returns:
            The offer, and the bytes that were sent.

        Raises:
            UserError: if the remote cannot be written, or the directory changes meanwhile.
        """
        steps = list(steps)
        withheld = [step.name for step in steps if not is_shareable(step)]
        runs = [record_of(step) for step in steps if step.name not in withheld]
        records = [record for record in runs if record]
        if len(records) < len(runs):
            raise UserError(f"{self.project.directory} changed while it was read: run the command again")
        beside = [] if withheld else [label for label in self.beside if (self.project.directory / label).is_file()]
        blobs = {label: blob_of(self.project, self.project.directory / label) for label in beside}
        offer = Offer(self.name, time.strftime(_TIME, time.gmtime()), records, withheld, blobs)
        sent = self.store.send({blob: self.project.directory / label for label, blob in offer.files.items()})
        self.store.write({**step_entries(self.store, records), self._entry: offer.to_json()})
        return offer, sent

    def pull(self, steps: Mapping[str, Step]) -> tuple[Offer, int]:
        """Make the directory that of the newest offer, with receipts that are valid for the sources here.

        Returns:
            The offer, and the bytes that were received.

        Raises:
            UserError: if there is no offer, or its files cannot be received. Then the directory is complete as before,
                or it has no manifest.
        """
        offer, project = self._newest(), self.project
        arrivals = Arrivals(self.store, project, offer.files, _PULL)
        tree = project.tree
        for label in {*self.beside} - offer.beside.keys():
            tree.remove_file(label)
        for run in offer.runs:
            work = tree.make_empty(WORK / _PULL)
            arrivals.place(run.outputs, work)
            project.commit(run.step, work, local_receipt(project, run, steps.get(run.step)))
        tree.remove(WORK / _PULL)
        arrivals.place(offer.beside.keys() & {*self.beside}, project.directory)
        tree.write(PULLED, canonical({"pushed": offer.pushed, "signer": offer.signer}))
        arrivals.done()
        project.prune([*(run.step for run in offer.runs), *offer.withheld])
        return offer, arrivals.nbytes

    def _newest(self) -> Offer:
        """Return the newest offer.

        Raises UserError if there is none, or it is older than the one that was pulled before: else whoever can write to
        a remote could bring back an old one.
        """
        entries = self.store.entries(self._entry)
        offers, refusals = [], []
        for entry in entries:
            try:
                offers.append(Offer.of_json(entry.content, entry.signer, self.name))
            except UserError as error:
                refusals.append(error)
        if refusals and not offers:
            raise refusals[0]
        for refusal in refusals:  # another signer's offer is still good
            warn(f"not used: {refusal}")
        newest = max(offers, key=lambda offer: offer.pushed, default=None)
        if newest is None:
            raise UserError(f"remote {self.store.remote.url} {self._why_not()}")
        path = self.project.directory / PULLED
        before = read_json(path).get("pushed", "") if path.is_file() else ""
        if newest.pushed < before:
            raise UserError(
                f"remote {self.store.remote.url}: {self.name} was pushed at {newest.pushed}, "
                f"the directory here at {before}: remove {path} to go back"
            )
        return newest

    def _why_not(self) -> str:
        """Return the end of the error for a remote without an offer of a trusted signer."""
        self.store.check_strangers(self._entry)
        names = self.store.remote.names(_FOLDER.rstrip("/"))
        others = sorted({path.removeprefix(_FOLDER).rpartition("/")[0] for path in names})
        return f"has no {self.name}; it has {', '.join(others) or 'no artifacts'}: check model=, target= and weights="

    @property
    def _entry(self) -> str:
        return f"{_FOLDER}{self.name}"
