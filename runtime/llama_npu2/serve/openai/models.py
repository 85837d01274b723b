"""`GET /v1/models`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llama_npu2.serve.model import Model
from llama_npu2.serve.models import Models


def _described(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "llama-npu2",
        "context_length": model.llm.context_length,
    }


async def list_models(request: Request) -> Response:
    """Answer `GET /v1/models`."""
    models: Models = request.app.models
    return JSONResponse({"object": "list", "data": [_described(model) for model in models]})


async def show_model(request: Request) -> Response:
    """Answer `GET /v1/models/NAME`."""
    return JSONResponse(_described(request.app.models.named(request.path_params["name"])))


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", show_model, methods=["GET"]),
]
