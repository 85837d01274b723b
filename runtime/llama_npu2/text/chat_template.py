"""Chat templates, rendered as transformers renders them: by sandboxed jinja, in a process with limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_npu2.artifact.storage import File, Storage
from llama_npu2.errors import REMEDY, UserError
from llama_npu2.schema import load_json

if TYPE_CHECKING:
    from llama_npu2.text.sandbox import Renderer

_LARGEST = 8 << 20
"""Most bytes of a file. The largest known `tokenizer_config.json` has some 1.2 MB."""


class ChatTemplate:
    """A checkpoint's template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str], renderer: Renderer | None = None) -> None:
        """Start the process that renders the template, without waiting for it. Raises UserError.

        With `renderer`, use that process, which was started before.
        """
        from llama_npu2.text.sandbox import Sandbox

        self._sandbox = Sandbox(source, special_tokens, renderer)

    @classmethod
    def open(cls, storage: Storage, renderer: Renderer | None = None) -> ChatTemplate | None:
        """Return an artifact's template, None if it has none. Raises UserError.

        It is in `chat_template.jinja` or in `tokenizer_config.json`.
        """
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
        return cls(source, special_tokens(storage), renderer)

    def check(self) -> None:
        """Wait until the template is compiled. Raises UserError if it cannot be."""
        self._sandbox.check()

    def render(self, messages: Sequence[Mapping[str, Any]], reply: bool = True) -> str:
        """Return the conversation as one string. Raises UserError.

        It ends where the assistant's reply begins; without `reply`, after the last message.
        """
        return self._sandbox.render(messages, reply)

    def close(self) -> None:
        """End the process. The next rendering starts another one."""
        self._sandbox.close()


waiting_renderer: Renderer | None = None
"""A process that was started before it was known which artifacts to open (`llama_npu2.ahead`)."""


def start_renderer(path: Path) -> Renderer | None:
    """Start the process for the template of the artifacts at `path`, before they are opened, unless one waits.

    Returns None if they seem to have no template. Raises UserError.
    """
    global waiting_renderer
    source, config = path / "tokenizer/chat_template.jinja", path / "tokenizer/tokenizer_config.json"
    if not source.is_file():
        try:
            content = next(File.at(config).chunks(_LARGEST), b"") if config.is_file() else b""
        except OSError:
            return None
        if b'"chat_template"' not in content:
            return None
    from llama_npu2.text.sandbox import Renderer

    taken, waiting_renderer = waiting_renderer, None
    return taken or Renderer()


def special_tokens(storage: Storage) -> dict[str, str]:
    """Return the texts of `bos_token` and others, by these names; empty where the checkpoint has none.

    Raises UserError.
    """
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    files = ("tokenizer/special_tokens_map.json", "tokenizer/tokenizer_config.json")
    tokens = {name: token for file in files for name, token in _read_json(storage, file).items()}
    return {name: _token_text(tokens.get(name)) for name in names}


def _read_json(storage: Storage, name: str) -> dict[str, Any]:
    file = storage.find(name)
    try:
        value = load_json(_read(file)) if file else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{storage.path / name} is not valid JSON ({error}): {REMEDY}") from None
    return value if isinstance(value, dict) else {}


def _read_text(file: File) -> str:
    try:
        return _read(file).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{file.path} cannot be read ({error}): {REMEDY}") from None


def _read(file: File) -> bytes:
    """Return a file's content. Raises OSError, and UserError if it is too large or differs from what was built."""
    if file.size > _LARGEST:
        raise UserError(f"{file.path} has {file.size} bytes, at most {_LARGEST} are read: {REMEDY}")
    return file.read_bytes()


def _token_text(token: Any) -> str:
    """Return the text of a special token, which is stored as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
