"""Anthropic's API: what its own client gets, and how each field changes that."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llama_npu2 import Llama
from llama_npu2.errors import UserError
from llama_npu2.serve.anthropic import fields
from llama_npu2.serve.anthropic.messages import COUNT_PATH, PATH, shows, turn_of
from llama_npu2.serve.anthropic.prompts import messages_of, variables_of
from llama_npu2.serve.conversation import Conversation
from llama_npu2.serve.failures import RequestError
from llama_npu2.text.chat_template import ChatTemplate
from llama_npu2.text.replies import Kind, Piece
from tests.conftest import ROOT
from tests.support.caller import ANSWER, ARGUMENTS, THOUGHT
from tests.support.later import later
from tests.support.serving import HASTY, Server, serving, wait_for

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = later("anthropic")

ASK = [{"role": "user", "content": "The capital of France is"}]
LONG: list[Any] = [{"role": "user", "content": "Once upon a time"}]
"""Asks for more than one sentence."""
HEADER = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={};"


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": ASK, "max_tokens": 50, "temperature": 0, **more}


def by_client(**more: Any) -> dict[str, Any]:
    """Return the arguments of the client, which has no names for how tokens are chosen."""
    given = asked(**more)
    extra = {name: given.pop(name) for name in ("temperature", "top_p", "top_k") if name in given}
    return {**given, "extra_body": extra}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def events_of(content: bytes) -> list[dict[str, Any]]:
    """The events of a stream. Each says its name twice."""
    found = []
    for each in content.decode().removesuffix("\n\n").split("\n\n"):
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


# The API, by its own client


def test_a_message_is_what_the_model_says_alone(client: anthropic.Anthropic, llm: Llama) -> None:
    (alone,) = llm.complete(ASK, max_tokens=50)
    made = client.messages.create(**by_client())
    assert [block.to_dict() for block in made.content] == [{"type": "text", "text": alone.text}]
    assert (made.type, made.role, made.model) == ("message", "assistant", "demo")
    assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
    assert made.usage.output_tokens == len(alone.tokens)
    again = client.beta.messages.create(**by_client(), betas=["prompt-caching-scope-2026-01-05"])
    assert again.id != made.id and again._request_id != made._request_id
    assert str(again._request_id).startswith("req_")
    total = len(llm.encode(ASK))
    assert (again.usage.cache_read_input_tokens, again.usage.input_tokens) == (total - 1, 1)
    assert made.usage.cache_creation_input_tokens == 0
    type(made).model_validate(made.to_dict())


def test_a_stream_adds_up_to_the_whole(client: anthropic.Anthropic, server: Server) -> None:
    whole = client.messages.create(**by_client(messages=LONG))
    whole = client.messages.create(**by_client(messages=LONG))  # as much of it is cached as of those that follow
    with client.messages.stream(**by_client(messages=LONG)) as stream:
        pieces = [*stream.text_stream]
        final = stream.get_final_message()
        assert stream.response.headers["request-id"]
    assert len(pieces) > 9 and "".join(pieces) == text_of(whole) == text_of(final)
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens
    events = events_of(server.ask(f"{PATH}?beta=true", asked(messages=LONG, stream=True)).content)
    kinds = [each["type"] for each in events]
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    started = events[0]["message"]["usage"]
    assert started["input_tokens"] + started["cache_read_input_tokens"] == sum(
        getattr(whole.usage, name) for name in ("input_tokens", "cache_read_input_tokens")
    )


def test_asyncio_clients(server: Server, llm: Llama) -> None:
    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            replies = (client.messages.create(**by_client()) for _ in range(4))
            return [text_of(made) for made in await asyncio.gather(*replies)]

    assert asyncio.run(main()) == [llm.generate(ASK, max_tokens=50).text] * 4


def test_where_a_reply_ends(client: anthropic.Anthropic, llm: Llama, server: Server) -> None:
    whole = llm.generate(LONG, max_tokens=50).text
    stop = whole[20:24]
    made = client.messages.create(**by_client(messages=LONG, stop_sequences=["never", stop]))
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)
    assert text_of(made) == whole[: whole.index(stop)]
    ended = events_of(server.ask(PATH, asked(messages=LONG, stop_sequences=[stop], stream=True)).content)[-2]
    assert ended["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}
    short = client.messages.create(**by_client(messages=LONG, max_tokens=3))
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    times = 512
    while len(llm.encode(filling := [{"role": "user", "content": "Once upon a time " * times}])) > 2040:
        times -= 1
    full = client.messages.create(**by_client(messages=filling, max_tokens=500))
    assert full.stop_reason == "model_context_window_exceeded" and full.usage.output_tokens < 100


def test_how_tokens_are_chosen(server: Server, llm: Llama) -> None:
    odd = [{"role": "user", "content": "Blue 7 zebra of why, or 42 qux?"}]

    def said(**settings: Any) -> str:
        body = {"model": "demo", "messages": odd, "max_tokens": 20, **settings}
        # A drawn reply may end before its first word: it has no content then.
        return "".join(str(block["text"]) for block in server.ask(PATH, body).json["content"])

    greedy = llm.generate(odd, max_tokens=20).text
    assert said(top_k=1) == said(top_p=0) == said(temperature=0) == greedy
    assert len({said() for _ in range(20)}) > 1, "the temperature is 1 unless it is given"


def test_a_prompt_can_be_cached_without_a_reply(client: anthropic.Anthropic, llm: Llama) -> None:
    said = [{"role": "user", "content": "An old town has a castle and a market."}]
    warm = client.messages.create(**by_client(messages=said, max_tokens=0))
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    made = client.messages.create(**by_client(messages=said, max_tokens=5))
    assert made.usage.cache_read_input_tokens == len(llm.encode(said)) - 1


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    size: Literal["small", "large"]


def test_replies_in_a_schema(client: anthropic.Anthropic, llm: Llama) -> None:
    made = client.messages.parse(**by_client(max_tokens=200), output_format=City)
    assert made.stop_reason == "end_turn" and isinstance(made.parsed_output, City)
    with client.messages.stream(**by_client(max_tokens=200), output_format=City) as stream:
        assert stream.get_final_message().parsed_output == made.parsed_output
    schema = {"enum": [["yes"], ["no"]]}
    alone = llm.generate(ASK, schema=schema).text
    form = {"type": "json_schema", "schema": schema}
    assert text_of(client.messages.create(**by_client(output_config={"format": form}))) == alone
    older = {"extra_body": {"output_format": form, "temperature": 0}}
    assert text_of(client.messages.create(**by_client() | older)) == alone


def test_the_list_of_models(client: anthropic.Anthropic, llm: Llama) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.max_input_tokens) == ("demo", "model", llm.context_length)
    assert type(model).model_validate(model.to_dict()) == client.models.retrieve("demo")


# Prompts


TEXT = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}


def test_prompts_are_what_the_chat_template_takes() -> None:
    text = TEXT
    call = {"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}}
    hidden = {"type": "redacted_thinking", "data": "zzz"}
    request = {
        "system": [{"type": "text", "text": "s"}, text],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [text, {"type": "text", "text": "c"}]},
            {"role": "system", "content": [text]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, hidden, text]},
            {"role": "assistant", "content": [call, call | {"id": "y", "name": "g", "input": {}}]},
            {
                "role": "user",
                "content": [
                    text,
                    {"type": "tool_result", "tool_use_id": "y", "content": "1", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "x", "content": [text, text]},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "is_error": True}]},
            {"role": "assistant", "content": []},
        ],
    }
    calls = [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "y", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    assert messages_of(request, False) == [
        {"role": "system", "content": "s\nb"},
        {"role": "user", "content": "a\nb\nc\n<system-reminder>\nb\n</system-reminder>"},
        {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "y", "name": "g", "content": "Error: 1"},
        {"role": "tool", "tool_call_id": "x", "name": "f", "content": "b\nb"},
        {"role": "user", "content": "b"},
        {"role": "tool", "tool_call_id": "x", "name": "f", "content": "Error: "},
        {"role": "assistant", "content": ""},
    ]
    first = {"messages": [{"role": "system", "content": "b"}, *ASK], "system": "a"}
    assert messages_of(first, False) == [{"role": "system", "content": "a\nb"}, *ASK]


ALTERNATING = """
{%- set turns = messages | rejectattr("role", "equalto", "tool") | rejectattr("tool_calls", "defined") %}
{%- for message in turns %}
    {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{%- endfor %}
{%- for message in messages %}{{ message.role ~ ": " ~ message.content ~ ";" }}{% endfor %}"""


class Rendering:
    """Stands in for a model: its prompts are texts."""

    def __init__(self, source: str) -> None:
        self.template = ChatTemplate(source, {})

    async def encode(self, messages: Any, field: str, template: Any) -> str:
        try:
            return self.template.render(messages, **template)
        except UserError as error:
            raise RequestError.of(error, field) from None


def test_text_after_results_for_templates_that_refuse_it() -> None:
    call = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": "1"}
    said: list[Any] = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result, TEXT]}]
    later = [("system", "c"), ("assistant", "d"), ("user", "e")]
    said += [{"role": role, "content": content} for role, content in later]
    strict, free = Rendering(ALTERNATING), Rendering(ALTERNATING.rpartition("\n")[2])

    def prompt(model: Any, messages: list[Any]) -> Any:
        return asyncio.run(Conversation.encode(model, turn_of(asked(messages=messages), False)))

    begin = f"user: {ASK[0]['content']};assistant: ;tool: 1"
    end = "\n<system-reminder>\nc\n</system-reminder>;assistant: d;user: e;"
    assert prompt(strict, said) == f"{begin}\nb{end}"
    assert prompt(free, said) == f"{begin};user: b{end}"
    with pytest.raises(RequestError, match="roles must alternate"):
        prompt(strict, [{"role": "assistant", "content": "d"}, *ASK])
    for each in (strict, free):
        each.template.close()


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic, llm: Llama) -> None:
    said: Any = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [*ASK, {"role": "assistant", "content": "Paris."}, *ASK],
    }
    counted = client.messages.count_tokens(model="demo", **said).input_tokens
    plain = [{"role": "system", "content": "Be brief."}, *said["messages"]]
    assert counted == client.beta.messages.count_tokens(model="demo", **said).input_tokens == len(llm.encode(plain))
    used = client.messages.create(**by_client(**said)).usage
    assert used.input_tokens + (used.cache_read_input_tokens or 0) == counted
    long: Any = [{"role": "user", "content": "word " * 3000}]
    assert client.messages.count_tokens(model="demo", messages=long).input_tokens == len(llm.encode(long)) > 2048


def test_a_model_that_is_not_loaded_counts_tokens(demo: Path, llm: Llama) -> None:
    with serving(demo, "--keep-alive=0") as running:
        client = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
        client.messages.create(**by_client(max_tokens=1))
        for _ in range(2):
            wait_for(lambda: client.models.retrieve("demo").to_dict()["status"] == {"value": "unloaded"})
            assert client.messages.count_tokens(model="demo", messages=ASK).input_tokens == len(llm.encode(ASK))  # type: ignore[arg-type]


STORY = "There was a king who had a castle, a horse and three daughters, and each of them had a garden. " * 8


def test_the_billing_line_is_no_part_of_the_prompt(client: anthropic.Anthropic, llm: Llama, demo: Path) -> None:
    def said(turn: int, client: anthropic.Anthropic) -> anthropic.types.Usage:
        system: Any = [{"type": "text", "text": HEADER.format(turn, f"{turn:05x}")}, {"type": "text", "text": STORY}]
        return client.messages.create(**by_client(system=system, max_tokens=2)).usage

    def share(used: anthropic.types.Usage) -> float:
        return (used.cache_read_input_tokens or 0) / (used.input_tokens + (used.cache_read_input_tokens or 0))

    said(1, client)
    assert share(said(2, client)) >= 0.95
    inline = f"{HEADER.format(3, 'fffff')}\n{STORY}"
    assert share(client.messages.create(**by_client(system=inline, max_tokens=2)).usage) >= 0.95
    plain = [{"role": "system", "content": STORY}, *ASK]
    counted = client.messages.count_tokens(model="demo", system=inline, messages=ASK).input_tokens  # type: ignore[arg-type]
    assert counted == len(llm.encode(plain))
    quoted = f"{STORY}\n{HEADER.format(3, 'x')}"
    assert messages_of({"system": quoted, "messages": ASK}, False)[0]["content"] == quoted
    assert messages_of({"system": HEADER, "messages": ASK}, False) == ASK
    with serving(demo, "--keep-billing-header") as running:
        keeping = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
        said(1, keeping)
        assert share(said(2, keeping)) < 0.5
        assert keeping.messages.count_tokens(model="demo", system=inline, messages=ASK).input_tokens > counted  # type: ignore[arg-type]


# A model that calls a tool, and thinks where it is told to


@pytest.fixture(scope="module")
def agent(calling: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=calling.url, api_key="none", max_retries=0, timeout=60)


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Weather.", "input_schema": CITY, "input_examples": [ARGUMENTS]}
CLOCK = {
    "type": "custom",
    "name": "clock",
    "input_schema": {"properties": {"zone": {"const": "UTC"}}, "additionalProperties": False},
}
WEATHER_ASKED = {"role": "user", "content": "How is the weather in Paris?"}


def of_caller(*messages: Any, **more: Any) -> dict[str, Any]:
    given = {"max_tokens": 60, **more}
    return by_client(model="caller", messages=[WEATHER_ASKED, *messages], **given)


def answered(call_id: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "sunny", **more}]}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_with_a_tool(agent: anthropic.Anthropic, streamed: bool) -> None:
    def said(*messages: Any) -> anthropic.types.Message:
        asked = of_caller(*messages, tools=[WEATHER, CLOCK])
        if not streamed:
            return agent.messages.create(**asked)
        with agent.messages.stream(**asked) as stream:
            return stream.get_final_message()

    made = said()
    (call,) = made.content
    assert made.stop_reason == "tool_use" and call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", ARGUMENTS)
    told = said(made.to_param(), answered(call.id))
    assert (text_of(told), told.stop_reason) == (ANSWER, "end_turn")
    assert told.usage.cache_read_input_tokens


def test_calls_can_be_forced_and_forbidden(agent: anthropic.Anthropic) -> None:
    none = agent.messages.create(**of_caller(tools=[WEATHER], tool_choice={"type": "none"}))
    assert text_of(none) == ANSWER
    schemas: Any = {tool["name"]: tool["input_schema"] for tool in (WEATHER, CLOCK)}
    for choice, names in (
        ({"type": "any"}, {*schemas}),
        ({"type": "any", "disable_parallel_tool_use": True}, {*schemas}),
        ({"type": "tool", "name": "clock"}, {"clock"}),
    ):
        tools = [WEATHER, CLOCK | {"strict": True}]
        for _ in range(3):
            made = agent.messages.create(
                **of_caller(tools=tools, tool_choice=choice, max_tokens=300, temperature=1),
            )
            (call,) = made.content
            assert call.type == "tool_use" and call.name in names and made.stop_reason == "tool_use"
            jsonschema.validate(call.input, schemas[call.name])
    cut = agent.messages.create(**of_caller(tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=4))
    assert cut.stop_reason == "max_tokens" and not any(block.type == "tool_use" for block in cut.content)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("thinking", "kinds", "thought"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, ["thinking", "tool_use"], THOUGHT),
        ({"type": "adaptive"}, ["thinking", "tool_use"], THOUGHT),
        ({"type": "adaptive", "display": "omitted"}, ["thinking", "tool_use"], ""),
        ({"type": "disabled"}, ["tool_use"], None),
        (None, ["tool_use"], None),
    ],
)
def test_thinking(agent: anthropic.Anthropic, streamed: bool, thinking: Any, kinds: list[str], thought: Any) -> None:
    asked = of_caller(tools=[WEATHER], **({"thinking": thinking} if thinking else {}))
    with agent.messages.stream(**asked) as stream:
        events = [*stream]
        made = stream.get_final_message()
    if not streamed:
        made = agent.messages.create(**asked)
    elif thought:
        assert [each.thinking for each in events if each.type == "thinking"] == [thought]
        assert [each.signature for each in events if each.type == "signature"]
    assert [block.type for block in made.content] == kinds
    for block in made.content:
        if block.type == "thinking":
            assert block.thinking == thought and block.signature
    (call,) = (block for block in made.content if block.type == "tool_use")
    # What comes back is in the prompt.
    told = agent.messages.create(**of_caller(made.to_param(), answered(call.id), tools=[WEATHER]))
    without = {"role": "assistant", "content": [block for block in made.content if block.type != "thinking"]}
    bare = agent.messages.create(**of_caller(without, answered(call.id), tools=[WEATHER]))
    assert text_of(told) == text_of(bare) == ANSWER
    grown = tokens_of(told.usage) - tokens_of(bare.usage)
    assert grown == (3 if thought else 0), "the thought is one token between two marks"


def by_claude_code(turn: int, *messages: Any) -> dict[str, Any]:
    """A request with the fields that version 2.1.197 sends, in its order."""
    cached = {"cache_control": {"type": "ephemeral"}}
    reminder = "<system-reminder>\nToday is a day.\n</system-reminder>\n\n"
    return {
        "model": "caller",
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": reminder}, {"type": "text", "text": "Go.", **cached}],
            },
            {"role": "system", "content": "Available agent types for the Agent tool: none"},
            *messages,
        ],
        "system": [
            {"type": "text", "text": HEADER.format(turn, f"{turn:05x}")},
            {"type": "text", "text": "You are an agent.", **cached},
            {"type": "text", "text": f"\n{STORY}", **cached},
        ],
        "tools": [{"name": each["name"], "description": "", "input_schema": CITY} for each in (WEATHER, CLOCK)],
        "metadata": {"user_id": '{"device_id":"0","session_id":"1"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        "temperature": 0,
    }


def test_a_conversation_as_claude_code_has_it(calling: Server) -> None:
    def said(turn: int, *messages: Any) -> tuple[list[Any], dict[str, Any]]:
        found = calling.ask(f"{PATH}?beta=true", by_claude_code(turn, *messages), Anthropic_Beta="a-2025-01-01,b")
        assert found.status == 200, found.content
        events = events_of(found.content)
        whole: list[Any] = [each["content_block"] for each in events if each["type"] == "content_block_start"]
        for each in events:
            if each["type"] == "content_block_delta" and each["delta"]["type"] == "input_json_delta":
                whole[each["index"]]["input"] = json.loads(each["delta"]["partial_json"])
        assert events[-2]["context_management"] == {"applied_edits": []}
        return whole, events[-2]["usage"]

    (thought, call), first = said(1)
    assert (thought["type"], call["name"], call["input"]) == ("thinking", "get_weather", ARGUMENTS)
    thought |= {"thinking": THOUGHT, "signature": "x"}
    result = answered(call["id"], is_error=False, cache_control={"type": "ephemeral"})
    _, used = said(2, {"role": "assistant", "content": [thought, call]}, result)
    before = first["input_tokens"] + first["cache_read_input_tokens"]
    assert used["cache_read_input_tokens"] >= 0.95 * before > 500
    counting = {name: by_claude_code(3)[name] for name in ("model", "messages", "tools")}
    counted = calling.ask(
        f"{COUNT_PATH}?beta=true", counting | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    )
    assert 0 < counted.json["input_tokens"] < before


def tokens_of(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_model_that_thinks_whatever_it_is_told(llm: Llama) -> None:
    """Its thoughts are left out where they are not wanted."""
    text, thought = Piece(Kind.TEXT, "a"), Piece(Kind.REASONING, "b")
    for thinking, shown in (({"type": "disabled"}, [text]), ({}, [thought, text])):
        assert [part for part in (thought, text) if shows(part, thinking)] == shown


def test_variables_of_templates() -> None:
    for request, variables in (
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
    ):
        assert variables_of(request) == variables


# What is refused


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


TOOL = {"name": "f", "input_schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "1"}
OF_ASSISTANT = {"type": "thinking", "thinking": "so"}
JSON = {"type": "json_schema", "schema": {"type": "object"}}

REFUSED: list[tuple[Any, str]] = [
    ([], "the body must be an object"),
    ({}, "an object with model"),
    ({"model": "demo", "messages": ASK}, "with max_tokens"),
    (asked(model=7), "model = 7"),
    (asked(messages=[]), "messages = [] must be a list of 1"),
    (asked(messages="hi"), "messages"),
    (asked(messages=[{"role": "wizard", "content": "x"}]), "other roles"),
    (asked(messages=[{"role": "user", "content": "x", "name": "y"}]), "messages[0].name"),
    (asked(**user()), "messages[0].content"),
    (asked(**user({"type": "image", "source": {}})), "messages[0].content[0].type"),
    (asked(**user({"type": "document", "source": {}})), "documents"),
    (asked(**user({"type": "text"})), "with text"),
    (asked(**user({"type": "text", "text": "x", "citations": []})), "no citations"),
    (asked(**user({"type": "text", "text": "x", "cache_control": {"type": "forever"}})), "cache_control.type"),
    (asked(**user({"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "2h"}})), "ttl"),
    (asked(**user(OF_ASSISTANT)), "one of text, tool_result"),
    (asked(**user(RESULT)), "messages[0].content[0].tool_use_id: no message before has a call"),
    (asked(**user(RESULT | {"content": [{"type": "image"}]})), "messages[0].content[0].content[0].type"),
    (asked(**user(RESULT | {"is_error": "yes"})), "is_error"),
    (asked(messages=[*ASK, {"role": "assistant", "content": [RESULT]}, *ASK]), "messages[1].content[0].type"),
    (asked(messages=[*ASK, {"role": "assistant", "content": "The best is ("}]), "messages[1].role"),
    (asked(messages=[{"role": "user", "content": "word " * 3000}]), " tokens > 2048 maximum"),
    (asked(messages=[{"role": "user", "content": "x" * 10**6}]), "prompt is too long: it has more than 2048"),
    (asked(system=[{"type": "image"}]), "system[0].type"),
    (asked(system=7), "system"),
    (asked(max_tokens=-1), "max_tokens"),
    (asked(max_tokens=True), "max_tokens"),
    (asked(temperature=2.5), "temperature"),
    (asked(top_p=2), "top_p"),
    (asked(top_k=-1), "top_k"),
    (asked(temprature=1), "did you mean temperature?"),
    (asked(stop_sequences="x"), "stop_sequences"),
    (asked(stop_sequences=[""]), "stop_sequences[0]"),
    (asked(stop_sequences=["x"] * 17), "a list of 0 to 16"),
    (asked(metadata={"user": "x"}), "metadata.user"),
    (asked(service_tier="batch"), "service_tier"),
    (asked(thinking={"type": "enabled"}), "with budget_tokens"),
    (asked(thinking={"type": "between_tools"}), "thinking.type"),
    (asked(thinking={"type": "adaptive", "display": "all"}), "thinking.display"),
    (asked(tools=[TOOL, TOOL]), "the same name"),
    (asked(tools=[{"name": "f"}]), "with input_schema"),
    (asked(tools=[TOOL]), "reads no variable tools"),
    (asked(tools=[{"name": "web_search", "max_uses": 3, "type": "web_search_20250305"}]), "tools[0].type"),
    (asked(tools=[TOOL | {"name": "a b"}]), "tools[0].name"),
    (asked(tools=[TOOL | {"defer_loading": True}]), "the prompt has all tools"),
    (asked(tools=[TOOL | {"strict": True}]), "tools[0].strict"),
    (asked(tool_choice="auto"), "tool_choice"),
    (asked(tool_choice={"type": "any"}), "there are no tools"),
    (asked(tools=[TOOL], tool_choice={"type": "tool", "name": "g"}), "tool_choice.name: there is no tool g"),
    (asked(tools=[TOOL], tool_choice={"type": "any"}, output_config={"format": JSON}), "forces a call"),
    (asked(output_format=JSON, output_config={"format": JSON}), "output_format"),
    (asked(output_format={"type": "json_object"}), "other formats"),
    (asked(output_config={"format": JSON | {"schema": {"type": "objekt"}}}), "output_config.format"),
    (asked(output_config={"effort": "huge"}), "output_config.effort"),
    (asked(output_config={"task_budget": {}}), "no budgets"),
    (asked(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}), "not edited"),
    (asked(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": 1}]}), "keep"),
    (asked(mcp_servers=[{}]), "mcp_servers"),
    (asked(speed="fast"), "one speed"),
    (asked(container="x"), "no containers"),
    (asked(diagnostics={}), "diagnostics"),
    (b"{", "not valid JSON"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_refusals(server: Server, body: Any, message: str) -> None:
    found = server.ask(PATH, body)
    refused = found.json
    assert found.status == 400 and refused["type"] == "error" and refused["error"]["type"] == "invalid_request_error"
    said = refused["error"]["message"]
    assert message in said and len(said) < 700 and "\n" not in said
    assert refused["request_id"] == found.headers["request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_raises_what_anthropic_raises(client: anthropic.Anthropic, stream: bool) -> None:
    with pytest.raises(anthropic.NotFoundError, match="there is no model claude-x") as raised:
        client.messages.create(**by_client(model="claude-x", stream=stream))
    assert raised.value.type == "not_found_error" and str(raised.value.request_id).startswith("req_")
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        client.messages.create(**by_client(top_k=-1, stream=stream))
    with pytest.raises(anthropic.NotFoundError, match="no such path"):
        client.messages.batches.list()


@pytest.fixture(scope="module")
def strict(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A hasty server with a key and room for one reply."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("s3cret\n")
    with serving(demo, f"--api-key-file={key}", "--queue=1", "--body=1", before=HASTY) as running:
        yield running


def test_errors_have_their_types_wherever_they_arise(strict: Server) -> None:
    key = {"X_Api_Key": "s3cret"}
    for path in (PATH, COUNT_PATH):
        for headers, body, status, kind in (
            ({}, asked(), 401, "authentication_error"),
            ({"Authorization": "Bearer x"}, asked(), 401, "authentication_error"),
            (key | {"Origin": "http://evil.example"}, asked(), 403, "permission_error"),
            (key, asked(model="x"), 404, "not_found_error"),
            (key, None, 405, "invalid_request_error"),
            (key, b'{"model": "' + b"x" * (1 << 20) + b'"}', 413, "request_too_large"),
            (key | {"Content_Type": "text/plain"}, asked(), 415, "invalid_request_error"),
        ):
            found = strict.ask(path, body, **headers)
            assert (found.status, found.json["error"]["type"]) == (status, kind), found.json
            assert found.json["type"] == "error" and found.json["request_id"] == found.headers["request-id"]
    for headers in (key, {"Authorization": "Bearer s3cret"}):
        assert strict.ask(PATH, asked(max_tokens=1), Anthropic_Version="2023-06-01", **headers).status == 200


def test_who_comes_when_all_is_taken_is_told_to_come_again(strict: Server) -> None:
    client = anthropic.Anthropic(base_url=strict.url, api_key="s3cret", max_retries=0)
    with client.messages.create(**by_client(messages=[{"role": "user", "content": "of " * 500}], stream=True)) as held:
        next(iter(held))
        with pytest.raises(anthropic.RateLimitError) as raised:
            client.messages.create(**by_client())
        assert raised.value.type == "rate_limit_error" and raised.value.response.headers["retry-after"] == "1"
        assert client.messages.count_tokens(model="demo", messages=ASK).input_tokens  # type: ignore[arg-type]


def test_a_stream_pings_while_a_prompt_is_processed(strict: Server) -> None:
    body = json.dumps(asked(messages=[{"role": "user", "content": "of " * 1900}], max_tokens=2, stream=True)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: s3cret\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", strict.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        found = b""
        while b"event: message_stop" not in found:
            found += connection.recv(1 << 16)
    begun, ping, rest = found.partition(b'event: ping\ndata: {"type":"ping"}\n\n')
    assert ping and b"message_start" in begun and b"content_block" not in begun and b"content_block" in rest


# Nothing that is sent ends the server

_text = st.text(max_size=20)
_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"text": _text},
    "thinking": {"thinking": _text},
    "tool_use": {"id": st.just("x"), "name": st.just("f"), "input": st.just({})},
    "tool_result": {"tool_use_id": st.just("x"), "content": _text},
}
_block = st.one_of(st.fixed_dictionaries({"type": st.just(kind)} | more) for kind, more in _BLOCKS.items())
_said = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": _text | st.lists(_block, max_size=3)}
)
_request = st.fixed_dictionaries(
    {"model": st.just("demo"), "messages": st.lists(_said, max_size=4), "max_tokens": st.integers(0, 4)},
    optional={
        "system": _text | st.lists(_block, max_size=2),
        "stream": st.booleans(),
        "thinking": st.sampled_from([{"type": "adaptive"}, {"type": "disabled"}, {}, None]),
        "stop_sequences": st.lists(_text, max_size=2),
        "tool_choice": st.sampled_from([{"type": "none"}, {"type": "any"}, 1]),
        "output_config": st.just({"format": {"type": "json_schema", "schema": {"type": "boolean"}}}),
    },
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([PATH, COUNT_PATH]), body=_request)
def test_any_request_has_an_answer(server: Server, path: str, body: Any) -> None:
    found = server.ask(path, body)
    if found.status != 200:
        assert found.status == 400 and found.json["error"]["type"] == "invalid_request_error", found.content
    elif found.headers["content-type"].startswith("text/event-stream"):
        assert events_of(found.content)[-1] == {"type": "message_stop"}
    else:
        assert path == COUNT_PATH or found.json["stop_reason"]
    assert not any("Traceback" in line for line in server.lines)


# Beside requests


def test_the_reference_has_every_field() -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    for path in (PATH, COUNT_PATH):
        assert f"`{path}`" in page
    of_api = page.partition(f"## `{PATH}`")[2]
    for name in (name for each in fields.count_fields(1)[:2] for name in each):
        assert f"`{name}`" in of_api, name
