"""Checks of requests: like those of files, but nothing that is given is passed over, and null is as good as absent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from llama_npu2.errors import closest
from llama_npu2.schema import Check, Invalid, described, described_by, inside, list_of, passes, record, string, text

MOST_DEPTH = 64
"""How deeply lists and objects of a request may lie in one another."""
MOST_TOKENS = 1 << 30
MOST_MESSAGES, MOST_PARTS = 4096, 1024
"""Most messages of a request, and most parts that one may consist of."""
MOST_TOOLS, MOST_CALLS = 128, 128
"""Most tools of a request, and most calls in a message."""
MOST_STOPS, _LONGEST_STOP = 16, 256
_MOST_BIASES = 1024


_NONE: dict[str, Any] = {"not": {}}
_NULL: dict[str, Any] = {"type": "null"}
"""JSON schemas that allow nothing, and null alone."""


def number(least: float, most: float) -> Check:
    """Return a check for a number from `least` to `most`, both included."""

    @described(lambda: {"type": "number", "minimum": least, "maximum": most})
    def check(value: Any) -> None:
        if type(value) not in (int, float) or not least <= value <= most:
            raise Invalid(value, f"a number from {least:g} to {most:g}")

    return check


def left_out(why: str) -> Check:
    """Return a check that refuses every value, for fields of an API that are not supported."""

    @described(lambda: _NONE)
    def check(value: Any) -> None:
        raise Invalid(value, f"left out: {why}")

    return check


def only(allowed: Any, why: str) -> Check:
    """Return a check for one value, where an API knows others that are not supported."""

    @described(lambda: {"const": allowed})
    def check(value: Any) -> None:
        if type(value) is not type(allowed) or value != allowed:
            raise Invalid(value, f"{json.dumps(allowed)} or left out: {why}")

    return check


class Fields(NamedTuple):
    """The checks of a request to a path."""

    required: Mapping[str, Check]
    """Fields that it must have."""
    optional: Mapping[str, Check]
    """Fields that it may have, or have as null."""
    rules: Sequence[Check] = ()
    """Checks of the whole request, without fields that are null: what one field says of another."""


def closed(required: Mapping[str, Check], optional: Mapping[str, Check], rules: Sequence[Check] = ()) -> Check:
    """Return a check for an object with these keys and no others. The arguments are those of `Fields`."""
    known = [*required, *optional]

    def describe() -> dict[str, Any]:
        supported = {name: check for name, check in optional.items() if described_by(check) != _NONE}
        found = {**described_by(holding(required, supported)), "additionalProperties": False}
        for of_rule in map(described_by, rules):
            # Rules stand beside each other, not in `allOf`: programs that make requests cannot combine alternatives.
            for name, each in of_rule.pop("dependentSchemas", {}).items():
                found.setdefault("dependentSchemas", {}).setdefault(name, {"allOf": []})["allOf"].append(each)
            if of_rule:
                found.setdefault("allOf", []).append(of_rule)
        return found

    @described(describe)
    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Invalid(value, "an object")
        for name, item in value.items():
            if name in required or (name in optional and item is not None):
                inside(name, {**optional, **required}[name], item)
            elif name not in optional and item is not None:  # clients that write a reply back fill in what they know
                close = closest(name, known)
                inside(name, left_out("there is no such field" + (f", did you mean {close}?" if close else "")), item)
        for name in required:
            if name not in value:
                raise Invalid(value, f"an object with {name}")
        given = {name: item for name, item in value.items() if item is not None}
        for check_rule in rules:
            check_rule(given)

    return check


# Rules


def holding(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return a check for an object with these keys, whatever others it has. Optional ones may be null."""

    def describe() -> dict[str, Any]:
        may = {name: described_by(check) for name, check in (optional or {}).items()}
        properties = {name: {"anyOf": [each, _NULL]} if each != _NONE else _NULL for name, each in may.items()}
        properties |= {name: described_by(check) for name, check in required.items()}
        return {"type": "object", "properties": properties, "required": [*required]}

    may_be_null = {name: _or_null(check) for name, check in (optional or {}).items()}
    return described(describe)(record(required, may_be_null))


def _or_null(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def rule(field: str, check: Check, unless: Check) -> Check:
    """Return a check for an object in which a field is left out or passes `check`, unless all of it passes `unless`."""
    checked = holding({}, {field: check})

    @described(lambda: {"dependentSchemas": {field: {"anyOf": [described_by(checked), described_by(unless)]}}})
    def test(value: Any) -> None:
        try:
            checked(value)
        except Invalid:
            if not passes(unless, value):
                raise

    return test


def only_if(other: str, field: str) -> Check:
    """Return the rule that a field is left out unless another one is true."""
    return rule(field, left_out(f"{other} is not true"), unless=holding({other: only(True, "")}))


def one_alone(field: str, other: str) -> Check:
    """Return the rule that a field is left out if another one is there."""
    return rule(field, left_out(f"there is {other}"), unless=holding({}, {other: left_out("")}))


def list_with(item: Check) -> Check:
    """Return a check for a list in which at least one value passes `item`."""

    @described(lambda: {"type": "array", "contains": described_by(item)})
    def check(value: Any) -> None:
        if type(value) is not list or not any(passes(item, each) for each in value):
            raise Invalid(value, "a list with a value that is missing")

    return check


def worded(check: Check, wanted: str) -> Check:
    """Return the same check, with other words for what it wants."""

    @described(lambda: described_by(check))
    def say(value: Any) -> None:
        if not passes(check, value):
            raise Invalid(value, wanted)

    return say


def by(key: str, kinds: Mapping[str, Check], what: str) -> Check:
    """Return a check for an object whose value at `key` says which of several checks it has to pass."""

    def describe() -> dict[str, Any]:
        each = {name: {"type": "object", "properties": {key: {"const": name}}, "required": [key]} for name in kinds}
        return {"anyOf": [{"allOf": [described_by(kinds[name]), each[name]]} for name in kinds]}

    @described(describe)
    def check(value: Any) -> None:
        if type(value) is not dict or key not in value:
            raise Invalid(value, f"an object with {key}")
        name = value[key]
        if type(name) is not str or name not in kinds:
            inside(key, _one_of(kinds, what), name)
        kinds[name](value)

    return check


def _one_of(names: Iterable[str], what: str) -> Check:
    def check(value: Any) -> None:
        raise Invalid(value, f"one of {', '.join(names)}: {what}")

    return check


@described(lambda: {"type": "string", "minLength": 1})
def word(value: Any) -> None:
    """Check that a value is a text that is not empty."""
    string(value)
    if not value:
        raise Invalid(value, "a text that is not empty")


@described(lambda: {**described_by(word), "title": "Name of a model"})
def model_name(value: Any) -> None:
    """Check the name of a model. `/openapi.json` has the names that there are in place of this description."""
    word(value)


def or_list(one: Check, several: Check) -> Check:
    """Return a check for a list that passes `several`, or any other value that passes `one`."""

    @described(lambda: {"anyOf": [described_by(one), described_by(several)]})
    def check(value: Any) -> None:
        (several if type(value) is list else one)(value)

    return check


def one_or_list(item: Check, least: int, most: int) -> Check:
    """Return a check for a value that passes `item`, or a list of `least` to `most` such values."""
    return or_list(item, list_of(item, least, most))


@described(lambda: {"type": "object"})
def json_object(value: Any) -> None:
    """Check that a value is an object, with any content."""
    if type(value) is not dict:
        raise Invalid(value, "an object")


@described(lambda: {"type": ["object", "boolean"]})
def json_schema(value: Any) -> None:
    """Check that a value may be a JSON schema."""
    if type(value) not in (dict, bool):
        raise Invalid(value, "a JSON schema: an object, true or false")


tool_name: Check = text(r"[A-Za-z0-9_.-]{1,64}", "a name of letters, digits, _, . and -")
"""Checks the name of a tool."""


@described(lambda: {"type": "string", "minLength": 1, "maxLength": _LONGEST_STOP})
def stop_text(value: Any) -> None:
    """Check one stop string."""
    if type(value) is not str or not 0 < len(value) <= _LONGEST_STOP:
        raise Invalid(value, f"a text of 1 to {_LONGEST_STOP} characters")


stop: Check = one_or_list(stop_text, 0, MOST_STOPS)
"""Checks one stop string or several."""


def _numbers_below(limit: int) -> str:
    """Return a regular expression of the whole numbers from 0 to `limit` - 1, without leading zeros."""
    last = str(limit - 1)
    ranges = ["0", last, *([f"[1-9][0-9]{{0,{len(last) - 2}}}"] if len(last) > 1 else [])]
    for at, digit in enumerate(last):
        least = 0 if at else 1
        if int(digit) > least:
            ranges.append(f"{last[:at]}[{least}-{int(digit) - 1}][0-9]{{{len(last) - at - 1}}}")
    return f"^(?:{'|'.join(ranges)})$"


def biases(vocabulary: int) -> Check:
    """Return a check for an object that adds numbers to the logits of tokens, whose ids are its keys."""
    bias, ids = number(-100, 100), _numbers_below(vocabulary)

    def describe() -> dict[str, Any]:
        named = {"propertyNames": {"pattern": ids}, "additionalProperties": described_by(bias)}
        return {"type": "object", **named, "maxProperties": _MOST_BIASES}

    @described(describe)
    def check(value: Any) -> None:
        if type(value) is not dict or len(value) > _MOST_BIASES:
            raise Invalid(value, f"an object with at most {_MOST_BIASES} keys")
        for key, item in value.items():
            if not re.fullmatch(ids, key):
                inside(key, left_out(f"keys are ids of tokens below {vocabulary}"), item)
            inside(key, bias, item)

    return check


def check_json(value: Any) -> None:
    """Check that a JSON value is not nested too deeply and that its texts are Unicode. Raises ValueError."""
    level = [value]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not item.isascii():
                try:
                    item.encode()
                except UnicodeEncodeError:
                    raise ValueError("it has half of a surrogate pair, which is no character") from None
        if not below:
            return
        level = below
    raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
