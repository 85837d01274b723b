"""The `name=value` variables of the doit command line, with their types and defaults. A misspelt one is refused.

Those of a run are the runtime's own (`llama_npu2.options`): their names, defaults and bounds are said there.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from llama_npu2.errors import UserError, suggestion
from llama_npu2.options import Running, Sampling, kind, option
from stages.kernels import KV_FORMATS

INCLUDE = "weights"
"""What of a checkpoint that is not public `push` and `cache=` give to others only if asked."""
PEERS = ("llama.cpp", "transformers")
RECIPES = ("transformers", "llama.cpp")
"""Whose perplexity: see `stages.proof.comparison.perplexity`."""
MATMULS = ("bf16", "bfp16")
"""How the NPU projects a prompt's rows: exact products of bf16, or block floating point. Weights
decide if nobody does."""


@dataclass(frozen=True)
class Options(Sampling, Running):
    """Values of the command-line variables. Raises UserError."""

    model: str = "demo"
    target: str = ""
    revision: str = "main"
    artifacts: str = "artifacts"
    ignore: str = ""
    buckets: str = "128,512,2048"
    context: int = 0
    grouping: str = ""
    matmul: str = ""
    weights: str = ""
    kv: str = "bf16"
    calibrate: str = ""
    prompt: str | None = None
    raw: bool = False
    full: bool = False
    text: str = ""
    prompts: str = ""
    recipe: str = "transformers"
    window: int = option(512, "tokens that perplexity is measured on at a time", least=2)
    stride: int = option(0, "tokens from one window to the next, 0: half a window", least=0)
    json: bool = False
    check: bool = False
    measured: str = ""
    peers: str = ""
    risky: bool = False
    keep: str = ""
    output: str = ""
    against: str = ""
    key: str = ""
    name: str = ""
    remove: str = ""
    remote: str = ""
    cache: str = ""
    include: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bucket_list()
        self.peer_list()
        if self.include not in ("", INCLUDE):
            raise UserError(f"include={self.include}: must be {INCLUDE}")
        if self.context < 0:
            raise UserError(f"context={self.context}: must be a number of tokens, or 0 for what the target takes")
        if self.recipe not in RECIPES:
            raise UserError(f"recipe={self.recipe}: choose one of {', '.join(RECIPES)}")
        if self.matmul not in ("", *MATMULS):
            raise UserError(f"matmul={self.matmul}: choose one of {', '.join(MATMULS)}")
        if self.kv not in KV_FORMATS:
            raise UserError(f"kv={self.kv}: choose one of {', '.join(KV_FORMATS)}")
        if self.target:
            from stages.targets import targets

            _check_name("target", self.target, targets())

    def bucket_list(self) -> tuple[int, ...]:
        """Row counts that static-shape targets are compiled for. Raises UserError."""
        try:
            buckets = sorted({int(part) for part in self.buckets.split(",")})
        except ValueError:
            raise UserError(f"buckets={self.buckets}: must be row counts with commas between, as in 128,512") from None
        if bad := [bucket for bucket in buckets if bucket < 64 or bucket % 64]:
            raise UserError(f"buckets={self.buckets}: {bad[0]} is not a positive multiple of 64")
        return tuple(buckets)

    def peer_list(self) -> tuple[str, ...]:
        """Programs to compare with. Raises UserError."""
        names = _parts(self.peers)
        if bad := [name for name in names if name not in PEERS]:
            raise UserError(f"peers={self.peers}: {bad[0]} is unknown: choose among {', '.join(PEERS)}")
        return names

    def ignore_list(self) -> tuple[str, ...]:
        """Patterns (`*` and `?`) of names of tensors that a checkpoint may hold besides the model's."""
        return _parts(self.ignore)


def parse_options(given: Mapping[str, str]) -> Options:
    """Check names and values. Raises UserError naming the nearest right variable or the allowed values."""
    known = {each.name: each for each in fields(Options)}
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {close[0]}=?" if close else f"known ones: {', '.join(known)}"
            raise UserError(f"{name}= is not a variable: {hint}")
        values[name] = _value(known[name], text)
    return Options(**values)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _check_name(variable: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        raise UserError(f"{variable}={name} is unknown: {suggestion(name, names, cutoff=0.3)}")


def _value(each: Field[Any], text: str) -> Any:
    parse, what = _PARSERS[kind(each)]
    try:
        return parse(text)
    except (KeyError, ValueError):
        raise UserError(f"{each.name}={text}: must be {what}") from None


def _texts(text: str) -> tuple[str, ...]:
    """One text, or those of a JSON list: what begins with `["` is one."""
    if not text.startswith('["'):
        return (text,)
    several = json.loads(text)
    if not all(isinstance(each, str) for each in several):
        raise ValueError("not only texts")
    return tuple(several)


_SWITCH = {"0": False, "1": True, "false": False, "true": True, "no": False, "yes": True}
_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "str": (str, "text"),
    "tuple": (_texts, 'text, or several as in ["one","two"]'),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (_SWITCH.__getitem__, "0 or 1"),
}
