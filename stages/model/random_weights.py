"""Checkpoints of seeded random weights, for `model=random:<shapes>`: real sizes without real weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

from stages.model import families
from stages.model.config import Config


def write_random_weights(config: Config, path: Path) -> None:
    """Seeded weights, uniform with variance `1 / fan_in`, so that activations keep their scale through the layers."""
    from stages.weights.blobs import write_safetensors

    def tensor(item: tuple[int, tuple[str, tuple[int, ...]]]) -> np.ndarray:
        seed, (name, shape) = item
        if len(shape) == 1:
            return np.ones(shape, bfloat16)
        limit = np.float32(np.sqrt(3.0 / shape[1]))
        if any(fnmatchcase(name, pattern) for pattern in family.residual):
            limit /= np.float32(np.sqrt(2.0 * config.layers))
        generator = np.random.Generator(np.random.SFC64(seed))
        out = np.empty(shape, bfloat16)
        rows = max(1, (1 << 22) // shape[1])
        for start in range(0, shape[0], rows):
            part = out[start : start + rows]
            part[...] = generator.random(part.shape, np.float32) * (2 * limit) - limit
        return out

    family, shapes = families.of(config), families.tensors(config)
    with ThreadPoolExecutor() as pool:
        window = _windowed(pool, tensor, list(enumerate(shapes.items())))
        write_safetensors(path, ((n, "bf16", s) for n, s in shapes.items()), window)


def _windowed(pool: ThreadPoolExecutor, work: Callable, items: list, ahead: int = 4) -> Iterator[np.ndarray]:
    """Results in order, at most `ahead` computed in advance, so that memory stays bounded."""
    pending = [pool.submit(work, item) for item in items[:ahead]]
    for i in range(len(items)):
        yield pending.pop(0).result()
        if i + ahead < len(items):
            pending.append(pool.submit(work, items[i + ahead]))


def write_byte_tokenizer(config: Config, directory: Path) -> None:
    """A tokenizer of single bytes for random weights; ids past the bytes decode to `<id>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: config.vocab]
    vocab = {token: i for i, token in enumerate(alphabet)}
    vocab |= {f"<{i}>": i for i in range(len(alphabet), config.vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=alphabet[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": False}))
