"""A Python that has imported what commands import, and becomes one with each fork. `forked.py` starts it and asks it.

It imports nothing of the tests: a command finds what it would find in a process of its own.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

_read: set[str] = set()
"""Environment variables that modules asked for when they were imported."""

_inherited: list[Any] = []
"""What an interrupt does to a process that the tests start."""


class _Noted(type(os.environ)):  # type: ignore[misc]
    """The environment, which notes what is asked for by its name."""

    def __getitem__(self, name: Any) -> Any:
        if sys._getframe(1).f_code.co_name != "__iter__":
            _read.add(str(name))
        return super().__getitem__(name)


def main(given: str) -> None:
    """Import modules, say which variables they read, and fork for each request until nobody can ask any more."""
    connection, modules = socket.socket(fileno=int(given)), sys.argv[2:]
    del sys.path[0]  # of this file
    _inherited.append(signal.signal(signal.SIGINT, signal.SIG_IGN))  # what stops the tests closes the connection
    os.environ.__class__ = _Noted
    for module in modules:
        with suppress(ImportError):
            _import(module)
    os.environ.__class__ = _Noted.__base__
    gc.collect()
    gc.freeze()
    with connection.makefile("rwb") as stream:
        _say(stream, sorted(_read))
        while (request := _next(connection, stream)) is None:
            pass
    connection.close()
    _become(*request)


def _import(name: str) -> None:
    """Import a module, or all of a package for `<package>.*`."""
    package = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def _say(stream: Any, what: Any) -> None:
    stream.write(json.dumps(what).encode() + b"\n")
    stream.flush()


def _next(connection: socket.socket, stream: Any) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for the next request, and say the number of the process, which is nobody's child: whoever asked adopts it.

    Returns the request and its files in that process, None in this one, which ends where there is none.
    """
    _, files, _, _ = socket.recv_fds(connection, 1, 64)
    line = stream.readline()
    if not line:
        os._exit(0)
    read, write = os.pipe()
    if not (between := os.fork()):
        between = os.getpid()
        if child := os.fork():
            os.write(write, str(child).encode())
            os._exit(0)
        while os.getppid() == between:
            os.sched_yield()
        return json.loads(line), files
    os.close(write)
    os.waitpid(between, 0)
    _say(stream, int(os.read(read, 32)))
    os.close(read)
    for each in files:
        os.close(each)
    return None


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Be the process of a command."""
    signal.signal(signal.SIGINT, *_inherited)
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    wanted = [0, 1, 2, *request["pass_fds"]]
    above = max(*wanted, *files) + 1
    held = [os.dup2(each, above + number) for number, each in enumerate(files)]
    for each, number in zip(held, wanted, strict=True):
        os.dup2(each, number)
    kept = {*wanted}
    for each in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if each not in kept:
            with suppress(OSError):
                os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])
    _open_standard_streams()
    option, what, *arguments = request["arguments"]
    sys.orig_argv = [sys.executable, option, what, *arguments]
    sys.argv = [option, *arguments]
    sys.path[:] = request["path"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook
    if option == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    else:
        exec(compile(what, "<string>", "exec"), main.__dict__)


def _hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print an error as Python does, without what is here."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _open_standard_streams() -> None:
    """Make the input anew, and let the others know their terminals by their lines, as Python does when it starts.

    They stay the objects that they were, since modules that were imported know them: doit's `run` compares them.
    """
    binary: Any = os.fdopen(0, "rb", closefd=False)
    binary.raw.name = "<stdin>"
    line_by_line = not sys.stdin.write_through and os.isatty(0)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        binary, sys.stdin.encoding, sys.stdin.errors, newline="\n", line_buffering=line_by_line
    )
    sys.stdin.mode = "r"  # type: ignore[misc]
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        buffered: Any = stream
        buffered.reconfigure(line_buffering=not buffered.write_through and (number == 2 or os.isatty(number)))


_this = sys.modules[__name__]  # stays when the command is `__main__`

if __name__ == "__main__":
    main(sys.argv[1])
