"""`/v1/responses`, by OpenAI's client: what it makes of a reply, of calls of tools, and of what is refused."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from llama_npu2 import Llama
from llama_npu2.serve.openai.response_items import for_template
from llama_npu2.serve.openai.responses import _Output
from llama_npu2.text.replies import Kind
from tests.support.caller import ANSWER, ARGUMENTS
from tests.support.serving import Server

PATH = "/v1/responses"
ASK = "The capital of France is"
MESSAGES = [{"role": "user", "content": ASK}]
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "extra_body": {"seed": 11}}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    "strict": True,
}
CLOCK = {"type": "function", "name": "clock", "parameters": {"properties": {"zone": {"const": "UTC"}}}, "strict": None}
OF_CODEX = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}, {"type": "custom", "name": "x"}]


@pytest.fixture(scope="module")
def agent(calling: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0, timeout=60)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "input": ASK, "temperature": 0, **more}


def strictly(found: Any) -> None:
    """Each field is one of the client's types, which it does not check by itself."""
    kind = type(found)
    found.__class__.model_rebuild()
    kind.model_validate(found.to_dict(), strict=False)


def test_a_response_is_what_the_model_says_alone(client: openai.OpenAI, llm: Llama) -> None:
    alone = llm.generate(MESSAGES).whole()
    made = client.responses.create(**asked())
    strictly(made)
    assert made.output_text == alone.text and made.status == "completed" and made.error is None
    (message,) = made.output
    assert message.type == "message" and message.status == "completed" and message.id.startswith("msg_")
    assert made.usage and made.usage.input_tokens == len(llm.encode(MESSAGES))
    assert made.usage.output_tokens == len(alone.tokens) and made.usage.output_tokens_details.reasoning_tokens == 0
    again = client.responses.create(**asked(store=False, metadata={"a": "b"}, user="u", truncation="disabled"))
    assert again.usage and again.usage.input_tokens_details.cached_tokens == made.usage.input_tokens - 1
    assert again.id != made.id and again.metadata == {"a": "b"} and again.store is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("more", [{}, {"max_output_tokens": 1}, {"top_logprobs": 2}], ids=["whole", "cut", "logprobs"])
def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, llm: Llama, more: dict[str, Any]) -> None:
    whole = client.responses.create(**asked(**more) | SAMPLED)
    most = more.get("max_output_tokens", 2000)
    alone = llm.generate(MESSAGES, max_tokens=most, temperature=1.0, top_p=0.9, seed=11)
    assert whole.output_text == alone.text
    events = [*client.responses.create(**asked(**more) | SAMPLED, stream=True)]
    check_stream(events)
    ended = events[-1]
    assert ended.type == ("response.incomplete" if "max_output_tokens" in more else "response.completed")
    same = {"output", "usage", "incomplete_details", "status"}
    first, second = (json.loads(without_ids(found.to_dict(), same)) for found in (ended.response, whole))
    first["usage"].pop("input_tokens_details"), second["usage"].pop("input_tokens_details")
    assert first == second
    if "max_output_tokens" in more:
        assert whole.status == "incomplete" and whole.incomplete_details
        assert whole.incomplete_details.reason == "max_output_tokens" and whole.output[0].status == "incomplete"  # type: ignore[union-attr]
    if "top_logprobs" in more:
        logprobs = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
        expected = next(iter(llm.complete(MESSAGES, max_tokens=2000, temperature=1.0, top_p=0.9, seed=11, logprobs=2)))
        wanted = [each for each in expected.logprobs or [] if each.token not in llm.eos]
        assert [each.logprob for each in logprobs] == [each.logprob for each in wanted]
        deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
        assert [each.logprob for each in deltas] == [each.logprob for each in wanted]
        assert all(len(each.top_logprobs) == 2 for each in logprobs)


def without_ids(found: dict[str, Any], names: set[str]) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items() if name not in ("id", "call_id")}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return json.dumps({name: plain(found[name]) for name in names})


def check_stream(events: list[ResponseStreamEvent]) -> Response:
    """What holds for each stream: numbers, the order of events, and that deltas add up."""
    for event in events:
        strictly(event)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress" and events[0].response.output == []  # type: ignore[union-attr]
    items: dict[int, Any] = {}
    texts: dict[tuple[int, str], str] = {}
    opened: list[int] = []
    for event in events[2:-1]:
        at = event.output_index  # type: ignore[union-attr]
        if event.type == "response.output_item.added":
            assert at == len(items) and not opened
            items[at] = event.item
            opened.append(at)
            continue
        assert opened == [at]
        if event.type == "response.output_item.done":
            assert event.item.id == items[at].id and event.item.type == items[at].type
            items[at] = event.item
            opened.remove(at)
        else:
            assert event.item_id == items[at].id  # type: ignore[union-attr]
            if event.type.endswith(".delta"):
                kind = event.type.removesuffix(".delta")
                texts[at, kind] = texts.get((at, kind), "") + event.delta  # type: ignore[union-attr]
            elif event.type.endswith("arguments.done"):
                assert texts[at, event.type.removesuffix(".done")] == event.arguments  # type: ignore[union-attr]
            elif event.type.endswith("text.done"):
                assert texts[at, event.type.removesuffix(".done")] == event.text  # type: ignore[union-attr]
    ended: Response = events[-1].response  # type: ignore[union-attr]
    assert not opened and [*items.values()] == ended.output
    return ended


def test_the_clients_own_stream(client: openai.OpenAI, llm: Llama) -> None:
    with client.responses.stream(**asked()) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == llm.generate(MESSAGES).text


def test_instructions_and_items(client: openai.OpenAI, llm: Llama) -> None:
    items = [
        {"role": "developer", "content": "Answer in a word."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "The capital of"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "What?", "annotations": []}]},
        {"role": "user", "content": "The capital of Spain is"},
    ]
    plain = [
        {"role": "system", "content": "Be brief.\n\nAnswer in a word."},
        {"role": "user", "content": "The capital of"},
        {"role": "assistant", "content": "What?"},
        {"role": "user", "content": "The capital of Spain is"},
    ]
    made = client.responses.create(**asked(input=items, instructions="Be brief."))
    assert made.output_text == llm.generate(plain).text and made.instructions == "Be brief."
    assert made.usage and made.usage.input_tokens == len(llm.encode(plain))
    turn = [*items, *made.output, {"role": "user", "content": "And of Peru?"}]
    more = client.responses.create(**asked(input=turn))
    assert more.usage and more.usage.input_tokens_details.cached_tokens < more.usage.input_tokens


def test_a_probe_without_input_is_answered(server: Server) -> None:
    for probe in ({"input": []}, {"input": ""}, {}, {"input": [], "instructions": "You are Codex."}):
        found = server.ask(PATH, {"model": "demo", "max_output_tokens": 1, **probe})
        assert found.status == 200, found.json
        assert found.json["status"] == "incomplete" and found.json["usage"]["output_tokens"] == 1


class City(pydantic.BaseModel):
    size: Literal["small", "large"]
    founded: Literal[100, 200] | None


def test_structured_output(client: openai.OpenAI, llm: Llama) -> None:
    parsed = client.responses.parse(**asked(), text_format=City)
    assert isinstance(parsed.output_parsed, City)
    free = asked(text={"format": {"type": "json_object"}}, max_output_tokens=60)
    found = client.responses.create(**free | {"temperature": 1}, extra_body={"seed": 2})
    assert found.text and found.text.format and found.text.format.type == "json_object"
    assert found.output_text.startswith("{")


def test_a_conversation_with_a_tool(agent: openai.OpenAI) -> None:
    question = {"role": "user", "content": "How is the weather in Paris?"}
    asked = {"model": "caller", "temperature": 0, "max_output_tokens": 60}
    direct = agent.responses.create(**asked, input=[question])
    assert direct.output_text == ANSWER and direct.tools == []
    made = agent.responses.create(**asked, input=[question], tools=[WEATHER, CLOCK])
    strictly(made)
    (call,) = made.output
    assert call.type == "function_call" and call.name == "get_weather" and call.status == "completed"
    assert json.loads(call.arguments) == ARGUMENTS
    assert [tool.strict for tool in made.tools] == [False, False], "nothing makes a free call follow its parameters"  # type: ignore[union-attr]
    events = [*agent.responses.create(**asked, input=[question], tools=[WEATHER, CLOCK], stream=True)]
    ended = check_stream(events)
    assert without_ids(ended.to_dict(), {"output"}) == without_ids(made.to_dict(), {"output"})
    for output in ("sunny", [{"type": "input_text", "text": "sunny"}]):
        result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        told = agent.responses.create(**asked, input=[question, *made.output, result], tools=[WEATHER, CLOCK])
        assert told.output_text == ANSWER
    none = agent.responses.create(**asked, input=[question], tools=[WEATHER], tool_choice="none")
    assert none.output_text == ANSWER and len(none.tools) == 1


def test_tools_can_be_chosen(agent: openai.OpenAI) -> None:
    tools = [WEATHER, CLOCK]
    clock = {"type": "function", "name": "clock"}
    for choice, names in (
        ("required", {"get_weather", "clock"}),
        (clock, {"clock"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [clock]}, {"clock"}),
    ):
        made = agent.responses.create(
            model="caller", input="x", tools=tools, tool_choice=choice, max_output_tokens=300, extra_body={"seed": 1}
        )
        (call,) = made.output
        assert call.type == "function_call" and call.name in names, made
        assert made.tools[0].strict is True  # type: ignore[union-attr]
        assert "city" in call.arguments or call.name == "clock"


def test_tools_of_others_are_left_out_or_refused(calling: Server) -> None:
    body = {"model": "caller", "input": "x", "tools": [WEATHER, *OF_CODEX], "temperature": 0}
    for more in ({}, {"stream": True}):
        found = calling.ask(PATH, {**body, **more})
        assert found.status == 200 and found.headers["x-tools-left-out"] == "custom, namespace, web_search"
    assert [tool["name"] for tool in calling.ask(PATH, body).json["tools"]] == ["get_weather"]
    assert "x-tools-left-out" not in calling.ask(PATH, {**body, "tools": [WEATHER]}).headers
    found = calling.ask(PATH, {**body, "unsupported_tools": "refuse"})
    assert found.status == 400 and found.json["error"]["param"] == "tools[1].type"
    assert "web_search" in found.json["error"]["message"]


STORED = "nothing is stored"


@pytest.mark.parametrize(
    ("more", "field", "message"),
    [
        ({"store": True}, "store", STORED),
        ({"previous_response_id": "resp_1"}, "previous_response_id", STORED),
        ({"conversation": {"id": "c"}}, "conversation", STORED),
        ({"background": True}, "background", "waits"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", STORED),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "than text"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "one of system"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "other items"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "input[0].call_id", "no item"),
        ({"input": 7}, "input", "a string"),
        ({"input": "word " * 3000}, "input", "the context is 2048"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "no such field"),
        ({"tools": [{"type": "functoin", "name": "f"}]}, "tools[0].type", "one of function"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "reads no variable tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "cannot be chosen"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "no tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "other formats"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}}},
            "text.format",
            "obje",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "no such setting"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reads no variable"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "without a summary"),
        ({"include": ["file_search_call.results"]}, "include[0]", "one of"),
        ({"max_output_tokens": 0}, "max_output_tokens", "a whole number"),
        ({"truncation": "auto"}, "truncation", "refused"),
        ({"stream_options": {}}, "stream_options", "stream is not true"),
        ({"messages": []}, "messages", "no such field"),
        ({"n": 2}, "n", "no such field"),
    ],
)
def test_refusals(server: Server, more: dict[str, Any], field: str, message: str) -> None:
    found = server.ask(PATH, asked(**more))
    error = found.json["error"]
    assert (found.status, error["param"]) == (400, field) and message in error["message"], error


# Without a model


def test_what_the_model_said_at_a_time_is_one_message() -> None:
    def reasoning(text: str, **more: Any) -> dict[str, Any]:
        return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'}
    made = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    result = {"type": "function_call_output", "call_id": "a", "output": "y"}
    said = {"role": "assistant", "content": "Let me see."}
    user = {"role": "user", "content": "z"}
    assert for_template([user, reasoning("so"), said, call, call | {"call_id": "b"}, result, reasoning("now")], "") == [
        user,
        {
            "role": "assistant",
            "reasoning_content": "so",
            "content": "Let me see.",
            "tool_calls": [made, made | {"id": "b"}],
        },
        {"role": "tool", "name": "f", "tool_call_id": "a", "content": "y"},
        {"role": "assistant", "reasoning_content": "now", "content": ""},
    ]
    assert for_template([user, said, said, call, said], "") == [
        user,
        said,
        said | {"tool_calls": [made]},
        said,
    ]
    assert for_template([{"role": "developer", "content": "b"}, {"role": "system", "content": "c"}, user], "a") == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        user,
    ]
    summary = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "content": None}
    assert for_template([summary, said], "")[0]["reasoning_content"] == "s"


def test_reasoning_comes_as_an_item_of_its_own() -> None:
    output, events = _Output(), []
    for kind, text in ((Kind.REASONING, "so"), (Kind.REASONING, " so"), (Kind.TEXT, "Paris")):
        events += [*output.add(kind, text, [])]
    events += [*output.end("incomplete")]
    assert [name for name, _ in events] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
    ]
    thought, message = output.items
    assert thought["content"] == [{"type": "reasoning_text", "text": "so so"}] and thought["status"] == "completed"
    assert message["content"][0]["text"] == "Paris" and message["status"] == "incomplete"
    assert events[0][1]["item"]["content"] == [] and events[7][1]["output_index"] == 1
