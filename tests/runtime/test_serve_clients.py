"""Clients that people use, each with what it does beyond OpenAI's own: types, streams, tools, structure, errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import anthropic
import numpy as np
import openai
import pydantic
import pytest

from llama_npu2 import Llama, load
from tests.conftest import build
from tests.support.caller import ANSWER, ARGUMENTS
from tests.support.retrieval import write_embedder
from tests.support.serving import Server, serving

ASK = "The capital of France is"
INSTALL = "is not installed: pip install -e '.[clients]'"


class City(pydantic.BaseModel, extra="forbid"):
    """A city."""

    size: Literal["small", "large"]
    founded: Literal[100, 200] | None


class get_weather(pydantic.BaseModel):
    """Weather of a city."""

    city: Literal["Paris", "Rome"]
    unit: str = "°C"


# OpenAI and Anthropic: a reply goes back as the object of the client, as a dict, and with all fields, many of them null

DUMPS: dict[str, Callable[[pydantic.BaseModel], Any]] = {
    "object": lambda made: made,
    "dict": lambda made: made.to_dict(),  # type: ignore[attr-defined]
    "all fields": pydantic.BaseModel.model_dump,
}
PARAMETERS = get_weather.model_json_schema()


@pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS)
def test_a_message_goes_back_as_it_came(calling: Server, dump: Callable[[pydantic.BaseModel], Any]) -> None:
    client = openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
    said: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    made = client.chat.completions.create(model="caller", messages=said, tools=[tool], max_tokens=60).choices[0].message
    assert made.tool_calls
    said += [dump(made), {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "sun"}]
    made = client.chat.completions.create(model="caller", messages=said, tools=[tool], max_tokens=60).choices[0].message
    assert made.content == ANSWER
    # OpenAI's own servers send a list of annotations with every message.
    said += [dump(made.model_copy(update={"annotations": []})), said[0]]
    assert client.chat.completions.create(model="caller", messages=said, tools=[tool], max_tokens=60).choices


@pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS)
def test_items_and_blocks_go_back_as_they_came(calling: Server, dump: Callable[[pydantic.BaseModel], Any]) -> None:
    client = openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
    said: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    made = client.responses.create(model="caller", input=said, tools=[tool], max_output_tokens=60)
    (call,) = (item for item in made.output if item.type == "function_call")
    said += [*map(dump, made.output), {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    made = client.responses.create(model="caller", input=said, tools=[tool], max_output_tokens=60)
    assert made.output_text == ANSWER
    said += [*map(dump, made.output), said[0]]
    assert client.responses.create(model="caller", input=said, tools=[tool], max_output_tokens=60).output

    other = anthropic.Anthropic(base_url=calling.url, api_key="none", max_retries=0)
    block: Any = {"name": "get_weather", "input_schema": PARAMETERS}
    turns: list[Any] = [said[0]]
    answer = other.messages.create(model="caller", messages=turns, tools=[block], max_tokens=60)
    (use,) = (part for part in answer.content if part.type == "tool_use")
    turns += [{"role": "assistant", "content": [*map(dump, answer.content)]}]
    turns += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sun"}]}]
    answer = other.messages.create(model="caller", messages=turns, tools=[block], max_tokens=60)
    assert "".join(part.text for part in answer.content if part.type == "text") == ANSWER


# LangChain


def langchain(server: Server, model: str, **more: Any) -> Any:
    package = pytest.importorskip("langchain_openai", reason=f"langchain-openai {INSTALL}")
    given = {"temperature": 0, "max_retries": 0, "base_url": f"{server.url}/v1", "api_key": "none"}
    return package.ChatOpenAI(model=model, **given | more)


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_answers_and_streams(server: Server, llm: Llama, responses: bool) -> None:
    chat = langchain(server, "demo", use_responses_api=responses)
    alone = llm.generate([{"role": "user", "content": ASK}]).whole()
    made = chat.invoke(ASK)
    assert made.text == alone.text and made.usage_metadata["output_tokens"] == len(alone.tokens)
    chunks = [*chat.stream(ASK)]
    assert "".join(chunk.text for chunk in chunks) == alone.text and len(chunks) > 1
    said = chat.invoke([("system", "Be brief."), ("human", ASK)])
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    assert said.text == llm.generate(system).text


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_calls_a_tool_and_goes_on(calling: Server, responses: bool) -> None:
    chat = langchain(calling, "caller", use_responses_api=responses, max_tokens=60).bind_tools([get_weather])
    from langchain_core.messages import HumanMessage, ToolMessage

    said = [HumanMessage("How is the weather in Paris?")]
    made = chat.invoke(said)
    (call,) = made.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", ARGUMENTS)
    streamed = None
    for chunk in chat.stream(said):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed and [each["args"] for each in streamed.tool_calls] == [ARGUMENTS]
    told = chat.invoke([*said, made, ToolMessage("sunny", tool_call_id=call["id"])])
    assert told.text == ANSWER and not told.tool_calls


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_takes_structure(server: Server, responses: bool) -> None:
    chat = langchain(server, "demo", use_responses_api=responses)
    made = chat.with_structured_output(City, method="json_schema").invoke("A city.")
    assert isinstance(made, City)


def test_langchain_says_what_is_wrong(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="the context is 2048"):
        langchain(server, "demo").invoke("word " * 3000)
    with pytest.raises(openai.NotFoundError, match="there is no model other"):
        langchain(server, "other").invoke("x")


def test_langchain_embeds(artifacts: Path, tmp_path: Path) -> None:
    package = pytest.importorskip("langchain_openai", reason=f"langchain-openai {INSTALL}")
    write_embedder(tmp_path / "embedder")
    directory, texts = build(tmp_path / "embedder", artifacts), ["In China.", "Gravity"]
    with serving(directory) as running:
        embeddings = package.OpenAIEmbeddings(
            model="embedder", base_url=f"{running.url}/v1", api_key="none", check_embedding_ctx_length=False
        )
        found = embeddings.embed_documents(texts)
    with closing(load(directory)) as llm:
        np.testing.assert_array_equal(np.array(found, np.float32), llm.embed(texts))


# instructor


def structured(server: Server, mode: str) -> Any:
    package = pytest.importorskip("instructor", reason=f"instructor {INSTALL}")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return package.from_openai(client, mode=package.Mode[mode])


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_instructor_makes_objects(server: Server, calling: Server, mode: str) -> None:
    where, name = (server, "demo") if mode == "JSON_SCHEMA" else (calling, "caller")
    client = structured(where, mode)
    asked: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "A city."}], "max_retries": 0}
    made = client.chat.completions.create(**asked, response_model=City, max_tokens=200, temperature=0)
    assert isinstance(made, City)
    with pytest.raises(Exception, match="context"):
        long = {"role": "user", "content": "word " * 3000}
        client.chat.completions.create(**asked | {"messages": [long]}, response_model=City)


def test_instructor_streams_parts_of_an_object(server: Server) -> None:
    client = structured(server, "JSON_SCHEMA")
    said = [{"role": "user", "content": "A city."}]
    parts = [*client.chat.completions.create_partial(model="demo", messages=said, response_model=City, temperature=0)]
    assert City.model_validate(parts[-1].model_dump())
