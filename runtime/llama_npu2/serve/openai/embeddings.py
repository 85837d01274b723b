"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from starlette.routing import Route

from llama_npu2.schema import Check, one_of, string, whole
from llama_npu2.serve.answers import must_embed
from llama_npu2.serve.fields import Fields, model_name
from llama_npu2.serve.openai.common import each_text, texts_or_tokens
from llama_npu2.serve.readings import Readings, embedded, reading

_MOST_INPUTS = 2048
"""As in OpenAI's API."""
_MOST_DIMENSIONS = 1 << 20


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request."""
    optional: dict[str, Check] = {
        "model": model_name,
        "encoding_format": one_of("float", "base64"),
        "dimensions": whole(1, _MOST_DIMENSIONS),
        "user": string,
        "instruction": string,
    }
    return Fields({"input": texts_or_tokens(vocabulary, _MOST_INPUTS)}, optional)


async def _embeddings(readings: Readings, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer. Raises RequestError."""
    texts, several = each_text(asked["input"])
    found = await embedded(
        readings,
        texts,
        lambda number: f"input[{number}]" if several else "input",
        asked.get("dimensions", 0),
        asked.get("instruction", ""),
    )
    base64_wanted = asked.get("encoding_format") == "base64"
    shown = [_in_base64(values) if base64_wanted else values.tolist() for values in found]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(shown)],
        "model": readings.model.name,
        "usage": {"prompt_tokens": readings.tokens, "total_tokens": readings.tokens},
    }


def _in_base64(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


_embed = reading(fields, _embeddings, "Embed texts.", must_embed)
ROUTES = [Route("/v1/embeddings", _embed, methods=["POST"])]
