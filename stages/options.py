"""The `name=value` variables of the doit command line, with their types and defaults. A misspelt one is refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from runtime.errors import UserError

TARGETS = ("cpu", "npu2-sim", "npu2")
PEERS = ("llama.cpp", "transformers")
MATMULS = ("bf16", "bfp16")
"""How the NPU projects a prompt's rows: exact products of bf16, or block floating point (`gemm.Plan.bfp16`)."""


@dataclass(frozen=True)
class Options:
    """Values of the command-line variables."""

    model: str = "demo"
    target: str = ""
    revision: str = "main"
    artifacts: str = "artifacts"
    buckets: str = "128,512,2048"
    grouping: str = "fused"
    matmul: str = "bf16"
    prompt: str | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | None = None
    raw: bool = False
    threads: int = 0
    full: bool = False
    json: bool = False
    peers: str = ""
    repeats: int = 5

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
        names = tuple(name for name in self.peers.split(",") if name)
        if bad := [name for name in names if name not in PEERS]:
            raise UserError(f"peers={self.peers}: {bad[0]} is unknown: choose among {', '.join(PEERS)}")
        return names


def parse_options(given: Mapping[str, str]) -> Options:
    """Check names and values. Raises UserError naming the nearest right variable or the allowed values."""
    known = {f.name: str(f.type) for f in fields(Options)}
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {close[0]}=?" if close else f"known ones: {', '.join(known)}"
            raise UserError(f"{name}= is not a variable: {hint}")
        values[name] = _PARSERS[known[name].split(" ")[0]](name, text)
    options = Options(**values)
    options.bucket_list()
    options.peer_list()
    if options.target and options.target not in TARGETS:
        close = difflib.get_close_matches(options.target, TARGETS, 1, 0.3)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(TARGETS)}"
        raise UserError(f"target={options.target} is unknown: {hint}")
    if options.matmul not in MATMULS:
        raise UserError(f"matmul={options.matmul}: choose one of {', '.join(MATMULS)}")
    _check_range("max_tokens", options.max_tokens, 1)
    _check_range("temperature", options.temperature, 0)
    _check_range("top_k", options.top_k, 0)
    _check_range("threads", options.threads, 0)
    _check_range("repeats", options.repeats, 1)
    if not 0 < options.top_p <= 1:
        raise UserError(f"top_p={options.top_p}: must be above 0 and at most 1")
    return options


def _check_range(name: str, value: float, low: float) -> None:
    if not low <= value < float("inf"):
        raise UserError(f"{name}={value}: must be at least {low}")


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text}: must be a whole number") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name}={text}: must be a number") from None


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1", "true", "false", "yes", "no"):
        raise UserError(f"{name}={text}: must be 0 or 1")
    return text in ("1", "true", "yes")


def _text(name: str, text: str) -> str:
    return text


_PARSERS: dict[str, Callable[[str, str], Any]] = {"str": _text, "int": _integer, "float": _number, "bool": _switch}
