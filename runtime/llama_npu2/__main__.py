"""`llama-npu2 DIR "prompt"`: generate text with nothing but an artifact directory."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llama_npu2.errors import CLOSED, UserError
from llama_npu2.options import Running, Sampling, add_arguments, chosen
from llama_npu2.trust.keys import TRUST

if TYPE_CHECKING:
    from llama_npu2.engine.llama import Llama


class _Parser(argparse.ArgumentParser):
    """Mistakes are errors like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def parse(arguments: list[str], artifacts: str | None = None) -> argparse.Namespace:
    """`artifacts`: what to run, where the command line does not say it. Raises UserError."""
    parser = _Parser(prog=Path(artifacts).name if artifacts else "llama-npu2", description=__doc__)
    add = parser.add_argument
    if artifacts:
        parser.set_defaults(artifacts=artifacts)
    else:
        add(
            "artifacts",
            metavar="DIR",
            help="artifact directory, as artifacts/demo/cpu, or a file of doit export",
        )
    add("prompt", nargs="?", help="text to continue or answer; - reads standard input")
    add_arguments(parser, Sampling, Running)
    add("--trust", default="", metavar="WHAT", help="run what this signed: a fingerprint, or sha256: of a manifest")
    add("--raw", action="store_true", help="no chat template")
    add("--json", action="store_true", help="print a JSON object per reply instead of streaming")
    mode = parser.add_mutually_exclusive_group().add_argument
    mode("--chat", action="store_const", dest="run", const=chat, help="hold a conversation")
    mode(
        "--bench", action="store_const", dest="run", const=bench, help="measure speed and memory, and the CPU's limits"
    )
    mode(
        "--profile", action="store_const", dest="run", const=profile, help="where the time of a prompt and a token goes"
    )
    mode("--check", action="store_const", dest="run", const=check, help="compare every file with what was built")
    parser.epilog = f"{parser.prog} trust --help: whose native code to run"
    parser.set_defaults(run=once)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None, artifacts: str | None = None) -> int:
    """`artifacts` as for `parse`. Returns the exit status: 0, 1 for a user's mistake, 130 after Ctrl-C, `CLOSED` where
    nobody reads the output any more."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments, artifacts)
        finally:
            if sys.stdout:
                sys.stdout.flush()  # here it can still be told why that failed
    except BrokenPipeError:
        _discard_output()
        return CLOSED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _discard_output(errors=False)
        print(
            f"error: the output cannot be written: {error.strerror}: make room, or write it elsewhere", file=sys.stderr
        )
        return 1


def _run(given: list[str], artifacts: str | None) -> int:
    try:
        if given[:1] == ["trust"]:
            return trust(given[1:])
        options = parse(given, artifacts)
        if options.trust:
            os.environ[TRUST] = f"{os.environ.get(TRUST, '')},{options.trust}"
        run: Callable[..., int] = options.run
        return run(options, chosen(Sampling, options), chosen(Running, options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _discard_output(errors: bool = True) -> None:
    """What still waits to be written would fail again when Python ends. `errors`: also on standard error."""
    with Path(os.devnull).open("wb") as nowhere:
        for stream in (sys.stdout, *([sys.stderr] if errors else [])):
            with contextlib.suppress(OSError, AttributeError):  # of a stream that is no file, or none
                os.dup2(nowhere.fileno(), stream.fileno())


def trust(arguments: list[str]) -> int:
    """`llama-npu2 trust`."""
    from llama_npu2.cli import allow

    parser = _Parser(prog="llama-npu2 trust", description=allow.__doc__)
    allow.add_arguments(parser)
    return allow.run(parser.parse_args(arguments))


def once(options: argparse.Namespace, sampling: Sampling, running: Running) -> int:
    if options.prompt is None:
        raise UserError(f'no prompt: give "some text" behind {options.artifacts}, or --chat')
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with contextlib.closing(open_model(options, running, chats=not options.raw)) as llm:
        print_reply(options, llm, prompt, sampling)
    return 0


def open_model(options: argparse.Namespace, running: Running, chats: bool) -> Llama:
    """`chats`: prompts go through the chat template, if there is one. Its process starts while this one loads numpy,
    programs and weights. Raises UserError."""
    from llama_npu2.text.chat_template import ChatTemplate, start_renderer

    renderer = start_renderer(Path(options.artifacts)) if chats else None
    from llama_npu2.artifact.manifest import Manifest

    manifest = Manifest.open(options.artifacts)
    manifest.check_trusted()
    template = ChatTemplate.open(manifest.storage, renderer) if chats else None
    from llama_npu2.engine.llama import Llama

    llm = Llama(manifest, running.threads, running.second_copy)
    if chats:
        llm.chat_template = template
    return llm


def print_reply(options: argparse.Namespace, llm: Any, prompt: str, sampling: Sampling) -> None:
    if options.json:
        for made in llm.complete(prompt, raw=options.raw, **vars(sampling)):
            print(json.dumps(as_json(llm, made), ensure_ascii=False), flush=True)
        return
    replace(sampling, n=1).check_one_text()
    if sampling.n > 1:
        for number, made in enumerate(llm.complete(prompt, raw=options.raw, **vars(sampling)), 1):
            print(f"--- {number} of {sampling.n} ---\n{made.text}", flush=True)
            print(summary(llm), file=sys.stderr)
        return
    for piece in llm.generate(prompt, raw=options.raw, **vars(sampling)):
        print(piece, end="", flush=True)
    print(flush=True)
    print(summary(llm), file=sys.stderr)


def as_json(llm: Any, made: Any) -> dict[str, Any]:
    """A `Completion`: text, tokens, counts and times; log-probabilities, if asked for, with each token as the
    vocabulary spells it."""

    def token(number: int, logprob: float) -> dict[str, Any]:
        return {"token": number, "piece": llm.tokenizer.inner.id_to_token(number), "logprob": logprob}

    found = {"text": made.text, "tokens": made.tokens, **asdict(made.stats), "tpot": made.stats.tpot}
    for name in ("logprobs", "prompt_logprobs"):
        if (entries := getattr(made, name)) is not None:
            found[name] = [
                {**token(each.token, each.logprob), "top": [token(*other) for other in each.top]} for each in entries
            ]
    return found


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
    with contextlib.closing(open_model(options, running, chats=True)) as llm:
        from llama_npu2.cli.session import Session

        if llm.chat_template is None:
            raise UserError(f"{options.artifacts}: this model has no chat template, it cannot hold a conversation")
        llm.chat_template.check()
        return Session(llm, sampling).run()


def summary(llm: Any) -> str:
    """One line of rates, for standard error."""
    stats = llm.stats
    return (
        f"{stats.prompt_tokens} prompt tokens, first token after {stats.ttft * 1e3:.0f} ms "
        f"({stats.prefill_rate:.0f} tokens/s); {stats.generated_tokens} tokens, {stats.tpot * 1e3:.1f} ms each "
        f"({stats.decode_rate:.1f} tokens/s); {llm.description}"
    )


if __name__ == "__main__":
    sys.exit(main())
