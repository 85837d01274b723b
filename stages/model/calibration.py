"""Calibration: a text runs through the model layer by layer, and matrices are rounded for the inputs that they meet.

A layer is a step: it reads the activations that the layer before left, of a model whose weights are rounded already,
and leaves its rounded weights and its own activations. So a layer and its activations are all that is in memory, and
what is done stays done. Windows of the text run at the same time, each on one thread with products of one thread, so
that the number of threads changes no bit.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from llama_npu2.errors import UserError
from llama_npu2.storage import Directory
from llama_npu2.text import Tokenizer
from stages.engine.files import file_digests, first_line, read_json, write_json
from stages.engine.places import CALIBRATED, CALIBRATION, PACKING
from stages.kernels import kernels
from stages.model import families
from stages.model.buffers import Buffer
from stages.model.checkpoint import Checkpoint
from stages.model.config import rope_table
from stages.model.grouping import Placed
from stages.model.parts import part
from stages.model.reference import run_launch
from stages.model.sources import Source
from stages.weights import feedback
from stages.weights.formats import formats

TEXT = Path(__file__).with_name("calibration.txt")
"""Questions, facts and short stories, written for this project. Lines of the text that quality is measured on are not
among them."""

WINDOW, WINDOWS = 512, 32
"""Tokens that are read from an empty context, and how many such windows at most."""

_LAYER = ("rms_gemms_rope_kv", "flash_attn", "o_ffn")

_COLUMNS = 512
"""Of sums of products that are made at a time."""


HEAD_WEIGHTS = CALIBRATED / "head.safetensors"

_LOOKUPS = 0.1
"""Of the mean of the diagonal, added for a head that is the embedding too, whose rows are read whatever its inputs."""


def weights_file(layer: int) -> Path:
    return CALIBRATED / f"layer_{layer:03d}.safetensors"


def activations_file(layer: int) -> Path:
    """What goes into a layer."""
    return CALIBRATED / f"into_layer_{layer:03d}.npy"


def begin(source: Source, directory: Path, text: Path, work: Path) -> None:
    """Step action: embed the windows of a text; say which text it was. An embedding that is the head too is rounded as
    it would be without calibration: what the head is fitted to comes out last."""
    checkpoint, buffers = _opened(source, directory)
    windows = _windows(directory, text, checkpoint.config)
    name = families.of(checkpoint.config).embedding
    stored = formats()[buffers[name].format]
    used, where = np.unique(windows, return_inverse=True)
    rows = stored.dequantise(stored.quantise(checkpoint.tensor(name)[used]), checkpoint.config.emb)
    _save(work / activations_file(0), rows.astype(bfloat16)[where.reshape(windows.shape)])
    about = {"text": text.name, "sha256": file_digests(text)["sha256"], "tokens": windows.size}
    write_json(work / CALIBRATION, about)


def _windows(directory: Path, text: Path, config: Any) -> np.ndarray:
    """Token ids `[windows, length]`. Raises UserError."""
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"calibrate={text}: {first_line(error)}: give a text file") from None
    ids = Tokenizer.open(Directory(directory), config.vocab).encode(content, special_tokens=True)
    if not ids:
        raise UserError(f"calibrate={text}: there are no tokens in it: give a longer text")
    length = min(WINDOW, config.max_seq, len(ids))
    count = min(WINDOWS, len(ids) // length)
    return np.array(ids[: count * length]).reshape(count, length)


def calibrate_layer(source: Source, directory: Path, layer: int, threads: int, work: Path) -> None:
    """Step action: round the weights of a layer; leave its activations. `threads`: 0 for all CPUs."""
    checkpoint, buffers = _opened(source, directory)
    with _executor(threads) as executor:
        run = _Layer(checkpoint, buffers, layer, executor, _load(directory / activations_file(layer)))
        for name in tqdm(_LAYER, desc=f"calibrating layer {layer + 1} of {checkpoint.config.layers}", disable=None):
            run.part(name)
    _save(work / activations_file(layer + 1), run.activations())
    save_file(run.stored, work / weights_file(layer))


def calibrate_head(source: Source, directory: Path, threads: int, work: Path) -> None:
    """Step action: round the matrix that makes the logits, where its format can be calibrated."""
    checkpoint, buffers = _opened(source, directory)
    config = checkpoint.config
    name, stored = families.of(config).head(config), {}
    form = formats()[buffers[name].format]
    if form.grid and checkpoint.stored_format(name) != form.name:
        norm, norm_weight = kernels()["rms_norm"].reference, checkpoint.tensor("model.norm.weight")
        with _executor(threads) as executor:
            windows = [norm(x, norm_weight, config.eps) for x in _load(directory / activations_file(config.layers))]
            products = _products(windows, executor)
            diagonal = np.einsum("ii->i", products)
            diagonal += np.float32(config.tied * _LOOKUPS) * diagonal.mean()
            correction = feedback.Correction(products, form.values)
            stored[name] = feedback.quantise(form, checkpoint.tensor(name), correction, executor.map)
    (work / CALIBRATED).mkdir(parents=True)
    save_file(stored, work / HEAD_WEIGHTS)


def _opened(source: Source, directory: Path) -> tuple[Checkpoint, dict[str, Buffer]]:
    wanted = read_json(directory / PACKING)
    return Checkpoint.open(source.fetch()), {name: Buffer(**fields) for name, fields in wanted.items()}


@contextmanager
def _executor(threads: int) -> Iterator[Executor]:
    """Threads whose products take one thread each."""
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(threads or os.cpu_count()) as executor:
        yield executor


@dataclass
class _Layer:
    """`activations` bf16 `[windows, length, emb]` on their way through a layer."""

    checkpoint: Checkpoint
    buffers: Mapping[str, Buffer]
    index: int
    executor: Executor
    entering: np.ndarray
    stored: dict[str, np.ndarray] = field(default_factory=dict)
    """Weights, rounded."""

    def __post_init__(self) -> None:
        config, (_, length, _) = self.checkpoint.config, self.entering.shape
        self._sizes = {**config.dimensions(), "seq": length, "pos": 0, "max_seq": length}
        self._shared: dict[str, np.ndarray] = {"rope_table": rope_table(config, length)}
        self._corrected = ""
        cache = np.full((length, config.kv_heads, 2, config.head_dim), np.nan, bfloat16)
        self._windows: list[ChainMap[str, np.ndarray]] = [
            ChainMap({f"x.{self.index % 2}": window, f"kv_cache.{self.index}": cache.copy()}, self._shared)
            for window in self.entering
        ]

    def activations(self) -> np.ndarray:
        """What leaves the layer."""
        return np.stack([window[f"x.{(self.index + 1) % 2}"] for window in self._windows])

    def part(self, name: str) -> None:
        placed = Placed(part(self.checkpoint.config.family, name), self.index, True)
        for launch in placed.part.launches:
            slots = {arg: placed.buffer(placed.part.slot(slot)) for arg, slot in launch.args.items()}
            for arg in launch.kernel.args:
                if slots[arg.name] in self.buffers and slots[arg.name] not in self._shared:
                    self._provide(slots[arg.name], slots.get("x", ""))
            run = partial(run_launch, launch, slots, self._sizes)
            list(self.executor.map(run, self._windows))

    def _provide(self, name: str, x: str) -> None:
        """A weight, rounded to its format. Those that multiply the same input follow one another."""
        form = formats()[self.buffers[name].format]
        tensor = self.checkpoint.tensor(name)
        if form.grid is None or self.checkpoint.stored_format(name) == form.name:
            self._shared[name] = form.dequantise(form.quantise(tensor), tensor.shape[-1])
            return
        if self._corrected != x:
            self._correction = feedback.Correction(_products((w[x] for w in self._windows), self.executor), form.values)
            self._corrected = x
        self.stored[name] = feedback.quantise(form, tensor, self._correction, self.executor.map)
        self._shared[name] = form.dequantise(self.stored[name], tensor.shape[-1])


def _products(windows: Iterable[np.ndarray], executor: Executor) -> np.ndarray:
    """X^T X, f32 `[inputs, inputs]`, of rows X of all windows bf16 `[length, inputs]`; summed window by window."""
    rows = list(windows)
    width = rows[0].shape[1]
    products = np.zeros((width, width), np.float32)

    def add(first: int) -> None:
        last = first + _COLUMNS
        for window in rows:
            x = window[:, :last].astype(np.float32)
            products[:last, first:last] += x.T @ x[:, first:]
        products[first:last, :last] = products[:last, first:last].T

    list(executor.map(add, range(0, width, _COLUMNS)))
    return products


def _save(path: Path, activations: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, activations.view(np.uint16))


def _load(path: Path) -> np.ndarray:
    activations: np.ndarray = np.load(path).view(bfloat16)
    return activations
