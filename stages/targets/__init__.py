"""The table of targets: a folder for each, with the same modules ("rooms"), that holds what differs.

`stages/targets/<name>/__init__.py` has the record, `TARGET`. The rooms `modules.py`, `objects.py` and `programs.py`
make what their names say; `toolchain.py` finds the tools. Every package here that has `TARGET` is in the table. A new
target is a folder here, its device in the runtime, and the kernel sources of its kernel set if that is new.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.kernels import KV_FORMATS, format_kernel, kernel_for, kernels
from stages.model.config import Config
from stages.model.decoder import SWIGLU_OAI
from stages.model.grouping import Grouping, Program
from stages.model.part import Launch, Part
from stages.model.policy import BF16, Policy
from stages.weights.formats import w8a8


class Modules(Protocol):
    """Room `modules`: writes the generated source of a library and a JSON description that its build reads."""

    SUFFIX: str
    COSTS: bool
    """Whether `write_module` also writes `<library>.cost.json`: the estimated times that go into the manifest."""

    def write_module(self, directory: Path, library: str, work: Path, **arguments: Any) -> None:
        """Write a program's module and what describes it (step action).

        They are `build/modules/<library><SUFFIX>` and `<library>.json` below `work`, for the configuration in
        `directory`.
        """

    def arguments(self, programs: Sequence[Program], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `arguments` (JSON) of `write_module` for a library of these programs."""

    def sources(self, programs: Sequence[Program], sets: Sequence[str]) -> list[str]:
        """Return the C++ sources that a library of these programs links, as `<kernel set>/<stem>`.

        `sets`: the instruction sets of the host that it has code for.
        """

    def launches(self, part: Part) -> tuple[Launch, ...]:
        """Return the launches that a program makes for a part, in order."""

    def expected(self, source: str) -> dict[str, Any]:
        """Return the arguments (JSON) of `write_objects` that tell what generated code expects of a C++ source."""

    def fingerprint(self) -> str | None:
        """Return the version of whatever else decides on the text, besides this project's code."""


class Objects(Protocol):
    """Room `objects`: compiles one C++ source, once for each shape where kernels have fixed shapes."""

    VARIANTS: bool
    """Whether a source has an object for each shape."""

    def write_objects(
        self, source: str, modules: Sequence[Path], cache: Path, work: Path, **expected: Any
    ) -> list[Path]:
        """Write the objects that `modules` ask for to `build/objects/<source>/` (step action).

        Return the files that were read.
        """

    def fingerprint(self) -> str | None:
        """Return the compiler's version; None without a compiler."""


class Programs(Protocol):
    """Room `programs`: links a module and its objects into the file that the device loads."""

    SUFFIX: str
    DESCRIBES: bool
    """Whether `write_program` also writes `<library>.json`: manifest entries that only the linked program tells."""

    def write_program(self, module: Path, library: str, cache: Path, work: Path) -> list[Path]:
        """Write `elf/<library><SUFFIX>`, or take it from `cache` (step action). Return the files that were read."""

    def fingerprint(self) -> str | None:
        """Return the linker's version; None without a linker."""


@frozen(eq=False)
class Target:
    """A target: the device that runs it, its kernels, and how its programs are composed."""

    name: str
    device: str
    """The module of `llama_npu2.devices` that runs its programs."""
    kernel_set: str
    """The folder of `kernel_src` with the kernels of its device programs; weights are packed in their layouts."""
    static: bool
    """Whether programs have fixed numbers of rows, so that a prompt runs in a bucket."""
    groupings: Mapping[str, Grouping]
    default_grouping: str
    foreign_tools: bool = False
    """Whether building takes more than this machine's C++ compiler."""
    context: int = 0
    """Default capacity of KV caches in positions; 0: as many as the model knows."""
    machine: Callable[[], Mapping[str, Any]] = dict
    """What a machine must have to run the artifacts, for the manifest."""
    built_on: Callable[[], Mapping[str, Any]] = dict
    """Properties of this machine, besides its tools, that objects and programs may depend on."""
    suits: Callable[[Path], bool] = lambda model: False
    """Whether this machine should run the target by default, given the directory of a model's artifacts."""
    runs_here: Callable[[], bool] = lambda: True
    """Whether this machine has the device and what it takes to use it."""
    need_tools: Callable[[], object] = lambda: None
    """Raises UserError, which names the missing tools, if this machine cannot build the target."""
    rank: int = 0
    """The default target is the one with the highest rank among those that suit."""

    def grouping(self, name: str) -> Grouping:
        """Return the grouping of this name. Raises UserError."""
        if name not in self.groupings:
            raise UserError(f"npu.grouping={name}: target {self.name} has {', '.join(self.groupings)}")
        return self.groupings[name]

    def runs(self, weights: str, activations: str = BF16.activations) -> bool:
        """Tell whether the target has products for weights in this format that take `x` as `activations=` says."""
        product = kernel_for("gemv", weights, activations)
        return bool(
            product and product.activations == activations and (product.program if self.static else product.host)
        )

    def caches(self, kv: str) -> bool:
        """Tell whether decode has attention over KV caches in the format of `kv=`.

        Static programs keep K and V in rows.
        """
        kernel = "decode_attention_kv" if self.static else "decode_attention_panels"
        return format_kernel(kernel, KV_FORMATS[kv]) in kernels()

    def checked(self, policy: Policy) -> Policy:
        """Return the policy if the target can run it. Raises UserError."""
        if missing := [name for name in policy.formats if not self.runs(name)]:
            raise UserError(
                f"weights={policy.text}: target {self.name} has no kernels for {missing[0]}: choose target=cpu"
            )
        if policy.activations != BF16.activations:
            name = f"activations={policy.activations}"
            if self.static:
                raise UserError(f"{name}: target {self.name} multiplies in 16 bits: leave it out, or choose target=cpu")
            if not any(self.runs(form, policy.activations) or form == w8a8.FORMAT.name for form in policy.formats):
                raise UserError(
                    f"{name}: products with weights={policy.text} take 16 bits: choose weights=int4, or leave it out"
                )
        if self.static and policy.layers:
            raise UserError(
                f"weights={policy.text}: target {self.name} has one program for all layers: leave out those of single "
                "layers, or choose target=cpu"
            )
        return policy

    def check(self, config: Config) -> None:
        """Raise UserError, which names the family and the target, for a model that the target cannot run.

        Args:
            config: with the positions that KV caches have room for (`Config.within`).
        """
        if not self.static:
            return
        mixers = {*config.decoder.attentions}
        reasons = {
            "norms of whole rows of Q and K": any(mixer.norms_rows for mixer in mixers),
            "layers without norms of inputs": not all(layer.entering for layer in config.decoder.layers),
            "mixtures of experts": bool(config.decoder.experts),
            "sinks": any(mixer.sinks for mixer in mixers),
            "biases of outputs": any(mixer.output_biased for mixer in mixers),
            "gpt-oss's activation": any(layer.feed_forward.activation == SWIGLU_OAI for layer in config.decoder.kinds),
            "convolutions of one position": config.decoder.taps == 1,
            "queries that grow with the position, as context= reaches": any(
                mixer.rope.q_scale and mixer.rope.q_scale.every < config.max_seq for mixer in mixers
            ),
        }
        if missing := [reason for reason, there in reasons.items() if there]:
            raise UserError(
                f"model family {config.family}: target {self.name} has no kernels for {', '.join(missing)} yet: "
                "choose target=cpu"
            )

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
    """Return every target by name."""
    packages = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__) if m.ispkg)
    return {package.TARGET.name: package.TARGET for package in packages}


def forget_tools() -> None:
    """Look for tools again when their versions are asked for: a worker outlives upgrades."""
    for name in targets():
        toolchain = importlib.import_module(f"{__name__}.{name.replace('-', '_')}.toolchain")
        for find in vars(toolchain).values():
            if forget := getattr(find, "cache_clear", None):
                forget()


def default_target(model: Path) -> Target:
    """Return the target for this machine, given the directory of a model's artifacts."""
    by_rank = sorted(targets().values(), key=lambda target: -target.rank)
    return next(target for target in by_rank if target.suits(model))
