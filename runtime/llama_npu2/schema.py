"""Checks of JSON values, from which a file format's schema is composed as a table.

There is no library here because those that check JSON take longer to import than a model takes to load.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from llama_npu2.errors import shortened

Check = Callable[[Any], object]
"""A function that raises Invalid for a value that it does not allow."""


def described(describe: Callable[[], dict[str, Any]]) -> Callable[[Check], Check]:
    """Return a decorator that gives a check the JSON schema of what it allows, which is made when it is asked for."""

    def give(check: Check) -> Check:
        vars(check)["describe"] = describe
        return check

    return give


def described_by(check: Check) -> dict[str, Any]:
    """Return the JSON schema of what a check allows. That of one that says nothing allows all."""
    found: dict[str, Any] = vars(check).get("describe", dict)()
    return found


class Invalid(ValueError):
    """A value that is not allowed."""

    def __init__(self, value: Any, wanted: str) -> None:
        super().__init__(wanted)
        self.value, self.wanted = value, wanted
        self.path: list[str | int] = []
        """Keys and indices that lead to the value, the outermost last."""

    @property
    def where(self) -> str:
        """The path to the value, as in `messages[0].content`; empty for the outermost one."""
        keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in reversed(self.path))
        return "".join(keys).removeprefix(".")

    def __str__(self) -> str:
        return f"{self.where or 'it'} = {_shown(self.value)} must be {self.wanted}"


def _shown(value: Any) -> str:
    """Return the beginning of a value's JSON, without making the rest: a value may be large."""
    text = ""
    for part in json.JSONEncoder().iterencode(value):
        text += part
        if shortened(text) != text:
            break
    return shortened(text)


def passes(check: Check, value: Any) -> bool:
    """Return whether a check allows a value."""
    try:
        check(value)
    except Invalid:
        return False
    return True


def load_json(content: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is damaged or nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def whole(least: int, most: int) -> Check:
    """Return a check for a whole number from `least` to `most`, both included."""

    @described(lambda: {"type": "integer", "minimum": least, "maximum": most})
    def check(value: Any) -> None:
        # isinstance takes a bool for an int.
        if type(value) is not int or not least <= value <= most:
            raise Invalid(value, f"a whole number from {least} to {most}")

    return check


def positive(value: Any) -> None:
    """Check that a value is a finite number above 0."""
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise Invalid(value, "a positive number")


@described(lambda: {"type": "boolean"})
def flag(value: Any) -> None:
    """Check that a value is true or false."""
    if type(value) is not bool:
        raise Invalid(value, "true or false")


def anything(value: Any) -> None:
    """Accept any value: it is only compared, or checked where it is used."""


@described(lambda: {"type": "string"})
def string(value: Any) -> None:
    """Check that a value is a string."""
    if type(value) is not str:
        raise Invalid(value, "a string")


def text(pattern: str, wanted: str) -> Check:
    """Return a check for a string that the regular expression `pattern` matches from end to end."""
    compiled = re.compile(pattern)

    @described(lambda: {"type": "string", "pattern": f"^(?:{pattern})$"})
    def check(value: Any) -> None:
        if type(value) is not str or not compiled.fullmatch(value):
            raise Invalid(value, wanted)

    return check


def one_of(*allowed: str) -> Check:
    """Return a check for a string that is one of these."""
    wanted = f"one of {', '.join(allowed)}"

    @described(lambda: {"enum": [*allowed]})
    def check(value: Any) -> None:
        if type(value) is not str or value not in allowed:
            raise Invalid(value, wanted)

    return check


def either(first: Check, second: Check, wanted: str) -> Check:
    """Return a check for a value that passes one of two checks, which are described together as `wanted`."""

    @described(lambda: {"anyOf": [described_by(first), described_by(second)]})
    def check(value: Any) -> None:
        if not (passes(first, value) or passes(second, value)):
            raise Invalid(value, wanted)

    return check


def list_of(item: Check, least: int = 0, most: int = 1 << 20) -> Check:
    """Return a check for a list of `least` to `most` values, each of which passes `item`."""

    @described(lambda: {"type": "array", "items": described_by(item), "minItems": least, "maxItems": most})
    def check(value: Any) -> None:
        if type(value) is not list or not least <= len(value) <= most:
            raise Invalid(value, f"a list of {least} to {most}")
        for index, element in enumerate(value):
            inside(index, item, element)

    return check


def mapping(key: Check, item: Check) -> Check:
    """Return a check for an object whose keys the file chooses."""

    @described(lambda: {"type": "object", "additionalProperties": described_by(item)})
    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Invalid(value, "an object")
        for name, element in value.items():
            key(name)
            inside(name, item, element)

    return check


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return a check for an object with the given keys. It may have others, because newer files may have more."""

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Invalid(value, "an object")
        for name, field in required.items():
            if name not in value:
                raise Invalid(value, f"an object with {name}")
            inside(name, field, value[name])
        for name, field in (optional or {}).items():
            if name in value:
                inside(name, field, value[name])

    return check


def inside(key: str | int, check: Check, value: Any) -> None:
    """Check the value at a key or index of an outer value, and add the key to the path of an error."""
    try:
        check(value)
    except Invalid as error:
        error.path.append(key)
        raise
