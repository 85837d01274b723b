"""Chat templates, rendered as transformers renders them (sandboxed jinja), and an interactive conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.storage import Storage


class ChatTemplate:
    """A checkpoint's template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise UserError(f"the chat template refuses these messages: {message}")

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"the model's chat template is not valid jinja ({error}): use raw text instead") from None

    @classmethod
    def open(cls, storage: Storage) -> ChatTemplate | None:
        """From an artifact's `chat_template.jinja` or `tokenizer_config.json`; None if neither has a template."""
        config = _read_json(storage, "tokenizer/tokenizer_config.json")
        tokens = _read_json(storage, "tokenizer/special_tokens_map.json") | config
        source = config.get("chat_template")
        if isinstance(source, list):
            source = next((t["template"] for t in source if t.get("name") == "default"), None)
        if separate := storage.find("tokenizer/chat_template.jinja"):
            source = separate.read_bytes().decode()
        if not source:
            return None
        return cls(
            source, {name: _content(tokens.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        )

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation as one string that ends where the assistant's reply begins. Raises UserError."""
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except TemplateError as error:
            raise UserError(f"the chat template cannot render these messages: {error}") from None


def _read_json(storage: Storage, name: str) -> dict[str, Any]:
    try:
        file = storage.find(name)
        value = json.loads(file.read_bytes()) if file else {}
    except ValueError as error:
        path = storage.path / name
        raise UserError(f"{path} is not valid JSON ({error}): run doit compile or copy the directory again") from None
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str:
    """A special token is stored as a string or as an object with `content`."""
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)
