"""`python -m runtime DIR "prompt"` from a checkout. Installed, the same command is called `llama-npu2`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from llama_npu2.__main__ import script

if __name__ == "__main__":
    sys.exit(script())
