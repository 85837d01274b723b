"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial, wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llama_npu2.options import Sampling
from llama_npu2.serve.answers import Respond, answering, must_chat, ready, takes
from llama_npu2.serve.anthropic.common import ID, error_in_stream, new_id
from llama_npu2.serve.anthropic.fields import count_fields, message_fields
from llama_npu2.serve.anthropic.prompts import messages_of, tools_of, variables_of
from llama_npu2.serve.conversation import Conversation, End, FieldNames, Turn
from llama_npu2.serve.events import event, unless_gone
from llama_npu2.serve.failures import RequestError, TooLongError
from llama_npu2.serve.model import Model
from llama_npu2.serve.tools import ToolCall
from llama_npu2.text.replies import Kind, Piece

_PING = event({"type": "ping"}, "ping")
_ADDED = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""The field of a block that each kind of delta adds to."""


def turn_of(asked: Mapping[str, Any], keeps_billing_header: bool) -> Turn:
    """Return what a request asks for. Raises RequestError if its fields do not fit together."""
    given, (field, form) = tools_of(asked), _format(asked)
    messages, joined = (messages_of(asked, keeps_billing_header, joins) for joins in (False, True))
    return Turn(
        messages,
        Sampling(
            max_tokens=max(asked.get("max_tokens", 1), 1),
            temperature=asked.get("temperature", 1.0),
            top_p=max(asked.get("top_p", 1.0), sys.float_info.min),
            top_k=asked.get("top_k", 0),
            stop=tuple(asked.get("stop_sequences", ())),
            schema=json.dumps(form["schema"]) if form else "",
        ),
        given,
        most_calls=1 if asked.get("tool_choice", {}).get("disable_parallel_tool_use") else None,
        names=FieldNames(schema=field),
        if_read=variables_of(asked),
        otherwise=joined if joined != messages else (),
    )


def _format(asked: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Return the field with the form of the answer, and the form, if there is one."""
    if form := asked.get("output_format"):
        return "output_format", form
    return "output_config.format", asked.get("output_config", {}).get("format")


class _Message:
    """One request and its reply."""

    def __init__(self, model: Model, asked: dict[str, Any], keeps_billing_header: bool) -> None:
        """Raises RequestError."""
        self.stream: bool = asked.get("stream", False)
        self.conversation = Conversation(model, turn_of(asked, keeps_billing_header))
        self.replies, self.start = self.conversation.replies, self.conversation.start
        self._asked = asked
        self._thinking: Mapping[str, Any] = asked.get("thinking", {})

    async def whole(self) -> dict[str, Any]:
        """Return the answer once all of it has come. Raises RequestError."""
        message: dict[str, Any] = {}
        async with aclosing(self._events()) as events:
            async for each in events:
                if each["type"] == "message_start":
                    message = each["message"]
                elif each["type"] == "content_block_start":
                    message["content"].append(each["content_block"])
                elif each["type"] == "content_block_delta":
                    _add(each["delta"], message["content"][-1])
                elif each["type"] == "message_delta":
                    message["usage"] |= each.pop("usage")
                    del each["type"]
                    message |= each.pop("delta") | each
        return message

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the reply as events."""
        try:
            async with aclosing(self._events()) as events:
                async for each in events:
                    yield event(each, each["type"])
        except RequestError as error:
            yield event(error_in_stream(error), "error")

    async def _events(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield what happens. Raises RequestError."""
        yield {"type": "message_start", "message": self._started()}
        blocks = _Blocks()
        async with aclosing(self.conversation.parts()) as parts:
            async for _, part in parts:
                if isinstance(part, End):
                    for each in blocks.close():
                        yield each
                    yield {"type": "message_delta", **self._ended(part)}
                elif self._asked["max_tokens"] and shows(part, self._thinking):
                    for each in blocks.add(part, self._thinking.get("display") == "omitted"):
                        yield each
        yield {"type": "message_stop"}

    def _started(self) -> dict[str, Any]:
        """Return the message as it begins: what the cache holds of the prompt is not known yet."""
        return {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": self.conversation.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_usage(len(self.conversation.ids), 0, 0), "service_tier": "standard"},
        }

    def _ended(self, end: End) -> dict[str, Any]:
        """Return what is known once the reply has ended."""
        counts, completion = self.replies.usage([self.conversation.ids]), self.replies.streams[0].completion
        asked_for = self._asked["max_tokens"]
        reason = {
            "tool_calls": "tool_use",
            "length": "max_tokens" if counts.generated >= asked_for else "model_context_window_exceeded",
            "stop": "stop_sequence" if completion.stopped_by else "end_turn",
        }[end.reason if asked_for else "length"]
        edits: dict[str, Any] = (
            {"context_management": {"applied_edits": []}} if "context_management" in self._asked else {}
        )
        return {
            "delta": {"stop_reason": reason, "stop_sequence": completion.stopped_by or None},
            "usage": _usage(counts.prompt, counts.cached, counts.generated if asked_for else 0),
            **edits,
        }


def shows(part: Piece | ToolCall, thinking: Mapping[str, Any]) -> bool:
    """Return whether a part of a reply is shown: some models think whatever they are told."""
    return thinking.get("type") != "disabled" or isinstance(part, ToolCall) or part.kind is not Kind.REASONING


def _usage(prompt: int, cached: int, generated: int) -> dict[str, int]:
    """Return counts of tokens as messages have them: those of the input are without the cached ones."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def _add(delta: Mapping[str, Any], block: dict[str, Any]) -> None:
    """Add a delta to a block."""
    if delta["type"] == "input_json_delta":
        block["input"] = json.loads(delta["partial_json"])
    else:
        block[_ADDED[delta["type"]]] += delta[_ADDED[delta["type"]]]


class _Blocks:
    """Makes events of what a reply consists of: each block has a beginning, deltas and an end."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: Kind | None = None
        """The kind of the block that is open; None if none is."""
        self._thought = hashlib.sha256()

    def add(self, part: Piece | ToolCall, hides_thoughts: bool) -> list[dict[str, Any]]:
        """Return the events of a part of the reply."""
        if isinstance(part, ToolCall):
            begun = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            events = [*self.close(), self._open(begun, Kind.TOOL_CALL)]
            return [*events, self._delta("input_json_delta", partial_json=part.arguments), *self.close()]
        events = []
        if self._kind is not part.kind:
            begun = {"type": "text", "text": ""}
            if part.kind is Kind.REASONING:
                begun = {"type": "thinking", "thinking": "", "signature": ""}
            events = [*self.close(), self._open(begun, part.kind)]
        if part.kind is Kind.REASONING:
            self._thought.update(part.text.encode())
            return events if hides_thoughts else [*events, self._delta("thinking_delta", thinking=part.text)]
        return [*events, self._delta("text_delta", text=part.text)]

    def close(self) -> list[dict[str, Any]]:
        """Return the events that end the block that is open, if one is."""
        closed, self._kind = self._kind, None
        if closed is None:
            return []
        # Clients take a thought without a signature for none. It is not checked when the thought comes back.
        signed = [self._delta("signature_delta", signature=self._thought.hexdigest())]
        ended = {"type": "content_block_stop", "index": self._index}
        return [*(signed if closed is Kind.REASONING else []), ended]

    def _open(self, block: dict[str, Any], kind: Kind) -> dict[str, Any]:
        self._index, self._kind, self._thought = self._index + 1, kind, hashlib.sha256()
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, **added: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **added}}


async def _count_tokens(request: Request, model: Model, turn: Turn) -> Response:
    """Answer with the number of tokens of a prompt, which may be longer than the context. Raises RequestError."""
    await ready(request, model)
    try:
        tokens = len(await unless_gone(request.receive, Conversation.encode(model, turn)))
    except TooLongError as error:
        if error.tokens is None:
            raise
        tokens = error.tokens
    return JSONResponse({"input_tokens": tokens})


def _with_id(answer: Respond) -> Respond:
    """Return what gives the same answers, with the id of the request in their heads."""

    @wraps(answer)
    async def answered(request: Request) -> Response:
        response = await answer(request)
        response.headers[ID] = new_id("req")
        return response

    return answered


PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"


def routes(keeps_billing_header: bool) -> list[Route]:
    """Return what answers which path.

    Args:
        keeps_billing_header: whether prompts keep the line by which Claude Code says for billing who asks.
    """
    made = partial(_Message, keeps_billing_header=keeps_billing_header)
    message = answering(message_fields, made, "Return the next message of a conversation.", _PING)

    @takes(count_fields, must_chat)
    async def count(request: Request, model: Model, asked: dict[str, Any]) -> Response:
        """Count the tokens of a conversation."""
        return await _count_tokens(request, model, turn_of(asked, keeps_billing_header))

    return [
        Route(PATH, _with_id(message), methods=["POST"]),
        Route(COUNT_PATH, _with_id(count), methods=["POST"]),
    ]
