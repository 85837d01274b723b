"""`POST /v1/responses`, without a memory of earlier ones: each request has all of its conversation."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.routing import Route

from llama_npu2.schema import (
    Check,
    Invalid,
    anything,
    described,
    described_by,
    either,
    flag,
    list_of,
    mapping,
    one_of,
    string,
    text,
    whole,
)
from llama_npu2.serve.answers import answering
from llama_npu2.serve.conversation import Conversation, End, FieldNames, Turn
from llama_npu2.serve.events import event
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import (
    MOST_TOKENS,
    Fields,
    by,
    closed,
    holding,
    json_object,
    json_schema,
    left_out,
    list_with,
    model_name,
    only,
    rule,
    tool_name,
)
from llama_npu2.serve.model import Model
from llama_npu2.serve.openai import response_items, tools
from llama_npu2.serve.openai.common import LABELS, OF_STREAMS, STREAM, sampling, sampling_fields, variables
from llama_npu2.serve.replies import Usage
from llama_npu2.serve.tools import ToolCall, Tools
from llama_npu2.text.replies import Kind

LEFT_OUT = "x-tools-left-out"
"""The header of a response that lists the types of tools that the model was not told of."""

_LOGPROBS = "message.output_text.logprobs"
_OF_OTHERS = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search"),
    *("image_generation", "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search"),
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
)
"""Types of tools that OpenAI's models have."""

_function = closed(
    {"type": string, "name": tool_name},
    {"description": string, "parameters": json_object, "strict": flag},
)
_named_function = closed({"type": string, "name": tool_name}, {})
_tool = by(
    "type",
    {"function": _function, **dict.fromkeys(_OF_OTHERS, anything)},
    "other tools are not known",
)
_choice_of = by(
    "type",
    {
        "function": _named_function,
        "allowed_tools": closed(
            {
                "type": string,
                "mode": one_of("auto", "required"),
                "tools": list_of(by("type", {"function": _named_function}, "others are left out"), 1, tools.MOST_TOOLS),
            },
            {},
        ),
    },
    "other tools cannot be chosen",
)


_mode = one_of(*tools.MODES)


@described(lambda: {"anyOf": [described_by(_mode), described_by(_choice_of)]})
def _choice(value: Any) -> None:
    (_mode if type(value) is str else _choice_of)(value)


_format = by(
    "type",
    {
        "text": closed({"type": string}, {}),
        "json_object": closed({"type": string}, {}),
        "json_schema": closed(
            {"type": string, "name": string, "schema": json_schema}, {"strict": flag, "description": string}
        ),
    },
    "other formats are not supported",
)


@described(lambda: {"const": "auto"})
def _summary(value: Any) -> None:
    if value != "auto":
        raise Invalid(value, '"auto" or left out: what the model thinks is given as it is, without a summary')


_reasoning = closed(
    {},
    {
        "effort": text(r"[a-z]{1,16}", "a word"),
        "summary": _summary,
        "generate_summary": left_out("it is summary now"),
    },
)


_of_client = holding({"type": only("function", "this server has no tools of its own")})
_allowed = holding({"type": one_of("allowed_tools"), "mode": one_of("auto")})
_RULES = (
    OF_STREAMS,
    tools.forced_of(list_with(_of_client)),
    rule(
        "text",
        holding({}, {"format": holding({"type": only("text", "tool_choice forces a call")})}),
        unless=holding({}, {"tool_choice": either(tools.UNFORCED, _allowed, "")}),
    ),
    rule("tools", list_of(_of_client), unless=holding({}, {"unsupported_tools": one_of("leave_out")})),
)


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request."""
    of_sampling = {name: check for name, check in sampling_fields(vocabulary).items() if name != "n"}
    stateless = "nothing is stored: send all of the conversation in input"
    optional: dict[str, Check] = {
        **of_sampling,
        **LABELS,
        "model": model_name,
        "input": response_items.check_input,
        "instructions": string,
        "max_output_tokens": whole(1, MOST_TOKENS),
        "tools": list_of(_tool, 0, tools.MOST_TOOLS),
        "tool_choice": _choice,
        "unsupported_tools": one_of("leave_out", "refuse"),
        "parallel_tool_calls": flag,
        "max_tool_calls": whole(1, 1 << 30),
        "text": closed({}, {"format": _format, "verbosity": only("medium", "models have no such setting")}),
        "reasoning": _reasoning,
        "chat_template_kwargs": variables,
        "include": list_of(one_of(_LOGPROBS, "reasoning.encrypted_content"), 0, 2),
        "top_logprobs": whole(0, 20),
        "stream": STREAM["stream"],
        "stream_options": closed({}, {"include_obfuscation": only(False, "streams are not padded")}),
        "store": only(False, stateless),
        "truncation": only("disabled", "a conversation that fills the context is refused"),
        "background": only(False, "who asks waits for the answer"),
        "client_metadata": mapping(string, anything),
        "previous_response_id": left_out(stateless),
        "conversation": left_out(stateless),
        "prompt": left_out("no prompts are stored: use instructions"),
        "context_management": left_out("conversations are taken as they are"),
        "moderation": left_out("nothing is moderated"),
    }
    return Fields({}, optional, _RULES)


def tools_of(asked: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions of a request, and the types of its other tools."""
    functions, others = [], []
    for tool in asked.get("tools", []):
        if tool["type"] == "function":
            functions.append({name: value for name, value in tool.items() if name != "type" and value is not None})
        else:
            others.append(tool["type"])
    return functions, others


def _chosen(functions: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> Tools:
    """Return the tools that may be called. Raises RequestError."""
    wanted = asked.get("tool_choice", "auto")
    if isinstance(wanted, str):
        return tools.chosen(functions, wanted, asked)
    if wanted["type"] == "function":
        return tools.named(functions, wanted["name"], "tool_choice.name")
    allowed = {each["name"] for each in wanted["tools"]}
    if unknown := allowed - {each["name"] for each in functions}:
        raise RequestError(400, f"there is no tool {min(unknown)}: name some of tools", "tool_choice.tools")
    return tools.chosen([each for each in functions if each["name"] in allowed], wanted["mode"], asked)


def _wanted_schema(asked: Mapping[str, Any]) -> str:
    """Return the JSON schema of the reply, empty for text."""
    wanted = asked.get("text", {}).get("format") or {"type": "text"}
    return "" if wanted["type"] == "text" else json.dumps(wanted.get("schema", {"type": "object"}))


def _variable_field(name: str) -> str:
    return "reasoning.effort" if name == "reasoning_effort" else f"chat_template_kwargs.{name}"


def turn_of(asked: Mapping[str, Any], functions: Sequence[Mapping[str, Any]], context_length: int) -> Turn:
    """Return what a request asks for, with these functions as tools. Raises RequestError."""
    given, wanted = _chosen(functions, asked), _wanted_schema(asked)
    given_variables = dict(asked.get("chat_template_kwargs", {}))
    if effort := asked.get("reasoning", {}).get("effort"):
        given_variables["reasoning_effort"] = effort
    wants_logprobs = _LOGPROBS in asked.get("include", []) or asked.get("top_logprobs")
    logprobs = asked.get("top_logprobs", 0) if wants_logprobs else None
    return Turn(
        response_items.for_template(asked.get("input", ""), asked.get("instructions", "")),
        replace(sampling(asked, asked.get("max_output_tokens", context_length), logprobs), schema=wanted),
        given,
        given_variables,
        most_calls=1 if asked.get("parallel_tool_calls") is False else None,
        names=FieldNames("input", "text.format", "tools", _variable_field),
    )


def _usage(counts: Usage) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {
            "cached_tokens": counts.cached,
            "cache_write_tokens": counts.prompt - counts.cached,
        },
        "output_tokens": counts.generated,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.generated,
    }


Made = Iterator[tuple[str, dict[str, Any]]]
"""Events: the type of each, without `response.`, and its fields."""


class _Output:
    """The items of a reply, which grow, and the events that say so."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._kind: Kind | None = None
        """The kind of the last item while it grows; None once it is whole."""

    def add(self, kind: Kind, text: str, logprobs: Sequence[Mapping[str, Any]]) -> Made:
        """Add a piece of text or reasoning."""
        if self._kind is not kind:
            yield from self.end()
            yield from self._begin(kind)
        at, part = self._at, self.items[-1]["content"][0]
        part["text"] += text
        if kind is Kind.REASONING:
            yield "reasoning_text.delta", {**at, "content_index": 0, "delta": text}
            return
        part["logprobs"] += logprobs
        yield "output_text.delta", {**at, "content_index": 0, "delta": text, "logprobs": _in_event(logprobs)}

    def call(self, call: ToolCall) -> Made:
        """Add a call of a tool."""
        yield from self.end()
        named = {"type": "function_call", "id": _id("fc"), "call_id": call.id, "name": call.name}
        self.items.append({**named, "arguments": call.arguments, "status": "completed"})
        at = self._at
        begun = {**named, "arguments": "", "status": "in_progress"}
        yield "output_item.added", {"output_index": at["output_index"], "item": begun}
        yield "function_call_arguments.delta", {**at, "delta": call.arguments}
        yield "function_call_arguments.done", {**at, "name": call.name, "arguments": call.arguments}
        yield "output_item.done", {"output_index": at["output_index"], "item": self.items[-1]}

    def end(self, status: str = "completed") -> Made:
        """End the item that grows, if any."""
        if self._kind is None:
            return
        item, at = self.items[-1], self._at
        (part,) = item["content"]
        inner = {**at, "content_index": 0}
        if self._kind is Kind.REASONING:
            yield "reasoning_text.done", {**inner, "text": part["text"]}
        else:
            yield "output_text.done", {**inner, "text": part["text"], "logprobs": _in_event(part["logprobs"])}
        item["status"], self._kind = status, None
        yield "content_part.done", {**inner, "part": part}
        yield "output_item.done", {"output_index": at["output_index"], "item": item}

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, kind: Kind) -> Made:
        self._kind = kind
        if kind is Kind.REASONING:
            item: dict[str, Any] = {"type": "reasoning", "id": _id("rs"), "summary": [], "encrypted_content": None}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": "message", "id": _id("msg"), "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items.append({**item, "status": "in_progress", "content": [part]})
        at = self._at
        yield "output_item.added", {"output_index": at["output_index"], "item": {**self.items[-1], "content": []}}
        yield "content_part.added", {**at, "content_index": 0, "part": dict(part)}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _in_event(logprobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return log-probabilities as events have them: without bytes."""
    shown = [{name: value for name, value in each.items() if name != "bytes"} for each in logprobs]
    return [
        each | {"top_logprobs": _in_event(each["top_logprobs"])} if "top_logprobs" in each else each for each in shown
    ]


class _Response:
    """One request and its reply."""

    def __init__(self, model: Model, asked: dict[str, Any]) -> None:
        """Raises RequestError."""
        self.stream: bool = asked.get("stream", False)
        functions, others = tools_of(asked)
        turn = turn_of(asked, functions, model.llm.context_length)
        self.conversation = Conversation(model, turn)
        self.replies, self.start = self.conversation.replies, self.conversation.start
        if others:
            self.replies.headers[LEFT_OUT] = ", ".join(sorted({*others}))
        shown = [_echoed(each, turn.tools.forced) for each in functions]
        self._said = {**_repeated(model, asked, turn), "tools": shown}
        self._output = _Output()
        self._sequence = 0

    def _shown(self, status: str, **more: Any) -> dict[str, Any]:
        return {**self._said, "status": status, "output": [*self._output.items], **more}

    async def whole(self) -> dict[str, Any]:
        """Return the answer once all of the reply has come. Raises RequestError."""
        async with aclosing(self._made()) as made:
            async for _ in made:
                pass
        return self._ended()

    def _ended(self) -> dict[str, Any]:
        cut = self.replies.streams[0].completion.finish_reason == "length"
        return self._shown(
            "incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=_usage(self.replies.usage([self.conversation.ids])),
        )

    async def _made(self) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        output = self._output
        async with aclosing(self.conversation.parts()) as parts:
            async for _, part in parts:
                if isinstance(part, End):
                    made = self._last(part)
                elif isinstance(part, ToolCall):
                    made = output.call(part)
                else:
                    logprobs = self.replies.new_logprobs(0) or []
                    shown = self.conversation.model.pieces.of_chat(logprobs)["content"]
                    made = output.add(part.kind, part.text, shown)
                for each in made:
                    yield each

    def _last(self, end: End) -> Made:
        if not self._output.items:
            yield from self._output.add(Kind.TEXT, "", [])
        yield from self._output.end("incomplete" if end.reason == "length" else "completed")

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the reply as events."""
        yield self._event("created", {"response": self._shown("in_progress")})
        yield self._event("in_progress", {"response": self._shown("in_progress")})
        try:
            async with aclosing(self._made()) as made:
                async for kind, what in made:
                    yield self._event(kind, what)
            ended = self._ended()
            yield self._event(ended["status"], {"response": ended})
        except RequestError as error:
            failure = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
            yield self._event("failed", {"response": self._shown("failed", error=failure)})

    def _event(self, kind: str, what: Mapping[str, Any]) -> bytes:
        name = f"response.{kind}"
        made = event({"type": name, "sequence_number": self._sequence, **what}, name)
        self._sequence += 1
        return made


def _repeated(model: Model, asked: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Return a response as it is before there is any output: it repeats what was asked for."""
    sampling, reasoning, of_text = turn.sampling, asked.get("reasoning", {}), asked.get("text", {})
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": model.name,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.get("instructions"),
        "tool_choice": asked.get("tool_choice", "auto"),
        "parallel_tool_calls": turn.most_calls is None,
        "max_tool_calls": asked.get("max_tool_calls"),
        "text": {"format": of_text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "temperature": sampling.temperature,
        "top_p": asked.get("top_p", 1.0),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "top_logprobs": asked.get("top_logprobs", 0),
        "max_output_tokens": asked.get("max_output_tokens"),
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "metadata": asked.get("metadata", {}),
        "user": asked.get("user"),
        "safety_identifier": asked.get("safety_identifier"),
        "prompt_cache_key": asked.get("prompt_cache_key"),
        "usage": None,
    }


def _echoed(function: Mapping[str, Any], forced: bool) -> dict[str, Any]:
    """Return a tool as a response has it: `strict` only where a call has to follow the parameters."""
    plain = {"description": None, "parameters": None}
    return {"type": "function", **plain, **function, "strict": forced and function.get("strict", True)}


_respond = answering(fields, _Response, "Reply to a conversation of items, nothing of which is stored.")
ROUTES = [Route("/v1/responses", _respond, methods=["POST"])]
