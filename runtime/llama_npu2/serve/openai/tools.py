"""What requests of chat completions say of tools, and how calls stand in messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_npu2.schema import Check, Invalid, anything, described, described_by, either, flag, list_of, one_of, string
from llama_npu2.serve.body import loaded
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import (
    MOST_CALLS,
    MOST_TOOLS,
    closed,
    holding,
    json_object,
    left_out,
    list_with,
    only,
    rule,
    tool_name,
    worded,
)
from llama_npu2.serve.tools import Choice, ToolCall, Tools

MODES = ("none", "auto", "required")
"""Which tools are called, where `tool_choice` names none."""

_function_type = one_of("function")
tools: Check = list_of(
    closed(
        {
            "type": _function_type,
            "function": closed({"name": tool_name}, {"description": string, "parameters": json_object, "strict": flag}),
        },
        {},
    ),
    0,
    MOST_TOOLS,
)


_mode = one_of(*MODES)
_named = closed({"type": _function_type, "function": closed({"name": tool_name}, {})}, {})


@described(lambda: {"anyOf": [described_by(_mode), described_by(_named)]})
def choice(value: Any) -> None:
    """Check `tool_choice`."""
    (_mode if type(value) is str else _named)(value)


@described(lambda: {"type": "string"})
def arguments(value: Any) -> None:
    """Check the arguments of a call: the text of a JSON object, or nothing."""
    string(value)
    try:
        json_object(loaded(value or "{}"))
    except (ValueError, RecursionError):
        raise Invalid(value, "the text of a JSON object") from None


calls: Check = list_of(
    closed(
        {
            "id": string,
            "type": _function_type,
            "function": closed({"name": tool_name, "arguments": arguments}, {}),
        },
        {"index": left_out("it is for chunks of streams")},
    ),
    0,
    MOST_CALLS,
)
"""Checks the calls of a message of the assistant."""

UNFORCED = one_of("none", "auto")
"""Checks `tool_choice` where it says that there need be no call."""
_strict = only(False, 'only with tool_choice "required" or a named tool are calls made to follow the parameters')


_strict_if_forced = rule(
    "tools",
    list_of(holding({"function": holding({}, {"strict": _strict})})),
    unless=holding({"tool_choice": either(one_of("none", "required"), json_object, "")}),
)


def _check_strict(value: Any) -> None:
    """Check `strict` of tools. No description says it: with one more rule, schemathesis makes no requests of it."""
    _strict_if_forced(value)


def forced_of(tools: Check) -> Check:
    """Return the rule that a call is forced only of tools that are there, which pass a check."""
    return rule("tool_choice", worded(UNFORCED, "left out: there are no tools"), unless=holding({"tools": tools}))


RULES = (
    forced_of(list_with(anything)),
    _check_strict,
    rule(
        "response_format",
        holding({"type": only("text", "tool_choice forces a call")}),
        unless=holding({}, {"tool_choice": UNFORCED}),
    ),
)
"""What `tools`, `tool_choice` and `response_format` say of each other."""


def with_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: arguments as objects, results with their tool's name.

    Raises RequestError for a result of a call that no message has.
    """
    names: dict[str, str] = {}
    found = []
    for at, message in enumerate(messages):
        if given := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in given}
            made = [{**call, "function": _as_object(call["function"])} for call in given]
            message = {"content": "", **message, "tool_calls": made}
        else:
            message = {name: value for name, value in message.items() if name != "tool_calls"}
        if message["role"] == "tool":
            if message["tool_call_id"] not in names:
                raise RequestError(400, "no message before has a call with this id", f"messages[{at}].tool_call_id")
            message = {"name": names[message["tool_call_id"]], **message}
        found.append(message)
    return found


def _as_object(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.loads(function["arguments"] or "{}")}


def tools_of(asked: Mapping[str, Any]) -> Tools:
    """Return the tools of a request. Raises RequestError if `tools` and `tool_choice` do not fit."""
    functions = [
        {name: value for name, value in each["function"].items() if value is not None}
        for each in asked.get("tools", [])
    ]
    wanted = asked.get("tool_choice", "auto")
    if isinstance(wanted, dict):
        return named(functions, wanted["function"]["name"], "tool_choice.function.name")
    return chosen(functions, wanted, asked)


def named(functions: Sequence[Mapping[str, Any]], name: str, field: str) -> Tools:
    """Return tools of which the one of a name is called. Raises RequestError, which names `field`."""
    return Tools(functions, Choice(True, name, field))


def chosen(functions: Sequence[Mapping[str, Any]], mode: str, asked: Mapping[str, Any]) -> Tools:
    """Return tools by a `tool_choice` of a request that is one of `MODES`. Raises RequestError."""
    # The names are checked of tools that are left out, too.
    found = Tools(functions, Choice(mode == "required", several=asked.get("parallel_tool_calls", False)))
    return Tools() if mode == "none" else found


def shown(call: ToolCall) -> dict[str, Any]:
    """Return a call as a message has it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
