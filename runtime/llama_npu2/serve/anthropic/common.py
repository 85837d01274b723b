"""What answers of Anthropic's API have in common: the form of errors, and ids of requests."""

from __future__ import annotations

import uuid
from typing import Any

from llama_npu2.serve.failures import RequestError, TooLongError

ID = "request-id"
"""The header with the id of a request, which clients show."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def new_id(prefix: str) -> str:
    """Return an id that nothing else has."""
    return f"{prefix}_{uuid.uuid4().hex}"


def error_in_stream(error: RequestError) -> dict[str, Any]:
    """Return an error in Anthropic's form, without the id of its request, which the head of the answer has."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = _too_long(error) if isinstance(error, TooLongError) else error.message
    if error.field and error.field not in message:
        message = f"{error.field}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_of(error: RequestError) -> dict[str, Any]:
    """Return the body of an error, and give the error a header with the id of its request."""
    return error_in_stream(error) | {"request_id": error.headers.setdefault(ID, new_id("req"))}


def _too_long(error: TooLongError) -> str:
    """Return the words from which Claude Code sees by how much it has to shorten a conversation."""
    if error.tokens is None:
        return f"prompt is too long: it has more than {error.most} tokens: {error.remedy}"
    return f"prompt is too long: {error.tokens} tokens > {error.most} maximum: {error.remedy}"
