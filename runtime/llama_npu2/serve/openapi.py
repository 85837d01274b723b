"""`GET /openapi.json`: what each path takes, derived from the routes and the checks of their requests."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llama_npu2 import __version__
from llama_npu2.schema import described_by
from llama_npu2.serve.answers import meets
from llama_npu2.serve.fields import closed, model_name
from llama_npu2.serve.models import Models

_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")


async def describe(request: Request) -> Response:
    """Answer `GET /openapi.json`."""
    routes: Iterable[Route] = request.app.routes
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, request.app.models)
    info = {"title": "llama-npu2", "version": __version__}
    return JSONResponse({"openapi": "3.1.0", "info": info, "paths": paths})


def _operation(route: Route, models: Models) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": (inspect.getdoc(route.endpoint) or "").partition("\n")[0],
        "responses": {"200": {"description": "The answer."}, "default": {"description": "What is wrong."}},
    }
    if names := [match[1] for match in _PARAMETER.finditer(route.path)]:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if fields := getattr(route.endpoint, "fields", None):
        suiting = [model for model in models if meets(model, vars(route.endpoint)["demand"])]
        # A model with fewer tokens than others takes less than the description says.
        schema = described_by(closed(*fields(max(model.vocabulary for model in suiting or models))))
        if suiting:
            schema = _with_names(schema, {"enum": [model.name for model in suiting]})
        else:
            schema["properties"]["model"], schema["required"] = False, [*schema.get("required", []), "model"]
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found


def _with_names(schema: Any, names: Any) -> Any:
    """Return a schema with the names of models in place of the description of any."""
    if schema == described_by(model_name):
        return names
    if isinstance(schema, list):
        return [_with_names(each, names) for each in schema]
    return {key: _with_names(each, names) for key, each in schema.items()} if isinstance(schema, dict) else schema


ROUTES = [Route("/openapi.json", describe, methods=["GET"])]
