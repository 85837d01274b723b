"""The beginning of a file that `doit export` made, there called `__main__.py`: the slim command line for what it holds.

Any Python 3 can read this much of it, so that one that cannot run the rest is told why.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

LEAST = (3, 11)
PACKAGES = ("numpy", "ml_dtypes", "tokenizers", "jinja2")


def main() -> int:
    """Returns the exit status."""
    problem = missing()
    if problem:
        print("error: " + problem, file=sys.stderr)
        return 1
    from llama_npu2.__main__ import main as run

    return run(artifacts=str(Path(__file__).parent))


def missing() -> str:
    """Return a message about what this Python lacks and how to get it; empty if nothing is missing."""
    if sys.version_info < LEAST:
        return "this is Python {}.{}, at least {}.{} is needed".format(*sys.version_info[:2], *LEAST)
    names = [name for name in PACKAGES if find_spec(name) is None]
    if not names:
        return ""
    return "this Python has no {}: {} -m pip install {}".format(", ".join(names), sys.executable, " ".join(names))


if __name__ == "__main__":
    sys.exit(main())
