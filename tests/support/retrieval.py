"""Small checkpoints of models that embed and rank texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, processors

from tests.conftest import write_checkpoint

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
KINDS = ("Transformer", "Pooling", "Normalize")
MODULES = [{"idx": i, "path": "", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(KINDS)]


def write_tokenizer(directory: Path, ends: bool) -> None:
    """Bytes and the words that a reranker answers with. `ends`: an end token follows each text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(alphabet)} | {"yes": 300, "no": 301, "ye": 302}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [("y", "e"), ("ye", "s"), ("n", "o")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(list(SPECIAL))
    inner.add_tokens(["<think>", "</think>"])
    if ends:
        end = inner.token_to_id(SPECIAL[0])
        inner.post_processor = processors.TemplateProcessing(
            single=f"$A {SPECIAL[0]}", special_tokens=[(SPECIAL[0], end)]
        )
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def write_pooling(directory: Path, **fields: Any) -> None:
    (directory / "modules.json").write_text(json.dumps(MODULES))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 64, **fields}))


def write_embedder(directory: Path) -> None:
    """Random weights that make embeddings of 64 values."""
    write_checkpoint(directory, vocab_size=320, max_position_embeddings=512)
    write_tokenizer(directory, ends=True)
    write_pooling(directory, pooling_mode="lasttoken")


def write_ranker(directory: Path) -> None:
    """Random weights and the tokens that judge documents."""
    write_checkpoint(directory, vocab_size=320, max_position_embeddings=1024)
    write_tokenizer(directory, ends=False)
