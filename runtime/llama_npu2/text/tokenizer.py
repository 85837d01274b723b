"""Text to tokens and back. Streamed text has only whole UTF-8 characters and never a part of a stop string."""

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
        """Load an artifact's tokenizer. Raises UserError if it is missing, damaged or refused."""
        name = "tokenizer/tokenizer.json"
        path, file = storage.path / name, storage.find(name)
        with _explained(f"{path} cannot be read"), limits.explained(path):
            if file:
                limits.check_size(file.size)
            inner = tokenizers.Tokenizer.from_buffer(limits.judged(io.BytesIO(file.read_bytes() if file else b"")))
            limits.judge_model({name: getattr(inner.model, name, None) for name in limits.MODEL_SETTINGS})
        return cls(inner)

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Return the token ids of a text.

        With `special_tokens` they include those that the tokenizer's post-processor adds (a beginning-of-text token).
        Raises UserError.
        """
        with _explained("the tokenizer cannot encode this text"):
            ids: list[int] = self.inner.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones. Raises UserError."""
        with _explained("the tokenizer cannot decode these tokens"):
            text: str = self.inner.decode(list(ids), skip_special_tokens=True)
        return text


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn the library's errors into UserErrors: it raises bare Exception, and no Exception at all where it panics."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{what} ({first_line(error)}): {REMEDY}") from None


class TextStream:
    """Turns tokens into text piece by piece.

    It keeps back text that may be the beginning of a stop string until it is clear that it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = [s for s in stop if s]
        self._pending = ""
        self.stopped = False
        """Whether a stop string has come."""

    def push(self, token: int) -> str:
        """Add a token; return the text that became certain with it, possibly none. Raises UserError."""
        with _explained("the tokenizer cannot decode these tokens"):
            self._pending += self._decoder.step(self._tokenizer.inner, token) or ""
        ends = [i for i in (self._pending.find(s) for s in self._stop) if i >= 0]
        if ends:
            self.stopped = True
            piece, self._pending = self._pending[: min(ends)], ""
            return piece
        keep = max((_overlap(self._pending, s) for s in self._stop), default=0)
        cut = len(self._pending) - keep
        piece, self._pending = self._pending[:cut], self._pending[cut:]
        return piece

    def flush(self) -> str:
        """Return the text that was kept back, once no more tokens come."""
        piece, self._pending = self._pending, ""
        return piece


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
