"""Calibration: a text runs through the model layer by layer, and matrices are rounded for the inputs that they meet.

The text first runs through the checkpoint's own layers, and the LM head is rounded for what comes out. Then it runs
through both, the checkpoint's layers and the rounded ones, beginning at the rounded embedding. Each matrix compensates
half of the error that its output would have from the inputs alone (`feedback.Correction.compensate`).

Each layer is a step: it reads the activations that the step before left, and leaves its rounded weights and its own
activations. So memory holds one layer and its activations, and finished layers stay finished. Windows of the text run
at the same time, each on one thread with products of one thread, so that the number of threads changes no bit.
"""

from __future__ import annotations

import os
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llama_npu2.artifact.storage import Directory
from llama_npu2.errors import UserError, first_line
from stages.engine.files import file_digests, write_json
from stages.engine.lazy import ml_dtypes, np
from stages.engine.places import CALIBRATED, CALIBRATION, PACKING
from stages.kernels import embed, rms_norm
from stages.model import families
from stages.model.buffers import Buffer, read_buffers, tensors_of
from stages.model.checkpoint import Checkpoint
from stages.model.config import Config, tables
from stages.model.decoder import EMBEDDING, FINAL_NORM, HEAD, LONG, Attention, ShortConv
from stages.model.grouping import Placed, rope_suffix
from stages.model.part import Launch
from stages.model.parts import layer_part
from stages.model.reference import history, run_launch
from stages.model.sources import Source
from stages.weights import feedback
from stages.weights.format import Format
from stages.weights.formats import formats

TEXT = Path(__file__).with_name("calibration.txt")
"""Questions, facts and short stories, written for this project. Lines of the text that quality is measured on are not
among them."""

WINDOW, WINDOWS = 512, 32
"""Tokens of a window, which is read from an empty context, and the most windows."""

Slots = Mapping[str, str]
"""Names of buffers by the kernel argument that they are bound to."""

_LAYER = {
    Attention.kind: ("rms_gemms_rope_kv", "flash_attn", "o_ffn"),
    ShortConv.kind: ("rms_gemm_conv", "o_ffn"),
}
"""The parts of a layer by the kind of its mixer."""

_COLUMNS = 512
"""Columns of products that are computed at a time."""

HEAD_WEIGHTS = CALIBRATED / "head.safetensors"

_LOOKUPS = 0.1
"""Share of the mean of the diagonal that is added to it for a head that is the embedding too. An embedding's rows are
read whatever the inputs of the head are."""


def weights_file(layer: int) -> Path:
    return CALIBRATED / f"layer_{layer:03d}.safetensors"


def weights_files(layers: int) -> list[Path]:
    """Return the files of all rounded weights."""
    return [HEAD_WEIGHTS, *map(weights_file, range(layers))]


def activations_file(layer: int) -> Path:
    """Return the file of the activations that enter a layer."""
    return CALIBRATED / f"into_layer_{layer:03d}.npy"


def source_file(layer: int) -> Path:
    """Return the file of the activations that enter a layer of the checkpoint."""
    return CALIBRATED / f"source_into_layer_{layer:03d}.npy"


def begin(source: Source, directory: Path, text: Path, work: Path) -> None:
    """Embed the windows of a text by the checkpoint's values, and record which text it was (step action)."""
    checkpoint, _ = _opened(source, directory)
    if checkpoint.config.decoder.experts:
        raise UserError(f"calibrate={text.name}: experts are not calibrated yet: leave it out")
    windows = _windows(directory, text, checkpoint.config)
    embedding = checkpoint.tensor(families.tensor(checkpoint.config, EMBEDDING))
    _save(work / source_file(0), _scaled(embedding[windows], checkpoint.config))
    about = {"text": text.name, "sha256": file_digests(text)["sha256"], "tokens": windows.size}
    write_json(work / CALIBRATION, about)


def _scaled(rows: np.ndarray, config: Config) -> np.ndarray:
    """Return rows of the embedding as they enter the first layer."""
    return embed.scaled(rows.astype(ml_dtypes.bfloat16), config.decoder.entry_scale)


def _windows(directory: Path, text: Path, config: Any) -> np.ndarray:
    """Return token ids `[windows, length]`. Raises UserError."""
    from llama_npu2.text.tokenizer import Tokenizer  # it loads a library that only this step needs

    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"calibrate={text}: {first_line(error)}: give a text file") from None
    ids = Tokenizer.open(Directory(directory)).encode(content, special_tokens=True)
    if not ids:
        raise UserError(f"calibrate={text}: there are no tokens in it: give a longer text")
    length = min(WINDOW, config.max_seq, len(ids))
    count = min(WINDOWS, len(ids) // length)
    return np.array(ids[: count * length]).reshape(count, length)


def run_source(source: Source, directory: Path, layer: int, threads: int, work: Path) -> None:
    """Run the text through a layer of the checkpoint (step action). `threads`: 0 for all CPUs."""
    checkpoint, buffers = _opened(source, directory)
    with _executor(threads) as executor:
        run = _Layer(checkpoint, buffers, layer, executor, read_activations(directory / source_file(layer)))
        for launch, slots in run.launches():
            run.step(launch, slots)
    _save(work / source_file(layer + 1), run.activations())


def calibrate_layer(source: Source, directory: Path, layer: int, threads: int, work: Path) -> None:
    """Round the weights of a layer, and write its activations (step action). `threads`: 0 for all CPUs."""
    from stages.engine.bar import Bar

    checkpoint, buffers = _opened(source, directory)
    with _executor(threads) as executor:
        wanted = _Layer(checkpoint, buffers, layer, executor, read_activations(directory / source_file(layer)))
        entering = read_activations(directory / activations_file(layer))
        run = _RoundedLayer(checkpoint, buffers, layer, executor, entering, wanted)
        about = f"calibrating layer {layer + 1} of {checkpoint.config.layers}"
        for launch, slots in Bar(list(run.launches()), desc=about):
            run.provide(launch, slots)
            wanted.step(launch, slots)
            run.step(launch, slots)
    _save(work / activations_file(layer + 1), run.activations())
    _save_weights(run.stored, work / weights_file(layer))


def calibrate_head(source: Source, directory: Path, text: Path, threads: int, work: Path) -> None:
    """Round the LM head, if its format can be calibrated, and embed the text by the rounded embedding (step action).

    Embedding and LM head may be one matrix. `threads`: 0 for all CPUs.
    """
    checkpoint, buffers = _opened(source, directory)
    config = checkpoint.config
    head, embedding = (families.tensor(config, slot) for slot in (HEAD, EMBEDDING))
    stored: dict[str, np.ndarray] = {}
    form = formats()[buffers[head].format]
    if form.grid and checkpoint.stored_format(head) != form.name:
        with _executor(threads) as executor:
            leaving = read_activations(directory / source_file(config.layers))
            stored[head] = _rounded_head(checkpoint, form, leaving, executor)
    windows, form = _windows(directory, text, config), formats()[buffers[embedding].format]
    ids, places = np.unique(windows, return_inverse=True)
    rows = stored[embedding][ids] if embedding in stored else form.quantise(checkpoint.tensor(embedding)[ids])
    embedded = _scaled(form.dequantise(rows, config.emb), config)
    _save(work / activations_file(0), embedded[places.reshape(windows.shape)])
    _save_weights(stored, work / HEAD_WEIGHTS)


def _save_weights(stored: Mapping[str, np.ndarray], path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(dict(stored), path)


def _rounded_head(checkpoint: Checkpoint, form: Format, leaving: np.ndarray, executor: Executor) -> np.ndarray:
    """Return the rounded LM head in elements of `form`. `leaving`: the activations after the last layer."""
    config = checkpoint.config
    last, weight = config.decoder.norm, checkpoint.tensor(families.tensor(config, FINAL_NORM))
    normed = [rms_norm.reference(x, weight, config.decoder.stream_eps, last.offset, last.once) for x in leaving]
    products = _products(normed, executor)
    diagonal = np.einsum("ii->i", products)
    diagonal += np.float32(config.tied * _LOOKUPS) * diagonal.mean()
    correction = feedback.Correction(products, form.values)
    head = checkpoint.tensor(families.tensor(config, HEAD))
    return feedback.quantise(form, head, correction, executor.map)


def _opened(source: Source, directory: Path) -> tuple[Checkpoint, dict[str, Buffer]]:
    """Return the checkpoint, and for each tensor the buffer that it goes to, alone or joined with others."""
    packed = read_buffers(directory / PACKING)
    buffers = {tensor: buffer for name, buffer in packed.items() for tensor in tensors_of(name)}
    checkpoint = Checkpoint.open(source.fetch())
    short = checkpoint.config.decoder.short_context
    if short and any(name.endswith(LONG) for name, buffer in packed.items() if buffer.kind == "table"):
        return checkpoint.within(short + 1), buffers
    return checkpoint, buffers


@contextmanager
def _executor(threads: int) -> Iterator[Executor]:
    """Yield threads, of which each computes products on one thread."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(threads or os.cpu_count()) as executor:
        yield executor


@dataclass
class _Layer:
    """Runs the windows of a text through a layer of the checkpoint."""

    checkpoint: Checkpoint
    buffers: Mapping[str, Buffer]
    index: int
    executor: Executor
    entering: np.ndarray
    """The activations that enter the layer: bf16 `[windows, length, emb]`."""

    def __post_init__(self) -> None:
        config, (_, length, _) = self.checkpoint.config, self.entering.shape
        self._sizes = {**config.dimensions(length), "seq": length, "pos": 0, "window": length}
        self._shared = tables(config, length)
        if isinstance(config.decoder.layers[self.index].mixer, Attention):
            name, cache = "kv_cache", np.full((length, config.kv_heads, 2, config.head_dim), np.nan, ml_dtypes.bfloat16)
        else:
            name, cache = "history", history(length, config.emb, config.decoder.taps)
        self.windows: list[ChainMap[str, np.ndarray]] = [
            ChainMap({f"x.{self.index % 2}": window, f"{name}.{self.index}": cache.copy()}, self._shared)
            for window in self.entering
        ]
        self._uses_left = Counter(name for _, slots in self.launches() for name in set(slots.values()))

    @property
    def _leaving(self) -> str:
        """The name of the activations that leave the layer."""
        return f"x.{(self.index + 1) % 2}"

    def activations(self) -> np.ndarray:
        """Return the activations that leave the layer."""
        return np.stack([window[self._leaving] for window in self.windows])

    def launches(self) -> Iterator[tuple[Launch, Slots]]:
        """Yield the launches of the layer with the buffers that are bound to their arguments."""
        config = self.checkpoint.config
        layer = config.decoder.layers[self.index]
        rope = rope_suffix(layer)
        for name in _LAYER[layer.mixer.kind]:
            placed = Placed(layer_part(config, name, self.index), self.index, True, rope)
            for launch in placed.part.launches:
                yield launch, {arg: placed.buffer(placed.part.slot(slot)) for arg, slot in launch.args.items()}

    def step(self, launch: Launch, slots: Slots) -> None:
        """Run a launch on all windows."""
        self.provide(launch, slots)
        run = partial(run_launch, launch, slots, self._sizes)
        list(self.executor.map(run, self.windows))
        self._forget(slots)

    def _forget(self, slots: Slots) -> None:
        """Drop the buffers that no later launch takes. Activations and weights of wide layers take the most memory."""
        self._uses_left.subtract(set(slots.values()))
        for name in {name for name in slots.values() if not self._uses_left[name]} - {self._leaving}:
            for buffers in (self._shared, *(window.maps[0] for window in self.windows)):
                buffers.pop(name, None)

    def provide(self, launch: Launch, slots: Slots) -> None:
        """Make the weights of a launch available."""
        for arg in launch.kernel.args:
            name = slots[arg.name]
            if name in self.buffers and name not in self._shared:
                self._shared[name] = self._weight(name, slots)

    def _weight(self, name: str, slots: Slots) -> np.ndarray:
        return self.checkpoint.tensor(name)


@dataclass
class _RoundedLayer(_Layer):
    """Runs the windows through a layer whose weights it rounds."""

    wanted: _Layer
    """The checkpoint's layer, which has run as many launches as this one when weights are provided."""
    stored: dict[str, np.ndarray] = field(default_factory=dict)
    """Rounded weights in the elements of their formats."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._corrected = ""

    def _weight(self, name: str, slots: Slots) -> np.ndarray:
        """Round a weight and return its values. Weights with one input follow one another, and share its products."""
        form = formats()[self.buffers[name].format]
        tensor = self.checkpoint.tensor(name)
        if form.grid is None or self.checkpoint.stored_format(name) == form.name:
            return form.dequantise(form.quantise(tensor), tensor.shape[-1])
        if self._corrected != slots["x"]:
            products = _products((window[slots["x"]] for window in self.windows), self.executor)
            self._correction = feedback.Correction(products, form.values)
            self._corrected = slots["x"]
        values = self._correction.compensate(self._output_error(tensor, slots), self.executor.map)
        values += tensor
        self.stored[name] = feedback.quantise(form, values, self._correction, self.executor.map)
        return form.dequantise(self.stored[name], tensor.shape[-1])

    def _output_error(self, weight: np.ndarray, slots: Slots) -> np.ndarray:
        """Return X^T E, f32 `[inputs, outputs]`, for inputs X and the error E of the outputs.

        E comes from the inputs and from the residual that is added.
        """
        products = np.zeros(weight.shape[::-1], np.float32)

        def add(first: int) -> None:
            columns = slice(first, first + _COLUMNS)
            for ours, wanted in zip(self.windows, self.wanted.windows, strict=True):
                x = ours[slots["x"]].astype(np.float32)
                error = (wanted[slots["x"]] - x) @ weight[columns].T.astype(np.float32)
                if "residual" in slots:
                    error += (wanted[slots["residual"]].astype(np.float32) - ours[slots["residual"]])[:, columns]
                products[:, columns] += x.T @ error

        list(self.executor.map(add, range(0, len(weight), _COLUMNS)))
        return products


def _products(windows: Iterable[np.ndarray], executor: Executor) -> np.ndarray:
    """Return X^T X, f32 `[inputs, inputs]`, of the rows X of all windows, bf16 `[length, inputs]`, summed by window."""
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


def read_activations(path: Path) -> np.ndarray:
    """Return the activations of a file, bf16 `[windows, length, emb]`. Raises UserError."""
    try:
        stored = np.lib.format.open_memmap(path, mode="r")
        if stored.dtype != np.uint16 or stored.ndim != 3:
            raise ValueError(f"it holds {stored.dtype} {list(stored.shape)}")
    except Exception as error:  # the file's header is Python, which can raise anything
        raise UserError(f"{path} is damaged ({first_line(error)}): remove it and run doit compile") from None
    return np.asarray(stored).view(ml_dtypes.bfloat16)
