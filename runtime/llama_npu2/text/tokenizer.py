"""Text to tokens and back. Streamed text has only whole UTF-8 characters and never a part of a stop string."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial

import tokenizers
from tokenizers.decoders import DecodeStream

from llama_npu2.artifact.storage import Storage
from llama_npu2.errors import REMEDY, UserError, first_line
from llama_npu2.text import tokenizer_limits as limits

_LONG = 1 << 15
"""Characters or tokens from which on a text is handed over as a batch: the library then lets other threads run."""


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
        _check_unicode(text)
        with _explained("the tokenizer cannot encode this text"):
            if len(text) < _LONG:
                found = self.inner.encode(text, add_special_tokens=special_tokens)
            else:
                (found,) = self.inner.encode_batch_fast([text], add_special_tokens=special_tokens)
            ids: list[int] = found.ids
        return ids

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Return the token ids of a text in parts, without tokens of the post-processor. Raises UserError.

        Where the second value of a part is true, no added token is seen in its text.
        """
        ids: list[int] = []
        for part, plain in parts:
            encode = self._plain if plain else partial(self.encode, special_tokens=False)
            # After a line feed, SentencePiece does not put its space in front of a text.
            before, both = encode("\n"), encode("\n" + part)
            found = both[len(before) :] if ids and both[: len(before)] == before else encode(part)
            if plain and self.id(part) in found:
                raise UserError(f"the tokenizer makes a control token of the text {part!r}: leave it out")
            ids += found
        return ids

    def _plain(self, text: str) -> list[int]:
        """Return the token ids of a text in which no added token is seen."""
        _check_unicode(text)
        inner, splits = self.inner, [text]
        with _explained("the tokenizer cannot encode this text"):
            if inner.normalizer is not None:
                splits = [inner.normalizer.normalize_str(text)]
            if inner.pre_tokenizer is not None:
                splits = [split for split, _ in inner.pre_tokenizer.pre_tokenize_str(splits[0])]
            return [token.id for split in splits for token in inner.model.tokenize(split)]

    def id(self, text: str) -> int | None:
        """Return the id of the token with this text, None if there is none."""
        token: int | None = self.inner.token_to_id(text)
        return token

    @cached_property
    def added(self) -> Mapping[str, bool]:
        """The texts of added tokens, but for white space, and whether each is a special one."""
        tokens = self.inner.get_added_tokens_decoder().values()
        return {token.content: token.special for token in tokens if not token.content.isspace()}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens. Raises UserError."""
        with _explained("the tokenizer cannot decode these tokens"):
            if len(ids) < _LONG:
                text: str = self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
            else:
                (text,) = self.inner.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text


def _check_unicode(text: str) -> None:
    """Raise UserError for a text with half of a surrogate pair, as Python makes of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(f"the text is not UTF-8 ({half!r} is half of a character): save or send it as UTF-8") from None


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn the library's errors into UserErrors: it raises bare Exception, and no Exception at all where it panics."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise UserError(f"{what} ({first_line(error)}): {REMEDY}") from None


class TextStream:
    """Turns tokens into text piece by piece.

    It keeps back text that may be the beginning of a stop string until it is clear that it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stop = [s for s in stop if s]
        self._pending = ""
        self.stopped_by = ""
        """The stop string that has come, if one has."""

    def push(self, token: int) -> str:
        """Add a token; return the text that became certain with it, possibly none. Raises UserError."""
        with _explained("the tokenizer cannot decode these tokens"):
            self._pending += self._decoder.step(self._tokenizer.inner, token) or ""
        ends = [(i, stop) for stop in self._stop if (i := self._pending.find(stop)) >= 0]
        if ends:
            end, self.stopped_by = min(ends)
            piece, self._pending = self._pending[:end], ""
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
