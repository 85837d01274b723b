"""`POST /v1/rerank`, as Jina, Cohere, vLLM and llama.cpp's server have it."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from starlette.routing import Route

from llama_npu2.engine.retrieval import Relevance, ranked
from llama_npu2.errors import UserError
from llama_npu2.schema import Check, Invalid, described, described_by, flag, list_of, string, whole
from llama_npu2.serve.answers import must_write
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import Fields, closed, model_name, word
from llama_npu2.serve.readings import Readings, reading

_MOST_DOCUMENTS = 2048

_with_text = closed({"text": string}, {})


@described(lambda: {"anyOf": [described_by(string), described_by(_with_text)]})
def _document(value: Any) -> None:
    if type(value) not in (str, dict):
        raise Invalid(value, "a text, or an object with text")
    (_with_text if type(value) is dict else string)(value)


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request."""
    optional: dict[str, Check] = {
        "model": model_name,
        "top_n": whole(1, 1 << 30),
        "return_documents": flag,
        "instruction": string,
    }
    return Fields({"query": word, "documents": list_of(_document, 1, _MOST_DOCUMENTS)}, optional)


async def _rerank(readings: Readings, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer. Raises RequestError."""
    model = readings.model
    query, documents = asked["query"], [each if isinstance(each, str) else each["text"] for each in asked["documents"]]
    try:
        relevance: Relevance = await model.in_thread(
            partial(Relevance, model.llm.tokenizer, query, asked.get("instruction", ""))
        )
    except UserError as error:
        raise RequestError.of(error, "model") from None

    async def judge(number: int, document: str) -> float:
        field = f"documents[{number}]"
        ids = await model.tokens_of(partial(relevance.prompt, document), [query, document], field)
        (found,) = await readings.read(ids, field, lambda _, logits: relevance.of(logits))
        return found

    found = ranked(await readings.each(documents, judge), documents)[: asked.get("top_n")]
    shown = asked.get("return_documents", False)
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "object": "list",
        "model": model.name,
        "results": [
            {"index": each.index, "relevance_score": each.score}
            | ({"document": {"text": each.document}} if shown else {})
            for each in found
        ],
        "usage": {"prompt_tokens": readings.tokens, "total_tokens": readings.tokens},
    }


_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
_rank = reading(fields, _rerank, "Rank documents by their relevance to a query.", must_write)
ROUTES = [Route(path, _rank, methods=["POST"]) for path in _PATHS]
