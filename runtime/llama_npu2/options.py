"""What a user can choose at run time. Each option is said once: its name, type, default, bounds and help.

The command line, the variables of a build and `Llama.generate` take them from here, and `Checked` alone checks them.
Loads nothing, so that a mistake is reported before numpy is there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from llama_npu2.errors import UserError

Group = TypeVar("Group", bound="Checked")
_BOUNDS = {"above": "above", "least": "at least", "most": "at most"}
_MOST_BIAS = 100
"""As in OpenAI's interface: the other way round, a token is as good as forbidden."""


def option(default: Any, help: str, **bounds: float) -> Any:
    """A field of a `Checked`. `bounds`: `least` and `most` are allowed values themselves, `above` is not."""
    return field(default=default, metadata={"help": help, "bounds": bounds})


@dataclass(frozen=True)
class Checked:
    """Base of sets of options: there is none with a value out of bounds. Raises UserError."""

    def __post_init__(self) -> None:
        for each in fields(self):
            bounds, value = each.metadata.get("bounds"), getattr(self, each.name)
            if bounds and value is not None and not _within(value, bounds):
                words = [f"{_BOUNDS[bound]} {limit}" for bound, limit in bounds.items()]
                finite = [] if _is_finite(value) else ["finite"]
                raise UserError(f"{each.name}={value}: must be {' and '.join(finite + words)}")


def _within(value: float, bounds: Mapping[str, float]) -> bool:
    least, most, above = (bounds.get(name) for name in ("least", "most", "above"))
    return (
        _is_finite(value)
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (above is None or value > above)
    )


def _is_finite(value: float) -> bool:
    # A whole number may be too large for a float.
    return isinstance(value, int) or math.isfinite(value)


@dataclass(frozen=True)
class Sampling(Checked):
    """How a reply is made of logits, and where it ends."""

    max_tokens: int = option(256, "longest reply", least=1)
    temperature: float = option(0.0, "0 is greedy", least=0)
    top_k: int = option(0, "sample among the k most likely, 0: all", least=0)
    top_p: float = option(1.0, "sample from the smallest set with this probability", above=0, most=1)
    min_p: float = option(0.0, "leave out what is less likely than this part of the most likely", least=0, most=1)
    repetition_penalty: float = option(1.0, "above 1: against tokens of prompt and reply", least=0.01, most=100)
    presence_penalty: float = option(0.0, "above 0: against tokens of the reply", least=-2, most=2)
    frequency_penalty: float = option(0.0, "the same, for each time that one is there", least=-2, most=2)
    logit_bias: tuple[str, ...] = option((), "ID:BIAS, -100 to 100, is added to a token's logit; may be repeated")
    seed: int | None = option(None, "make sampling repeatable", least=0)
    n: int = option(1, "replies to the prompt", least=1)
    logprobs: int | None = option(None, "log-probabilities of the reply, and so many alternatives", least=0)
    prompt_logprobs: int | None = option(None, "the same of the prompt", least=0)
    stop: tuple[str, ...] = option((), "end the reply before this text; may be repeated")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.logit_bias, Mapping):
            biases = tuple(f"{token}:{bias}" for token, bias in self.logit_bias.items())
            object.__setattr__(self, "logit_bias", biases)
        for name in ("logit_bias", "stop"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        self.biases()

    def check_one_text(self) -> None:
        """Raises UserError if more is asked for than a reply's text."""
        for name, without in (("n", 1), ("logprobs", None), ("prompt_logprobs", None)):
            if (value := getattr(self, name)) != without:
                raise UserError(f"{name}={value}: not for one text as it comes: use complete(), --json or json=1")

    def biases(self) -> dict[int, float]:
        """What is added to logits, by token. From Python, `logit_bias` may be such a mapping. Raises UserError."""
        return dict(_bias(pair) for text in self.logit_bias for pair in text.split(","))


def _bias(pair: str) -> tuple[int, float]:
    try:
        token, bias = pair.split(":")
        if int(token) >= 0 and -_MOST_BIAS <= float(bias) <= _MOST_BIAS:
            return int(token), float(bias)
    except ValueError:
        pass
    raise UserError(
        f"logit_bias={pair}: must be a token's number, a colon and {-_MOST_BIAS} to {_MOST_BIAS}, as in 13:-100"
    )


@dataclass(frozen=True)
class Running(Checked):
    """What a run takes of the machine."""

    threads: int = option(0, "0: all CPUs of this process", least=0)
    repeats: int = option(5, "of each measurement", least=1)
    second_copy: bool = option(False, "on the NPU, keep weights as prompts take them, too: faster, for more memory")


def kind(each: Field[Any]) -> str:
    """The type of an option's values: `int`, `float`, `str`, `bool`, or `tuple` of texts; it may be None besides."""
    return str(each.type).partition(" ")[0].partition("[")[0]


def add_arguments(parser: argparse.ArgumentParser, *groups: type[Checked]) -> None:
    """`--max-tokens N` and so on, for every option of the groups."""
    for each in (each for group in groups for each in fields(group)):
        silent = each.default in (None, ()) or kind(each) == "bool"
        shown = "" if silent else f" (default {each.default:g})"
        number = {"int": int, "float": float}.get(kind(each))
        how: dict[str, Any] = {"type": number, "default": each.default, "metavar": "N"}
        if kind(each) == "bool":
            how = {"action": "store_true"}
        elif kind(each) == "tuple":
            how = {"action": "append", "default": [], "metavar": "TEXT"}
        parser.add_argument(_flag(each), help=each.metadata["help"] + shown, **how)


def chosen(group: type[Group], values: object) -> Group:
    """The options of a group, from the attributes of `values`. Raises UserError."""
    return group(**{each.name: getattr(values, each.name) for each in fields(group)})


def to_arguments(values: object, *groups: type[Checked]) -> list[str]:
    """The command line that gives every option of the groups the value it has among the attributes of `values`."""
    arguments = []
    for each in (each for group in groups for each in fields(group)):
        value = getattr(values, each.name)
        if isinstance(value, bool):
            arguments += [_flag(each)] * value
            continue
        several: Sequence[Any] = value if isinstance(value, tuple) else [] if value is None else [value]
        arguments += [f"{_flag(each)}={one}" for one in several]
    return arguments


def _flag(each: Field[Any]) -> str:
    return f"--{each.name.replace('_', '-')}"
