"""Run time: turns an artifact directory into text. Needs no build tool; never imports `stages`.

from runtime import load
llm = load("artifacts/demo/cpu")
for piece in llm.generate("The capital of France is"):
    print(piece, end="", flush=True)
"""

from runtime.errors import UserError
from runtime.llama import Llama, load

__all__ = ["Llama", "UserError", "load"]
