"""A check for schemathesis, which imports this file: requests that follow the schema are answered.

`REASONS` names why a request may still be refused: rules of the API between fields, or with a model, that a JSON schema
cannot say.
"""

from __future__ import annotations

import json
import re
from typing import Any

import schemathesis

REASONS = {
    "a number such as 1.0 is whole for a JSON schema": r"= -?[\d.]+(e[+-]?\d+)? must be a whole number",
    "a text holds JSON": r"arguments = .* must be the text of a JSON object",
    "a result refers to a call": r"no message before has a call|no item before|no call with this id",
    "a choice refers to a tool": r"there is no tool ",
    "tools have names of their own": r"two tools have the same name",
    "a call is forced where there are tools": r"there are no tools",
    "a field makes sense with another one": r"must be left out: (stream|logprobs) is not true|only with echo",
    "a field repeats another one": r"all replies are returned",
    "one of two fields has to be given": r"^model must be given",
    "a field takes the place of another one": r"there is reasoning_effort|tool_choice forces a call",
    "the last message is the user's": r"must be user: replies cannot be begun",
    "a schema or grammar in a field has rules of its own": r"cannot be followed",
    "a model has a template of its own": r"the chat template (reads no variable|refuses)",
    "a model has a tokenizer of its own": r"the prompt is empty|this model cannot rerank",
    "a model has sizes of its own": r"this model's embeddings have|the context is|num_ctx must be",
    "a server has limits of its own": r"may be under way: ask for fewer",
    "strict is for forced calls": r"only with tool_choice",
}
"""Patterns of messages with which a request that follows the schema may be refused, by the reason."""


def message(text: str) -> str:
    """Return what is wrong, as any of the three APIs says it."""
    error: Any = json.loads(text)["error"]
    return str(error["message"] if isinstance(error, dict) else error)


@schemathesis.check
def accepts_what_follows_the_schema(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Fail for a request that follows the schema and is refused without one of `REASONS`."""
    if response.status_code != 400 or not case.meta or not case.meta.generation.mode.is_positive:
        return
    wrong = message(response.text)
    assert any(re.search(pattern, wrong) for pattern in REASONS.values()), f"it follows the schema, but: {wrong}"
