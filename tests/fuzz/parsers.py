"""What is fuzzed: for each parser its seeds, how they are damaged, and what is done with what it reads."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from llama_npu2.errors import UserError
from llama_npu2.trust import envelopes
from tests.fuzz.mutate import mutated_bytes, mutated_json
from tests.support.hostile import Refused, World

if TYPE_CHECKING:
    from llama_npu2 import Llama

CORPUS = Path(__file__).with_name("corpus")
ARTIFACTS = "LLAMA_NPU2_FUZZED"
"""Environment variable: artifact directories of target cpu, with colons between, whose manifests are damaged."""

Run = Callable[[str, bytes], Any]
"""What is done with an input: the name of the seed that it comes from, and its content. Returns the numbers of what its
parser counts, if it counts something."""


@dataclass(frozen=True)
class Parser:
    """`opened`: given an empty directory, what takes inputs; `seeds`: by name; `damage`: makes an input of one."""

    opened: Callable[[Path], AbstractContextManager[Run]]
    seeds: Callable[[], Mapping[str, bytes]]
    damage: Callable[[Random, bytes, Sequence[bytes]], bytes]
    counted: tuple[str, ...] = ()
    """What an input says the numbers of, in order."""

    def case(self, seed: int, number: int) -> tuple[str, bytes]:
        """The input of a number: first come the seeds as they are."""
        seeds = self.seeds()
        if number < len(seeds):
            return [*seeds.items()][number]
        rng = Random(f"{seed}:{number}")
        name = rng.choice([*seeds])
        return name, self.damage(rng, seeds[name], [*seeds.values()])


def damaged_json(rng: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """By structure, and now and then by bytes, as what is no JSON always is."""
    if rng.random() < 0.1:
        return mutated_bytes(rng, content, others)
    try:
        value = json.loads(content)
    except ValueError:
        return mutated_bytes(rng, content, others)
    return json.dumps(mutated_json(rng, value)).encode()


def files(name: str) -> Callable[[], Mapping[str, bytes]]:
    """The seeds that lie in a folder of the corpus."""
    return functools.cache(lambda: {path.name: path.read_bytes() for path in sorted((CORPUS / name).iterdir())})


@functools.cache
def manifests() -> dict[str, bytes]:
    """Raises UserError."""
    directories = os.environ.get(ARTIFACTS, "").split(":")
    try:
        return {path: (Path(path) / "manifest.json").read_bytes() for path in directories}
    except OSError as error:
        raise UserError(f"{error.filename}: no artifacts there: name some in {ARTIFACTS}") from None


@contextlib.contextmanager
def _load_and_run(scratch: Path) -> Iterator[Run]:
    """A prompt, tokens behind it, the last of the context and scores, in buffers between guard pages."""
    from llama_npu2 import Llama
    from llama_npu2.artifact.manifest import Manifest
    from llama_npu2.devices import cpu, sim
    from llama_npu2.trust import mark_own
    from tests.fuzz.guarded import GuardedDevice

    cpu.CpuDevice = sim.CpuDevice = GuardedDevice  # type: ignore[misc]
    copies = {path: shutil.copytree(path, scratch / str(i)) for i, path in enumerate(manifests())}

    def run(path: str, content: bytes) -> None:
        (copies[path] / "manifest.json").write_bytes(content)
        mark_own(copies[path], content)
        GuardedDevice.at_end = len(content) % 4 > 0
        with contextlib.closing(Llama(Manifest.open(copies[path]), 2)) as llm:
            "".join(llm.generate("The capital of France is", max_tokens=3, temperature=0.5, seed=0))
            llm.prefill(llm.encode("word " * 600, raw=True)[: llm.context_length - llm.position - 2])
            llm._cached += [0] * (llm.context_length - llm.position - 1)
            llm.decode(0)
            llm.reset()
            llm.score([0, 1, 2, 3])

    yield run


@contextlib.contextmanager
def _guarded_models() -> Iterator[Callable[[str, bool], Llama]]:
    """Gives the model of a directory in buffers between guard pages, which end (True) or begin (False) at one."""
    from llama_npu2 import Llama
    from llama_npu2.artifact.manifest import Manifest
    from llama_npu2.devices import cpu
    from tests.fuzz.guarded import GuardedDevice

    cpu.CpuDevice = GuardedDevice  # type: ignore[misc]
    with contextlib.ExitStack() as closed:

        @functools.cache
        def opened(path: str, at_end: bool) -> Llama:
            GuardedDevice.at_end = at_end
            model = Llama(Manifest.open(path), 2, kv_memory=1 << 23)
            return closed.enter_context(contextlib.closing(model))

        yield opened


def _steps_taken() -> dict[str, bytes]:
    """For each directory some steps: runs of so many rows, from a position on, with a table of blocks and logits."""
    rng, steps = Random(0), {}
    for path in manifests():
        for number in range(8):
            blocks = rng.sample(range(16), 16)
            runs = []
            for _ in range(rng.randint(1, 4)):
                position, rows = rng.randrange(300), rng.choice((1, 1, 5, 100))
                table = [blocks.pop() for _ in range((position + rows - 1) // 128 + 1)]
                runs.append(
                    {"rows": rows, "position": position, "blocks": table, "logits": rng.randint(0, min(rows, 3))}
                )
            steps[f"{path}:{number}"] = json.dumps(runs).encode()
    return steps


@contextlib.contextmanager
def _steps(scratch: Path) -> Iterator[Run]:
    """Steps of rows with damaged tables are taken, or refused by a ValueError before anything is stored."""
    from llama_npu2.artifact.plan import BLOCK_POSITIONS
    from llama_npu2.engine.step import Run as Rows
    from llama_npu2.schema import Invalid, list_of, record, whole

    integer = whole(-(1 << 40), 1 << 40)
    shape = list_of(record({"rows": integer, "position": integer, "blocks": list_of(integer), "logits": integer}))
    with _guarded_models() as opened:

        def run(name: str, content: bytes) -> None:
            llm = opened(name.rpartition(":")[0], len(content) % 4 > 0)
            try:
                given = json.loads(content)
                shape(given)
                vocab = llm.manifest.model["vocab"]
                runs = [
                    Rows([at % vocab for at in range(min(each["rows"], 1000))], *(each[name] for name in _OF_A_RUN))
                    for each in given
                ]
                logits = llm.steps.step(runs)
            except (ValueError, Invalid, OverflowError) as error:
                raise UserError(repr(str(error)[:1000])) from None
            assert len(logits) == sum(run.logits for run in runs)
            for each in runs:
                last = each.blocks[(each.position + len(each.tokens) - 1) // BLOCK_POSITIONS]
                llm.steps.write_block(each.blocks[0], llm.steps.read_block(last))
                llm.steps.copy_blocks([(each.blocks[0], last)])

        yield run


_OF_A_RUN = ("position", "blocks", "logits")


@contextlib.contextmanager
def _schedules(scratch: Path) -> Iterator[Run]:
    """Random schedules of sequences, each of which has the tokens that it has alone."""
    from tests.support.model_schedules import schedule

    with _guarded_models() as opened:

        def run(name: str, content: bytes) -> list[int]:
            counts = schedule(opened(name, len(content) % 4 > 0), int(content), longest=300)
            return [getattr(counts, what) for what in _OF_SCHEDULES]

        yield run


_OF_SCHEDULES = ("steps", "swaps", "shared", "copies", "evicted", "drafted", "rejected")


def _context_key() -> dict[str, str]:
    return {"manifest": "ab", "instruction set": "avx2", "KV cache": "bf16"}


def _contexts_written() -> dict[str, bytes]:
    from llama_npu2.engine.contexts import write_context

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "context"
        write_context(path, _context_key(), range(11), [b"x" * 40, b"y" * 40])
        return {"context": path.read_bytes()}


@contextlib.contextmanager
def _context(scratch: Path) -> Iterator[Run]:
    from llama_npu2.engine.contexts import read_context

    def run(name: str, content: bytes) -> None:
        (scratch / name).write_bytes(content)
        (scratch / name).chmod(0o600)
        tokens, blocks = read_context(scratch / name, _context_key(), 40, 8, 64)
        assert len(blocks) == -(-len(tokens) // 8) and {*map(len, blocks)} == {40}

    yield run


def _read_checkpoint(path: Path) -> None:
    """All that a build reads of one."""
    from stages.model.checkpoint import Checkpoint, container
    from stages.model.config import tables

    checkpoint = Checkpoint.open(path)
    for name in checkpoint.held:
        checkpoint.tensor(name)
    tables(checkpoint.config, 2)
    container(path).tokenizer()


@contextlib.contextmanager
def _gguf(scratch: Path) -> Iterator[Run]:
    def run(name: str, content: bytes) -> None:
        (scratch / "model.gguf").write_bytes(content)
        _read_checkpoint(scratch / "model.gguf")

    yield run


@contextlib.contextmanager
def _gguf_parts(scratch: Path) -> Iterator[Run]:
    """One part is damaged; the others are the corpus's."""

    def run(name: str, content: bytes) -> None:
        for part in (CORPUS / "gguf_parts").iterdir():
            (scratch / part.name).write_bytes(content if part.name == name else part.read_bytes())
        _read_checkpoint(scratch / name)

    yield run


def _in_checkpoint(file: str) -> Callable[[Path], AbstractContextManager[Run]]:
    """One file of a checkpoint is damaged; the others are the corpus's of the same name, or `plain`."""

    @contextlib.contextmanager
    def opened(scratch: Path) -> Iterator[Run]:
        def run(name: str, content: bytes) -> None:
            for sound in ("config.json", "model.safetensors"):
                seed = (
                    CORPUS
                    / sound.removeprefix("model.").removesuffix(".json")
                    / f"{Path(name).stem}{Path(sound).suffix}"
                )
                (scratch / sound).write_bytes((seed if seed.exists() else seed.with_stem("plain")).read_bytes())
            (scratch / "tokenizer.json").write_bytes((CORPUS / "tokenizer/bytes.json").read_bytes())
            (scratch / file).write_bytes(content)
            _read_checkpoint(scratch)

        yield run

    return opened


@contextlib.contextmanager
def _tokenizer(scratch: Path) -> Iterator[Run]:
    from llama_npu2.artifact.storage import Directory
    from llama_npu2.text.tokenizer import TextStream, Tokenizer

    (scratch / "tokenizer").mkdir()

    def run(name: str, content: bytes) -> None:
        (scratch / "tokenizer/tokenizer.json").write_bytes(content)
        tokenizer = Tokenizer.open(Directory(scratch))
        for special in (True, False):
            ids = tokenizer.encode("The capital <s> of<|eot_id|> ab France\n\n  12345, 日本語 🙂", special)
        tokenizer.decode(ids)
        stream = TextStream(tokenizer, ("<s>",))
        "".join(stream.push(token) for token in (*ids[:20], *range(0, 300, 7), 1 << 31))
        stream.flush()

    yield run


def _chat(file: str) -> Callable[[Path], AbstractContextManager[Run]]:
    @contextlib.contextmanager
    def opened(scratch: Path) -> Iterator[Run]:
        from llama_npu2.artifact.storage import Directory
        from llama_npu2.text import sandbox
        from llama_npu2.text.chat_template import ChatTemplate

        sandbox.LONGEST = 0.2

        (scratch / "tokenizer").mkdir()

        def run(name: str, content: bytes) -> None:
            (scratch / "tokenizer" / file).write_bytes(content)
            if template := ChatTemplate.open(Directory(scratch)):
                turns = ("system", "user", "assistant", "user")
                with contextlib.closing(template):
                    template.render([{"role": role, "content": f"A {role}'s\nwords."} for role in turns])

        yield run

    return opened


@contextlib.contextmanager
def _receipt(scratch: Path) -> Iterator[Run]:
    """A step with one input and one output, both of which hold `x`. Nothing outside of its directory changes."""
    from stages.engine.digests import Digests
    from stages.engine.files import content_digest
    from stages.engine.lock import ProcessLock
    from stages.engine.project import Project
    from stages.engine.steps import Step
    from stages.engine.why import examine

    directory, outside = scratch / "model/cpu", scratch / "outside"
    directory.mkdir(parents=True)
    outside.write_text("x")
    digests = Digests(scratch / ".digests.json")
    project = Project(directory, digests, ProcessLock(scratch / "lock"))

    def act(work: Path) -> None:
        (work / "out").write_text("x")

    step = Step(project, "step", "", act, (directory / "out",), (directory / "in",))
    known = {b"DIGEST": content_digest(outside), b"CODE": project.code.digest(step.module)}

    def run(name: str, content: bytes) -> None:
        (directory / "in").write_text("x")
        for placeholder, value in known.items():
            content = content.replace(placeholder, value.encode())
        for receipt in (step.receipt_path, project.receipt_path("gone")):
            receipt.parent.mkdir(parents=True, exist_ok=True)
            receipt.write_bytes(content)
        assert all(line.isprintable() for line in examine({"step": step})["step"].sentences)
        step.is_own()
        project.prune(["step"])
        if failed := step.run():
            raise UserError(str(failed.message))
        step.receipt_path.write_bytes(content)
        step.clean()
        assert outside.read_text() == "x"

    yield run


@contextlib.contextmanager
def _definitions(scratch: Path) -> Iterator[Run]:
    """What a step's code was when it ran, and how long steps took."""
    from stages.engine.changes import key_change
    from stages.engine.definitions import FOLDER
    from stages.engine.digests import Digests
    from stages.engine.durations import Durations
    from stages.engine.files import content_digest
    from stages.engine.lock import ProcessLock
    from stages.engine.project import Project
    from stages.engine.steps import Step
    from stages.engine.why import explain

    directory, left = scratch / "model/cpu", scratch / ".durations.json"
    (directory / FOLDER).mkdir(parents=True)
    project = Project(directory, Digests(scratch / ".digests.json"), ProcessLock(scratch / "lock"))
    step = Step(project, "step", "", _nothing, ())

    def run(name: str, content: bytes) -> None:
        left.write_bytes(content)
        path = directory / FOLDER / f"before-{content_digest(left)}.json"
        path.write_bytes(content)
        assert explain(step, key_change("code", "before", "now"))
        assert all(seconds >= 0 for seconds in Durations(scratch, directory).last.values())
        path.unlink()

    yield run


def _nothing(work: Path) -> None:
    """An action."""


@contextlib.contextmanager
def _digests(scratch: Path) -> Iterator[Run]:
    from stages.engine.digests import Digests

    file = scratch / "file"
    file.write_text("x")
    os.utime(file, ns=(0, 0))

    def run(name: str, content: bytes) -> None:
        status = file.stat()
        known = {b"PATH": str(file), b'"CTIME"': str(status.st_ctime_ns), b'"INODE"': str(status.st_ino)}
        for placeholder, value in known.items():
            content = content.replace(placeholder, value.encode())
        (scratch / ".digests.json").write_bytes(content)
        digests = Digests(scratch / ".digests.json")
        for find in (digests.of, digests.sha256):
            find(file)
            find(scratch)
        digests.save()

    yield run


@contextlib.contextmanager
def _planned(scratch: Path) -> Iterator[Run]:
    """What steps leave for each other: a plan, the buffers that are packed, where each of them is."""
    from stages.graph.manifest import write_manifest
    from stages.model.buffers import read_buffers

    built = {path: json.loads(content) for path, content in manifests().items()}
    copies = {path: shutil.copytree(path, scratch / str(i)) for i, path in enumerate(built)}

    def run(name: str, content: bytes) -> None:
        path, file = name.split(":")
        directory, said = copies[path], built[path]
        sound = (directory / file).read_bytes()
        (directory / file).write_bytes(content)
        programs = {
            program: {key: spec[key] for key in ("file", "entry", "host")}
            | {"described": [f"build/modules/{Path(spec['file']).stem}.json"]}
            for program, spec in said["programs"].items()
        }
        try:
            read_buffers(directory / "build/packing.json")
            write_manifest(directory, directory, programs, said["target"], "fuzzed", False)
        finally:
            (directory / file).write_bytes(sound)

    yield run


def _left_for_each_other() -> dict[str, bytes]:
    files = [f"build/{name}.json" for name in ("plan", "packing", "weights", "config")]
    return {f"{path}:{file}": (Path(path) / file).read_bytes() for path in manifests() for file in files}


@contextlib.contextmanager
def _calibrated(scratch: Path) -> Iterator[Run]:
    from stages.model.calibrated import calibrated_weights, read_calibrated
    from stages.model.calibration import read_activations

    def run(name: str, content: bytes) -> None:
        path = scratch / name
        path.write_bytes(content)
        if path.suffix == ".npy":
            read_activations(path).astype("f4").sum()
        else:
            for weight, file in calibrated_weights([path]).items():
                read_calibrated(file, weight)

    yield run


@contextlib.contextmanager
def _generation(scratch: Path) -> Iterator[Run]:
    from stages.graph.manifest import end_tokens
    from stages.model.families import read_config

    config = read_config(CORPUS / "config/plain.json")
    (scratch / "tokenizer").mkdir()

    def run(name: str, content: bytes) -> None:
        (scratch / "tokenizer/generation_config.json").write_bytes(content)
        end_tokens(scratch, config)

    yield run


@contextlib.contextmanager
def _report(scratch: Path) -> Iterator[Run]:
    from stages.estimate.constants import Machine

    def run(name: str, content: bytes) -> None:
        (scratch / name).write_bytes(content)
        Machine.from_report(scratch / name)

    yield run


@contextlib.contextmanager
def _prompts(scratch: Path) -> Iterator[Run]:
    from stages.proof.comparison.continuations import read_prompts

    def run(name: str, content: bytes) -> None:
        (scratch / name).write_bytes(content)
        for prompt in read_prompts(scratch / name):
            assert prompt.text.strip() and "\n" not in prompt.name
            (prompt.text + prompt.name).encode()

    yield run


@contextlib.contextmanager
def _profile(scratch: Path) -> Iterator[Run]:
    """That of another run, beside one that is as it should be."""
    from stages.commands.profile import read_profile
    from stages.reports.profile_page import profile_page

    found = json.loads((CORPUS / "profile/profile.json").read_text())

    def run(name: str, content: bytes) -> None:
        (scratch / name).write_bytes(content)
        profile_page(found, read_profile(scratch / name))

    yield run


@contextlib.contextmanager
def _trust(scratch: Path) -> Iterator[Run]:
    """Signatures beside a manifest, and the list of keys."""
    from llama_npu2 import trust

    os.environ["LLAMA_NPU2_CONFIG"] = str(scratch)

    def run(name: str, content: bytes) -> None:
        if name == "trusted_keys":
            (scratch / name).write_bytes(content)
            trust.trusted_keys()
        else:
            trust.verify(content, "manifest")

    yield run


@contextlib.contextmanager
def _record(scratch: Path) -> Iterator[Run]:
    """What remotes say of a step."""
    from stages.sharing.records import Record

    def run(name: str, content: bytes) -> None:
        try:
            said = json.loads(content)
        except ValueError:
            raise UserError("no JSON") from None
        record = Record.of_json(said)
        _ = record.address
        assert all((scratch / label).resolve().is_relative_to(scratch.resolve()) for label in record.outputs)

    yield run


@contextlib.contextmanager
def _conversation(scratch: Path) -> Iterator[Run]:
    """What one loads is saved, and loaded again, as it was."""
    from llama_npu2.cli.conversation import Conversation

    def run(name: str, content: bytes) -> None:
        (scratch / name).write_bytes(content)
        said = Conversation.load(scratch / name)
        said.save(scratch / "again.json")
        assert Conversation.load(scratch / "again.json") == said

    yield run


@functools.cache
def _world() -> World:
    """A built directory among documents, pushed to a remote. Raises UserError."""
    from tests.conftest import unfinished, write_checkpoint
    from tests.support.hostile import ACTIONS, compile_all, reply

    manifests()  # raises UserError
    world = World(Path(_held.enter_context(tempfile.TemporaryDirectory(prefix="fuzzed-"))))
    write_checkpoint(world.checkpoint)
    objects = Path(os.environ[ARTIFACTS].split(":")[0]).parents[1] / ".cache/objects"
    shutil.copytree(objects, world.artifacts / ".cache/objects", ignore=unfinished)
    with contextlib.redirect_stdout(io.StringIO()):
        envelopes.own_key()
        compile_all(world)
        ACTIONS["push"](world)
    (world.root / "expected").write_text(reply(world))
    shutil.copytree(world.directory, world.documents)
    return world


_held = contextlib.ExitStack()
atexit.register(_held.close)


def _json_below_artifacts() -> dict[str, bytes]:
    """Every one but for those of kernels that this model does not need, by its path."""
    world = _world()
    paths = [path for path in sorted(world.artifacts.rglob("*")) if path.suffix in (".json", ".local", ".sig")]
    cached = [path for path in paths if ".cache" in path.parts]
    others = [path for path in paths if ".cache" not in path.parts]
    return {path.relative_to(world.artifacts).as_posix(): path.read_bytes() for path in (*others, *cached[:3])}


@contextlib.contextmanager
def _commands(scratch: Path) -> Iterator[Run]:
    """A command on a directory of which one file is damaged: which one, the damaged content decides. What is done is
    right, and nothing outside changes."""
    from tests.support.hostile import ACTIONS, compile_all, run

    pristine = _world()
    manifest = (pristine.directory / "manifest.json").read_bytes()

    def act(name: str, content: bytes) -> None:
        world = pristine.copy(scratch / "world")
        try:
            path = world.artifacts / name
            path.unlink()
            path.write_bytes(content)
            before, action = world.outside(), _COMMANDS[zlib.crc32(content) % len(_COMMANDS)]
            try:
                ACTIONS[action](world)
                if action in ("compile", "pull"):
                    compile_all(world)
                    assert (world.directory / "manifest.json").read_bytes() == manifest
                    run(world)
            except Refused as error:
                raise UserError(str(error)) from None
            finally:
                assert world.outside() == before
        finally:
            shutil.rmtree(scratch / "world")

    yield act


_COMMANDS = ("run", "compile", "why", "gc", "pull")


@contextlib.contextmanager
def _request(scratch: Path) -> Iterator[Run]:
    """A body of a request, as far as it comes before the model: what passes makes options of a reply."""
    from llama_npu2.serve import rerank
    from llama_npu2.serve.anthropic.fields import message_fields
    from llama_npu2.serve.anthropic.messages import turn_of
    from llama_npu2.serve.body import checked, parsed
    from llama_npu2.serve.failures import RequestError
    from llama_npu2.serve.fields import closed
    from llama_npu2.serve.ollama import chat as ollama
    from llama_npu2.serve.ollama import generate
    from llama_npu2.serve.ollama.common import keep_alive_of
    from llama_npu2.serve.ollama.common import sampling as of_ollama
    from llama_npu2.serve.openai import chat, completions, embeddings, responses
    from llama_npu2.serve.openai.common import sampling
    from llama_npu2.serve.openai.tools import tools_of

    others = {"completion": completions, "embeddings": embeddings, "rerank": rerank, "responses": responses}

    def run(name: str, content: bytes) -> None:
        api = others.get(Path(name).stem, chat)
        try:
            if name.startswith("message"):
                turn = turn_of(checked(parsed(content), closed(*message_fields(1000))), False)
                json.loads(turn.tools.schema() or "null")
                json.dumps([turn.messages, turn.if_read]).encode()
                return
            if name.startswith("ollama"):
                asked = checked(parsed(content), closed(*(generate if "generate" in name else ollama).fields(1000)))
                json.loads(of_ollama(asked, 1000).schema or "null")
                keep_alive_of(asked)
                json.dumps([ollama.for_template(asked.get("messages", [])), ollama.tools_of(asked).given]).encode()
                return
            asked = checked(parsed(content), closed(*api.fields(1000)))
            sampling(asked, 1, None)
            if api is chat:
                json.loads(tools_of(asked).schema() or "null")
                json.dumps(chat.for_template(asked["messages"])).encode()
            if api is responses:
                functions, _ = responses.tools_of(asked)
                turn = responses.turn_of(asked, functions, 100)
                json.loads(turn.tools.schema() or "null")
                json.dumps(turn.messages).encode()
        except RequestError as error:
            raise UserError(error.message) from None

    yield run


@contextlib.contextmanager
def _call(scratch: Path) -> Iterator[Run]:
    """A call of a tool that a model wrote: what is read of it is JSON."""
    from llama_npu2.text.tool_calls import calls_of

    def run(name: str, content: bytes) -> None:
        try:
            calls = calls_of(content.decode(errors="replace"))
        except ValueError as error:
            raise UserError(str(error)) from None
        assert calls and all(isinstance(json.loads(call.text), dict) and call.name for call in calls)

    yield run


PARSERS = {
    "artifacts": Parser(_commands, _json_below_artifacts, damaged_json),
    "manifest": Parser(_load_and_run, manifests, damaged_json),
    "gguf": Parser(_gguf, files("gguf"), mutated_bytes),
    "gguf_parts": Parser(_gguf_parts, files("gguf_parts"), mutated_bytes),
    "safetensors": Parser(_in_checkpoint("model.safetensors"), files("safetensors"), mutated_bytes),
    "config": Parser(_in_checkpoint("config.json"), files("config"), damaged_json),
    "index": Parser(_in_checkpoint("model.safetensors.index.json"), files("index"), damaged_json),
    "tokenizer": Parser(_tokenizer, files("tokenizer"), damaged_json),
    "tokenizer_config": Parser(_chat("tokenizer_config.json"), files("tokenizer_config"), damaged_json),
    "template": Parser(_chat("chat_template.jinja"), files("template"), mutated_bytes),
    "generation_config": Parser(_generation, files("generation_config"), damaged_json),
    "receipt": Parser(_receipt, files("receipt"), damaged_json),
    "definitions": Parser(_definitions, files("definitions"), damaged_json),
    "digests": Parser(_digests, files("digests"), damaged_json),
    "plan": Parser(_planned, _left_for_each_other, damaged_json),
    "calibration": Parser(_calibrated, files("calibration"), mutated_bytes),
    "report": Parser(_report, files("report"), damaged_json),
    "profile": Parser(_profile, files("profile"), damaged_json),
    "prompts": Parser(_prompts, files("prompts"), mutated_bytes),
    "trust": Parser(_trust, files("trust"), mutated_bytes),
    "record": Parser(_record, files("record"), damaged_json),
    "request": Parser(_request, files("request"), damaged_json),
    "call": Parser(_call, files("call"), mutated_bytes),
    "conversation": Parser(_conversation, files("conversation"), damaged_json),
    "context": Parser(_context, _contexts_written, mutated_bytes),
    "steps": Parser(_steps, _steps_taken, damaged_json),
    "schedules": Parser(
        _schedules,
        lambda: dict.fromkeys(manifests(), b"0"),
        lambda rng, content, others: str(rng.randrange(10**6)).encode(),
        _OF_SCHEDULES,
    ),
}
