"""Reads the body of a request, within limits of size, depth and time."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from typing import Any, NoReturn

from starlette.requests import Request

from llama_npu2.errors import shortened
from llama_npu2.schema import Check, Invalid
from llama_npu2.serve.failures import GoneError, RequestError
from llama_npu2.serve.fields import check_json

TIMEOUT = 30.0
"""Most seconds that a body may take to come."""

_MOST_EXCESS = 4
"""Bodies of up to so many times the allowed size are read first: many clients send all, then listen."""
_CLOSE = {"connection": "close"}


async def read(request: Request, most: int) -> bytes:
    """Return the body. Raises RequestError if it has more than `most` bytes or takes too long, GoneError."""
    content, came = bytearray(), 0
    too_long = RequestError(413, f"the body has more than {most} bytes: send less", headers=_CLOSE)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > _MOST_EXCESS * most:
        raise too_long
    try:
        async with asyncio.timeout(TIMEOUT):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise GoneError
                came += len(message.get("body", b""))
                if came <= most:
                    content += message.get("body", b"")
                done = not message.get("more_body")
                if came > (most if done else _MOST_EXCESS * most):
                    raise too_long
                if done:
                    return bytes(content)
    except TimeoutError:
        raise RequestError(408, f"the body did not come within {TIMEOUT:g} s", headers=_CLOSE) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    """Return a number. Python takes one that is too large for infinity, which is no JSON."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{shortened(text)} is too large")
    return value


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Of a key that comes twice, a proxy may have checked the value that does not count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {twice} twice")
    return found


async def read_json(request: Request, most: int) -> Any:
    """Return the body's JSON value. Raises RequestError, GoneError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(415, "the body must be JSON: send the header Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError(415, "the body must not be compressed: send it without Content-Encoding", headers=_CLOSE)
    return parsed(await read(request, most))


def loaded(text: str) -> Any:
    """Return the JSON value of a text. Raises ValueError, RecursionError."""
    value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_with_each_key_once)
    check_json(value)
    return value


def parsed(content: bytes) -> Any:
    """Return the JSON value of a body. Raises RequestError."""
    try:
        value = loaded(content.decode())
    except UnicodeDecodeError:
        raise RequestError(400, "the body is not text in UTF-8") from None
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from None
    return value


def checked(value: Any, check: Check) -> dict[str, Any]:
    """Return a request's fields that are not null, once they pass a check. Raises RequestError."""
    try:
        check(value)
    except Invalid as error:
        message = str(error) if error.where else f"the body must be {error.wanted}"
        raise RequestError(400, message, error.where) from None
    return {name: item for name, item in value.items() if item is not None}
