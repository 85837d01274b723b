"""Text to tokens and back. Streams only whole UTF-8 characters and never part of a stop string."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

from llama_npu2.artifact.storage import Storage
from llama_npu2.errors import REMEDY, UserError, first_line
from llama_npu2.text import tokenizer_limits as limits


class Tokenizer:
    """A checkpoint's `tokenizer.json`."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner

    @classmethod
    def open(cls, storage: Storage) -> Tokenizer:
        """Load an artifact's; raises UserError if it is missing or damaged."""
        name = "tokenizer/tokenizer.json"
        path, file = storage.path / name, storage.find(name)
        with _explained(f"{path} cannot be read"), limits.explained(path):
            if file:
                limits.check_size(file.size)
            inner = tokenizers.Tokenizer.from_buffer(limits.judged(io.BytesIO(file.read_bytes() if file else b"")))
            limits.judge_model({name: getattr(inner.model, name, None) for name in limits.MODEL_SETTINGS})
        return cls(inner)

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Token ids; `special_tokens` adds what the tokenizer's post-processor adds (a beginning-of-text token).
        Raises UserError."""
        with _explained("the tokenizer cannot encode this text"):
            ids: list[int] = self.inner.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Raises UserError."""
        with _explained("the tokenizer cannot decode these tokens"):
            text: str = self.inner.decode(list(ids), skip_special_tokens=True)
        return text


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """What the library raises as one line: bare Exception, and where it fails itself what is no Exception at all."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{what} ({first_line(error)}): {REMEDY}") from None


class TextStream:
    """Turns tokens into text piece by piece.

    Text that could be the beginning of a stop string is held back until it is clear that it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = [s for s in stop if s]
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that became certain with this token, possibly none. Raises UserError."""
        with _explained("the tokenizer cannot decode these tokens"):
            self._held += self._decoder.step(self._tokenizer.inner, token) or ""
        ends = [i for i in (self._held.find(s) for s in self._stop) if i >= 0]
        if ends:
            self.stopped = True
            piece, self._held = self._held[: min(ends)], ""
            return piece
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        piece, self._held = self._held[:cut], self._held[cut:]
        return piece

    def flush(self) -> str:
        """What was held back, once no more tokens come."""
        piece, self._held = self._held, ""
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
