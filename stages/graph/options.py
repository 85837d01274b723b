"""The commands of a build and their `name=value` variables. Others are refused.

`options.toml` has each with default, help, unit and the commands that take it.

Variables of a run are the runtime's own (`llama_npu2.options`): their names, defaults and bounds are said there.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.options import (
    Answering,
    Listening,
    Option,
    OptionError,
    Running,
    Sampling,
    Signers,
    nearest,
    option,
    options_of,
)
from stages.kernels import ACTIVATIONS, KV_FORMATS
from stages.kernels.tokens import COUNTS

INCLUDE = "weights"
"""What `push` and `cache=` give to others only if asked, where the checkpoint is not public."""
PEERS = ("llama.cpp", "openvino", "transformers")
RECIPES = ("transformers", "llama.cpp")
"""Whose perplexity: see `stages.proof.comparison.perplexity`."""
MATMULS = ("bf16", "bfp16")
"""How the NPU multiplies a prompt's rows: exact products of bf16, or block floating point."""

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

GROUPS: dict[str, dict[str, str]] = _TABLE["commands"]
"""The commands by what they are for, each with its sentence."""

COMMANDS = {name: sentence for group in GROUPS.values() for name, sentence in group.items()}

_RENAMED: Mapping[str, str] = _TABLE["renamed"]
"""Names that variables had in earlier versions."""


def _targets() -> Sequence[str]:
    from stages.targets import targets

    return list(targets())


def _weights() -> Sequence[str]:
    from stages.model.policy import matrix_formats

    return matrix_formats()


def _option(name: str, **more: Any) -> Any:
    """Return the field of a variable of `options.toml`."""
    about = {"default": None, **_TABLE["variables"][name], **more}
    commands = about.pop("commands")
    commands = _TABLE["takers"][commands] if isinstance(commands, str) else commands
    return option(about.pop("default"), about.pop("help"), *commands, **about)


@frozen
class Options(Sampling, Running, Answering, Listening, Signers):
    """Values of the command-line variables. Raises UserError."""

    model: str = _option("model")
    target: str = _option("target", choices=_targets)
    revision: str = _option("revision")
    lora: str = _option("lora")
    artifacts: str = _option("artifacts")
    ignore: str = _option("ignore")
    weights: str = _option("weights", examples=_weights)
    kv: str = _option("kv", choices=tuple(KV_FORMATS))
    activations: str = _option("activations", choices=tuple(ACTIVATIONS))
    calibrate: str = _option("calibrate")
    context: int = _option("context")
    buckets: str = _option("buckets")
    tokens: str = _option("tokens")
    sequences: str = _option("sequences")
    grouping: str = _option("grouping")
    matmul: str = _option("matmul", choices=MATMULS)
    cache: str = _option("cache")
    on: str = _option("on")
    include: str = _option("include", choices=(INCLUDE,))
    prompt: str | None = _option("prompt")
    text: str = _option("text")
    prompts: str = _option("prompts")
    full: bool = _option("full")
    divergence: bool = _option("divergence")
    recipe: str = _option("recipe", choices=RECIPES)
    window: int = _option("window")
    stride: int = _option("stride")
    peers: str = _option("peers", examples=PEERS)
    against: str = _option("against")
    measured: str = _option("measured")
    published: bool = _option("published")
    measure: bool = _option("measure")
    risky: bool = _option("risky")
    keep: str = _option("keep")
    calibration: bool = _option("calibration")
    delete: str = _option("delete")
    dry_run: bool = _option("dry_run")
    output: str = _option("output")
    also: tuple[str, ...] = _option("also", default=())
    key: str = _option("key")
    remote: str = _option("remote")
    shell: str = _option("shell")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bucket_list()
        self.token_counts()
        self.sequence_counts()
        self.peer_list()

    def bucket_list(self) -> tuple[int, ...]:
        """Return the row counts that static-shape targets are compiled for. Raises UserError."""
        try:
            buckets = sorted({int(part) for part in self.buckets.split(",")})
        except ValueError:
            raise OptionError(
                "npu.buckets", self.buckets, "must be row counts with commas between, as in 128,512"
            ) from None
        if bad := [bucket for bucket in buckets if bucket < 64 or bucket % 64]:
            raise OptionError("npu.buckets", self.buckets, f"{bad[0]} is not a positive multiple of 64")
        return tuple(buckets)

    def token_counts(self) -> tuple[int, ...]:
        """Return how many tokens of a text programs take, besides one. Raises UserError."""
        return _count("npu.tokens", self.tokens)

    def sequence_counts(self) -> tuple[int, ...]:
        """Return of how many sequences programs take a token each, besides one. Raises UserError."""
        return _count("npu.sequences", self.sequences)

    def peer_list(self) -> tuple[str, ...]:
        """Return the programs to compare with. Raises UserError."""
        names = _parts(self.peers)
        if bad := [name for name in names if name not in PEERS]:
            raise OptionError("peers", self.peers, f"{bad[0]} is unknown: choose among {', '.join(PEERS)}")
        return names

    def ignore_list(self) -> tuple[str, ...]:
        """Return patterns (`*` and `?`) of names of tensors that a checkpoint may hold besides the model's."""
        return _parts(self.ignore)


def _count(name: str, text: str) -> tuple[int, ...]:
    """Return a number of rows that programs of tokens have, or none. Raises UserError."""
    if text not in ("", *map(str, COUNTS)):
        raise OptionError(name, text, f"must be {' or '.join(map(str, COUNTS))}")
    return (int(text),) if text else ()


@cache
def variables() -> dict[str, Option]:
    """Return the variables by name."""
    own = Options.__annotations__
    return {each.name: _of_build(each) for each in sorted(options_of(Options), key=lambda each: each.field not in own)}


def _of_build(each: Option) -> Option:
    takers = {*each.commands, *_TABLE["also"].get(each.field, ())}
    return replace(each, commands=tuple(name for name in COMMANDS if name in takers))


def table() -> dict[str, tuple[Option, ...]]:
    """Return the variables that each command takes, in the order of the commands."""
    known = variables().values()
    return {command: tuple(each for each in known if command in each.commands) for command in COMMANDS}


def sections(command: str) -> dict[str, list[Option]]:
    """Return the variables of a command in three groups: its own, what says which artifacts, and expert ones."""
    own, common, expert = "Variables", "Which artifacts, and how they are built", "For experts, on the NPU"
    parts: dict[str, list[Option]] = {own: [], common: [], expert: []}
    for each in table()[command]:
        title = common if "compile" in each.commands else own
        parts[expert if each.name.startswith("npu.") else title].append(each)
    return {title: variables for title, variables in parts.items() if variables}


def parse_options(values: Mapping[str, str], commands: Collection[str] = ()) -> Options:
    """Check names and values of variables.

    Args:
        commands: those that the command line names: each variable has to be taken by one of them. Without any, all
            variables are known.

    Raises:
        UserError: names the right variable, the commands that take it, or the allowed values.
    """
    known = variables()
    parsed: dict[str, Any] = {}
    for name, text in values.items():
        if name not in known:
            renamed = _RENAMED.get(name)
            raise UserError(f"{name}= is now {renamed}" if renamed else _unknown(name, known.values(), commands))
        if commands and not {*commands} & {*known[name].commands}:
            raise UserError(_misplaced(known[name], commands))
        parsed[known[name].field] = _value(known[name], text)
    return Options(**parsed)


def _unknown(name: str, known: Iterable[Option], commands: Collection[str]) -> str:
    fitting = [each.name for each in known if not commands or {*commands} & {*each.commands}]
    return f"{name}= is not a variable: {nearest(name, fitting, '=')}"


def _misplaced(variable: Option, commands: Collection[str]) -> str:
    for command in commands:
        if renamed := _TABLE["renamed_of"].get(variable.name, {}).get(command):
            return f"{variable.name}= of doit {command} is now {renamed}"
    named = next(iter(commands))
    return f"{variable.name}= is for doit {', '.join(variable.commands)}: doit help {named} lists those of {named}"


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _value(variable: Option, text: str) -> Any:
    parse, what = _PARSERS[variable.type]
    try:
        return parse(text)
    except (KeyError, ValueError):
        raise OptionError(variable.name, text, f"must be {what}") from None


def _texts(text: str) -> tuple[str, ...]:
    """Return one text, or those of a JSON list: what begins with `["` is one."""
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
