"""What OpenAI's endpoints have in common: fields of requests that ask for replies, counts of tokens, and errors."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from llama_npu2.options import Sampling
from llama_npu2.schema import (
    Check,
    Invalid,
    described,
    described_by,
    flag,
    inside,
    list_of,
    mapping,
    string,
    text,
    whole,
)
from llama_npu2.serve.events import event
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import MOST_TOKENS, biases, closed, left_out, number, only, only_if, stop, word
from llama_npu2.serve.model import Model
from llama_npu2.serve.replies import Usage

MOST_N = 128

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_of(error: RequestError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


STREAM: Mapping[str, Check] = {
    "stream": flag,
    "stream_options": closed({}, {"include_usage": flag, "include_obfuscation": only(False, "streams are not padded")}),
}
OF_STREAMS = only_if("stream", "stream_options")
"""The rule of `STREAM`."""

LABELS: Mapping[str, Check] = {
    "user": string,
    "metadata": mapping(string, string),
    "safety_identifier": string,
    "prompt_cache_key": string,
    "prompt_cache_retention": string,
    "service_tier": string,
}
"""Fields that say who asks and how a bill is made: they change no reply, and are taken without effect."""


_OF_TEMPLATES = {"messages", "reply", "controls", "if_read", "chat_template", "tools", "documents"}
"""What a template gets by other ways than variables."""


@described(lambda: {"type": "object", "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$"}})
def variables(value: Any) -> None:
    """Check the variables of a chat template."""
    if type(value) is not dict:
        raise Invalid(value, "an object")
    name = text(r"[A-Za-z_][A-Za-z0-9_]{0,63}", "a name")
    for key, item in value.items():
        name(key)
        if key in _OF_TEMPLATES:
            inside(key, left_out("it is no variable of chat templates"), item)


def sampling_fields(vocabulary: int) -> dict[str, Check]:
    """Return the fields that say how tokens are chosen; the last three are not OpenAI's, but in wide use."""
    return {
        "temperature": number(0, 2),
        "top_p": number(0, 1),
        "n": whole(1, MOST_N),
        "stop": stop,
        "seed": whole(-(1 << 63), (1 << 64) - 1),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "logit_bias": biases(vocabulary),
        "top_k": whole(0, 1 << 30),
        "min_p": number(0, 1),
        "repetition_penalty": number(0.01, 100),
    }


def sampling(asked: Mapping[str, Any], max_tokens: int, logprobs: int | None) -> Sampling:
    """Return how the replies to a request are made. What it does not say is as OpenAI's API says it."""
    taken = {
        name: asked[name]
        for name in ("presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty", "logit_bias")
        if name in asked
    }
    stops = asked.get("stop", ())
    return Sampling(
        max_tokens=max_tokens,
        temperature=asked.get("temperature", 1.0),
        top_p=max(asked.get("top_p", 1.0), sys.float_info.min),
        seed=asked["seed"] % (1 << 64) if "seed" in asked else None,
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
        logprobs=logprobs,
        **taken,
    )


def texts_or_tokens(vocabulary: int, most: int) -> Check:
    """Return a check for a text that is not empty, a list of token ids, or a list of 1 to `most` of either."""
    ids = list_of(whole(0, vocabulary - 1), 1, MOST_TOKENS)
    texts, lists = list_of(word, 1, most), list_of(ids, 1, most)

    @described(lambda: {"anyOf": [described_by(each) for each in (word, texts, ids, lists)]})
    def check(value: Any) -> None:
        if type(value) is not str and (type(value) is not list or not value):
            raise Invalid(value, "a text, a list of texts, a list of tokens, or a list of such lists")
        first = type(value[0]) if type(value) is list else None
        (word if first is None else texts if first is str else lists if first is list else ids)(value)

    return check


def each_text(given: Any) -> tuple[list[str | list[int]], bool]:
    """Return the texts or lists of tokens of a field that `texts_or_tokens` has checked, and whether it lists them."""
    several = isinstance(given, list) and isinstance(given[0], str | list)
    return (given if several else [given]), several


def head(prefix: str, model: Model) -> dict[str, Any]:
    """Return what every part of an answer says of it: its id, which no other answer has, its time and its model."""
    made = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
    return {**made, "model": model.name, "system_fingerprint": model.fingerprint}


def usage(counts: Usage) -> dict[str, Any]:
    """Return counts of tokens as answers have them."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.generated,
        "total_tokens": counts.prompt + counts.generated,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }


def with_usage(asked: Mapping[str, Any]) -> bool:
    """Return whether a stream ends with counts of tokens."""
    return bool(asked.get("stream_options", {}).get("include_usage"))


async def until_done(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the events of a stream and the one that ends it, which says what went wrong if something did."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
        yield b"data: [DONE]\n\n"
    except RequestError as error:
        yield event(error_of(error))
