"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.routing import Route

from llama_npu2.schema import Check, flag, whole
from llama_npu2.serve.answers import Fields, answering
from llama_npu2.serve.events import event
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import MOST_TOKENS, left_out, only, word
from llama_npu2.serve.model import Model
from llama_npu2.serve.openai.common import (
    LABELS,
    MOST_N,
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
from llama_npu2.serve.replies import Replies

_MOST_PROMPTS = 128
_DEFAULT_TOKENS = 16
"""As in OpenAI's API."""
_MOST_LOGPROBS = 5


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request."""
    optional: dict[str, Check] = {
        **sampling_fields(vocabulary),
        **STREAM,
        **LABELS,
        "max_tokens": whole(1, MOST_TOKENS),
        "logprobs": whole(0, _MOST_LOGPROBS),
        "echo": flag,
        "best_of": whole(1, MOST_N),
        "suffix": left_out("texts are continued at their end alone"),
        "store": only(False, "nothing is stored"),
    }
    return {"model": word, "prompt": texts_or_tokens(vocabulary, _MOST_PROMPTS)}, optional


class _Completion:
    """One request and its replies."""

    def __init__(self, model: Model, asked: dict[str, Any]) -> None:
        """Raises RequestError."""
        self.prompts, _ = each_text(asked["prompt"])
        self.model, self.asked, self.n = model, asked, asked.get("n", 1)
        self.stream: bool = asked.get("stream", False)
        if asked.get("best_of", self.n) != self.n:
            raise RequestError(400, f"best_of must be {self.n} or left out: all replies are returned", "best_of")
        if asked.get("echo") and "logprobs" in asked:
            raise RequestError(400, "logprobs must be left out: those of prompts are not supported", "logprobs")
        self._with_usage = with_usage(asked)
        self.replies = Replies(model, len(self.prompts) * self.n)
        self.head = {**head("cmpl", model), "object": "text_completion"}
        self.ids: list[list[int]] = []
        self._echoed: list[str] = []
        self._offsets = [0] * len(self.prompts) * self.n

    async def start(self) -> None:
        """Ask for the replies. Raises RequestError."""
        for prompt in self.prompts:
            self.ids.append(await self.model.encode(prompt, "prompt", raw=True))
            self._echoed.append(prompt if isinstance(prompt, str) else self.model.llm.tokenizer.decode(prompt))
        asked = self.asked
        made = sampling(asked, asked.get("max_tokens", _DEFAULT_TOKENS), asked.get("logprobs"))
        self.replies.start(self.ids, made, self.n)

    def _echo(self, number: int) -> str:
        return self._echoed[number // self.n] if self.asked.get("echo") else ""

    async def whole(self) -> dict[str, Any]:
        """Return the answer once all replies have come. Raises RequestError."""
        texts = [self._echo(number) for number in range(len(self.replies.streams))]
        async with aclosing(self.replies.pieces()) as pieces:
            async for number, piece in pieces:
                texts[number] += piece.text if piece else ""
        choices = [
            self._choice(number, text) | {"finish_reason": stream.completion.finish_reason}
            for number, (text, stream) in enumerate(zip(texts, self.replies.streams, strict=True))
        ]
        return {**self.head, "choices": choices, "usage": usage(self.replies.usage(self.ids))}

    def _choice(self, number: int, text: str) -> dict[str, Any]:
        shown, logprobs = None, self.replies.new_logprobs(number)
        if logprobs:
            shown, self._offsets[number] = self.model.pieces.of_completion(logprobs, self._offsets[number])
        return {"index": number, "text": text, "logprobs": shown, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]], counts: dict[str, Any] | None = None) -> bytes:
        return event({**self.head, "choices": choices} | ({"usage": counts} if self._with_usage else {}))

    def events(self) -> AsyncGenerator[bytes]:
        """Yield the replies as events."""
        return until_done(self._chunks())

    async def _chunks(self) -> AsyncGenerator[bytes]:
        for number in range(len(self.replies.streams)):
            if echoed := self._echo(number):
                yield self._chunk([self._choice(number, echoed)])
        async with aclosing(self.replies.pieces()) as pieces:
            async for number, piece in pieces:
                choice = self._choice(number, piece.text if piece else "")
                if piece is None:
                    choice["finish_reason"] = self.replies.streams[number].completion.finish_reason
                yield self._chunk([choice])
        if self._with_usage:
            yield self._chunk([], usage(self.replies.usage(self.ids)))


ROUTES = [Route("/v1/completions", answering(fields, _Completion), methods=["POST"])]
