"""Calls of tools: as models write them, as clients get them, and what comes of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from llama_npu2.serve.openai.chat import delta_of
from llama_npu2.serve.openai.tools import tools_of
from llama_npu2.serve.tools import Parts
from llama_npu2.text.replies import Kind, Piece
from llama_npu2.text.tool_calls import Call, calls_of
from tests.conftest import build
from tests.support.caller import ANSWER, ARGUMENTS, CALL, CLOSE, OPEN, write_caller
from tests.support.serving import Server, serving


def asked_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """A request whose answer has to be a call."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"properties": {"zone": {"const": "UTC"}}}}}
ASK = {"role": "user", "content": "How is the weather in Paris?"}
PATH = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
        ('\n{"arguments": {"a": "}"}, "name": "f"}\n{"name": "g", "arguments": {}}\n', [("f", {"a": "}"}), ("g", {})]),
        ('{"name": "f", "parameters": {"a": [1, null]}}; {"name": "g"}', [("f", {"a": [1, None]}), ("g", {})]),
        ('{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}', [("f", {"a": 1})]),
        ('[{"name": "f", "arguments": {"é": "日"}}, {"name": "f", "arguments": {}}]', [("f", {"é": "日"}), ("f", {})]),
        ('f[ARGS]{"a": 1}', [("f", {"a": 1})]),
        ('f[CALL_ID]abc123XYZ[ARGS]{"a": 1}g[ARGS]{}', [("f", {"a": 1}), ("g", {})]),
        (
            "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n</function>",
            [("f", {"a": 1, "b": "x\ny"})],
        ),
        ("<function=f></function><function=g></function>", [("f", {}), ("g", {})]),
        ("[f(a=1, b='x', c=[True, None]), m.g()]", [("f", {"a": 1, "b": "x", "c": [True, None]}), ("m.g", {})]),
        ('to=functions.f <|constrain|>json<|message|>{"a": 1}', [("f", {"a": 1})]),
        ('to=f<|message|>{"a": {"b": "{"}}', [("f", {"a": {"b": "{"}})]),
    ],
)
def test_calls_as_models_write_them(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert calls_of(text) == [Call(*each) for each in calls]


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    reference = {"$ref": "#/$defs/x"}
    parameters = {"properties": {"default": reference}, "default": reference, "$defs": {"x": {"enum": ["q"]}}}
    (schema,) = json.loads(tools_of(asked_of(parameters)).schema())["anyOf"]
    moved = schema["properties"]["arguments"]
    assert moved["properties"]["default"] == {"$ref": "#/anyOf/0/properties/arguments/$defs/x"}
    assert moved["default"] == reference, "a value is no schema"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris.",
        "{",
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": {"a": 1}} and more',
        '{"name": 7, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        "[]",
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        "[1, 2]",
        "[f(1)]",
        "[f(**x)]",
        "[f(a=open('x'))]",
        "[f(a={1, 2})]",
        "[f(a=1)",
        "[" * 5000,
        "[f(a=" + "(" * 5000,
        '{"name": "f", "arguments": ' + '{"a":' * 5000,
        "<function=f>x</function>",
        "<function=f>",
        "f[ARGS]",
        "f[ARGS]{}x",
        "to=f<|message|>x",
    ],
)
def test_what_is_no_call(text: str) -> None:
    with pytest.raises(ValueError):
        calls_of(text)


def parts(pieces: list[Piece], most: int | None = None, **asked: Any) -> list[dict[str, Any]]:
    made = Parts(tools_of({"tools": [WEATHER, CLOCK]} | asked), most)
    found = [delta_of(part) for piece in pieces for part in made.push(piece)] + [delta_of(part) for part in made.end()]
    for delta in found:
        for call in delta.get("tool_calls", []):
            assert len(call.pop("id")) == 9 and call.pop("type") == "function"
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return found


def called(index: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"name": name, "arguments": arguments}}]}


def test_pieces_become_content_reasoning_and_calls() -> None:
    text, call, thought = Kind.TEXT, Kind.TOOL_CALL, Kind.REASONING
    one, two = '{"name": "clock", "arguments": {"zone": "UTC"}}', '{"name": "get_weather", "arguments": {}}'
    assert parts([Piece(thought, "so"), Piece(text, "Let me "), Piece(text, "see."), Piece(call, one)]) == [
        {"reasoning_content": "so"},
        {"content": "Let me "},
        {"content": "see."},
        called(0, "clock", zone="UTC"),
    ]
    halves = [Piece(call, one[:9], 0), Piece(call, one[9:], 0), Piece(call, two, 1)]
    assert parts([Piece(text, "\n"), *halves]) == [called(0, "clock", zone="UTC"), called(1, "get_weather")]
    assert parts([Piece(call, f"[{one}, {two}]")]) == [called(0, "clock", zone="UTC"), called(1, "get_weather")]
    for several in ([*halves, Piece(text, "x")], [Piece(call, f"[{one}, {two}]"), Piece(thought, "so")]):
        assert parts(several, most=1) == [called(0, "clock", zone="UTC")]
    # Without a mark
    assert parts([Piece(text, " "), Piece(text, one[:5]), Piece(text, one[5:])]) == [called(0, "clock", zone="UTC")]
    # What is no call of a known tool is content, as it was written
    for odd in ('{"name": "rm", "arguments": {}}', '{"name": "clock", "arguments": {', "[1, 2] is a list"):
        assert parts([Piece(call, odd)]) == parts([Piece(text, odd)]) == [{"content": odd}]
    assert parts([Piece(call, one)], tool_choice="none") == [{"content": one}]
    assert parts([Piece(text, "{"), Piece(text, "}")], tools=[]) == [{"content": "{"}, {"content": "}"}]


# A model that calls a tool


@pytest.fixture(scope="module")
def server(calling: Server) -> Server:
    return calling


def asked(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "caller", "messages": [ASK, *messages], "temperature": 0, "max_tokens": 60, **more}


def test_a_conversation_with_a_tool(client: openai.OpenAI) -> None:
    direct = client.chat.completions.create(**asked()).choices[0]
    assert (direct.message.content, direct.finish_reason, direct.message.tool_calls) == (ANSWER, "stop", None)
    made = client.chat.completions.create(**asked(tools=[WEATHER, CLOCK])).choices[0]
    assert made.finish_reason == "tool_calls" and made.message.content is None
    (call,) = made.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    told = client.chat.completions.create(**asked(made.message, result, tools=[WEATHER, CLOCK])).choices[0]
    assert (told.message.content, told.finish_reason) == (ANSWER, "stop")


def test_null_is_as_good_as_absent(server: Server) -> None:
    function = {"name": "f", "parameters": None, "description": None, "strict": None}
    more = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 300}
    found = server.ask(PATH, asked() | more | {"temperature": 1, "seed": 1, "response_format": None})
    assert found.status == 200, found.json


def test_a_stream_has_the_same_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**asked(tools=[WEATHER], n=2)) as stream:
        for _ in stream:
            pass
        made = stream.get_final_completion()
    for choice in made.choices:
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = choice.message.tool_calls or []
        assert call.function.name == "get_weather" and json.loads(call.function.arguments) == ARGUMENTS


def test_a_call_can_be_forced_and_forbidden(client: openai.OpenAI) -> None:
    none = client.chat.completions.create(**asked(tools=[WEATHER], tool_choice="none")).choices[0]
    assert none.message.content == ANSWER and none.message.tool_calls is None
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    clock = {"type": "function", "function": {"name": "clock"}}
    for choice, names in (("required", {"get_weather", "clock"}), (chosen, {"get_weather"}), (clock, {"clock"})):
        for seed in range(8):
            sampled = {"temperature": 1.0, "seed": seed, "tool_choice": choice}
            made = client.chat.completions.create(
                **asked(
                    tools=[WEATHER, CLOCK],
                    **sampled,
                )
                | {"max_tokens": 300}
            )
            (call,) = made.choices[0].message.tool_calls or []
            assert call.function.name in names and made.choices[0].finish_reason == "tool_calls"
            schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, CLOCK)}
            jsonschema.validate(json.loads(call.function.arguments), schema[call.function.name])
    cut = client.chat.completions.create(**asked(tools=[WEATHER], tool_choice="required") | {"max_tokens": 4})
    assert cut.choices[0].finish_reason == "length" and cut.choices[0].message.tool_calls is None


def test_several_calls_can_be_forced_where_that_is_asked_for(artifacts: Path, tmp_path: Path) -> None:
    write_caller(tmp_path / "caller", calls=2)
    function = {"name": "look", "parameters": {"properties": {"at": {"$ref": "#/$defs/at"}}, "required": ["at"]}}
    tools = [CLOCK, {"type": "function", "function": function}]
    function["parameters"] |= {"additionalProperties": False, "$defs": {"at": {"type": "string"}}}
    forced: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": True}
    with serving(build(tmp_path / "caller", artifacts)) as running:
        for more, count in (({}, 2), ({"parallel_tool_calls": False}, 1), ({"parallel_tool_calls": None}, 1)):
            (choice,) = running.ask(PATH, asked(tools=tools[1:], max_tokens=300) | forced | more).json["choices"]
            found = [
                (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]
            ]
            assert found == [("look", '{"at": ""}')] * count and choice["finish_reason"] == "tool_calls"
        (choice,) = running.ask(PATH, asked(tools=tools, max_tokens=300) | forced).json["choices"]
        assert len(choice["message"]["tool_calls"]) > 1
        items = running.ask(
            "/v1/responses",
            {"model": "caller", "input": "x", "tools": [{"type": "function", **function}], "temperature": 0} | forced,
        ).json["output"]
        assert [(item["name"], item["arguments"]) for item in items] == found[:1] * 2
        given = [{"name": "look", "input_schema": {"type": "object", **function["parameters"]}}]
        for disabled, count in ((False, 2), (True, 1)):
            message = {"model": "caller", "max_tokens": 300, "messages": [ASK], "tools": given, "temperature": 0}
            message["tool_choice"] = {"type": "any", "disable_parallel_tool_use": disabled}
            blocks = running.ask("/v1/messages", message).json["content"]
            assert [block["input"] for block in blocks] == [{"at": ""}] * count


class Forecast(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def test_strict_tools_of_the_client(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Forecast)
    made = client.chat.completions.parse(**asked(tools=[tool], tool_choice="required"))
    (call,) = made.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Forecast)


def answered(call: dict[str, Any], **result: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x", **result}]


GIVEN = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("more", "field", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "one of function"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "with function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "a name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x", "no such field"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "the same name"),
        ({"tools": [WEATHER] * 200}, "tools", "a list of 0 to 128"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice", "one of none, auto, required"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "no tool g",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
            "required",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
                "tool_choice": "required",
            },
            "tools",
            "are no object",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format.type",
            "forces a call",
        ),
        (
            {"messages": [ASK, {"role": "tool", "content": "x", "tool_call_id": "a"}]},
            "messages[1].tool_call_id",
            "no mess",
        ),
        ({"messages": [ASK, *answered(GIVEN, tool_call_id="b")]}, "messages[2].tool_call_id", "no message before"),
        ({"messages": [ASK, *answered(GIVEN)]}, "messages[2]", "with tool_call_id"),
        ({"messages": [ASK, *answered(GIVEN | {"id": 1})]}, "messages[1].tool_calls[0].id", "a string"),
        (
            {"messages": [ASK, *answered(GIVEN | {"function": {"name": "f", "arguments": "[]"}})]},
            "messages[1].tool_calls[0].function.arguments",
            "a JSON object",
        ),
        (
            {"messages": [ASK, *answered(GIVEN | {"function": {"name": "f", "arguments": "{"}})]},
            "messages[1].tool_calls[0].function.arguments",
            "a JSON object",
        ),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": []}]}, "messages[1]", "with content"),
    ],
)
def test_refusals(server: Server, more: dict[str, Any], field: str, message: str) -> None:
    found = server.ask(PATH, asked() | more)
    error = found.json["error"]
    assert (found.status, error["param"]) == (400, field) and message in error["message"], error


def test_a_template_that_reads_no_tools_is_named(demo: Path) -> None:
    with serving(demo) as running:
        found = running.ask(PATH, asked(tools=[WEATHER]) | {"model": "demo"})
        assert found.status == 400 and "reads no variable tools" in found.json["error"]["message"]


def test_the_checkpoint_calls_as_a_model_does(server: Server) -> None:
    text = server.ask("/v1/completions", {"model": "caller", "prompt": "<|tools|><|assistant|>", "temperature": 0}).json
    assert text["choices"][0]["text"] == "".join(CALL) and OPEN + CLOSE not in text["choices"][0]["text"]
