"""Everything that follows from the options of a build before its steps: model, target, formats, places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

from llama_npu2.errors import UserError
from stages.engine.digests import Digests
from stages.engine.files import read_json
from stages.engine.lock import ProcessLock
from stages.engine.places import CONFIG, PLAN, lock_file
from stages.engine.project import Project, Shared
from stages.engine.room import at_a_time
from stages.engine.steps import Step
from stages.model.checkpoint import Checkpoint
from stages.model.families import read_config
from stages.model.grouping import Grouping
from stages.model.policy import BF16, Policy, held_policy, parse_policy
from stages.model.sources import (
    ArtifactsOnly,
    Source,
    adapted,
    known_config,
    known_positions,
    quantised,
    resolve,
    safe_name,
)
from stages.targets import Target, default_target, targets
from stages.weights.formats import formats

if TYPE_CHECKING:
    from stages.graph.options import Options

DEFAULT_TEXT = "default"
"""The name in `calibrate=` of the text that ships."""


@dataclass
class Choices:
    """The model, target, formats and places that options choose."""

    options: Options
    portable: bool = True
    """Whether other machines are to run what is built; else it need not hold code for others than this one."""

    @cached_property
    def artifacts(self) -> Path:
        return Path(self.options.artifacts).absolute()

    @cached_property
    def source(self) -> Source:
        base = resolve(self.options.model, self.artifacts, self.options.revision, bool(self.options.remote))
        if self.options.lora and isinstance(base, ArtifactsOnly):
            raise UserError(f"model={base.name}: its checkpoint is not here, which lora= needs: name the checkpoint")
        return adapted(base, self.options.lora, self.artifacts)

    @property
    def adapters(self) -> list[dict[str, Any]]:
        """The adapters that are merged into the weights, in order, as they are recorded."""
        return self.source.identity().get("adapters", [])

    @cached_property
    def target(self) -> Target:
        chosen = targets().get(self.options.target)
        return chosen or default_target(self.artifacts / self.source.name)

    @cached_property
    def policy(self) -> Policy:
        """The formats of weights and KV cache that the options choose, or that the checkpoint holds."""
        if not self.target.caches(self.options.kv):
            raise UserError(f"kv={self.options.kv}: target {self.target.name} has no kernels for it: choose target=cpu")
        if self.options.weights:
            policy = self._chosen_policy()
        else:
            policy = replace(self._held_policy(), kv=self.options.kv, activations=self.options.activations)
        return self.multiplied(self.target.checked(policy))

    def _chosen_policy(self) -> Policy:
        options = self.options
        return parse_policy(options.weights, options.kv, activations=options.activations)

    def multiplied(self, policy: Policy) -> Policy:
        """Return a policy with the `matmul` of the options, or the usual one."""
        if not self.target.static:
            return policy
        return replace(policy, matmul=self.options.matmul or policy.usual_matmul)

    @property
    def bfp16(self) -> bool:
        """Whether prompts are multiplied in block floating point."""
        return self.policy.matmul == "bfp16"

    def _held_policy(self) -> Policy:
        """Return the policy that the checkpoint holds. A quantised one is fetched, as its headers say that."""
        if isinstance(self.source, ArtifactsOnly):
            return self._stored_policy()
        if not quantised(self.source, self.directory / CONFIG):
            return BF16
        policy = held_policy(Checkpoint.open(self.source.fetch()), self.target.runs)
        # Static targets have one program for all layers.
        return BF16 if self.target.static and policy.layers else policy

    def _stored_policy(self) -> Policy:
        """Return the policy of artifacts whose checkpoint is not on this machine."""
        recorded = self.directory / PLAN
        return parse_policy(read_json(recorded).get("weights", "") if recorded.is_file() else "")

    @cached_property
    def calibration(self) -> Path | None:
        """The text that weights are rounded for, if any."""
        name = self.options.calibrate
        if name and not any(formats()[form].grid for form in self.policy.formats):
            usable = ", ".join(sorted(name for name, form in formats().items() if form.grid))
            raise UserError(f"calibrate={name}: no format of weights={self.policy.text} can use it: choose {usable}")
        if not name:
            return None
        if name == DEFAULT_TEXT:
            from stages.model import calibration  # few builds need it

            return calibration.TEXT
        text = Path(name).absolute()
        if not text.is_file():
            raise UserError(f"calibrate={name}: there is no such file: give a text file, or {DEFAULT_TEXT}")
        return text

    @property
    def layers(self) -> int:
        """The number of layers of the model. Its checkpoint is fetched where it is not here yet."""
        if isinstance(self.source, ArtifactsOnly):
            return read_config(self.directory / CONFIG).layers
        return Checkpoint.open(self.source.fetch()).config.layers

    @property
    def name(self) -> str:
        """The directory's name.

        It has the target, the formats of weights and KV cache where they were chosen, and the name of the text that
        weights are calibrated on, if any.
        """
        text = f"-calibrated-{safe_name(Path(self.options.calibrate).stem)}" if self.options.calibrate else ""
        return f"{self.target.name}{self._chosen_policy().suffix}{text}"

    @cached_property
    def directory(self) -> Path:
        return self.artifacts / self.source.name / self.name

    @property
    def artifact(self) -> str:
        """The name of the directory on remotes."""
        return f"{self.source.name}/{self.name}"

    @property
    def directory_as_given(self) -> Path:
        """The directory below `artifacts=` as the user wrote that, for messages."""
        return Path(self.options.artifacts) / self.source.name / self.name

    def report(self, name: str) -> Path:
        """Return the directory for a command's report on this build, which is not created.

        It is `output=`, or one next to `artifacts=`, as the user wrote that.
        """
        if self.options.output:
            return Path(self.options.output)
        return Path(self.options.artifacts).parent / "reports" / self.source.name / self.name / name

    @cached_property
    def digests(self) -> Digests:
        """The digests of all directories below `artifacts`."""
        return Digests(self.artifacts / ".digests.json")

    @cached_property
    def project(self) -> Project:
        lock = ProcessLock(lock_file(self.artifacts, self.source.name, self.name))
        project = Project(self.directory, self.digests, lock, self._shared(), accepted=Path("tokenizer"))
        if self.options.on:
            project.at_once = BoundedSemaphore(at_a_time())
        return project

    @property
    def shares(self) -> bool:
        """Whether the build takes what others made, and leaves there what it makes."""
        return bool(self.options.cache or self.options.on)

    def _shared(self) -> Shared | None:
        """Return where the build takes what others made, if it shares anything."""
        if not self.shares:
            return None
        from stages.sharing.cache import Cache  # most builds have none

        return Cache(self.options.cache, self.is_shareable)

    def tool(self, find: Callable[[], str | None]) -> Callable[[], str | None]:
        """Return a function that returns a tool's fingerprint: that of `find`, or with `on=` that of workers."""
        shared = self.project.shared
        return shared.tool(find) if shared else find

    def is_shareable(self, step: Step) -> bool:
        """Return whether others may have the outputs of a step."""
        return not step.private or self._may_share_checkpoint

    @cached_property
    def _may_share_checkpoint(self) -> bool:
        return bool(self.options.include) or self.source.is_public()

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        return self.options.bucket_list() if self.target.static else ()

    @property
    def context(self) -> int:
        """The most positions that KV caches have room for; 0: as many as the model knows (`Config.within`).

        Raises UserError.
        """
        if self.options.context and not self.target.static and not self.has_short_context:
            where = f"context={self.options.context}: target {self.target.name}"
            raise UserError(f"{where} takes memory for positions as they are used: leave it out")
        return self.options.context or self.target.context

    @property
    def has_short_context(self) -> bool:
        """Whether the model computes something else for long contexts."""
        return known_config(self.source, self.directory / CONFIG).decoder.short_context is not None

    @property
    def positions(self) -> int:
        """The context length that static programs must cover: no less than KV caches have room for."""
        longest = known_positions(self.source, self.directory / CONFIG)
        return min(longest or self.context, self.context)

    @property
    def grouping(self) -> Grouping:
        """The grouping for the formats of the weights."""
        config = known_config(self.source, self.directory / CONFIG)
        grouping = self.whole_grouping.of(config, self.policy)
        for name, counts in (("tokens", grouping.counts), ("sequences", grouping.together)):
            given = f"npu.{name}={getattr(self.options, name)}"
            if counts and not grouping.tokens:
                wanted = "the weights of all layers alike in int4, int6 or int8, and npu.grouping=fused"
                raise UserError(f"{given}: several tokens at once take {wanted}")
            if counts and config.decoder.logits_scale != 1:
                raise UserError(f"{given}: {config.family} scales logits, one row at a time: leave it out")
        if grouping.together and config.decoder.taps:
            raise UserError(
                f"npu.sequences={self.options.sequences}: convolutions of {config.family} look back at one sequence's "
                "rows: leave it out"
            )
        return grouping

    @property
    def whole_grouping(self) -> Grouping:
        """The grouping for any formats of the weights."""
        options, grouping = self.options, self.target.grouping(self.grouping_name)
        if not self.target.static:
            return grouping
        return replace(grouping, counts=options.token_counts(), together=options.sequence_counts())

    @property
    def grouping_name(self) -> str:
        return self.options.grouping or self.target.default_grouping

    @property
    def recipe(self) -> dict[str, Any]:
        """The chosen values of the variables that decide what is built."""
        options, policy = self.options, self.policy
        return {
            "model": self.source.name,
            "revision": options.revision,
            "lora": ",".join(each["name"] for each in self.adapters),
            "target": self.target.name,
            **policy.recorded,
            "calibrate": Path(options.calibrate).name,
            "ignore": options.ignore,
            "buckets": self.buckets,
            **({"tokens": self.whole_grouping.counts} if self.whole_grouping.counts else {}),
            **({"sequences": self.whole_grouping.together} if self.whole_grouping.together else {}),
            "context": self.context,
            "grouping": self.grouping_name,
        }
