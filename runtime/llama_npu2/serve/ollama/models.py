"""What Ollama's API says of models, and what it cannot change here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from llama_npu2.schema import Check, anything, either, flag
from llama_npu2.serve.answers import takes
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import Fields, holding, model_name, only
from llama_npu2.serve.model import Model
from llama_npu2.serve.models import Models
from llama_npu2.serve.ollama.common import empty, thinks
from llama_npu2.text.chat_template import DEFAULT

_VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients ask for it to know what they may use."""
_FOR_EVER = 100 * 365 * 86400.0
"""Seconds until a model expires that stays loaded for ever: clients want a date."""
_INFO: Mapping[str, str] = {
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "eps",
    "block_count": "layers",
    "embedding_length": "emb",
    "feed_forward_length": "ffn",
    "vocab_size": "vocab",
}
"""Names that GGUF files have for what a manifest says of a model."""
_REFUSED = ("pull", "push", "create", "copy", "delete")


def _shown_name(model: Model) -> str:
    return model.name if ":" in model.name else f"{model.name}:latest"


def _details(model: Model) -> dict[str, Any]:
    about = model.manifest.model
    return {
        "parent_model": "",
        "format": "llama-npu2",
        "family": about["family"],
        "families": [about["family"]],
        "parameter_size": _shown_count(_parameters(model)),
        "quantization_level": about["weights"],
    }


def _parameters(model: Model) -> int:
    return sum(spec["values"] for spec in model.manifest.buffers.values() if spec["kind"] == "weight")


def _shown_count(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def _changed(model: Model) -> str:
    file = model.manifest.storage.find("manifest.json")
    container = file.container if file else model.manifest.directory
    return datetime.fromtimestamp(container.stat().st_mtime, UTC).isoformat()


def _listed(model: Model) -> dict[str, Any]:
    return {
        "name": _shown_name(model),
        "model": _shown_name(model),
        "size": sum(entry["size"] for entry in model.manifest.files.values()),
        "digest": hashlib.sha256(model.manifest.content).hexdigest(),
        "details": _details(model),
    }


def _capabilities(model: Model) -> list[str]:
    found = {"completion": not model.embeds, "embedding": model.embeds}
    found |= {"tools": model.takes_tools, "thinking": model.chats and thinks(model)}
    return [name for name, has in found.items() if has]


async def tags(request: Request) -> Response:
    """List the models."""
    models: Models = request.app.models
    return JSONResponse({"models": [{**_listed(model), "modified_at": _changed(model)} for model in models]})


async def ps(request: Request) -> Response:
    """List the models that are loaded."""
    models: Models = request.app.models
    return JSONResponse({"models": [_running(models, model) for model in models if model.usable]})


def _running(models: Models, model: Model) -> dict[str, Any]:
    until = datetime.now(UTC) + timedelta(seconds=min(models.expires_in(model), _FOR_EVER))
    more = {"expires_at": until.isoformat(), "size_vram": 0, "context_length": model.context_length}
    return {**_listed(model), "size": model.memory, **more}


_name = either(model_name, only("", "a name"), "a text")


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request to show a model."""
    optional: dict[str, Check] = {
        "model": _name,
        "name": _name,
        "verbose": flag,
        "system": empty("a model has no system prompt of its own"),
        "template": empty("a model's own chat template is used"),
        "options": anything,
    }
    wanted = "an object with model, a name of GET /api/tags"
    return Fields({}, optional, [either(holding({"model": model_name}), holding({"name": model_name}), wanted)])


def _newer(value: Any) -> Any:
    """Return the body of a request with its model as `model`."""
    if isinstance(value, dict) and value.get("model") in (None, "") and value.get("name"):
        return {**value, "model": value["name"]}
    return value


@takes(fields, newer=_newer)
async def show(request: Request, model: Model, asked: dict[str, Any]) -> Response:
    """Describe a model."""
    about, family = model.manifest.model, model.manifest.model["family"]
    info = {
        "general.architecture": family,
        "general.basename": about["name"],
        "general.parameter_count": _parameters(model),
        f"{family}.context_length": model.context_length,
        **{f"{family}.{key}": about[name] for key, name in _INFO.items() if name in about},
    }
    return JSONResponse(
        {
            "modelfile": f"# {model.name}, artifacts of llama-npu2\n",
            "parameters": "",
            "template": model.templates.get(DEFAULT, ""),
            "details": _details(model),
            "model_info": info,
            "capabilities": _capabilities(model),
            "modified_at": _changed(model),
        }
    )


async def version(request: Request) -> Response:
    """Return the version of Ollama whose API this is."""
    return JSONResponse({"version": _VERSION})


async def refused(request: Request) -> Response:
    """Refuse to change which models there are.

    Raises RequestError.
    """
    raise RequestError(
        501, "models are built by doit compile and given to the server when it starts, not changed by it"
    )


async def running(request: Request) -> Response:
    """Say that a server is there."""
    return PlainTextResponse("Ollama is running")


ROUTES = [
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/version", version, methods=["GET"]),
    *(Route(f"/api/{name}", refused, methods=["POST", "DELETE"]) for name in _REFUSED),
    Route("/", running, methods=["GET"]),
]
