"""Whole artifact directories on a remote: pushed as runs of steps, pulled into place with receipts of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_npu2.errors import UserError
from stages.engine.files import read_json
from stages.engine.places import PULLED
from stages.engine.project import WORK, Project
from stages.engine.steps import Step
from stages.sharing.arrivals import Arrivals
from stages.sharing.cache import step_entries
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
"""Of directories where what is pulled lies until it is in place."""


@dataclass(frozen=True)
class Offer:
    """An artifact directory on a remote. `pushed`: when, in UTC. `runs`: of its steps, in their order. `withheld`:
    steps whose outputs stayed where they were made. `beside`: what is said of the directory besides."""

    name: str
    pushed: str
    runs: Sequence[Record]
    withheld: Sequence[str]
    beside: Mapping[str, Blob]
    signer: str = ""

    @property
    def files(self) -> dict[str, Blob]:
        return {
            label: blob for part in (*(run.outputs for run in self.runs), self.beside) for label, blob in part.items()
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "artifact": self.name,
            "pushed": self.pushed,
            "runs": [run.to_json() for run in self.runs],
            "withheld": list(self.withheld),
            "beside": {label: vars(blob) for label, blob in self.beside.items()},
        }

    @classmethod
    def of_json(cls, value: dict[str, Any], signer: str, name: str) -> Offer:
        """Raises UserError for what is not about `name`, or no offer of ours can be."""
        match value:
            case {"artifact": str(about), "pushed": str(pushed), "runs": list(runs), "withheld": list(withheld)}:
                # Both are shown.
                plain = pushed.isprintable() and all(isinstance(step, str) and step.isprintable() for step in withheld)
                if about == name and plain:
                    records = [Record.of_json(run) for run in runs]
                    offer = cls(name, pushed, records, withheld, blobs_of_json(value.get("beside")), signer)
                    check_labels(offer.files)
                    if len(offer.files) == sum(len(part) for part in (*(r.outputs for r in records), offer.beside)):
                        return offer
        raise UserError(f"what {signer} says of {name} is not what it must be: push it again")


@dataclass(frozen=True)
class Exchange:
    """Of a project's artifact directory with a remote, where it is called `name`. `beside`: files that lie there
    besides what steps make."""

    store: Store
    project: Project
    name: str
    beside: Sequence[str]

    def push(self, steps: Iterable[Step], is_shareable: Callable[[Step], bool]) -> tuple[Offer, int]:
        """Offer the directory, whose steps are current, and their outputs to whoever has the same inputs; returns the
        offer and the bytes that were sent. Raises UserError."""
        steps = list(steps)
        withheld = [step.name for step in steps if not is_shareable(step)]
        runs = [record_of(step) for step in steps if step.name not in withheld]
        records = [record for record in runs if record]
        if len(records) < len(runs):
            raise UserError(f"{self.project.directory} changed while it was read: run the command again")
        beside = [] if withheld else [label for label in self.beside if (self.project.directory / label).is_file()]
        said = {label: blob_of(self.project, self.project.directory / label) for label in beside}
        offer = Offer(self.name, time.strftime(_TIME, time.gmtime()), records, withheld, said)
        sent = self.store.send({blob: self.project.directory / label for label, blob in offer.files.items()})
        self.store.write({**step_entries(self.store, records), self._entry: offer.to_json()})
        return offer, sent

    def pull(self, steps: Mapping[str, Step]) -> tuple[Offer, int]:
        """Bring the directory to what the newest offer says, with receipts that hold for the sources here; returns it
        and the bytes that were received. Raises UserError; then the directory has no manifest, or is whole."""
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
        """The offer to take. Raises UserError if there is none, or only one older than what was pulled before: who can
        write to a remote could else bring back what was replaced."""
        entries = self.store.entries(self._entry)
        offers, refusals = [], []
        for entry in entries:
            try:
                offers.append(Offer.of_json(entry.content, entry.signer, self.name))
            except UserError as error:
                refusals.append(error)
        if refusals and not offers:
            raise refusals[0]
        for refusal in refusals:  # one signer's mistake hides no other's offer
            warn(f"not used: {refusal}")
        newest = max(offers, key=lambda offer: offer.pushed, default=None)
        if newest is None:
            raise UserError(f"remote {self.store.remote.url} {self._why_not()}")
        path = self.project.directory / PULLED
        had = read_json(path).get("pushed", "") if path.is_file() else ""
        if newest.pushed < had:
            raise UserError(
                f"remote {self.store.remote.url}: {self.name} was pushed at {newest.pushed}, what is here at {had}: "
                f"remove {path} to go back"
            )
        return newest

    def _why_not(self) -> str:
        """What to say of a remote without an offer of a trusted signer."""
        self.store.check_strangers(self._entry)
        names = self.store.remote.names(_FOLDER.rstrip("/"))
        known = sorted({path.removeprefix(_FOLDER).rpartition("/")[0] for path in names})
        return f"has no {self.name}; it has {', '.join(known) or 'no artifacts'}: check model=, target= and weights="

    @property
    def _entry(self) -> str:
        return f"{_FOLDER}{self.name}"
