"""The options that a user can choose at run time, each said once: name, type, default, unit, bounds, help, commands.

The command line, the variables of a build, `Llama.generate`, completion and the reference page take them from here, and
`Checked` alone checks them. Loads nothing, so that a mistake is reported before numpy is there.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

from llama_npu2.errors import UserError, closest
from llama_npu2.frozen import frozen

Group = TypeVar("Group", bound="Checked")
Values = Sequence[str] | Callable[[], Sequence[str]]
_BOUNDS = {"above": "above", "least": "at least", "most": "at most"}
_MOST_BIAS = 100
"""As in OpenAI's interface: at -100, a token is as good as forbidden."""

_SHOWN = 60
"""Most characters of a long value that messages show."""

FILE, DIRECTORY = "FILE", "DIR"
"""Names of values that completion looks up in the file system."""


class OptionError(UserError):
    """A value that an option does not take."""

    def __init__(self, name: str, value: object, problem: str) -> None:
        self.name, self.value, self.problem = name, value, problem
        super().__init__(f"{name}={value}: {problem}")


@frozen
class Option:
    """An option as command lines, help, completion and the reference page show it."""

    name: str
    """The variable's name on the command line of doit, with the prefix of expert ones."""
    field: str
    """The attribute that holds its value."""
    type: str
    """`int`, `float`, `str`, `bool`, or `tuple` of texts; its value may be None besides."""
    default: Any
    help: str
    """A sentence without a full stop."""
    unit: str
    unset: str
    """What happens where it is not given and the default does not say that."""
    metavar: str
    choices: tuple[str, ...]
    """The values that it takes; empty if there are others."""
    examples: tuple[str, ...]
    """Values for completion to offer, among others."""
    bounds: Mapping[str, float]
    commands: tuple[str, ...]
    """The commands that take it."""

    @property
    def flag(self) -> str:
        """The name on the command line of the runtime."""
        return f"--{self.field.replace('_', '-')}"

    @property
    def shown_default(self) -> str:
        """The default in words, or an empty text."""
        if self.unset or self.default in (None, "", ()) or self.type == "bool":
            return self.unset
        return f"{self.default:g}" if self.type == "float" else str(self.default)

    @property
    def shown_help(self) -> str:
        """The sentence with unit, choices and default."""
        notes = [self.unit, f"one of {', '.join(self.choices)}" if len(self.choices) > 1 else ""]
        notes.append(f"default: {self.shown_default}" if self.shown_default else "")
        more = "; ".join(note for note in notes if note)
        return f"{self.help} ({more})" if more else self.help


def option(
    default: Any,
    help: str,
    *commands: str,
    unit: str = "",
    unset: str = "",
    metavar: str = "",
    choices: Values = (),
    examples: Values = (),
    name: str = "",
    **bounds: float,
) -> Any:
    """A field of a `Checked`. The arguments are those of `Option`.

    Args:
        choices: may be a function where finding them out takes time.
        bounds: `least` and `most` are allowed values themselves, `above` is not.
    """
    about = {"help": help, "commands": commands, "unit": unit, "unset": unset, "metavar": metavar, "name": name}
    return field(default=default, metadata={**about, "choices": choices, "examples": examples, "bounds": bounds})


@frozen
class Checked:
    """Base of groups of options: there is none with a value out of bounds. Raises UserError."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None:
                continue
            bounds, choices = each.metadata["bounds"], each.metadata["choices"]
            name, number = option_name(each), _NUMBERS.get(kind(each))
            if number and (isinstance(value, bool) or not isinstance(value, number.type)):
                raise OptionError(name, repr(value), f"must be a {number.name}")
            if bounds and not _within(value, bounds):
                words = [f"{_BOUNDS[bound]} {limit}" for bound, limit in bounds.items()]
                finite = [] if _is_finite(value) else ["finite"]
                raise OptionError(name, value, f"must be {' and '.join(finite + words)}")
            if choices and value != each.default and value not in (known := _listed(choices)):
                what = "choose one of " if len(known) > 1 else "must be "
                raise OptionError(name, value, what + ", ".join(known))

    @classmethod
    def given(cls: type[Group], values: Mapping[str, Any]) -> Group:
        """Return the options that a caller from Python names. Raises TypeError for an unknown name, UserError.

        None is as good as no value.
        """
        known = [each.name for each in fields(cls)]
        if unknown := [name for name in values if name not in known]:
            raise TypeError(f"there is no option {unknown[0]}: {nearest(unknown[0], known)}")
        return cls(**{name: value for name, value in values.items() if value is not None})


def nearest(name: str, known: Sequence[str], ending: str = "") -> str:
    """Return a hint to the most similar name, with this ending, or to all names."""
    close = closest(name, known)
    return f"did you mean {close}{ending}?" if close else f"choose among {', '.join(known)}"


def _listed(values: Values) -> tuple[str, ...]:
    return tuple(values() if callable(values) else values)


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


def option_name(each: Field[Any]) -> str:
    """Return the name of a field's option."""
    return each.metadata["name"] or each.name


def options_of(*groups: type[Checked]) -> Iterator[Option]:
    """Yield the options of groups of them."""
    for each in (each for group in groups for each in fields(group)):
        about = dict(each.metadata)
        about |= {"choices": _listed(about["choices"]), "examples": _listed(about["examples"])}
        about |= {"name": option_name(each), "metavar": about["metavar"] or _METAVARS[kind(each)]}
        yield Option(field=each.name, type=kind(each), default=each.default, **about)


class _Number(NamedTuple):
    type: type
    name: str


_NUMBERS = {"int": _Number(Integral, "whole number"), "float": _Number(Real, "number")}
_METAVARS = {"int": "N", "float": "X", "str": "TEXT", "tuple": "TEXT", "bool": "1"}

# What the runtime's commands take

_REPLIES = ("run", "chat")
MODELS = ("run", "chat", "serve", "embed", "rerank", "bench", "profile")
"""The runtime's commands that load a model."""


@frozen
class Sampling(Checked):
    """How a reply is made of logits, and where it ends."""

    max_tokens: int = option(256, "end the reply after this many", *_REPLIES, "profile", unit="tokens", least=1)
    temperature: float = option(
        0.0, "divide logits by it before sampling; 0 always takes the most likely token", *_REPLIES, least=0
    )
    top_k: int = option(0, "sample among the N most likely tokens; 0 takes all", *_REPLIES, unit="tokens", least=0)
    top_p: float = option(
        1.0, "sample among the fewest tokens that have this probability together", *_REPLIES, above=0, most=1
    )
    min_p: float = option(
        0.0,
        "leave out tokens whose probability is below this share of the most likely one's",
        *_REPLIES,
        least=0,
        most=1,
    )
    repetition_penalty: float = option(
        1.0, "above 1, make tokens of the prompt and of the reply less likely", *_REPLIES, least=0.01, most=100
    )
    presence_penalty: float = option(
        0.0, "subtract this from the logits of tokens that are in the reply", *_REPLIES, least=-2, most=2
    )
    frequency_penalty: float = option(
        0.0, "subtract this for each time that a token is in the reply", *_REPLIES, least=-2, most=2
    )
    logit_bias: tuple[str, ...] = option(
        (), "add BIAS, -100 to 100, to the logit of the token ID; may be repeated", *_REPLIES, metavar="ID:BIAS"
    )
    seed: int | None = option(
        None, "make sampling repeatable", *_REPLIES, unset="other random numbers each time", least=0
    )
    n: int = option(1, "write this many replies to the prompt", "run", unit="replies", least=1)
    logprobs: int | None = option(
        None, "add each token's log-probability and N alternatives to the JSON of a reply", "run", least=0
    )
    prompt_logprobs: int | None = option(None, "do the same for the tokens of the prompt", "run", least=0)
    stop: tuple[str, ...] = option((), "end the reply before this text; may be repeated", *_REPLIES)
    schema: str = option(
        "",
        "answer in JSON that this JSON schema allows",
        *_REPLIES,
        metavar="JSON",
        examples=('{"type":"object"}',),
    )
    grammar: str = option("", "answer in a text that this grammar (llguidance's Lark) allows", *_REPLIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.logit_bias, Mapping):
            biases = tuple(f"{token}:{bias}" for token, bias in self.logit_bias.items())
            object.__setattr__(self, "logit_bias", biases)
        for name in ("logit_bias", "stop"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        self.biases()
        self._check_form()

    def _check_form(self) -> None:
        """Check `schema`, which may be a mapping from Python, and `grammar`. Raises UserError."""
        if not isinstance(self.schema, Mapping) and not self.schema:
            return
        from json import dumps, loads

        try:
            given = dumps(self.schema) if isinstance(self.schema, Mapping) else self.schema
            known = isinstance(loads(given), dict | bool)
        except (ValueError, TypeError, RecursionError):
            given, known = str(self.schema), False
        if not known:
            example = '{"type":"object"}'
            raise OptionError("schema", given[:_SHOWN], f"must be a JSON schema, as in {example}")
        object.__setattr__(self, "schema", given)
        if self.grammar:
            raise OptionError("grammar", self.grammar[:_SHOWN], "schema is given as well: leave one out")

    def check_one_text(self) -> None:
        """Check that no more than a reply's text is asked for. Raises UserError."""
        for name, without in (("n", 1), ("logprobs", None), ("prompt_logprobs", None)):
            if (value := getattr(self, name)) != without:
                raise OptionError(name, value, "not for one text as it comes: use complete(), --json or json=1")

    def biases(self) -> dict[int, float]:
        """Return what is added to logits, by token.

        From Python, `logit_bias` may be such a mapping. Raises UserError.
        """
        return dict(_bias(pair) for text in self.logit_bias for pair in text.split(","))


def _bias(pair: str) -> tuple[int, float]:
    try:
        token, bias = pair.split(":")
        if int(token) >= 0 and -_MOST_BIAS <= float(bias) <= _MOST_BIAS:
            return int(token), float(bias)
    except ValueError:
        pass
    limits = f"{-_MOST_BIAS} to {_MOST_BIAS}, as in 13:-100"
    raise OptionError("logit_bias", pair, f"must be a token's number, a colon and {limits}")


@frozen
class Running(Checked):
    """The options of a run that concern the machine."""

    threads: int = option(
        0, "compute on this many threads of the CPU", *MODELS, unset="one for each CPU of this process", least=0
    )
    repeats: int = option(5, "make each measurement this often", "bench", "profile", unit="times", least=1)
    streams: str = option(
        "",
        "also generate with this many sequences at a time, with commas between",
        "bench",
        "profile",
        "estimate",
        metavar="NUMBERS",
        examples=("1,2,4,8",),
    )
    draft: str = option(
        "",
        "let the small model of these artifacts draft tokens for this one to check, which changes none; on the CPU",
        *_REPLIES,
        metavar=DIRECTORY,
    )
    second_copy: bool = option(
        False,
        "on the NPU, keep a second copy of the weights as prompts take them: sooner first tokens for more memory",
        *MODELS,
        name="npu.second_copy",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stream_list()

    def stream_list(self) -> tuple[int, ...]:
        """Return the numbers of sequences to generate with. Raises UserError."""
        try:
            numbers = tuple(int(part) for part in self.streams.split(",") if part)
        except ValueError:
            raise OptionError("streams", self.streams, "must be numbers with commas between, as in 1,2,4,8") from None
        if any(number < 1 for number in numbers):
            raise OptionError("streams", self.streams, "must be at least 1 each")
        return numbers


@frozen
class Answering(Checked):
    """How a command takes its prompt and prints its answer."""

    prompt_file: str = option(
        "", "read the prompt from this file; for embed, a text in each line", "run", "embed", metavar=FILE
    )
    documents: str = option("", "rank the lines of this file; - is standard input", "rerank", metavar=FILE)
    instruction: str = option("", "say what the query is for, in a sentence", "embed", "rerank")
    dimensions: int = option(0, "cut embeddings to their first N values; 0 keeps all", "embed", least=0)
    raw: bool = option(False, "give the prompt as it is, without the chat template", "run", "profile")
    template: str = option(
        "",
        'give the chat template these variables, such as {"enable_thinking": false}; also tools and documents',
        *_REPLIES,
        metavar="JSON",
    )
    json: bool = option(False, "print JSON instead of text", "run", "embed", "rerank", "bench", "profile", "info")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.template_variables()

    def template_variables(self) -> dict[str, Any]:
        """Return the values of `template` by name. Raises UserError."""
        from json import loads

        try:
            values = loads(self.template or "{}")
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            example = '{"enable_thinking": false}'
            raise OptionError("template", self.template, f"must be a JSON object, as in {example}")
        return values


@frozen
class Listening(Checked):
    """Where a server listens, for whom, and how much it takes."""

    host: str = option("127.0.0.1", "listen on this address; others than 127.0.0.1 let other machines in", "serve")
    port: int = option(8000, "listen on this port; 0 takes a free one", "serve", least=0, most=65535)
    api_key_file: str = option(
        "",
        "answer only who sends a key of this file, which has one in each line",
        "serve",
        metavar=FILE,
    )
    origin: tuple[str, ...] = option(
        (), "let pages of this site use the server; may be repeated", "serve", metavar="URL"
    )
    queue: int = option(
        64,
        "have at most this many replies of a model under way; who asks for more is told to come again",
        "serve",
        least=1,
    )
    body: int = option(4, "take bodies of requests up to this size", "serve", unit="MiB", least=1, most=1024)
    keep_billing_header: bool = option(
        False,
        "leave the line x-anthropic-billing-header in prompts of Claude Code: it changes, so that no prompt is cached",
        "serve",
    )
    kv_memory: int = option(
        0,
        "take at most this much memory for the KV cache of all replies of a model",
        "serve",
        unit="MiB",
        unset="what one sequence takes that fills the context",
        least=0,
    )
    memory: int = option(
        0,
        "have models loaded that take at most this much together",
        "serve",
        unit="MiB",
        unset="with several models, what is available when the server starts",
        least=0,
    )
    keep_alive: str = option(
        "",
        "unload a model that no request came for so long, such as 90s, 5m or 1h30m; -1 never, 0 at once",
        "serve",
        metavar="TIME",
        unset="5m with several models, -1 with one",
        examples=("5m", "1h", "-1"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keep_alive_seconds()

    def keep_alive_seconds(self) -> float | None:
        """Return `keep_alive` in seconds, None where it is not given. Raises UserError."""
        try:
            return seconds_of(self.keep_alive) if self.keep_alive else None
        except ValueError as error:
            raise OptionError("keep_alive", self.keep_alive, f"must be {error}") from None


_SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"([0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})"
SECONDS = rf"([+-]?)(?:{_NUMBER}|((?:{_NUMBER}(?:{'|'.join(_SECONDS)}))+))"
"""What a time is, as a regular expression: see `seconds_of`."""


def seconds_of(text: str) -> float:
    """Return a time in seconds, infinite for a negative one. Raises ValueError that says what a time is.

    It is a number of seconds, or numbers with units as Go writes them: `90`, `1.5h`, `1h30m`, `-1`.
    """
    found = re.fullmatch(SECONDS, text.strip())
    if not found:
        raise ValueError("a time, such as 90s, 5m or 1h30m, or -1 for ever")
    parts = re.findall(rf"{_NUMBER}({'|'.join(_SECONDS)})", found[3] or f"{found[2]}s")
    seconds = sum(float(count) * _SECONDS[unit] for count, unit in parts)
    return math.inf if found[1] == "-" and seconds else seconds


@frozen
class Signers(Checked):
    """Whose native code is run."""

    name: str = option("", "call the signer this", "trust")
    remove: str = option("", "no longer trust this signer: a key, a fingerprint or a name", "trust", metavar="KEY")


@frozen
class Once(Checked):
    """The other options of the runtime, for one run."""

    trust: str = option(
        "",
        "for this run, trust what this signed: a fingerprint, or sha256: and the digest of a manifest",
        *MODELS,
        "check",
        "info",
        metavar="WHAT",
    )


def kind(each: Field[Any]) -> str:
    """Return the type of an option's values, as `Option.type` has it."""
    return str(each.type).partition(" ")[0].partition("[")[0]


def add_arguments(parser: argparse.ArgumentParser, *groups: type[Checked], command: str = "") -> None:
    """Add `--max-tokens N` and so on, for every option of the groups that the command takes; without one, for all."""
    for each in options_of(*groups):
        if command and command not in each.commands:
            parser.set_defaults(**{each.field: each.default})
            continue
        how: dict[str, Any] = {"type": {"int": int, "float": float}.get(each.type), "metavar": each.metavar}
        if each.type == "bool":
            how = {"action": "store_true"}
        elif each.type == "tuple":
            how |= {"action": "append"}
        default = [] if each.type == "tuple" else each.default
        parser.add_argument(each.flag, dest=each.field, default=default, help=each.shown_help.replace("%", "%%"), **how)


def chosen(group: type[Group], values: object) -> Group:
    """Return the options of a group, from the attributes of `values`. Raises UserError."""
    return group(**{each.name: getattr(values, each.name) for each in fields(group)})


def to_arguments(values: object, *groups: type[Checked], command: str = "") -> list[str]:
    """Return the command line that gives every option of the groups the value it has among the attributes of `values`.

    With a command, only the options that it takes.
    """
    arguments = []
    for each in options_of(*groups):
        if command and command not in each.commands:
            continue
        value = getattr(values, each.field)
        if isinstance(value, bool):
            arguments += [each.flag] * value
            continue
        several: Iterable[Any] = value if isinstance(value, tuple) else [] if value in (None, "") else [value]
        arguments += [f"{each.flag}={one}" for one in several]
    return arguments
