"""`llama-npu2 chat DIR`: a conversation with a model in the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from llama_npu2.cli import terminal
from llama_npu2.cli.conversation import Conversation, Turn
from llama_npu2.cli.interrupts import Interrupts
from llama_npu2.engine.completion import Completion
from llama_npu2.engine.contexts import is_context
from llama_npu2.engine.llama import Llama
from llama_npu2.errors import UserError, closest
from llama_npu2.options import Sampling
from llama_npu2.text.replies import Kind

GREETING = "Type a message; /help lists commands, Ctrl-C stops an answer, /exit or end of input leaves."
HELP = {
    "/help": "this list",
    "/system TEXT": "what the model is told before all else; alone shows it, - removes it",
    "/regenerate": "answer the last message again, by other random numbers",
    "/undo": "take the last message and its answer back",
    "/reset": "start over; the system prompt stays",
    "/save FILE": "write the conversation as JSON, and what was processed of it to FILE.context",
    "/load FILE": "go on with one that was written, at once where its context fits",
    "/reasoning": "what the model thought before its last answer",
    "/stats": "how full the context is, what was reused, how fast answers come",
    "/exit": "leave; so does end of input (Ctrl-D)",
    "//...": "a message that begins with /",
    "Alt-Enter": "begins a line within a message; so does \\ at the end of one, and pasted lines stay together",
}
_WIDTH = max(map(len, HELP)) + 2


class Session:
    """A conversation in the terminal."""

    number: int
    """Number of the answer among those to the same seed; /regenerate counts it up."""
    current: bool
    """Whether the KV cache holds this conversation, and nothing else."""

    def __init__(self, llm: Llama, sampling: Sampling, template: Mapping[str, Any] | None = None) -> None:
        """Args: `template` has variables of the chat template."""
        self.llm, self.sampling, self.template = llm, sampling, dict(template or {})
        self.conversation = Conversation()
        self.number = self.generated = self.failures = 0
        self.current = True
        self.interrupts = Interrupts()

    def run(self) -> int:
        """Until /exit or the end of input. Returns the exit status: 1 if something failed and nobody was there."""
        say(f"{self.llm.manifest.model['name']}: {self.llm.description}\n{GREETING}")
        commands = [name.split()[0] for name in HELP if name[0] == "/" and name[1].isalpha()]
        reader = terminal.open_reader(self.interrupts, commands)
        with self.interrupts if terminal.is_terminal() else contextlib.nullcontext():
            self._converse(reader)
        return int(self.failures > 0 and not terminal.is_terminal())

    def _converse(self, reader: terminal.Reader) -> None:
        """Take messages and commands until /exit or the end of input."""
        while True:
            try:
                text = reader.read().strip()
                if text == "/exit":
                    break
                self.take(text)
            except EOFError:
                break
            except KeyboardInterrupt:
                if not terminal.is_terminal():
                    raise
                say("(/exit or Ctrl-D leaves)")
            except UserError as error:
                self.failures += 1
                say(f"error: {error}")

    def take(self, text: str) -> None:
        """A message or a command. Raises UserError, and the conversation is what it was."""
        if text.startswith("/") and not text.startswith("//"):
            name, *argument = text[1:].split(None, 1)
            self._command(name)(argument[0] if argument else "")
        elif text:
            self.number = 0
            self._answer(text.removeprefix("/") if text.startswith("//") else text)

    def _command(self, name: str) -> Callable[[str], None]:
        known: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "system": self._system,
            "regenerate": self._regenerate,
            "undo": self._undo,
            "reset": self._reset,
            "reasoning": self._reasoning,
            "save": self._save,
            "load": self._load,
            "stats": self._stats,
        }
        if name not in known:
            close = closest(name, [*known])
            hint = f"did you mean /{close}?" if close else "/help lists them"
            raise UserError(f"/{name} is no command: {hint} (//{name} sends it as a message)")
        return known[name]

    def _answer(self, question: str) -> None:
        """Stream the answer. One that is stopped stays as far as it came, as does what the KV cache holds of it."""
        messages = self._fitting(question)
        said = Completion()
        stopped = False
        try:
            with terminal.reply() as write, self.interrupts.raised():
                given: dict[str, Any] = {"keep_context": True, "number": self.number, "template": self.template}
                reply = self.llm.generate(messages, **given, **vars(self.sampling))
                said = reply.completion
                for piece in reply.pieces():
                    if piece.kind is Kind.REASONING:
                        write.thought(piece.text)
                    else:
                        write(piece.text)
                    self.interrupts.check()
        except KeyboardInterrupt:
            stopped = True
        self.current = True
        self.generated += self.llm.stats.generated_tokens
        if stopped and not said.text:
            say("stopped before the answer began: nothing is added to the conversation")
            return
        self.conversation.turns.append(Turn(question, said.text, said.reasoning))
        say(self._status(stopped))

    def _fitting(self, question: str) -> list[dict[str, str]]:
        """The messages up to a question, without the oldest turns if those leave no room for an answer."""
        llm, before = self.llm, self.conversation
        context = llm.context_length
        room = min(self.sampling.max_tokens, context // 4)
        for forgotten in range(before.forgotten, len(before.turns) + 1):
            kept = replace(before, forgotten=forgotten)
            messages = kept.messages(question)
            used = len(llm.encode(messages, template=self.template))
            if used + room <= context or (used < context and forgotten == len(before.turns)):
                break
        else:
            system = " with the system prompt" if before.system else ""
            raise UserError(f"the message has {used} tokens{system}, the context {context}: {llm.shorter}")
        if new := kept.forgotten - before.forgotten:
            turns = "the oldest turn is" if new == 1 else f"the {new} oldest turns are"
            system = ", the system prompt is not" if before.system else ""
            say(f"the context of {context} tokens is full: {turns} forgotten{system}")
        self.conversation = kept
        return messages

    def _status(self, stopped: bool) -> str:
        """Return a line about the last answer and the context that is left."""
        stats, notes = self.llm.stats, []
        if stopped:
            notes.append("stopped")
        elif stats.finish_reason == "length":
            full = self.llm.position >= self.llm.context_length
            notes.append("cut off: the context is full" if full else "cut off by max_tokens")
        notes += [self._context, f"{stats.reused_tokens} reused", f"{stats.decode_rate:.1f} tokens/s"]
        return f"[{', '.join(notes)}]"

    @property
    def _context(self) -> str:
        # What was taken back stays in the KV cache until the next message.
        held = self.llm.position if self.current else 0
        if not self.current and self.conversation.turns:
            held = len(self.llm.encode(self.conversation.messages(), template=self.template))
        used, context = held, self.llm.context_length
        return f"context {used} of {context} tokens ({used / context:.0%})"

    def _help(self, _: str) -> None:
        for name, does in HELP.items():
            say(f"{name:{_WIDTH}}{does}")

    def _system(self, text: str) -> None:
        if not text:
            say(self.conversation.system or "there is no system prompt: /system TEXT sets one")
            return
        changed = replace(self.conversation, system="" if text == "-" else text)
        if changed.system:
            with_it, without = (each.messages("?") for each in (changed, replace(changed, system="")))
            if self.llm.encode(with_it, template=self.template) == self.llm.encode(without, template=self.template):
                raise UserError("this model's chat template leaves system prompts out: say it in a message")
        self.conversation = changed
        say("the system prompt is set" if changed.system else "there is no system prompt any more")

    def _reasoning(self, _: str) -> None:
        say(self._last("show the reasoning of").reasoning or "the last answer came without reasoning")

    def _regenerate(self, _: str) -> None:
        last = self._last("answer again")
        self.conversation.undo()
        self.number += 1
        turns = list(self.conversation.turns)
        try:
            self._answer(last.question)
        finally:
            if self.conversation.turns == turns:
                self.conversation.turns.append(last)

    def _undo(self, _: str) -> None:
        self._last("take back")
        self.conversation.undo()
        self.number, self.current = 0, False
        say(f"taken back: {_turns(self.conversation)} left")

    def _last(self, purpose: str) -> Turn:
        if not self.conversation.turns:
            raise UserError(f"there is no message to {purpose}")
        return self.conversation.turns[-1]

    def _reset(self, _: str) -> None:
        self.conversation, self.current = Conversation(self.conversation.system), False
        say("a new conversation")

    def _save(self, name: str) -> None:
        path, llm = _path("save", name), self.llm
        context = _context_of(path)
        keeps = bool(self.conversation.turns) and self.current and llm.holds_many and llm.position > 0
        if keeps and os.path.lexists(context) and not is_context(context):
            raise UserError(f"{context} is there and is no context: choose another name")
        self.conversation.save(path)
        say(f"{_turns(self.conversation)} saved in {path}")
        if keeps:
            tokens = llm.save_context(context)
            say(f"the context of {tokens} tokens saved in {context} ({context.stat().st_size / 2**20:.0f} MiB)")

    def _load(self, name: str) -> None:
        path = _path("load", name)
        self.conversation, self.current = Conversation.load(path), False
        system = " and a system prompt" if self.conversation.system else ""
        say(f"{_turns(self.conversation)}{system} from {path}")
        context = _context_of(path)
        if not self.llm.holds_many or not os.path.lexists(context):
            return
        try:
            tokens = self.llm.load_context(context)
        except UserError as error:
            say(f"note: {error}; the conversation is processed again")
            return
        self.current = True
        say(f"the context of {tokens} tokens from {context}")

    def _stats(self, _: str) -> None:
        stats, said = self.llm.stats, self.conversation
        chosen = (f"{each.name}={getattr(self.sampling, each.name)}" for each in fields(Sampling))
        default = {f"{each.name}={each.default}" for each in fields(Sampling)}
        say(
            f"{self.llm.description}\n"
            f"{self._context}; {_turns(said)}, {said.forgotten} of them forgotten\n"
            f"last answer: {stats.prompt_tokens} tokens processed, {stats.reused_tokens} reused, first token after "
            f"{stats.ttft * 1e3:.0f} ms; {stats.generated_tokens} tokens, {stats.decode_rate:.1f} tokens/s\n"
            f"{self.generated} tokens generated; {' '.join(each for each in chosen if each not in default) or 'greedy'}"
        )


def _turns(conversation: Conversation) -> str:
    count = len(conversation.turns)
    return f"{count} turn{'s' * (count != 1)}"


def _path(command: str, name: str) -> Path:
    if not name:
        raise UserError(f"no file: /{command} FILE")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UserError(f"{name}: there is no such user") from None


def _context_of(path: Path) -> Path:
    """Return the name of the file with what was processed of a saved conversation."""
    return path.with_name(f"{path.name}.context")


def say(text: str) -> None:
    """Beside the conversation: on standard error, dim where that is a terminal."""
    dim, normal = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{terminal.harmless(text)}{normal}", file=sys.stderr, flush=True)
