"""A conversation: its turns, the part of them that the model still gets, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.schema import Invalid, inside, list_of, load_json, one_of, record, string
from llama_npu2.trust import settings

LARGEST = 16 << 20
"""Bytes of a file that is read."""


@frozen
class Turn:
    question: str
    answer: str
    reasoning: str = ""
    """What the model thought before it answered."""


@dataclass
class Conversation:
    """`forgotten`: so many of the oldest turns are no longer given to the model, as its context is full."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    forgotten: int = 0

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """Return the messages for the model, `{"role", "content"}` each, with a new question at the end."""
        return _messages(self.system, self.turns[self.forgotten :], question)

    def undo(self) -> Turn | None:
        """Take the last turn back, if there is one."""
        turn = self.turns.pop() if self.turns else None
        self.forgotten = min(self.forgotten, len(self.turns))
        return turn

    def save(self, path: Path) -> None:
        """Write all of it as JSON that only the user may read: `{"messages": [...]}`.

        Replaces a file of the kind, and nothing else. Raises UserError.
        """
        try:
            if path.exists():
                Conversation.load(path)
        except (OSError, UserError):
            raise UserError(f"{path} is there and is no conversation: choose another name") from None
        said = {"messages": _messages(self.system, self.turns)}
        settings.replace(path, (json.dumps(said, ensure_ascii=False, indent=1) + "\n").encode(), 0o600)

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Raises UserError."""
        try:
            if not path.is_file():
                raise UserError(f"{path}: there is no such file: /save FILE writes one")
            if path.stat().st_size > LARGEST:
                raise UserError(f"{path} has more than {LARGEST >> 20} MiB: it is no conversation")
            said = load_json(path.read_bytes())
            _FILE(said)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise UserError(f"{path} is no conversation ({error}): load what /save wrote") from None
        return cls._of(said["messages"])

    @classmethod
    def _of(cls, messages: Sequence[dict[str, str]]) -> Conversation:
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        said = [message for message in messages if message["role"] != "system"]
        pairs = zip(said[::2], said[1::2], strict=True)
        turns = [Turn(each["content"], to["content"], to.get(_REASONING, "")) for each, to in pairs]
        return cls(system, turns)


_REASONING = "reasoning_content"
"""The field of a message that chat templates read; most leave the reasoning of earlier answers out."""


def _messages(system: str, turns: Sequence[Turn], question: str | None = None) -> list[dict[str, str]]:
    said = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        thought = {_REASONING: turn.reasoning} if turn.reasoning else {}
        said.append({"role": "user", "content": turn.question})
        said.append({"role": "assistant", "content": turn.answer} | thought)
    return said + ([] if question is None else [{"role": "user", "content": question}])


def _sayable(value: Any) -> None:
    """A string without halves of characters."""
    string(value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Invalid(value, "text that UTF-8 can hold") from None


def _in_turn(messages: Any) -> None:
    """A system prompt or none, then questions and answers in turn."""
    roles = one_of("system", "user", "assistant")
    list_of(record({"role": roles, "content": _sayable}, {_REASONING: _sayable}))(messages)
    first = bool(messages) and messages[0]["role"] == "system"
    for index, message in enumerate(messages[first:]):
        inside(index + first, record({"role": one_of(("user", "assistant")[index % 2])}), message)
    if (len(messages) - first) % 2:
        raise Invalid(messages[-1]["role"], "followed by an answer")


_FILE = record({"messages": _in_turn})
