"""Tools of OpenAI's chat completions: what requests say of them, and what becomes of calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_npu2.schema import Check, Invalid, flag, list_of, one_of, string, text
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import closed, left_out
from llama_npu2.text.replies import Kind, Piece
from llama_npu2.text.tool_calls import Call, calls_of

_MOST_TOOLS, _MOST_CALLS = 128, 128
_ID = 9
"""Characters of a call's id: templates of Mistral take no others."""
_VALUES = ("const", "enum", "default", "examples")
"""Keywords of a schema whose values are no schemas."""

_name = text(r"[A-Za-z0-9_.-]{1,64}", "a name of letters, digits, _, . and -")


def _object(value: Any) -> None:
    if type(value) is not dict:
        raise Invalid(value, "an object")


_function_type = one_of("function")
tools: Check = list_of(
    closed(
        {
            "type": _function_type,
            "function": closed({"name": _name}, {"description": string, "parameters": _object, "strict": flag}),
        },
        {},
    ),
    0,
    _MOST_TOOLS,
)


def choice(value: Any) -> None:
    """Check `tool_choice`."""
    if type(value) is str:
        one_of("none", "auto", "required")(value)
    else:
        closed({"type": _function_type, "function": closed({"name": _name}, {})}, {})(value)


def _arguments(value: Any) -> None:
    string(value)
    try:
        _object(json.loads(value or "{}"))
    except (ValueError, RecursionError):
        raise Invalid(value, "the text of a JSON object") from None


calls: Check = list_of(
    closed(
        {
            "id": string,
            "type": _function_type,
            "function": closed({"name": _name, "arguments": _arguments}, {}),
        },
        {"index": left_out("it is for chunks of streams")},
    ),
    0,
    _MOST_CALLS,
)
"""Checks the calls of a message of the assistant."""


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


def _without_null(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _as_object(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.loads(function["arguments"] or "{}")}


class Tools:
    """The tools of one request."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        """Raises RequestError if `tools` and `tool_choice` do not fit."""
        self.given = [{**each, "function": _without_null(each["function"])} for each in asked.get("tools", [])]
        wanted = asked.get("tool_choice", "auto")
        functions = {each["function"]["name"]: each["function"] for each in self.given}
        if len(functions) < len(self.given):
            raise RequestError(400, "two tools have the same name: give each its own", "tools")
        if wanted == "none":
            self.given, functions = [], {}
        elif wanted != "auto" and not self.given:
            raise RequestError(400, "tool_choice must be left out: there are no tools", "tool_choice")
        if isinstance(wanted, dict):
            name = wanted["function"]["name"]
            if name not in functions:
                raise RequestError(400, f"there is no tool {name}: name one of tools", "tool_choice.function.name")
            functions = {name: functions[name]}
        self.names = {*functions}
        self.forced = wanted not in ("auto", "none")
        strict = next((at for at, each in enumerate(self.given) if each["function"].get("strict")), None)
        if strict is not None and not self.forced:
            raise RequestError(
                400,
                'strict must be false or left out: only with tool_choice "required" or a named tool are calls made to '
                "follow the parameters",
                f"tools[{strict}].function.strict",
            )
        self._functions = functions

    def schema(self) -> str:
        """Return the JSON schema of one call; empty if none is forced."""
        if not self.forced:
            return ""
        each = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": _moved(
                        {"type": "object", **function.get("parameters", {})}, f"#/anyOf/{at}/properties/arguments"
                    ),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for at, (name, function) in enumerate(self._functions.items())
        ]
        return json.dumps({"anyOf": each})

    def known(self, written: str) -> list[Call]:
        """Return the calls of these tools that a text consists of; none if it is anything else."""
        try:
            found = calls_of(written)
        except ValueError:
            return []
        return found if all(call.name in self.names for call in found) else []


def _moved(schema: Any, to: str) -> Any:
    """Return a schema whose references are to itself, as it reads at another place."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in _VALUES else _moved(value, to) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        found["$ref"] = to + reference[1:]
    return found


class Parts:
    """Turns pieces of one reply into what a message gets: content, reasoning and calls.

    A call comes once it is whole. What is no call of a known tool is content, as the model wrote it.
    """

    def __init__(self, tools: Tools, most: int | None = None) -> None:
        """Args: what comes after `most` calls is left out."""
        self._tools, self._most = tools, most
        self._call: int | None = None
        self._written = ""
        self._holds = tools.forced
        self._begun = False
        self.called = 0
        """Number of calls so far."""

    def push(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield what becomes certain with a piece."""
        if self._full:
            return
        if self._call is not None and (piece.kind is not Kind.TOOL_CALL or piece.call != self._call):
            yield from self._flush()
            if self._full:
                return
        if piece.kind is Kind.REASONING:
            yield {"reasoning_content": piece.text}
        elif piece.kind is Kind.TOOL_CALL:
            if self._call is None:
                yield from self._flush()
            self._call = piece.call
            self._written += piece.text
        elif not self._tools.names:
            yield {"content": piece.text}
        else:
            # Some models write calls as JSON without a mark: it is kept back until it is clear what it is.
            if not self._begun and piece.text.strip():
                self._begun = True
                self._holds |= piece.text.lstrip()[0] in "{["
            self._written += piece.text
            if self._begun and not self._holds:
                yield {"content": self._written}
                self._written = ""

    @property
    def _full(self) -> bool:
        return self._most is not None and self.called >= self._most

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield what was kept back."""
        yield from self._flush()

    def _flush(self) -> Iterator[dict[str, Any]]:
        written, self._written, self._call = self._written, "", None
        if not written.strip():
            return
        found = self._tools.known(written)
        if not found:
            yield {"content": written}
        for call in found[: None if self._most is None else self._most - self.called]:
            yield {"tool_calls": [{"index": self.called, **_shown(call)}]}
            self.called += 1


def _shown(call: Call) -> dict[str, Any]:
    """Return a call as OpenAI's API has it."""
    function = {"name": call.name, "arguments": call.text}
    return {"id": secrets.token_hex(_ID)[:_ID], "type": "function", "function": function}
