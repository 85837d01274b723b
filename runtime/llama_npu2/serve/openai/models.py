"""`GET /v1/models`, whose answer is in the form of OpenAI's API and of Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llama_npu2.serve.model import Model


def _described(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "llama-npu2",
        "context_length": model.context_length,
        "status": {"value": model.state, **({"failed": True} if model.failed else {})},
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
    }


async def list_models(request: Request) -> Response:
    """List the models.

    Codex reads `models`, and fails without it. An entry would have to bring instructions, in place of its own.
    """
    described = [_described(model) for model in request.app.models]
    page = {"has_more": False, "first_id": described[0]["id"], "last_id": described[-1]["id"]}
    return JSONResponse({"object": "list", "data": described, **page, "models": []})


async def show_model(request: Request) -> Response:
    """Describe a model."""
    return JSONResponse(_described(request.app.models.named(request.path_params["name"])))


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", show_model, methods=["GET"]),
]
