"""Renders a chat template in a process of its own, which the kernel ends when the template takes too much.

`renderer.py` runs there, and this process never imports it. `rendering.py` describes the messages.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from llama_npu2.errors import UserError, first_line
from llama_npu2.text.rendering import (
    DONE,
    HEADER,
    LONGEST_ERROR,
    OUT_OF_MEMORY,
    REFUSED,
    UNKNOWN,
    Request,
    Setup,
    decoded,
    header,
    most_text,
)

LONGEST = 2.0
"""Most seconds of CPU time to compile a template, and to render each text. Checkpoints' templates take milliseconds."""
MOST_MEMORY = 256 << 20
"""Most bytes of the process's address space. Python and jinja take some 25 MB of it."""
MOST_MESSAGES = 16 << 20
"""Most bytes of messages as JSON."""
MOST_ADDED = 1 << 20
"""Bytes that a text may have beyond twice those of its messages as JSON. Tokenising takes some 250 times as much
memory, so this limits the memory that a template can make this process take."""
MOST_SOURCE = 1 << 20
"""Most characters of a template. Those of checkpoints have some ten thousand."""
PATIENCE = 8.0
"""Seconds after which the process is ended even where it takes no CPU time."""
_START = 60.0
"""Most seconds that the process may take to start."""

_PROGRAM = "import sys; sys.path += sys.argv[1:]; from llama_npu2.text.renderer import main; main()"
_HANDED_ON = ("TZ", "LD_LIBRARY_PATH")
"""Environment variables that the process gets. Others may hold secrets."""

Wording = Callable[[str], UserError]
"""A function from the reason for an error to the error."""


class Sandbox:
    """One template and its process.

    The process is started at once, and waited for when something is rendered. One that has ended is replaced for the
    next rendering. Threads render one after the other.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], renderer: Renderer | None = None) -> None:
        """Set the template up in a process. Raises UserError.

        Args:
            source: the template.
            special_tokens: the variables that it gets besides the messages.
            renderer: a process that was started before the template was known; by default a new one.
        """
        if len(source) > MOST_SOURCE:
            raise _not_compiled(f"it has {len(source)} characters, at most {MOST_SOURCE} are read")
        setup = Setup(
            source=source,
            special_tokens=special_tokens,
            longest=LONGEST,
            most_memory=MOST_MEMORY,
            most_added=MOST_ADDED,
        )
        self._setup = json.dumps(setup).encode()
        self._lock = threading.Lock()
        self._start(renderer or Renderer())
        _sandboxes.add(self)

    def _start(self, renderer: Renderer) -> None:
        renderer.send(self._setup)
        self._renderer, self._compiled = renderer, False

    def check(self) -> None:
        """Wait until the template is compiled. Raises UserError if it cannot be."""
        with self._lock:
            self._compile()

    def render(self, rendering: Request) -> str:
        """Return the text of what JSON can hold. Raises UserError."""
        try:
            request = json.dumps(rendering).encode()
        except Exception as error:  # a caller may give anything as messages
            raise _not_rendered(first_line(error)) from None
        if len(request) > MOST_MESSAGES:
            raise _not_rendered(f"they have {len(request)} bytes, at most {MOST_MESSAGES} are rendered")
        with self._lock:
            self._compile()
            return self._answer(_not_rendered, _not_rendered, PATIENCE, request)

    def close(self) -> None:
        """End the process. The next rendering starts another one."""
        with self._lock:
            self._renderer.end()

    def _compile(self) -> None:
        """Make sure that a process with the compiled template waits for requests. Raises UserError; then none does."""
        if self._renderer.has_ended():
            self._renderer.end()
            self._start(Renderer())
        if self._compiled:
            return
        try:
            self._answer(_not_started, _not_started, _START)
            self._answer(_not_compiled, _not_rendered, PATIENCE)
            self._compiled = True
        except BaseException:
            self._renderer.end()
            raise

    def _answer(self, failed: Wording, ended: Wording, patience: float, request: bytes | None = None) -> str:
        """Send a request, if there is one, and return the text of the process's next answer.

        Args:
            failed: makes the error for an answer that says that it failed.
            ended: makes the error for a process that ended, or is ended here because it may still be at work.
        """
        try:
            if request is not None:
                self._renderer.send(request)
            outcome, text = self._renderer.receive(patience)
        except TimeoutError:
            self._renderer.end()
            raise ended(f"it takes longer than {patience:g} s") from None
        except (OSError, EOFError, ValueError):
            self._renderer.end()
            raise ended(self._renderer.why_it_ended()) from None
        except BaseException:
            self._renderer.end()
            raise
        if outcome == DONE:
            return text
        raise {REFUSED: _refused, UNKNOWN: _unknown}.get(outcome, failed)(text[:LONGEST_ERROR])

    def _after_fork(self) -> None:
        """Forget the renderer in a forked process: it is the parent's child. Another thread may have held the lock."""
        self._lock = threading.Lock()
        self._renderer.forget()


_sandboxes: weakref.WeakSet[Sandbox] = weakref.WeakSet()


def _after_fork() -> None:
    for sandbox in _sandboxes:
        sandbox._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _not_started(why: str) -> UserError:
    return UserError(f"the chat template's process does not start ({why}): use raw text instead")


def _not_compiled(why: str) -> UserError:
    return UserError(f"the model's chat template is not valid jinja ({why}): use raw text instead")


def _not_rendered(why: str) -> UserError:
    return UserError(f"the chat template cannot render these messages: {why}")


def _refused(why: str) -> UserError:
    return UserError(f"the chat template refuses these messages: {why}")


def _unknown(why: str) -> UserError:
    return UserError(f"the chat template {why}")


class Renderer:
    """A process that renders one template, which the first message to it sets up.

    It is started at once. Only `receive` and, shortly, `end` wait for it.
    """

    def __init__(self) -> None:
        """Start the process. Raises UserError."""
        from signal import SIGINT

        requests, self._requests = _pipe()
        self._answers, answers = _pipe()
        python = sys.executable or "python"
        try:
            # Importing subprocess would take 5 ms.
            self._pid = os.posix_spawn(
                python,
                [python, "-I", "-S", "-c", _PROGRAM, *_search_path()],
                {"LC_ALL": "C"} | {name: os.environ[name] for name in _HANDED_ON if name in os.environ},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, requests, 0),
                    (os.POSIX_SPAWN_DUP2, answers, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,  # so that Ctrl-C does not reach it
                setsigmask=[SIGINT],  # nor ends it before it is in that group; it ignores what came
            )
        except OSError as error:
            _close(self._requests, self._answers)
            raise _not_started(f"{python}: {error.strerror}") from None
        finally:
            _close(requests, answers)
        self._end = weakref.finalize(self, _end, self._pid, self._requests, self._answers)
        self._status = 0
        os.set_blocking(self._requests, False)
        self._asked, self._unsent = 0, memoryview(b"")

    def send(self, request: bytes) -> None:
        """Send as much of a message as the process takes now. `receive` sends the rest."""
        self._asked = len(request)
        self._unsent = memoryview(header(request) + request)
        with contextlib.suppress(OSError):  # `receive` gets the error again
            self._write()

    def receive(self, patience: float) -> tuple[bytes, str]:
        """Return outcome and text of the next answer.

        Raises:
            TimeoutError: if it does not come within `patience` seconds.
            EOFError, OSError, ValueError: if the process ended, or its answer is not allowed.
        """
        deadline = time.monotonic() + patience
        while self._unsent:
            _wait(self._requests, select.POLLOUT, deadline)
            self._write()
        start = self._read(len(DONE) + HEADER, deadline)
        length = int.from_bytes(start[len(DONE) :], "little")
        if length > most_text(MOST_ADDED, self._asked):
            raise ValueError("it says too much")
        return start[: len(DONE)], decoded(self._read(length, deadline))

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._requests, self._unsent) :]

    def _read(self, count: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < count:
            _wait(self._answers, select.POLLIN, deadline)
            part = os.read(self._answers, count - len(content))
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    def has_ended(self) -> bool:
        """Return whether the process takes no requests any more."""
        if not self._end.alive:
            return True
        try:
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def end(self) -> None:
        """Close the pipes, kill the process if it still runs, and reap it."""
        if self._end.alive:
            self._status = self._end() or 0

    def forget(self) -> None:
        """Only close the pipes: the process is the child of another one."""
        if self._end.detach():
            _close(self._requests, self._answers)

    def why_it_ended(self) -> str:
        """Return the reason why the process ended."""
        from signal import SIGPROF

        if self._status == -SIGPROF:
            return f"it takes longer than {LONGEST:g} s"
        if self._status == OUT_OF_MEMORY:
            return f"it takes more than {MOST_MEMORY >> 20} MiB"
        return f"its process ended with status {self._status}"


def _end(pid: int, *pipes: int) -> int:
    """Close the pipes, and kill the process if it still runs.

    Returns:
        Its exit status: negative for a signal's number, 0 if somebody else has reaped it.
    """
    _close(*pipes)
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            from signal import SIGKILL

            os.kill(pid, SIGKILL)
            _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _search_path() -> list[str]:
    """Return the directories where the process finds this package and jinja2, after its own standard library."""
    here = Path(__file__).parents[2]
    return [str(entry.absolute()) for entry in (here, *(Path(entry) for entry in sys.path if isinstance(entry, str)))]


def _pipe() -> tuple[int, int]:
    """Return a pipe's read end and write end, neither of which has the number of a standard stream.

    Standard streams may be closed in this process, and are replaced in the other one.
    """
    ends = []
    for low in os.pipe():
        ends.append(low if low > 2 else fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3))
        if low <= 2:
            os.close(low)
    return ends[0], ends[1]


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Wait until a descriptor can be read from or written to. Raises TimeoutError."""
    poll = select.poll()
    poll.register(descriptor, event)
    # Even after the deadline, take what is there already: this process may have been stopped in the meantime.
    if not poll.poll(max(0.0, math.ceil((deadline - time.monotonic()) * 1000))):
        raise TimeoutError
