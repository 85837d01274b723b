"""The keys of a server: whose request this is, and what each of them may share with others."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from contextvars import ContextVar

from llama_npu2.frozen import frozen

namespace: ContextVar[str] = ContextVar("namespace", default="")
"""The namespace of the KV cache for the request that this task answers."""

_LINE = re.compile(r"(?:(?P<name>[\w.-]{1,64}):\s+)?(?P<key>\S+)", re.ASCII)


@frozen
class Key:
    """A key that clients send."""

    name: str
    """What logs call it: its name in the file, or the number of its line."""
    digest: bytes
    """SHA-256 of the key."""


class Keys:
    """The keys that are let in; all requests are, if there are none."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self._keys = keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def several(self) -> bool:
        """Whether requests may have different keys."""
        return len(self._keys) > 1

    def found(self, given: str) -> Key | None:
        """Return the key that a request gives. How long that takes does not depend on which it is, or how close."""
        digest, found = _digest(given), None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    @classmethod
    def parsed(cls, text: str) -> Keys:
        """Return the keys of a file: one in each line, with a name and a colon before it or without.

        Raises ValueError that says what is wrong.
        """
        keys: dict[str, Key] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            found = _LINE.fullmatch(line.strip())
            if not found:
                raise ValueError(f"line {number} must hold one key without spaces, or NAME: KEY")
            if not found["key"].isascii():
                raise ValueError(f"line {number} has a key with characters that a header cannot hold: use ASCII alone")
            key = Key(found["name"] or f"{number}", _digest(found["key"]))
            if key.name in keys or any(each.digest == key.digest for each in keys.values()):
                raise ValueError(f"line {number} has the name or the key of another line: give each its own")
            keys[key.name] = key
        if not keys:
            raise ValueError("must hold one key in each line")
        return cls([*keys.values()])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
