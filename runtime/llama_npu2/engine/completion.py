"""The results of a generation besides its text: tokens, log-probabilities, counts and times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from llama_npu2.engine.sampling import largest, log_total, most_likely
from llama_npu2.frozen import frozen
from llama_npu2.text.replies import Kind, Piece


@dataclass
class Stats:
    """Counts and times of a generation. Times in seconds."""

    prompt_tokens: int = 0
    """Tokens of the prompt that were processed."""
    reused_tokens: int = 0
    """Tokens of the prompt that the KV cache held already."""
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    """Number of the generated tokens in which the model thought."""
    ttft: float = 0.0
    """Time to first token: from the call to the first sampled token."""
    decode_time: float = 0.0
    """Time of all tokens after the first."""
    finish_reason: str = ""
    """`stop` (end token or stop string) or `length`; empty for a reply that was not read to its end."""

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return self.decode_time / (self.generated_tokens - 1) if self.generated_tokens > 1 else 0.0

    @property
    def prefill_rate(self) -> float:
        return self.prompt_tokens / self.ttft if self.ttft else 0.0

    @property
    def decode_rate(self) -> float:
        return 1 / self.tpot if self.tpot else 0.0


@frozen
class Logprob:
    """The log-probability of a token given all tokens before it.

    It follows from the model's logits as they are, without temperature or penalties.
    """

    token: int
    logprob: float
    """Natural logarithm."""
    greedy: bool
    """Whether it is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their log-probabilities, best first."""

    @classmethod
    def of(cls, token: int, logits: np.ndarray, top: int = 0) -> Logprob:
        """Return the log-probability of `token`, with the `top` most likely alternatives.

        `logits` are float32 `[vocab]`, after the tokens before it. Raises UserError if they are no numbers.
        """
        greedy, total = token == most_likely(logits), log_total(logits)
        best = sorted(largest(logits, top).tolist() if top else [], key=lambda i: -logits[i])
        return cls(token, float(logits[token]) - total, greedy, tuple((i, float(logits[i]) - total) for i in best))


@dataclass
class Completion:
    """A reply."""

    text: str = ""
    """The answer."""
    reasoning: str = ""
    """What the model thought before it."""
    tool_calls: list[str] = field(default_factory=list)
    """Calls of tools, as the model wrote them."""
    tokens: list[int] = field(default_factory=list)
    """All tokens that were sampled, including an end token and those that a stop string cut off."""
    stats: Stats = field(default_factory=Stats)
    stopped_by: str = ""
    """The stop string that ended it; empty if something else did."""
    logprobs: list[Logprob] | None = None
    """One for each of `tokens`, if asked for."""
    prompt_logprobs: list[Logprob] | None = None
    """One for each token of the prompt but the first, if asked for."""

    @property
    def finish_reason(self) -> str:
        """`stop` (end token or stop string) or `length`."""
        return self.stats.finish_reason

    def add(self, piece: Piece) -> None:
        """Add a piece of the reply."""
        if piece.kind is Kind.TEXT:
            self.text += piece.text
        elif piece.kind is Kind.REASONING:
            self.reasoning += piece.text
        else:
            self.tool_calls += [""] * (piece.call + 1 - len(self.tool_calls))
            self.tool_calls[piece.call] += piece.text

    def end(self) -> None:
        """Take away the white space with which parts other than the answer end."""
        self.reasoning = self.reasoning.rstrip()
        self.tool_calls = [call.rstrip() for call in self.tool_calls]


class Reply(Iterator[str]):
    """A reply as it comes. Iterating yields the pieces of the answer, of whole UTF-8 characters.

    What has come is in `completion`. `text`, `reasoning` and `tool_calls` wait until it is whole.
    """

    def __init__(self, pieces: Iterator[Piece], completion: Completion) -> None:
        self._pieces, self.completion = pieces, completion

    def __next__(self) -> str:
        return next(piece.text for piece in self.pieces() if piece.kind is Kind.TEXT)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of all of it, also those that are not the answer."""
        for piece in self._pieces:
            self.completion.add(piece)
            yield piece
        self.completion.end()

    def whole(self) -> Completion:
        """Return the reply once all of it has come. Raises UserError."""
        for _ in self.pieces():
            pass
        return self.completion

    @property
    def text(self) -> str:
        """The answer."""
        return self.whole().text

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered; empty for a model that does not."""
        return self.whole().reasoning

    @property
    def tool_calls(self) -> list[str]:
        """Calls of tools, as the model wrote them."""
        return self.whole().tool_calls
