"""Checkpoints of seeded random weights, for `model=random:<shapes>`: real sizes without real weights.

Values have the outliers that make trained weights hard to round. About one input channel in a thousand carries far
larger values than the others, up to 20 times, the same ones in every layer (Dettmers et al. 2022, LLM.int8(), section
4; Sun et al. 2024, Massive Activations, section 2, which finds them in fixed dimensions): here the weights of the norms
make them. Columns of matrices have outliers of their own, and rows differ in size, so that a matrix's values are
heavy-tailed (Student's t, a normal distribution for each row).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path

from stages.engine.lazy import ml_dtypes, np
from stages.model import families
from stages.model.config import Config
from stages.model.decoder import ADDED, ADDENDS
from stages.model.families.place import Location, whole
from stages.weights.blobs import Tensor, write_safetensors

RECIPE = 3
"""Changes whenever equal shapes give other weights."""

_OUTLIERS = 1000
"""One in this many channels is an outlier; each tensor has at least one."""

_LARGER = (5.0, 20.0)
"""The range of an outlier's size, relative to other channels."""

_DEGREES = 5
"""Degrees of freedom of Student's t: the fewest whole ones with a finite fourth moment."""

_BIAS = 0.1
"""The standard deviation of biases."""

CHUNK = 1 << 22
"""Values that are generated at a time."""

AHEAD = 4
"""Tensors that are generated ahead of the one that is written."""


def random_tensors(config: Config) -> list[Tensor]:
    """Return name, dtype and shape of every tensor that is written."""
    return [(name, "bf16", pieces[0][1].plain_shape) for name, pieces in families.locations(config).items()]


def write_random_weights(config: Config, path: Path) -> None:
    """Write seeded weights.

    Rows have a mean square of `1 / fan_in` on average, and norms multiply by values of mean square 1, so that
    activations keep their scale through the layers.
    """
    shapes, offset = families.tensors(config), np.float32(config.decoder.norm.offset)
    seeds = {weight.name: seed for seed, weight in enumerate(families.weights(config))}

    def weights(weight: families.Weight, expert: int | None) -> np.ndarray:
        shape: tuple[int, ...] = shapes[weight.name]
        seed: int | tuple[int, int] = seeds[weight.name]
        if expert is not None:
            # The matrix of one expert: those of all would be made again for each of them.
            seed, shape = (seeds[weight.name], expert), shape[1:]
        if weight.slot in ADDENDS:
            return (_BIAS * np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)
        if len(shape) == 1:
            # All norms from one seed: outliers stay in their channels.
            return (_channels(np.random.default_rng(0), shape[0]) - offset).astype(ml_dtypes.bfloat16)
        added = 2 * config.layers if weight.slot in ADDED else 1
        rows = _matrix(np.random.Generator(np.random.SFC64(seed)), (prod(shape[:-1]), shape[-1]), added)
        return rows.reshape(shape)

    def tensor(pieces: Sequence[tuple[families.Weight, Location]]) -> np.ndarray:
        return whole([(replace(at, expert=None), weights(weight, at.expert)) for weight, at in pieces])

    with ThreadPoolExecutor() as pool:
        values = _computed_ahead(pool, tensor, list(families.locations(config).values()))
        write_safetensors(path, random_tensors(config), values)


def _channels(generator: np.random.Generator, count: int) -> np.ndarray:
    """Return sizes f32 `[count]` with a mean square of 1, equal but for the outliers."""
    sizes = np.ones(count, np.float32)
    outliers = generator.choice(count, max(1, count // _OUTLIERS), replace=False)
    sizes[outliers] = generator.uniform(*_LARGER, len(outliers))
    return sizes / np.sqrt(np.square(sizes).mean())


def _matrix(generator: np.random.Generator, shape: tuple[int, ...], added: int) -> np.ndarray:
    """Return a matrix bf16 `[out, in]`, of whose products `added` are summed up."""
    rows, columns = shape
    of_columns = _channels(generator, columns) / np.float32(np.sqrt(columns * added))
    of_rows = np.sqrt((_DEGREES - 2) / generator.chisquare(_DEGREES, (rows, 1))).astype(np.float32)
    out = np.empty(shape, ml_dtypes.bfloat16)
    step = max(1, CHUNK // columns)
    for first in range(0, rows, step):
        chunk = slice(first, first + step)
        out[chunk] = generator.standard_normal(out[chunk].shape, np.float32) * of_rows[chunk] * of_columns
    return out


def _computed_ahead(pool: ThreadPoolExecutor, work: Callable, items: list) -> Iterator[np.ndarray]:
    """Yield results in order, at most `AHEAD` computed in advance, so that memory stays bounded."""
    pending = [pool.submit(work, item) for item in items[:AHEAD]]
    for i in range(len(items)):
        yield pending.pop(0).result()
        if i + AHEAD < len(items):
            pending.append(pool.submit(work, items[i + AHEAD]))


def write_byte_tokenizer(config: Config, directory: Path) -> None:
    """Write a tokenizer of single bytes for random weights; ids past the bytes decode to `<id>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: config.vocab]
    vocab = {token: i for i, token in enumerate(alphabet)}
    vocab |= {f"<{i}>": i for i in range(len(alphabet), config.vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=alphabet[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": False}))
