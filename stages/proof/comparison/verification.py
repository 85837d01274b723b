"""An artifact directory against transformers, with its checkpoint and with its own weights."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2 import Llama, load
from stages.engine.files import file_digests, write_atomic
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.proof.comparison import divergence, transformers_model
from stages.proof.comparison.continuations import TABLE, Comparison, Continued, check_lengths, continued, piece
from stages.proof.comparison.prompts import Prompt
from stages.sharing.provenance import VERIFIED
from stages.weights.formats import formats, w8a8

MOST = 1.5
"""Times the error of transformers in bf16 that the runtime's logits may be off by."""
ROUNDED_ROWS = 64
"""Rows of a tensor at least that rounding is tried on."""
EXACT_WINDOWS = 2
"""Windows of the text that logits are compared on."""
SIMULATED_TOKENS = 24


@dataclass(frozen=True)
class Verification:
    """All that was found of an artifact directory. `text`: the file that `lost` was measured on; `tensors`: the
    rounding of each; `seconds`: what each result took, by its name."""

    directory: Path
    text: Path
    weights: ArtifactWeights
    lost: divergence.Quality
    tensors: tuple[Rounding, ...]
    exactness: Exactness
    comparisons: tuple[Comparison, ...]
    seconds: Mapping[str, float]

    @property
    def rounding(self) -> Rounding:
        """Of the tensor that is the worst off, for its format."""
        return max(self.tensors, key=lambda each: (not each.passed, each.error / max(each.rounded, 1e-30)))

    @property
    def checks(self) -> dict[str, Rounding | Exactness | Comparison]:
        """What passed or did not, by name."""
        prompts = {comparison.prompt.name: comparison for comparison in self.comparisons}
        return {"weights": self.rounding, "logits": self.exactness, **prompts}

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks.values())

    def summary(self) -> dict[str, Any]:
        """As JSON, without what depends on the day: it may be signed."""
        return {
            "passed": self.passed,
            "manifest": file_digests(self.directory / "manifest.json")["sha256"],
            "text": {"name": self.text.name, "sha256": file_digests(self.text)["sha256"]},
            "machine": {
                "system": platform.system(),
                "machine": platform.machine(),
                **{name: version(name) for name in ("torch", "transformers")},
            },
            "bits": self.weights.bits,
            "calibration": self.weights.manifest.model.get("calibration"),
            "results": [
                {"kind": type(result).__name__.lower(), **_brief(asdict(result))}
                for result in (self.lost, *self.checks.values())
            ],
        }


def _brief(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in ("differences", "pieces")}


def print_lines(*lines: object) -> None:
    print(*lines, sep="\n", flush=True)


def say_nothing(*lines: object) -> None:
    """In the place of `print_lines`."""


def verify(
    directory: Path,
    checkpoint: Path,
    prompts: Sequence[Prompt],
    full: bool = False,
    text: Path = divergence.TEXT,
    threads: int = 0,
    say: Callable[..., None] = print_lines,
) -> Verification:
    """Compare, say what comes out, and leave `verified.json` beside the manifest. Raises UserError."""
    source, weights, clock = Checkpoint.open(checkpoint), ArtifactWeights(directory), Clock()
    with contextlib.closing(load(directory, threads)) as llm:
        check_lengths(llm, prompts)
        parts = windows(llm, text, full)
        with clock.taken("quality"):
            lost = divergence.measure(
                (divergence.artifact_logits(llm, ids) for ids in parts),
                transformers_model.logits(source, source.tensor, parts),
                parts,
            )
        say(lost)
        made = []
        for prompt in prompts:
            with clock.taken(prompt.name):
                made.append(continued(llm, prompt))
        with clock.taken("logits"):  # and all weights with them
            tensors, exactness, comparisons = compare(llm, source, weights, parts[:EXACT_WINDOWS], made, clock)
    found = Verification(directory, text, weights, lost, tensors, exactness, comparisons, clock.seconds)
    say(found.rounding, found.exactness, TABLE.header(), *(comparison.row() for comparison in comparisons))
    write_atomic(directory / VERIFIED, (json.dumps(found.summary(), indent=1) + "\n").encode())
    return found


class Clock:
    """`seconds`: what was taken, by name, all times of a name together."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started


def windows(llm: Llama, text: Path, full: bool) -> list[list[int]]:
    """What is read of a text: little by the simulator, which takes its time. Raises UserError."""
    ids = llm.encode(divergence.read_text(text), raw=True)
    if llm.manifest.target["device"] == "sim":
        return divergence.windows(ids, 1, SIMULATED_TOKENS)
    return divergence.windows(ids, divergence.ALL_WINDOWS if full else divergence.WINDOWS, llm.context_length)


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
    """How far a tensor is from the checkpoint's: root mean square of the differences over that of the values;
    `rounded`: what rounding to its format costs, measured on some rows. `bounded`: not where weights are calibrated,
    which makes products nearer by letting single weights be farther off."""

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
    """An artifact directory's weights, each compared with the checkpoint's when it is read: `found`."""

    def __init__(self, checkpoint: Checkpoint, weights: ArtifactWeights, clock: Clock) -> None:
        self._checkpoint, self._weights, self._clock = checkpoint, weights, clock
        self.found: list[Rounding] = []

    def values(self, name: str) -> np.ndarray:
        """f32, of the tensor's shape."""
        values = self._weights.values(name)
        with self._clock.taken("weights"):
            self.found.append(_rounding(name, values, self._checkpoint.tensor(name), self._weights))
        return values


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
    prompts: Sequence[Continued],
    clock: Clock,
) -> tuple[tuple[Rounding, ...], Exactness, tuple[Comparison, ...]]:
    """The runtime against transformers with the artifact directory's weights: logits of the texts `parts` in float32,
    the choices of `prompts` in bf16. Of each tensor, how it is rounded."""
    held = Compared(source, weights, clock)
    texts = [*parts, *(prompt.ids for prompt in prompts)]
    logits = transformers_model.logits(source, held.values, parts, texts, llm.manifest.model["kv"])
    exact = list(islice(logits, len(parts)))
    theirs = list(islice(logits, len(parts)))
    ours = [divergence.artifact_logits(llm, ids) for ids in parts]
    bounded = w8a8.FORMAT.name not in weights.formats
    exactness = Exactness(_error(ours, exact), _error(theirs, exact), bounded)
    pairs = zip(prompts, logits, strict=True)
    comparisons = tuple(prompt.compared(wanted, partial(piece, llm.tokenizer)) for prompt, wanted in pairs)
    return tuple(held.found), exactness, comparisons


def _error(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    pairs = [
        (a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)) for a, b in zip(found, exact, strict=True)
    ]
    difference = sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in pairs)
    size = sum(float(np.square(b, dtype=np.float64).sum()) for _, b in pairs)
    return float(np.sqrt(difference / size)) if size else float(difference > 0)
