"""Checks for schemathesis, which imports this file: requests that follow the schema are answered, and soon.

`REASONS` names why a request may still be refused: rules of the API between fields, or with a model, that a JSON schema
cannot say.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import schemathesis

REASONS = {
    "a text holds JSON": r"arguments = .* must be the text of a JSON object",
    "a result refers to a call": r"no message before has a call|no item before|no call with this id",
    "a choice refers to a tool": r"there is no tool ",
    "tools have names of their own": r"two tools have the same name",
    "a field repeats another one": r"all replies are returned",
    "the last message is the user's": r"must be user: replies cannot be begun",
    "a schema or grammar in a field has rules of its own": r"cannot be followed",
    "a model has a template of its own": r"the chat template (reads no variable|refuses)|has no chat template",
    "a template gets some names by other fields": r"it is no variable of chat templates",
    "a model thinks or does not": r"does not support thinking|always thinks",
    "a model has a tokenizer of its own": r"this model cannot rerank",
    "a model has sizes of its own": r"this model's embeddings have|the context is|is too long|num_ctx must be",
    "a model has a vocabulary of its own": r"\] = \d+ must be a whole number from 0|keys are ids of tokens below",
    "a server has limits of its own": r"may be under way: ask for fewer",
    "strict is for forced calls": r"only with tool_choice",
}
"""Patterns of messages with which a request that follows the schema may be refused, by the reason."""


MOST_SECONDS = 10.0
"""Most seconds that the server may compute for a request. Those that it waits for a CPU are none of its own."""


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


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Write whole numbers as such: 1.0 is whole for a JSON schema, and to OpenAI's API and others it is not."""
    if isinstance(body, dict):
        return {name: map_body(context, value) for name, value in body.items()}
    if isinstance(body, list):
        return [map_body(context, value) for value in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body


def computed() -> float:
    """Return how many seconds the server has computed."""
    fields = Path(f"/proc/{os.environ['SERVER_PID']}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


before = 0.0


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    global before
    before = computed()


@schemathesis.check
def computes_briefly(ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """Fail for a request that takes the server longer than `MOST_SECONDS`."""
    assert (took := computed() - before) < MOST_SECONDS, f"the server computed for {took:.1f} s"
