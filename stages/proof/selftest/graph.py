"""The steps that build the probes into an artifact directory of their own, which can be copied like a model's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from stages.engine.lock import ProcessLock
from stages.engine.places import lock_file
from stages.engine.project import Project
from stages.engine.steps import Step
from stages.graph import Build, Library, Wiring
from stages.proof.selftest.build import write_manifest, write_module
from stages.proof.selftest.probes import Probe, probes
from stages.targets.npu2 import KERNEL_SET
from stages.targets.npu2 import modules as npu2

NAME = "selftest"
"""The name of the directory, next to those of models."""


class Probes(Build):
    """The build of the probes for one target; `model` is the build of the model that is tried after them."""

    def __init__(self, model: Build) -> None:
        super().__init__(model.options)
        self.model = model

    @cached_property
    def target(self) -> Any:
        return self.model.target

    @property
    def suit(self) -> bool:
        """Whether the target's programs run on the array."""
        return bool(self.target.kernel_set == KERNEL_SET)

    @cached_property
    def directory(self) -> Path:
        return self.artifacts / NAME / self.target.name

    @property
    def directory_as_given(self) -> Path:
        return Path(self.options.artifacts) / NAME / self.target.name

    @cached_property
    def project(self) -> Project:
        lock = ProcessLock(lock_file(self.artifacts, NAME, self.target.name))
        return Project(self.directory, self.model.project.digests, lock)

    @cached_property
    def steps(self) -> dict[str, Step]:
        return {step.name: step for step in _ProbeWiring(self).steps()} if self.suit else {}


class _ProbeWiring(Wiring):
    PREFIX = "probe:"
    BEFORE_COMPILERS = BEFORE_TOOLS = ()

    def steps(self) -> Iterator[Step]:
        libraries = [Library(probe.name, self.target, (probe.program,)) for probe in probes().values()]
        yield from self._steps_of_target(self.target, libraries)
        yield self._manifest(libraries)

    def _generation(self, library: Library) -> tuple[Any, list[Path], dict[str, Any]]:
        probe: Probe = probes()[library.name]
        support = sorted(set(library.sources) - set(npu2.sources([probe.program])))
        return partial(write_module, library.name), [], {"support": support, "priced": self.target.modules.COSTS}

    def _description(self) -> tuple[Any, list[Path], dict[str, Any]]:
        return partial(write_manifest, self.directory), [], {}
