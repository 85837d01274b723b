"""The process of the runtime, started before doit knows whether anything is stale.

It takes as long to import what it needs as doit takes to find that all is current, so both are done at the same time.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from llama_npu2.standard_streams import open_missing
from stages.engine.places import python_environment

_WORDS = {"run", "chat"}
"""Words of a command line that, besides variables, only asks for the runtime."""


@dataclass
class Ahead:
    """A process that waits for its command line. It ends when this process does, in whatever way."""

    process: subprocess.Popen[bytes]
    pipe: int

    def run(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Give the process its command line, and return it."""
        atexit.unregister(self.stop)
        with os.fdopen(self.pipe, "wb") as pipe:
            pipe.write(json.dumps(arguments).encode())
        return self.process

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


_waiting: Ahead | None = None
_asked = False
"""Whether `start_ahead` was called: whichever of doit's plugin and `dodo.py` is loaded first does that."""


def start_ahead(words: Sequence[str]) -> None:
    """Start the process if `words`, doit's command line, ask for a reply. A second call does nothing."""
    global _waiting, _asked
    if _asked:
        return
    _asked = True
    open_missing()  # before anything else is opened
    asks = "chat" in words or any(word.startswith(("prompt=", "prompt_file=")) for word in words)
    if asks and all("=" in word or word in _WORDS for word in words):
        read, write = os.pipe()
        command = [sys.executable, "-m", "llama_npu2.ahead", str(read)]
        _waiting = Ahead(subprocess.Popen(command, env=python_environment(), pass_fds=[read]), write)
        os.close(read)
        atexit.register(_waiting.stop)


def take_ahead() -> Ahead | None:
    """Return the process that waits, once, if there is one."""
    global _waiting
    taken, _waiting = _waiting, None
    return taken if taken and taken.process.poll() is None else None
