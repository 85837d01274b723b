"""Whether an artifact directory is right, and how good: against transformers.

Right: with the very weights that the artifacts hold, as values, and K and V rounded as their cache rounds them, greedy
tokens are those of transformers in bf16, and logits are about as near to those in float32 as a run in bf16 is. Good:
what the formats of weights and cache cost, against the checkpoint (`quality`). What was found lies beside the manifest,
in `verified.json`.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import numpy as np
from doit.exceptions import TaskFailed

from llama_npu2 import Llama, load
from llama_npu2.table import Column, Table
from stages.commands import quality, transformers_model
from stages.engine.files import file_digests, write_atomic
from stages.graph import Build
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.provenance import VERIFIED
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
    text = Path(options.text) if options.text else quality.TEXT
    passed = verify(build.directory, build.source.fetch(), options.full, text, options.threads)
    return None if passed else TaskFailed("verify: the runtime and transformers disagree, see above")


def verify(directory: Path, checkpoint: Path, full: bool = False, text: Path = quality.TEXT, threads: int = 0) -> bool:
    """Compare, print, record; returns whether the runtime is right. Raises UserError."""
    source = Checkpoint.open(checkpoint)
    weights = ArtifactWeights(directory)
    with contextlib.closing(load(directory, threads)) as llm:
        parts = windows(llm, text, full)
        lost = quality.measure(
            (quality.artifact_logits(llm, ids) for ids in parts),
            transformers_model.logits(source, source.tensor, parts),
            parts,
        )
        print(lost, flush=True)
        prompts = [continued(llm, prompt) for prompt in (PROMPTS if full else PROMPTS[:2])]
        rounding, exactness, comparisons = compare(llm, source, weights, parts[:EXACT_WINDOWS], prompts)
    print(rounding, exactness, TABLE.header(), *(comparison.row() for comparison in comparisons), sep="\n", flush=True)
    passed = rounding.passed and exactness.passed and all(comparison.passed for comparison in comparisons)
    _record(directory, text, weights, passed, [lost, rounding, exactness, *comparisons])
    return passed


def windows(llm: Llama, text: Path, full: bool) -> list[list[int]]:
    """What is read of a text: little by the simulator, which takes its time. Raises UserError."""
    ids = llm.encode(quality.read_text(text), raw=True)
    if llm.manifest.target["device"] == "sim":
        return quality.windows(ids, 1, SIMULATED_TOKENS)
    return quality.windows(ids, quality.ALL_WINDOWS if full else quality.WINDOWS, llm.context_length)


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


class Compared:
    """An artifact directory's weights, each compared with the checkpoint's when it is read."""

    def __init__(self, checkpoint: Checkpoint, weights: ArtifactWeights) -> None:
        self._checkpoint, self._weights = checkpoint, weights
        self._found: list[Rounding] = []

    def values(self, name: str) -> np.ndarray:
        """f32, of the tensor's shape."""
        values = self._weights.values(name)
        self._found.append(_rounding(name, values, self._checkpoint.tensor(name), self._weights))
        return values

    @property
    def worst(self) -> Rounding:
        """Of those that were read. What rounding costs is measured on some rows of each."""
        return max(self._found, key=lambda each: (not each.passed, each.error / max(each.rounded, 1e-30)))


def _rounding(name: str, values: np.ndarray, source: np.ndarray, weights: ArtifactWeights) -> Rounding:
    form = formats()[weights.format(name)]
    some = source[:: max(1, len(source) // ROUNDED_ROWS)] if source.ndim > 1 else source
    stored = form.dequantise(form.quantise(some), some.shape[-1])
    error, rounded = _error([values], [source]), _error([stored], [some])
    return Rounding(name, form.name, error, rounded, bounded="calibration" not in weights.manifest.model)


def _verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def compare(
    llm: Llama,
    source: Checkpoint,
    weights: ArtifactWeights,
    parts: Sequence[Sequence[int]],
    prompts: Sequence[Continued] = (),
) -> tuple[Rounding, Exactness, list[Comparison]]:
    """The runtime against transformers with the artifact directory's weights: logits of the texts `parts` in float32,
    the choices of `prompts` in bf16."""
    held = Compared(source, weights)
    texts = [*parts, *(prompt.ids for prompt in prompts)]
    logits = transformers_model.logits(source, held.values, parts, texts, llm.manifest.model["kv"])
    exact = list(islice(logits, len(parts)))
    theirs = list(islice(logits, len(parts)))
    ours = [quality.artifact_logits(llm, ids) for ids in parts]
    bounded = w8a8.FORMAT.name not in weights.formats
    exactness = Exactness(_error(ours, exact), _error(theirs, exact), bounded)
    comparisons = [prompt.compared(wanted) for prompt, wanted in zip(prompts, logits, strict=True)]
    return held.worst, exactness, comparisons


def _error(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    pairs = [
        (a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)) for a, b in zip(found, exact, strict=True)
    ]
    difference = sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in pairs)
    size = sum(float(np.square(b, dtype=np.float64).sum()) for _, b in pairs)
    return float(np.sqrt(difference / size)) if size else float(difference > 0)


@dataclass(frozen=True)
class Continued:
    """What the runtime makes of a prompt. `ids`: the prompt's and all that it chose but the last; `logits` f32
    `[TOKENS, vocab]`: by which it chose."""

    prompt: str
    ids: Sequence[int]
    logits: np.ndarray

    def compared(self, logits: np.ndarray) -> Comparison:
        """With the logits `[len(ids), vocab]` of transformers."""
        differ, ranks = [], (0, 0)
        for position, (ours, theirs) in enumerate(zip(self.logits, logits[-TOKENS:], strict=True)):
            token, wanted = int(np.argmax(ours)), int(np.argmax(theirs))
            if token != wanted:
                differ.append(position)
                ranks = (max(ranks[0], _rank(theirs, token)), max(ranks[1], _rank(ours, wanted)))
        return Comparison(self.prompt, TOKENS - len(differ), differ[0] if differ else None, ranks)


def continued(llm: Llama, prompt: str) -> Continued:
    """Decode `TOKENS` tokens greedily."""
    ids = llm.encode(prompt, raw=True)
    llm.reset()
    logits = [llm.prefill(ids)]
    for _ in range(TOKENS - 1):
        ids = [*ids, int(np.argmax(logits[-1]))]
        logits.append(llm.decode(ids[-1]))
    return Continued(prompt, ids, np.stack(logits))


def _rank(logits: np.ndarray, token: int) -> int:
    return int(np.sum(logits > logits[token]))
