"""Run time: turns an artifact directory into text. Needs no build tool; never imports `stages`.

from llama_npu2 import load
llm = load("artifacts/demo/cpu")
for piece in llm.generate("The capital of France is"):
    print(piece, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_npu2.engine.llama import Llama, load
    from llama_npu2.errors import UserError

__version__ = "0.1.0"
__all__ = ["Llama", "UserError", "load"]


def __getattr__(name: str) -> Any:
    """Import on first use: build tools need only the errors, and a command line reports mistakes before numpy loads."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'errors' if name == 'UserError' else 'engine.llama'}"), name)
