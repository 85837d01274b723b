"""How much a model loses by the format of its weights, against its checkpoint, over a text.

Every position of the text counts. With p the checkpoint's probabilities in float32 and q the others, the loss of a
position is the Kullback-Leibler divergence sum(p log(p / q)) in nats; perplexity is exp of the mean of -log of what
came next (as llama.cpp's `perplexity --kl-divergence` has them).

`doit quality` compares formats alone: their values in float32, ours and those of files that llama.cpp makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import numpy as np

from llama_npu2 import Llama, UserError
from llama_npu2.dtypes import DTYPES
from llama_npu2.errors import first_line
from llama_npu2.sampling import log_softmax
from llama_npu2.storage import Directory
from llama_npu2.table import Column, Table
from llama_npu2.text import Tokenizer
from stages.commands import gguf_file, peers, transformers_model
from stages.graph import Build
from stages.model import calibration
from stages.model.buffers import Buffer
from stages.model.calibrated import calibrated_weights, read_calibrated
from stages.model.checkpoint import Checkpoint
from stages.model.plan import make_plan
from stages.model.policy import Policy, matrix_formats, parse_policy
from stages.targets import targets
from stages.weights.formats import formats

TEXT = Path(__file__).with_name("evaluation.txt")
"""Questions, facts and short stories, written for this project."""
WINDOW = 256
"""Tokens that are read from an empty context."""
WINDOWS, ALL_WINDOWS = 4, 16
"""How many, and with full=1."""
_RESAMPLES = 1000
_CONFIDENCE = (2.5, 97.5)
"""Percentiles of the resampled means."""


@dataclass(frozen=True)
class Quality:
    """`divergence`: mean, `interval`: of its 95 % bootstrap, `tail`: the 99.9th percentile. `same`: share of positions
    that prefer the same token. `perplexity`, `source_perplexity`: the artifact's, the checkpoint's."""

    tokens: int
    divergence: float
    interval: tuple[float, float]
    tail: float
    same: float
    perplexity: float
    source_perplexity: float

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"against the checkpoint in float32, {self.tokens} tokens: mean KL divergence {self.divergence:.6f} "
            f"({low:.6f} to {high:.6f}), 99.9th percentile {self.tail:.4f}, same best token {self.same:.2%}, "
            f"perplexity {self.perplexity:.3f} for {self.source_perplexity:.3f}"
        )


def read_text(path: Path) -> str:
    """Raises UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text={path}: {first_line(error)}: give a text file") from None


def windows(ids: Sequence[int], count: int, longest: int) -> list[list[int]]:
    """The first tokens of a text, cut into windows of the same length, as many as there are up to `count`. Raises
    UserError where there are not two."""
    if len(ids) < 2:
        raise UserError(f"text=: {len(ids)} tokens are no text to compare on: give a longer one")
    length = min(WINDOW, longest, len(ids))
    return [list(ids[at : at + length]) for at in range(0, len(ids) - length + 1, length)][:count]


def artifact_logits(llm: Llama, ids: Sequence[int]) -> np.ndarray:
    """f32 `[len(ids), vocab]`: of every position, token by token."""
    llm.reset()
    return np.stack([llm.prefill(ids[:1]), *(llm.decode(token) for token in ids[1:])])


def measure(found: Iterable[np.ndarray], source: Iterable[np.ndarray], parts: Sequence[Sequence[int]]) -> Quality:
    """Logits of the windows `parts`, f32 `[tokens, vocab]` each; `source`: those of the checkpoint in float32."""
    compared = [_compare(exact, ours, ids) for exact, ours, ids in zip(source, found, parts, strict=True)]
    divergence, same, surprise, wanted = (np.concatenate(values) for values in zip(*compared, strict=True))
    return Quality(
        tokens=len(divergence),
        divergence=float(divergence.mean()),
        interval=interval(divergence),
        tail=float(np.percentile(divergence, 99.9)),
        same=float(same.mean()),
        perplexity=float(np.exp(surprise.mean())),
        source_perplexity=float(np.exp(wanted.mean())),
    )


def _compare(
    source: np.ndarray, ours: np.ndarray, ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per position: divergence, whether both prefer one token; but for the last, -log of the next one on both sides."""
    logp, logq = log_softmax(source), log_softmax(ours)
    divergence = np.einsum("pv,pv->p", np.exp(logp), logp - logq)
    at, following = np.arange(len(ids) - 1), list(ids[1:])
    return divergence, logp.argmax(axis=1) == logq.argmax(axis=1), -logq[at, following], -logp[at, following]


def interval(values: np.ndarray) -> tuple[float, float]:
    """Of the mean, by bootstrap (Efron 1979), with a fixed seed."""
    low, high = np.percentile(list(_resampled_means(values)), _CONFIDENCE)
    return float(low), float(high)


def _resampled_means(values: np.ndarray) -> Iterator[float]:
    generator = np.random.default_rng(0)
    for _ in range(_RESAMPLES):
        yield float(generator.choice(values, len(values)).mean())


TABLE = Table(
    [
        Column("weights", 24),
        Column("bits", 5, right=True),
        Column("mean KL divergence", 32),
        Column("99.9th percentile", right=True),
        Column("same best token", right=True),
        Column("perplexity", right=True),
    ],
    markdown=True,
)


@dataclass(frozen=True)
class Rounded:
    """Weights in some format. `bits`: of a weight of a matrix, on average; `values`: of a tensor, by name."""

    name: str
    bits: float
    values: transformers_model.Values


def run(build: Build) -> None:
    """`doit quality`: the formats that weights= names, or all; with peers=llama.cpp those of its files, too."""
    options, source = build.options, Checkpoint.open(build.source.fetch())
    tokenizer = Tokenizer.open(Directory(build.directory))
    ids = tokenizer.encode(read_text(Path(options.text) if options.text else TEXT), special_tokens=True)
    parts = windows(ids, ALL_WINDOWS if options.full else WINDOWS, source.config.max_seq)
    chosen = [options.weights] if options.weights else [name for name in matrix_formats() if name != "bf16"]
    policies = [parse_policy(text) for text in chosen]
    # All of them at first, so that what cannot be had is refused at once.
    compared = [*_ours(build, source, policies), *_peers(build, policies)]
    exact, found = list(transformers_model.logits(source, source.tensor, parts)), []
    if not options.json:
        print(f"against the checkpoint in float32, {sum(map(len, parts))} tokens\n{TABLE.header()}", flush=True)
    for each in compared:
        lost = measure(transformers_model.logits(source, each.values, parts), exact, parts)
        found.append({"weights": each.name, "bits": each.bits} | asdict(lost))
        if not options.json:
            print(_row(each, lost), flush=True)
    if options.json:
        print(json.dumps(found))


def _row(each: Rounded, lost: Quality) -> str:
    low, high = lost.interval
    mean = f"{lost.divergence:.6f} ({low:.6f} to {high:.6f})"
    return TABLE.row(
        each.name, f"{each.bits:.2f}", mean, f"{lost.tail:.4f}", f"{lost.same:.2%}", f"{lost.perplexity:.3f}"
    )


def _ours(build: Build, source: Checkpoint, policies: Iterable[Policy]) -> Iterator[Rounded]:
    """As the CPU's kernels read them."""
    target, calibrated = targets()["cpu"], dict[str, Path]()
    if build.calibration:
        files = calibration.weights_files(source.config.layers)
        calibrated = calibrated_weights([build.directory / file for file in files])
    grouping = target.grouping(target.default_grouping)
    for policy in policies:
        buffers = make_plan(source.config, grouping, target.kernel_set, policy=policy).buffers
        name = policy.text + (", calibrated" if calibrated else "")
        yield Rounded(name, _bits(buffers), _Values(source, buffers, calibrated))


def _bits(buffers: Mapping[str, Buffer]) -> float:
    matrices = [(formats()[b.format], b) for b in buffers.values() if b.kind == "weight" and len(b.shape) == 2]
    sizes = [prod(form.packed_shape(b.shape, b.layout)) * DTYPES[form.dtype].itemsize for form, b in matrices]
    return 8 * sum(sizes) / sum(prod(b.shape) for _, b in matrices)


@dataclass(frozen=True)
class _Values:
    """A checkpoint's, stored as `buffers` say and read again."""

    source: Checkpoint
    buffers: Mapping[str, Buffer]
    calibrated: Mapping[str, Path]

    def __call__(self, name: str) -> np.ndarray:
        form = formats()[self.buffers[name].format]
        if name in self.calibrated:
            return form.dequantise(read_calibrated(self.calibrated[name], name), self.buffers[name].shape[-1])
        tensor = self.source.tensor(name)
        same = self.source.stored_format(name) == form.name
        return tensor if same else form.dequantise(form.quantise(tensor), tensor.shape[-1])


def _peers(build: Build, policies: Iterable[Policy]) -> Iterator[Rounded]:
    """The files of llama.cpp that are nearest to `policies`, as our importer reads them."""
    names = build.options.peer_list()
    if other := [name for name in names if name != "llama.cpp"]:
        raise UserError(f"peers={other[0]}: it has no formats of its own: leave it out")
    cache = peers.conversions(build.artifacts, build.directory)
    nearest = [peers.entrants(names, policy.matrices, build.source, cache) for policy in policies]
    for entrant in dict.fromkeys(each for found in nearest for each in found):
        values = Checkpoint.open(entrant.model).tensor
        yield Rounded(f"{entrant.program} {entrant.format}", gguf_file.bits(entrant.model), values)
