"""The steps of a build, wired for one model and target. `dodo.py` shows them as tasks; this says what each reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from doit.exceptions import TaskFailed

from runtime.errors import UserError
from stages.checkpoint import ArtifactsOnly, copy_tokenizer, record_checkpoint, resolve
from stages.elfs import Elf, device_elfs, host_elfs
from stages.files import Turn, content_digest
from stages.fusion import fuse
from stages.link import host_elf
from stages.manifest import write_manifest
from stages.modules import write_cpu_source
from stages.objects import CPU_SOURCES, host_object
from stages.options import Options
from stages.pack import pack_weights
from stages.plans import write_plan
from stages.steps import Digests, Project, Step, doit_task
from stages.tile_objects import FEATURES
from stages.toolchain import host_compiler_fingerprint, npu, npu_fingerprint, pyxrt

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
        self.artifacts = artifacts = Path(options.artifacts)
        self.source = resolve(options.model, artifacts, options.revision)
        self.target = options.target or default_target(artifacts / self.source.name)
        self.family = "cpu" if self.target == "cpu" else "npu"
        self.buckets = options.bucket_list()
        self.objects: set[str] = set()
        self.directory = artifacts / self.source.name / self.target
        turn = Turn(artifacts / ".locks" / f"{self.source.name}-{self.target}.lock")
        self.project = Project(self.directory, Digests(artifacts / ".digests.json"), turn)
        self.steps = {step.name: step for step in self._steps()}

    def _steps(self) -> Iterator[Step]:
        yield self._checkpoint()
        yield self._tokenizer()
        yield self._plan()
        yield self._weights()
        host = {"host": host_elfs(self.family)}
        yield from self._host_programs(host, HOST_SUPPORT)
        if self.family == "cpu":
            device = {elf.name: [elf] for elf in device_elfs(self.family)}
            yield from self._host_programs(device)
            yield self._manifest(_entries(host, True) | _entries(device, False))
        else:
            # Imported here because a build that needs no MLIR must not pay for loading its framework.
            from stages.npu_graph import npu_entries, npu_steps

            yield from npu_steps(self)
            yield self._manifest(_entries(host, True) | npu_entries(self))

    def _host_programs(self, programs: Mapping[str, list[Elf]], support: tuple[str, ...] = ()) -> Iterator[Step]:
        """Objects, glue and shared objects of programs that run on the host CPU."""
        for source in sorted({*support, *(s for elfs in programs.values() for s in _sources(elfs))} - self.objects):
            self.objects.add(source)
            yield self._object(source)
        for program, elfs in programs.items():
            yield self._module(program, elfs)
            yield self._elf(program, elfs, support)

    def step(
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
        return Step(self.project, name, doc, action, outputs, tuple(inputs), **more)

    def _checkpoint(self) -> Step:
        absent = isinstance(self.source, ArtifactsOnly)
        return self.step(
            "checkpoint",
            f"Check the checkpoint of model={self.options.model} and record its content.",
            partial(record_checkpoint, self.source, self.project.digests.of),
            (CONFIG, CHECKPOINT),
            self.source.files(),
            params=None if absent else {"source": self.source.identity()},
        )

    def _tokenizer(self) -> Step:
        action = partial(copy_tokenizer, self.source)
        return self.step("tokenizer", "Copy the tokenizer.", action, [Path("tokenizer")], [self.directory / CHECKPOINT])

    def _plan(self) -> Step:
        doc = "Derive the buffers and the order of calls."
        inputs = [self.directory / CONFIG]
        if self.family == "cpu":
            return self.step("plan", doc, partial(write_plan, self.directory, self.target), [PLAN], inputs)
        from stages.npu_plans import write_npu_plan

        arguments = {"grouping": self.options.grouping, "buckets": self.buckets}
        return self.step("plan", doc, partial(write_npu_plan, self.directory), [PLAN], inputs, arguments=arguments)

    def _weights(self) -> Step:
        return self.step(
            "weights",
            "Pack the weights into blobs.",
            partial(pack_weights, self.source, self.directory),
            [WEIGHTS],
            [self.directory / CONFIG, self.directory / CHECKPOINT, self.directory / PLAN],
        )

    def _object(self, source: str) -> Step:
        path = CPU_SOURCES / f"{source}.cc"
        return self.step(
            f"object:{source}",
            f"Compile {path}.",
            partial(host_object, path, self.artifacts / ".cache/objects"),
            [_object_file(source)],
            [path],
            tool=host_compiler_fingerprint,
        )

    def _module(self, program: str, elfs: list[Elf]) -> Step:
        names = tuple(elf.name for elf in elfs)
        return self.step(
            f"module:{program}",
            f"Generate the source of {program} from its description.",
            partial(write_cpu_source, self.directory, program, names),
            [_module_file(program)],
            [self.directory / CONFIG],
        )

    def _elf(self, program: str, elfs: list[Elf], support: tuple[str, ...]) -> Step:
        objects = [self.directory / _object_file(source) for source in _sources(elfs) + support]
        return self.step(
            f"elf:{program}",
            f"Link {program} from its source and {len(objects)} objects.",
            partial(host_elf, self.directory / _module_file(program), objects, program),
            [Path(f"elf/{program}.so")],
            [self.directory / _module_file(program), *objects],
            tool=host_compiler_fingerprint,
        )

    def _manifest(self, programs: Mapping[str, Mapping[str, Any]]) -> Step:
        parts = [
            CONFIG,
            PLAN,
            WEIGHTS,
            Path("tokenizer"),
            *map(Path, sorted({str(p["file"]) for p in programs.values()})),
            *([FEATURES] if self.target == "npu2-sim" else []),
        ]
        return self.step(
            "manifest",
            "Describe the artifact directory.",
            partial(write_manifest, self.directory, self.source.name, self.target),
            [Path("manifest.json")],
            [self.directory / part for part in parts],
            arguments={"programs": programs},
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
        self.project.turn.give_up()
        print(f"{self.directory} is up to date", flush=True)

    def generate(self) -> Task:
        return self._command(self._generate)

    def chat(self) -> Task:
        return self._command(self._chat)

    def bench(self) -> Task:
        return self._command(self._bench)

    def _bench(self) -> TaskFailed | None:
        from runtime.bench import run_bench
        from stages.peers import open_peers

        options = self.options
        gguf = self.artifacts / ".cache/gguf" / f"{content_digest(self.directory / CHECKPOINT)}.gguf"
        try:
            cpus = options.threads or len(os.sched_getaffinity(0))
            peers = partial(open_peers, options.peer_list(), self.source, gguf, cpus)
            run_bench(str(self.directory), options.threads, options.repeats, options.json, peers)
        except UserError as error:
            return TaskFailed(str(error))
        return None

    def profile(self) -> Task:
        return self._command(self._profile)

    def _profile(self) -> TaskFailed | None:
        as_json = ["--json"] if self.options.json else []
        counts = (f"--threads={self.options.threads}", f"--repeats={self.options.repeats}")
        return self._runtime("--profile", *as_json, *counts, "--", str(self.directory))

    def verify(self) -> Task:
        return self._command(self._verify)

    def _command(self, action: Any) -> Task:
        """A task that uses the artifacts once they are complete."""
        return {
            "actions": [self.project.turn.give_up, action],
            "task_dep": ["manifest"],
            "meta": {"quiet": True},
            "verbosity": 2,
        }

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
        process = subprocess.Popen([sys.executable, "-m", "runtime", *arguments])
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The terminal sent it to the runtime too, which ends the reply (or, in chat, goes on).
            status = process.wait()
        return TaskFailed(f"generation ended with status {status}", report=False) if status else None

    def _verify(self) -> TaskFailed | None:
        from stages.verify import verify

        try:
            passed = verify(self.directory, self.source.fetch(), 8 if self.options.full else 2, self.options.threads)
        except UserError as error:
            return TaskFailed(str(error))
        return None if passed else TaskFailed("verify: the runtime and transformers disagree, see the table")

    def estimate(self) -> Task:
        return {"actions": [self._estimate], "meta": {"quiet": True}, "verbosity": 2}

    def _estimate(self) -> TaskFailed | None:
        from stages.config import read_config
        from stages.npu_report import print_estimate

        try:
            print_estimate(read_config(self.source.fetch() / "config.json"), self.buckets[-1])
        except UserError as error:
            return TaskFailed(str(error))
        return None

    def doctor(self) -> Task:
        return {"actions": [self._doctor], "meta": {"quiet": True}, "verbosity": 2}

    def _doctor(self) -> None:
        from stages.doctor import doctor

        doctor(self.options.json)

    def why(self) -> Task:
        return {"actions": [self._why], "meta": {"quiet": True}, "verbosity": 2}

    def _why(self) -> None:
        for step in self.steps.values():
            print(f"{step.name:24} {step.why_stale() or 'current'}", flush=True)


def default_target(model: Path) -> str:
    """`npu2` on a machine that has the NPU and either its artifacts or what builds them; else `cpu`."""
    device = npu()
    if device is None or not device.columns:
        return "cpu"
    if not device.usable:
        reason = "this user may not open it"
    elif pyxrt() is None:
        reason = "XRT's pyxrt is not installed"
    elif not (model / "npu2/manifest.json").is_file() and npu_fingerprint() is None:
        reason = "there are no npu2 artifacts of this model and not all tools to build them"
    else:
        return "npu2"
    print(f"an NPU is here, but {reason}: using target=cpu (see doit doctor)", file=sys.stderr)
    return "cpu"


def _sources(elfs: Iterable[Elf]) -> tuple[str, ...]:
    return tuple(sorted({launch.kernel.source for elf in elfs for launch in fuse(elf)}))


def _entries(programs: Mapping[str, list[Elf]], host: bool) -> dict[str, dict[str, Any]]:
    """Entry points of host programs: name -> where it is."""
    return {
        elf.name: {"file": f"elf/{program}.so", "entry": elf.name, "host": host}
        for program, elfs in programs.items()
        for elf in elfs
    }


def _object_file(source: str) -> Path:
    return Path(f"build/objects/{source}.o")


def _module_file(program: str) -> Path:
    return Path(f"build/modules/{program}.cc")
