"""Makes a reply of logits: chooses tokens one by one, and says what text each adds and when the reply ends."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from llama_npu2.devices.spans import Timer
from llama_npu2.engine.completion import Completion, Logprob
from llama_npu2.engine.sampling import sampler
from llama_npu2.frozen import frozen
from llama_npu2.options import Sampling
from llama_npu2.text.replies import Kind, Piece, ReplyStream
from llama_npu2.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llama_npu2.text.grammars import Constraint


@frozen
class Asked:
    """What a reply is asked for."""

    ids: list[int]
    """The tokens of the prompt."""
    options: Sampling
    number: int
    """Which of the replies to a seed."""
    started: float
    """When the reply was asked for, by `time.perf_counter`."""


class Generation:
    """A reply that grows by a token whenever it is given the logits after `ids`."""

    def __init__(
        self,
        asked: Asked,
        completion: Completion,
        tokenizer: Tokenizer,
        eos: Collection[int],
        context_length: int,
        timed: Timer,
        constraint: Constraint | None = None,
    ) -> None:
        """Set it up.

        Args:
            asked: what it is asked for.
            completion: is filled in, but for its texts.
            tokenizer: the model's.
            eos: the tokens that end a reply.
            context_length: the most tokens of prompt and reply.
            timed: notes how long its parts take.
            constraint: what the answer has to follow, which begins once what the model thinks has ended.
        """
        self._asked, self._eos, self._context_length, self._timed = asked, eos, context_length, timed
        self._stream = ReplyStream(tokenizer, asked.ids, eos, asked.options.stop)
        self._constraint = constraint
        self._choose = sampler(asked.options, asked.ids, asked.number, self._restrict if constraint else None)
        self._first = 0.0
        self.completion = completion
        self.ids = list(asked.ids)
        """The tokens of the prompt and of the reply."""
        completion.logprobs = None if asked.options.logprobs is None else []

    @property
    def finished(self) -> bool:
        """Whether the reply has ended. Then `flush` has the rest of its text."""
        return bool(self.completion.stats.finish_reason)

    def take(self, logits: np.ndarray) -> list[Piece]:
        """Choose the next token; return the pieces of text that became certain with it.

        Args:
            logits: float32 `[vocab]` after the last of `ids`. They are not kept.

        Raises:
            UserError: if they are no finite numbers, or no token can follow that is allowed.
        """
        completion, options = self.completion, self._asked.options
        stats = completion.stats
        token = self._timed("host", "sample", self._choose, logits)
        now = time.perf_counter()
        self._first = self._first or now
        stats.ttft, stats.decode_time = self._first - self._asked.started, now - self._first
        self.ids.append(token)
        completion.tokens.append(token)
        stats.generated_tokens += 1
        if completion.logprobs is not None:
            completion.logprobs.append(Logprob.of(token, logits, options.logprobs or 0))
        ended = token in self._eos
        if self._constraint and self._answers and not ended:
            self._constraint.follow(token)
            ended = self._constraint.complete
        pieces: list[Piece] = []
        stats.reasoning_tokens += self._stream.kind is Kind.REASONING
        if token not in self._eos:
            pieces = self._timed("host", "detokenise", self._stream.push, token)
        completion.stopped_by = self._stream.stopped_by
        if ended or completion.stopped_by:
            stats.finish_reason = "stop"
        elif stats.generated_tokens >= options.max_tokens or len(self.ids) > self._context_length:
            stats.finish_reason = "length"
        return pieces

    @property
    def _answers(self) -> bool:
        """Whether the next token belongs to the answer."""
        return self._stream.kind is Kind.TEXT

    def _restrict(self, logits: np.ndarray) -> None:
        assert self._constraint
        (self._constraint.restrict if self._answers else self._constraint.restrict_before)(logits)

    def flush(self) -> list[Piece]:
        """Return the pieces of text that were held back until the reply's end."""
        return self._stream.flush()
