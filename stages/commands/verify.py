"""Whether an artifact directory is right, and how good: against transformers.

Right: with the very weights that the artifacts hold, as values, and K and V rounded as their cache rounds them, greedy
tokens are those of transformers in bf16, and logits are about as near to those in float32 as a run in bf16 is. Good:
what the formats of weights and cache cost, against the checkpoint (`quality`). What was found lies beside the manifest,
in `verified.json`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from doit.exceptions import TaskFailed

from llama_npu2 import Llama, UserError, load
from llama_npu2.table import Column, Table
from stages.commands import quality
from stages.engine.files import file_digests, first_line, write_atomic
from stages.graph import Build
from stages.kernels import KV_FORMATS
from stages.model import families
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.model.importers import PLAIN
from stages.weights.formats import formats, w8a8

TOKENS = 32
TOP = 5
MOST = 1.5
"""Times the error of transformers in bf16 that the runtime's logits may be off by."""
ROUNDED_ROWS = 64
"""Rows of a tensor at least that rounding is tried on."""
EXACT_WINDOWS = 2
"""Windows of the text that logits are compared on."""
SIMULATED_TOKENS = 24
TEXT = Path(__file__).with_name("evaluation.txt")
"""Questions, facts and short stories, written for this project."""
VERIFIED = "verified.json"

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4,",
    "The opposite of hot is",
    "Water is made of hydrogen and",
    "In the beginning there was a small",
    "What is the largest planet?",
    "The days of the week are Monday,",
)


TABLE = Table(
    [
        Column("prompt", 44),
        Column("equal", 5, right=True),
        Column("first difference"),
        Column("worst rank of ours in theirs"),
        Column("of theirs in ours"),
        Column("", 4),
    ]
)


@dataclass(frozen=True)
class Comparison:
    """Outcome for one prompt. `equal`: how many of `TOKENS` positions chose the same token; `first`: the first that did
    not, from 0; `ranks`: the worst rank (0 = best), over all positions, of our token in the reference's logits and of
    the reference's in ours."""

    prompt: str
    equal: int
    first: int | None
    ranks: tuple[int, int]

    @property
    def passed(self) -> bool:
        """Where the sides differ, each has the other's token among its best `TOP`."""
        return max(self.ranks) < TOP

    def row(self) -> str:
        first = "-" if self.first is None else f"token {self.first + 1}"
        ranks = (rank + 1 for rank in self.ranks)
        return TABLE.row(
            repr(self.prompt[:40]), f"{self.equal}/{TOKENS}", first, *ranks, "pass" if self.passed else "FAIL"
        )


def run(build: Build) -> TaskFailed | None:
    """`doit verify`: two prompts and some of the text, or with full=1 all."""
    options = build.options
    text = Path(options.text) if options.text else TEXT
    passed = verify(build.directory, build.source.fetch(), options.full, text, options.threads)
    return None if passed else TaskFailed("verify: the runtime and transformers disagree, see above")


def verify(directory: Path, checkpoint: Path, full: bool = False, text: Path = TEXT, threads: int = 0) -> bool:
    """Compare, print, record; returns whether the runtime is right. Raises UserError."""
    model = load_transformers(checkpoint, "float32")
    with contextlib.closing(load(directory, threads)) as llm:
        parts = windows(llm, text, full)
        lost = quality.measure(
            (quality.artifact_logits(llm, ids) for ids in parts),
            (quality.source_logits(model, ids) for ids in parts),
            parts,
        )
        print(lost, flush=True)
        weights = ArtifactWeights(directory)
        rounding = worst_rounding(Checkpoint.open(checkpoint), weights)
        print(rounding, flush=True)
        put_weights(model, weights.values)
        new_cache = partial(reference_cache, llm.manifest.model["kv"])
        exactness = compare_logits(llm, model, parts[:EXACT_WINDOWS], weights.formats, new_cache)
        print(exactness, flush=True)
        print(TABLE.header(), flush=True)
        comparisons = []
        for prompt in PROMPTS if full else PROMPTS[:2]:
            comparisons.append(compare(llm, model, prompt, new_cache()))
            print(comparisons[-1].row(), flush=True)
    passed = rounding.passed and exactness.passed and all(comparison.passed for comparison in comparisons)
    _record(directory, text, weights, passed, [lost, rounding, exactness, *comparisons])
    return passed


def windows(llm: Llama, text: Path, full: bool) -> list[list[int]]:
    """What is read of a text: little by the simulator, which takes its time. Raises UserError."""
    try:
        read = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text={text}: {first_line(error)}: give a text file") from None
    if llm.manifest.target["device"] == "sim":
        return quality.windows(llm, read, 1, SIMULATED_TOKENS)
    return quality.windows(llm, read, quality.ALL_WINDOWS if full else quality.WINDOWS)


def _record(
    directory: Path,
    text: Path,
    weights: ArtifactWeights,
    passed: bool,
    results: Sequence[quality.Quality | Rounding | Exactness | Comparison],
) -> None:
    """What was found, of which artifacts, on what."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    found = {
        "passed": passed,
        "manifest": file_digests(directory / "manifest.json")["sha256"],
        "text": {"name": text.name, "sha256": file_digests(text)["sha256"]},
        "machine": {"system": platform.system(), "machine": platform.machine(), **versions},
        "bits": weights.bits,
        "calibration": weights.manifest.model.get("calibration"),
        "results": [{"kind": type(result).__name__.lower(), **asdict(result)} for result in results],
    }
    write_atomic(directory / VERIFIED, (json.dumps(found, indent=1) + "\n").encode())


@dataclass(frozen=True)
class Exactness:
    """How far logits are from transformers in float32 with the same weights: root mean square of the differences over
    that of the logits, of the runtime and of transformers in bf16. `bounded`: not where activations are rounded to
    whole numbers too."""

    ours: float
    bf16: float
    bounded: bool

    @property
    def passed(self) -> bool:
        return not self.bounded or self.ours <= MOST * self.bf16

    def __str__(self) -> str:
        verdict = f"; at most {MOST} times that  {_verdict(self.passed)}" if self.bounded else ""
        return (
            f"with its own weights in float32: logits differ by {self.ours:.5f} of their size, "
            f"transformers in bf16 by {self.bf16:.5f}{verdict}"
        )


@dataclass(frozen=True)
class Rounding:
    """How far the weights are from the checkpoint's: root mean square of the differences over that of the values, of
    the tensor where it is the most times what rounding to its format costs, `rounded`. `bounded`: not where weights
    are calibrated, which makes products nearer by letting single weights be farther off."""

    tensor: str
    format: str
    error: float
    rounded: float
    bounded: bool

    @property
    def passed(self) -> bool:
        return not self.bounded or self.error <= MOST * self.rounded

    def __str__(self) -> str:
        verdict = f"at most {MOST} times that  {_verdict(self.passed)}" if self.bounded else "calibrated"
        return (
            f"weights, at worst {self.tensor} in {self.format}: off by {self.error:.5f} of their size, rounding to "
            f"that format {self.rounded:.5f}; {verdict}"
        )


def worst_rounding(checkpoint: Checkpoint, weights: ArtifactWeights) -> Rounding:
    """Of all tensors. What rounding costs is measured on some rows of each."""
    found = [_rounding(name, checkpoint.tensor(name), weights) for name in weights.shapes]
    return max(found, key=lambda each: (not each.passed, each.error / max(each.rounded, 1e-30)))


def _rounding(name: str, values: np.ndarray, weights: ArtifactWeights) -> Rounding:
    form = formats()[weights.manifest.buffers[name]["format"]]
    some = values[:: max(1, len(values) // ROUNDED_ROWS)] if values.ndim > 1 else values
    stored = form.dequantise(form.quantise(some), some.shape[-1])
    error, rounded = _error([weights.values(name)], [values]), _error([stored], [some])
    return Rounding(name, form.name, error, rounded, bounded="calibration" not in weights.manifest.model)


def _verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def compare_logits(
    llm: Llama,
    model: Any,
    parts: Sequence[Sequence[int]],
    formats: Iterable[str],
    new_cache: Callable[[], Any],
) -> Exactness:
    """`model` in float32; it is in bf16 afterwards. `formats`: of the weights. `new_cache`: what `model` keeps K and V
    in."""
    import torch

    exact = [quality.source_logits(model, ids, new_cache()) for ids in parts]
    rounded = model.to(torch.bfloat16)
    ours = [quality.artifact_logits(llm, ids) for ids in parts]
    theirs = [quality.source_logits(rounded, ids, new_cache()) for ids in parts]
    return Exactness(_error(ours, exact), _error(theirs, exact), bounded=w8a8.FORMAT.name not in formats)


def _error(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    pairs = [
        (a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)) for a, b in zip(found, exact, strict=True)
    ]
    difference = sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in pairs)
    size = sum(float(np.square(b, dtype=np.float64).sum()) for _, b in pairs)
    return float(np.sqrt(difference / size)) if size else float(difference > 0)


def put_weights(model: Any, values: Callable[[str], np.ndarray]) -> None:
    """Give a transformers model in float32 other weights, by name."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(values(name), np.float32)))


def reference_cache(kv: str) -> Any:
    """What a transformers model is to keep K and V in: an empty cache that rounds them as that of `kv=` does, to values
    of the model's dtype; with bf16, none but its own."""
    if kv == "bf16":
        return None
    import torch
    from transformers import DynamicCache

    form = formats()[KV_FORMATS[kv]]

    def rounded(states: Any) -> Any:
        stored = form.quantise(states.float().numpy())
        return torch.from_numpy(form.dequantise(stored, states.shape[-1])).to(states.dtype)

    class Rounding(DynamicCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            return super().update(rounded(key_states), rounded(value_states), layer_idx, *args, **kwargs)

    return Rounding()


def load_transformers(checkpoint: Path, dtype: str) -> Any:
    """The model of a checkpoint as its family's class, quantised weights as their values. Raises UserError without the
    verify extra."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        raise UserError("verify needs torch and transformers: pip install -e '.[verify]'")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    opened = Checkpoint.open(checkpoint)
    architecture = getattr(transformers, families.of(opened.config).architectures[0])
    with torch.no_grad():
        if checkpoint.is_dir() and {held.format for held in opened.held.values()} <= set(PLAIN):
            return architecture.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
        fields = {name: value for name, value in opened.fields.items() if name != "quantization_config"}
        model = architecture(architecture.config_class.from_dict(fields))
        put_weights(model, opened.tensor)
        return model.to(getattr(torch, dtype)).eval()


def compare(llm: Llama, model: Any, prompt: str, cache: Any) -> Comparison:
    """Decode `TOKENS` tokens greedily on both sides, each time going on with the reference's. `cache`: the model's."""
    ids = llm.encode(prompt, raw=True)
    llm.reset()
    reference = TransformersSteps(model, cache)
    ours, theirs = llm.prefill(ids), reference(ids)
    differ, ranks = [], (0, 0)
    for position in range(TOKENS):
        token, wanted = int(np.argmax(ours)), int(np.argmax(theirs))
        if token != wanted:
            differ.append(position)
            ranks = (max(ranks[0], _rank(theirs, token)), max(ranks[1], _rank(ours, wanted)))
        if position + 1 < TOKENS:
            ours, theirs = llm.decode(wanted), reference([wanted])
    return Comparison(prompt, TOKENS - len(differ), differ[0] if differ else None, ranks)


class TransformersSteps:
    """Feeds tokens to a transformers model with a KV cache; returns float32 logits `[vocab]` of the last one."""

    def __init__(self, model: Any, cache: Any) -> None:
        self._model, self._cache = model, cache

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        import torch

        with torch.no_grad():
            out = self._model(torch.tensor([list(ids)]), past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        logits: np.ndarray = out.logits[0, -1].float().numpy()
        return logits


def _rank(logits: np.ndarray, token: int) -> int:
    return int(np.sum(logits > logits[token]))
