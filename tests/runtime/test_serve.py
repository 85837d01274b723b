"""The server: its replies are those of the engine, whatever is asked beside them, and nothing that is sent ends it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from llama_npu2 import Llama, load
from llama_npu2.options import Sampling
from llama_npu2.serve import events, rerank
from llama_npu2.serve.failures import GoneError, RequestError
from llama_npu2.serve.keys import Keys
from llama_npu2.serve.models import Keeping, Models
from llama_npu2.serve.openai import chat as openai_chat
from llama_npu2.serve.openai import completions as openai_completions
from llama_npu2.serve.openai import embeddings, responses
from llama_npu2.serve.replies import Replies
from llama_npu2.serve.tokens import Pieces
from llama_npu2.text.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.support import forked
from tests.support.serving import HASTY, Server, serving, wait_for

ASK = [{"role": "user", "content": "The capital of France is"}]
ON_AND_ON = {"logit_bias": {"2039": -100, "2047": -100}, "seed": 3}
"""Replies that end by their length alone."""
SAMPLED = {"temperature": 1.0, "seed": 11, "top_p": 0.9}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": ASK, "temperature": 0, **more}


def formatted(schema: Any, **more: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, **more)


def raw(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "Once upon a time", "temperature": 0, **more}


# The API, by its own client


def test_models(client: openai.OpenAI, llm: Llama) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.context_length) == ("demo", "model", llm.context_length)  # type: ignore[attr-defined]
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError, match="there is no model nope: one of demo"):
        client.models.retrieve("nope")


def test_a_chat_is_what_the_model_says_alone(client: openai.OpenAI, llm: Llama) -> None:
    (alone,) = llm.complete(ASK, max_tokens=50)
    made = client.chat.completions.create(**chat())
    (choice,) = made.choices
    assert choice.message.content == alone.text and choice.finish_reason == "stop"
    assert made.usage and made.usage.completion_tokens == len(alone.tokens)
    assert made.usage.prompt_tokens == len(llm.encode(ASK))
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    again = client.chat.completions.create(**chat())
    assert again.id != made.id and again.system_fingerprint == made.system_fingerprint
    assert again.usage and again.usage.prompt_tokens_details
    assert again.usage.prompt_tokens_details.cached_tokens == made.usage.prompt_tokens - 1


def test_a_conversation_has_all_roles_and_parts_of_text(client: openai.OpenAI, llm: Llama) -> None:
    said = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "The capital of"}, {"type": "text", "text": "France is"}],
        },
        {"role": "assistant", "content": "Paris.", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "The capital of Spain is", "name": "x"},
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The capital of\nFrance is"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "The capital of Spain is"},
    ]
    made = client.chat.completions.create(**chat(messages=said))
    assert made.usage and made.usage.prompt_tokens == len(llm.encode(plain))
    assert made.choices[0].message.content == llm.generate(plain).text


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, llm: Llama, n: int) -> None:
    asked = chat(n=n, max_tokens=20, logprobs=True, top_logprobs=3) | SAMPLED
    alone = [*llm.complete(ASK, n=n, max_tokens=20, logprobs=3, **SAMPLED)]
    whole = client.chat.completions.create(**asked)
    texts, reasons, logprobs, usage = [""] * n, [""] * n, [[] for _ in range(n)], None  # type: ignore[var-annotated]
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
            logprobs[choice.index] += (choice.logprobs.content or []) if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices] == [each.text for each in alone]
    assert reasons == [choice.finish_reason for choice in whole.choices] == [each.finish_reason for each in alone]
    assert usage and whole.usage and usage.completion_tokens == sum(len(each.tokens) for each in alone)
    for streamed, choice, wanted in zip(logprobs, whole.choices, alone, strict=True):
        assert choice.logprobs and streamed == choice.logprobs.content
        expected = [each for each in wanted.logprobs or [] if each.token not in llm.eos]
        assert [each.logprob for each in streamed] == [each.logprob for each in expected]
        assert [[top.logprob for top in each.top_logprobs] for each in streamed] == [
            [logprob for _, logprob in each.top] for each in expected
        ]
        assert b"".join(bytes(each.bytes) for each in streamed).decode() == wanted.text


def test_a_completion_is_what_the_model_says_alone(client: openai.OpenAI, llm: Llama) -> None:
    (alone,) = llm.complete("Once upon a time", raw=True, max_tokens=16, logprobs=2)
    made = client.completions.create(**raw(logprobs=2))
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason) == (alone.text, alone.finish_reason)
    assert choice.logprobs and choice.logprobs.tokens and choice.logprobs.text_offset
    assert "".join(choice.logprobs.tokens) == alone.text
    assert choice.logprobs.text_offset == [*accumulate(map(len, choice.logprobs.tokens[:-1]), initial=0)]
    assert choice.logprobs.token_logprobs == [each.logprob for each in alone.logprobs or []]
    streamed = [*client.completions.create(**raw(logprobs=2), stream=True)]
    assert "".join(chunk.choices[0].text for chunk in streamed) == alone.text
    offsets = [at for chunk in streamed if (found := chunk.choices[0].logprobs) for at in found.text_offset or []]
    assert offsets == choice.logprobs.text_offset


def test_prompts_of_a_completion_may_be_several_and_tokens(client: openai.OpenAI, llm: Llama) -> None:
    texts = ["The capital of France is", "The capital of Spain is"]
    ids = [llm.encode(text, raw=True) for text in texts]
    alone = [llm.generate(text, raw=True, max_tokens=16).text for text in texts]
    for prompt, wanted in ((texts, alone), (ids, alone), (ids[1], alone[1:]), (texts[0], alone[:1])):
        made = client.completions.create(**raw(prompt=prompt))
        assert [choice.text for choice in made.choices] == wanted
        assert made.usage and made.usage.prompt_tokens == sum(map(len, ids if len(wanted) == 2 else ids[:1]))
    made = client.completions.create(**raw(prompt=texts, n=2, echo=True))
    assert [choice.text for choice in made.choices] == [
        text + answer for text, answer in zip(texts, alone, strict=True) for _ in range(2)
    ]
    echoed = client.completions.create(**raw(prompt=ids[0], echo=True), stream=True)
    decoded = llm.tokenizer.decode(ids[0])
    assert "".join(chunk.choices[0].text for chunk in echoed) == decoded + alone[0]


def test_where_a_reply_ends(client: openai.OpenAI, llm: Llama) -> None:
    cut = client.chat.completions.create(**chat(max_completion_tokens=1))
    assert cut.choices[0].finish_reason == "length" and cut.usage and cut.usage.completion_tokens == 1
    whole = llm.generate("Once upon a time", raw=True, max_tokens=40).text
    word = whole.split()[4]
    for stop in (word, ["zzz", word]):
        made = client.completions.create(**raw(stop=stop, max_tokens=40)).choices[0]
        assert (made.text, made.finish_reason) == (whole[: whole.index(word)], "stop")
    full = client.completions.create(**raw(max_tokens=10**6, prompt=[5] * 2040), extra_body=ON_AND_ON)
    assert full.choices[0].finish_reason == "length" and full.usage and full.usage.completion_tokens == 9


class City(pydantic.BaseModel):
    name: Annotated[str, pydantic.StringConstraints(max_length=8)]
    size: Literal["small", "large"]
    founded: Annotated[int, pydantic.Field(ge=-2000, le=2030)] | None


def test_replies_in_a_schema(client: openai.OpenAI, llm: Llama) -> None:
    made = client.chat.completions.parse(**chat(n=2) | SAMPLED, response_format=City)
    for choice in made.choices:
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, City)
    objects = chat(response_format={"type": "json_object"}, max_tokens=60, n=20) | SAMPLED
    whole = [each for each in client.chat.completions.create(**objects).choices if each.finish_reason == "stop"]
    assert whole and all(isinstance(json.loads(each.message.content or ""), dict) for each in whole)
    asked = {"schema": {"enum": [["yes"], ["no"]]}} | SAMPLED
    alone = llm.generate(ASK, **asked).text
    once = client.chat.completions.create(**formatted(asked["schema"]) | SAMPLED)
    assert once.choices[0].message.content == alone and json.loads(alone) in (["yes"], ["no"])
    streamed = client.chat.completions.create(**formatted(asked["schema"], stream=True) | SAMPLED)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == alone
    cut = client.chat.completions.create(**formatted({"type": "string", "minLength": 500}), max_tokens=5)
    assert cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.5, "temperature": 0.7, "seed": 5},
        {"logit_bias": {"300": 7.5, "12": -100}, "seed": 2, "temperature": 1.0},
        {"repetition_penalty": 1.3, "top_k": 20, "min_p": 0.05, "temperature": 1.3, "seed": 9},
        {"seed": -1, "temperature": 1.0, "top_p": 0},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_every_setting_does_what_it_does_in_python(server: Server, llm: Llama, asked: dict[str, Any]) -> None:
    given = asked | ({"seed": 2**64 - 1, "top_p": 1e-300} if asked.get("seed") == -1 else {})
    alone = llm.generate("Once upon a time", raw=True, max_tokens=16, **given).text
    assert server.ask("/v1/completions", raw(**asked)).json["choices"][0]["text"] == alone


def test_variables_of_the_template_that_it_does_not_read_are_refused(server: Server) -> None:
    found = server.ask("/v1/chat/completions", chat(chat_template_kwargs={"enable_thinking": False}))
    assert found.status == 400 and "enable_thinking" in found.json["error"]["message"]
    assert server.ask("/v1/chat/completions", chat(reasoning_effort="low")).status == 400


def test_many_clients_get_what_each_gets_alone(client: openai.OpenAI, llm: Llama) -> None:
    prompts = [f"The capital of {name} is" for name in ("France", "Spain", "Peru", "Japan", "Kenya", "Norway")] * 4
    alone = {text: llm.generate(text, raw=True, max_tokens=12).text for text in set(prompts)}

    def said(text: str) -> str:
        chunks = client.completions.create(**raw(prompt=text, max_tokens=12), stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(12) as threads:
        assert [*threads.map(said, prompts)] == [alone[text] for text in prompts]


def test_asyncio_clients(server: Server, llm: Llama) -> None:
    async def main() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            replies = (client.chat.completions.create(**chat()) for _ in range(4))
            return [made.choices[0].message.content for made in await asyncio.gather(*replies)]

    assert asyncio.run(main()) == [llm.generate(ASK).text] * 4


# Beside replies


def test_tokens_of_a_text_and_back(server: Server, llm: Llama) -> None:
    text = "Paris \u65e5<|eot_id|>"
    ids = server.ask("/tokenize", {"content": text}).json["tokens"]
    assert ids == llm.tokenizer.encode(text, special_tokens=False)
    assert server.ask("/detokenize", {"tokens": ids, "model": "demo"}).json == {"content": text}
    begun = server.ask("/tokenize", {"content": text, "add_special": True, "with_pieces": True}).json["tokens"]
    assert [each["id"] for each in begun] == llm.tokenizer.encode(text, special_tokens=True)
    pieces = [each["piece"] for each in begun]
    assert b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces[-len(ids) :]) == (
        text.encode()
    )
    assert server.ask("/tokenize", {"content": ""}).json == {"tokens": []}
    for path, body, field in (
        ("/tokenize", {"content": 1}, "content"),
        ("/tokenize", {"content": "x", "parse_special": False}, "parse_special"),
        ("/tokenize", {"content": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [2048]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ):
        found = server.ask(path, body)
        assert found.status in (400, 404) and found.json["error"]["param"] == field


def test_properties(server: Server, llm: Llama) -> None:
    found = server.ask("/props").json
    assert found["default_generation_settings"] == {"n_ctx": llm.context_length} and found["total_slots"] == 64


def measured(server: Server) -> dict[str, float]:
    found = server.ask("/metrics")
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {each.name: each for each in text_string_to_metric_families(found.content.decode())}
    assert all(each.documentation.endswith(".") and each.type != "unknown" for each in families.values())
    samples = [sample for each in families.values() for sample in each.samples]
    assert all(sample.labels.pop("model") == "demo" for sample in samples)
    return {sample.name + sample.labels.get("le", ""): sample.value for sample in samples}


def test_metrics(server: Server) -> None:
    asked = raw(max_tokens=7, prompt="Once upon a time there was a king who had a castle and a horse.")
    server.ask(RAW, asked)
    before = measured(server)
    used = server.ask(RAW, asked).json["usage"]
    now = measured(server)
    grown = {name.removeprefix("llama_npu2_"): now[name] - before[name] for name in now}
    assert grown["generated_tokens_total"] == 7 and grown["replies_total"] == 1
    assert grown["cached_tokens_total"] == used["prompt_tokens_details"]["cached_tokens"] > 0
    assert grown["cached_tokens_total"] + grown["prompt_tokens_total"] == used["prompt_tokens"]
    assert 0 < grown["engine_steps_total"] <= 7
    for name in ("first_token_seconds", "each_token_seconds"):
        assert grown[f"{name}_count"] == grown[f"{name}_bucket+Inf"] == 1 and grown[f"{name}_sum"] > 0
    assert now["llama_npu2_replies_under_way"] == 0 and now["llama_npu2_replies_most"] == 64


# What is refused

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
HIGHER = "a" * 5000

REFUSED: list[tuple[str, Any, int, str | None, str]] = [
    (CHAT, [], 400, "", "an object"),
    (CHAT, {}, 400, "", "the body must be an object with messages"),
    (CHAT, {"model": "demo"}, 400, "", "with messages"),
    (CHAT, chat(model="gpt-5"), 404, "model", "no model gpt-5"),
    (CHAT, chat(model=7), 400, "model", "a string"),
    (CHAT, chat(model=""), 400, "model", "not empty"),
    (CHAT, chat(messages=[]), 400, "messages", "a list"),
    (CHAT, chat(messages="hello"), 400, "messages", "a list"),
    (CHAT, chat(messages=[7]), 400, "messages[0]", "an object"),
    (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), 400, "messages[0].role", "other roles"),
    (CHAT, chat(messages=[{"role": ["user"], "content": "x"}]), 400, "messages[0].role", "one of"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0]", "with content"),
    (CHAT, chat(messages=[{"role": "user", "content": None}]), 400, "messages[0].content", "a string"),
    (CHAT, chat(messages=[{"role": "user", "content": []}]), 400, "messages[0].content", "a list of 1"),
    (CHAT, chat(messages=[{"role": "user", "content": "x", "mood": 1}]), 400, "messages[0].mood", "no such field"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages[0].content[0].type",
        "other parts than text",
    ),
    (CHAT, chat(temprature=1), 400, "temprature", "did you mean temperature?"),
    (CHAT, chat(temperature="hot"), 400, "temperature", "a number from 0 to 2"),
    (CHAT, chat(temperature=2.1), 400, "temperature", "a number from 0 to 2"),
    (CHAT, chat(temperature=10**400), 400, "temperature", "a number from 0 to 2"),
    (CHAT, chat(temperature=True), 400, "temperature", "a number"),
    (CHAT, chat(top_p=-0.1), 400, "top_p", "a number from 0 to 1"),
    (CHAT, chat(n=0), 400, "n", "a whole number"),
    (CHAT, chat(n=1.5), 400, "n", "a whole number"),
    (CHAT, chat(n=100), 400, None, "at most 64"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "a whole number"),
    (CHAT, chat(max_completion_tokens=-5), 400, "max_completion_tokens", "a whole number"),
    (CHAT, chat(stop=[""]), 400, "stop[0]", "1 to 256 characters"),
    (CHAT, chat(stop=["x"] * 17), 400, "stop", "a list of 0 to 16"),
    (CHAT, chat(stop="x" * 257), 400, "stop", "characters"),
    (CHAT, chat(seed="x"), 400, "seed", "a whole number"),
    (CHAT, chat(logit_bias={"2048": 1}), 400, "logit_bias.2048", "below 2048"),
    (CHAT, chat(logit_bias={"-1": 1}), 400, "logit_bias.-1", "ids of tokens"),
    (CHAT, chat(logit_bias={"1": 101}), 400, "logit_bias.1", "from -100 to 100"),
    (CHAT, chat(logit_bias=[1]), 400, "logit_bias", "an object"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs", "logprobs is not true"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "from 0 to 20"),
    (CHAT, chat(stream="yes"), 400, "stream", "true or false"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "stream is not true"),
    (CHAT, chat(stream=True, stream_options={"x": 1}), 400, "stream_options.x", "no such field"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools", "reads no variable tools"),
    (CHAT, chat(functions=[]), 400, "functions", "they are tools now"),
    (CHAT, chat(reasoning_effort="low"), 400, "reasoning_effort", "reads no variable"),
    (CHAT, chat(reasoning={"effort": "low"}), 400, "reasoning.effort", "reads no variable"),
    (CHAT, chat(reasoning={"effort": "low"}, reasoning_effort="low"), 400, "reasoning", "there is reasoning_effort"),
    (CHAT, chat(reasoning={"max_tokens": 5}), 400, "reasoning.max_tokens", "no such field"),
    (CHAT, chat(thinking={"type": "adaptive"}), 400, "thinking.type", "one of enabled, disabled"),
    (CHAT, chat(chat_template_kwargs={"x": 1}), 400, "chat_template_kwargs.x", "reads no variable x"),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type", "other formats"),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format", "with json_schema"),
    (CHAT, formatted([1]), 400, "response_format.json_schema.schema", "a JSON schema"),
    (CHAT, formatted({"type": "objekt"}), 400, "response_format", "Invalid type: objekt"),
    (CHAT, formatted({"$ref": "http://example.com/x"}), 400, "response_format", "does not fetch"),
    (CHAT, formatted({"x-guidance": {"lenient": True}, "uniqueItems": True}), 400, "response_format", "uniqueItems"),
    (CHAT, formatted(False), 400, "response_format", "cannot be followed"),
    (CHAT, chat(store=True), 400, "store", "nothing is stored"),
    (CHAT, chat(modalities=["text", "audio"]), 400, "modalities", "text alone"),
    (CHAT, chat(prediction={}), 400, "prediction", "not supported"),
    (CHAT, chat(metadata={"a": 1}), 400, "metadata.a", "a string"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs.messages", "no variable"),
    (CHAT, chat(chat_template_kwargs={"reply": False}), 400, "chat_template_kwargs.reply", "no variable"),
    (CHAT, chat(chat_template_kwargs={"self": 1}), 400, "chat_template_kwargs.self", "reads no variable self"),
    (CHAT, chat(chat_template_kwargs={"a b": 1}), 400, "chat_template_kwargs", "a name"),
    (CHAT, chat(messages=[{"role": "user", "content": "word " * 3000}]), 400, "messages", "the context is 2048"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 10**6}]), 400, "messages", "more tokens"),
    (CHAT, chat(**{HIGHER: 1}), 400, HIGHER, "aaaa..."),
    (RAW, raw(prompt=[]), 400, "prompt", "a text, a list of texts"),
    (RAW, raw(prompt=[[]]), 400, "prompt[0]", "a list of 1"),
    (RAW, raw(prompt=[1, "x"]), 400, "prompt[1]", "a whole number"),
    (RAW, raw(prompt=["x", 1]), 400, "prompt[1]", "a string"),
    (RAW, raw(prompt=[2048]), 400, "prompt[0]", "from 0 to 2047"),
    (RAW, raw(prompt=[True]), 400, "prompt[0]", "a whole number"),
    (RAW, raw(prompt=""), 400, "prompt", "empty"),
    (RAW, raw(prompt=[5] * 2048), 400, "prompt", "2048 tokens"),
    (RAW, raw(prompt={"text": "x"}), 400, "prompt", "a text"),
    (RAW, raw(logprobs=6), 400, "logprobs", "from 0 to 5"),
    (RAW, raw(best_of=3), 400, "best_of", "all replies"),
    (RAW, raw(suffix="x"), 400, "suffix", "at their end"),
    (RAW, raw(max_tokens=-1), 400, "max_tokens", "a whole number"),
    (RAW, raw(max_tokens=0), 400, "max_tokens", "only with echo"),
    (RAW, raw(prompt=[5] * 2049, max_tokens=0, echo=True), 400, "prompt", "2049 tokens"),
    (CHAT, b'{"model": "demo", "temperature": 1e999}', 400, None, "1e999 is too large"),
    ("/v1/engines", {}, 404, None, "no such path"),
    ("/v1/chat/completions/", {}, 404, None, "no such path"),
    ("/v1/models", {}, 405, None, "does not take POST"),
    ("/v1/models/../../etc/passwd", None, 404, "model", "no model"),
    (CHAT, None, 405, None, "does not take GET"),
]


@pytest.mark.parametrize(("path", "body", "status", "field", "message"), REFUSED)
def test_refusals(server: Server, path: str, body: Any, status: int, field: str | None, message: str) -> None:
    found = server.ask(path, body)
    error = found.json["error"]
    assert (found.status, error["param"]) == (status, field), error
    assert message in error["message"] and len(error["message"]) < 600 and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_the_client_raises_what_openai_raises(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**chat(messages=[{"role": "user", "content": "word " * 3000}]))
    assert (raised.value.param, raised.value.code) == ("messages", "context_length_exceeded")


def test_the_type_of_the_body_must_be_json(server: Server) -> None:
    # What a page of another site sends without asking the browser first is of another type.
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert server.ask(CHAT, json.dumps(chat()).encode(), Content_Type=kind).status == 415
    assert server.ask(CHAT, chat(), Content_Type="Application/JSON; charset=utf-8").status == 200


def test_other_hosts_and_sites_are_refused(server: Server) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil.example", ""):
        assert server.ask("/v1/models", Host=host).status == 403, host
    for host in ("localhost", f"LOCALHOST:{server.port}", "[::1]:8000"):
        assert server.ask("/v1/models", Host=host).status == 200, host
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.port + 1}"):
        found = server.ask(CHAT, chat(), Origin=origin)
        assert found.status == 403 and found.json["error"]["type"] == "permission_error"
    assert server.ask(CHAT, chat(), Origin=server.url).status == 200


@pytest.fixture(scope="module")
def strict(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A hasty server with a key, a site that may use it, and room for two replies."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("s3cret\n")
    options = (f"--api-key-file={key}", "--queue=2", "--origin=https://chat.example", "--body=1")
    with serving(demo, *options, before=HASTY) as running:
        yield running


KEY = {"Authorization": "Bearer s3cret"}


def test_a_key(strict: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Basic s3cret"}, {"X_Api_Key": "é"}):
        found = strict.ask(CHAT, chat(), **headers)
        assert found.status == 401 and found.json["error"]["code"] == "invalid_api_key"
    assert strict.ask("/nowhere").status == 401
    assert strict.ask("/health").json == {"status": "ok"}
    for headers in (KEY, {"Authorization": "bearer s3cret"}, {"X_Api_Key": "s3cret"}):
        assert strict.ask(CHAT, chat(), **headers).status == 200
    assert not any("s3cret" in line for line in strict.lines)


def test_several_keys_share_no_prefixes(demo: Path, tmp_path: Path, llm: Llama) -> None:
    (tmp_path / "keys").write_text("k-one\n\nalice: k-two\n")
    (tmp_path / "keys").chmod(0o640)
    with serving(demo, f"--api-key-file={tmp_path / 'keys'}") as running:
        assert running.lines[0] == f"note: others may read {tmp_path / 'keys'}: chmod 600 it"

        prompt = "Once upon a time there was a king who had a castle and a horse."

        def asked(key: str) -> tuple[int, str]:
            found = running.ask(RAW, raw(prompt=prompt), Authorization=f"Bearer {key}")
            assert found.status == 200, found.json
            return found.json["usage"]["prompt_tokens_details"]["cached_tokens"], found.json["choices"][0]["text"]

        text = llm.generate(prompt, raw=True, max_tokens=16).text
        most = len(llm.encode(prompt, raw=True)) - 1
        assert [asked(key) for key in ("k-one", "k-two", "k-one", "k-two")] == [(0, text)] * 2 + [(most, text)] * 2
        with ThreadPoolExecutor(4) as threads:
            assert [*threads.map(asked, ["k-one", "k-two"] * 4)] == [(most, text)] * 8
        for wrong in ("k-on", "k-one2", "alice", "alice: k-two", ""):
            assert running.ask(RAW, raw(), Authorization=f"Bearer {wrong}").status == 401
        scores = raw(prompt=prompt * 2, echo=True, logprobs=0, max_tokens=0)
        found = running.ask(RAW, scores, Authorization="Bearer k-one").json
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "all are scored"
        noted = [line for line in running.lines if line.startswith("POST")]
        assert ", key 1, tokens" in noted[0] and ", key alice, tokens" in noted[1]
        assert not any("k-one" in line or "k-two" in line for line in running.lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must hold one key in each line"),
        ("a b\n", "line 1 must hold one key without spaces"),
        ("a\nb\na\n", "line 3 has the name or the key of another line"),
        ("x: a\nx: b\n", "line 2 has the name"),
        ("x y: a\n", "line 1 must hold"),
    ],
)
def test_files_of_keys_that_cannot_be_used(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Keys.parsed(text)


def test_a_page_of_an_allowed_site(strict: Server) -> None:
    asked = {"Origin": "https://chat.example", "Access_Control_Request_Method": "POST"}
    found = strict.ask(CHAT, method="OPTIONS", Access_Control_Request_Headers="authorization, content-type", **asked)
    assert found.status == 200 and found.headers["access-control-allow-origin"] == "https://chat.example"
    for headers, status in ((KEY, 200), ({}, 401)):
        found = strict.ask(CHAT, chat(), Origin="https://chat.example", **headers)
        assert found.status == status and found.headers["access-control-allow-origin"] == "https://chat.example"
    assert strict.ask(CHAT, chat(), Origin="https://other.example", **KEY).status == 403


def test_who_comes_when_all_is_taken_is_told_to_come_again(strict: Server) -> None:
    client = openai.OpenAI(base_url=f"{strict.url}/v1", api_key="s3cret", max_retries=0)
    streams = [client.completions.create(**raw(max_tokens=1900), stream=True, extra_body=ON_AND_ON) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(**raw(**more))
        assert raised.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.BadRequestError, match="3 replies are asked for"):
        client.completions.create(**raw(n=3))
    streams[0].close()  # the client goes away, and so does its reply
    wait_for(lambda: strict.ask(RAW, raw(), **KEY).status == 200)
    streams[1].close()
    wait_for(lambda: strict.ask(RAW, raw(n=2), **KEY).status == 200)
    wait_for(lambda: sum(" 499," in line for line in strict.lines) >= 2)


def test_a_reply_is_given_up_when_its_client_goes_away(strict: Server) -> None:
    sent, before = json.dumps(raw(max_tokens=1900, n=2, **ON_AND_ON)).encode(), len(strict.lines)
    with socket.create_connection(("127.0.0.1", strict.port)) as connection:
        connection.sendall(head(len(sent)) + sent)
        wait_for(lambda: strict.ask(RAW, raw(), **KEY).status == 429)
        time.sleep(0.1)  # until it has begun
    wait_for(lambda: strict.ask(RAW, raw(n=2), **KEY).status == 200)
    (gone,) = (line for line in strict.lines[before:] if " 499, " in line)
    assert int(gone.split()[-2]) < 2 * 1900


def test_the_engine_stops_with_the_replies(demo: Path) -> None:
    async def main() -> None:
        llm = load(demo)
        async with Models([llm.manifest], Keeping(load, most_replies=3)) as models:
            (model,) = models
            models.use(model, llm)
            engine = model.engine
            replies = Replies(model, 2)
            replies.start([[5, 6]], Sampling(max_tokens=1900, logit_bias=("2039:-100,2047:-100",)), 2)
            async with aclosing(replies.pieces()) as pieces:
                for _ in range(5):
                    await anext(pieces)
            with pytest.raises(RequestError, match="under way"):
                Replies(model, 2)
            replies.close()
            assert model.under_way == 0
            await asyncio.sleep(0.1)
            steps = engine.counts.steps
            await asyncio.sleep(0.1)
            assert engine.counts.steps == steps

    asyncio.run(main())


def head(length: int) -> bytes:
    lines = [f"POST {RAW} HTTP/1.1", "Host: localhost", "Authorization: Bearer s3cret"]
    lines += ["Content-Type: application/json", f"Content-Length: {length}", "", ""]
    return "\r\n".join(lines).encode()


def test_a_stream_says_that_it_is_alive_while_a_prompt_is_processed(strict: Server) -> None:
    sent = json.dumps(raw(prompt=[at % 1999 for at in range(2000)], max_tokens=2, stream=True)).encode()
    with socket.create_connection(("127.0.0.1", strict.port), timeout=60) as connection:
        connection.sendall(head(len(sent)) + sent)
        found = b""
        while b"[DONE]" not in found:
            found += connection.recv(1 << 16)
    begun, _, rest = found.partition(b": ping\n\n")
    assert rest and b"data:" not in begun


def test_a_reader_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "READER_TIMEOUT", 0.05)
    closed: list[bool] = []

    async def endless() -> Any:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    stream = events.EventStream(endless(), lambda: closed.append(False))
    with pytest.raises(GoneError):
        asyncio.run(stream({}, receive, send))
    assert closed == [True, False]


def test_idle_connections_shut_nobody_out_for_long(demo: Path) -> None:
    few = f"{HASTY}\nimport resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))"
    with serving(demo, before=few) as running, ExitStack() as idle:
        for _ in range(150):  # more than it can take, fewer than wait in the queue of its port
            connection = idle.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=15))
            connection.sendall(b"POST ")
        assert running.ask("/health").status == 200


def test_streams_are_finished_before_the_server_ends(demo: Path) -> None:
    with serving(demo) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        asked = raw(max_tokens=300)
        stream = iter(client.completions.create(**asked, stream=True, extra_body=ON_AND_ON))
        next(stream)
        ended: list[int] = []
        thread = threading.Thread(target=lambda: ended.append(running.stop()))
        thread.start()
        assert [*stream][-1].choices[0].finish_reason == "length"
        thread.join(30)
        assert ended == [0]
        with pytest.raises(ConnectionRefusedError):
            running.ask("/health")
    assert not any("Traceback" in line for line in running.lines)


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_has_a_line_for_each_request_and_no_text(server: Server, stream: bool) -> None:
    before = len(server.lines)
    said = [{"role": "user", "content": "a secret"}]
    server.ask(CHAT, chat(messages=said, max_tokens=3, stop="hidden", stream=stream))
    server.ask("/v1/\x1b[31m".replace("\x1b", "%1b"), {})
    wait_for(lambda: len(server.lines) >= before + 2)
    refused, answered = sorted(server.lines[before : before + 2])  # a stream's line comes when its end was sent
    assert re.fullmatch(
        r"POST /v1/chat/completions 200, \d+\.\d{3} s, tokens: \d+ processed, \d+ cached, 3 generated", answered
    )
    assert refused.startswith(r"POST /v1/\x1b[31m 404, ")


# Nothing that is sent ends the server

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
_text = st.text(max_size=30)
_settings: dict[str, Any] = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "top_k": st.integers(0, 3000),
    "n": st.integers(1, 3),
    "stop": st.none() | st.text(min_size=1, max_size=5) | st.lists(st.text(min_size=1, max_size=5), max_size=4),
    "seed": st.integers(-(1 << 63), (1 << 64) - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.dictionaries(st.integers(0, 2047).map(str), st.floats(-100, 100), max_size=5),
    "max_tokens": st.integers(1, 5),
    "stream": st.booleans(),
    "user": _text,
}
_message = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": _text})
_valid_chat = st.fixed_dictionaries(
    {"model": st.just("demo"), "messages": st.lists(_message, min_size=1, max_size=3)},
    optional=_settings | {"logprobs": st.booleans()},
)
_valid_raw = st.fixed_dictionaries(
    {"model": st.just("demo"), "prompt": _text | st.lists(st.integers(0, 2047), min_size=1, max_size=5)},
    optional=_settings | {"logprobs": st.integers(0, 5), "echo": st.booleans()},
)
_spoilt = st.tuples(
    _valid_chat | _valid_raw, st.dictionaries(st.sampled_from([*_settings, "messages", "prompt", "x"]), _json)
).map(lambda parts: parts[0] | parts[1])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([CHAT, RAW]), body=_valid_chat | _valid_raw | _spoilt | _json)
def test_any_request_has_an_answer(server: Server, path: str, body: Any) -> None:
    found = server.ask(path, json.dumps(body).encode())
    if found.status != 200:
        assert found.status in (400, 404) and {"message", "type", "param", "code"} == found.json["error"].keys()
    elif found.headers["content-type"].startswith("text/event-stream"):
        assert found.content.endswith(b"data: [DONE]\n\n"), found.content
        assert b'"error"' not in found.content
    assert server.process.poll() is None


def test_after_all_of_that_the_server_answers_as_before(server: Server, llm: Llama) -> None:
    assert server.ask("/health").json == {"status": "ok"}
    found = server.ask(CHAT, chat()).json
    assert found["choices"][0]["message"]["content"] == llm.generate(ASK).text
    assert not any("Traceback" in line for line in server.lines)


# Beside requests


@pytest.mark.parametrize("api", [openai_chat, openai_completions, embeddings, rerank, responses])
def test_the_reference_has_every_field(api: Any) -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    for path in (route.path for route in api.ROUTES):
        assert f"`{path}`" in page
    for name in (name for fields in api.fields(1)[:2] for name in fields):
        assert f"`{name}`" in page, name


def test_doit_serve_takes_the_server_with_it_when_it_ends(demo: Path, artifacts: Path) -> None:
    command = [sys.executable, "-m", "doit", "serve", "model=demo", f"artifacts={artifacts}", "port=0", "target=cpu"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        found = next((line for line in process.stderr if line.startswith("listening on")), "")
        server = Server(int(found.partition("/v1")[0].rpartition(":")[2]), process)
        assert server.ask("/health").status == 200
        process.terminate()
        process.stderr.read()
    with pytest.raises(ConnectionRefusedError):
        server.ask("/health")


def test_a_missing_package_names_the_extra(demo: Path) -> None:
    for package in ("starlette", "uvicorn"):
        script = f"import sys; sys.modules[{package!r}] = None; from llama_npu2.__main__ import main; sys.exit(main())"
        command = [sys.executable, "-c", script, "serve", str(demo)]
        run = subprocess.run(command, cwd=ROOT / "runtime", capture_output=True, text=True)
        assert run.returncode == 1
        assert run.stderr == f"error: the package {package} is not installed: pip install 'llama-npu2[serve]'\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port=99999"], "at most 65535"),
        (["--host=256.1.1.1"], "give an address of this machine"),
        (["--host=192.0.2.1"], "choose another port or host"),
        (["--api-key-file=/nonexistent"], "give a text file"),
        (["--api-key-file=EMPTY"], "must hold one key"),
        (["--kv-memory=1", "--queue=0"], "at least 1"),
    ],
)
def test_options_that_cannot_be_used(demo: Path, tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "EMPTY").touch()
    command = [sys.executable, "-m", "llama_npu2", "serve", str(demo), *options]
    run = forked.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "runtime")}, timeout=60)
    assert run.returncode == 1 and message in run.stderr and run.stderr.count("\n") == 1, run.stderr


def test_other_machines_are_let_in_with_a_note(demo: Path) -> None:
    with serving(demo, "--host=0.0.0.0") as running:
        assert running.lines[0].startswith("note: whoever reaches this machine may use the model")
        assert running.ask("/v1/models", Host="a.name.of.this.machine").status == 200


@pytest.mark.parametrize(
    "decoder", [{"type": "ByteLevel"}, {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}]
)
def test_bytes_of_tokens_add_up_to_the_text(llm: Llama, decoder: dict[str, Any]) -> None:
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Inner

    if decoder["type"] == "ByteLevel":
        tokenizer = llm.tokenizer
        texts = ["Paris is old.", "naïve 日本語 🙂\n\t\x00", "<|eot_id|>"]
    else:
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581a": 256, "a": 257}
        inner = Inner(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
        inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        inner.add_special_tokens([AddedToken("<s>", special=True)])
        tokenizer = Tokenizer(inner)
        texts = ["a日é", "<s>a"]
    pieces = Pieces(tokenizer)
    for text in texts:
        ids = tokenizer.encode(text, special_tokens=False)
        assert b"".join(map(pieces.bytes, ids)).decode() == text
        assert all(pieces.text(token) for token in ids)
    assert pieces.text(tokenizer.encode("日", special_tokens=False)[0]).startswith(("bytes:\\x", "日"))
