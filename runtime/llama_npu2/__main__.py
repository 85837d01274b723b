"""`llama-npu2 DIR PROMPT`, `llama-npu2 COMMAND DIR ...`: what an artifact directory can do without build tools."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llama_npu2 import __version__, ending, errors
from llama_npu2.errors import CLOSED, UserError, printable, reason
from llama_npu2.machine import spare_threads
from llama_npu2.options import (
    Answering,
    Listening,
    Once,
    OptionError,
    Running,
    Sampling,
    Signers,
    add_arguments,
    chosen,
    nearest,
    options_of,
)
from llama_npu2.standard_streams import open_missing
from llama_npu2.trust.keys import TRUST

if TYPE_CHECKING:
    from llama_npu2.engine.llama import Llama

GROUPS = (Sampling, Running, Answering, Listening, Once, Signers)
"""All options of this command line."""

COMMANDS = {
    "run": "generate text from a prompt; so does DIR PROMPT alone",
    "chat": "hold a conversation in the terminal",
    "serve": "answer requests over HTTP: the APIs of OpenAI, Anthropic and Ollama",
    "embed": "turn texts into embeddings",
    "rerank": "order documents by their relevance to a query",
    "bench": "measure speed and memory, and the limits of the CPU",
    "profile": "show where the time of a prompt and of a token goes",
    "check": "compare every file with what was built",
    "info": "show what the artifacts hold, and who vouches for them",
    "trust": "show or change whose native code is run",
    "completion": "print a script that completes this command line in bash or zsh",
}
"""The commands, each with its sentence."""

_PROMPTS = {
    "run": "text to continue or answer; - reads standard input",
    "profile": "text to continue or answer; - reads standard input",
    "embed": "text to embed; - reads one from each line of standard input",
    "rerank": "query that documents are ranked for",
}
"""The commands that take a text, and what that is."""

_OLD = {f"--{name}": name for name in ("chat", "bench", "profile", "check")}
"""Flags that were commands in earlier versions."""


class _Parser(argparse.ArgumentParser):
    """Turns mistakes into errors like all others."""

    def error(self, message: str) -> NoReturn:
        prefix, _, unknown = message.partition("unrecognized arguments: ")
        flag = unknown.partition("=")[0].partition(" ")[0]
        if not prefix and flag[:2] == "--":
            takers = [command for each in options_of(*GROUPS) if each.flag == flag for command in each.commands]
            where = f"is for {errors.program} {', '.join(takers)}"
            known = sorted(name for name in self._option_string_actions if name[:2] == "--")
            message = f"{flag} {where if takers else 'is not an option: ' + nearest(flag, known)}"
            raise UserError(f"{message} ({self.prog} --help lists them)")
        raise UserError(f"{message}: see {self.prog} --help")


def parse(arguments: list[str], artifacts: str | None = None) -> argparse.Namespace:
    """Return the values of a command line, with its command's function as `run`.

    Args:
        artifacts: the directory or file to run where the command line does not name it.

    Raises:
        UserError: the command line is wrong.
    """
    if arguments[:1] in (["--help"], ["-h"]):
        print(overview(artifacts))
        raise SystemExit(0)
    if arguments[:1] == ["--version"]:
        print(f"llama-npu2 {__version__}")
        raise SystemExit(0)
    command, rest = (arguments[0], arguments[1:]) if arguments[:1] and arguments[0] in COMMANDS else ("run", arguments)
    options_given = rest[: rest.index("--")] if "--" in rest else rest
    if old := next((flag for flag in options_given if flag in _OLD), None):
        raise UserError(f"{old} is now a command: {errors.program} {_OLD[old]}{'' if artifacts else ' DIR'}")
    parser = _Parser(prog=f"{errors.program} {command}", description=_sentence(command), allow_abbrev=False)
    if command == "completion":
        parser.add_argument("shell", choices=("bash", "zsh"), help="the shell to write for")
    elif command == "trust":
        parser.add_argument(
            "what", nargs="?", default="", metavar="KEY|DIR", help="trust this signer, or one directory"
        )
    elif artifacts:
        parser.set_defaults(artifacts=artifacts)
    else:
        about = "artifact directory, as artifacts/demo/cpu, or a file of doit export"
        parser.add_argument("artifacts", metavar="DIR", help=about)
    if command == "serve":
        parser.add_argument(
            "others", nargs="*", default=[], metavar="DIR", help="further models, which are loaded when asked for"
        )
    if command in _PROMPTS:
        parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=_PROMPTS[command])
    add_arguments(parser, *GROUPS, command=command)
    parser.set_defaults(run=globals()[command])
    return parser.parse_intermixed_args(rest)


def _sentence(command: str) -> str:
    sentence = COMMANDS[command]
    return f"{sentence[0].upper()}{sentence[1:]}."


def overview(artifacts: str | None = None) -> str:
    """Return the help of the command line as a whole."""
    where = "" if artifacts else " DIR"
    lines = [f"usage: {errors.program}{where} PROMPT", f"       {errors.program} COMMAND{where} ...", "", "commands:"]
    lines += [f"  {name:12}{sentence}" for name, sentence in COMMANDS.items()]
    lines += ["", f"{errors.program} COMMAND --help lists the options of a command; --version shows the version."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None, artifacts: str | None = None) -> int:
    """Run a command line. `artifacts`: as for `parse`.

    Returns the exit status: 0, 1 for a user's mistake, 130 after Ctrl-C, `CLOSED` where nobody reads the output any
    more.
    """
    open_missing()
    spare_threads()
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # models write characters that such a terminal does not have
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments, artifacts)
        finally:
            sys.stdout.flush()  # here it can still be told why that failed
    except BrokenPipeError:
        _discard_output()
        return CLOSED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _discard_output(errors=False)
        print(f"error: {errors.unwritable(error)}", file=sys.stderr)
        return 1


def _run(given: list[str], artifacts: str | None) -> int:
    try:
        errors.program = f"python {artifacts}" if artifacts else errors.PROGRAM
        options = parse(given, artifacts)
        if options.trust:
            os.environ[TRUST] = f"{os.environ.get(TRUST, '')},{options.trust}"
        running = chosen(Running, options)
        if running.threads > (cpus := len(os.sched_getaffinity(0))):
            print(f"note: {running.threads} threads on {cpus} CPUs of this process are slower", file=sys.stderr)
        run: Callable[..., int] = options.run
        return run(options, chosen(Sampling, options), running)
    except OptionError as error:
        flag = next((each.flag for each in options_of(*GROUPS) if each.name == error.name), error.name)
        print(f"error: {printable(f'{flag}={error.value}: {error.problem}')}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except PermissionError as error:
        print(f"error: {errors.unreadable(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    finally:
        errors.program = errors.PROGRAM


def _discard_output(errors: bool = True) -> None:
    """Send buffered output nowhere: writing it would fail again when Python ends. `errors`: standard error, too."""
    with Path(os.devnull).open("wb") as nowhere:
        for stream in (sys.stdout, *([sys.stderr] if errors else [])):
            with contextlib.suppress(OSError, AttributeError):  # of a stream that is no file, or none
                os.dup2(nowhere.fileno(), stream.fileno())


def run(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    prompt = _prompt(options)
    with contextlib.closing(open_model(options.artifacts, running, chats=not options.raw)) as llm:
        print_reply(options, llm, prompt, sampling)
    return 0


def _prompt(options: argparse.Namespace) -> str:
    """Return the prompt of the command line, of a file or of standard input. Raises UserError."""
    if options.prompt is not None and options.prompt_file:
        raise UserError("two prompts: give a text or a file, not both")
    if options.prompt_file:
        try:
            return Path(options.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError("prompt_file", options.prompt_file, f"{reason(error)}: give a text file") from None
    if options.prompt is None:
        raise UserError(f'no prompt: give "some text" after {options.artifacts}, or see {errors.program} --help')
    return sys.stdin.read() if options.prompt == "-" else str(options.prompt)


def open_model(artifacts: str | Path, running: Running, chats: bool, kv_memory: int = 0) -> Llama:
    """Open artifacts as a command line says.

    With `chats`, prompts go through the chat template, if there is one. Its process starts while this one loads numpy,
    programs and weights. `kv_memory` as for `load`. Raises UserError.
    """
    from llama_npu2.text.chat_template import ChatTemplate, start_renderer

    renderer = start_renderer(Path(artifacts)) if chats else None
    from llama_npu2.artifact.manifest import Manifest

    manifest = Manifest.open(artifacts)
    manifest.check_trusted()
    template = ChatTemplate.open(manifest.storage, renderer) if chats else None
    from llama_npu2.engine.llama import Llama

    llm = Llama(manifest, running.threads, running.second_copy, kv_memory, draft=running.draft)
    if chats:
        llm.chat_template = template
    return llm


def print_reply(options: argparse.Namespace, llm: Any, prompt: str, sampling: Sampling) -> None:
    given = {"raw": options.raw, "template": chosen(Answering, options).template_variables(), **vars(sampling)}
    if options.json:
        for made in llm.complete(prompt, **given):
            print(json.dumps(as_json(llm, made), ensure_ascii=False), flush=True)
        return
    replace(sampling, n=1).check_one_text()
    if sampling.n > 1:
        for number, made in enumerate(llm.complete(prompt, **given), 1):
            print(f"--- {number} of {sampling.n} ---\n{made.text}", flush=True)
            print(summary(llm), file=sys.stderr)
        return
    reply = llm.generate(prompt, **given)
    for piece in reply:
        print(piece, end="", flush=True)
    print(flush=True)
    if reply.reasoning and not reply.text:
        print("note: the reply ended before its answer began: give more max_tokens", file=sys.stderr)
    print(summary(llm), file=sys.stderr)


def as_json(llm: Any, made: Any) -> dict[str, Any]:
    """Return a `Completion` as JSON.

    Text, tokens, counts and times; log-probabilities, if asked for, with each token as the vocabulary spells it.
    """

    def token(number: int, logprob: float) -> dict[str, Any]:
        return {"token": number, "piece": llm.tokenizer.inner.id_to_token(number), "logprob": logprob}

    found = {"text": made.text, "tokens": made.tokens, **asdict(made.stats), "tpot": made.stats.tpot}
    found |= {name: value for name in ("reasoning", "tool_calls") if (value := getattr(made, name))}
    for name in ("logprobs", "prompt_logprobs"):
        if (entries := getattr(made, name)) is not None:
            found[name] = [
                {**token(each.token, each.logprob), "top": [token(*other) for other in each.top]} for each in entries
            ]
    return found


def embed(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    texts = _lines(options.prompt_file or "-") if options.prompt_file or options.prompt == "-" else [_prompt(options)]
    with contextlib.closing(open_model(options.artifacts, running, chats=False)) as llm:
        for text in texts:
            (values,) = llm.embed(text, options.dimensions, options.instruction).tolist()
            print(json.dumps({"text": text, "embedding": values} if options.json else values), flush=True)
    return 0


def rerank(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    query = _prompt(options)
    if not options.documents:
        raise UserError("no documents: give a file with one in each line as documents, or - for standard input")
    documents = _lines(options.documents)
    with contextlib.closing(open_model(options.artifacts, running, chats=False)) as llm:
        for each in llm.rerank(query, documents, options.instruction):
            print(
                json.dumps(asdict(each), ensure_ascii=False) if options.json else f"{each.score:.4f}  {each.document}",
                flush=True,
            )
    return 0


def _lines(name: str) -> list[str]:
    """Return the lines of a file, or of standard input, that are not empty. Raises UserError."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: {reason(error)}: give a text file") from None
    return [line for line in text.splitlines() if line.strip()]


def bench(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    from llama_npu2.cli.bench import run_bench

    run_bench(options.artifacts, running, options.json)
    return 0


def profile(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    from llama_npu2.cli.profile import run_profile

    run_profile(options.artifacts, running, sampling, options.prompt, options.raw, options.json)
    return 0


def check(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    from llama_npu2.artifact.check import check_files
    from llama_npu2.artifact.manifest import Manifest

    started = time.perf_counter()
    manifest = Manifest.open(options.artifacts)
    total = sum(entry["size"] for entry in manifest.files.values())

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done / 2**30:.1f} of {total / 2**30:.1f} GiB ", end="", file=sys.stderr, flush=True)

    try:
        check_files(manifest, progress)
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    print(f"{len(manifest.files)} files, {total / 2**30:.2f} GiB: all as built ({seconds:.1f} s)")
    return 0


def chat(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    sampling.check_one_text()
    with contextlib.closing(open_model(options.artifacts, running, chats=True)) as llm:
        from llama_npu2.cli.session import Session

        if llm.chat_template is None:
            raise UserError(f"{options.artifacts}: this model has no chat template, it cannot hold a conversation")
        llm.chat_template.check()
        return Session(llm, sampling, chosen(Answering, options).template_variables()).run()


def serve(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    try:
        from llama_npu2.serve import listen
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "llama_npu2"):
            raise
        raise UserError(f"the package {package} is not installed: pip install 'llama-npu2[serve]'") from None
    listening = chosen(Listening, options)
    load = partial(open_model, running=running, chats=True, kv_memory=listening.kv_memory << 20)
    with contextlib.closing(listen.Place(listening)) as place:
        place.serve([Path(each) for each in (options.artifacts, *options.others)], load)
    return 0


def info(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    from llama_npu2.artifact.manifest import Manifest
    from llama_npu2.cli.describe import described

    rows = described(Manifest.open(options.artifacts))
    print(json.dumps(rows) if options.json else "\n".join(f"{name:16}{value}" for name, value in rows.items()))
    return 0


def trust(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    from llama_npu2.cli import allow

    for line in allow.changed(options.what, options.name, options.remove):
        print(printable(line))
    return 0


def completion(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    from llama_npu2.cli.completion import script

    known = list(options_of(*GROUPS))
    words = {name: [each for each in known if name in each.commands] for name in COMMANDS}
    print(script(options.shell, "llama-npu2", COMMANDS, words, flags=True), end="")
    return 0


def summary(llm: Any) -> str:
    """One line of rates, for standard error."""
    stats = llm.stats
    return (
        f"{stats.prompt_tokens} prompt tokens, first token after {stats.ttft * 1e3:.0f} ms "
        f"({stats.prefill_rate:.0f} tokens/s); {stats.generated_tokens} tokens, {stats.tpot * 1e3:.1f} ms each "
        f"({stats.decode_rate:.1f} tokens/s); {llm.description}"
    )


def script() -> int:
    """Run the command line of this process, which ends with it. Returns the exit status."""
    return ending.at_once(main())


if __name__ == "__main__":
    sys.exit(script())
