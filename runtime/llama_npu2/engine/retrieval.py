"""Embeddings and reranking, as Qwen3-Embedding and Qwen3-Reranker define them (Zhang et al. 2025).

An embedding is the last norm's output after the last token of a text, of length 1. A relevance is the probability of
`yes` against `no` as the answer to a prompt that shows the model a query and a document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.options import OptionError
from llama_npu2.text.rendering import marked, split_at_marks
from llama_npu2.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@frozen
class Ranked:
    """A document with its relevance to a query."""

    index: int
    """Its place among the documents that were given."""
    score: float
    """The probability that it is relevant."""
    document: str


class Embedding:
    """How a model embeds texts."""

    def __init__(self, size: int, normalised: bool, dimensions: int = 0, instruction: str = "") -> None:
        """Initialise it.

        Args:
            size: number of values of a hidden state.
            normalised: whether embeddings have length 1.
            dimensions: only so many values of each, the first ones; 0: all.
            instruction: what queries are for; documents have none.

        Raises:
            UserError: if there are not so many dimensions.
        """
        if not 0 <= dimensions <= size:
            message = f"this model's embeddings have {size}: choose 1 to {size}"
            raise OptionError("dimensions", dimensions, message)
        self.dimensions = dimensions or size
        self._normalised, self._instruction = normalised, instruction

    def text(self, text: str) -> str:
        """Return what is embedded of a text."""
        return f"Instruct: {self._instruction}\nQuery:{text}" if self._instruction else text

    def of(self, hidden: np.ndarray) -> np.ndarray:
        """Return the embedding, f32 `[dimensions]`, of a text whose last token has this output of the last norm."""
        values: np.ndarray = hidden[: self.dimensions].astype(np.float32)
        length = math.sqrt(float(np.dot(values.astype(np.float64), values.astype(np.float64))))
        return values / np.float32(length) if self._normalised and length else values


class Relevance:
    """How a model judges documents."""

    def __init__(self, tokenizer: Tokenizer, query: str, instruction: str = "") -> None:
        """Initialise it.

        Args:
            tokenizer: the model's.
            query: what is looked for.
            instruction: what makes a document relevant; by default, that it answers a web search.

        Raises:
            UserError: if the model has other prompts.
        """
        wanted = ("yes", "no", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
        found = [tokenizer.id(text) for text in wanted]
        if None in found:
            raise UserError(f"this model cannot rerank: its tokenizer has no token {wanted[found.index(None)]}")
        self._yes, self._no, *_ = (token for token in found if token is not None)
        self._tokenizer = tokenizer
        self._asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: "
        self._before, self._after = (tokenizer.encode(text, special_tokens=False) for text in (_JUDGE, _ANSWER))

    def prompt(self, document: str) -> list[int]:
        """Return the prompt that asks for the relevance of a document. Texts never become control tokens."""
        text = self._asked + document
        controls = [token for token in self._tokenizer.added if token in text]
        parts = split_at_marks(marked(text, controls), controls)
        return self._before + self._tokenizer.encode_parts(parts) + self._after

    def of(self, logits: np.ndarray) -> float:
        """Return the probability of `yes` among the two answers, given the logits after a prompt."""
        return 1 / (1 + math.exp(min(float(logits[self._no]) - float(logits[self._yes]), 700.0)))


def ranked(scores: Sequence[float], documents: Sequence[str]) -> list[Ranked]:
    """Return documents with their scores, the most relevant ones first."""
    found = [Ranked(at, score, documents[at]) for at, score in enumerate(scores)]
    return sorted(found, key=lambda each: -each.score)
