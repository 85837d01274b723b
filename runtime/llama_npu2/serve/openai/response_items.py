"""The items of which input and output of `POST /v1/responses` consist."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_npu2.schema import Check, anything, described, described_by, list_of, one_of, string
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import MOST_MESSAGES, MOST_PARTS, by, closed, left_out, tool_name
from llama_npu2.serve.openai.tools import arguments

_OTHER_PARTS = "other parts than text are not supported"
_text_part = by(
    "type",
    {
        "input_text": closed({"type": string, "text": string}, {"prompt_cache_breakpoint": anything}),
        "output_text": closed({"type": string, "text": string}, {"annotations": anything, "logprobs": anything}),
    },
    _OTHER_PARTS,
)


_several_parts = list_of(_text_part, 0, MOST_PARTS)


@described(lambda: {"anyOf": [described_by(string), described_by(_several_parts)]})
def _parts(value: Any) -> None:
    (_several_parts if type(value) is list else string)(value)


def _texts_of(kind: str) -> Check:
    return list_of(closed({"type": one_of(kind), "text": string}, {}), 0, MOST_PARTS)


_status = one_of("in_progress", "completed", "incomplete")
_message = closed(
    {"role": one_of("system", "developer", "user", "assistant"), "content": _parts},
    {"type": string, "id": string, "status": _status, "phase": string},
)
_KINDS: dict[str, Check] = {
    "message": _message,
    "function_call": closed(
        {"type": string, "call_id": string, "name": tool_name, "arguments": arguments},
        {"id": string, "status": _status},
    ),
    "function_call_output": closed(
        {"type": string, "call_id": string, "output": _parts}, {"id": string, "status": _status}
    ),
    "reasoning": closed(
        {"type": string},
        {
            "id": string,
            "summary": _texts_of("summary_text"),
            "content": _texts_of("reasoning_text"),
            "encrypted_content": string,
            "status": _status,
        },
    ),
    "item_reference": left_out("nothing is stored: send store false, and the items themselves"),
}
_typed = by("type", _KINDS, "other items are not supported")


_without_type = {"properties": {"type": {"type": "null"}}}


@described(lambda: {"anyOf": [{"allOf": [described_by(_message), _without_type]}, described_by(_typed)]})
def _item(value: Any) -> None:
    (_message if type(value) is dict and value.get("type") is None and "role" in value else _typed)(value)


_items = list_of(_item, 0, MOST_MESSAGES)


@described(lambda: {"anyOf": [described_by(string), described_by(_items)]})
def check_input(value: Any) -> None:
    """Check the field `input`: a text, or items."""
    (_items if type(value) is list else string)(value)


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def for_template(given: str | Sequence[Mapping[str, Any]], instructions: str) -> list[dict[str, Any]]:
    """Return the conversation as chat templates take it: what the model said at a time is one message.

    Args:
        given: the field `input`, which `check_input` has checked.
        instructions: they come first, in one message with what `given` begins with for the system.

    Raises:
        RequestError: for a result of a call that was not made.
    """
    found = [{"role": "system", "content": instructions}] if instructions else []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for message in _messages(items):
        if message["role"] == "system" and [each["role"] for each in found] == ["system"]:
            found[0]["content"] += f"\n\n{message['content']}"  # templates take one
        else:
            found.append(message)
    # Codex asks with nothing whether there is a model.
    return found if any(each["role"] != "system" for each in found) else [*found, {"role": "user", "content": ""}]


def _messages(items: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    names: dict[str, str] = {}
    said: dict[str, Any] = {}  # by the model, so far: reasoning, then text, then calls
    for at, item in enumerate(items):
        kind = item.get("type") or "message"
        of_model = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        taken = {"reasoning": ("reasoning_content", "content", "tool_calls"), "message": ("content", "tool_calls")}
        if said and (not of_model or any(name in said for name in taken.get(kind, ()))):
            yield _said(said)
            said = {}
        if kind == "reasoning":
            said["reasoning_content"] = _text(item.get("content") or item.get("summary") or [])
        elif kind == "function_call":
            names[item["call_id"]] = item["name"]
            function = {"name": item["name"], "arguments": json.loads(item["arguments"] or "{}")}
            call = {"id": item["call_id"], "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            if item["call_id"] not in names:
                raise RequestError(400, "no item before is a call with this id", f"input[{at}].call_id")
            call_id = item["call_id"]
            yield {
                "role": "tool",
                "name": names[call_id],
                "tool_call_id": call_id,
                "content": _text(item["output"]),
            }
        elif of_model:
            said["content"] = _text(item["content"])
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            yield {"role": role, "content": _text(item["content"])}
    if said:
        yield _said(said)


def _said(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **parts}
