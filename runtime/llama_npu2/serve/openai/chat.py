"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.routing import Route

from llama_npu2.schema import Check, anything, described, described_by, flag, list_of, one_of, string, text, whole
from llama_npu2.serve.answers import answering
from llama_npu2.serve.conversation import THINKS, Conversation, End, FieldNames, Turn
from llama_npu2.serve.events import event
from llama_npu2.serve.fields import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOKENS,
    Fields,
    by,
    closed,
    json_schema,
    left_out,
    model_name,
    one_alone,
    only,
    only_if,
    or_list,
)
from llama_npu2.serve.model import Model
from llama_npu2.serve.openai import tools
from llama_npu2.serve.openai.common import (
    LABELS,
    OF_STREAMS,
    STREAM,
    head,
    sampling,
    sampling_fields,
    until_done,
    usage,
    variables,
    with_usage,
)
from llama_npu2.serve.tools import ToolCall
from llama_npu2.text.replies import Kind, Piece

_NAMES = {Kind.TEXT: "content", Kind.REASONING: "reasoning_content"}
"""The fields of a message that have what a model writes."""

_part = by(
    "type",
    {"text": closed({"type": string, "text": string}, {})},
    "other parts than text are not supported",
)


_content, _result = (or_list(string, list_of(_part, least, MOST_PARTS)) for least in (1, 0))

_format = by(
    "type",
    {
        "text": closed({"type": string}, {}),
        "json_object": closed({"type": string}, {}),
        "json_schema": closed(
            {
                "type": string,
                "json_schema": closed({"name": string}, {"schema": json_schema, "strict": flag, "description": string}),
            },
            {},
        ),
    },
    "other formats are not supported",
)

_effort = text(r"[a-z]{1,16}", "a word")

_spoken = closed({"role": string, "content": _content}, {"name": string})
_of_assistant: dict[str, Check] = {
    "name": string,
    "reasoning_content": string,
    "annotations": anything,
    "refusal": left_out("refusals are not supported"),
    "audio": left_out("audio is not supported"),
    "function_call": left_out("it is tool_calls now"),
}
_answered = closed({"role": string, "content": _content}, {**_of_assistant, "tool_calls": tools.calls})
_with_a_call = {"dependentSchemas": {"tool_calls": {"properties": {"tool_calls": {"minItems": 1}}}}}
_called = closed({"role": string, "tool_calls": tools.calls}, {**_of_assistant, "content": _content})


@described(lambda: {"anyOf": [described_by(_answered), {**described_by(_called), **_with_a_call}]})
def _assistant(value: Any) -> None:
    called = type(value) is dict and value.get("tool_calls") and value.get("content") is None
    (_called if called else _answered)(value)


_message = by(
    "role",
    {
        "system": _spoken,
        "developer": _spoken,
        "user": _spoken,
        "assistant": _assistant,
        "tool": closed({"role": string, "content": _result, "tool_call_id": string}, {"name": string}),
    },
    "other roles are not supported",
)


_RULES = (
    OF_STREAMS,
    only_if("logprobs", "top_logprobs"),
    one_alone("reasoning", "reasoning_effort"),
    *tools.RULES,
)


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request."""
    optional: dict[str, Check] = {
        **sampling_fields(vocabulary),
        **STREAM,
        **LABELS,
        "model": model_name,
        "max_tokens": whole(1, MOST_TOKENS),
        "max_completion_tokens": whole(1, MOST_TOKENS),
        "logprobs": flag,
        "top_logprobs": whole(0, 20),
        "reasoning_effort": _effort,
        "reasoning": closed({"effort": _effort}, {}),
        "thinking": closed({"type": one_of("enabled", "disabled")}, {}),
        "chat_template_kwargs": variables,
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
    return Fields({"messages": list_of(_message, 1, MOST_MESSAGES)}, optional, _RULES)


def _wanted_schema(asked: Mapping[str, Any]) -> str:
    """Return the JSON schema of the replies, empty for text."""
    wanted = asked.get("response_format", {"type": "text"})
    if wanted["type"] == "text":
        return ""
    found = wanted.get("json_schema", {}).get("schema")
    return json.dumps({"type": "object"} if found is None else found)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: the content of each is one text. Raises RequestError."""
    found = []
    for message in messages:
        taken = {name: value for name, value in message.items() if value is not None}
        if isinstance(taken.get("content"), list):
            taken["content"] = "\n".join(part["text"] for part in taken["content"])
        found.append(taken | ({"role": "system"} if taken["role"] == "developer" else {}))
    return tools.with_calls(found)


def _turn(asked: Mapping[str, Any], context_length: int) -> Turn:
    """Return what a request asks for. Raises RequestError if its fields do not fit together."""
    given, wanted = tools.tools_of(asked), _wanted_schema(asked)
    given_variables, thinking = dict(asked.get("chat_template_kwargs", {})), asked.get("thinking")
    if effort := asked.get("reasoning_effort") or asked.get("reasoning", {}).get("effort"):
        given_variables["reasoning_effort"] = effort
    effort_field = "reasoning.effort" if "reasoning" in asked else "reasoning_effort"
    most = asked.get("max_completion_tokens", asked.get("max_tokens", context_length))
    logprobs = asked.get("top_logprobs", 0) if asked.get("logprobs") else None
    return Turn(
        for_template(asked["messages"]),
        replace(sampling(asked, most, logprobs), schema=wanted),
        given,
        given_variables,
        asked.get("n", 1),
        1 if asked.get("parallel_tool_calls") is False else None,
        FieldNames(
            variable=lambda name: effort_field if name == "reasoning_effort" else f"chat_template_kwargs.{name}"
        ),
        dict.fromkeys(THINKS, thinking["type"] == "enabled") if thinking else {},
    )


class _Chat:
    """One request and its replies."""

    def __init__(self, model: Model, asked: dict[str, Any]) -> None:
        """Raises RequestError."""
        self.stream: bool = asked.get("stream", False)
        self._with_usage = with_usage(asked)
        self.conversation = Conversation(model, _turn(asked, model.context_length))
        self.replies, self.start = self.conversation.replies, self.conversation.start
        self._head = head("chatcmpl", model)

    async def whole(self) -> dict[str, Any]:
        """Return the answer once all replies have come. Raises RequestError."""
        messages: dict[int, dict[str, Any]] = {}
        choices: dict[int, dict[str, Any]] = {}
        for number in range(self.conversation.turn.replies):
            messages[number] = {"role": "assistant", "content": None, "refusal": None}
        async with aclosing(self.conversation.parts()) as parts:
            async for number, part in parts:
                message = messages[number]
                if isinstance(part, End):
                    if message["content"] is None and "tool_calls" not in message:
                        message["content"] = ""
                    choices[number] = self._choice(number, "message", message) | {"finish_reason": part.reason}
                elif isinstance(part, ToolCall):
                    message.setdefault("tool_calls", []).append(tools.shown(part))
                else:
                    message[_NAMES[part.kind]] = (message.get(_NAMES[part.kind]) or "") + part.text
        shown = {"choices": [choices[number] for number in messages], "usage": self._usage()}
        return {**self._head, "object": "chat.completion", **shown}

    def _usage(self) -> dict[str, Any]:
        return usage(self.replies.usage([self.conversation.ids]))

    def _choice(self, number: int, name: str, what: Mapping[str, Any]) -> dict[str, Any]:
        logprobs = self.replies.new_logprobs(number)
        shown = self.conversation.model.pieces.of_chat(logprobs) if logprobs else None
        return {"index": number, name: what, "logprobs": shown, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]], counts: dict[str, Any] | None = None) -> bytes:
        made = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return event(made | ({"usage": counts} if self._with_usage else {}))

    def events(self) -> AsyncGenerator[bytes]:
        """Yield the replies as events."""
        return until_done(self._chunks())

    async def _chunks(self) -> AsyncGenerator[bytes]:
        for number in range(self.conversation.turn.replies):
            yield self._chunk([self._choice(number, "delta", {"role": "assistant", "content": ""})])
        async with aclosing(self.conversation.parts()) as parts:
            async for number, part in parts:
                if isinstance(part, End):
                    ended = {"finish_reason": part.reason}
                    yield self._chunk([self._choice(number, "delta", {}) | ended])
                else:
                    yield self._chunk([self._choice(number, "delta", delta_of(part))])
        if self._with_usage:
            yield self._chunk([], self._usage())


def delta_of(part: Piece | ToolCall) -> dict[str, Any]:
    """Return what a chunk adds to a message."""
    if isinstance(part, ToolCall):
        return {"tool_calls": [{"index": part.index, **tools.shown(part)}]}
    return {_NAMES[part.kind]: part.text}


ROUTES = [Route("/v1/chat/completions", answering(fields, _Chat, "Reply to a conversation."), methods=["POST"])]
