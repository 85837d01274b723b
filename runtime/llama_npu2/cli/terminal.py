"""A conversation's two ends: lines with editing and history, replies as they come, in Markdown on a terminal.

prompt_toolkit and rich are used where they are installed; without them lines are read and text is printed as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from llama_npu2.cli.interrupts import Interrupts
from llama_npu2.errors import UserError
from llama_npu2.schema import load_json
from llama_npu2.trust import settings

PROMPT = "> "
MORE = ". "
"""In front of the further lines of a message."""
REMEMBERED = 1000
"""Messages of the history."""
THOUGHTS = 6
"""Lines of reasoning that are shown while it comes."""
REDRAWN = 0.08
"""Seconds between two drawings of what is not whole yet."""


def is_terminal() -> bool:
    """Somebody types, and sees what is printed."""
    return sys.stdin.isatty() and sys.stdout.isatty()


class Reader(Protocol):
    def read(self) -> str:
        """The next message, of one or several lines. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""


def open_reader(interrupts: Interrupts, commands: Sequence[str] = ()) -> Reader:
    """Return the best reader that there is for where the input comes from.

    Args:
        interrupts: stops lines that are read without prompt_toolkit.
        commands: words that Tab completes at the beginning of a message.
    """
    if not is_terminal():
        return Lines(PROMPT if sys.stdin.isatty() else "", None, interrupts)
    history = History(_state_directory())
    if find_spec("prompt_toolkit"):
        return _editor(history, commands, interrupts)
    return Lines(PROMPT, history, interrupts)


class History:
    """The lines that were typed, each a JSON string, in a file that only the user may read, if one can be written."""

    def __init__(self, directory: Path | None) -> None:
        self._path = directory / "chat_history" if directory else None

    def messages(self) -> list[str]:
        """The last ones, the oldest first. What is damaged is left out, and a file of twice as many is cut down."""
        found = []
        with contextlib.suppress(OSError, UserError):
            for line in self._path.read_bytes().splitlines() if self._path else ():
                with contextlib.suppress(ValueError):
                    message = load_json(line)
                    if isinstance(message, str):
                        found.append(message)
            if self._path and len(found) > 2 * REMEMBERED:
                kept = "".join(json.dumps(message) + "\n" for message in found[-REMEMBERED:])
                settings.replace(self._path, kept.encode(), 0o600)
        return found[-REMEMBERED:]

    def append(self, message: str) -> None:
        with contextlib.suppress(OSError):
            if self._path:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    os.fchmod(descriptor, 0o600)
                    file.write(json.dumps(message) + "\n")


def _state_directory() -> Path | None:
    """XDG Base Directory Specification; None for a user without a home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        return (Path(given) if given.startswith("/") else Path.home() / ".local/state") / "llama-npu2"
    except RuntimeError:
        return None


class Lines:
    """Lines as `input` reads them, with readline where Python has it. A backslash at the end of one joins the next."""

    def __init__(self, prompt: str, history: History | None, interrupts: Interrupts) -> None:
        self._prompt, self._history, self._interrupts = prompt, history, interrupts
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        with contextlib.suppress(ImportError):
            if history:
                import readline

                for message in history.messages():
                    readline.add_history(message)

    def read(self) -> str:
        self._interrupts.forget()
        with self._interrupts.raised():
            lines = [self._line(self._prompt)]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._line(self._prompt and MORE))
        message = "\n".join(lines)
        if self._history and message.strip():
            self._history.append(message)
        return message

    @staticmethod
    def _line(prompt: str) -> str:
        if prompt and not sys.stdout.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        return input(prompt)


def _keys(interrupts: Interrupts) -> Any:
    """Return the keys of the editor: Enter sends; Alt-Enter, and Enter after a backslash, begin a line.

    A Ctrl-C after Enter is for the answer, so what came before is forgotten there.
    """
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            interrupts.forget()
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _editor(history: History, commands: Sequence[str], interrupts: Interrupts) -> Reader:
    """Return a reader with prompt_toolkit's editor: Tab completes commands, what is pasted stays together."""
    import prompt_toolkit
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import History as Base

    class Kept(Base):
        def load_history_strings(self) -> Iterable[str]:
            return reversed(history.messages())

        def store_string(self, string: str) -> None:
            history.append(string)

    session: Any = prompt_toolkit.PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=MORE,
        key_bindings=_keys(interrupts),
        history=Kept(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
    )

    class Editor:
        def read(self) -> str:
            return str(session.prompt(handle_sigint=False))  # in raw mode Ctrl-C is a key, and no signal

    return Editor()


class Writer(Protocol):
    """Shows a reply that comes in pieces."""

    def __call__(self, piece: str) -> None:
        """Show a piece of the answer."""

    def thought(self, piece: str) -> None:
        """Show a piece of what the model thinks before it answers: dim, and folded once the answer begins."""


class _Plain:
    """A writer that prints pieces as they are, and of reasoning only how long it took."""

    def __init__(self) -> None:
        self._began: float | None = None

    def thought(self, _: str) -> None:
        if self._began is None:
            self._began = time.monotonic()

    def __call__(self, piece: str) -> None:
        self.fold()
        print(harmless(piece), end="", flush=True)

    def fold(self) -> None:
        if self._began is not None:
            dim, normal = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")
            print(f"{dim}{folded(time.monotonic() - self._began)}{normal}", file=sys.stderr, flush=True)
            self._began = None


def folded(seconds: float) -> str:
    """Return the line that stands for what was thought."""
    return f"(thought for {seconds:.1f} s: /reasoning shows it)"


@contextlib.contextmanager
def reply() -> Iterator[Writer]:
    """Shows a reply that comes in pieces: gives what takes them."""
    if is_terminal() and find_spec("rich"):
        from rich.console import Console

        console = Console()
        if not console.is_dumb_terminal:
            with formatted(console) as write:
                yield write
            return
    plain = _Plain()
    try:
        yield plain
    finally:
        plain.fold()
        print(flush=True)


def harmless(text: str) -> str:
    """Without control characters, which a terminal obeys, but for tabs and ends of lines."""
    return "".join(char for char in text if char in "\t\n" or unicodedata.category(char) != "Cc")


@contextlib.contextmanager
def formatted(console: Any) -> Iterator[Writer]:
    """Markdown on a rich console.

    What is whole (up to a blank line outside of a code block) is printed once, the rest is drawn anew as it grows, as
    much of its end as the screen holds. Of reasoning, the last lines are shown dim until the answer begins.
    """
    from rich.live import Live

    nothing = _markdown("")  # imports what pieces need before Ctrl-C can stop that half-way
    with Live(nothing, console=console, auto_refresh=False) as live:
        write = _Formatted(live)
        try:
            yield write
        finally:
            write.end()


class _Formatted:
    """A writer that draws on a `rich.live.Live`."""

    def __init__(self, live: Any) -> None:
        self._live = live
        self._rest = self._thoughts = ""
        self._began = 0.0
        self.drawn = 0.0
        """When something was drawn last."""

    def __call__(self, piece: str) -> None:
        self._fold()
        self._rest += harmless(piece)
        cut = blocks_end(self._rest)
        whole, self._rest = self._rest[:cut], self._rest[cut:]
        if not whole and time.monotonic() - self.drawn < REDRAWN:
            return
        self._live.update(_markdown(self._rest, self._live.console.height - 1), refresh=not whole)
        if whole:
            self._live.console.print(_markdown(whole))
            self._live.console.print()
        self.drawn = time.monotonic()

    def thought(self, piece: str) -> None:
        self._began = self._began or time.monotonic()
        self._thoughts += harmless(piece)
        if time.monotonic() - self.drawn >= REDRAWN:
            self._live.update(_Block(_dim(self._thoughts), THOUGHTS), refresh=True)
            self.drawn = time.monotonic()

    def _fold(self) -> None:
        if self._thoughts:
            self._live.update(_markdown(""), refresh=True)
            self._live.console.print(_dim(folded(time.monotonic() - self._began)))
            self._thoughts, self._began = "", 0.0

    def end(self) -> None:
        self._fold()
        self._live.update(_markdown(self._rest), refresh=True)


class _Block:
    """The last lines of what a text looks like, without blank ones around it, as rich draws them."""

    def __init__(self, content: Any, lines: int = 0) -> None:
        self._content, self._lines = content, lines

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        lines = console.render_lines(self._content, options, pad=False)
        drawn = [at for at, line in enumerate(lines) if "".join(each.text for each in line).strip()]
        for line in lines[drawn[0] : drawn[-1] + 1][-self._lines :] if drawn else ():
            yield from line
            yield Segment.line()


def _markdown(text: str, lines: int = 0) -> _Block:
    from rich.markdown import Markdown

    return _Block(Markdown(text, hyperlinks=False), lines)


def _dim(text: str) -> Any:
    from rich.text import Text

    return Text(text, style="dim")


def blocks_end(text: str) -> int:
    """Where the last block of a Markdown text begins that more text could still change; 0 if that is the first."""
    end = at = 0
    fence, blank = False, False
    for line in text.splitlines(keepends=True):
        if blank and not fence and not line[0].isspace():
            end = at
        fence ^= line.lstrip().startswith(("```", "~~~"))
        blank = not line.strip()
        at += len(line)
    return end
