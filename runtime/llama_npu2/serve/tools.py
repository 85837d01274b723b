"""The tools that a request gives to a model, and what a reply consists of: text, reasoning and calls of those tools."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_npu2.frozen import frozen
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import MOST_CALLS
from llama_npu2.text.replies import Kind, Piece
from llama_npu2.text.tool_calls import Call, calls_of

_ID = 9
"""Characters of a call's id: templates of Mistral take no others."""
_VALUES = ("const", "enum", "default", "examples")
"""Keywords of a schema whose values are no schemas."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are objects of schemas under any names, also those of keywords."""


@frozen
class Choice:
    """Which tools a model may or has to call."""

    forced: bool = False
    """Whether the reply is a call."""
    name: str = ""
    """The tool that is called; empty for any."""
    field: str = "tool_choice"
    """The field of the request that says so, for errors."""
    several: bool = False
    """Whether a forced reply may be a list of calls, too."""


ANY = Choice()
"""The model may call any tool, or none."""


class Tools:
    """The tools of one request."""

    def __init__(self, functions: Sequence[Mapping[str, Any]] = (), choice: Choice = ANY) -> None:
        """Raises RequestError if tools and choice do not fit.

        Args:
            functions: each with `name`, and perhaps `description` and `parameters`, a JSON schema.
            choice: which of them may be called.
        """
        self.given = [{"type": "function", "function": dict(function)} for function in functions]
        """The tools as chat templates take them."""
        self.forced, self._several = choice.forced, choice.several
        self._functions = {function["name"]: function for function in functions}
        if len(self._functions) < len(functions):
            raise RequestError(400, "two tools have the same name: give each its own", "tools")
        if choice.forced:
            for function in functions:
                kinds = function.get("parameters", {}).get("type", "object")
                if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
                    what = f"the parameters of {function['name']} are no object, as a call's are"
                    raise RequestError(400, f"{what}: give their type as object", "tools")
        if choice.name:
            if choice.name not in self._functions:
                raise RequestError(400, f"there is no tool {choice.name}: name one of tools", choice.field)
            self._functions = {choice.name: self._functions[choice.name]}

    @property
    def names(self) -> set[str]:
        """The names of the tools that may be called."""
        return {*self._functions}

    def schema(self) -> str:
        """Return the JSON schema of a call, or of a list of calls as well; empty if none is forced."""
        if not self.forced:
            return ""
        each = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": _moved(
                        {**function.get("parameters", {}), "type": "object"}, f"#/anyOf/{at}/properties/arguments"
                    ),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for at, (name, function) in enumerate(self._functions.items())
        ]
        if self._several:
            one = {"anyOf": [{"$ref": f"#/anyOf/{at}"} for at in range(len(each))]}
            each.append({"type": "array", "items": one, "minItems": 1, "maxItems": MOST_CALLS})
        return json.dumps({"anyOf": each})

    def known(self, written: str) -> list[Call]:
        """Return the calls of these tools that a text consists of; none if it is anything else."""
        try:
            found = calls_of(written)
        except ValueError:
            return []
        return found if all(call.name in self._functions for call in found) else []


def _moved(schema: Any, to: str) -> Any:
    """Return a schema whose references are to itself, as it reads at another place."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value
        if key in _VALUES
        else {name: _moved(each, to) for name, each in value.items()}
        if key in _NAMED and isinstance(value, dict)
        else _moved(value, to)
        for key, value in schema.items()
    }
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        found["$ref"] = to + reference[1:]
    return found


@frozen
class ToolCall:
    """A call of a tool in a reply."""

    index: int
    """Which of the reply's calls it is, counted from 0."""
    id: str
    """A text that no other call has."""
    name: str
    arguments: str
    """The text of a JSON object."""


class Parts:
    """Turns pieces of one reply into what it consists of: text, reasoning and calls.

    A call comes once it is whole. What is no call of a known tool is text, as the model wrote it.
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

    def push(self, piece: Piece) -> Iterator[Piece | ToolCall]:
        """Yield what becomes certain with a piece."""
        if self._full:
            return
        if self._call is not None and (piece.kind is not Kind.TOOL_CALL or piece.call != self._call):
            yield from self.end()
            if self._full:
                return
        if piece.kind is Kind.REASONING:
            yield piece
        elif piece.kind is Kind.TOOL_CALL:
            if self._call is None:
                yield from self.end()
            self._call = piece.call
            self._written += piece.text
        elif not self._tools.names:
            yield piece
        else:
            # Some models write calls as JSON without a mark: it is kept back until it is clear what it is.
            if not self._begun and piece.text.strip():
                self._begun = True
                self._holds |= piece.text.lstrip()[0] in "{["
            self._written += piece.text
            if self._begun and not self._holds:
                yield Piece(Kind.TEXT, self._written)
                self._written = ""

    @property
    def _full(self) -> bool:
        return self._most is not None and self.called >= self._most

    def end(self) -> Iterator[Piece | ToolCall]:
        """Yield what was kept back."""
        written, self._written, self._call = self._written, "", None
        if not written.strip():
            return
        found = self._tools.known(written)
        if not found:
            yield Piece(Kind.TEXT, written)
        for call in found[: None if self._most is None else self._most - self.called]:
            yield ToolCall(self.called, secrets.token_hex(_ID)[:_ID], call.name, call.text)
            self.called += 1
