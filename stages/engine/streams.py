"""Standard streams while doit runs tasks.

Standard output gets only the result that a command was asked for, so that it can go into a file or a pipe. All else
goes to standard error: names of steps, output of steps, and whatever libraries and other programs write to file
descriptor 1.

When the reader of the output closes it, the process ends without a message, as others do by SIGPIPE.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO, cast

from llama_npu2.errors import CLOSED, UserError, unwritable

_answering: ContextVar[bool] = ContextVar("answering", default=False)


class _Lasting:
    """A stream to which writing does not fail when its reader has closed it.

    SIGPIPE ends the process then, see `end_with_readers`. Other failures, as on a full disk, raise UserError.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _write_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _write_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _write_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        pass
    except OSError as error:
        raise UserError(unwritable(error)) from None


class _Parted:
    """`sys.stdout` while doit runs tasks: standard output for the thread of a command, standard error for others."""

    def __init__(self, answers: _Lasting) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.answers if _answering.get() else sys.stderr, name)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Let this thread print to standard output inside the `with` block, in which it runs a command."""
    token = _answering.set(True)
    try:
        yield
        sys.stdout.flush()
    finally:
        _answering.reset(token)


@contextlib.contextmanager
def parted() -> Iterator[None]:
    """Separate results from other output inside the `with` block, in this process and its forks."""
    out, err = sys.stdout, sys.stderr
    out.flush()
    answers = _Lasting(os.fdopen(os.dup(1), "w", encoding=out.encoding, errors=out.errors))
    os.dup2(2, 1)
    sys.stdout, sys.stderr = cast(TextIO, _Parted(answers)), cast(TextIO, _Lasting(err))
    try:
        yield
    finally:
        os.dup2(answers.fileno(), 1)
        sys.stdout, sys.stderr = out, err
        with contextlib.suppress(OSError):  # a failed write was reported before
            answers.close()


def for_answers() -> int | None:
    """Return the descriptor of standard output for a program that prints the result itself.

    None if programs inherit that one anyway.
    """
    return sys.stdout.answers.fileno() if isinstance(sys.stdout, _Parted) else None


# Closed pipes


def end_with_readers() -> None:
    """End this process from now on with status `CLOSED` and without a message when the reader of its output closes it.

    Python ignores SIGPIPE; without this, printing fails with a traceback.
    """
    owner, ignored = os.getpid(), False

    def end(*_: object) -> None:
        gone = [output for output in (1, 2, for_answers()) if output is not None and _has_no_reader(output)]
        if not gone and not ignored:
            return  # it was a network connection: writing to it raises an error
        _discard(gone)
        if os.getpid() == owner:
            _stop_children()
            raise SystemExit(CLOSED)
        if os.getppid() == owner:
            os.kill(owner, signal.SIGPIPE)  # this is a step in a process of its own, which noticed first

    def end_again(unraisable: sys.UnraisableHookArgs) -> None:
        """Python only prints what is raised while it forks or deletes an object: end as soon as that is over."""
        nonlocal ignored
        if os.getpid() != owner or not isinstance(unraisable.exc_value, SystemExit):
            sys.__unraisablehook__(unraisable)
            return
        ignored = True
        threading.Timer(0.01, os.kill, (owner, signal.SIGPIPE)).start()

    signal.signal(signal.SIGPIPE, end)
    sys.unraisablehook = end_again
    atexit.register(_end_at_exit)


def _stop_children() -> None:
    """Stop the processes of `doit -n`: doit stops them itself, but not while it starts them, and exit would wait."""
    if multiprocessing := sys.modules.get("multiprocessing"):
        for child in multiprocessing.active_children():
            child.terminate()


def end_if_closed(status: int) -> None:
    """End this process if `status`, that of a program that printed in its place, says that the reader closed it."""
    if status == CLOSED:
        signal.raise_signal(signal.SIGPIPE)


def _has_no_reader(output: int) -> bool:
    poll = select.poll()
    poll.register(output, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _discard(outputs: Iterable[int]) -> None:
    """Send further output nowhere, so that writing it does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        os.dup2(nowhere, output)
    os.close(nowhere)


def _end_at_exit() -> None:
    """Flush output of doit that may have waited until exit. Python would print an error and choose another status."""
    try:
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):
        os._exit(CLOSED)
    # Python takes its handlers away before it ends: a step's process that notices late would end this one by a signal.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
