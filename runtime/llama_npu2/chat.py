"""Chat templates, rendered as transformers renders them (sandboxed jinja)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_npu2.errors import REMEDY, UserError, first_line
from llama_npu2.schema import load_json
from llama_npu2.storage import File, Storage


class ChatTemplate:
    """A checkpoint's template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises UserError."""
        from llama_npu2.sandbox import Sandbox

        def raise_exception(message: str) -> None:
            raise UserError(f"the chat template refuses these messages: {message}")

        environment = Sandbox()
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # one that is nested deeply raises RecursionError, or SyntaxError
            why = first_line(error)
            raise UserError(f"the model's chat template is not valid jinja ({why}): use raw text instead") from None

    @classmethod
    def open(cls, storage: Storage) -> ChatTemplate | None:
        """From an artifact's `chat_template.jinja` or `tokenizer_config.json`; None if neither has a template."""
        source = _read_json(storage, "tokenizer/tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            named = (t for t in source if isinstance(t, dict) and t.get("name") == "default")
            source = next((t.get("template") for t in named), None)
        if separate := storage.find("tokenizer/chat_template.jinja"):
            source = _read_text(separate)
        if not source:
            return None
        if not isinstance(source, str):
            raise UserError(f"{storage.path}: chat_template is no text: {REMEDY}")
        return cls(source, special_tokens(storage))

    def render(self, messages: Sequence[dict[str, str]], reply: bool = True) -> str:
        """The conversation as one string that ends where the assistant's reply begins; without `reply`, behind the last
        message. Raises UserError."""
        from llama_npu2.sandbox import bounded

        try:
            with bounded():
                return self._template.render(messages=messages, add_generation_prompt=reply, **self._special_tokens)
        except UserError:
            raise
        except Exception as error:  # a template's mistakes are any
            raise UserError(f"the chat template cannot render these messages: {first_line(error)}") from None


def special_tokens(storage: Storage) -> dict[str, str]:
    """The texts of `bos_token` and others, by these names; empty where the checkpoint has none. Raises UserError."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    files = ("tokenizer/special_tokens_map.json", "tokenizer/tokenizer_config.json")
    known = {name: token for file in files for name, token in _read_json(storage, file).items()}
    return {name: _content(known.get(name)) for name in names}


def _read_json(storage: Storage, name: str) -> dict[str, Any]:
    file = storage.find(name)
    try:
        value = load_json(file.read_bytes()) if file else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{storage.path / name} is not valid JSON ({error}): {REMEDY}") from None
    return value if isinstance(value, dict) else {}


def _read_text(file: File) -> str:
    try:
        return file.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{file.path} cannot be read ({error}): {REMEDY}") from None


def _content(token: Any) -> str:
    """A special token is stored as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)
