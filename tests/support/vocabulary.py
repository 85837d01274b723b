"""A tokenizer with a vocabulary as large as that of Llama 3, trained on what every machine with Python has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""What is one piece before bytes are merged: mostly a word with the space before it, or up to three digits."""
_SPECIAL = 256
"""How many of the tokens are special ones, the last ones."""


def trained(size: int) -> Tokenizer:
    """Return a tokenizer of byte pairs from the sources of Python's library, with `size` tokens; takes a minute.

    Tokens that the text does not fill, if any, are marks, as the special ones are.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - _SPECIAL,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(), trainer)
    marks = range(tokenizer.get_vocab_size(), size)
    tokenizer.add_special_tokens([AddedToken(f"<|special_{number}|>", special=True) for number in marks])
    return tokenizer


def _sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="replace")
