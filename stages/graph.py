"""The steps of a build, wired for one model and target. `dodo.py` shows them as tasks; this says what each reads.

The wiring is the same for every target; what differs stands in its record and its rooms (`stages.targets`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_npu2 import trust
from llama_npu2.cpu_features import cpu_features
from llama_npu2.errors import UserError
from stages.engine import definitions
from stages.engine.digests import Digests
from stages.engine.files import read_json, write_atomic
from stages.engine.objects import source_file
from stages.engine.places import (
    CACHE,
    CALIBRATION,
    CHECKPOINT,
    CONFIG,
    MANIFEST,
    MODULES,
    OBJECTS,
    PACKING,
    PLAN,
    PROVENANCE,
    ROOT,
    WEIGHTS,
    lock_file,
)
from stages.engine.steps import Project, Step
from stages.engine.turn import Turn
from stages.manifest import write_manifest
from stages.model import calibration
from stages.model.checkpoint import Checkpoint
from stages.model.families import read_config
from stages.model.grouping import WINDOW, Grouping, Program, programs
from stages.model.plan import write_plan
from stages.model.policy import BF16, Policy, held_policy, parse_policy
from stages.model.sources import (
    ArtifactsOnly,
    Source,
    copy_tokenizer,
    known_family,
    known_positions,
    quantised,
    record_checkpoint,
    resolve,
    safe_name,
)
from stages.provenance import statement
from stages.sharing.cache import Cache
from stages.targets import Target, default_target, targets
from stages.weights.formats import formats
from stages.weights.packing import pack_weights

if TYPE_CHECKING:
    from stages.commands.options import Options

DEFAULT_TEXT = "default"
"""What `calibrate=` calls the text that ships."""
HOST = "host"
"""The library of host programs."""


@dataclass
class Build:
    """One model for one target: where it is built, and by which steps."""

    options: Options

    @cached_property
    def artifacts(self) -> Path:
        return Path(self.options.artifacts).absolute()

    @cached_property
    def source(self) -> Source:
        return resolve(self.options.model, self.artifacts, self.options.revision, bool(self.options.remote))

    @cached_property
    def target(self) -> Target:
        chosen = targets().get(self.options.target)
        return chosen or default_target(self.artifacts / self.source.name)

    @cached_property
    def policy(self) -> Policy:
        """In which formats the weights and the KV cache are stored."""
        if not self.target.caches(self.options.kv):
            raise UserError(f"kv={self.options.kv}: target {self.target.name} has no kernels for it: choose target=cpu")
        if self.options.weights:
            found = self.target.checked(parse_policy(self.options.weights, self.options.kv))
        else:
            found = replace(self._held_policy(), kv=self.options.kv)
        return self.multiplied(found)

    def multiplied(self, policy: Policy) -> Policy:
        """A policy with what prompts are multiplied with: what `matmul=` says, or is usual for it."""
        if not self.target.static:
            return policy
        return replace(policy, matmul=self.options.matmul or policy.usual_matmul)

    @property
    def bfp16(self) -> bool:
        """Whether prompts are multiplied in block floating point."""
        return self.policy.matmul == "bfp16"

    def _held_policy(self) -> Policy:
        """What the checkpoint holds. Before a quantised one is there, that cannot be known: it is fetched."""
        if isinstance(self.source, ArtifactsOnly):
            return self._stored_policy()
        if not quantised(self.source, self.directory / CONFIG):
            return BF16
        held = held_policy(Checkpoint.open(self.source.fetch()), self.target.runs)
        # One program serves all layers there.
        return BF16 if self.target.static and held.layers else held

    def _stored_policy(self) -> Policy:
        """What artifacts hold whose checkpoint is not on this machine."""
        recorded = self.directory / PLAN
        return parse_policy(read_json(recorded).get("weights", "") if recorded.is_file() else "")

    @cached_property
    def calibration(self) -> Path | None:
        """The text that weights are rounded for, where there is one."""
        given = self.options.calibrate
        if given and not any(formats()[name].grid for name in self.policy.formats):
            known = ", ".join(sorted(name for name, form in formats().items() if form.grid))
            raise UserError(f"calibrate={given}: no format of weights={self.policy.text} can use it: choose {known}")
        text = {"": None, DEFAULT_TEXT: calibration.TEXT}.get(given, Path(given).absolute())
        if text and not text.is_file():
            raise UserError(f"calibrate={given}: there is no such file: give a text file, or {DEFAULT_TEXT}")
        return text

    @property
    def layers(self) -> int:
        """Of the model. Its checkpoint is fetched where it is not here yet."""
        if isinstance(self.source, ArtifactsOnly):
            return read_config(self.directory / CONFIG).layers
        return Checkpoint.open(self.source.fetch()).config.layers

    @property
    def name(self) -> str:
        """Of the directory: the target, the formats of weights and KV cache where they were chosen, the text's name
        where weights are calibrated on one."""
        text = f"-calibrated-{safe_name(Path(self.options.calibrate).stem)}" if self.options.calibrate else ""
        return f"{self.target.name}{parse_policy(self.options.weights, self.options.kv).suffix}{text}"

    @cached_property
    def directory(self) -> Path:
        return self.artifacts / self.source.name / self.name

    @property
    def artifact(self) -> str:
        """What the directory is called on remotes."""
        return f"{self.source.name}/{self.name}"

    @property
    def directory_as_given(self) -> Path:
        """For messages: below the `artifacts` of the command line."""
        return Path(self.options.artifacts) / self.source.name / self.name

    def report(self, name: str) -> Path:
        """The directory for what a command finds out of this build: `output=`, or one beside `artifacts=` and as that
        was given. It is not made."""
        if self.options.output:
            return Path(self.options.output)
        return Path(self.options.artifacts).parent / "reports" / self.source.name / self.name / name

    @cached_property
    def project(self) -> Project:
        turn = Turn(lock_file(self.artifacts, self.source.name, self.name))
        shared = Cache(self.options.cache, self.may_go) if self.options.cache else None
        digests = Digests(self.artifacts / ".digests.json")
        return Project(self.directory, digests, turn, shared, accepted=Path("tokenizer"))

    def may_go(self, step: Step) -> bool:
        """Whether others may have what a step makes."""
        return not step.private or self._checkpoint_may_go

    @cached_property
    def _checkpoint_may_go(self) -> bool:
        return bool(self.options.include) or self.source.is_public()

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        return self.options.bucket_list() if self.target.static else ()

    @property
    def context(self) -> int:
        """Positions that KV caches have room for at most; 0: as many as the model knows. Raises UserError."""
        if self.options.context and not self.target.static:
            where = f"context={self.options.context}: target {self.target.name}"
            raise UserError(f"{where} takes memory for positions as they are used: leave it out")
        return self.options.context or self.target.context

    @property
    def positions(self) -> int:
        """That programs must be there for: no fewer than KV caches have room for."""
        known = known_positions(self.source, self.directory / CONFIG)
        return min(known or self.context, self.context)

    @cached_property
    def steps(self) -> dict[str, Step]:
        """Every step by name."""
        return {step.name: step for step in Wiring(self).steps()}

    def need_tools(self) -> None:
        """Raises UserError where a step never ran, and what it runs is not on this machine."""
        if any(step.tool and step.tool() is None and step.receipt() is None for step in self.steps.values()):
            self.target.need_tools()

    @cached_property
    def libraries(self) -> list[Library]:
        """What holds the programs."""
        return Wiring(self).libraries()

    @property
    def grouping(self) -> Grouping:
        """For the formats of the weights."""
        family = known_family(self.source, self.directory / CONFIG).model_type
        return self.target.grouping(self.grouping_name).of(family, self.policy)

    @property
    def grouping_name(self) -> str:
        return self.options.grouping or self.target.default_grouping

    def finish(self) -> None:
        """The directory is complete: remove what steps left that are no more, vouch for what was built here, and let
        others have their turn. Raises UserError."""
        self.project.prune(self.steps)
        definitions.settle(self.project, {step.module for step in self.steps.values()})
        self._vouch()
        self.project.digests.save()
        self.project.turn.give_up()

    def _vouch(self) -> None:
        """Say that the directory is this user's, and how it was built. What somebody else signed stays as it is."""
        manifest, provenance = (self.directory / MANIFEST).read_bytes(), self.directory / PROVENANCE
        if trust.is_marked(self.directory, manifest) and provenance.is_file():
            return
        if all(step.is_own() for step in self.steps.values()):
            said = statement(self.project, self.steps.values(), self.recipe)
            write_atomic(provenance, json.dumps(said, indent=1, sort_keys=True).encode() + b"\n")
            trust.mark_own(self.directory, manifest)

    @property
    def recipe(self) -> dict[str, Any]:
        """The variables that decide what is built, as they were chosen."""
        options, policy = self.options, self.policy
        return {
            "model": self.source.name,
            "revision": options.revision,
            "target": self.target.name,
            "weights": policy.text,
            "kv": policy.kv,
            "calibrate": Path(options.calibrate).name,
            "ignore": options.ignore,
            "buckets": self.buckets,
            "context": self.context,
            "grouping": self.grouping_name,
            "matmul": policy.matmul,
        }


@dataclass(frozen=True, eq=False)
class Library:
    """Programs that are built together, by a target's rooms."""

    name: str
    target: Target
    programs: tuple[Program, ...]

    @cached_property
    def sources(self) -> list[str]:
        """C++ that it links."""
        return self.target.modules.sources(self.programs)

    @property
    def file(self) -> Path:
        return Path("elf") / f"{self.name}{self.target.programs.SUFFIX}"

    @property
    def costs(self) -> tuple[Path, ...]:
        """What the estimate says of it, where the target asks for that."""
        return (MODULES / f"{self.name}.cost.json",) if self.target.modules.COSTS else ()

    @property
    def described(self) -> tuple[Path, ...]:
        """What the manifest says of its programs, in pieces."""
        return MODULES / f"{self.name}.json", *self.costs, *self.told

    @property
    def told(self) -> tuple[Path, ...]:
        """What only the finished program tells of itself, where the target writes that."""
        return (Path("elf") / f"{self.name}.json",) if self.target.programs.DESCRIBES else ()


class Wiring:
    """Which step reads what."""

    PREFIX = ""
    """Of the steps' names."""
    BEFORE_TOOLS: tuple[str, ...] = ("weights", "tokenizer", f"elf:{HOST}")
    """What is built before what needs foreign tools, so that without them all else is there and one line names them."""

    def __init__(self, build: Build) -> None:
        self.build, self.options, self.target = build, build.options, build.target
        self.directory = build.directory
        self.grouping_name = build.grouping_name
        self.grouping = self.target.grouping(self.grouping_name)

    def steps(self) -> Iterator[Step]:
        yield self._checkpoint()
        yield self._tokenizer()
        yield self._plan()
        calibrated: list[Path] = []
        if self.build.calibration:
            yield from self._calibration(self.build.calibration)
            calibrated = calibration.weights_files(self.build.layers)
        yield self._weights([self.directory / file for file in calibrated])
        libraries = self.libraries()
        for target in dict.fromkeys(library.target for library in libraries):
            yield from self._made_for(target, [library for library in libraries if library.target is target])
        yield self._manifest(libraries)

    def libraries(self) -> list[Library]:
        """The host's programs in one, which target cpu makes for all targets; each device program in its own."""
        family = known_family(self.build.source, self.directory / CONFIG).model_type
        policy = self.build.policy
        # Of a hub's model that is not here yet, this fetches the configuration.
        positions = self.build.positions if self.target.static else WINDOW
        made = programs(family, self.grouping, self.build.buckets, policy, positions)
        host = Library(HOST, targets()["cpu"], tuple(program for program in made if program.host))
        return [host, *(Library(p.name, self.target, (p,)) for p in made if not p.host)]

    def _step(
        self,
        name: str,
        doc: str,
        action: Any,
        outputs: Iterable[Path],
        inputs: Iterable[Path] = (),
        arguments: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Step:
        """`arguments` go to the action by name and count as parameters of the step."""
        if arguments:
            action, more = partial(action, **arguments), {"params": arguments, **more}
        outputs = tuple(self.directory / output for output in outputs)
        more["after"] = tuple(self.PREFIX + other for other in more.get("after", ()))
        return Step(self.build.project, self.PREFIX + name, doc, action, outputs, tuple(inputs), **more)

    def _checkpoint(self) -> Step:
        source, ignore = self.build.source, list(self.options.ignore_list())
        return self._step(
            "checkpoint",
            f"Check the checkpoint of model={self.options.model} and record its content.",
            partial(record_checkpoint, source, self.build.project.digests.sha256, ignore),
            (CONFIG, CHECKPOINT),
            source.files(),
            params=None if isinstance(source, ArtifactsOnly) else {"source": source.identity(), "ignore": ignore},
            elsewhere=lambda: {} if source.pinned else None,
        )

    def _tokenizer(self) -> Step:
        action = partial(copy_tokenizer, self.build.source)
        inputs = [self.directory / CHECKPOINT]
        return self._step("tokenizer", "Copy the tokenizer.", action, [Path("tokenizer")], inputs, private=True)

    def _plan(self) -> Step:
        policy = self.build.policy
        chosen: dict[str, Any] = {"buckets": self.build.buckets, "weights": policy.text, "kv": policy.kv}
        chosen |= {"context": self.build.context, "matmul": policy.matmul}
        action = partial(write_plan, self.directory, self.grouping, self.target.kernel_set, **chosen)
        params = {"grouping": asdict(self.grouping), "set": self.target.kernel_set, **chosen}
        doc = "Derive the buffers and the order of calls."
        return self._step("plan", doc, action, [PLAN, PACKING], [self.directory / CONFIG], params=params)

    def _calibration(self, text: Path) -> Iterator[Step]:
        """The text through the checkpoint, a step per layer; the head; the layers that are rounded, a step each."""
        read = [self.directory / part for part in (CONFIG, CHECKPOINT, PACKING)]
        text_and_tokenizer = [self.directory / "tokenizer", text]
        source, layers, threads = self.build.source, self.build.layers, self.options.threads
        before = [self.directory / calibration.source_file(layer) for layer in range(layers + 1)]
        step = partial(self._step, private=True, elsewhere=lambda: {"features": cpu_features(), **_arithmetic()})
        yield step(
            "calibration:text",
            "Embed the text that weights are rounded for.",
            partial(calibration.begin, source, self.directory, text),
            [CALIBRATION, calibration.source_file(0)],
            [*read, *text_and_tokenizer],
        )
        for layer in range(layers):
            yield step(
                f"calibration:source_{layer:03d}",
                f"Run the text through the checkpoint's layer {layer + 1}.",
                partial(calibration.run_source, source, self.directory, layer, threads),
                [calibration.source_file(layer + 1)],
                [*read, before[layer]],
            )
        yield step(
            "calibration:head",
            "Round the matrix that makes the logits.",
            partial(calibration.calibrate_head, source, self.directory, text, threads),
            [calibration.activations_file(0), calibration.HEAD_WEIGHTS],
            [*read, *text_and_tokenizer, before[layers]],
        )
        for layer in range(layers):
            yield step(
                f"calibration:layer_{layer:03d}",
                f"Round the weights of layer {layer + 1} for the inputs that they meet.",
                partial(calibration.calibrate_layer, source, self.directory, layer, threads),
                [calibration.activations_file(layer + 1), calibration.weights_file(layer)],
                [*read, before[layer], self.directory / calibration.activations_file(layer)],
            )

    def _weights(self, calibrated: Sequence[Path]) -> Step:
        return self._step(
            "weights",
            "Pack the weights into blobs.",
            partial(pack_weights, self.build.source, self.directory / PACKING, calibrated),
            [WEIGHTS],
            [self.directory / CONFIG, self.directory / CHECKPOINT, self.directory / PACKING, *calibrated],
            private=True,
            elsewhere=_arithmetic,
        )

    def _made_for(self, target: Target, libraries: Sequence[Library]) -> Iterator[Step]:
        """Modules, objects and programs of one target's libraries."""
        modules = [self._module(library) for library in libraries]
        yield from modules
        descriptions = [step.outputs[1] for step in modules]
        for source in sorted({source for library in libraries for source in library.sources}):
            yield self._objects(target, source, descriptions)
        for library, module in zip(libraries, modules, strict=True):
            yield self._program(library, module)

    def _module(self, library: Library) -> Step:
        room = library.target.modules
        action, inputs, arguments = self._generation(library)
        return self._step(
            f"module:{library.name}",
            f"Generate the source of {library.name} from its description.",
            action,
            # A dot in the name is a bucket, not a suffix.
            [*(MODULES / f"{library.name}{suffix}" for suffix in (room.SUFFIX, ".json")), *library.costs],
            inputs,
            arguments=arguments,
            tool=room.fingerprint,
        )

    def _generation(self, library: Library) -> tuple[Any, list[Path], dict[str, Any]]:
        """The action that makes a library's module, what it reads, and its arguments."""
        room = library.target.modules
        options = {
            "grouping": self.grouping_name,
            "matmul": self.build.policy.matmul,
            "weights": self.build.policy.text,
            "kv": self.build.policy.kv,
        }
        action = partial(room.write_module, self.directory, library.name)
        return action, [self.directory / CONFIG], room.arguments(library.programs, options)

    def _objects(self, target: Target, source: str, descriptions: Sequence[Path]) -> Step:
        room, cache = target.objects, self.build.artifacts / CACHE
        path = source_file(source)
        return self._step(
            f"object:{source}",
            f"Compile {path.relative_to(ROOT)}{' in every variant that a program links' if room.VARIANTS else ''}.",
            partial(room.write_objects, source, descriptions, cache),
            [OBJECTS / source],
            [path, *(descriptions if room.VARIANTS else ())],
            arguments=target.modules.expected(source),
            tool=room.fingerprint,
            elsewhere=target.built_on,
            after=self.BEFORE_TOOLS if target.foreign_tools else (),
        )

    def _program(self, library: Library, module: Step) -> Step:
        """A program reads just the objects that it links: which, its action finds out."""
        room = library.target.programs
        return self._step(
            f"elf:{library.name}",
            f"Link {library.name} from its module and its objects.",
            partial(room.write_program, module.outputs[0], library.name),
            [library.file, *library.told],
            module.outputs[:2],
            tool=room.fingerprint,
            elsewhere=library.target.built_on,
            after=tuple(f"object:{source}" for source in library.sources),
        )

    def _manifest(self, libraries: Sequence[Library]) -> Step:
        entries = {
            program.name: {
                "file": library.file.as_posix(),
                "entry": program.entry,
                "host": program.host,
                "described": [path.as_posix() for path in library.described],
            }
            for library in libraries
            for program in library.programs
        }
        made = [path for library in libraries for path in (*library.described, library.file)]
        machine = {"name": self.target.name, "device": self.target.device, **self.target.machine()}
        action, inputs, more = self._description()
        return self._step(
            "manifest",
            "Describe the artifact directory.",
            action,
            [Path("manifest.json")],
            [self.directory / part for part in (*inputs, *made)],
            arguments={"programs": entries, "target": machine, **more},
            private=True,
        )

    def _description(self) -> tuple[Any, list[Path], dict[str, Any]]:
        """The action that describes the directory, what it reads besides modules and programs, and more arguments."""
        parts = [CONFIG, PLAN, WEIGHTS, Path("tokenizer"), *([CALIBRATION] if self.build.calibration else [])]
        more = {"model": self.build.source.name, "calibrated": bool(self.build.calibration)}
        return partial(write_manifest, self.directory), parts, more


def _arithmetic() -> dict[str, str]:
    """What values of weights depend on besides this project's code."""
    return {package: version(package) for package in ("ml_dtypes", "numpy")}
