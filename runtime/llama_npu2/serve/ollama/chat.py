"""`POST /api/chat`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import Route

from llama_npu2.schema import Check, described, described_by, inside, list_of, one_of, string, whole
from llama_npu2.serve.answers import must_chat
from llama_npu2.serve.conversation import Conversation, FieldNames, Turn
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import (
    MOST_CALLS,
    MOST_MESSAGES,
    MOST_TOOLS,
    Fields,
    by,
    closed,
    json_object,
    left_out,
    model_name,
    tool_name,
)
from llama_npu2.serve.model import Model
from llama_npu2.serve.ollama.common import OF_REPLIES, RULES, Said, answering, empty, sampling, thinking
from llama_npu2.serve.tools import Tools

_NO_IMAGES = empty("models read text alone")
NAMES = FieldNames(schema="format", variable=lambda _: "think")

_function = closed({"name": tool_name}, {"description": string, "parameters": json_object})
_tools = list_of(
    closed({"function": _function}, {"type": one_of("function"), "items": left_out("it is not supported")}),
    0,
    MOST_TOOLS,
)
_calls = list_of(
    closed(
        {"function": closed({"name": tool_name}, {"arguments": json_object, "index": whole(0, MOST_CALLS)})},
        {"id": string, "type": one_of("function")},
    ),
    0,
    MOST_CALLS,
)
# Ollama's own client leaves out a content that is empty.
_spoken = closed({"role": string}, {"content": string, "images": _NO_IMAGES})
_answered = closed(
    {"role": string}, {"content": string, "thinking": string, "tool_calls": _calls, "images": _NO_IMAGES}
)


_message = by(
    "role",
    {
        "system": _spoken,
        "user": _spoken,
        "assistant": _answered,
        "tool": closed(
            {"role": string},
            {"content": string, "tool_name": string, "name": string, "tool_call_id": string, "images": _NO_IMAGES},
        ),
    },
    "other roles are not supported",
)


@described(lambda: described_by(list_of(_message, 0, MOST_MESSAGES)))
def _messages(value: Any) -> None:
    list_of(lambda each: None, 0, MOST_MESSAGES)(value)
    for at, message in enumerate(value):
        # Roles may be in capitals.
        known = type(message) is dict and type(message.get("role")) is str
        inside(at, _message, message | {"role": message["role"].lower()} if known else message)


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request."""
    optional: dict[str, Check] = {"messages": _messages, "tools": _tools, **OF_REPLIES}
    return Fields({"model": model_name}, optional, RULES)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: calls have ids, and results the ids and names of their calls.

    A result is that of the call with its id, or else of the first one that has none yet, with its tool's name if it
    has one. Raises RequestError for a result without a call or a name.
    """
    open_calls: list[dict[str, Any]] = []
    found, made = [], 0
    for at, message in enumerate(messages):
        taken = {name: value for name, value in message.items() if value is not None and name != "images"}
        taken = {"content": "", **taken, "role": taken["role"].lower()}
        calls = taken.pop("tool_calls", [])
        if calls:
            open_calls = []
            for call in calls:
                function = call["function"]
                made += 1
                # Templates of Mistral take ids of nine letters and digits alone.
                with_id = {"id": call.get("id") or f"call{made:05}", "type": "function"}
                arguments = function.get("arguments") or {}
                open_calls.append({**with_id, "function": {"name": function["name"], "arguments": arguments}})
            taken["tool_calls"] = list(open_calls)
        elif taken["role"] == "tool":
            taken |= _result(taken, open_calls, f"messages[{at}]")
            taken.pop("tool_name", None)
        found.append(taken)
    return found


def _result(message: Mapping[str, Any], open_calls: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """Return the id and the name of the call that a message answers, which is then no longer open."""
    given, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
    fits = [each for each in open_calls if each["id"] == given] if given else []
    fits = fits or [each for each in open_calls if name in (None, "", each["function"]["name"])]
    if fits:
        open_calls.remove(fits[0])
        return {"tool_call_id": fits[0]["id"], "name": fits[0]["function"]["name"]}
    if not name:
        raise RequestError(400, f"{where}: no message before has a call that this answers", where)
    return {"tool_call_id": given or "", "name": name}


def tools_of(asked: Mapping[str, Any]) -> Tools:
    """Return the tools of a request. Raises RequestError."""
    functions = [each["function"] for each in asked.get("tools", [])]
    return Tools([{name: value for name, value in each.items() if value is not None} for each in functions])


def _conversation(model: Model, asked: Mapping[str, Any]) -> Conversation:
    messages, given = for_template(asked["messages"]), tools_of(asked)
    turn = Turn(messages, sampling(asked, model.context_length), given, thinking(model, asked), names=NAMES)
    return Conversation(model, turn)


def message(said: Said) -> dict[str, Any]:
    """Return what an answer has of a reply."""
    shown: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.thought:
        shown["thinking"] = said.thought
    if said.calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "function": {"index": call.index, "name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in said.calls
        ]
    return {"message": shown}


_chat = answering(
    fields,
    _conversation,
    message,
    lambda asked: bool(asked.get("messages")),
    "Reply to a conversation, in lines of JSON.",
    must_chat,
)
ROUTES = [Route("/api/chat", _chat, methods=["POST"])]
