"""The harness's own command line, with the model `llama-npu2` added.

    python -m llama_npu2.lm_eval --model llama-npu2 --model_args path=artifacts/demo/cpu --tasks arc_easy

The harness finds a model once its module is imported, and there is no other way to add one.
"""

from __future__ import annotations

import sys

from llama_npu2.errors import UserError


def main() -> int:
    """Run the harness; return the exit status: 0, or 1 for a user's mistake."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        print("error: lm_eval is not installed: pip install lm_eval", file=sys.stderr)
        return 1
    from llama_npu2.lm_eval import model  # noqa: F401 - it registers itself

    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
