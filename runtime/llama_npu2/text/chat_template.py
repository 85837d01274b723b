"""Chat templates, rendered as transformers renders them: by sandboxed jinja, in a process with limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_npu2.artifact.storage import File, Storage
from llama_npu2.errors import REMEDY, UserError
from llama_npu2.schema import load_json

if TYPE_CHECKING:
    from llama_npu2.text.rendering import Request
    from llama_npu2.text.sandbox import Renderer, Sandbox

_LARGEST = 8 << 20
"""Most bytes of a file. The largest known `tokenizer_config.json` has some 1.2 MB."""


DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates: where there are several, the second one is for conversations with tools."""
TEMPLATES = "tokenizer/chat_templates.json"
"""The further templates of an artifact, by name."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages hold what a model thought. Templates read the first one, or the second (gpt-oss)."""


class ChatTemplate:
    """A checkpoint's templates and the special tokens that they may name."""

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: dict[str, str], renderer: Renderer | None = None
    ) -> None:
        """Start the process that renders the default template, without waiting for it. Raises UserError.

        With `renderer`, use that process, which was started before. `source` may be several templates by name.
        """
        self._sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        self._special_tokens = special_tokens
        self._sandboxes: dict[str, Sandbox] = {}
        if DEFAULT in self._sources:
            self._sandbox(DEFAULT, renderer)

    @classmethod
    def open(cls, storage: Storage, renderer: Renderer | None = None) -> ChatTemplate | None:
        """Return an artifact's templates, None if it has none. Raises UserError."""
        found = sources(storage)
        return cls(found, special_tokens(storage), renderer) if found else None

    def _sandbox(self, name: str, renderer: Renderer | None = None) -> Sandbox:
        from llama_npu2.text.sandbox import Sandbox

        if name not in self._sandboxes:
            self._sandboxes[name] = Sandbox(self._sources[name], self._special_tokens, renderer)
        return self._sandboxes[name]

    def _name(self, wanted: str | None, tools: Sequence[Any] | None) -> str:
        """Return the name of the template for a rendering. Raises UserError."""
        name = wanted or (TOOL_USE if tools is not None and TOOL_USE in self._sources else DEFAULT)
        if name not in self._sources:
            known = ", ".join(sorted(self._sources))
            raise UserError(f"there is no chat template {name}: choose one by chat_template= among {known}")
        return name

    def check(self) -> None:
        """Wait until the default template is compiled. Raises UserError if it cannot be."""
        self._sandbox(self._name(None, None)).check()

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        reply: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        controls: Mapping[str, bool] | None = None,
        if_read: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> str:
        """Return the conversation as one string, as transformers renders it. Raises UserError.

        It ends where the assistant's reply begins; without `reply`, after the last message.

        Args:
            messages: `role` and `content`, a text or parts of text; also `reasoning_content`, `tool_calls` and what
                else the template reads.
            reply: whether a reply is to follow.
            tools: JSON schemas of functions. A template named `tool_use` is for conversations that have them.
            documents: what the answer may rely on, mostly `title` and `text` each.
            chat_template: the name of the template, where the checkpoint has several.
            controls: added tokens that texts of these arguments may spell out, and whether each is a special one; the
                result then holds marks, see `rendering.split_at_marks`.
            if_read: variables that the template gets only if it reads them.
            **variables: what else the template reads, as `enable_thinking`.
        """
        sandbox = self._sandbox(self._name(chat_template, tools))
        rendering: Request = {
            "messages": [_normal(message) for message in messages],
            "tools": tools,
            "documents": documents,
            "variables": variables,
            "if_read": if_read or {},
            "reply": reply,
            "controls": controls or {},
        }
        return sandbox.render(rendering)

    def close(self) -> None:
        """End the processes. The next rendering starts another one."""
        for sandbox in self._sandboxes.values():
            sandbox.close()


def _normal(message: Any) -> Any:
    """Return a message without empty fields, with the reasoning under the names that templates read."""
    if not isinstance(message, Mapping):
        return message
    given = {name: value for name, value in message.items() if value is not None}
    if (reasoning := next((given[name] for name in REASONING if name in given), None)) is not None:
        given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
    return given


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts and keys of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_of(key)
            yield from texts_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_of(item)


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


def sources(storage: Storage) -> dict[str, str]:
    """Return the texts of an artifact's templates by name, none if it has none. Raises UserError.

    They are in `chat_template.jinja` and `chat_templates.json`, or in `tokenizer_config.json`.
    """
    found: dict[str, Any] = _read_json(storage, TEMPLATES)
    if separate := storage.find("tokenizer/chat_template.jinja"):
        found = {DEFAULT: _read_text(separate), **found}
    if not found:
        source = _read_json(storage, "tokenizer/tokenizer_config.json").get("chat_template") or {}
        found = {DEFAULT: source}
        if isinstance(source, list):
            found = {str(each.get("name")): each.get("template") for each in source if isinstance(each, dict)}
    found = {name: source for name, source in found.items() if source}
    if not all(isinstance(source, str) for source in found.values()):
        raise UserError(f"{storage.path}: chat_template is no text: {REMEDY}")
    return found


def special_tokens(storage: Storage) -> dict[str, str]:
    """Return the texts of `bos_token` and others, by these names: those that the checkpoint has.

    Raises UserError.
    """
    given = [_read_json(storage, f"tokenizer/{name}.json") for name in ("special_tokens_map", "tokenizer_config")]
    fields = {name: token for each in given for name, token in each.items() if name.endswith("_token")}
    for each in given:
        further = each.get("extra_special_tokens")
        fields |= further if isinstance(further, dict) else {}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in fields.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


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
