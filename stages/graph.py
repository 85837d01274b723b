"""The steps of a build, wired for one model and target. `dodo.py` shows them as tasks; this says what each reads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from doit.exceptions import TaskFailed

from runtime.errors import UserError
from stages.checkpoint import ArtifactsOnly, copy_tokenizer, record_checkpoint, resolve
from stages.elfs import DEVICE_ELFS, HOST_ELFS, Elf
from stages.link import host_elf
from stages.manifest import write_manifest
from stages.modules import write_cpu_source
from stages.objects import CPU_SOURCES, host_object
from stages.options import Options
from stages.pack import pack_weights
from stages.plans import write_plan
from stages.steps import Digests, Project, Step, doit_task
from stages.toolchain import host_compiler_fingerprint

CONFIG = Path("build/config.json")
CHECKPOINT = Path("build/checkpoint.json")
PLAN = Path("build/plan.json")
WEIGHTS = Path("build/weights.json")
HOST_SUPPORT = ("limits", "team")
"""Sources of `host.so` that are not kernels: the thread team and the machine's speed limits."""

Task = dict[str, Any]


class Graph:
    """Every step of `options.model` for `options.target`, and the commands that use the result."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.target = options.target or "cpu"
        self.artifacts = artifacts = Path(options.artifacts)
        self.source = resolve(options.model, artifacts, options.revision)
        self.directory = artifacts / self.source.name / self.target
        locks = artifacts / ".locks" / self.source.name / self.target
        self.project = Project(self.directory, Digests(artifacts / ".digests.json"), locks)
        self.steps = {step.name: step for step in self._steps()}

    def _steps(self) -> Iterator[Step]:
        yield self._checkpoint()
        yield self._tokenizer()
        yield self._plan()
        yield self._weights()
        programs = {elf.name: [elf] for elf in (describe() for describe in DEVICE_ELFS)}
        programs["host"] = [describe() for describe in HOST_ELFS]
        sources = {source for elfs in programs.values() for source in _sources(elfs)} | set(HOST_SUPPORT)
        for source in sorted(sources):
            yield self._object(source)
        for program, elfs in programs.items():
            yield self._module(program, elfs)
            yield self._elf(program, elfs)
        yield self._manifest(programs)

    def _step(
        self, name: str, doc: str, action: Any, outputs: Iterable[Path], inputs: Iterable[Path] = (), **more: Any
    ) -> Step:
        outputs = tuple(self.directory / output for output in outputs)
        return Step(self.project, name, doc, action, outputs, tuple(inputs), **more)

    def _checkpoint(self) -> Step:
        absent = isinstance(self.source, ArtifactsOnly)
        return self._step(
            "checkpoint",
            f"Check the checkpoint of model={self.options.model} and record its content.",
            partial(record_checkpoint, self.source, self.project.digests.of),
            (CONFIG, CHECKPOINT),
            self.source.files(),
            params=None if absent else {"source": self.source.identity()},
        )

    def _tokenizer(self) -> Step:
        action = partial(copy_tokenizer, self.source)
        return self._step(
            "tokenizer", "Copy the tokenizer.", action, [Path("tokenizer")], [self.directory / CHECKPOINT]
        )

    def _plan(self) -> Step:
        return self._step(
            "plan",
            "Derive the buffers and the order of calls.",
            partial(write_plan, self.directory, self.target),
            [PLAN],
            [self.directory / CONFIG],
        )

    def _weights(self) -> Step:
        return self._step(
            "weights",
            "Pack the weights into blobs.",
            partial(pack_weights, self.source, self.directory),
            [WEIGHTS],
            [self.directory / CHECKPOINT, self.directory / PLAN],
        )

    def _object(self, source: str) -> Step:
        path = CPU_SOURCES / f"{source}.cc"
        return self._step(
            f"object:{source}",
            f"Compile {path}.",
            partial(host_object, path, self.artifacts / ".cache/objects"),
            [_object_file(source)],
            [path],
            tool=host_compiler_fingerprint,
        )

    def _module(self, program: str, elfs: list[Elf]) -> Step:
        names = tuple(elf.name for elf in elfs)
        return self._step(
            f"module:{program}",
            f"Generate the source of {program} from its description.",
            partial(write_cpu_source, self.directory, program, names),
            [_module_file(program)],
            [self.directory / CONFIG],
        )

    def _elf(self, program: str, elfs: list[Elf]) -> Step:
        sources = _sources(elfs) + (HOST_SUPPORT if program == "host" else ())
        objects = [self.directory / _object_file(source) for source in sources]
        return self._step(
            f"elf:{program}",
            f"Link {program} from its source and {len(objects)} objects.",
            partial(host_elf, self.directory / _module_file(program), objects, program),
            [Path(f"elf/{program}.so")],
            [self.directory / _module_file(program), *objects],
            tool=host_compiler_fingerprint,
        )

    def _manifest(self, programs: Mapping[str, list[Elf]]) -> Step:
        files = {elf.name: f"elf/{program}.so" for program, elfs in programs.items() for elf in elfs}
        parts = [CONFIG, PLAN, WEIGHTS, Path("tokenizer"), *map(Path, sorted(set(files.values())))]
        return self._step(
            "manifest",
            "Describe the artifact directory.",
            partial(write_manifest, self.directory, self.source.name, self.target, files),
            [Path("manifest.json")],
            [self.directory / part for part in parts],
        )

    def task(self, name: str) -> Task:
        """One step as a doit task."""
        return doit_task(self.steps[name], self.steps.values())

    def tasks(self, group: str) -> Iterator[Task]:
        """The steps of a group as doit subtasks."""
        yield from (self.task(name) for name in self.steps if name.startswith(f"{group}:"))

    def compile(self) -> Task:
        return {"actions": [self._report_complete], "task_dep": ["manifest"], "meta": {"quiet": True}}

    def _report_complete(self) -> None:
        print(f"{self.directory} is up to date", flush=True)

    def generate(self) -> Task:
        return self._command(self._generate)

    def chat(self) -> Task:
        return self._command(self._chat)

    def verify(self) -> Task:
        return self._command(self._verify)

    def _command(self, action: Any) -> Task:
        return {"actions": [action], "task_dep": ["manifest"], "meta": {"quiet": True}, "verbosity": 2}

    def _generate(self) -> TaskFailed | None:
        if self.options.prompt is None:
            return TaskFailed('no prompt: doit run prompt="some text"')
        raw = ["--raw"] if self.options.raw else []
        return self._runtime(*raw, *self._sampling(), "--", str(self.directory), self.options.prompt)

    def _chat(self) -> TaskFailed | None:
        return self._runtime("--chat", *self._sampling(), "--", str(self.directory))

    def _sampling(self) -> list[str]:
        options = self.options
        arguments = []
        for name in ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "threads"):
            value = getattr(options, name)
            if value is not None:
                arguments.append(f"--{name.replace('_', '-')}={value}")
        return arguments

    def _runtime(self, *arguments: str) -> TaskFailed | None:
        """The same command line that a machine without build tools uses; it prints its own error line."""
        status = subprocess.run([sys.executable, "-m", "runtime", *arguments], check=False).returncode
        return TaskFailed(f"generation ended with status {status}", report=False) if status else None

    def _verify(self) -> TaskFailed | None:
        from stages.verify import verify

        try:
            passed = verify(self.directory, self.source.fetch(), 8 if self.options.full else 2, self.options.threads)
        except UserError as error:
            return TaskFailed(str(error))
        return None if passed else TaskFailed("verify: the runtime and transformers disagree, see the table")

    def why(self) -> Task:
        return {"actions": [self._why], "meta": {"quiet": True}, "verbosity": 2}

    def _why(self) -> None:
        for step in self.steps.values():
            print(f"{step.name:24} {step.why_stale() or 'current'}", flush=True)


def _sources(elfs: Iterable[Elf]) -> tuple[str, ...]:
    return tuple(sorted({source for elf in elfs for source in elf.sources()}))


def _object_file(source: str) -> Path:
    return Path(f"build/objects/{source}.o")


def _module_file(program: str) -> Path:
    return Path(f"build/modules/{program}.cc")
