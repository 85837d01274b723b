"""The fields of requests to Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_npu2.schema import (
    Check,
    Invalid,
    anything,
    described,
    described_by,
    flag,
    list_of,
    one_of,
    string,
    text,
    whole,
)
from llama_npu2.serve.fields import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_STOPS,
    MOST_TOKENS,
    Fields,
    by,
    closed,
    holding,
    json_object,
    left_out,
    list_with,
    model_name,
    number,
    only,
    or_list,
    rule,
    stop_text,
    worded,
)

_MOST_TOOLS = 1024
_MOST_EDITS = 16
_NO_BLOCK = "images, documents and what belongs to tools of Anthropic's servers are not supported"
_name = text(r"[A-Za-z0-9_.-]{1,128}", "a name of letters, digits, _, . and -")

_CACHED: Mapping[str, Check] = {
    "cache_control": closed({"type": one_of("ephemeral")}, {"ttl": one_of("5m", "1h"), "scope": string})
}
"""Where prompts are to be cached: the server caches all of them."""
_CALLER: Mapping[str, Check] = {
    "caller": closed({"type": one_of("direct")}, {}),
    "toolset_name": left_out("there are no toolsets"),
}
_text = closed({"type": string, "text": string}, {**_CACHED, "citations": left_out("there are no citations")})
_texts = by("type", {"text": _text}, _NO_BLOCK)


def _content(block: Check, least: int) -> Check:
    """Return a check for a text, or for a list of at least so many blocks."""
    return or_list(string, list_of(block, least, MOST_PARTS))


_result = closed(
    {"type": string, "tool_use_id": string},
    {**_CACHED, "content": _content(_texts, 0), "is_error": flag, "toolset_name": left_out("there are no toolsets")},
)
_call = closed({"type": string, "id": string, "name": _name, "input": json_object}, {**_CACHED, **_CALLER})
_thought = closed({"type": string, "thinking": string}, {"signature": string})
_hidden_thought = closed({"type": string, "data": string}, {})


def _said(blocks: Mapping[str, Check], least: int) -> Check:
    return closed({"role": string, "content": _content(by("type", blocks, _NO_BLOCK), least)}, {})


_message = by(
    "role",
    {
        "user": _said({"text": _text, "tool_result": _result}, 1),
        "assistant": _said(
            {"text": _text, "thinking": _thought, "redacted_thinking": _hidden_thought, "tool_use": _call}, 0
        ),
        "system": _said({"text": _text}, 1),
    },
    "other roles are not supported",
)

_custom_tool = closed(
    {"name": _name, "input_schema": json_object},
    {
        **_CACHED,
        "type": only("custom", "tools that have no input_schema are not supported"),
        "description": string,
        "strict": flag,
        "input_examples": list_of(json_object),
        "eager_input_streaming": flag,
        "defer_loading": only(False, "the prompt has all tools"),
        "allowed_callers": only(["direct"], "the model alone calls tools"),
    },
)


@described(lambda: described_by(_custom_tool))
def _tool(value: Any) -> None:
    if type(value) is dict and type(value.get("type")) is str:
        # Tools of Anthropic have other fields: the first thing to say of them is that they are not supported.
        value = {"type": value["type"], **value}
    _custom_tool(value)


_PARALLEL: Mapping[str, Check] = {"disable_parallel_tool_use": flag}
_choice = by(
    "type",
    {
        "auto": closed({"type": string}, _PARALLEL),
        "any": closed({"type": string}, _PARALLEL),
        "tool": closed({"type": string, "name": _name}, _PARALLEL),
        "none": closed({"type": string}, {}),
    },
    "there are no other choices",
)

_DISPLAY: Mapping[str, Check] = {"display": one_of("summarized", "omitted")}
_thinking = by(
    "type",
    {
        "enabled": closed({"type": string, "budget_tokens": whole(1, MOST_TOKENS)}, _DISPLAY),
        "adaptive": closed({"type": string}, _DISPLAY),
        "disabled": closed({"type": string}, {}),
    },
    "models think before their answer, or not at all",
)
_format = by(
    "type", {"json_schema": closed({"type": string, "schema": json_object}, {})}, "other formats are not supported"
)


@described(lambda: {"enum": ["all", {"type": "all"}]})
def _all(value: Any) -> None:
    if value not in ("all", {"type": "all"}):
        raise Invalid(value, '"all": thinking is kept or left out as the chat template does it')


_edit = by(
    "type",
    {"clear_thinking_20251015": closed({"type": string, "keep": _all}, {})},
    "conversations are not edited",
)

_OF_PROMPT: Mapping[str, Check] = {
    **_CACHED,
    "system": _content(_texts, 0),
    "tools": list_of(_tool, 0, _MOST_TOOLS),
    "tool_choice": _choice,
    "thinking": _thinking,
    "output_config": closed(
        {},
        {
            "effort": one_of("low", "medium", "high", "xhigh", "max"),
            "format": _format,
            "task_budget": left_out("there are no budgets"),
        },
    ),
    "output_format": _format,
    "context_management": closed({}, {"edits": list_of(_edit, 0, _MOST_EDITS)}),
    "mcp_servers": only([], "the server asks no other servers"),
    "speed": only("standard", "there is one speed"),
    "user_profile_id": string,
    "workspace_id": string,
}


_unforced = holding({"type": one_of("auto", "none")})
_choosing = holding({"tool_choice": holding({"type": one_of("any", "tool", "none")})})
_strict = only(False, "only with tool_choice any or tool are calls made to follow the input_schema")
_no_format = left_out("tool_choice forces a call")
_RULES = (
    rule("tool_choice", worded(_unforced, "auto: there are no tools"), unless=holding({"tools": list_with(anything)})),
    rule("tools", list_of(holding({}, {"strict": _strict})), unless=_choosing),
    rule(
        "output_format",
        left_out("output_config has a format"),
        unless=holding({}, {"output_config": holding({}, {"format": left_out("")})}),
    ),
    rule("output_format", _no_format, unless=holding({}, {"tool_choice": _unforced})),
    rule("output_config", holding({}, {"format": _no_format}), unless=holding({}, {"tool_choice": _unforced})),
)
_of_others = holding({"role": one_of("user", "system")})


@described(lambda: described_by(holding({"messages": list_with(_of_others)})))
def _ends_with_user(value: Any) -> None:
    """Check that the last message is not the assistant's. A JSON schema cannot say of an item that it is the last."""
    *before, last = value["messages"]
    if last["role"] == "assistant":
        error = Invalid(last["role"], "user: replies cannot be begun")
        error.path = ["role", len(before), "messages"]
        raise error


def message_fields(_: int) -> Fields:
    """Return the checks of a request for a message."""
    required: Mapping[str, Check] = {**_REQUIRED, "max_tokens": whole(0, MOST_TOKENS)}
    return Fields(required, {**_OF_PROMPT, **_OF_REPLY}, (*_RULES, _ends_with_user))


def count_fields(vocabulary: int) -> Fields:
    """Return the checks of a request for a count of tokens: that for a message, which has no reply here."""
    required, optional, _ = message_fields(vocabulary)
    return Fields(_REQUIRED, {**required, **optional}, _RULES)


_REQUIRED: Mapping[str, Check] = {"model": model_name, "messages": list_of(_message, 1, MOST_MESSAGES)}
_OF_REPLY: Mapping[str, Check] = {
    "stream": flag,
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": whole(0, 1 << 30),
    "stop_sequences": list_of(stop_text, 0, MOST_STOPS),
    "metadata": closed({}, {"user_id": string}),
    "service_tier": one_of("auto", "standard_only"),
    "inference_geo": string,
    "container": left_out("there are no containers"),
    "diagnostics": left_out("misses of the cache are not explained"),
    "compaction": left_out("conversations are not summarised"),
    "fallbacks": left_out("the model that is named answers"),
    "thread": left_out("nothing is stored"),
}
