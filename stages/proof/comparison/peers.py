"""Run other programs on the same checkpoint, for `doit bench peers=...`, each in a process of its own.

A process reads one JSON request per line and answers each with the seconds it took:
`{"prefill": ids}` from an empty context; `{"decode": ids, "depth": d}` one by one after the first d tokens;
`{"streams": [ids, ...]}` a token of each at a time, from empty contexts;
`{"logits": ids, "to": path}` one by one from an empty context, with f32 logits `[ids, vocab]` written to a `.npy` file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.artifact.dtypes import DTYPES
from llama_npu2.cli.bench import LONGEST
from llama_npu2.engine.llama import Llama
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.engine.files import content_digest
from stages.engine.places import CHECKPOINT, ROOT, python_environment
from stages.engine.tree import Tree
from stages.model import families
from stages.model.checkpoint import Checkpoint
from stages.model.sources import Source
from stages.proof.comparison import gguf_file, openvino_model
from stages.proof.comparison.transformers_model import cache_argument, load_transformers

AS_IT_IS = "as it is"
"""The format of a peer that runs the checkpoint's own file."""

SAFELY = "safely"
"""The switch with which an engine avoids what has ended a peer's process before."""


_STREAM_POSITIONS = 256
"""Positions of each sequence in `LlamaCpp.step_streams`: the fewest that llama.cpp pads a context to."""


class LlamaCpp:
    """llama.cpp through `llama-cpp-python`, with llama-bench's batch sizes.

    The switch `SAFELY` keeps weights as the file has them, not rearranged for the processor. This is slower, but the
    layout for AMX ends the process on some machines (ggml-org/llama.cpp#20824).
    """

    def __init__(self, gguf: Path, threads: int, context: int, *switches: str) -> None:
        self._api = llama_cpp = gguf_file.silenced()
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = SAFELY not in switches
        self._model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not read {gguf}")
        self._threads = threads
        self._context = self._new_context(context, 1)
        self._of_streams: dict[int, Any] = {}
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._ids: list[int] = []
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _new_context(self, positions: int, sequences: int) -> Any:
        """Return a context of so many positions, all sequences together."""
        options = self._api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = positions, 2048, 512, sequences
        options.n_threads = options.n_threads_batch = self._threads
        return self._api.llama_init_from_model(self._model, options)

    def rewind(self, depth: int) -> None:
        """Keep the first `depth` tokens of the context, or process them again where that is not possible."""
        kept, self._ids = self._ids[:depth], []
        if self._api.llama_memory_seq_rm(self._memory, 0, depth, -1):
            self._ids = kept
        else:
            self._api.llama_memory_clear(self._memory, True)
            if kept:
                self.step(kept)

    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens; returns float32 logits `[vocab]` of the last one."""
        self._ids += ids
        for start in range(0, len(ids), 2048):
            part = ids[start : start + 2048]
            tokens = (self._api.llama_token * len(part))(*part)
            if self._api.llama_decode(self._context, self._api.llama_batch_get_one(tokens, len(part))) != 0:
                raise RuntimeError("llama_decode failed")
        self._api.llama_synchronize(self._context)
        return np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (self._vocab,)).copy()

    def step_streams(self, streams: Sequence[Sequence[int]]) -> np.ndarray:
        """Append a token of each of some sequences at a time, to empty contexts.

        Returns:
            Float32 logits `[sequences, vocab]` of the last tokens.
        """
        count = len(streams)
        if count not in self._of_streams:
            self._of_streams[count] = self._new_context(count * _STREAM_POSITIONS, count)
        context = self._of_streams[count]
        self._api.llama_memory_clear(self._api.llama_get_memory(context), True)
        batch = self._api.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for position, tokens in enumerate(zip(*streams, strict=True)):
            for row, token in enumerate(tokens):
                batch.token[row], batch.pos[row], batch.logits[row] = token, position, True
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, row
            if self._api.llama_decode(context, batch) != 0:
                raise RuntimeError("llama_decode failed")
        self._api.llama_synchronize(context)
        self._api.llama_batch_free(batch)
        return np.ctypeslib.as_array(self._api.llama_get_logits(context), (count, self._vocab)).copy()


class Transformers:
    """transformers in bf16 with its own KV cache."""

    def __init__(self, checkpoint: Path, threads: int, context: int) -> None:
        import torch
        from transformers import DynamicCache

        torch.set_num_threads(threads)
        self._torch, self._empty = torch, DynamicCache
        self._model = load_transformers(checkpoint, "bfloat16")
        self._cache = self._empty()

    def rewind(self, depth: int) -> None:
        """Keep the first `depth` tokens of the context."""
        if depth == 0:
            self._cache = self._empty()
        elif surplus := self._cache.get_seq_length() - depth:
            self._cache.crop(-surplus)

    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens; returns float32 logits `[vocab]` of the last one."""
        with self._torch.no_grad():
            out = self._model(
                self._torch.tensor([list(ids)]),
                use_cache=True,
                logits_to_keep=1,
                **cache_argument(self._model, self._cache),
            )
        logits: np.ndarray = out.logits[0, -1].float().numpy()
        return logits


@frozen
class Entrant:
    """A program with a model in one of its formats."""

    program: str
    format: str
    model: Path
    token_bytes: int
    """Bytes of weights that a decoded token reads."""
    switches: tuple[str, ...] = ()
    """Switches that its engine gets."""


def _gguf_entrants(checkpoint: Path, kinds: Sequence[str], cache: Path) -> Iterator[Entrant]:
    """Yield llama.cpp with a checkpoint's conversions, made where they are missing, or with its own file."""
    opened = Checkpoint.open(checkpoint)
    for kind in kinds:
        model = checkpoint if kind == AS_IT_IS else _converted(opened, kind, cache)
        yield Entrant("llama.cpp", kind, model, gguf_file.token_bytes(model, opened.config))


def _converted(checkpoint: Checkpoint, kind: str, cache: Path) -> Path:
    artifacts = cache.parents[2]
    with Tree(artifacts).opened(cache.parent.relative_to(artifacts), create=True):
        pass  # check that no link leads away from where files are written
    plain, converted = (cache.with_name(f"{cache.name}-{name}.gguf") for name in (gguf_file.PLAIN, kind))
    if not (plain.exists() or converted.exists()):
        gguf_file.write_gguf(checkpoint, plain)
    if not converted.exists():
        print(f"llama.cpp quantises the checkpoint to {kind}", file=sys.stderr, flush=True)
        gguf_file.quantise_gguf(plain, converted, kind)
    return converted


def _openvino_entrants(checkpoint: Path, kinds: Sequence[str], cache: Path) -> Iterator[Entrant]:
    """Yield OpenVINO with a checkpoint's conversions, made where they are missing, and without 8-bit activations."""
    opened = Checkpoint.open(checkpoint)
    plain = cache.with_name(f"{cache.name}-openvino-{openvino_model.PLAIN}")
    if opened.config.decoder.attention.rope.scaling.type != "default":
        print("OpenVINO leaves out how this model scales its rotations: only its speed compares", file=sys.stderr)
    for kind in kinds:
        model = cache.with_name(f"{cache.name}-openvino-{kind}")
        if not (model.exists() or plain.exists()):
            openvino_model.convert(_converted(opened, openvino_model.PLAIN, cache), plain)
        if not model.exists():
            openvino_model.compress(plain, model, kind)
        size = openvino_model.token_bytes(model, opened.config.tied, opened.config.vocab)
        yield Entrant("openvino", kind, model, size)
        if kind != openvino_model.PLAIN:
            yield Entrant("openvino", f"{kind} {openvino_model.WIDE}", model, size, (openvino_model.WIDE,))


def _transformers_entrants(checkpoint: Path, kinds: Sequence[str], cache: Path) -> Iterator[Entrant]:
    """Yield transformers with the checkpoint itself."""
    values = sum(map(prod, families.token_tensors(Checkpoint.open(checkpoint).config).values()))
    for kind in kinds:
        yield Entrant("transformers", kind, checkpoint, values * DTYPES["bf16"].itemsize)


@frozen
class Program:
    """Another program that runs checkpoints."""

    engine: Callable[..., Any]
    """(model, threads, context, *switches) -> an object with `rewind` and `step`."""
    entrants: Callable[[Path, Sequence[str], Path], Iterator[Entrant]]
    """(checkpoint, formats, prefix of conversions) -> the program with each model."""
    packages: tuple[str, ...]
    """Packages that it needs."""
    extra: str
    """The extra that installs them."""
    formats: Mapping[str, tuple[str, ...]]
    """The format of our weights -> its nearest ones, by its own names."""
    can_be_safe: bool = False
    """Whether the switch `SAFELY` makes `engine` avoid what has ended its process."""
    takes_streams: bool = False
    """Whether `engine` has `step_streams`."""


_PROGRAMS = {
    "llama.cpp": Program(
        LlamaCpp,
        _gguf_entrants,
        ("llama_cpp", "gguf"),
        "bench",
        {
            AS_IT_IS: (AS_IT_IS,),
            "bf16": ("BF16",),
            "int8": ("Q8_0",),
            # Its products round activations to 8 bits too.
            "w8a8": ("Q8_0",),
            "int6": ("Q6_K",),
            "int4": ("Q4_0", "Q4_K_M"),
            # Experts alone, others are Q8_0.
            "mxfp4": ("MXFP4_MOE",),
            # The formats of quantised checkpoints.
            "int4_f32": ("Q4_K_M",),
            "int8_f32": ("Q8_0",),
            "int8_f32_16": ("Q6_K",),
        },
        can_be_safe=True,
        takes_streams=True,
    ),
    "openvino": Program(
        openvino_model.OpenVino,
        _openvino_entrants,
        ("openvino_genai", "nncf", "llama_cpp", "gguf"),
        "openvino",
        {
            "bf16": (openvino_model.PLAIN,),
            **dict.fromkeys(("int8", "w8a8"), (openvino_model.INT8,)),
            "int4": (openvino_model.INT4,),
        },
    ),
    "transformers": Program(
        Transformers, _transformers_entrants, ("torch", "transformers"), "verify", {"bf16": ("BF16",)}
    ),
}


class Peer:
    """The process of an entrant, as an `Engine` of the runtime's bench.

    Requests raise UserError if the process has ended. If a signal ended it, its program can run safely and the request
    starts from an empty context, then a line and `note` say so and the process is started once more, safely.
    """

    note = ""

    def __init__(self, entrant: Entrant, threads: int, context: int) -> None:
        self.name, self.token_bytes = f"{entrant.program} {entrant.format}", entrant.token_bytes
        self._program = entrant.program
        self._arguments = [
            entrant.program,
            str(entrant.model.absolute()),
            str(threads),
            str(context),
            *entrant.switches,
        ]
        program = _PROGRAMS.get(entrant.program)
        self._may_begin_again = program is not None and program.can_be_safe
        self.takes_streams = program is not None and program.takes_streams
        self._process = self._start()

    def _start(self, *more: str) -> subprocess.Popen[str]:
        """Start this module as a process, in the checkout's directory, so that it is found."""
        command = [sys.executable, "-m", "stages.proof.comparison.peers", *self._arguments, *more]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=python_environment()
        )

    def prefill(self, ids: Sequence[int]) -> float:
        """Process a prompt from an empty context, and return the seconds."""
        return self._ask({"prefill": list(ids)})

    def decode(self, depth: int, ids: Sequence[int]) -> float:
        """Process tokens one by one after the first `depth`, and return the seconds."""
        return self._ask({"decode": list(ids), "depth": depth})

    def decode_streams(self, streams: Sequence[Sequence[int]]) -> float:
        """Process a token of each sequence at a time, from empty contexts, and return the seconds."""
        return self._ask({"streams": [list(ids) for ids in streams]})

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits f32 `[len(ids), vocab]` of every position, token by token."""
        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/logits.npy"
            self._ask({"logits": list(ids), "to": path})
            return np.load(path)

    def _ask(self, request: Mapping[str, Any]) -> float:
        answer = self._answer(request)
        from_nothing = self._may_begin_again and not request.get("depth")
        if answer is None and from_nothing and (status := self._process.wait()) < 0:
            self.note = f"signal {-status} ended it, so it ran again, slower, with weights as its file has them"
            print(f"{self.name}: {self.note}", file=sys.stderr)
            self._may_begin_again = False
            self._process = self._start(SAFELY)
            answer = self._answer(request)
        if not isinstance(answer, float):
            ended = f"its process ended with status {self._process.wait()}" if answer is None else answer
            raise UserError(f"peers={self._program}: {ended}")
        return answer

    def _answer(self, request: Mapping[str, Any]) -> Any:
        """Return seconds, an error message, or None if the process has ended."""
        process = self._process
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return json.loads(process.stdout.readline() or "null")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def open_peers(entrants: Sequence[Entrant], threads: int, llm: Llama) -> Iterator[list[Peer]]:
    """Start the processes, with a context as long as `llm` has, and wait until they have loaded. Raises UserError."""
    context = min(llm.context_length, LONGEST)
    with contextlib.ExitStack() as stack:
        peers = []
        for entrant in entrants:
            peers.append(Peer(entrant, threads, context))
            stack.callback(peers[-1].close)
        for peer in peers:
            peer.prefill([0])
        yield peers


def conversions(artifacts: Path, directory: Path) -> Path:
    """Return the prefix of the paths of conversions of an artifact directory's checkpoint."""
    return artifacts / ".cache/gguf" / content_digest(directory / CHECKPOINT)


def entrants(names: Sequence[str], weights: str, source: Source, cache: Path) -> list[Entrant]:
    """Return the named programs with the checkpoint of `source`, in their formats nearest to `weights`.

    Args:
        weights: A format of ours, or `AS_IT_IS`.
        cache: See `conversions`.

    Raises UserError.
    """
    for name in names:
        program = _PROGRAMS[name]
        if missing := [package for package in program.packages if not importlib.util.find_spec(package)]:
            raise UserError(f"peers={name} needs {missing[0]}: pip install -e '.[{program.extra}]'")
        if weights not in program.formats:
            raise UserError(f"peers={name}: it has no format like {weights}: leave it out")
    programs = [_PROGRAMS[name] for name in names]
    return [entrant for p in programs for entrant in p.entrants(source.fetch(), p.formats[weights], cache)]


def serve(name: str, model: str, threads: str, context: str, *switches: str) -> None:
    """Answer requests until standard input ends, with seconds or an error message."""
    try:
        engine = _PROGRAMS[name].engine(Path(model), int(threads), int(context), *switches)
        for line in sys.stdin:
            print(json.dumps(_measure(engine, json.loads(line))), flush=True)
    except Exception as error:  # whatever a foreign library raises
        print(json.dumps(f"{type(error).__name__}: {error}".splitlines()[0]), flush=True)


def _measure(engine: Any, request: Mapping[str, Any]) -> float:
    engine.rewind(request.get("depth", 0))
    started = time.perf_counter()
    if "prefill" in request:
        engine.step(request["prefill"])
    if "streams" in request:
        engine.step_streams(request["streams"])
    for token in request.get("decode", ()):
        engine.step([token])
    if "logits" in request:
        np.save(request["to"], np.stack([engine.step([token]) for token in request["logits"]]))
    return time.perf_counter() - started


if __name__ == "__main__":
    serve(*sys.argv[1:])
