"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.routing import Route

from llama_npu2.schema import Check, Invalid, flag, inside, list_of, string, text, whole
from llama_npu2.serve import tools
from llama_npu2.serve.events import event
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import by, closed, left_out, only, word
from llama_npu2.serve.model import Model
from llama_npu2.serve.openai import (
    LABELS,
    MOST_TOKENS,
    STREAM,
    Fields,
    answering,
    head,
    sampling,
    sampling_fields,
    until_done,
    with_usage,
)
from llama_npu2.serve.replies import Replies
from llama_npu2.text.replies import Piece

_MOST_MESSAGES, _MOST_PARTS = 4096, 1024
_OF_TEMPLATES = {"messages", "reply", "controls", "chat_template", "tools", "documents"}
"""What a template gets by other ways than variables."""

_FIELDS = {"tools": "tools", "reasoning_effort": "reasoning_effort"}
"""Variables of templates that have a field of their own."""

_part = by(
    "type",
    {"text": closed({"type": string, "text": string}, {})},
    "other parts than text are not supported",
)


def _content(value: Any) -> None:
    (list_of(_part, 1, _MOST_PARTS) if type(value) is list else string)(value)


def _schema(value: Any) -> None:
    if type(value) not in (dict, bool):
        raise Invalid(value, "a JSON schema: an object, true or false")


_format = by(
    "type",
    {
        "text": closed({"type": string}, {}),
        "json_object": closed({"type": string}, {}),
        "json_schema": closed(
            {
                "type": string,
                "json_schema": closed({"name": string}, {"schema": _schema, "strict": flag, "description": string}),
            },
            {},
        ),
    },
    "other formats are not supported",
)

_spoken = closed({"role": string, "content": _content}, {"name": string})
_answered = closed(
    {"role": string, "content": _content},
    {
        "name": string,
        "reasoning_content": string,
        "refusal": left_out("refusals are not supported"),
        "audio": left_out("audio is not supported"),
        "tool_calls": tools.calls,
        "function_call": left_out("it is tool_calls now"),
    },
)


def _assistant(value: Any) -> None:
    called = type(value) is dict and value.get("tool_calls") and value.get("content") is None
    _answered({**value, "content": ""} if called else value)


_message = by(
    "role",
    {
        "system": _spoken,
        "developer": _spoken,
        "user": _spoken,
        "assistant": _assistant,
        "tool": closed({"role": string, "content": _content, "tool_call_id": string}, {"name": string}),
    },
    "other roles are not supported",
)


def _variables(value: Any) -> None:
    if type(value) is not dict:
        raise Invalid(value, "an object")
    name = text(r"[A-Za-z_][A-Za-z0-9_]{0,63}", "a name")
    for key, item in value.items():
        name(key)
        if key in _OF_TEMPLATES:
            inside(key, left_out("it is no variable of chat templates"), item)


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request."""
    optional: dict[str, Check] = {
        **sampling_fields(vocabulary),
        **STREAM,
        **LABELS,
        "max_tokens": whole(1, MOST_TOKENS),
        "max_completion_tokens": whole(1, MOST_TOKENS),
        "logprobs": flag,
        "top_logprobs": whole(0, 20),
        "reasoning_effort": text(r"[a-z]{1,16}", "a word"),
        "chat_template_kwargs": _variables,
        "response_format": _format,
        "tools": tools.tools,
        "tool_choice": tools.choice,
        "parallel_tool_calls": flag,
        "modalities": only(["text"], "models write text alone"),
        "store": only(False, "nothing is stored"),
        "verbosity": only("medium", "models have no such setting"),
        "audio": left_out("models write text alone"),
        "functions": left_out("they are tools now"),
        "function_call": left_out("it is tool_choice now"),
        "prediction": left_out("predictions are not supported"),
        "web_search_options": left_out("there is no search"),
    }
    return {"model": word, "messages": list_of(_message, 1, _MOST_MESSAGES)}, optional


def _wanted_schema(asked: Mapping[str, Any]) -> str:
    """Return the JSON schema of the replies, empty for text."""
    wanted = asked.get("response_format", {"type": "text"})
    if wanted["type"] == "text":
        return ""
    schema = wanted.get("json_schema", {}).get("schema")
    return json.dumps({"type": "object"} if schema is None else schema)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: the content of each is one text. Raises RequestError."""
    found = []
    for message in messages:
        taken = {name: value for name, value in message.items() if value is not None}
        if isinstance(taken.get("content"), list):
            taken["content"] = "\n".join(part["text"] for part in taken["content"])
        found.append(taken | ({"role": "system"} if taken["role"] == "developer" else {}))
    return tools.with_calls(found)


def _add(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a delta of a stream to a message."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = [{key: part for key, part in call.items() if key != "index"} for call in value]
            message[name] = message.get(name, []) + calls
        else:
            message[name] = (message.get(name) or "") + value


class _Chat:
    """One request and its replies."""

    def __init__(self, model: Model, asked: dict[str, Any]) -> None:
        """Raises RequestError."""
        if "top_logprobs" in asked and not asked.get("logprobs"):
            raise RequestError(400, "top_logprobs must be left out: logprobs is not true", "top_logprobs")
        if not model.chats:
            raise RequestError(400, f"{model.name} has no chat template: use /v1/completions", "model")
        self.model, self.asked, self.n = model, asked, asked.get("n", 1)
        self.stream: bool = asked.get("stream", False)
        self._with_usage = with_usage(asked)
        self.tools = tools.Tools(asked)
        if self.tools.forced and _wanted_schema(asked):
            raise RequestError(400, "response_format must be text: tool_choice forces a call", "response_format")
        one = asked.get("parallel_tool_calls") is False
        self._parts = [tools.Parts(self.tools, 1 if one else None) for _ in range(self.n)]
        self.replies = Replies(model, self.n)
        self.head = head("chatcmpl", model)
        self.ids: list[int] = []

    async def start(self) -> None:
        """Ask for the replies. Raises RequestError."""
        asked = self.asked
        template = dict(asked.get("chat_template_kwargs", {}))
        if "reasoning_effort" in asked:
            template["reasoning_effort"] = asked["reasoning_effort"]
        if self.tools.given:
            template["tools"] = self.tools.given
        messages = for_template(asked["messages"])
        try:
            self.ids = await self.model.encode(messages, "messages", template=template)
        except RequestError as error:
            # The template's process names a variable that the template does not read.
            error.field = next(
                (
                    _FIELDS.get(name, f"chat_template_kwargs.{name}")
                    for name in template
                    if f"reads no variable {name}:" in error.message
                ),
                error.field,
            )
            raise
        most = asked.get("max_completion_tokens", asked.get("max_tokens", self.model.llm.context_length))
        logprobs = asked.get("top_logprobs", 0) if asked.get("logprobs") else None
        schema = self.tools.schema() or _wanted_schema(asked)
        made = replace(sampling(asked, most, logprobs), schema=schema)
        await self.model.prepare(made, "tools" if self.tools.forced else "response_format")
        self.replies.start([self.ids], made, self.n)

    async def whole(self) -> dict[str, Any]:
        """Return the answer once all replies have come. Raises RequestError."""
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": None, "refusal": None} for _ in range(self.n)
        ]
        async with aclosing(self.replies.pieces()) as pieces:
            async for number, piece in pieces:
                for delta in self._deltas(number, piece):
                    _add(messages[number], delta)
        choices = []
        for number, message in enumerate(messages):
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            choices.append(self._choice(number, "message", message) | {"finish_reason": self._reason(number)})
        usage = self.replies.usage([self.ids])
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": usage}

    def _deltas(self, number: int, piece: Piece | None) -> Iterator[dict[str, Any]]:
        """Yield what a message gets by a piece of its reply, or by its end."""
        parts = self._parts[number]
        return parts.push(piece) if piece else parts.end()

    def _reason(self, number: int) -> str:
        """Return why a reply ended."""
        reason = self.replies.streams[number].completion.finish_reason
        return "tool_calls" if reason == "stop" and self._parts[number].called else reason

    def _choice(self, number: int, name: str, what: Mapping[str, Any]) -> dict[str, Any]:
        logprobs = self.replies.new_logprobs(number)
        shown = self.model.pieces.of_chat(logprobs) if logprobs else None
        return {"index": number, name: what, "logprobs": shown, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        made = {**self.head, "object": "chat.completion.chunk", "choices": choices}
        return event(made | ({"usage": usage} if self._with_usage else {}))

    def events(self) -> AsyncGenerator[bytes]:
        """Yield the replies as events."""
        return until_done(self._chunks())

    async def _chunks(self) -> AsyncGenerator[bytes]:
        for number in range(self.n):
            yield self._chunk([self._choice(number, "delta", {"role": "assistant", "content": ""})])
        async with aclosing(self.replies.pieces()) as pieces:
            async for number, piece in pieces:
                for delta in self._deltas(number, piece):
                    yield self._chunk([self._choice(number, "delta", delta)])
                if piece is None:
                    ended = {"finish_reason": self._reason(number)}
                    yield self._chunk([self._choice(number, "delta", {}) | ended])
        if self._with_usage:
            yield self._chunk([], self.replies.usage([self.ids]))


ROUTES = [Route("/v1/chat/completions", answering(fields, _Chat), methods=["POST"])]
