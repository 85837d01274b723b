"""`python -m runtime ARTIFACT_DIR "prompt"`: generate text with nothing but an artifact directory."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from runtime.errors import UserError


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m runtime", description=__doc__)
    add = parser.add_argument
    add("artifacts", metavar="DIR", help="artifact directory, for example artifacts/demo/cpu")
    add("prompt", nargs="?", help="text to continue or answer; - reads standard input")
    add("--max-tokens", type=int, default=256, help="longest reply (default %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="sample among the k most likely, 0: all")
    add("--top-p", type=float, default=1.0, help="sample from the smallest set with this probability")
    add("--seed", type=int, help="make sampling repeatable")
    add("--stop", action="append", default=[], help="end the reply before this text; may be repeated")
    add("--raw", action="store_true", help="no chat template")
    add("--json", action="store_true", help="print one JSON object at the end instead of streaming")
    add("--threads", type=int, default=0, help="0: all CPUs of this process (default)")
    add("--chat", action="store_true", help="hold a conversation, one line per turn")
    add("--bench", action="store_true", help="measure speed and memory; target cpu against the machine's limits")
    add("--profile", action="store_true", help="show where the time of a prompt and of a token goes")
    add("--repeats", type=int, default=5, help="with --bench and --profile: runs of each (default %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a user's mistake, 130 after Ctrl-C."""
    options = parse(arguments)
    try:
        return _command(options)(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _command(options: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    return bench if options.bench or options.profile else chat if options.chat else once


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    if options.max_tokens < 1:
        raise UserError(f"--max-tokens {options.max_tokens}: must be at least 1")
    if options.threads < 0:
        raise UserError(f"--threads {options.threads}: must be at least 0")
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    return {name: getattr(options, name) for name in names}


def once(options: argparse.Namespace) -> int:
    from runtime.llama import load

    if options.prompt is None:
        raise UserError('no prompt: python -m runtime DIR "some text", or --chat')
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    sampling = sampling_options(options)
    with contextlib.closing(load(options.artifacts, options.threads)) as llm:
        llm.notify = print_notice
        print_reply(options, llm, prompt, sampling)
    return 0


def print_notice(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def print_reply(options: argparse.Namespace, llm: Any, prompt: str, sampling: dict[str, Any]) -> None:
    pieces = []
    for piece in llm.generate(prompt, raw=options.raw, **sampling):
        pieces.append(piece)
        if not options.json:
            print(piece, end="", flush=True)
    if options.json:
        print(json.dumps({"text": "".join(pieces), **asdict(llm.stats), "tpot": llm.stats.tpot}, ensure_ascii=False))
    else:
        print(flush=True)
        print(summary(llm), file=sys.stderr)


def bench(options: argparse.Namespace) -> int:
    from runtime.bench import run_bench
    from runtime.profile import run_profile

    if options.repeats < 1:
        raise UserError(f"--repeats {options.repeats}: must be at least 1")
    (run_bench if options.bench else run_profile)(options.artifacts, options.threads, options.repeats, options.json)
    return 0


def chat(options: argparse.Namespace) -> int:
    """One line in, one reply out, until end of input or /exit. /reset starts a new conversation."""
    from runtime.llama import load

    sampling = sampling_options(options)
    with contextlib.closing(load(options.artifacts, options.threads)) as llm:
        llm.notify = print_notice
        return converse(options, llm, sampling)


def converse(options: argparse.Namespace, llm: Any, sampling: dict[str, Any]) -> int:
    if llm.chat_template is None:
        raise UserError(f"{options.artifacts}: this model has no chat template, it cannot hold a conversation")
    messages: list[dict[str, str]] = []
    print("Type a message; /reset starts over, /exit or end of input leaves.", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line == "/exit":
            return 0
        if line == "/reset":
            messages.clear()
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": answer(llm, messages, sampling)})


def answer(llm: Any, messages: list[dict[str, str]], sampling: dict[str, Any]) -> str:
    """Stream one reply; Ctrl-C ends the reply, not the conversation."""
    pieces = []
    try:
        for piece in llm.generate(messages, keep_context=True, **sampling):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print(flush=True)
    return "".join(pieces)


def summary(llm: Any) -> str:
    """One line of rates, for standard error."""
    stats = llm.stats
    return (
        f"{stats.prompt_tokens} prompt tokens, first token after {stats.ttft * 1e3:.0f} ms "
        f"({stats.prefill_rate:.0f} tokens/s); {stats.generated_tokens} tokens, {stats.tpot * 1e3:.1f} ms each "
        f"({stats.decode_rate:.1f} tokens/s); {llm.device.description}"
    )


if __name__ == "__main__":
    sys.exit(main())
