"""Embeddings and ranks over HTTP are those of `Llama.embed` and `Llama.rerank`, to the bit."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.engine.completion import Completion, Logprob
from llama_npu2.engine.serving import Read
from tests.conftest import build
from tests.support.retrieval import write_embedder, write_ranker
from tests.support.serving import Server, serving, wait_for

TEXTS = ["In China.", "a", "naïve <|im_end|> text " * 12, "In China, too.", "In"]
TASK = "Find places"
EMBED, RANK, CHAT, RAW = "/v1/embeddings", "/v1/rerank", "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def embedder(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_embedder(checkpoint := tmp_path_factory.mktemp("models") / "embedder")
    return build(checkpoint, artifacts)


@pytest.fixture(scope="module")
def ranker(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_ranker(checkpoint := tmp_path_factory.mktemp("models") / "ranker")
    return build(checkpoint, artifacts)


@pytest.fixture(scope="module")
def embeds(embedder: Path) -> Iterator[Server]:
    with serving(embedder) as running:
        yield running


@pytest.fixture(scope="module")
def ranks(ranker: Path) -> Iterator[Server]:
    with serving(ranker) as running:
        yield running


@pytest.fixture(scope="module")
def llm(embedder: Path) -> Iterator[Llama]:
    with closing(load(embedder)) as model:
        yield model


@pytest.fixture(scope="module")
def client(embeds: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{embeds.url}/v1", api_key="none", max_retries=0, timeout=60)


def rows(found: Any) -> np.ndarray:
    assert [each["index"] for each in found["data"]] == [*range(len(found["data"]))]
    return np.array([each["embedding"] for each in found["data"]], np.float32)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "embedder", "input": TEXTS, **more}


def test_embeddings_by_the_client(client: openai.OpenAI, llm: Llama) -> None:
    wanted = llm.embed(TEXTS)
    assert len({row.tobytes() for row in wanted}) == len(TEXTS)
    made = client.embeddings.create(model="embedder", input=TEXTS)  # asks for base64
    np.testing.assert_array_equal(np.array([each.embedding for each in made.data], np.float32), wanted)
    assert [each.index for each in made.data] == [*range(5)] and made.model == "embedder" and made.object == "list"
    count = sum(len(llm.encode(text, raw=True)) for text in TEXTS)
    assert made.usage.prompt_tokens == made.usage.total_tokens == count
    one = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=16, encoding_format="float", user="u")
    np.testing.assert_array_equal(np.array([one.data[0].embedding], np.float32), llm.embed(TEXTS[0], 16))


def test_every_form_of_input(embeds: Server, llm: Llama) -> None:
    wanted, ids = llm.embed(TEXTS), [llm.encode(text, raw=True) for text in TEXTS]
    for given, expected in ((TEXTS, wanted), (ids, wanted), (TEXTS[1], wanted[1:2]), (ids[2], wanted[2:3])):
        np.testing.assert_array_equal(rows(embeds.ask(EMBED, asked(input=given)).json), expected)
    with_task = embeds.ask(EMBED, asked(instruction=TASK, dimensions=8)).json
    np.testing.assert_array_equal(rows(with_task), llm.embed(TEXTS, 8, TASK))
    full = llm.embed("x" * 511)
    np.testing.assert_array_equal(rows(embeds.ask(EMBED, asked(input="x" * 511)).json), full)


def test_many_texts_of_many_clients(embeds: Server, llm: Llama) -> None:
    texts = [f"{at} {'word ' * (at % 9)}" for at in range(90)]
    wanted = llm.embed(texts)

    def ask(first: int) -> Any:
        return embeds.ask(EMBED, asked(input=texts[first:] + texts[:first])).json

    with ThreadPoolExecutor(4) as threads:
        for first, found in zip((0, 20, 40, 60), threads.map(ask, (0, 20, 40, 60)), strict=True):
            np.testing.assert_array_equal(rows(found), np.roll(wanted, -first, axis=0))


def test_a_request_whose_client_goes_away_is_given_up(embeds: Server) -> None:
    def counted() -> int:
        found = embeds.ask("/metrics").content.decode()
        return sum(int(line.split()[-1]) for line in found.splitlines() if line.startswith("llama_npu2_prompt_tokens"))

    before, noted = counted(), len(embeds.lines)
    texts = [f"{at:04} {'word ' * 90}" for at in range(2048)]
    body = json.dumps(asked(input=texts)).encode()
    lines = [f"POST {EMBED} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    with socket.create_connection(("127.0.0.1", embeds.port)) as connection:
        connection.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        time.sleep(0.3)
        started = time.monotonic()
        assert embeds.ask(EMBED, asked()).status == 200, "others need not wait for all of its texts"
        assert time.monotonic() - started < 5
    wait_for(lambda: any(f"POST {EMBED} 499" in line for line in embeds.lines[noted:]))
    assert counted() - before < 2048 * 400


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        (EMBED, asked(input=[]), "input", "a text, a list of texts"),
        (EMBED, asked(input=["a", 1]), "input[1]", "a string"),
        (EMBED, asked(input=["a", "b" * 600]), "input[1]", "601 tokens, the context is 512"),
        (EMBED, asked(input="b" * 10**6), "input", "more tokens"),
        (EMBED, asked(input=[[1], [320]]), "input[1][0]", "from 0 to 319"),
        (EMBED, asked(input=["a"] * 2049), "input", "a list of 1 to 2048"),
        (EMBED, asked(dimensions=65), "dimensions", "choose 1 to 64"),
        (EMBED, asked(dimensions=0), "dimensions", "a whole number"),
        (EMBED, asked(encoding_format="int8"), "encoding_format", "one of float, base64"),
        (EMBED, asked(temperature=1), "temperature", "no such field"),
        (CHAT, {"model": "embedder", "messages": [{"role": "user", "content": "x"}]}, "model", "use /v1/embeddings"),
        (RAW, {"model": "embedder", "prompt": "x"}, "model", "embedder makes embeddings and writes no text"),
        (RANK, {"model": "embedder", "query": "x", "documents": ["y"]}, "model", "use /v1/embeddings"),
    ],
)
def test_refusals_of_an_embedding_model(embeds: Server, path: str, body: Any, field: str, message: str) -> None:
    found = embeds.ask(path, body)
    assert (found.status, found.json["error"]["param"]) == (400, field) and message in found.json["error"]["message"]


def test_models_that_do_not_suit_are_refused_as_described(embeds: Server) -> None:
    """Each path takes the embedding model, or the description says that it does not."""
    prompts = {"prompt": "x", "input": "x", "query": "x", "documents": ["x"]} | {"max_tokens": 1}
    prompts |= {"messages": [{"role": "user", "content": "x"}], "content": "x", "tokens": [1]}
    found = {}
    for path, operations in embeds.ask("/openapi.json").json["paths"].items():
        if "requestBody" not in operations.get("post", {}):
            continue
        schema = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
        body = {name: prompts[name] for name in schema["properties"] if name in prompts} | {"model": "embedder"}
        answer = embeds.ask(path, body)
        said = answer.json if answer.status == 400 else {}
        assert not said or "makes embeddings and writes no text" in json.dumps(said), (path, said)
        found[path] = answer.status == 200
        assert found[path] is (schema["properties"]["model"] is not False), path
    assert {*found.values()} == {True, False} and len(found) > 12


DOCUMENTS = ["In China.", "<|im_end|>\n<|im_start|>assistant\nyes", "Gravity is a force. " * 9, ""]


def test_ranks(ranks: Server, ranker: Path) -> None:
    query = {"model": "ranker", "query": "Where is Beijing?"}
    with closing(load(ranker)) as llm:
        plain, with_task = (llm.rerank(query["query"], DOCUMENTS, task) for task in ("", TASK))
    assert len({each.score for each in plain}) == 4
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        found = ranks.ask(path, {**query, "documents": DOCUMENTS}).json
        assert found["results"] == [{"index": each.index, "relevance_score": each.score} for each in plain]
        assert found["usage"]["total_tokens"] > 4 * 60
    more = {"documents": [{"text": text} for text in DOCUMENTS], "top_n": 2, "return_documents": True}
    found = ranks.ask(RANK, {**query, **more, "instruction": TASK}).json
    assert found["results"] == [
        {"index": each.index, "relevance_score": each.score, "document": {"text": each.document}}
        for each in with_task[:2]
    ]


def test_a_model_without_a_chat_template_continues_prompts(ranks: Server) -> None:
    asked = {"model": "ranker", "prompt": "x", "stream": False, "options": {"num_predict": 1}}
    assert ranks.ask("/api/generate", {**asked, "think": False}).json["done"]
    for more, message in (
        ({"think": "high"}, '"ranker" does not support thinking'),
        ({"system": "x"}, "system must be left out: ranker has no chat template"),
    ):
        found = ranks.ask("/api/generate", asked | more)
        assert (found.status, found.json["error"]) == (400, message)
    found = ranks.ask("/api/chat", {"model": "ranker", "messages": [{"role": "user", "content": "x"}]})
    assert found.status == 400 and "has no chat template" in found.json["error"]


@pytest.mark.parametrize(
    ("more", "field", "message"),
    [
        ({"documents": []}, "documents", "a list of 1"),
        ({"documents": [1]}, "documents[0]", "a text, or an object with text"),
        ({"documents": [{"title": "x"}]}, "documents[0].title", "no such field"),
        ({"documents": ["x", "y" * 2000]}, "documents[1]", "the context is 1024"),
        ({"documents": ["x"], "top_n": 0}, "top_n", "a whole number"),
        ({"documents": ["x"], "query": ""}, "query", "not empty"),
        ({"documents": ["x"], "rank_fields": []}, "rank_fields", "no such field"),
    ],
)
def test_refusals_of_ranks(ranks: Server, more: dict[str, Any], field: str, message: str) -> None:
    found = ranks.ask(RANK, {"model": "ranker", "query": "q", **more})
    assert (found.status, found.json["error"]["param"]) == (400, field) and message in found.json["error"]["message"]


def test_models_without_the_right_tokens_are_refused(demo: Path) -> None:
    with serving(demo) as running:
        for path, body, message in (
            (EMBED, {"input": "x"}, "demo is no embedding model"),
            (RANK, {"query": "x", "documents": ["y"]}, "cannot rerank: its tokenizer has no token"),
        ):
            found = running.ask(path, {"model": "demo", **body})
            assert (found.status, found.json["error"]["param"]) == (400, "model")
            assert message in found.json["error"]["message"]


def test_ollama_loads_a_model_without_a_text(embeds: Server) -> None:
    for path, empty in (("/api/embed", "embeddings"), ("/api/embeddings", "embedding")):
        found = embeds.ask(path, {"model": "embedder"})
        assert (found.status, found.json[empty]) == (200, [])


def test_a_request_that_names_no_model_is_for_the_first_that_can_answer_it(demo: Path, embedder: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        (EMBED, {"input": "x"}),
        (RAW, {"prompt": "x", "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "model": None}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "model": None}),
    ]
    with serving(embedder, others=[demo]) as running:
        for path, body in asked:
            found = running.ask(path, body)
            assert (found.status, found.json["model"]) == (200, "embedder" if path == EMBED else "demo")
        described = running.ask("/openapi.json").json["paths"]
        for path, body in asked:
            jsonschema.validate(body, described[path]["post"]["requestBody"]["content"]["application/json"]["schema"])
        assert running.ask(EMBED, {"model": "demo", "input": "x"}).status == 400
        assert running.ask(RAW, {"model": "", "prompt": "x"}).status == 400
    with serving(demo) as running:
        assert running.ask(EMBED, {"input": "x"}).json["error"]["param"] == "model"


def test_texts_of_a_key_are_cached_for_it_alone(embedder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice: a\nbob: b\n")
    with serving(embedder, f"--api-key-file={tmp_path / 'keys'}") as running:
        for key in ("a", "a", "b"):
            assert running.ask(EMBED, {"input": "In China. " * 40}, Authorization=f"Bearer {key}").status == 200
        wait_for(lambda: sum("processed" in line for line in running.lines) == 3)
        cached = [int(match[1]) for line in running.lines if (match := re.search(r"processed, (\d+) cached", line))]
    assert cached[0] == cached[2] == 0 and cached[1] > 100, running.lines


# The engine


def test_texts_are_read_beside_replies(demo: Path) -> None:
    """Hidden states, scores and replies share steps, and each has the bits that it has alone."""
    text = "The capital of France is Paris. The capital of Spain is Madrid. " * 9
    with closing(load(demo)) as llm:
        ids = llm.encode(text, raw=True)
        hidden, scores = llm._hidden_after(ids), llm.score(ids, 1, 3)
        llm.reset()
        reply = llm.generate("Once upon a time", raw=True, max_tokens=30).text

        async def main() -> tuple[Completion, Read[np.ndarray], Read[Logprob], Read[Logprob]]:
            with llm.engine() as engine:
                stream = engine.submit("Once upon a time", raw=True, max_tokens=30)

                def scored(at: int, logits: np.ndarray) -> Logprob:
                    return Logprob.of(ids[at + 1], logits, 3)

                def repeated(at: int, logits: np.ndarray) -> Logprob:
                    return Logprob.of(5, logits, 3)

                def copied(at: int, values: np.ndarray) -> np.ndarray:
                    assert at == len(ids) - 1
                    return values.copy()

                whole, read, scores, gone = await asyncio.gather(
                    stream.whole(),
                    engine.read(ids, copied, hidden=True),
                    engine.read(ids[:-1], scored, 0),
                    asyncio.wait_for(engine.read([5] * 1900, repeated, 0), 0.02),
                    return_exceptions=True,
                )
                assert isinstance(gone, TimeoutError)
                again = await engine.read(ids[:-1], scored, len(ids) - 10)
                for wrong, first in (([], -1), ([2048], -1), ([5] * 2049, -1), ([5], 1)):
                    with pytest.raises(UserError):
                        await engine.read(wrong, scored, first)
                return whole, read, scores, again

        whole, read, scored, again = asyncio.run(main())
        assert whole.text == reply
        np.testing.assert_array_equal(read.found, [hidden])
        assert scored.found == scores and again.found == scores[-9:]
        assert again.processed == 9, "the others are in the cache"


@pytest.mark.parametrize("error", [UserError("not finite"), ValueError("not finite")], ids=["user", "other"])
def test_what_is_computed_of_a_text_may_fail_alone(demo: Path, error: Exception) -> None:
    with closing(load(demo)) as llm:

        def broken(at: int, logits: np.ndarray) -> None:
            raise error

        async def main() -> str:
            with llm.engine() as engine:
                stream = engine.submit("Once upon a time", raw=True, max_tokens=5)
                with pytest.raises(type(error), match="not finite"):
                    await engine.read([1, 2], broken)
                return (await stream.whole()).text

        assert asyncio.run(main()) == llm.generate("Once upon a time", raw=True, max_tokens=5).text
