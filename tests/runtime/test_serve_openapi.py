"""`/openapi.json` has every path, and what the checks of requests let through is what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from llama_npu2.schema import Invalid, described_by, passes
from llama_npu2.serve import rerank
from llama_npu2.serve.anthropic import fields as anthropic
from llama_npu2.serve.anthropic.fields import count_fields, message_fields
from llama_npu2.serve.fields import biases, closed
from llama_npu2.serve.ollama import chat as ollama_chat
from llama_npu2.serve.ollama import generate
from llama_npu2.serve.ollama import models as ollama_models
from llama_npu2.serve.openai import chat, completions, embeddings, responses
from tests.conftest import ROOT
from tests.fuzz.mutate import mutated_json
from tests.support.serving import serving

SEEDS = ROOT / "tests/fuzz/corpus/request"
OF_SEEDS = {
    "chat": chat.fields,
    "format": chat.fields,
    "forced": chat.fields,
    "completion": completions.fields,
    "embeddings": embeddings.fields,
    "rerank": rerank.fields,
    "responses": responses.fields,
    "message": message_fields,
    "message_format": message_fields,
    "ollama_chat": ollama_chat.fields,
    "ollama_generate": generate.fields,
}


@pytest.mark.parametrize("name", OF_SEEDS)
def test_what_is_let_through_is_described(name: str) -> None:
    """Few are refused that the description allows: it cannot say that a text is JSON, or whose keys are reserved."""
    check = closed(*OF_SEEDS[name](1000))
    schema = described_by(check)
    jsonschema.Draft202012Validator.check_schema(schema)
    described, rng = jsonschema.Draft202012Validator(schema), Random(0)
    seed = json.loads((SEEDS / f"{name}.json").read_text())
    cases = [seed, *(mutated_json(rng, seed) for _ in range(40))]
    taken = [case for case in cases if passes(check, case)]
    refused = [case for case in cases if not passes(check, case)]
    assert len(taken) > 1 and len(refused) > 15
    for case in taken:
        assert described.is_valid(case), (case, next(described.iter_errors(case)))
    assert sum(described.is_valid(case) for case in refused) < len(refused) / 5


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
CHOSEN = {"type": "function", "function": {"name": "f"}}
MESSAGE = {**CHAT, "max_tokens": 1}
OF_MESSAGE = {"name": "f", "input_schema": {}}
FORM = {"type": "json_schema", "schema": {}}
ITEMS = {"model": "m", "input": "x"}
SEARCH, FUNCTION = {"type": "web_search"}, {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]}
EFFORT = {"effort": "low"}
JSON = {"response_format": {"type": "json_object"}}

RULES: list[tuple[Any, dict[str, Any], dict[str, Any], str, list[dict[str, Any]]]] = [
    (chat, CHAT, {"stream_options": {}}, "stream_options", [{"stream": True}]),
    (chat, CHAT, {"top_logprobs": 0, "logprobs": False}, "top_logprobs", [{"logprobs": True}]),
    (
        chat,
        CHAT,
        {"reasoning": {"effort": "low"}, "reasoning_effort": "low"},
        "reasoning",
        [{"reasoning_effort": None}],
    ),
    (chat, CHAT, {"tool_choice": "required", "tools": []}, "tool_choice", [{"tools": [TOOL]}, {"tool_choice": "auto"}]),
    (chat, CHAT, {"tool_choice": CHOSEN}, "tool_choice", [{"tools": [TOOL]}, {"tool_choice": None}]),
    (
        chat,
        CHAT,
        {"tool_choice": CHOSEN, "tools": [TOOL], **JSON},
        "response_format.type",
        [{"response_format": {"type": "text"}}, {"tool_choice": "none"}],
    ),
    (completions, {"model": "m", "prompt": "x"}, {"max_tokens": 0}, "max_tokens", [{"echo": True}, {"max_tokens": 1}]),
    (completions, {"model": "m", "prompt": "x"}, {"stream_options": {}}, "stream_options", [{"stream": True}]),
    (responses, ITEMS, {"stream_options": {}, "stream": False}, "stream_options", [{"stream": True}]),
    (responses, ITEMS, {"tool_choice": "required", "tools": [SEARCH]}, "tool_choice", [{"tools": [SEARCH, FUNCTION]}]),
    (
        responses,
        ITEMS,
        {"tool_choice": ALLOWED, "tools": [FUNCTION], "text": {"format": {"type": "json_object"}}},
        "text.format.type",
        [{"text": {}}, {"tool_choice": {**ALLOWED, "mode": "auto"}}],
    ),
    (
        responses,
        ITEMS,
        {"unsupported_tools": "refuse", "tools": [FUNCTION, SEARCH]},
        "tools[1].type",
        [{"unsupported_tools": "leave_out"}, {"tools": [FUNCTION]}],
    ),
    (ollama_chat, CHAT, {"top_logprobs": 1}, "top_logprobs", [{"logprobs": True}]),
    (generate, {"model": "m"}, {"raw": True, "system": "x"}, "system", [{"raw": None}, {"system": ""}]),
    (generate, {"model": "m"}, {"raw": True, "think": "low"}, "think", [{"raw": False}, {"think": False}]),
    (ollama_models, {}, {"name": "", "model": None}, "", [{"name": "m"}, {"model": "m"}]),
    (anthropic, MESSAGE, {"tool_choice": {"type": "any"}}, "tool_choice", [{"tools": [OF_MESSAGE]}]),
    (
        anthropic,
        MESSAGE,
        {"tools": [OF_MESSAGE, {**OF_MESSAGE, "strict": True}]},
        "tools[1].strict",
        [{"tool_choice": {"type": "none"}}, {"tool_choice": {"type": "any"}}],
    ),
    (
        anthropic,
        MESSAGE,
        {"output_config": {"format": FORM}, "output_format": FORM},
        "output_format",
        [{"output_config": {}}, {"output_format": None}],
    ),
    (
        anthropic,
        {**MESSAGE, "tools": [OF_MESSAGE]},
        {"tool_choice": {"type": "any"}, "output_config": {"format": FORM}},
        "output_config.format",
        [{"tool_choice": {"type": "auto"}}, {"output_config": {"format": None}}],
    ),
]
"""A path's module, a request, more that makes it one that is refused, the field that is then named, and ways out."""


@pytest.mark.parametrize(("api", "request_", "more", "field", "ways_out"), RULES)
def test_what_fields_say_of_each_other_is_described(
    api: Any, request_: Any, more: Any, field: str, ways_out: list[Any]
) -> None:
    fields = message_fields if api is anthropic else api.fields
    check = closed(*fields(1000))
    described = jsonschema.Draft202012Validator(described_by(check))
    with pytest.raises(Invalid) as refused:
        check({**request_, **more})
    assert refused.value.where == field
    assert described.is_valid(request_) == (api is not ollama_models) and not described.is_valid({**request_, **more})
    for way_out in ways_out:
        check({**request_, **more, **way_out})
        described.validate({**request_, **more, **way_out})


@pytest.mark.parametrize("vocabulary", [1, 2, 9, 10, 11, 99, 100, 101, 320, 1000, 2048])
def test_ids_of_tokens_are_described(vocabulary: int) -> None:
    described = jsonschema.Draft202012Validator(described_by(biases(vocabulary)))
    keys = {str(number): number < vocabulary for number in range(3000)}
    for key, is_id in (keys | dict.fromkeys(("", "01", "-1", "1 ", "0\n", "\u0661"), False)).items():
        assert passes(biases(vocabulary), {key: 1}) is is_id, key
        assert described.is_valid({key: 1}) is is_id or key == "0\n", (
            "the validator's $ is in front of a line feed, too"
        )


def test_the_last_message_is_not_the_models() -> None:
    """The description says of it what a JSON schema can."""
    check = closed(*message_fields(1000))
    described = jsonschema.Draft202012Validator(described_by(check))
    asks, says = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    for messages, is_taken in (([says, asks], True), ([asks, says], False), ([says], False)):
        assert passes(check, {**MESSAGE, "messages": messages}) is is_taken
    assert not described.is_valid({**MESSAGE, "messages": [says]})
    assert passes(closed(*count_fields(1000)), {**CHAT, "messages": [asks, says]})


def test_every_path_is_described(demo: Path) -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    with serving(demo) as running:
        found = running.ask("/openapi.json").json
    assert found["openapi"] == "3.1.0"
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith(("| `GET /", "| `POST /"))]
    documented = {path for row in rows for path in re.findall(r"`(?:GET |POST )?(/[^`?]*)", row)}
    paths = {path.replace("{name}", "NAME") for path in found["paths"]}
    assert paths == documented - {"/page/NAME", "/openapi.json"}
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            refused = path in [f"/api/{name}" for name in ("pull", "push", "create", "copy", "delete")]
            assert re.fullmatch(r"[A-Z].+\w\.", operation["summary"])
            assert ("requestBody" in operation) == (method == "post" and not refused)
    asked = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    embedding = found["paths"]["/api/embed"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert embedding["properties"]["model"] is False, "no model that is served makes embeddings"
    assert asked["properties"]["model"] == {"anyOf": [{"enum": ["demo"]}, {"type": "null"}]}
    assert "functions" not in asked["properties"]
    jsonschema.validate({"model": "demo", "messages": [{"role": "user", "content": "x"}], "stop": None}, asked)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": 3}, asked)
