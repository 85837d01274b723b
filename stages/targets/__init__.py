"""The table of targets, a folder each with the same rooms: what is different between them, and nothing else.

`stages/targets/<name>/__init__.py` has the record, `TARGET`; `modules.py`, `objects.py` and `programs.py` make what
their names say, `toolchain.py` finds what that takes. Every package here that has `TARGET` is in the table: to add a
target is to add a folder, its device in the runtime, and the kernel sources of a new kernel set.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llama_npu2.errors import UserError
from stages.kernels import KV_FORMATS, format_kernel, kernels
from stages.model.grouping import Grouping, Program
from stages.model.part import Launch, Part
from stages.model.policy import Policy


class Modules(Protocol):
    """Room `modules`: description -> generated source of a library, and beside it what its build needs to know."""

    SUFFIX: str
    COSTS: bool
    """Whether it also writes `<library>.cost.json`: what of the manifest the estimate says."""

    def write_module(self, directory: Path, library: str, work: Path, **arguments: Any) -> None:
        """Step action: `build/modules/<library><SUFFIX>` and `<library>.json` of the configuration in `directory`."""

    def arguments(self, programs: Sequence[Program], options: Mapping[str, Any]) -> dict[str, Any]:
        """What `write_module` takes for a library of these programs. JSON."""

    def sources(self, programs: Sequence[Program]) -> list[str]:
        """C++ sources that a library of these programs links, as `<kernel set>/<stem>`."""

    def launches(self, part: Part) -> tuple[Launch, ...]:
        """What a program runs of a part, in order."""

    def expected(self, source: str) -> dict[str, Any]:
        """What generated source expects of the objects of a C++ source, for `write_objects`. JSON."""

    def fingerprint(self) -> str | None:
        """What besides this project's code decides on the text."""


class Objects(Protocol):
    """Room `objects`: one C++ source -> its objects, a variant for each shape where kernels have fixed ones."""

    VARIANTS: bool

    def write_objects(
        self, source: str, modules: Sequence[Path], cache: Path, work: Path, **expected: Any
    ) -> list[Path]:
        """Step action: `build/objects/<source>/`, all that `modules` ask for; returns the files that were read."""

    def fingerprint(self) -> str | None:
        """The compiler; None without one."""


class Programs(Protocol):
    """Room `programs`: module and objects -> what the device loads."""

    SUFFIX: str
    DESCRIBES: bool
    """Whether it also writes `<library>.json` beside it: what of the manifest only the finished program tells."""

    def write_program(self, module: Path, library: str, work: Path) -> list[Path]:
        """Step action: `elf/<library><SUFFIX>`; returns the objects that were linked."""

    def fingerprint(self) -> str | None:
        """The linker; None without one."""


@dataclass(frozen=True, eq=False)
class Target:
    """`device`: module of `llama_npu2.devices` that runs it. `kernel_set`: folder of `kernel_src` with the kernels of
    its device programs, in whose layouts weights are packed. `static`: programs have fixed numbers of rows, so a prompt
    runs in a bucket. `foreign_tools`: it is built with more than this machine's C++ compiler. `machine`: what a machine
    must have to run the artifacts, for the manifest. `context`: positions that its KV caches have room for unless
    something else is said; 0: as many as the model knows. `built_on`: what of a machine, besides its tools, objects and
    programs may depend on. `suits(model)`: whether this machine should run it unasked, given the directory of a model's
    artifacts; the target of the highest `rank` that does is the default. `need_tools`: raises UserError, which names
    them, where what builds it is not on this machine."""

    name: str
    device: str
    kernel_set: str
    static: bool
    groupings: Mapping[str, Grouping]
    default_grouping: str
    foreign_tools: bool = False
    context: int = 0
    machine: Callable[[], Mapping[str, Any]] = dict
    built_on: Callable[[], Mapping[str, Any]] = dict
    suits: Callable[[Path], bool] = lambda model: False
    need_tools: Callable[[], object] = lambda: None
    rank: int = 0

    def grouping(self, name: str) -> Grouping:
        """By name. Raises UserError."""
        if name not in self.groupings:
            raise UserError(f"grouping={name}: target {self.name} has {', '.join(self.groupings)}")
        return self.groupings[name]

    def runs(self, weights: str) -> bool:
        """Whether it has products of weights in a format."""
        product = kernels().get(format_kernel("gemv", weights))
        return bool(product and (product.program if self.static else product.host))

    def caches(self, kv: str) -> bool:
        """Whether a token attends over KV caches in what `kv=` says. Static programs keep K and V in rows."""
        kernel = "decode_attention_kv" if self.static else "decode_attention_panels"
        return format_kernel(kernel, KV_FORMATS[kv]) in kernels()

    def checked(self, policy: Policy) -> Policy:
        """A policy that it can run. Raises UserError."""
        if missing := [name for name in policy.formats if not self.runs(name)]:
            raise UserError(
                f"weights={policy.text}: target {self.name} has no kernels for {missing[0]}: choose target=cpu"
            )
        if self.static and policy.layers:
            raise UserError(
                f"weights={policy.text}: target {self.name} has one program for all layers: leave out those of single "
                "layers, or choose target=cpu"
            )
        return policy

    def _room(self, name: str) -> Any:
        return importlib.import_module(f"{__name__}.{self.name.replace('-', '_')}.{name}")

    @property
    def modules(self) -> Modules:
        room: Modules = self._room("modules")
        return room

    @property
    def objects(self) -> Objects:
        room: Objects = self._room("objects")
        return room

    @property
    def programs(self) -> Programs:
        room: Programs = self._room("programs")
        return room


@functools.cache
def targets() -> dict[str, Target]:
    """Every target by name."""
    packages = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__) if m.ispkg)
    return {package.TARGET.name: package.TARGET for package in packages}


def default_target(model: Path) -> Target:
    """The target for this machine; `model`: where a model's artifacts are."""
    by_rank = sorted(targets().values(), key=lambda target: -target.rank)
    return next(target for target in by_rank if target.suits(model))
