"""`POST /api/generate`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.routing import Route

from llama_npu2.options import Sampling
from llama_npu2.schema import Check, flag, string
from llama_npu2.serve.answers import must_write
from llama_npu2.serve.conversation import Conversation, End, Turn
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import Fields, holding, model_name, only, rule
from llama_npu2.serve.model import Model
from llama_npu2.serve.ollama.chat import NAMES
from llama_npu2.serve.ollama.common import OF_REPLIES, RULES, Said, Source, answering, empty, sampling, thinking
from llama_npu2.serve.replies import Replies
from llama_npu2.serve.tools import ToolCall, Tools
from llama_npu2.text.replies import Kind, Piece

_UNLESS_RAW = holding({}, {"raw": only(False, "")})
_OF_RAW = [
    rule(name, only(nothing, "raw is true"), unless=_UNLESS_RAW) for name, nothing in (("system", ""), ("think", False))
]


def fields(vocabulary: int) -> Fields:
    """Return the checks of a request."""
    optional: dict[str, Check] = {
        "prompt": string,
        "system": string,
        "raw": flag,
        "images": empty("models read text alone"),
        "suffix": empty("texts are continued at their end alone"),
        "template": empty("a model's own chat template is used"),
        "context": empty("send the messages to /api/chat"),
        **OF_REPLIES,
    }
    return Fields({"model": model_name}, optional, (*RULES, *_OF_RAW))


class _Continued:
    """A text as it is, and what the model writes behind it."""

    def __init__(self, model: Model, prompt: str, how: Sampling) -> None:
        """Raises RequestError if too many replies are under way."""
        self._model, self._prompt, self._how = model, prompt, how
        self.replies = Replies(model, 1)
        self.ids: list[int] = []

    async def start(self) -> None:
        """Ask for the reply. Raises RequestError."""
        self.ids = await self._model.encode(self._prompt, "prompt", raw=True)
        await self._model.prepare(self._how, NAMES.schema)
        self.replies.start([self.ids], self._how, 1)

    async def parts(self) -> AsyncGenerator[tuple[int, Piece | ToolCall | End]]:
        """Yield all that the model writes as text. Raises RequestError."""
        async with aclosing(self.replies.pieces()) as pieces:
            async for number, piece in pieces:
                reason = self.replies.streams[number].completion.finish_reason
                yield number, Piece(Kind.TEXT, piece.text) if piece else End(reason)


def _source(model: Model, asked: Mapping[str, Any]) -> Source:
    how, system = sampling(asked, model.context_length), asked.get("system")
    if asked.get("raw"):
        return _Continued(model, asked["prompt"], how)
    variables = thinking(model, asked)
    if not model.chats:
        if system:
            raise RequestError(400, f"system must be left out: {model.name} has no chat template", "system")
        return _Continued(model, asked["prompt"], how)
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": asked["prompt"]}]
    return Conversation(model, Turn(messages, how, Tools(), variables, names=NAMES))


def _response(said: Said) -> dict[str, Any]:
    return {"response": said.text, **({"thinking": said.thought} if said.thought else {})}


_generate = answering(
    fields,
    _source,
    _response,
    lambda asked: bool(asked.get("prompt")),
    "Reply to a prompt, in lines of JSON.",
    must_write,
)
ROUTES = [Route("/api/generate", _generate, methods=["POST"])]
