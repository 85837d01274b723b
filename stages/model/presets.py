"""Shapes of published models for `model=random:<name>`, from `presets.toml`: real sizes without real weights."""

import tomllib
from pathlib import Path
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}

PRESETS: dict[str, dict[str, Any]] = {
    name: {**_LLAMA, **({} if "hidden_activation" in shape else {"hidden_act": "silu"}), **shape}
    for name, shape in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
"""Name -> a configuration as `config.json` has it."""
