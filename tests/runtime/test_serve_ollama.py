"""Ollama's API, by its own client: replies are those of the engine, and what is not supported is refused by name."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import ollama
import pydantic
import pytest

from llama_npu2 import Llama, load
from llama_npu2.serve.ollama import chat as chats
from llama_npu2.serve.ollama import common, embed, generate
from llama_npu2.serve.ollama import models as about_models
from tests.conftest import ROOT, build
from tests.support.caller import ANSWER, ARGUMENTS, THOUGHT
from tests.support.retrieval import write_embedder
from tests.support.serving import HASTY, Server, serving

ASK = [{"role": "user", "content": "The capital of France is"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def server(demo: Path, caller: Path) -> Iterator[Server]:
    """A hasty server of the demo model and of one that calls tools and thinks."""
    with serving(demo, others=[caller], before=HASTY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> ollama.Client:
    return ollama.Client(server.url)


# Replies


def test_a_chat_is_what_the_model_says_alone(client: ollama.Client, llm: Llama) -> None:
    (alone,) = llm.complete(ASK, max_tokens=50)
    made = client.chat("demo", ASK, options=GREEDY)
    assert (made.message.role, made.message.content, made.done_reason) == ("assistant", alone.text, "stop")
    assert made.model == "demo" and made.done and made.created_at and made.created_at.startswith("20")
    assert (made.prompt_eval_count, made.eval_count) == (len(llm.encode(ASK)), len(alone.tokens))
    parts = (made.prompt_eval_duration or 0) + (made.eval_duration or 0)
    assert 0 < parts <= (made.total_duration or 0) < 60e9 and 0 <= (made.load_duration or 0) < 1e9
    streamed = [*client.chat("demo:latest", ASK, stream=True, options=GREEDY)]
    assert "".join(part.message.content or "" for part in streamed) == alone.text
    assert [part.done for part in streamed] == [False] * (len(streamed) - 1) + [True] and len(streamed) > 2
    assert streamed[-1].eval_count == len(alone.tokens) and streamed[0].model == "demo:latest"


def test_streams_are_lines_and_the_default(server: Server) -> None:
    found = server.ask("/api/chat", {"model": "demo", "messages": ASK, "options": GREEDY})
    assert found.headers["content-type"] == "application/x-ndjson" and found.content.endswith(b"}\n")
    assert len([json.loads(each) for each in found.content.splitlines()]) > 2
    found = server.ask("/api/chat", {"model": "demo", "messages": ASK, "stream": False})
    assert found.headers["content-type"].startswith("application/json") and found.json["done"] is True


def test_a_prompt_goes_through_the_template_or_not(client: ollama.Client, llm: Llama) -> None:
    text = "Once upon a time"
    made = client.generate("demo", text, raw=True, options={"temperature": 0, "num_predict": 12})
    assert made.response == llm.generate(text, raw=True, max_tokens=12).text and made.done_reason == "length"
    system = [{"role": "system", "content": "Be brief."}, *ASK]
    made = client.generate("demo", ASK[0]["content"], system="Be brief.", options=GREEDY)
    assert made.response == llm.generate(system).text and made.prompt_eval_count == len(llm.encode(system))
    streamed = client.generate("demo", ASK[0]["content"], system="Be brief.", options=GREEDY, stream=True)
    assert "".join(part.response for part in streamed) == made.response


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"seed": 7}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 7}),
        (
            {"seed": 3, "temperature": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.02, "repeat_penalty": 1.3},
            {"seed": 3, "temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.3},
        ),
        (
            {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "num_thread": 1},
            {"presence_penalty": 1.5, "frequency_penalty": 0.5, "top_k": 40, "top_p": 0.9},
        ),
        ({"temperature": 0, "stop": ["little"], "num_ctx": 2048}, {"stop": ("little",)}),
    ],
    ids=range(4),
)
def test_every_option_does_what_it_does_in_python(
    client: ollama.Client, llm: Llama, options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    alone = llm.generate("Once upon a time", raw=True, max_tokens=16, **sampling).text
    made = client.generate("demo", "Once upon a time", raw=True, options={**options, "num_predict": 16})
    assert made.response == alone


def test_log_probabilities(client: ollama.Client, llm: Llama) -> None:
    (alone,) = llm.complete(ASK, logprobs=2)
    wanted = [each for each in alone.logprobs or [] if each.token not in llm.eos]
    made = client.chat("demo", ASK, options=GREEDY, logprobs=True, top_logprobs=2)
    streamed = client.chat("demo", ASK, options=GREEDY, logprobs=True, top_logprobs=2, stream=True)
    for found in (made.logprobs or [], [each for part in streamed for each in part.logprobs or []]):
        assert [each.logprob for each in found] == [each.logprob for each in wanted]
        assert [[top.logprob for top in each.top_logprobs or []] for each in found] == [
            [logprob for _, logprob in each.top] for each in wanted
        ]


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    old: bool


def test_replies_in_a_schema(client: ollama.Client) -> None:
    for seed in range(3):
        made = client.chat("demo", ASK, format=City.model_json_schema(), options={"seed": seed})
        assert City.model_validate_json(made.message.content or "")
    found = [
        client.generate("demo", "JSON:", format="json", options={"seed": seed, "num_predict": 80}) for seed in range(12)
    ]
    whole = [each for each in found if each.done_reason == "stop"]
    assert whole and all(isinstance(json.loads(each.response), dict) for each in whole)


def test_objects_have_no_other_properties_than_a_schema_names() -> None:
    named = {"properties": {"properties": {"type": "object"}, "a": {"properties": {}}}}
    closed = {"additionalProperties": False}
    inner = {"properties": {"type": "object"}, "a": {"properties": {}, **closed}}
    assert common.without_others(named) == {"properties": inner, **closed}
    within = {"anyOf": [named, True], "$defs": {"x": named}, "items": [named], "allOf": [named], "enum": [named]}
    once = {"properties": inner, **closed}
    wanted = {"anyOf": [once, True], "$defs": {"x": once}, "items": [once], "allOf": [named], "enum": [named]}
    assert common.without_others(within) == wanted
    for given in ({"properties": {}, "additionalProperties": True}, {"properties": {}, "$ref": "#/$defs/x"}):
        assert common.without_others(given) == given


def test_asyncio_clients(server: Server, llm: Llama) -> None:
    async def main() -> list[str | None]:
        client = ollama.AsyncClient(server.url)
        replies = [client.chat("demo", ASK, options=GREEDY) for _ in range(3)]
        return [(await reply).message.content for reply in replies]

    assert asyncio.run(main()) == [llm.generate(ASK).text] * 3


# Tools and thinking


def get_weather(city: str, unit: str = "°C") -> str:
    """Return the weather.

    Args:
        city: where
        unit: of temperatures
    """
    assert {"city": city, "unit": unit} == ARGUMENTS
    return "sunny"


WEATHER = [{"role": "user", "content": "How is the weather in Paris?"}]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("named", [True, False])
def test_a_conversation_with_a_tool(client: ollama.Client, streamed: bool, named: bool) -> None:
    messages: list[Any] = [*WEATHER]
    asked: dict[str, Any] = {"tools": [get_weather], "think": False, "options": GREEDY}
    if streamed:
        parts = [*client.chat("caller", messages, stream=True, **asked)]
        assert parts[-1].done_reason == "stop" and not any(part.message.content for part in parts)
        (made,) = [part for part in parts if part.message.tool_calls]
    else:
        made = client.chat("caller", messages, **asked)
    (call,) = made.message.tool_calls or []
    assert call.function.name == "get_weather" and call.function.arguments == ARGUMENTS
    result = {"role": "tool", "content": get_weather(**call.function.arguments)}
    messages += [made.message, result | ({"tool_name": "get_weather"} if named else {})]
    told = client.chat("caller", messages, **asked)
    assert told.message.content == ANSWER and not told.message.tool_calls


def test_results_find_their_calls() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f")]
    said: list[dict[str, Any]] = [{"role": "Assistant", "content": "", "tool_calls": calls}]
    results = [{"tool_name": "g"}, {}, {"name": "f", "images": []}]
    found = chats.for_template([*said, *({"role": "tool", "content": "x", **each} for each in results)])
    ids = [call["id"] for call in found[0]["tool_calls"]]
    assert len({*ids}) == 3 and all(len(each) == 9 and each.isalnum() for each in ids)
    assert [(each["name"], each["tool_call_id"]) for each in found[1:]] == [("g", ids[1]), ("f", ids[0]), ("f", ids[2])]
    with pytest.raises(common.RequestError, match="no message before"):
        chats.for_template([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(("think", "thought"), [(True, THOUGHT), (None, THOUGHT), ("high", THOUGHT), (False, None)])
def test_thinking(client: ollama.Client, think: Any, thought: str | None) -> None:
    made = client.chat("caller", WEATHER, think=think, options=GREEDY)
    assert (made.message.thinking, made.message.content) == (thought, ANSWER)
    streamed = [*client.chat("caller", WEATHER, think=think, options=GREEDY, stream=True)]
    assert "".join(part.message.thinking or "" for part in streamed) == (thought or "")
    assert "".join(part.message.content or "" for part in streamed) == ANSWER
    generated = client.generate("caller", WEATHER[0]["content"], think=think, options=GREEDY)
    assert (generated.thinking, generated.response) == (thought, ANSWER)


# Models


def test_models(server: Server, client: ollama.Client, demo: Path) -> None:
    listed = client.list().models
    assert [each.model for each in listed] == ["demo:latest", "caller:latest"]
    assert listed[0].details and listed[0].details.parameter_size == "3.7M"
    assert listed[0].details.quantization_level == "bf16" and listed[0].size and listed[0].modified_at
    shown = client.show("demo")
    assert shown.modelinfo and shown.modelinfo["llama.context_length"] == 2048
    assert shown.template and "start_header_id" in shown.template and shown.capabilities == ["completion"]
    assert client.show("caller:latest").capabilities == ["completion", "tools", "thinking"]
    assert server.ask("/api/show", {"name": "demo"}).status == 200
    assert server.ask("/api/version").json["version"].count(".") == 2
    for method, path in (("HEAD", "/"), ("GET", "/"), ("HEAD", "/api/tags"), ("HEAD", "/api/version")):
        assert server.ask(path, method=method).status == 200
    assert server.ask("/").content == b"Ollama is running"


def test_models_are_loaded_and_unloaded_by_requests(demo: Path, caller: Path) -> None:
    with serving(demo, others=[caller]) as running:
        client = ollama.Client(running.url)

        def loaded() -> dict[str, float]:
            found = client.ps().models
            assert all(each.size and each.context_length and each.digest for each in found)
            return {each.model or "": each.expires_at.timestamp() for each in found if each.expires_at}

        def waited(*names: str) -> None:
            for _ in range(400):
                if {*loaded()} == {*names}:
                    return
            raise AssertionError(loaded())

        waited("demo:latest")
        made = client.generate("caller", keep_alive="10m")
        assert (made.response, made.done, made.done_reason) == ("", True, "load")
        waited("demo:latest", "caller:latest")
        assert 290 < loaded()["caller:latest"] - loaded()["demo:latest"] < 310
        assert client.chat("demo", [], keep_alive=0).done_reason == "unload"
        waited("caller:latest")
        assert client.chat("demo", ASK, keep_alive=-1, options=GREEDY).message.content
        assert loaded()["demo:latest"] > loaded()["caller:latest"] + 1e8
        client.chat("caller", WEATHER, keep_alive="0s", options=GREEDY)
        waited("demo:latest")


@pytest.mark.parametrize(
    "change",
    [
        lambda client: client.pull("x"),
        lambda client: client.push("x"),
        lambda client: client.create("x", from_="demo"),
        lambda client: client.copy("demo", "x"),
        lambda client: client.delete("demo"),
    ],
)
def test_models_are_not_changed(client: ollama.Client, change: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="given to the server when it starts") as raised:
        change(client)
    assert raised.value.status_code == 501


# Embeddings


def test_embeddings(artifacts: Path, tmp_path: Path) -> None:
    write_embedder(checkpoint := tmp_path / "embedder")
    directory = build(checkpoint, artifacts)
    texts = ["In China.", "naïve <|im_end|> text"]
    with closing(load(directory)) as llm:
        alone, short = llm.embed(texts).tolist(), llm.embed(texts[0], 8).tolist()
        tokens = sum(len(llm.encode(text, raw=True)) for text in texts)
    with serving(directory) as running:
        client = ollama.Client(running.url)
        made = client.embed("embedder", texts)
        assert made.embeddings == alone and made.prompt_eval_count == tokens and made.total_duration
        assert client.embed("embedder:latest", texts[0], dimensions=8, keep_alive="5m").embeddings == short
        assert client.embeddings("embedder", texts[1]).embedding == alone[1]
        assert client.show("embedder").capabilities == ["embedding"]
        assert client.embed("embedder", "", keep_alive=0).embeddings == []
        assert client.embeddings("embedder", "").embedding == []
        for body, message in (
            ({"input": ["x", 1]}, "input[1]"),
            ({"input": "x", "truncate": True}, "texts are not cut"),
            ({"input": "x", "dimensions": 10**6}, "choose 1 to"),
            ({"input": ["x", "word " * 9000]}, "tokens, the context is"),
        ):
            found = running.ask("/api/embed", {"model": "embedder", **body})
            assert found.status == 400 and message in found.json["error"]
        with pytest.raises(ollama.ResponseError, match="makes embeddings and writes no text"):
            client.chat("embedder", ASK)


def test_other_models_make_no_embeddings(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="no embedding model"):
        client.embed("demo", "x")


# What is refused


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": ASK, **more}


def optional(**options: Any) -> dict[str, Any]:
    return chat(options=options)


def prompt(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "x", **more}


TOOL = {"type": "function", "function": {"name": "f"}}
CHAT, GENERATE = "/api/chat", "/api/generate"
REFUSED: list[tuple[str, Any, int, str]] = [
    (CHAT, [], 400, "an object"),
    (CHAT, {}, 400, "an object with model"),
    (CHAT, chat(model="gpt-5"), 404, "there is no model gpt-5: one of demo"),
    (CHAT, chat(model=""), 400, "model ="),
    (CHAT, chat(temperature=1), 400, "temperature = 1 must be left out: there is no such field"),
    (CHAT, chat(messages="x"), 400, "messages"),
    (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), 400, "messages[0].role"),
    (CHAT, chat(messages=[{"role": "user", "content": "x", "images": ["eA=="]}]), 400, "images"),
    (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), 400, "messages[0]: no message before"),
    (CHAT, chat(tools=[TOOL]), 400, "reads no variable tools"),
    (CHAT, chat(tools=[{"type": "x", "function": {"name": "f"}}]), 400, "tools[0].type"),
    (CHAT, chat(think=True), 400, '"demo" does not support thinking'),
    (CHAT, chat(think="much"), 400, "one of low, medium, high, max"),
    (CHAT, chat(format="xml"), 400, "a JSON schema"),
    (CHAT, chat(format={"type": "objekt"}), 400, "Invalid type: objekt"),
    (CHAT, chat(keep_alive="soon"), 400, "keep_alive"),
    (CHAT, chat(keep_alive=True), 400, "keep_alive"),
    (CHAT, chat(truncate=True), 400, "prompts are not cut"),
    (CHAT, chat(top_logprobs=2), 400, "logprobs is not true"),
    (CHAT, optional(num_ctx=4096), 400, "num_ctx must be at most 2048"),
    (CHAT, optional(temperature=-1), 400, "options.temperature"),
    (CHAT, optional(temprature=1), 400, "did you mean temperature?"),
    (CHAT, optional(mirostat=1), 400, "options.mirostat"),
    (CHAT, optional(repeat_last_n=64), 400, "options.repeat_last_n"),
    (CHAT, optional(typical_p=0.5), 400, "options.typical_p"),
    (CHAT, chat(messages=[{"role": "user", "content": "word " * 3000}]), 400, "the context is 2048"),
    (GENERATE, prompt(template="{{ .Prompt }}"), 400, "template"),
    (GENERATE, prompt(suffix="x"), 400, "suffix"),
    (GENERATE, prompt(context=[1]), 400, "send the messages to /api/chat"),
    (GENERATE, prompt(images=["eA=="]), 400, "images"),
    (GENERATE, prompt(raw=True, system="x"), 400, 'system = "x" must be "" or left out: raw is true'),
    ("/api/show", {}, 400, "must be an object with model"),
    ("/api/show", {"model": "nope"}, 404, "no model nope"),
    ("/api/nothing", {}, 404, "no such path"),
    (CHAT, b"{", 400, "not valid JSON"),
    (CHAT, None, 405, "does not take GET"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_refusals(server: Server, path: str, body: Any, status: int, message: str) -> None:
    found = server.ask(path, body)
    assert found.status == status and [*found.json] == ["error"]
    assert message in found.json["error"] and "\n" not in found.json["error"]


def test_the_client_sends_texts_that_are_empty(client: ollama.Client) -> None:
    """It leaves them out."""
    messages = [*ASK, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}, *ASK]
    assert client.chat("demo", messages, options={"num_predict": 1}).message.role == "assistant"


def test_the_client_raises_what_is_wrong(client: ollama.Client) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="there is no model nope") as raised:
            [*client.chat("nope", ASK, stream=stream)]  # type: ignore[call-overload]
        assert raised.value.status_code == 404


def test_what_clients_send_for_nothing_is_taken(server: Server, llm: Llama) -> None:
    nothing = {"suffix": "", "system": "", "template": "", "context": [], "images": [], "format": "", "options": None}
    asked = prompt(prompt="The capital of France is", stream=False, raw=False, keep_alive=None, think=None, **nothing)
    assert server.ask(GENERATE, asked).status == 200
    thoughtless = server.ask(CHAT, chat(think=False, stream=False, options={"temperature": 0, "num_predict": -1}))
    assert thoughtless.json["message"] == {"role": "assistant", "content": llm.generate(ASK).text}


# Other clients


def test_open_webui_asks_for_titles_and_tags_beside_a_chat(server: Server, llm: Llama) -> None:
    """As it asks by either API, at the same time."""
    task = [{"role": "user", "content": "### Task:\nGenerate a concise, 3-5 word title.\n### Chat History:\nUSER: Hi"}]
    schema = {"type": "object", "properties": {"title": {"enum": ["Capitals", "France"]}}, "required": ["title"]}
    asked = [
        (CHAT, chat(stream=True, options={"temperature": 0, "num_ctx": 2048})),
        (CHAT, {"model": "demo:latest", "messages": task, "stream": False, "options": {"num_predict": 30}}),
        (CHAT, {"model": "demo", "messages": task, "stream": False, "format": schema, "options": {"seed": 1}}),
        ("/v1/chat/completions", {"model": "demo", "messages": ASK, "stream": True, "temperature": 0}),
        ("/v1/chat/completions", {"model": "demo", "messages": task, "stream": False, "max_completion_tokens": 30}),
    ]
    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(lambda each: server.ask(*each), asked * 2)]
        assert all(each.status == 200 for each in found)
        tags = [*threads.map(lambda _: server.ask("/api/tags").status, range(4))]
    text = "".join(json.loads(each)["message"]["content"] for each in found[0].content.splitlines())
    assert text == llm.generate(ASK).text and tags == [200] * 4
    assert json.loads(found[2].json["message"]["content"])["title"] in ("Capitals", "France")


def test_a_stream_says_that_it_is_alive_in_lines_that_say_nothing(server: Server) -> None:
    """Clients take each line as JSON, so that none may be a comment or empty."""
    long = "".join(f"{at} horses and {at * 7} dogs. " for at in range(60))
    body = json.dumps(prompt(prompt=long, raw=True, options={"num_predict": 2})).encode()
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
    lines = [json.loads(each) for each in found.split(b"\r\n") if each.startswith(b"{")]
    assert lines[0]["response"] == "" and lines[0]["done"] is False and lines[-1]["done"] is True
    assert ollama.GenerateResponse(**lines[0]).response == ""


@pytest.mark.parametrize("api", [chats, generate, embed, about_models])
def test_the_reference_has_every_field(api: Any) -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    for path in (route.path for route in api.ROUTES):
        assert f"{path}`" in page, path
    for name in [*(name for fields in api.fields(1)[:2] for name in fields), *common.OPTIONS]:
        assert f"`{name}`" in page, name


def test_after_all_of_that_the_server_answers_as_before(server: Server, client: ollama.Client, llm: Llama) -> None:
    assert client.chat("demo", ASK, options=GREEDY).message.content == llm.generate(ASK).text
    assert not any("Traceback" in line for line in server.lines)
