"""The commands of a build and their `name=value` variables, with types, defaults and help. Others are refused.

Variables of a run are the runtime's own (`llama_npu2.options`): their names, defaults and bounds are said there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.options import (
    DIRECTORY,
    FILE,
    Answering,
    Option,
    OptionError,
    Running,
    Sampling,
    Signers,
    nearest,
    option,
    options_of,
)
from stages.kernels import KV_FORMATS

INCLUDE = "weights"
"""What `push` and `cache=` give to others only if asked, where the checkpoint is not public."""
PEERS = ("llama.cpp", "transformers")
RECIPES = ("transformers", "llama.cpp")
"""Whose perplexity: see `stages.proof.comparison.perplexity`."""
MATMULS = ("bf16", "bfp16")
"""How the NPU multiplies a prompt's rows: exact products of bf16, or block floating point."""

GROUPS: dict[str, dict[str, str]] = {
    "Build and run": {
        "compile": "Build the artifact directory: everything that is stale, nothing else",
        "run": "Build what is stale, then generate text from prompt=",
        "chat": "Hold a conversation with the model in the terminal",
        "models": "List the models that are built; delete= removes one",
    },
    "How fast": {
        "bench": "Measure prefill, decode, start and memory against what the machine can do",
        "profile": "Show where the time of a prompt and of a token goes: programs, launches, host, Python",
        "estimate": "Estimate the time and the limit of every launch on the NPU, and show the array on a page",
    },
    "How good, and what is wrong": {
        "verify": "Compare logits and tokens with transformers; write a page, and JUnit and JSON for CI",
        "perplexity": "Measure how well the artifacts, as they run, predict a text",
        "quality": "Compare what formats of weights lose, next to llama.cpp's files with peers=llama.cpp",
        "diagnose": "Find where a run goes wrong: compare layers with transformers, launches with their references",
        "selftest": "Bring up an NPU rung by rung, say what the first fault means, measure",
    },
    "This machine and what is on it": {
        "doctor": "Say which tools and devices this machine has, and what therefore works",
        "fit": "Say what a model needs before anything is downloaded, by format, and what fits here",
        "du": "Say what takes space: per model, target and kind, duplicates, caches and checkpoints",
        "gc": "Show what no complete artifact directory needs; keep= removes it",
        "why": "Say for each step, or for those named after it, whether it is current, and if not, what changed",
        "graph": "Show the steps as a page and as JSON: state, reason, time, inputs and outputs",
        "completion": "Print a script that completes commands and variables in bash or zsh",
    },
    "Share": {
        "export": "Write the artifacts and the runtime into one file, for python FILE PROMPT",
        "push": "Offer the artifact directory to others at remote=",
        "pull": "Take an artifact directory from remote=, where somebody whom you trust pushed it",
        "provenance": "Show from what and how the artifacts were built, who vouches for them, what was measured",
        "trust": "Show whose native code is run; key= allows a signer or one directory, remove= forbids",
    },
}
"""The commands by what they are for, each with its sentence."""

COMMANDS = {name: sentence for group in GROUPS.values() for name, sentence in group.items()}

_PROOFS = ("verify", "perplexity", "diagnose", "selftest", "quality")
_BUILD = ("compile", "run", "chat", "bench", "profile", "estimate", *_PROOFS, "export", "push")
"""Commands that build what is stale."""
_DESCRIBE = (*_BUILD, "pull", "fit", "provenance", "graph", "why")
"""Commands about one artifact directory."""
_ARTIFACTS = (*_DESCRIBE, "models", "du", "gc", "trust")


def _targets() -> Sequence[str]:
    from stages.targets import targets

    return list(targets())


def _weights() -> Sequence[str]:
    from stages.model.policy import matrix_formats

    return matrix_formats()


@dataclass(frozen=True)
class Options(Sampling, Running, Answering, Signers):
    """Values of the command-line variables. Raises UserError."""

    model: str = option(
        "demo",
        "the model: a hub id (org/name), a directory, a .gguf file, random:SHAPES, or a name in artifacts/",
        *_DESCRIBE,
        metavar="MODEL",
        examples=("demo", "random:llama-3.2-1b", "random:smollm2-135m"),
    )
    target: str = option(
        "",
        "what the artifacts are for: this CPU, the NPU, or the NPU's simulator",
        *_DESCRIBE,
        unset="npu2 where there is an NPU and its tools or artifacts are here, else cpu",
        metavar="TARGET",
        choices=_targets,
    )
    revision: str = option("main", "the branch, tag or commit of a model on the hub", *_DESCRIBE, metavar="NAME")
    artifacts: str = option(
        "artifacts", "build below this directory; reports go to reports/ next to it", *_ARTIFACTS, metavar=DIRECTORY
    )
    ignore: str = option(
        "",
        "leave out tensors with these names, with commas between; * and ? are wildcards",
        *_DESCRIBE,
        metavar="NAMES",
    )
    weights: str = option(
        "",
        "the format that weights are stored in, and exceptions as in int4,vocab=int8,w_down.0.1=int6",
        *_DESCRIBE,
        unset="as the checkpoint has them",
        metavar="FORMAT",
        examples=_weights,
    )
    kv: str = option("bf16", "the format of the KV cache", *_DESCRIBE, metavar="FORMAT", choices=tuple(KV_FORMATS))
    calibrate: str = option(
        "",
        "round int4 and int6 weights for the inputs that this text gives them; default is a text that ships",
        *_DESCRIBE,
        metavar=FILE,
        examples=("default",),
    )
    context: int = option(
        0,
        "the capacity of the KV cache on the NPU; elsewhere memory is taken as it is used",
        *_DESCRIBE,
        unit="tokens",
        unset="4096, or what the model knows if that is less",
        least=0,
    )
    buckets: str = option(
        "128,512,2048",
        "compile prompt programs for these numbers of rows, multiples of 64",
        *_DESCRIBE,
        name="npu.buckets",
        unit="tokens, with commas between",
        metavar="N,N",
    )
    grouping: str = option(
        "",
        "how launches are joined to programs",
        *_DESCRIBE,
        name="npu.grouping",
        unset="fused",
        metavar="NAME",
        examples=("fused", "separate"),
    )
    matmul: str = option(
        "",
        "how a prompt's rows are multiplied: exactly in bf16, or in block floating point",
        *_DESCRIBE,
        name="npu.matmul",
        unset="what suits the weights",
        metavar="FORMAT",
        choices=MATMULS,
    )
    cache: str = option(
        "",
        "take what steps of others made from this directory or remote, and leave there what is new",
        *_BUILD,
        metavar="REMOTE",
    )
    include: str = option(
        "",
        "give others the weights of a checkpoint that is not public, too",
        *_BUILD,
        metavar=INCLUDE,
        choices=(INCLUDE,),
    )
    prompt: str | None = option(
        None, "the text to continue or answer; - reads standard input", "run", "profile", "diagnose"
    )
    text: str = option(
        "",
        "measure on this text",
        "bench",
        "verify",
        "perplexity",
        "quality",
        unset="a text that ships",
        metavar=FILE,
    )
    prompts: str = option(
        "",
        "compare on these prompts: one per line, or JSON lines with prompt and id",
        "verify",
        unset="prompts that ship",
        metavar=FILE,
    )
    full: bool = option(
        False, "measure all there is instead of a sample: prompts, text, program sizes", "verify", "quality", "diagnose"
    )
    divergence: bool = option(False, "also measure the KL divergence of all from the checkpoint", "bench")
    recipe: str = option("transformers", "measure as this program does", "perplexity", metavar="NAME", choices=RECIPES)
    window: int = option(
        512, "the length of the text that is predicted at a time", "perplexity", unit="tokens", least=2
    )
    stride: int = option(
        0, "the distance from one window to the next", "perplexity", unit="tokens", unset="half a window", least=0
    )
    peers: str = option(
        "",
        "compare with these programs, with commas between",
        "bench",
        "quality",
        metavar="NAMES",
        examples=PEERS,
    )
    against: str = option("", "compare with this profile.json of another run", "profile", metavar=FILE)
    measured: str = option(
        "",
        "use the rates in this report of doit selftest",
        "estimate",
        unset="published rates",
        metavar=FILE,
    )
    published: bool = option(
        False, "show the rates with their sources, and other projects' plans next to their measurements", "estimate"
    )
    measure: bool = option(False, "build and run each format, and show what it really took", "fit")
    risky: bool = option(False, "also try what may reset the device", "selftest")
    keep: str = option(
        "",
        "remove what is older than this age (12h, 14d, 2w), beyond this size (5G) or this number of each kind",
        "gc",
        unset="nothing is removed",
        metavar="AGE",
        examples=("0", "14d", "5G"),
    )
    calibration: bool = option(False, "count the leftovers of calibrate= in, which a build would compute again", "gc")
    delete: str = option(
        "", "remove a built model: its name, or name/directory for one of its targets", "models", metavar="NAME"
    )
    dry_run: bool = option(False, "show what would be removed, and remove nothing", "gc", "models")
    output: str = option(
        "",
        "write the report into this directory, or the exported artifacts into this file",
        "profile",
        "estimate",
        "verify",
        "diagnose",
        "graph",
        "export",
        unset="reports/<model>/<target>/<command>, or <model>-<target>.pyz",
        metavar="PATH",
    )
    key: str = option("", "trust this signer's key, or one artifact directory as it is", "trust", metavar="KEY|DIR")
    remote: str = option(
        "",
        "where artifacts are shared, as file:///mnt/shared, s3://BUCKET/PATH or hf://ORG/NAME",
        "push",
        "pull",
        metavar="URL",
    )
    shell: str = option("bash", "the shell to write for", "completion", metavar="SHELL", choices=("bash", "zsh"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bucket_list()
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

    def peer_list(self) -> tuple[str, ...]:
        """Return the programs to compare with. Raises UserError."""
        names = _parts(self.peers)
        if bad := [name for name in names if name not in PEERS]:
            raise OptionError("peers", self.peers, f"{bad[0]} is unknown: choose among {', '.join(PEERS)}")
        return names

    def ignore_list(self) -> tuple[str, ...]:
        """Return patterns (`*` and `?`) of names of tensors that a checkpoint may hold besides the model's."""
        return _parts(self.ignore)


_ALSO = {
    "threads": [name for name in _BUILD if name != "estimate"],
    "repeats": ["selftest"],
    "second_copy": ["perplexity", "fit", "estimate"],
    "raw": ["diagnose"],
    "json": "verify perplexity diagnose quality doctor fit estimate models du gc provenance why graph".split(),  # noqa: SIM905
}
"""The commands of a build that take the runtime's options, besides the runtime's own."""

_RENAMED = {
    "check": "dry_run=1 for doit gc, measure=1 for doit fit, published=1 for doit estimate",
    "buckets": "npu.buckets=",
    "grouping": "npu.grouping=",
    "matmul": "npu.matmul=",
    "second_copy": "npu.second_copy=",
}
"""Names that variables had in earlier versions."""
_RENAMED_OF = {("full", "gc"): "calibration=1", ("full", "bench"): "divergence=1"}
"""Names that variables of one command had."""


@cache
def variables() -> dict[str, Option]:
    """Return the variables by name."""
    own = Options.__annotations__
    return {each.name: _of_build(each) for each in sorted(options_of(Options), key=lambda each: each.field not in own)}


def _of_build(each: Option) -> Option:
    takers = {*each.commands, *_ALSO.get(each.field, ())}
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
        if renamed := _RENAMED_OF.get((variable.name, command)):
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
