"""How many of a build's programs a remote has, asked before anything is built."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.engine.steps import Step
from stages.sharing.cache import runs_of, step_entry
from stages.sharing.records import Record, address
from stages.sharing.store import Store


@frozen
class Count:
    """How many programs there are, and how many of them a build would find at a remote."""

    there: int
    all: int


def count(store: Store, programs: Iterable[Step], objects: Iterable[Step]) -> Count:
    """Count the programs of which somebody whom the user trusts has left a run that a build here would take.

    Args:
        store: the remote's content.
        programs: the steps that link them; what they link of is not here, but their modules are.
        objects: the steps that make what they link.

    Raises:
        UserError: if the remote fails, or a tool is missing here: its version is part of what is asked for.
    """

    def runs(step: Step) -> list[Record]:
        if (where := address(step)) is None:
            raise UserError(f"{step.name}: the tool that makes it is missing here, so nobody's can be asked for")
        return [run for entry in store.entries(step_entry(where)) for run in runs_of(entry.content, where)]

    made: dict[str, set[str]] = {}
    for run in (run for runs_of_step in store.remote.parallel(runs, objects) for run in runs_of_step):
        for label, blob in run.outputs.items():
            made.setdefault(label, set()).add(blob.sha256)
    linked = list(programs)
    found = store.remote.parallel(runs, linked)
    usable = [any(_fits(step, run, made) for run in of) for step, of in zip(linked, found, strict=True)]
    return Count(sum(usable), len(linked))


def _fits(step: Step, run: Record, made: Mapping[str, Collection[str]]) -> bool:
    """Return whether what a run read will be the same here, where objects are those that the remote has."""
    digests = step.project.digests
    return all(
        sha in made[label] if label in made else sha and digests.sha256(step.located(label)) == sha
        for label, sha in run.found.items()
    )
