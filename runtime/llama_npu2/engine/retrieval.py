"""Embeddings and reranking, as Qwen3-Embedding and Qwen3-Reranker define them (Zhang et al. 2025).

An embedding is the last norm's output after the last token of a text, of length 1. A relevance is the probability of
`yes` against `no` as the answer to a prompt that shows the model a query and a document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llama_npu2.errors import UserError
from llama_npu2.text.rendering import marked, split_at_marks
from llama_npu2.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Ranked:
    """A document with its relevance to a query."""

    index: int
    """Its place among the documents that were given."""
    score: float
    """The probability that it is relevant."""
    document: str


def embedded_text(text: str, instruction: str) -> str:
    """Return what is embedded of a text: with an instruction it is a query, without one a document."""
    return f"Instruct: {instruction}\nQuery:{text}" if instruction else text


def finished(hidden: np.ndarray, dimensions: int, normalised: bool) -> np.ndarray:
    """Return an embedding: the first `dimensions` values of a hidden state (0: all), in f32. Raises UserError."""
    if not 0 <= dimensions <= len(hidden):
        raise UserError(
            f"dimensions={dimensions}: this model's embeddings have {len(hidden)}: choose 1 to {len(hidden)}"
        )
    values: np.ndarray = hidden[: dimensions or len(hidden)].astype(np.float32)
    length = math.sqrt(float(np.dot(values.astype(np.float64), values.astype(np.float64))))
    return values / np.float32(length) if normalised and length else values


def pairs(tokenizer: Tokenizer, query: str, documents: Sequence[str], instruction: str) -> Iterator[list[int]]:
    """Yield the prompt that asks for the relevance of each document. Texts never become control tokens."""
    before, after = (tokenizer.encode(text, special_tokens=False) for text in (_JUDGE, _ANSWER))
    for document in documents:
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        controls = [token for token in tokenizer.added if token in text]
        yield before + tokenizer.encode_parts(split_at_marks(marked(text, controls), controls)) + after


def answers(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the tokens `yes` and `no`. Raises UserError for a model that has other prompts."""
    wanted = ("yes", "no", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    found = [tokenizer.id(text) for text in wanted]
    if None in found:
        raise UserError(f"this model cannot rerank: its tokenizer has no token {wanted[found.index(None)]}")
    yes, no, *_ = (token for token in found if token is not None)
    return yes, no


def relevance(logits: np.ndarray, yes: int, no: int) -> float:
    """Return the probability of `yes` among the two answers."""
    return 1 / (1 + math.exp(min(float(logits[no]) - float(logits[yes]), 700.0)))
