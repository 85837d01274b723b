"""Verify an artifact directory against transformers, with its checkpoint and with its own weights."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2 import Llama, load
from llama_npu2.frozen import frozen
from stages.engine.files import file_digests, write_atomic
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.proof.comparison import divergence, transformers_model
from stages.proof.comparison.continuations import (
    LEGEND,
    TABLE,
    Comparison,
    Continued,
    Prompt,
    check_lengths,
    continued,
    piece,
)
from stages.sharing.provenance import VERIFIED
from stages.weights.formats import formats

MOST = 1.5
"""The allowed error of the runtime's logits, as a multiple of that of transformers in bf16."""
ROUNDED_ROWS = 64
"""Rows of a tensor, at least, that are rounded to measure what its format costs."""
EXACT_WINDOWS = 2
"""Windows of the text whose logits are compared."""
SIMULATED_TOKENS = 24


@frozen
class Verification:
    """The result for an artifact directory."""

    directory: Path
    text: Path
    """The file of which `lost` was measured."""
    weights: ArtifactWeights
    lost: divergence.Quality
    tensors: tuple[Rounding, ...]
    exactness: Exactness
    comparisons: tuple[Comparison, ...]
    seconds: Mapping[str, float]
    """The time of each result, by its name."""

    @property
    def rounding(self) -> Rounding:
        """The tensor with the largest error relative to its format's rounding."""
        return max(self.tensors, key=lambda tensor: (not tensor.passed, tensor.error / max(tensor.rounded, 1e-30)))

    @property
    def checks(self) -> dict[str, Rounding | Exactness | Comparison]:
        """All checks, by name."""
        prompts = {comparison.prompt.name: comparison for comparison in self.comparisons}
        return {"weights": self.rounding, "logits": self.exactness, **prompts}

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks.values())

    @property
    def verdict(self) -> str:
        """The result in one line."""
        failed = [name for name, check in self.checks.items() if not check.passed]
        if failed:
            return f"verify: FAIL: the runtime and transformers disagree: {', '.join(failed)}"
        return f"verify: pass: all {len(self.checks)} checks; the runtime computes what transformers does"

    def summary(self) -> dict[str, Any]:
        """Return the result as JSON without what depends on the day, so that it can be signed."""
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
    """Print lines at once."""
    print(*lines, sep="\n", flush=True)


def verify(
    directory: Path,
    checkpoint: Path,
    prompts: Sequence[Prompt],
    full: bool = False,
    text: Path = divergence.TEXT,
    threads: int = 0,
    say: Callable[..., None] = print_lines,
) -> Verification:
    """Compare, report with `say`, and write `verified.json` next to the manifest. Raises UserError."""
    weights, clock = ArtifactWeights(directory), Clock()
    source = Checkpoint.open(checkpoint).within(weights.manifest.model["max_seq"])
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
        continuations = []
        for prompt in prompts:
            with clock.taken(prompt.name):
                continuations.append(continued(llm, prompt))
        with clock.taken("logits"):  # and all weights with them
            tensors, exactness, comparisons = compare(llm, source, weights, parts[:EXACT_WINDOWS], continuations, clock)
    result = Verification(directory, text, weights, lost, tensors, exactness, comparisons, clock.seconds)
    for name, check in (("weights", result.rounding), ("logits", exactness)):
        say(f"{_verdict(check.passed)}  {name}: {check}")
    say("", TABLE.header(), *(comparison.row() for comparison in comparisons), LEGEND, "", result.verdict)
    write_atomic(directory / VERIFIED, (json.dumps(result.summary(), indent=1) + "\n").encode())
    return result


class Clock:
    """Measures times by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """The sum of all times of each name."""

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """Add the time that the block takes."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started


def windows(llm: Llama, text: Path, full: bool) -> list[list[int]]:
    """Return the windows of a text: few for the simulator, which is slow. Raises UserError."""
    ids = llm.encode(divergence.read_text(text), raw=True)
    if llm.manifest.target["device"] == "sim":
        return divergence.windows(ids, 1, SIMULATED_TOKENS)
    return divergence.windows(ids, divergence.ALL_WINDOWS if full else divergence.WINDOWS, llm.context_length)


@frozen
class Exactness:
    """How far logits are from transformers in float32 with the same weights.

    Errors are the root mean square of the differences, divided by that of the logits.
    """

    ours: float
    """The runtime's error."""
    bf16: float
    """The error of transformers in bf16."""
    bounded: bool
    """Whether a bound applies: not where activations are rounded to whole numbers too."""

    @property
    def passed(self) -> bool:
        return not self.bounded or self.ours <= MOST * self.bf16

    def __str__(self) -> str:
        bound = (
            f" ({MOST} times that is allowed)" if self.bounded else " (no bound applies where activations have 8 bits)"
        )
        return (
            f"against transformers in float32 with the same weights, relative error {self.ours:.5f}; "
            f"that of transformers in bf16 {self.bf16:.5f}{bound}"
        )


@frozen
class Rounding:
    """How far a tensor is from the checkpoint's."""

    tensor: str
    format: str
    error: float
    """Root mean square of the differences, divided by that of the values."""
    rounded: float
    """The error that rounding some rows to the format makes by itself."""
    bounded: bool
    """Whether a bound applies: not to calibrated weights, some of which are farther off so that products are nearer."""

    @property
    def passed(self) -> bool:
        return not self.bounded or self.error <= MOST * self.rounded

    def __str__(self) -> str:
        if not self.error:
            return "all are those of the checkpoint"
        bound = f" ({MOST} times that is allowed)" if self.bounded else " (no bound applies to calibrated weights)"
        return (
            f"worst is {self.tensor} in {self.format}: relative error {self.error:.5f}; that of rounding to the format "
            f"{self.rounded:.5f}{bound}"
        )


def _rounding(name: str, values: np.ndarray, source: np.ndarray, weights: ArtifactWeights) -> Rounding:
    form = formats()[weights.format(name)]
    sample = source[:: max(1, len(source) // ROUNDED_ROWS)] if source.ndim > 1 else source
    stored = form.dequantise(form.quantise(sample), sample.shape[-1])
    error, rounded = _error([values], [source]), _error([stored], [sample])
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
    """Compare the runtime with transformers with the artifact directory's weights.

    Logits of the texts `parts` are compared in float32, the choices of `prompts` in bf16, and tensors when they are
    read.
    """
    tensors: list[Rounding] = []

    def compared(name: str) -> np.ndarray:
        """Return a weight, f32, after comparing it with the checkpoint's."""
        values = weights.values(name)
        with clock.taken("weights"):
            tensors.append(_rounding(name, values, source.tensor(name), weights))
        return values

    texts = [*parts, *(prompt.ids for prompt in prompts)]
    logits = transformers_model.logits(source, compared, parts, texts, llm.manifest.model["kv"])
    exact = list(islice(logits, len(parts)))
    theirs = list(islice(logits, len(parts)))
    ours = [divergence.artifact_logits(llm, ids) for ids in parts]
    exactness = Exactness(_error(ours, exact), _error(theirs, exact), not weights.rounds_activations)
    pairs = zip(prompts, logits, strict=True)
    comparisons = tuple(prompt.compared(wanted, partial(piece, llm.tokenizer)) for prompt, wanted in pairs)
    return tuple(tensors), exactness, comparisons


def _error(values: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    pairs = [
        (a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)) for a, b in zip(values, exact, strict=True)
    ]
    difference = sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in pairs)
    size = sum(float(np.square(b, dtype=np.float64).sum()) for _, b in pairs)
    return float(np.sqrt(difference / size)) if size else float(difference > 0)
