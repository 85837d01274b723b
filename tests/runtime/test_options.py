"""The table of options: refusals, help, completion and the reference page all follow it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

import llama_npu2
from llama_npu2 import UserError, load
from llama_npu2.__main__ import COMMANDS as RUNTIME_COMMANDS
from llama_npu2.__main__ import GROUPS as RUNTIME_GROUPS
from llama_npu2.__main__ import main
from llama_npu2.cli.completion import script
from llama_npu2.options import options_of
from stages.commands import verbs
from stages.commands.words import command_line, commands_of
from stages.graph.options import _TABLE, COMMANDS, Options, parse_options, sections, table, variables
from tests.conftest import ROOT, doit

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_option_has_help_and_is_taken_by_a_command() -> None:
    for each in (*variables().values(), *options_of(*RUNTIME_GROUPS)):
        assert len(each.help) > 10 and each.commands and each.metavar, each.name
        assert not each.help.endswith(".") and "\n" not in each.help


def test_every_command_has_a_sentence_and_a_module() -> None:
    for name, sentence in COMMANDS.items():
        assert sentence and not sentence.endswith(".")
        module = {"run": "generate"}.get(name, name)
        assert name == "compile" or (ROOT / f"stages/commands/{module}.py").is_file()


def test_the_table_names_fields() -> None:
    assert {each.field for each in variables().values()} == set(Options.__dataclass_fields__)
    assert {each.name for taken in table().values() for each in taken} == set(variables())
    assert all(each in table()[name] for name in COMMANDS for part in sections(name).values() for each in part)


@pytest.mark.parametrize("command", COMMANDS)
def test_variables_are_refused_where_they_do_not_belong(command: str) -> None:
    for name, each in variables().items():
        if command in each.commands:
            continue
        with pytest.raises(UserError) as refused:
            parse_options({name: "1"}, [command])
        renamed = name == "full" and command in ("gc", "bench")
        said = f"full= of doit {command} is now " if renamed else f"{name}= is for doit {', '.join(each.commands)}:"
        assert str(refused.value).startswith(said)


@pytest.mark.parametrize("name", _TABLE["renamed"])
def test_an_old_name_says_the_new_one(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name}= is now ") as refused:
        parse_options({name: "1"})
    named = [word.partition("=")[0] for word in str(refused.value).split(" is now ")[1].split() if "=" in word]
    assert named and {*named} <= {*variables()}


def test_one_of_several_commands_may_take_a_variable() -> None:
    assert parse_options({"repeats": "2"}, ["compile", "bench"]).repeats == 2


@pytest.mark.parametrize(
    ("line", "commands"),
    [
        ("", ["run"]),
        ("run", ["run"]),
        ("run -n 2", ["run"]),
        ("-n 2 compile", ["compile"]),
        ("run -n 2 compile bench", ["compile", "bench"]),
        ("generate", ["run"]),
        ("elf:host", ["compile"]),
        ("bench elf", ["bench", "compile"]),
        ("why fit", ["why"]),
        ("list --all", ["compile"]),
        ("-n 2 run", ["run"]),
        ("-a -v 1 run compile", ["compile"]),
        ("-f dodo.py info bench", ["bench", "compile"]),
        ("clean", ["compile"]),
        ("-n 2 model=x du", ["du"]),
    ],
)
def test_which_commands_a_line_names(line: str, commands: list[str]) -> None:
    assert commands_of(*command_line(line.split())) == commands


# Help


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which doit finds the entry points of pyproject.toml, whatever is installed."""
    root = tmp_path_factory.mktemp("installed")
    about = root / "llama_npu2_entry-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-npu2-entry\nVersion: 0\n")
    points = PROJECT["entry-points"]["doit.COMMAND"]
    lines = ["[doit.COMMAND]", *(f"{name} = {place}" for name, place in points.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return {"PYTHONPATH": os.pathsep.join([str(root), str(ROOT / "runtime")])}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_all_its_variables(command: str) -> None:
    text = " ".join(verbs.command_help(command).split())
    for each in table()[command]:
        assert f"{each.name}={each.metavar} {each.shown_help}" in text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("line", ["help run", "clean --help", "--help", "help", "chat -h", "list", "help gc fit"])
def test_help_on_the_command_line(line: str, installed: dict[str, str]) -> None:
    run = doit(*line.split(), env=installed)
    assert run.returncode == 0 and "CmdOption" not in run.stdout + run.stderr and "Traceback" not in run.stderr
    assert any(word in run.stdout for word in ("doit run", "doit chat:", "doit gc:", "clean [TASK"))
    assert max(map(len, run.stdout.splitlines())) <= 125


def test_list_shows_commands_before_steps(installed: dict[str, str]) -> None:
    lines = doit("list", env=installed).stdout.splitlines()
    at = lines.index("Steps:")
    assert all(any(line.startswith(f"  doit {name} ") for line in lines[:at]) for name in COMMANDS)
    assert any(line.startswith("  doit weights ") for line in lines[at:])
    assert "generate" in doit("list", "-q", env=installed).stdout.split(), "doit's own options give doit's own list"


def test_errors_of_doit_are_one_line(installed: dict[str, str]) -> None:
    for line in ("run --nonsense", "nonsense", "keep=1", "list keep=1", "clean --nonsense", "info"):
        run = doit(*line.split(), env=installed)
        assert run.returncode == 3 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rnu prompt=hi", "rnu is neither a command nor a step: did you mean run?"),
        ("compile prompt=hi", "prompt= is for doit run,"),
        ("compile -v 1", "-v: options of doit stand before the command, as in doit -n 4 compile"),
        ("info elf:hots", "there is no step elf:hots: did you mean elf:host?"),
        ("help rnu", "there is no command rnu: did you mean run?"),
    ],
)
def test_a_mistake_with_a_word_says_which(line: str, message: str, installed: dict[str, str]) -> None:
    run = doit(*line.split(), env=installed)
    assert run.returncode == 3 and run.stderr.startswith(f"error: {message}") and run.stderr.count("\n") == 1


def test_clean_removes_what_was_built_and_says_so(demo: Path, installed: dict[str, str], tmp_path: Path) -> None:
    directory = shutil.copytree(demo, tmp_path / "demo/cpu", symlinks=True)
    run = doit("-n", 1, "run", f"artifacts={tmp_path}", "prompt=The capital of France is", env=installed)
    assert run.stdout == " Paris.\n", "options of doit may stand before run"
    would = doit("clean", "-n", f"artifacts={tmp_path}", env=installed)
    assert "weights: would remove build/weights.json and" in would.stdout
    receipts = [*(directory / "build/receipts").iterdir()]
    written = {directory / label for receipt in receipts for label in json.loads(receipt.read_text())["outputs"]}
    assert all(path.is_file() for path in written)
    done = doit("clean", f"artifacts={tmp_path}", env=installed)
    assert done.stdout == would.stdout.replace("would remove", "removed")
    assert len(written) > len(receipts) > 30 and not any(path.exists() for path in (*written, *receipts))
    again = doit("clean", f"artifacts={tmp_path}", env=installed)
    assert [run.returncode for run in (would, done, again)] == [0, 0, 0]
    assert again.stdout == would.stderr + done.stderr + again.stderr == ""


def test_what_may_not_be_read_is_said_in_one_line(
    demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "DIR/tokenizer")

    monkeypatch.setattr("llama_npu2.text.chat_template.start_renderer", refuse)
    assert main([str(demo), "hi"]) == 1
    assert capsys.readouterr().err.startswith("error: DIR/tokenizer: Permission denied: choose a place")


def test_elsewhere_doit_is_as_it_was(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "dodo.py").write_text("def task_hello():\n    'Say hello.'\n    return {'actions': ['echo hello']}\n")
    assert doit("list", cwd=tmp_path, env=installed).stdout == "hello   Say hello.\n"
    assert "hello" in doit("hello", cwd=tmp_path, env=installed).stdout


@pytest.mark.parametrize("command", RUNTIME_COMMANDS)
def test_runtime_help_has_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for each in options_of(*RUNTIME_GROUPS):
        assert (each.flag in text.replace(",", " ").split()) == (command in each.commands), each.name
        assert command not in each.commands or each.shown_help.replace(" ", "") in text.replace(" ", "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"llama-npu2 {PROJECT['version']}\n"
    assert llama_npu2.__version__ == PROJECT["version"]


@pytest.mark.parametrize("flag", ["--chat", "--bench", "--profile", "--check"])
def test_old_flags_say_the_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["DIR", flag]) == 1
    assert capsys.readouterr().err == f"error: {flag} is now a command: llama-npu2 {flag[2:]} DIR\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("DIR hi --tempreature=1", "--tempreature is not an option: did you mean --temperature?"),
        ("bench DIR --top-p=1", "--top-p is for llama-npu2 run, chat"),
        ("DIR hi --top-p=2", "--top-p=2.0: must be above 0 and at most 1"),
        ("run DIR hi --prompt-file=x", "two prompts: give a text or a file, not both"),
    ],
)
def test_mistakes_name_the_flag(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")


# Completion


def scripts(shell: str) -> dict[str, str]:
    known = list(options_of(*RUNTIME_GROUPS))
    taken = {name: [each for each in known if name in each.commands] for name in RUNTIME_COMMANDS}
    return {
        "doit": script(shell, "doit", COMMANDS, table(), flags=False),
        "llama-npu2": script(shell, "llama-npu2", RUNTIME_COMMANDS, taken, flags=True),
    }


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("program", ["doit", "llama-npu2"])
def test_completion_parses_and_has_every_option(shell: str, program: str) -> None:
    text = scripts(shell)[program]
    if shutil.which(shell):
        run = subprocess.run([shell, "-n"], input=text, text=True, capture_output=True)
        assert (run.returncode, run.stderr) == (0, "")
    for name in variables() if program == "doit" else [each.flag for each in options_of(*RUNTIME_GROUPS)]:
        assert name in text


def completed(program: str, line: str) -> list[str]:
    """What bash offers at the end of a line."""
    ask = (
        f"COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; COMPREPLY=()\n"
        f"_llama_npu2_{program.replace('-', '_')}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    text = scripts("bash")[program] + ask
    run = subprocess.run(["bash", "--norc"], input=text, text=True, capture_output=True, cwd=ROOT)
    assert run.returncode == 0 and not run.stderr, run.stderr
    return run.stdout.split()


COMPLETED = [
    ("doit", "doit comp", ["compile", "completion"]),
    ("doit", "doit gc ke", ["keep="]),
    ("doit", "doit compile target=npu", ["npu2", "npu2-sim"]),
    ("doit", "doit compile npu.b", ["npu.buckets="]),
    ("doit", "doit max_t", ["max_tokens="]),
    ("doit", "doit run model=random:llama-3", ["llama-3.2-1b"]),
    ("doit", "doit run model=models/de", ["models/demo"]),
    ("doit", "doit completion shell=", ["bash", "zsh"]),
    ("llama-npu2", "llama-npu2 ch", ["chat", "check"]),
    ("llama-npu2", "llama-npu2 bench x --re", ["--repeats="]),
    ("llama-npu2", "llama-npu2 artifacts/demo --max", ["--max-tokens="]),
    ("llama-npu2", "llama-npu2 run x --prompt-file=README", ["README.md"]),
]


@pytest.mark.parametrize(("program", "line", "offered"), COMPLETED)
def test_bash_completes(program: str, line: str, offered: list[str]) -> None:
    assert completed(program, line) == offered


def test_commands_print_their_completion(capsys: pytest.CaptureFixture[str]) -> None:
    run = doit("completion", "shell=zsh")
    assert run.returncode == 0 and run.stdout == scripts("zsh")["doit"]
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == scripts("bash")["llama-npu2"]


# Prompts from files


@pytest.mark.sampled(1)
@pytest.mark.parametrize("given", ["prompt_file=prompt.txt", "prompt=-"])
def test_a_prompt_from_elsewhere(given: str, demo: Path, tmp_path: Path) -> None:
    text = "The capital of France is"
    (tmp_path / "prompt.txt").write_text(text)
    given = given.replace("prompt.txt", str(tmp_path / "prompt.txt"))
    line = [sys.executable, "-m", "doit", "run", given, "raw=1", f"artifacts={demo.parents[1]}", "target=cpu"]
    run = subprocess.run(line, cwd=ROOT, input=text, text=True, capture_output=True)
    assert run.stdout == " Paris.\n", run.stderr


def test_a_prompt_file_is_utf_8_whatever_the_locale(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("naïve", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "runtime",
        str(demo),
        f"--prompt-file={tmp_path / 'prompt.txt'}",
        "--json",
        "--raw",
    ]
    ascii_locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    run = subprocess.run(command, cwd=ROOT, env=os.environ | ascii_locale, text=True, capture_output=True)
    with closing(load(demo)) as llm:
        assert json.loads(run.stdout)["prompt_tokens"] == len(llm.encode("naïve", raw=True)), run.stderr


def test_a_prompt_file_that_is_not_there(demo: Path) -> None:
    run = doit("run", "prompt_file=/none", f"artifacts={demo.parents[1]}", "target=cpu")
    assert run.returncode == 1 and "prompt_file=/none: there is no such file" in run.stderr
