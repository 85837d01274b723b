"""Calls of tools as models write them: JSON in several shapes, XML, Python, and the headers of harmony."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from llama_npu2.frozen import frozen

_LONGEST = 1 << 20
"""Most characters of a text that calls are looked for in."""
_HARMONY = re.compile(r"to=(?:functions\.)?([\w.-]+)[^{]*<\|message\|>(.*)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*")
_BETWEEN = re.compile(r"[\s;,]*")


@frozen
class Call:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        """The arguments as JSON. Raises ValueError if JSON cannot hold them."""
        text = json.dumps(self.arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text


def calls_of(text: str) -> list[Call]:
    """Return the calls that a text consists of. Raises ValueError if it is anything else."""
    text = text.strip()
    if not text or len(text) > _LONGEST:
        raise ValueError("it is no call")
    try:
        found = list(_calls(text))
        if not found or not all(call.name and call.text for call in found):
            raise ValueError("it has no name")
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(f"it is no call ({type(error).__name__})") from None
    return found


def _calls(text: str) -> Iterator[Call]:
    if found := _HARMONY.fullmatch(text):
        return iter([Call(found[1], _object(json.loads(found[2])))])
    if text.startswith("<function="):
        return _of_xml(text)
    if _NAMED.match(text):
        return _of_named(text)
    if text[0] == "[" and text[1:].lstrip()[:1] not in ("{", "[", ""):
        return _of_python(text)
    return _of_json(text)


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):  # JSON in a text, as in messages of OpenAI's API
        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    return value


def _of_json(text: str) -> Iterator[Call]:
    """Yield the calls of one or several objects, or of a list of them."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict):
                raise ValueError("it is no object")
            function = each.get("function")
            each = function if isinstance(function, dict) else each
            name = each.get("name")
            arguments = next((each[key] for key in ("arguments", "parameters") if key in each), None)
            if not isinstance(name, str):
                raise ValueError("it has no name")
            yield Call(name, _object({} if arguments is None else arguments))
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at


def _of_named(text: str) -> Iterator[Call]:
    """Yield the calls of `name[ARGS]{...}name[ARGS]{...}`."""
    at = 0
    while at < len(text):
        found = _NAMED.match(text, at)
        if not found:
            raise ValueError("it is no call")
        value, at = json.JSONDecoder().raw_decode(text, found.end())
        yield Call(found[1], _object(value))
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at


def _of_xml(text: str) -> Iterator[Call]:
    """Yield the calls of `<function=name><parameter=key>value</parameter></function>`; values are JSON or text."""
    if _FUNCTION.sub("", text).strip():
        raise ValueError("there is more than calls")
    for found in _FUNCTION.finditer(text):
        if _PARAMETER.sub("", found[2]).strip():
            raise ValueError("there is more than parameters")
        yield Call(found[1].strip(), {key.strip(): _value(value) for key, value in _PARAMETER.findall(found[2])})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _of_python(text: str) -> Iterator[Call]:
    """Yield the calls of `[name(key=value), ...]`, whose values are literals."""
    body = ast.parse(text, mode="eval").body
    if not isinstance(body, ast.List):
        raise ValueError("it is no list")
    for each in body.elts:
        if not isinstance(each, ast.Call) or each.args or any(key.arg is None for key in each.keywords):
            raise ValueError("it is no call")
        yield Call(ast.unparse(each.func), {str(key.arg): ast.literal_eval(key.value) for key in each.keywords})
