"""One model for one target, with the steps that build it."""

from __future__ import annotations

import json
from functools import cached_property

from llama_npu2 import trust
from stages.engine import definitions
from stages.engine.files import write_atomic
from stages.engine.places import MANIFEST, PROVENANCE
from stages.engine.steps import Step
from stages.graph.choices import Choices
from stages.graph.wiring import Library, Wiring


class Build(Choices):
    """One model for one target: where it is built, and by which steps."""

    @cached_property
    def steps(self) -> dict[str, Step]:
        """Every step by name."""
        return {step.name: step for step in Wiring(self).steps()}

    def need_tools(self) -> None:
        """Raise UserError where a step never ran, and the tool that it runs is not on this machine."""
        if any(step.tool and step.tool() is None and step.receipt() is None for step in self.steps.values()):
            self.target.need_tools()

    @cached_property
    def libraries(self) -> list[Library]:
        """The libraries that hold the programs."""
        return Wiring(self).libraries()

    def finish(self) -> None:
        """Finish a complete directory and release its lock. Raises UserError.

        Outputs of steps that no longer exist are removed, and the user vouches for what was built here.
        """
        self.project.prune(self.steps)
        definitions.settle(self.project, {step.module for step in self.steps.values()})
        self._vouch()
        self.project.digests.save()
        self.project.lock.release()

    def _vouch(self) -> None:
        """Mark the directory as this user's, and write how it was built, unless others built any of it."""
        manifest, provenance = (self.directory / MANIFEST).read_bytes(), self.directory / PROVENANCE
        if trust.is_marked(self.directory, manifest) and provenance.is_file():
            return
        if all(step.is_own() for step in self.steps.values()):
            from stages.sharing.provenance import statement

            content = statement(self.project, self.steps.values(), self.recipe)
            write_atomic(provenance, json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")
            trust.mark_own(self.directory, manifest)
