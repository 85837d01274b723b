"""The classes behind those of doit's words that this project changes. The entry points of the package name them.

In a checkout of llama-npu2 they are those of its `stages.commands.verbs`; everywhere else doit's own.
"""

from __future__ import annotations

import gc
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("Clean", "Help", "Info", "List", "Run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    root = Path.cwd()
    if not all((root / part).is_file() for part in ("dodo.py", "stages/commands/verbs.py")):
        return getattr(import_module(f"doit.cmd_{name.lower()}"), name)
    if root / "runtime" not in Path(__file__).parents:
        # The package that is installed may be another checkout's.
        for loaded in [module for module in sys.modules if module.partition(".")[0] == "llama_npu2"]:
            del sys.modules[loaded]
    sys.path[:0] = [str(root), str(root / "runtime")]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C while modules load would show a traceback of them; `dodo.py` sets the handler again.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # while modules load it takes a tenth of the time and finds nothing; `dodo.py` enables it
    if name == "Run":
        import_module("llama_npu2.ending")
        import_module("stages.engine.ahead").start_ahead(sys.argv[1:])  # before the imports that take time
    return getattr(import_module("stages.commands.verbs"), name)
