"""What goes where while doit runs tasks. Standard output holds what a command was asked for, so that it can be put into
a file or a pipe. All else goes to standard error: names of steps, what steps print, and what libraries and other
programs write to file descriptor 1.

And what happens when nobody reads any more: the process ends without a word, as others do by SIGPIPE.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO, cast

from llama_npu2.errors import CLOSED, UserError

_answering: ContextVar[bool] = ContextVar("answering", default=False)


class _Lasting:
    """A stream to which writing does not fail when its reader has gone: SIGPIPE says so, see `end_with_readers`. Where
    writing fails otherwise, as into a file on a full disk, it raises UserError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _told():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        pass
    except OSError as error:
        raise UserError(f"the output cannot be written: {error.strerror}: make room, or write it elsewhere") from None


class _Parted:
    """`sys.stdout` while doit runs tasks: standard output for the thread of a command, standard error for others."""

    def __init__(self, answers: _Lasting) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.answers if _answering.get() else sys.stderr, name)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """While this thread does what was asked for: what it prints goes to standard output."""
    token = _answering.set(True)
    try:
        yield
        sys.stdout.flush()
    finally:
        _answering.reset(token)


@contextlib.contextmanager
def parted() -> Iterator[None]:
    """While doit runs tasks, in this process and those that it forks."""
    if sys.stdout is None or sys.stderr is None:
        yield  # where one of them is closed nothing can go astray
        return
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
        with contextlib.suppress(OSError):  # that it cannot be written was said
            answers.close()


def for_answers() -> int | None:
    """The file descriptor of standard output, for a program that says itself what was asked for; None where that is
    what programs get anyway."""
    return sys.stdout.answers.fileno() if isinstance(sys.stdout, _Parted) else None


# Closed pipes


def end_with_readers() -> None:
    """From here on, this process ends with status `CLOSED` and without a word when whoever read its output has gone.
    Python ignores SIGPIPE, so that without this what is printed then fails with a traceback."""
    owner = os.getpid()

    def end(*_: object) -> None:
        if not (gone := [output for output in (1, 2, for_answers()) if output is not None and _has_no_reader(output)]):
            return  # it was a connection: who writes to it gets an error
        _discard(gone)
        if os.getpid() == owner:
            _stop_children()
            raise SystemExit(CLOSED)
        if os.getppid() == owner:
            os.kill(owner, signal.SIGPIPE)  # a step in a process of its own was the first to notice

    signal.signal(signal.SIGPIPE, end)
    atexit.register(_end_at_exit)


def _stop_children() -> None:
    """doit stops the processes of `-n` itself, but not while it starts them: they would be waited for at exit."""
    if multiprocessing := sys.modules.get("multiprocessing"):
        for child in multiprocessing.active_children():
            child.terminate()


def end_if_closed(status: int) -> None:
    """`status`: of a program that answered in the place of this process. If nobody read that, nobody reads this."""
    if status == CLOSED:
        signal.raise_signal(signal.SIGPIPE)


def _has_no_reader(output: int) -> bool:
    poll = select.poll()
    poll.register(output, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _discard(outputs: Iterable[int]) -> None:
    """What is still to be written must not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        os.dup2(nowhere, output)
    os.close(nowhere)


def _end_at_exit() -> None:
    """What doit itself printed may have waited until here. Python would complain, and choose a status."""
    try:
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):
        os._exit(CLOSED)
