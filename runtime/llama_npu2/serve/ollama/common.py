"""What Ollama's endpoints have in common: fields of requests for replies, how these are answered, and errors."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llama_npu2.frozen import frozen
from llama_npu2.options import SECONDS, Sampling, seconds_of
from llama_npu2.schema import Check, Invalid, described, described_by, flag, one_of, whole
from llama_npu2.serve.answers import Demand, Respond, answered, ready, takes
from llama_npu2.serve.conversation import THINKS, End
from llama_npu2.serve.events import line
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import Fields, closed, left_out, number, only, only_if, stop
from llama_npu2.serve.model import Model
from llama_npu2.serve.replies import Replies
from llama_npu2.serve.tools import ToolCall
from llama_npu2.text.chat_template import DEFAULT
from llama_npu2.text.replies import Kind, Piece

LINES = "application/x-ndjson"
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 40, 0.9
"""As in Ollama."""
_LARGEST = 1 << 40
_EFFORTS = ("low", "medium", "high", "max")


def error_of(error: RequestError) -> dict[str, Any]:
    """Return the body of an error in Ollama's form."""
    return {"error": error.message}


# Fields


def empty(why: str) -> Check:
    """Return a check for a text or a list that is empty: clients send such ones for what is not given."""

    @described(lambda: {"enum": ["", []]})
    def check(value: Any) -> None:
        if value not in ("", []):
            left_out(why)(value)

    return check


_seconds = number(-_LARGEST, _LARGEST)


@described(lambda: {"anyOf": [described_by(_seconds), {"type": "string", "pattern": rf"^\s*(?:{SECONDS})\s*$"}]})
def check_keep_alive(value: Any) -> None:
    """Check how long a model is to stay loaded: seconds, or a text."""
    if type(value) is str:
        try:
            seconds_of(value)
        except ValueError as error:
            raise Invalid(value, str(error)) from None
    else:
        _seconds(value)


def keep_alive_of(asked: Mapping[str, Any]) -> float | None:
    """Return in seconds how long a request's model is to stay loaded, None if it does not say."""
    given = asked.get("keep_alive")
    if isinstance(given, str):
        return seconds_of(given)
    return math.inf if given is not None and given < 0 else given


@described(lambda: {"anyOf": [{"type": "object"}, {"enum": ["", "json"]}]})
def _format(value: Any) -> None:
    if type(value) is not dict and value not in ("", "json"):
        raise Invalid(value, '"json" or a JSON schema')


@described(lambda: {"enum": [True, False, *_EFFORTS]})
def _think(value: Any) -> None:
    (one_of(*_EFFORTS) if type(value) is str else flag)(value)


_count, _any_count = whole(0, _LARGEST), whole(-_LARGEST, _LARGEST)
_EFFECTLESS: Mapping[str, Check] = {
    **dict.fromkeys(("num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "draft_num_predict"), _any_count),
    **dict.fromkeys(("numa", "low_vram", "f16_kv", "use_mmap", "use_mlock"), flag),
}
"""Options that say how a reply is computed, not which it is: they are taken without effect."""
OPTIONS: Mapping[str, Check] = {
    **_EFFECTLESS,
    "num_predict": whole(-2, _LARGEST),
    "temperature": number(0, 100),
    "top_k": whole(-1, 1 << 30),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "seed": whole(-(1 << 63), (1 << 64) - 1),
    "stop": stop,
    "repeat_penalty": number(0.01, 100),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "num_ctx": _count,
    "repeat_last_n": only(-1, "repeat_penalty is for all of the text"),
    "typical_p": number(1, 1),
    "tfs_z": number(1, 1),
    "mirostat": only(0, "it is not supported"),
    "penalize_newline": only(True, "line feeds are tokens like others"),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), left_out("mirostat is not supported")),
    **dict.fromkeys(("logits_all", "vocab_only", "embedding_only"), left_out("it is not supported")),
}

OF_REPLIES: Mapping[str, Check] = {
    "stream": flag,
    "format": _format,
    "think": _think,
    "options": closed({}, OPTIONS),
    "keep_alive": check_keep_alive,
    "logprobs": flag,
    "top_logprobs": whole(0, 20),
    "truncate": only(False, "prompts are not cut"),
    "shift": only(False, "a reply ends where the context does"),
    "_debug_render_only": only(False, "prompts are not shown"),
}
"""The fields of all requests for replies, besides those that say what is replied to."""
RULES = (only_if("logprobs", "top_logprobs"),)
"""The rules of these fields."""


def sampling(asked: Mapping[str, Any], context_length: int) -> Sampling:
    """Return how the reply to a request is made. Raises RequestError if its fields do not fit together."""
    options = {name: value for name, value in asked.get("options", {}).items() if value is not None}
    if options.get("num_ctx", 0) > context_length:
        message = f"num_ctx must be at most {context_length}, for which the model was compiled"
        raise RequestError(400, message, "options.num_ctx")
    wanted, most, stops = asked.get("format"), options.get("num_predict", -1), options.get("stop", ())
    seed = options.get("seed", -1)
    taken = {name: options[name] for name in ("presence_penalty", "frequency_penalty", "min_p") if name in options}
    return Sampling(
        max_tokens=most if most > 0 else context_length,
        temperature=options.get("temperature", _TEMPERATURE),
        top_k=max(options.get("top_k", _TOP_K), 0),
        top_p=max(options.get("top_p", _TOP_P), sys.float_info.min),
        repetition_penalty=options.get("repeat_penalty", 1.0),
        seed=None if seed == -1 else seed % (1 << 64),
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
        logprobs=asked.get("top_logprobs", 0) if asked.get("logprobs") else None,
        schema=json.dumps({"type": "object"} if wanted == "json" else without_others(wanted)) if wanted else "",
        **taken,
    )


_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("anyOf", "oneOf", "prefixItems", "items", "additionalProperties")


def without_others(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than those that it names, as Ollama understands it."""
    if isinstance(schema, list):
        return [without_others(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in _SCHEMAS_BY_NAME:
        if isinstance(schemas := found.get(key), dict):
            found[key] = {name: without_others(each) for name, each in schemas.items()}
    for key in _SCHEMAS:
        if key in found:
            found[key] = without_others(found[key])
    if "properties" in found and not any(key in found for key in _OPEN):
        found["additionalProperties"] = False
    return found


# Thinking


def thinks(model: Model) -> bool:
    """Return whether a model thinks before it answers, by its chat template."""
    known = {*THINKS, "reasoning_effort"}
    return bool(known & model.template_names) or "<think>" in model.templates.get(DEFAULT, "")


def thinking(model: Model, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that say how a model is to think. Raises RequestError."""
    wanted, name = asked.get("think"), asked["model"]
    if not thinks(model):
        if wanted:
            raise RequestError(400, f'"{name}" does not support thinking', "think")
        return {}
    read = model.template_names
    found: dict[str, Any] = {}
    if isinstance(wanted, str) and "reasoning_effort" in read:
        found["reasoning_effort"] = "high" if wanted == "max" else wanted
    if switch := next((switch for switch in THINKS if switch in read), None):
        found[switch] = wanted is None or bool(wanted)
    if wanted is False and not found:
        raise RequestError(400, f'"{name}" always thinks: leave think out', "think")
    return found


# Answers


@dataclass
class Said:
    """What a reply, or a part of it, says."""

    text: str = ""
    thought: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, part: Piece | ToolCall) -> None:
        """Add what came."""
        if isinstance(part, ToolCall):
            self.calls.append(part)
        elif part.kind is Kind.REASONING:
            self.thought += part.text
        else:
            self.text += part.text


Shape = Callable[[Said], dict[str, Any]]
"""Returns the fields that have what a reply says."""


class Source(Protocol):
    """A prompt and its reply: `Conversation`, or a text that is continued."""

    ids: list[int]
    replies: Replies

    async def start(self) -> None:
        """Ask for the reply. Raises RequestError."""

    def parts(self) -> AsyncGenerator[tuple[int, Piece | ToolCall | End]]:
        """Yield what the reply consists of, each part with 0, the number of the reply. Raises RequestError."""


@frozen
class Clock:
    """When a request came and when its model was loaded, by `time.perf_counter_ns`."""

    came: int
    loaded: int


def head(name: str) -> dict[str, Any]:
    """Return what every part of an answer has first. `name` of the model, as the request has it."""
    return {"model": name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def done(name: str, shape: Shape, reason: str) -> dict[str, Any]:
    """Return the last part of an answer, which says no more."""
    return {**head(name), **shape(Said()), "done": True, "done_reason": reason}


class _Answer:
    """One request and its reply."""

    def __init__(self, asked: Mapping[str, Any], source: Source, shape: Shape, clock: Clock) -> None:
        self.stream: bool = asked.get("stream", True)
        self._name, self._source, self._shape, self._clock = asked["model"], source, shape, clock
        self.replies, self.start = source.replies, source.start

    def _logprobs(self) -> dict[str, Any]:
        found = self.replies.new_logprobs(0)
        entries = self.replies.model.pieces.of_chat(found)["content"] if found else []
        for entry in entries:
            if not entry["top_logprobs"]:
                del entry["top_logprobs"]
        return {"logprobs": entries} if entries else {}

    def _chunk(self, part: Piece | ToolCall) -> dict[str, Any]:
        said = Said()
        said.add(part)
        return {**head(self._name), **self._shape(said), "done": False, **self._logprobs()}

    def _last(self, said: Said, reason: str) -> dict[str, Any]:
        """Return the end of an answer, with what was not said before it."""
        usage, stats = self.replies.usage([self._source.ids]), self.replies.streams[0].completion.stats
        return {
            **done(self._name, self._shape, "length" if reason == "length" else "stop"),
            **self._shape(said),
            **self._logprobs(),
            "total_duration": time.perf_counter_ns() - self._clock.came,
            "load_duration": self._clock.loaded - self._clock.came,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": round(stats.ttft * 1e9),
            "eval_count": usage.generated,
            "eval_duration": round(stats.decode_time * 1e9),
        }

    async def whole(self) -> dict[str, Any]:
        """Return the answer once the reply has come. Raises RequestError."""
        said = Said()
        async with aclosing(self._source.parts()) as parts:
            async for _, part in parts:
                if isinstance(part, End):
                    return self._last(said, part.reason)
                said.add(part)
        raise AssertionError("a reply has an end")

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the answer as lines, the last of which says what went wrong if something did."""
        try:
            async with aclosing(self._source.parts()) as parts:
                async for _, part in parts:
                    yield line(self._last(Said(), part.reason) if isinstance(part, End) else self._chunk(part))
        except RequestError as error:
            yield line(error_of(error))


def answering(
    fields: Callable[[int], Fields],
    source: Callable[[Model, Mapping[str, Any]], Source],
    shape: Shape,
    says: Callable[[Mapping[str, Any]], bool],
    summary: str,
    demand: Demand,
) -> Respond:
    """Return what answers the requests to one path.

    Args:
        fields: as for `answers.takes`.
        source: makes what is replied to of the fields of a request. Raises RequestError.
        shape: of answers.
        says: returns whether a request says anything: others load a model or unload it.
        summary: what a request does, in a sentence.
        demand: as for `answers.takes`.
    """

    @takes(fields, demand, says)
    async def answer(request: Request, model: Model, asked: dict[str, Any]) -> Response:
        came = time.perf_counter_ns()
        name, keep_alive = asked["model"], keep_alive_of(asked)
        if not says(asked) and keep_alive == 0:
            request.app.models.expire(model)
            return JSONResponse(done(name, shape, "unload"))
        await ready(request, model, keep_alive)
        if not says(asked):
            return JSONResponse(done(name, shape, "load"))
        made = _Answer(asked, source(model, asked), shape, Clock(came, time.perf_counter_ns()))
        # Readers take each line as JSON, so a line that says nothing is what keeps a connection alive.
        return await answered(request, made, line({**head(name), **shape(Said()), "done": False}), LINES)

    answer.__doc__ = summary
    return answer
