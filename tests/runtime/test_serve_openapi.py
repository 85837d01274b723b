"""`/openapi.json` has every path, and what the checks of requests let through is what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from llama_npu2.schema import Invalid, described_by
from llama_npu2.serve import rerank
from llama_npu2.serve.anthropic.fields import message_fields
from llama_npu2.serve.fields import closed
from llama_npu2.serve.ollama import chat as ollama_chat
from llama_npu2.serve.ollama import generate
from llama_npu2.serve.openai import chat, completions, embeddings, responses
from tests.conftest import ROOT
from tests.fuzz.mutate import mutated_json
from tests.support.serving import serving

SEEDS = ROOT / "tests/fuzz/corpus/request"
OF_SEEDS = {
    "chat": chat.fields,
    "format": chat.fields,
    "completion": completions.fields,
    "embeddings": embeddings.fields,
    "rerank": rerank.fields,
    "responses": responses.fields,
    "message": message_fields,
    "message_format": message_fields,
    "ollama_chat": ollama_chat.fields,
    "ollama_generate": generate.fields,
}


def passes(check: Any, value: Any) -> bool:
    try:
        check(value)
    except Invalid:
        return False
    return True


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
            assert operation["summary"] and ("requestBody" in operation) == (method == "post" and not refused)
    asked = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    embedding = found["paths"]["/api/embed"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert embedding["properties"]["model"] is False, "no model that is served makes embeddings"
    assert asked["properties"]["model"] == {"enum": ["demo"]} and "functions" not in asked["properties"]
    jsonschema.validate({"model": "demo", "messages": [{"role": "user", "content": "x"}], "stop": None}, asked)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": 3}, asked)
