"""What a model writes: its answer, what it thinks before, and calls of tools, told apart by the ids of tokens.

A text that merely looks like a mark is none: marks are tokens of their own, special ones (gpt-oss) or not (Qwen).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum

from llama_npu2.frozen import frozen
from llama_npu2.text.tokenizer import TextStream, Tokenizer


class Kind(Enum):
    """What a piece of a reply is."""

    TEXT = "text"
    REASONING = "reasoning"
    TOOL_CALL = "tool call"


@frozen
class Piece:
    """A piece of a reply, of whole UTF-8 characters."""

    kind: Kind
    text: str
    call: int = 0
    """Which of the calls of tools, counted from 0."""


_PAIRS = (
    (Kind.REASONING, "<think>", "</think>"),
    (Kind.REASONING, "[THINK]", "[/THINK]"),
    (Kind.REASONING, "<|START_THINKING|>", "<|END_THINKING|>"),
    (Kind.TOOL_CALL, "<tool_call>", "</tool_call>"),
    (Kind.TOOL_CALL, "<|tool_call_start|>", "<|tool_call_end|>"),
    (Kind.TOOL_CALL, "<|tool_call|>", "<|/tool_call|>"),
    (Kind.TOOL_CALL, "[TOOL_CALLS]", ""),
    (Kind.TOOL_CALL, "<|python_tag|>", ""),
)
"""What begins and what ends a part that is not the answer; a part without an end goes on to the end of the reply."""

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
"""The tokens of harmony: a header, which names a channel and a recipient, stands in front of each message."""


class Marks:
    """The tokens of a vocabulary that separate the parts of a reply."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.opens: dict[int, Kind] = {}
        self.closes: dict[int, Kind] = {}
        for kind, first, last in _PAIRS:
            if (token := tokenizer.id(first)) is not None:
                self.opens[token] = kind
                if (token := tokenizer.id(last)) is not None:
                    self.closes[token] = kind
        found = {text: tokenizer.id(text) for text in (_START, _CHANNEL, _MESSAGE, *_ENDS)}
        harmony = None not in (found[_CHANNEL], found[_MESSAGE])
        self.harmony: Mapping[int, str] = {i: text for text, i in found.items() if i is not None and harmony}

    def in_force(self, prompt: Sequence[int], ends: Collection[int]) -> Sequence[int]:
        """Return the tokens at the end of a prompt that say which part of the reply begins it.

        `ends` are tokens that end a reply: nothing goes on behind them.
        """
        starts = [i for i, text in self.harmony.items() if text == _START]
        known = {*starts, *self.opens, *self.closes}
        if not known:
            return ()
        found = ((at, token) for at, token in zip(reversed(range(len(prompt))), reversed(prompt), strict=True))
        at, token = next(((at, token) for at, token in found if token in known or token in ends), (0, -1))
        return () if token not in known else prompt[at:] if token in starts else (token,)


class ReplyStream:
    """Turns tokens of a reply into typed pieces of it.

    Stop strings are looked for in the answer alone. White space around marks is left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        ends: Collection[int] = (),
        stop: Sequence[str] = (),
    ) -> None:
        """Args: `prompt` and `ends` as for `Marks.in_force`."""
        self._tokenizer, self._stop, self._marks = tokenizer, stop, Marks(tokenizer)
        self._header: list[int] | None = None
        self._calls = 0
        self._begin(Kind.TEXT)
        self._trims = False
        for token in self._marks.in_force(prompt, ends):
            self.push(token)
        self._calls = int(self._kind is Kind.TOOL_CALL)

    def _begin(self, kind: Kind) -> None:
        self._kind, self._trims = kind, True
        skips = kind is not Kind.TOOL_CALL
        self._stream = TextStream(self._tokenizer, self._stop if kind is Kind.TEXT else (), skips)
        self._calls += kind is Kind.TOOL_CALL

    @property
    def kind(self) -> Kind:
        """The part of the reply that the next token belongs to, unless it begins or ends one."""
        return self._kind

    @property
    def stopped_by(self) -> str:
        """The stop string that has come; empty if none has."""
        return self._stream.stopped_by

    def push(self, token: int) -> list[Piece]:
        """Add a token; return what became certain with it. Raises UserError."""
        if token in self._marks.harmony:
            return [*self.flush(), *self._harmony(token)]
        if self._header is not None:
            self._header.append(token)
            return []
        calling = self._kind is Kind.TOOL_CALL
        opened = self._marks.opens.get(token)
        if opened and (not calling or opened is Kind.TOOL_CALL):
            pieces = self.flush()
            self._begin(opened)
            return pieces
        if token in self._marks.closes and (not calling or self._marks.closes[token] is Kind.TOOL_CALL):
            pieces = self.flush()
            self._begin(Kind.TEXT)
            return pieces
        return self._said(self._stream.push(token))

    def _harmony(self, token: int) -> Iterator[Piece]:
        """Take a token of harmony. Yield a tool call's header, with which its text begins."""
        if (text := self._marks.harmony[token]) == _MESSAGE:
            header = self._tokenizer.decode(self._header or [], skip_special_tokens=False)
            self._header = None
            _, called, recipient = header.partition(" to=")
            thinks = header.rpartition(_CHANNEL)[2].strip().startswith("analysis")
            self._begin(Kind.TOOL_CALL if called else Kind.REASONING if thinks else Kind.TEXT)
            yield from self._said(f"to={recipient}{_MESSAGE}" if called else "")
        elif text in _ENDS:
            self._header = None
            self._begin(Kind.TEXT)
        else:
            self._header = [*([] if text == _START else self._header or []), token]

    def _said(self, text: str) -> list[Piece]:
        if self._trims:
            text = text.lstrip()
        if not text:
            return []
        self._trims = False
        return [Piece(self._kind, text, max(self._calls - 1, 0))]

    def flush(self) -> list[Piece]:
        """Return what was kept back, once no more tokens of a part come."""
        return self._said(self._stream.flush())
