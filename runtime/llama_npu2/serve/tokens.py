"""The text of single tokens, and log-probabilities of them as OpenAI's API has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from llama_npu2.engine.completion import Logprob
from llama_npu2.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character stands for in a byte-level vocabulary: itself if printable, else moved up."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


class Pieces:
    """What bytes of text each token of a vocabulary stands for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.dumps(json.loads(tokenizer.inner.to_str())["decoder"])
        self._byte_level = '"ByteLevel"' in decoder
        added = tokenizer.inner.get_added_tokens_decoder()
        self._added = {token: each.content for token, each in added.items()}
        self._unseen = {token for token, each in added.items() if each.special}

    @cached_property
    def longest(self) -> int:
        """The most characters of a token's text."""
        return max(map(len, self._tokenizer.inner.get_vocab()), default=1)

    def bytes(self, token: int) -> bytes:
        """Return the text of a token in UTF-8, of which it may be a part that is no whole character."""
        if token in self._added:
            return self._added[token].encode()
        piece: str = self._tokenizer.inner.id_to_token(token) or ""
        if self._byte_level:
            return bytes(_BYTES[char] for char in piece if char in _BYTES)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def text(self, token: int) -> str:
        """Return the text of a token; its bytes in hexadecimal digits if they are no text alone."""
        content = self.bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": logprob, "bytes": [*self.bytes(token)]}

    def of_chat(self, logprobs: Iterable[Logprob]) -> dict[str, Any]:
        """Return log-probabilities as a chat completion has them."""
        content = [
            self._entry(each.token, each.logprob) | {"top_logprobs": [self._entry(*other) for other in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def of_completion(
        self, logprobs: Iterable[Logprob], offset: int, first: int | None = None
    ) -> tuple[dict[str, Any], int]:
        """Return log-probabilities as a completion has them, and the offset of the text after them.

        Args:
            logprobs: of consecutive tokens.
            offset: number of characters of text before them.
            first: a token in front of them that has none, because nothing comes before it.
        """
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        content = b""

        def add(token: int, logprob: float | None, top: dict[str, float] | None) -> None:
            nonlocal content
            values = self.text(token), logprob, top, offset + len(content.decode(errors="ignore"))
            for column, value in zip(found.values(), values, strict=True):
                column.append(value)
            content += b"" if token in self._unseen else self.bytes(token)

        if first is not None:
            add(first, None, None)
        for each in logprobs:
            add(each.token, each.logprob, {self.text(token): logprob for token, logprob in each.top})
        return found, offset + len(content.decode(errors="ignore"))


_BYTES = _bytes_of_characters()
