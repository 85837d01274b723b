"""One model for one target, with the steps that build it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property, partial

from llama_npu2 import trust
from llama_npu2.errors import UserError
from llama_npu2.options import OptionError
from stages.engine import definitions
from stages.engine.files import write_atomic
from stages.engine.places import CONFIG, MANIFEST, PROVENANCE, STORE
from stages.engine.project import Shared
from stages.engine.steps import Step
from stages.graph.choices import DEFAULT_TEXT, Choices
from stages.graph.wiring import Library, Wiring
from stages.model.policy import Policy

LOCAL = "local"
"""The address in `on=` of a cluster on this machine, which is started for a build and ends with it."""


class Build(Choices):
    """One model for one target: where it is built, and by which steps."""

    @cached_property
    def steps(self) -> dict[str, Step]:
        """Every step by name."""
        return {step.name: step for step in Wiring(self).steps()}

    def _shared(self) -> Shared | None:
        options = self.options
        if not options.on:
            return super()._shared()
        if options.on != LOCAL and ":" not in options.on:
            raise OptionError("on", options.on, f"must be the address of a scheduler, as tcp://HOST:PORT, or {LOCAL}")
        if not (cache := options.cache or (str(self.artifacts / STORE) if options.on == LOCAL else "")):
            raise UserError(
                f"on={options.on}: also give cache=REMOTE, through which files get to workers and back, as "
                "cache=s3://BUCKET/PATH or a directory that all machines have"
            )
        # Most builds have none.
        from stages.graph import worker
        from stages.sharing.cache import Cache
        from stages.sharing.fleet import Fleet

        shared = Cache(cache, self.is_shareable)
        crew = partial(worker.crew_here, cache, self.artifacts)
        return Fleet(shared, options.on, crew, worker.act, self._ordered, (self.directory / CONFIG,))

    def _ordered(self, step: Step) -> Mapping[str, str] | None:
        """Return the variables that tell a worker of which build a step is; None if it must run here.

        `model` is among them only where the step reads the checkpoint, which then anybody can have who may.
        """
        options = self.options
        text = options.calibrate in ("", DEFAULT_TEXT)
        if not step.portable or (step.private and not (text and self.source.anywhere and self.is_shareable(step))):
            return None
        calibrated = {"calibrate": options.calibrate} if step.private and options.calibrate else {}
        return self.variables(self.policy, step.private) | calibrated

    def variables(self, policy: Policy, checkpoint: bool) -> dict[str, str]:
        """Return the variables of a build elsewhere that makes the same programs.

        Args:
            policy: the formats, which may be others than those that the options choose.
            checkpoint: whether it also reads the same checkpoint.
        """
        options = self.options
        chosen = {
            "target": self.target.name,
            "weights": policy.text,
            "kv": policy.kv,
            "activations": policy.activations,
            "npu.grouping": self.grouping_name,
            **({"npu.matmul": policy.matmul, "npu.buckets": options.buckets} if self.target.static else {}),
            **({"npu.tokens": options.tokens} if self.target.static and options.tokens else {}),
            **({"npu.sequences": options.sequences} if self.target.static and options.sequences else {}),
            **({"context": str(options.context)} if options.context else {}),
        }
        names = ("model", "revision", "lora", "ignore") if checkpoint else ()
        return chosen | {name: value for name in names if (value := getattr(options, name))}

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
        self.project.durations.save()
        self.project.lock.release()
        if self.project.shared:
            self.project.shared.close()

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
