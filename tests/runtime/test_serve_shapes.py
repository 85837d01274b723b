"""Requests as programs send them that tests cannot start, or not in every run: Zed, Open WebUI and Codex."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.caller import ANSWER, ARGUMENTS
from tests.support.serving import Answered, Server

QUESTION = "How is the weather in Paris?"
FUNCTION = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
        "required": ["city"],
    },
}
TOOL = {"type": "function", "function": FUNCTION}


def chunks(answered: Answered) -> list[dict[str, Any]]:
    """Return the chunks of a stream of OpenAI's, without the last mark."""
    assert answered.status == 200, answered.content
    *found, last = [line[6:] for line in answered.content.decode().splitlines() if line.startswith("data: ")]
    assert last == "[DONE]"
    return [json.loads(each) for each in found]


def joined(found: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], str]:
    """Return the text, the calls and the reason for the end of chunks."""
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    reasons = [choice["finish_reason"] for chunk in found for choice in chunk["choices"] if choice["finish_reason"]]
    return "".join(delta.get("content") or "" for delta in deltas), calls, reasons[-1]


# Zed


def zed(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a request of Zed's agent to a provider of OpenAI's API."""
    text = {"type": "text", "text": QUESTION}
    said = [
        {"role": "system", "content": "You are a coding assistant."},
        {"role": "user", "content": [{"type": "text", "text": "<context>\n</context>"}, text]},
    ]
    asked = {"model": "caller", "messages": [*said, *messages], "stream": True}
    return {**asked, "stream_options": {"include_usage": True}, **more}


OF_ZED = {
    "openai_compatible": {"max_completion_tokens": 200, "temperature": 1.0, "tools": [TOOL]},
    "with all that a setting adds": {
        "max_completion_tokens": 200,
        "temperature": 1.0,
        "parallel_tool_calls": True,
        "prompt_cache_key": "thread-1",
        "reasoning_effort": "low",
        "tool_choice": "auto",
        "tools": [TOOL],
    },
    "llama_cpp": {"stop": ["<stop>"], "tool_choice": "auto", "tools": [TOOL]},
}


@pytest.mark.parametrize("more", OF_ZED.values(), ids=[*OF_ZED])
def test_zed_asks_openai(calling: Server, more: dict[str, Any]) -> None:
    # What the model would say at a temperature is not of its weights.
    text, (call,), reason = joined(found := chunks(calling.ask("/v1/chat/completions", zed(**more, seed=1, top_k=1))))
    assert (text, reason) == ("", "tool_calls") and call["index"] == 0 and call["id"]
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert [*found[-1]["usage"]][:3] == ["prompt_tokens", "completion_tokens", "total_tokens"]
    repeated = {each: call[each] for each in ("id", "type", "function")}
    asked = {"role": "assistant", "content": None, "tool_calls": [repeated]}
    for result in ("sunny", [], [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]):
        turn = zed(asked, {"role": "tool", "content": result, "tool_call_id": call["id"]}, **more, seed=1, top_k=1)
        assert joined(chunks(calling.ask("/v1/chat/completions", turn))) == (ANSWER, [], "stop")


def test_zed_finds_models_of_llama_cpp(calling: Server) -> None:
    (entry,) = calling.ask("/v1/models").json["data"]
    assert entry["status"] == {"value": "loaded"}
    props = calling.ask(f"/props?model={entry['id']}").json
    assert props["default_generation_settings"]["n_ctx"] == 4096 and props["modalities"]["vision"] is False
    assert props["chat_template_caps"] == {"supports_tools": True, "supports_tool_calls": True}
    assert calling.ask("/models/sse").status == 404


def test_zed_asks_ollama(calling: Server) -> None:
    (listed,) = calling.ask("/api/tags").json["models"]
    assert {"name", "modified_at", "size", "digest", "details"} <= {*listed}
    assert {"format", "family", "families", "parameter_size", "quantization_level"} <= {*listed["details"]}
    assert "tools" in calling.ask("/api/show", {"model": listed["name"]}).json["capabilities"]
    options = {"num_ctx": 4096, "num_predict": None, "stop": None, "temperature": 0.0, "top_p": None}
    said = [{"role": "system", "content": "You are a coding assistant."}, {"role": "user", "content": QUESTION}]

    def replied(*more: dict[str, Any]) -> list[dict[str, Any]]:
        asked = {"model": listed["name"], "messages": [*said, *more], "stream": True, "keep_alive": -1}
        found = calling.ask("/api/chat", {**asked, "options": options, "tools": [TOOL], "think": True})
        assert found.status == 200, found.content
        return [*map(json.loads, found.content.decode().splitlines())]

    lines = replied()
    (call,) = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert call["function"]["arguments"] == ARGUMENTS
    assert all(type(line["message"]["content"]) is str and line["created_at"] for line in lines)
    assert lines[-1]["done"] and lines[-1]["prompt_eval_count"] and lines[-1]["eval_count"]
    of_call = {"function": {"name": "get_weather", "arguments": ARGUMENTS}}
    asked = {"role": "assistant", "content": "", "tool_calls": [of_call], "thinking": "So I look."}
    told = replied(asked, {"role": "tool", "tool_name": "get_weather", "content": "sunny"})
    assert "".join(line["message"]["content"] for line in told) == ANSWER


# Open WebUI


def test_open_webui_asks_for_title_and_tags_beside_the_chat(calling: Server) -> None:
    assert calling.ask("/v1/models", Authorization="Bearer none").json["data"][0]["id"] == "caller"
    chat: dict[str, Any] = {"model": "caller", "messages": [{"role": "user", "content": QUESTION}]}
    task = "### Task:\nGenerate {} for this chat, as JSON.\n<chat_history>\nUSER: hi\n</chat_history>"
    tasks = [
        {**chat, "messages": [{"role": "user", "content": task.format(what)}], "stream": False, **limit}
        for what, limit in (("a title", {"max_completion_tokens": 1000}), ("tags", {}), ("follow-ups", {}))
    ]
    streams = [
        {**chat, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "seed": 7},
        {**chat, "stream": True, "tools": [TOOL], "temperature": 0},
    ]
    headers = {"Authorization": "Bearer none", "X_OpenWebUI_User_Name": "Jane", "X_OpenWebUI_Chat_Id": "1"}
    with ThreadPoolExecutor(10) as threads:
        asked = [
            threads.submit(calling.ask, "/v1/chat/completions", body | {"top_k": 1}, "", **headers)
            for body in (*streams, *tasks) * 2
        ]
        found = [each.result() for each in asked]
    for at in (0, 5):
        assert joined(chunks(found[at])) == (ANSWER, [], "stop")
        _, (call,), _ = joined(chunks(found[at + 1]))
        assert call["function"]["name"] == "get_weather"
        assert [each.json["choices"][0]["message"]["content"] for each in found[at + 2 : at + 5]] == [ANSWER] * 3


# Codex


def test_codex_asks_for_models_and_probes(calling: Server) -> None:
    listed = calling.ask("/v1/models?client_version=0.171.0").json
    assert listed["models"] == [] and listed["data"][0]["context_length"] == 4096
    probe = {"model": "caller", "input": [], "max_output_tokens": 1, "store": False, "stream": False}
    assert calling.ask("/v1/responses", probe).json["status"] == "incomplete"


def test_codex_asks_for_a_turn(calling: Server) -> None:
    def item(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    of_server = {"type": "web_search", "external_web_access": False}
    agents = {"type": "namespace", "name": "agents", "description": "x", "tools": [{"type": "function", **FUNCTION}]}
    asked: dict[str, Any] = {
        "model": "caller",
        "instructions": "You are Codex.",
        "input": [item("developer", "<permissions>"), item("user", "<environment_context>"), item("user", QUESTION)],
        "tools": [{"type": "function", **FUNCTION, "strict": False}, of_server, agents],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread-1",
        "client_metadata": {"x-codex-installation-id": "1"},
    }

    def events(body: dict[str, Any]) -> list[dict[str, Any]]:
        found = calling.ask("/v1/responses", body | {"top_k": 1}, Accept="text/event-stream")
        assert found.status == 200 and found.headers["x-tools-left-out"] == "namespace, web_search", found.content
        return [json.loads(line[6:]) for line in found.content.decode().splitlines() if line.startswith("data: ")]

    first = events(asked)
    assert first[0]["type"] == "response.created" and first[0]["response"]["object"] == "response"
    assert first[-1]["type"] == "response.completed"
    (call,) = [each["item"] for each in first if each["type"] == "response.output_item.done"]
    assert call["type"] == "function_call" and json.loads(call["arguments"]) == ARGUMENTS
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    last = events({**asked, "input": [*asked["input"], call, result]})[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == ANSWER
    assert last["usage"]["input_tokens_details"]["cached_tokens"] > 0.9 * first[-1]["response"]["usage"]["input_tokens"]
