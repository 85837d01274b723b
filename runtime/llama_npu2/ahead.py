"""The command line in a process that is started before it is known what to run.

It imports what most runs need, and starts the process of the chat template, while another process finds that out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib import import_module

from llama_npu2 import ending
from llama_npu2.machine import spare_threads

_OWN = ("llama_npu2.engine.llama", "llama_npu2.devices.cpu", "llama_npu2.__main__")
_OTHERS = ("tokenizers", "numpy.random", "ml_dtypes", "locale", "shutil")


def main(descriptor: int) -> int:
    """Run the command line that is written to a pipe as a JSON list, if one is before the pipe is closed.

    Returns:
        The exit status: that of `llama_npu2.__main__.main`, 0 without a command line.
    """
    spare_threads()
    try:
        with contextlib.suppress(Exception):  # the run meets the same problem, and says it
            _prepare()
        with os.fdopen(descriptor, "rb") as pipe:
            arguments = pipe.read()
    except KeyboardInterrupt:
        return 130  # the process that would have written says what the user has to know
    from llama_npu2.__main__ import main as run

    return run(json.loads(arguments)) if arguments else 0


def _prepare() -> None:
    from llama_npu2.text import chat_template, sandbox

    chat_template.waiting_renderer = sandbox.Renderer()
    for module in (*_OWN, *_OTHERS):
        import_module(module)


if __name__ == "__main__":
    sys.exit(ending.at_once(main(int(sys.argv[1]))))
