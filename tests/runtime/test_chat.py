"""`llama-npu2 chat` in a terminal of its own (a pty): editing, commands, Ctrl-C, a full context.

Answers that go on from the KV cache are those of a fresh start.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import io
import itertools
import json
import os
import pty
import random
import re
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.cli.conversation import LARGEST, Conversation, Turn
from llama_npu2.cli.interrupts import Interrupts
from llama_npu2.cli.session import Session
from llama_npu2.cli.terminal import REMEMBERED, History, blocks_end, formatted, harmless
from llama_npu2.engine.completion import Completion, Reply
from llama_npu2.options import Sampling
from llama_npu2.text.chat_template import ChatTemplate
from llama_npu2.text.replies import Piece
from tests.conftest import ROOT

ANSI = re.compile(r"\x1b\][^\x07]*\x07|\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]|\r")
PASTE, PASTED = "\x1b[200~", "\x1b[201~"
CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"
ANSWERED = r"\[[^\]\n]*context \d+ of .*tokens/s\]"
PLAIN = """
import runpy, sys
sys.modules["rich"] = sys.modules["prompt_toolkit"] = None
runpy.run_module("llama_npu2", run_name="__main__")
"""
"""As if they were not installed."""


def _own_terminal() -> None:
    """In a new process: this terminal is its, and Ctrl-C, which a shell ignores for what it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A program on a pty, what it printed since it was last asked, and keys for it."""

    def __init__(self, command: list[str], state: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'runtime'}",
            "XDG_STATE_HOME": str(state),
            "TERM": "xterm-256color",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody answers where the cursor is
        }
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        self._seen = ""

    def send(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, pattern: str, seconds: float = 120) -> str:
        """What is printed up to the end of the first match, without escape sequences."""
        end, output = time.monotonic() + seconds, select.poll()
        output.register(self._ours, select.POLLIN)
        while not (found := re.search(pattern, self._seen)):
            ready = output.poll(1000 * max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} within {seconds} s: {self._seen[-2000:]}"
            try:
                more = os.read(self._ours, 1 << 16)
            except OSError:  # EIO: the program is gone
                more = b""
            assert more, f"it ended with {self._process.wait(10)}, without {pattern!r}: {self._seen[-2000:]}"
            self._seen = ANSI.sub("", self._seen + more.decode(errors="replace"))
        shown, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return shown

    def type(self, keys: str) -> None:
        """At the next prompt: before it, the terminal would change them."""
        self.until(r"(^|\n)>[ \b]")
        self.send(keys)

    def say(self, message: str, pattern: str = ANSWERED) -> str:
        """Send a message, and wait for what follows the answer."""
        self.type(f"{message}\r")
        return self.until(pattern)

    def status(self) -> int:
        """Of the exit, which must come."""
        with contextlib.suppress(OSError):
            while os.read(self._ours, 1 << 16):
                pass
        return self._process.wait(60)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Any]:
    opened: list[Terminal] = []

    def start(*command: str) -> Terminal:
        opened.append(Terminal([sys.executable, *command], tmp_path / "state"))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def endless(llm: Llama) -> str:
    """A bias that keeps replies from ending."""
    return ",".join(f"{token}:-100" for token in llm.eos)


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[Llama]:
    model = load(demo)
    yield model
    model.close()


def replayed(llm: Llama, path: Path, **sampling: Any) -> list[tuple[str, str]]:
    """Answers of a saved conversation, and those of a fresh start to each of its questions, which may go on."""
    said = Conversation.load(path)
    pairs = []
    for index, turn in enumerate(said.turns):
        messages = Conversation(said.system, said.turns[:index]).messages(turn.question)
        fresh = ""
        for piece in llm.generate(messages, **sampling):
            fresh += piece
            if len(fresh) > len(turn.answer):
                break
        pairs.append((turn.answer, fresh))
    return pairs


def test_a_session(terminals: Any, demo: Path, llm: Llama, tmp_path: Path) -> None:
    """All commands, keys and what is said of them."""
    talk = terminals("-m", "llama_npu2", "chat", str(demo), "--temperature=0.8", "--seed=3", "--max-tokens=30")
    assert "Paris" in talk.say("The capital of France is")
    shown = talk.say("The capital of Italy is")
    assert "Rome" in shown
    reused = int(re.search(r"(\d+) reused", shown)[1])  # type: ignore[index]
    assert reused >= len(llm.encode([{"role": "user", "content": "The capital of France is"}]))
    assert f", {reused} reused, first token after" in talk.say("/stats", r"temperature=0.8 seed=3\s")

    saved = tmp_path / "saved.json"
    talk.say(f"/save {saved}", "2 turns saved in")
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    talk.say("/undo", "taken back: 1 turn left")
    talk.say("/regenerate")
    talk.say("/reset", "a new conversation")
    talk.say("/undo", "there is no message to take back")
    talk.say(f"/load {saved}", "2 turns from")
    talk.say("/system", "there is no system prompt")
    talk.say("/system You are a poet.", "the system prompt is set")
    talk.say("/system", r"\nYou are a poet\.")
    talk.say(f"/save {saved}", "2 turns saved in")
    assert Conversation.load(saved).system == "You are a poet."
    talk.say("/system -", "there is no system prompt any more")
    talk.say("/sav x", r"did you mean /save\?")
    talk.say("/help", "pasted lines stay together")
    talk.say(f"/load {tmp_path / 'none'}", "there is no such file")

    # A line begun by a backslash, one by Alt-Enter, two that were pasted; a message that begins with a slash.
    talk.type(f"one\\\rtwo{ALT_ENTER}three{PASTE}\nfour\nfive{PASTED}\r")
    talk.until(ANSWERED)
    talk.say("//six")
    talk.say(f"/save {saved}", "4 turns saved in")
    questions = [turn.question for turn in Conversation.load(saved).turns]
    assert questions == ["The capital of France is", "The capital of Italy is", "one\ntwo\nthree\nfour\nfive", "/six"]
    talk.type(CTRL_C)
    talk.until("/exit or Ctrl-D leaves")
    talk.type(CTRL_D)
    assert talk.status() == 0
    for kept, fresh in replayed(llm, saved, temperature=0.8, seed=3, max_tokens=30):
        assert kept == fresh, "as from a fresh cache"

    history = tmp_path / "state/llama-npu2/chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert json.loads(history.read_text().splitlines()[0]) == "The capital of France is"
    again = terminals("-m", "llama_npu2", "chat", str(demo), "--max-tokens=1")
    again.say(UP * 3, "cut off by max_tokens")
    assert json.loads(history.read_text().splitlines()[-1]) == questions[2]


def test_lines_without_packages(terminals: Any, demo: Path, tmp_path: Path) -> None:
    """A message of two lines, from the history of the session before, then through a pipe."""
    saved, command = tmp_path / "saved.json", ("chat", str(demo), "--max-tokens=1")
    talk = terminals("-c", PLAIN, *command)
    talk.type("one\\\r")
    talk.until(r"\n\. ")
    talk.send("two\r")
    talk.until(ANSWERED)
    talk.type(CTRL_D)
    assert talk.status() == 0
    talk = terminals("-c", PLAIN, *command)
    talk.say(UP)
    talk.say(f"/save {saved}", "1 turn saved in")
    assert Conversation.load(saved).turns[0].question == "one\ntwo"
    given = f"three\\\nfour\n/save {saved}\n/nothing\n"
    piped = [sys.executable, "-m", "llama_npu2", *command]
    run = subprocess.run(piped, input=given, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (run.returncode, len(run.stdout.splitlines())) == (1, 1), "a command failed, and nobody saw it"
    assert "error: /nothing is no command" in run.stderr
    assert Conversation.load(saved).turns[0].question == "three\nfour"
    closed = subprocess.run(["sh", "-c", 'exec "$@" <&-', "-", *piped], capture_output=True, text=True, cwd=ROOT)
    assert (closed.returncode, closed.stdout) == (0, ""), "as with an empty input"


def test_the_history_is_cut_down(tmp_path: Path) -> None:
    history = History(tmp_path)
    for number in range(2 * REMEMBERED + 1):
        history.append(f"{number}\n")
    with (tmp_path / "chat_history").open("a") as file:
        file.write("{\n[1]\n")
    assert history.messages() == [f"{number}\n" for number in range(REMEMBERED + 1, 2 * REMEMBERED + 1)]
    assert len((tmp_path / "chat_history").read_text().splitlines()) == REMEMBERED
    assert stat.S_IMODE((tmp_path / "chat_history").stat().st_mode) == 0o600
    (tmp_path / "file").write_text("")
    for nowhere in (None, tmp_path / "file"):
        History(nowhere).append("lost")
        assert History(nowhere).messages() == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", [("-m", "llama_npu2"), ("-c", PLAIN)], ids=["rich", "plain"])
def test_ctrl_c_stops_the_answer_only(
    terminals: Any, demo: Path, llm: Llama, tmp_path: Path, start: tuple[str, ...]
) -> None:
    """What came of it stays; the next answers are those of a fresh start, so the cache is what it should be."""
    bias, saved = endless(llm), tmp_path / "saved.json"
    talk = terminals(*start, "chat", str(demo), "--max-tokens=2000", f"--logit-bias={bias}")
    for _ in range(2):
        talk.type("Once upon a time\r")
        talk.until(r"Once upon a time\s[^>]*\w\w\w")
        talk.send(CTRL_C)
        talk.until(r"\[stopped, context \d+ of 2048 tokens \(\d+%\), ")
    talk.say(f"/save {saved}", "2 turns saved in")
    *stopped, _ = replayed(llm, saved, max_tokens=2000, logit_bias=bias)
    for kept, fresh in stopped:
        assert kept and len(kept) < len(fresh) and fresh.startswith(kept)
    talk.say("/undo", "1 turn left")
    talk.type("Who are you?\r")
    talk.until(r"Who are you\?\s[^>]*\w\w\w")
    talk.send(CTRL_C)
    talk.until(r"\[stopped, .*[1-9]\d* reused")
    talk.say(f"/save {saved}", "2 turns saved in")
    for kept, fresh in replayed(llm, saved, max_tokens=2000, logit_bias=bias):
        assert kept and fresh.startswith(kept)
    talk.type("/exit\r")
    assert talk.status() == 0


def test_ctrl_c_is_raised_once_and_only_where_it_stops_something() -> None:
    def press() -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        press()
        with pytest.raises(KeyboardInterrupt), interrupts.raised():
            raise AssertionError("what came before is not raised")
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), interrupts.raised():
                try:
                    press()
                finally:
                    press()
        with interrupts.raised():
            pass
        with pytest.raises(KeyboardInterrupt), interrupts.raised():
            with contextlib.suppress(KeyboardInterrupt):
                press()
            interrupts.check()
        press()
        interrupts.forget()
        with interrupts.raised():
            pass
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_anywhere_leaves_the_model_as_it_was(llm: Llama) -> None:
    """KeyboardInterrupt comes wherever Python is: what is processed later is what a fresh start gives."""

    def stopping(*_: Any) -> None:
        raise KeyboardInterrupt

    asked: dict[str, Any] = {"max_tokens": 20, "raw": True}
    started = time.monotonic()
    whole = llm.generate("Once upon a time", **asked).text
    longest, moments, stopped = time.monotonic() - started, random.Random(5), 0
    before = signal.signal(signal.SIGALRM, stopping)
    try:
        for number in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, longest))
                try:
                    assert llm.generate("Once upon a time", **asked, keep_context=number % 2 > 0).text == whole
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                stopped += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert stopped > 10
    for keep in (True, False):
        assert llm.generate("Once upon a time", **asked, keep_context=keep).text == whole


@pytest.mark.parametrize("line", range(6))
def test_ctrl_c_does_not_leave_the_model_at_work(llm: Llama, line: int) -> None:
    """KeyboardInterrupt comes on each line of what keeps other threads out, which most random moments miss."""
    code, lines = inspect.unwrap(Llama._alone).__code__, itertools.count()

    def on_line(_: FrameType, event: str, __: Any) -> Any:
        if event == "line" and next(lines) == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return on_line

    sys.settrace(lambda frame, *_: on_line if frame.f_code is code else None)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            llm.generate("Once", max_tokens=1, raw=True).whole()
    finally:
        sys.settrace(None)
    assert next(lines) > line
    llm.generate("Once", max_tokens=1, raw=True).whole()


def test_a_full_context_is_seen(terminals: Any, demo: Path, llm: Llama, tmp_path: Path) -> None:
    """The oldest turns are forgotten, not the system prompt; a message that cannot fit changes nothing."""
    saved, long = tmp_path / "saved.json", "The capital of France is Paris. " * 60
    talk = terminals("-m", "llama_npu2", "chat", str(demo), "--max-tokens=5")
    talk.say("/system Be brief.", "is set")
    count = len(llm.encode(long, raw=True))
    assert 2048 < 6 * count < 2048 * 3
    turns = 2048 // count
    for _ in range(turns):
        talk.say(f"{PASTE}{long}{PASTED}")
    shown = talk.say(f"{PASTE}{long}{PASTED}")
    assert "the context of 2048 tokens is full: the oldest turn is forgotten, the system prompt is not" in shown
    assert f"{turns + 1} turns, 1 of them forgotten" in talk.say("/stats", "greedy|max_tokens=5")
    talk.say(f"/save {saved}", f"{turns + 1} turns saved in")
    said = Conversation.load(saved)
    kept = Conversation(said.system, said.turns[1:-1]).messages(said.turns[-1].question)
    assert said.turns[-1].answer == "".join(llm.generate(kept, max_tokens=5))
    refused = talk.say(f"{PASTE}{long * (turns + 1)}{PASTED}", "error: the message has .*")
    assert re.search(r"has \d+ tokens with the system prompt, the context 2048: shorten the prompt", refused)
    assert f"{turns + 1} turns, 1 of them" in talk.say("/stats", "max_tokens=5")


def test_a_context_is_saved_and_loaded_with_its_conversation(
    llm: Llama, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved, context = tmp_path / "talk.json", tmp_path / "talk.json.context"

    def resumed() -> tuple[str, int]:
        """The answer to a next message after /load, and how many tokens were reused for it."""
        llm.generate([3] * 300, max_tokens=1).whole()
        session = Session(llm, Sampling(max_tokens=20))
        session.take(f"/load {saved}")
        session.take("The capital of Spain is")
        return session.conversation.turns[-1].answer, llm.stats.reused_tokens

    session = Session(llm, Sampling(max_tokens=20))
    session.take(f"/save {saved}")
    assert not context.exists()  # nothing was processed
    session.take("The capital of France is")
    session.take(f"/save {saved}")
    held = llm.position
    assert f"the context of {held} tokens saved in {context}" in capfd.readouterr().err
    assert stat.S_IMODE(context.stat().st_mode) == 0o600
    session.take("/undo")
    before = context.read_bytes()
    session.take(f"/save {tmp_path / 'other.json'}")
    assert not (tmp_path / "other.json.context").exists()  # the cache holds more than the conversation

    answer, reused = resumed()
    assert reused >= held - 1
    assert f"the context of {held} tokens from" in capfd.readouterr().err
    context.write_bytes(before[:-1])
    assert resumed() == (answer, 0)
    assert "the context is damaged: delete it and save it again; the conversation is processed again" in (
        capfd.readouterr().err
    )
    context.write_text("mine")
    with pytest.raises(UserError, match="is there and is no context: choose another name"):
        session = Session(llm, Sampling(max_tokens=5))
        session.take("Hello")
        session.take(f"/save {saved}")
    assert context.read_text() == "mine" and len(Conversation.load(saved).turns) == 1
    context.unlink()
    assert resumed() == (answer, 0)


def test_an_answer_ends_where_the_context_does(llm: Llama, capfd: pytest.CaptureFixture[str]) -> None:
    session = Session(llm, Sampling(max_tokens=600, logit_bias=(endless(llm),)))
    session.take("The capital of France is Paris. " * 210)
    assert "[cut off: the context is full, context 2048 of 2048 tokens (100%)" in capfd.readouterr().err
    session.take("Hello")
    assert "the oldest turn is forgotten\n" in capfd.readouterr().err
    assert len(session.conversation.turns) == 2 and session.conversation.messages()[0]["content"] == "Hello"


def test_an_answer_that_fails_changes_nothing(
    llm: Llama, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(error: BaseException) -> Any:
        def pieces() -> Iterator[Piece]:
            raise error
            yield

        return lambda *_, **__: Reply(pieces(), Completion())

    session = Session(llm, Sampling(max_tokens=8, temperature=5.0, seed=2))
    session.take("Once upon a time")
    (first,) = before = list(session.conversation.turns)
    for message in ("/regenerate", "Hello"):
        monkeypatch.setattr(llm, "generate", failing(KeyboardInterrupt()))
        session.take(message)
        assert "nothing is added to the conversation" in capfd.readouterr().err
        monkeypatch.setattr(llm, "generate", failing(UserError("the device is gone")))
        with pytest.raises(UserError, match="is gone"):
            session.take(message)
        assert session.conversation.turns == before
    monkeypatch.undo()
    session.take("/regenerate")
    (other,) = session.conversation.turns
    assert (other.question, other.answer != first.answer) == (first.question, True)
    monkeypatch.setitem(llm.__dict__, "chat_template", ChatTemplate("{{ messages[-1].content }}", {}))
    with pytest.raises(UserError, match="template leaves system prompts out"):
        session.take("/system Be brief.")
    assert not session.conversation.system


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.2}])
def test_a_reused_prefix_gives_the_tokens_of_a_fresh_start(llm: Llama, sampling: dict[str, Any]) -> None:
    said, reused = Conversation(), 0
    for question in ("Once upon a time", "The capital of France is", "What is that?", "1, 2, 3,"):
        messages = said.messages(question)
        (kept,) = llm.complete(messages, keep_context=True, max_tokens=40, logprobs=2, **sampling)
        with contextlib.closing(load(llm.manifest.directory, 1)) as other:
            (fresh,) = other.complete(messages, max_tokens=40, logprobs=2, **sampling)
        assert (kept.tokens, kept.text, kept.logprobs) == (fresh.tokens, fresh.text, fresh.logprobs)
        assert fresh.stats.reused_tokens == 0
        reused += kept.stats.reused_tokens
        said.turns.append(Turn(question, kept.text))
    assert reused > 100


def test_doit_chat_outlives_ctrl_c(terminals: Any, demo: Path, llm: Llama) -> None:
    """It reaches doit's process, too."""
    given = (f"artifacts={demo.parents[1]}", f"logit_bias={endless(llm)}", "max_tokens=2000")
    talk = terminals("-m", "doit", "chat", *given)
    for _ in range(2):
        talk.type("Once upon a time\r")
        talk.until(r"Once upon a time\s[^>]*\w\w\w")
        talk.send(CTRL_C)
        talk.until(r"\[stopped, ")
    talk.type("/exit\r")
    assert talk.status() == 0


def test_markdown_is_drawn_once() -> None:
    """Blocks as they are whole, the rest again and again; nothing that a terminal would obey."""
    from rich.console import Console

    text = "# Title\n\nSome **bold** text.\n\n```python\nx = 1\n\ny = 2\n```\n\n1. one\n2. \x1b[31mtwo\x07\n"
    screen = io.StringIO()
    with formatted(Console(file=screen, force_terminal=True, width=60, height=20)) as write:
        for piece in re.findall(r"(?s).{1,3}", text):
            write(piece)
    shown = ANSI.sub("", screen.getvalue())
    assert "**" not in shown and "```" not in shown
    assert shown.count("Title") <= 2 and shown.index("bold") < shown.index("x = 1") < shown.index("1 one")
    assert "\x07" not in screen.getvalue() and "2 [31mtwo" in shown
    assert harmless("a\x1b]0;x\x07\tb\n\u200d") == "a]0;x\tb\n\u200d"


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("a\n\nb", "a\n\n"),
        ("a\n\n", ""),
        ("- a\n\n  b", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("a\n\n```\nb\n\nc", "a\n\n"),
        ("  ```\na\n\nb", ""),
    ],
)
def test_blocks_that_are_whole(text: str, done: str) -> None:
    assert text[: blocks_end(text)] == done


BAD_CONVERSATIONS = {
    "not json": (b"{", "is no conversation"),
    "no messages": (b"{}", "must be an object with messages"),
    "a role": (b'{"messages": [{"role": "tool", "content": ""}]}', "messages[0].role = "),
    "an answer first": (b'{"messages": [{"role": "assistant", "content": ""}]}', "must be one of user"),
    "no answer": (b'{"messages": [{"role": "user", "content": ""}]}', "must be followed by an answer"),
    "half a character": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "text that UTF-8 can hold"),
    "numbers": (b'{"messages": [{"role": "user", "content": 1}]}', "must be a string"),
    "too large": (b" " * (LARGEST + 1), "more than 16 MiB"),
}


@pytest.mark.parametrize("name", BAD_CONVERSATIONS)
def test_a_damaged_conversation_is_one_line(name: str, tmp_path: Path) -> None:
    content, message = BAD_CONVERSATIONS[name]
    path = tmp_path / "saved.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        Conversation.load(path)
    with pytest.raises(UserError, match="is there and is no conversation"):
        Conversation().save(path)
    assert path.read_bytes() == content


def test_what_is_forgotten_is_forgotten_once() -> None:
    said = Conversation(turns=[Turn("a", "b"), Turn("c", "d")], forgotten=2)
    said.undo()
    said.turns.append(Turn("e", "f"))
    assert [message["content"] for message in said.messages("g")] == ["e", "f", "g"]


def test_a_conversation_survives_its_file(tmp_path: Path) -> None:
    said = Conversation("Be brief.", [Turn("naïve\n日本語", "🙂"), Turn("", "")])
    said.save(tmp_path / "saved.json")
    assert Conversation.load(tmp_path / "saved.json") == said
    with pytest.raises(UserError, match="there is no such file"):
        Conversation.load(tmp_path)
