"""`/tokenize`, `/detokenize` and `/props`, as llama.cpp's server has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llama_npu2 import __version__
from llama_npu2.errors import UserError
from llama_npu2.schema import Check, flag, list_of, string, whole
from llama_npu2.serve.answers import of_request, ready, takes
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import Fields, model_name, only
from llama_npu2.serve.model import Model

_MOST_TOKENS = 1 << 22

TO_TOKENS: dict[str, Check] = {
    "model": model_name,
    "add_special": flag,
    "parse_special": only(True, "texts that spell out a control token are that token"),
    "with_pieces": flag,
}


def _to_tokens(vocabulary: int) -> Fields:
    return Fields({"content": string}, TO_TOKENS)


def _to_text(vocabulary: int) -> Fields:
    return Fields({"tokens": list_of(whole(0, vocabulary - 1), 0, _MOST_TOKENS)}, {"model": model_name})


@takes(_to_tokens)
async def tokenize(request: Request, model: Model, asked: dict[str, Any]) -> Response:
    """Return the tokens of a text.

    Raises RequestError, GoneError.
    """
    await ready(request, model)

    def response() -> Response:
        ids = model.llm.tokenizer.encode(asked["content"], asked.get("add_special", False))
        if not asked.get("with_pieces"):
            return JSONResponse({"tokens": ids})
        pieces = {token: {"id": token, "piece": _piece(model, token)} for token in {*ids}}
        return JSONResponse({"tokens": [pieces[token] for token in ids]})

    return await _in_thread(model, response, "content")


def _piece(model: Model, token: int) -> str | list[int]:
    content = model.pieces.bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return [*content]


@takes(_to_text)
async def detokenize(request: Request, model: Model, asked: dict[str, Any]) -> Response:
    """Return the text of tokens.

    Raises RequestError, GoneError.
    """
    await ready(request, model)
    decode = partial(model.llm.tokenizer.decode, asked["tokens"], skip_special_tokens=False)
    return await _in_thread(model, lambda: JSONResponse({"content": decode()}), "tokens")


async def _in_thread(model: Model, function: Callable[[], Response], field: str) -> Response:
    """Return the response that a function makes: of a long text, that takes time. Raises RequestError."""
    try:
        made: Response = await model.in_thread(function)
        return made
    except UserError as error:
        raise RequestError.of(error, field) from None


async def props(request: Request) -> Response:
    """Describe a model, as clients of llama.cpp's server ask for it before they use it.

    Raises RequestError.
    """
    model = of_request(request, dict(request.query_params))
    return JSONResponse(
        {
            "default_generation_settings": {"n_ctx": model.context_length},
            "total_slots": model.most_replies,
            "model_alias": model.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template_caps": dict.fromkeys(("supports_tools", "supports_tool_calls"), model.takes_tools),
            "build_info": f"llama-npu2 {__version__}",
        }
    )


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/props", props, methods=["GET"]),
]
