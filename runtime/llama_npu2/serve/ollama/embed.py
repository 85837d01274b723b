"""`POST /api/embed` and `POST /api/embeddings`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llama_npu2.schema import Check, list_of, string, whole
from llama_npu2.serve.answers import Respond, must_embed, ready, takes
from llama_npu2.serve.fields import Fields, closed, model_name, only, or_list, word
from llama_npu2.serve.model import Model
from llama_npu2.serve.ollama.common import OPTIONS, Clock, check_keep_alive, keep_alive_of
from llama_npu2.serve.readings import Readings, embedded, read_for

_MOST_INPUTS = 2048
_COMMON: Mapping[str, Check] = {"keep_alive": check_keep_alive, "options": closed({}, OPTIONS)}


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request to `/api/embed`."""
    optional: dict[str, Check] = {
        "input": or_list(string, list_of(word, 0, _MOST_INPUTS)),
        "dimensions": whole(0, 1 << 20),
        "truncate": only(False, "texts are not cut"),
        **_COMMON,
    }
    return Fields({"model": model_name}, optional)


def _fields_of_older(vocabulary: int) -> Fields:
    return Fields({"model": model_name}, {"prompt": string, **_COMMON})


def _answering(
    fields: Callable[[int], Fields], name: str, shape: Callable[[Mapping[str, Any], list[list[float]]], dict[str, Any]]
) -> Respond:
    """Return what answers the requests to one path.

    Args:
        fields: as for `answers.takes`.
        name: of the field that has the texts. Without any, the model is loaded or unloaded.
        shape: returns the answer to the fields of a request, with embeddings.
    """

    @takes(fields, must_embed, lambda asked: bool(asked.get(name)))
    async def answer(request: Request, model: Model, asked: dict[str, Any]) -> Response:
        """Embed texts."""
        came = time.perf_counter_ns()
        given, keep_alive = asked.get(name), keep_alive_of(asked)
        texts: Sequence[str] = given if isinstance(given, list) else [given] if given else []
        if not texts and keep_alive == 0:
            request.app.models.expire(model)
            return JSONResponse(shape(asked, []))
        await ready(request, model, keep_alive)
        if not texts:
            return JSONResponse(shape(asked, []))
        clock = Clock(came, time.perf_counter_ns())

        def field(number: int) -> str:
            return f"{name}[{number}]" if isinstance(given, list) else name

        async def embed(readings: Readings) -> dict[str, Any]:
            found = await embedded(readings, texts, field, asked.get("dimensions", 0))
            times = {"total_duration": time.perf_counter_ns() - clock.came, "load_duration": clock.loaded - clock.came}
            made = shape(asked, [each.tolist() for each in found])
            # Answers to older requests say nothing else.
            return made if "embedding" in made else {**made, **times, "prompt_eval_count": readings.tokens}

        return await read_for(request, model, embed)

    return answer


def _shape(asked: Mapping[str, Any], found: list[list[float]]) -> dict[str, Any]:
    return {"model": asked["model"], "embeddings": found}


def _shape_of_older(asked: Mapping[str, Any], found: list[list[float]]) -> dict[str, Any]:
    return {"embedding": found[0] if found else []}


ROUTES = [
    Route("/api/embed", _answering(fields, "input", _shape), methods=["POST"]),
    Route("/api/embeddings", _answering(_fields_of_older, "prompt", _shape_of_older), methods=["POST"]),
]
