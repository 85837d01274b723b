"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.routing import Route

from llama_npu2.engine.completion import Logprob
from llama_npu2.schema import Check, flag, whole
from llama_npu2.serve.answers import answering, must_write
from llama_npu2.serve.events import event
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import MOST_TOKENS, Fields, holding, left_out, model_name, only, rule, worded
from llama_npu2.serve.model import Model
from llama_npu2.serve.openai.common import (
    LABELS,
    MOST_N,
    OF_STREAMS,
    STREAM,
    each_text,
    head,
    sampling,
    sampling_fields,
    texts_or_tokens,
    until_done,
    usage,
    with_usage,
)
from llama_npu2.serve.readings import Readings
from llama_npu2.serve.replies import Replies, Usage

_MOST_PROMPTS = 128
_DEFAULT_TOKENS = 16
"""As in OpenAI's API."""
_MOST_LOGPROBS = 5


_ECHOED = rule(
    "max_tokens",
    worded(whole(1, MOST_TOKENS), "1 or more: it may be 0 only with echo"),
    unless=holding({"echo": only(True, "")}),
)


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request."""
    optional: dict[str, Check] = {
        **sampling_fields(vocabulary),
        **STREAM,
        **LABELS,
        "model": model_name,
        "max_tokens": whole(0, MOST_TOKENS),
        "logprobs": whole(0, _MOST_LOGPROBS),
        "echo": flag,
        "best_of": whole(1, MOST_N),
        "suffix": left_out("texts are continued at their end alone"),
        "store": only(False, "nothing is stored"),
    }
    return Fields({"prompt": texts_or_tokens(vocabulary, _MOST_PROMPTS)}, optional, (OF_STREAMS, _ECHOED))


class _Completion:
    """One request and its replies."""

    def __init__(self, model: Model, asked: dict[str, Any]) -> None:
        """Raises RequestError."""
        self.prompts, _ = each_text(asked["prompt"])
        self.model, self.asked, self.n = model, asked, asked.get("n", 1)
        self.stream: bool = asked.get("stream", False)
        if asked.get("best_of", self.n) != self.n:
            raise RequestError(400, f"best_of must be {self.n} or left out: all replies are returned", "best_of")
        self._most = asked.get("max_tokens", _DEFAULT_TOKENS)
        self._with_usage = with_usage(asked)
        self.replies = Replies(model, len(self.prompts) * self.n)
        self.head = {**head("cmpl", model), "object": "text_completion"}
        self.ids: list[list[int]] = []
        self._echoed: list[str] = []
        self._scores: list[list[Logprob]] = []
        """Log-probabilities of each prompt's tokens but its first one, where they are asked for."""
        self._cached = 0
        """Tokens that were processed for them."""
        self._offsets = [0] * len(self.prompts) * self.n
        self._begun = [False] * len(self.prompts) * self.n

    async def start(self) -> None:
        """Ask for the replies. Raises RequestError."""
        model, asked = self.model, self.asked
        for prompt in self.prompts:
            encode = partial(model.llm.encode, prompt, raw=True)
            self.ids.append(await model.tokens_of(encode, prompt, "prompt", room=min(self._most, 1)))
            self._echoed.append(prompt if isinstance(prompt, str) else model.llm.tokenizer.decode(prompt))
        if asked.get("echo") and "logprobs" in asked:
            with closing(Readings(model, replies=0)) as readings:
                self._scores = await readings.each(self.ids, partial(self._score, readings))
            self.replies.noted += readings.noted
            self._cached = readings.tokens - readings.processed
        if self._most:
            self.replies.start(self.ids, sampling(asked, self._most, asked.get("logprobs")), self.n)

    async def _score(self, readings: Readings, number: int, ids: list[int]) -> list[Logprob]:
        """Return the log-probabilities of the tokens of a prompt but its first one: those of `Llama.score`."""
        if len(ids) == 1:
            return []
        top: int = self.asked["logprobs"]
        return await readings.read(ids[:-1], "prompt", lambda at, logits: Logprob.of(ids[at + 1], logits, top), first=0)

    def _echo(self, number: int) -> str:
        return self._echoed[number // self.n] if self.asked.get("echo") else ""

    def _usage(self) -> dict[str, Any]:
        counts = self.replies.usage(self.ids) if self._most else Usage(sum(map(len, self.ids)), 0, 0)
        # The replies find what the scores have left in the cache.
        return usage(replace(counts, cached=self._cached) if self._scores else counts)

    async def whole(self) -> dict[str, Any]:
        """Return the answer once all replies have come. Raises RequestError."""
        texts = [self._echo(number) for number in range(self._count)]
        async with aclosing(self.replies.pieces()) as pieces:
            async for number, piece in pieces:
                texts[number] += piece.text if piece else ""
        choices = [
            self._choice(number, text) | {"finish_reason": self._reason(number)} for number, text in enumerate(texts)
        ]
        return {**self.head, "choices": choices, "usage": self._usage()}

    @property
    def _count(self) -> int:
        return len(self.prompts) * self.n

    def _reason(self, number: int) -> str:
        return self.replies.streams[number].completion.finish_reason if self._most else "length"

    def _choice(self, number: int, text: str) -> dict[str, Any]:
        shown, first = None, None
        logprobs = (self.replies.new_logprobs(number, bool(self._scores)) or []) if self._most else []
        if self._scores and not self._begun[number]:
            self._begun[number], prompt = True, number // self.n
            first, logprobs = self.ids[prompt][0], self._scores[prompt] + logprobs
        if logprobs or first is not None:
            shown, self._offsets[number] = self.model.pieces.of_completion(logprobs, self._offsets[number], first)
        return {"index": number, "text": text, "logprobs": shown, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]], counts: dict[str, Any] | None = None) -> bytes:
        return event({**self.head, "choices": choices} | ({"usage": counts} if self._with_usage else {}))

    def events(self) -> AsyncGenerator[bytes]:
        """Yield the replies as events."""
        return until_done(self._chunks())

    async def _chunks(self) -> AsyncGenerator[bytes]:
        for number in range(self._count):
            if (echoed := self._echo(number)) or self._scores:
                ended = {} if self._most else {"finish_reason": self._reason(number)}
                yield self._chunk([self._choice(number, echoed) | ended])
        async with aclosing(self.replies.pieces()) as pieces:
            async for number, piece in pieces:
                choice = self._choice(number, piece.text if piece else "")
                if piece is None:
                    choice["finish_reason"] = self._reason(number)
                yield self._chunk([choice])
        if self._with_usage:
            yield self._chunk([], self._usage())


_complete = answering(fields, _Completion, "Continue texts as they are.", demand=must_write)
ROUTES = [Route("/v1/completions", _complete, methods=["POST"])]
