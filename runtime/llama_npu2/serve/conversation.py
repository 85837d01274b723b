"""A turn of a conversation, which the APIs ask for in their own words, and the replies to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import field, replace
from typing import Any

from llama_npu2.frozen import frozen
from llama_npu2.options import Sampling
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.model import Model
from llama_npu2.serve.replies import Replies
from llama_npu2.serve.tools import Parts, ToolCall, Tools
from llama_npu2.text.replies import Piece

THINKS = ("enable_thinking", "thinking")
"""Variables by which chat templates are told whether the model is to think."""


@frozen
class FieldNames:
    """What an API calls the fields that make a turn, for its errors."""

    messages: str = "messages"
    schema: str = "response_format"
    tools: str = "tools"
    variable: Callable[[str], str] = field(default=str)
    """Returns the field that sets a variable of the chat template."""


@frozen
class Turn:
    """What is asked of a model in a conversation."""

    messages: Sequence[Mapping[str, Any]]
    """The conversation, as chat templates take it."""
    sampling: Sampling
    """How tokens are chosen. Its schema is that of the answer; where a call is forced, it has none."""
    tools: Tools
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template. It has to read them."""
    replies: int = 1
    """How many replies are asked for."""
    most_calls: int | None = None
    """What comes after so many calls of tools is left out of a reply."""
    names: FieldNames = FieldNames()
    if_read: Mapping[str, Any] = field(default_factory=dict)
    """Variables that the chat template gets only if it reads them."""
    otherwise: Sequence[Mapping[str, Any]] = ()
    """The conversation in other messages, for templates that refuse it as it is; empty if there is no other way."""


@frozen
class End:
    """The end of a reply."""

    reason: str
    """`stop`, `length`, or `tool_calls` where the reply has stopped with a call."""


class Conversation:
    """The replies to one turn. They count as under way from `__init__` until `replies` is closed."""

    def __init__(self, model: Model, turn: Turn) -> None:
        """Raises RequestError if too many replies are under way."""
        self.model, self.turn = model, turn
        self.replies = Replies(model, turn.replies)
        self.ids: list[int] = []
        """The tokens of the prompt, once it has started."""

    async def start(self) -> None:
        """Ask for the replies. Raises RequestError."""
        turn = self.turn
        self.ids = await self.encode(self.model, turn)
        sampling = turn.sampling
        if turn.tools.forced:
            sampling = replace(sampling, schema=turn.tools.schema())
        await self.model.prepare(sampling, turn.names.tools if turn.tools.forced else turn.names.schema)
        self.replies.start([self.ids], sampling, turn.replies)

    @staticmethod
    async def encode(model: Model, turn: Turn) -> list[int]:
        """Return the tokens of a turn's prompt. Raises RequestError."""
        variables = dict(turn.variables)
        if turn.if_read:
            variables["if_read"] = turn.if_read
        if turn.tools.given:
            variables["tools"] = turn.tools.given
        try:
            return await model.encode(turn.messages, turn.names.messages, template=variables)
        except RequestError as error:
            if turn.otherwise and "the chat template refuses" in error.message:
                return await Conversation.encode(model, replace(turn, messages=turn.otherwise, otherwise=()))
            # The template's process names a variable that the template does not read.
            for name in variables:
                if f"reads no variable {name}:" in error.message:
                    error.field = turn.names.tools if name == "tools" else turn.names.variable(name)
            raise

    async def parts(self) -> AsyncGenerator[tuple[int, Piece | ToolCall | End]]:
        """Yield what replies consist of as it becomes certain, each with its reply's number. Raises RequestError."""
        parts = [Parts(self.turn.tools, self.turn.most_calls) for _ in range(self.turn.replies)]
        async with aclosing(self.replies.pieces()) as pieces:
            async for number, piece in pieces:
                for part in parts[number].push(piece) if piece else parts[number].end():
                    yield number, part
                if piece is None:
                    reason = self.replies.streams[number].completion.finish_reason
                    yield number, End("tool_calls" if reason == "stop" and parts[number].called else reason)
