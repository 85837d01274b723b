"""The steps of a build with their inputs. `dodo.py` shows them as tasks.

The wiring is the same for every target; differences are in the target's record and its modules (`stages.targets`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_npu2.artifact.cpu_features import cpu_features
from llama_npu2.frozen import frozen
from stages.engine.objects import linked, source_file
from stages.engine.places import CACHE, CALIBRATION, CHECKPOINT, CONFIG, MODULES, OBJECTS, PACKING, PLAN, ROOT, WEIGHTS
from stages.engine.project import load_receipt
from stages.engine.room import MEMORY_OF_LINK
from stages.engine.steps import Step
from stages.graph.manifest import write_manifest
from stages.model.grouping import CONTEXT_BUCKET, Program, programs
from stages.model.packing import pack_weights
from stages.model.plan import write_plan
from stages.model.sources import ArtifactsOnly, copy_tokenizer, known_config, record_checkpoint
from stages.targets import Target, targets
from stages.targets.cpu.instruction_sets import all_sets, sets_used_here

if TYPE_CHECKING:
    from stages.graph.choices import Choices

HOST = "host"
"""The name of the library of host programs."""


@frozen(eq=False)
class Library:
    """Programs that are built together, by a target's modules."""

    name: str
    target: Target
    programs: tuple[Program, ...]
    sets: tuple[str, ...] = ()
    """The instruction sets that it has code for, if it runs on the host's CPU."""

    @cached_property
    def sources(self) -> list[str]:
        """The C++ sources that it links."""
        return self.target.modules.sources(self.programs, self.sets)

    @property
    def file(self) -> Path:
        return Path("elf") / f"{self.name}{self.target.programs.SUFFIX}"

    @property
    def costs(self) -> tuple[Path, ...]:
        """The file with its estimated costs, for targets that have one."""
        return (MODULES / f"{self.name}.cost.json",) if self.target.modules.COSTS else ()

    @property
    def described(self) -> tuple[Path, ...]:
        """The files of which the manifest's entries of its programs are put together."""
        return MODULES / f"{self.name}.json", *self.costs, *self.linked_facts

    @property
    def linked_facts(self) -> tuple[Path, ...]:
        """The file with facts that are known only once it is linked, for targets that write one."""
        return (Path("elf") / f"{self.name}.json",) if self.target.programs.DESCRIBES else ()


class Wiring:
    """The steps of a build, with the files that each reads."""

    PREFIX = ""
    """The beginning of the steps' names."""
    BEFORE_COMPILERS: tuple[str, ...] = ("tokenizer",)
    """The steps that refuse a model: before they have run, nothing is compiled for it."""
    BEFORE_TOOLS: tuple[str, ...] = ("weights", "tokenizer", f"elf:{HOST}")
    """Steps that run before those that need foreign tools, so that without the tools all else is built and one line
    names them."""

    def __init__(self, build: Choices) -> None:
        self.build, self.options, self.target = build, build.options, build.target
        self.directory = build.directory
        self.grouping_name = build.grouping_name
        self.grouping = build.whole_grouping

    @cached_property
    def host_sets(self) -> tuple[str, ...]:
        """The instruction sets of the host's libraries: all for a portable build, else those that this machine uses.

        With `cache=`, builds share what they make, so these are portable. Sets that the libraries have already stay, so
        that no directory stops running on another machine.
        """
        if self.build.portable or self.build.shares:
            return all_sets()
        receipt = load_receipt(self.build.project.receipt_path(f"module:{HOST}"))
        params = receipt["key"].get("params") if receipt else {"sets": []}
        there = params.get("sets", all_sets()) if isinstance(params, dict) else []  # earlier versions had all
        return tuple(name for name in all_sets() if name in sets_used_here() or name in there)

    def steps(self) -> Iterator[Step]:
        """Yield every step, each after those whose outputs it reads."""
        yield self._checkpoint()
        yield self._tokenizer()
        yield self._plan()
        calibrated: list[Path] = []
        if self.build.calibration:
            from stages.model.calibration import weights_files  # few builds need it

            yield from self._calibration(self.build.calibration)
            calibrated = weights_files(self.build.layers)
        yield self._weights([self.directory / file for file in calibrated])
        libraries = self.libraries()
        for target in dict.fromkeys(library.target for library in libraries):
            yield from self._steps_of_target(target, [library for library in libraries if library.target is target])
        yield self._manifest(libraries)

    def libraries(self) -> list[Library]:
        """Return the libraries of the programs.

        Target cpu builds one of all host programs, for all targets; each device program has one.
        """
        config = known_config(self.build.source, self.directory / CONFIG)
        policy = self.build.policy
        # This fetches the configuration of a hub's model that is not here yet.
        positions = self.build.positions if self.target.static else CONTEXT_BUCKET
        self.target.check(config.within(positions))
        all_programs = programs(config, self.build.grouping, self.build.buckets, policy, positions)
        host, sets = tuple(program for program in all_programs if program.host), self.host_sets
        device = (Library(p.name, self.target, (p,), sets) for p in all_programs if not p.host)
        return [Library(HOST, targets()["cpu"], host, sets), *device]

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
        """Return a step; `arguments` go to its action by name and count as its parameters."""
        if arguments:
            action, more = partial(action, **arguments), {"params": arguments, **more}
        outputs = tuple(self.directory / output for output in outputs)
        if tool := more.get("tool"):
            more["tool"] = self.build.tool(tool)
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
            machine_key=lambda: {} if source.pinned else None,
        )

    def _tokenizer(self) -> Step:
        action = partial(copy_tokenizer, self.build.source)
        inputs = [self.directory / CHECKPOINT]
        return self._step("tokenizer", "Copy the tokenizer.", action, [Path("tokenizer")], inputs, private=True)

    def _plan(self) -> Step:
        policy = self.build.policy
        chosen: dict[str, Any] = {"buckets": self.build.buckets, "context": self.build.context}
        action = partial(
            write_plan, self.directory, self.grouping, self.target.kernel_set, **chosen, policy=policy.recorded
        )
        params = {"grouping": asdict(self.grouping), "set": self.target.kernel_set, **chosen, **policy.recorded}
        doc = "Derive the buffers and the order of calls."
        return self._step("plan", doc, action, [PLAN, PACKING], [self.directory / CONFIG], params=params)

    def _calibration(self, text: Path) -> Iterator[Step]:
        """Yield the steps of calibration: the text through the checkpoint's layers, the head, the rounded layers."""
        from stages.model import calibration

        read = [self.directory / part for part in (CONFIG, CHECKPOINT, PACKING)]
        text_and_tokenizer = [self.directory / "tokenizer", text]
        source, layers, threads = self.build.source, self.build.layers, self.options.threads
        before = [self.directory / calibration.source_file(layer) for layer in range(layers + 1)]
        step = partial(
            self._step, private=True, portable=True, machine_key=lambda: {"features": cpu_features(), **arithmetic()}
        )
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
            machine_key=arithmetic,
        )

    def _steps_of_target(self, target: Target, libraries: Sequence[Library]) -> Iterator[Step]:
        """Yield the steps that make modules, objects and programs of one target's libraries."""
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
            portable=True,
        )

    @cached_property
    def _context(self) -> int:
        """The most positions, for models that compute something else for long contexts; else 0.

        Others' modules are the same for any room in KV caches.
        """
        return self.build.context if self.build.has_short_context else 0

    def _generation(self, library: Library) -> tuple[Any, list[Path], dict[str, Any]]:
        """Return the action that makes a library's module, the files that it reads, and its arguments."""
        room = library.target.modules
        options = {
            "grouping": self.grouping_name,
            "policy": self.build.policy.recorded,
            "context": self._context,
            "sets": library.sets,
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
            machine_key=target.built_on,
            portable=True,
            after=self.BEFORE_TOOLS if target.foreign_tools else self.BEFORE_COMPILERS,
        )

    def _program(self, library: Library, module: Step) -> Step:
        """Return the step that links a program. Its action finds out which objects it reads: those that it links."""
        room = library.target.programs
        return self._step(
            f"elf:{library.name}",
            f"Link {library.name} from its module and its objects.",
            partial(room.write_program, module.outputs[0], library.name, self.build.artifacts / CACHE),
            [library.file, *library.linked_facts],
            module.outputs[:2],
            tool=room.fingerprint,
            machine_key=library.target.built_on,
            portable=True,
            discovers=lambda: linked(module.outputs[0]).values(),
            memory=MEMORY_OF_LINK if library.target.foreign_tools else 0,
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
        built = [path for library in libraries for path in (*library.described, library.file)]
        machine = {"name": self.target.name, "device": self.target.device, **self.target.machine()}
        machine |= {"instruction_sets": list(sets)} if (sets := libraries[0].sets) else {}
        action, inputs, more = self._description()
        return self._step(
            "manifest",
            "Describe the artifact directory.",
            action,
            [Path("manifest.json")],
            [self.directory / part for part in (*inputs, *built)],
            arguments={"programs": entries, "target": machine, **more},
            private=True,
        )

    def _description(self) -> tuple[Any, list[Path], dict[str, Any]]:
        """Return the action that describes the directory, files that it reads, and more arguments.

        The files are those besides modules and programs.
        """
        parts = [CONFIG, PLAN, WEIGHTS, Path("tokenizer"), *([CALIBRATION] if self.build.calibration else [])]
        more = {"model": self.build.source.name, "calibrated": bool(self.build.calibration)}
        more |= {"adapters": adapters} if (adapters := self.build.adapters) else {}
        return partial(write_manifest, self.directory), parts, more


def arithmetic() -> dict[str, str]:
    """Return the versions of packages that values of weights depend on."""
    return {package: version(package) for package in ("ml_dtypes", "numpy")}
