"""Programs of others, as they are installed, with the server: each does a task that the model's weights spell out."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from llama_npu2 import load
from tests.conftest import build
from tests.support.caller import ANSWER, ARGUMENTS, write_caller
from tests.support.programs import installed
from tests.support.serving import Server, serving
from tests.support.transcripts import NOTING, check_transcript

WRITTEN = "The file is written."
CONTEXT = 1 << 17
"""Tokens: those of a prompt are its bytes, up to some 80,000."""
HERE = Path(__file__).parents[1]

pytestmark = pytest.mark.clients


class Desk:
    """A home and a project for a program, and a server with a model that does what the program is asked for."""

    def __init__(self, server: Server, directory: Path) -> None:
        self.server, self.home, self.project = server, directory / "home", directory / "project"
        self.home.mkdir()
        self.project.mkdir()

    def run(self, *command: str, **environment: str) -> str:
        """Return what a command writes on standard output."""
        run = subprocess.run(
            command,
            cwd=self.project,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=570,
        )
        print(run.stdout, run.stderr, *(line[:500] for line in self.server.lines), sep="\n")
        assert run.returncode == 0
        return run.stdout

    def answered(self, path: str) -> list[str]:
        """Return what the server notes of the requests to a path, which have all been answered."""
        lines = [line for line in self.server.lines if line.startswith(f"POST {path}")]
        assert lines and all(" 200, " in line for line in lines)
        return lines

    def reused(self, path: str) -> float:
        """Return the share of the last prompt that the cache had."""
        processed, cached = map(int, re.findall(r"(\d+) processed, (\d+) cached", self.answered(path)[-1])[0])
        return cached / (processed + cached)


Open = Callable[..., AbstractContextManager[Desk]]


@pytest.fixture
def desk(artifacts: Path, tmp_path: Path) -> Open:
    """Opens a desk with a model that writes a call, and an answer once it has the call's result."""

    @contextmanager
    def opened(call: Sequence[str], answer: str = ANSWER) -> Iterator[Desk]:
        write_caller(tmp_path / "caller", call, answer, context=CONTEXT)
        with serving(build(tmp_path / "caller", artifacts), before=NOTING) as running:
            yield Desk(running, tmp_path)

    return opened


@installed("claude", "npm install -g @anthropic-ai/claude-code")
def test_claude_code(desk: Open) -> None:
    """It gets a call, runs the tool, sends the result, and prints the answer."""
    call = ['{"name": "Bash", "arguments": {"command": "echo hello > called.txt", ', '"description": "Say hello"}}']
    with desk(call) as at:
        output = at.run(
            *("claude", "-p", "--output-format=json", "--allowedTools=Bash", "--", "Say hello."),
            ANTHROPIC_BASE_URL=at.server.url,
            ANTHROPIC_AUTH_TOKEN="none",
            ANTHROPIC_MODEL="caller",
            ANTHROPIC_DEFAULT_HAIKU_MODEL="caller",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    found = json.loads(output)
    assert (found["is_error"], found["result"], found["num_turns"]) == (False, ANSWER, 2)
    assert (at.project / "called.txt").read_text() == "hello\n"
    assert len(at.answered("/v1/messages")) == 2 and at.reused("/v1/messages") >= 0.95
    assert found["usage"]["cache_read_input_tokens"] > 0
    check_transcript(at.server, "claude-code")


@installed("codex", "npm install -g @openai/codex")
def test_codex(desk: Open) -> None:
    """The model calls its tool with a command that writes a file, and says so once it has its result."""
    call = ['{"name": "exec_command", "arguments": {"cmd": ', '"echo written > made.txt"}}']
    with desk(call, WRITTEN) as at:
        provider = f'name = "local"\nbase_url = "{at.server.url}/v1"\nwire_api = "responses"\n'
        head = 'model = "caller"\nmodel_provider = "local"\n'
        (at.home / "config.toml").write_text(f"{head}[model_providers.local]\n{provider}")
        options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
        output = at.run("codex", "exec", *options, "Write made.txt", CODEX_HOME=str(at.home))
    items = [event.get("item", {}) for event in map(json.loads, output.splitlines())]
    assert [item["text"] for item in items if item.get("type") == "agent_message"] == [WRITTEN]
    assert (at.project / "made.txt").read_text() == "written\n"
    assert len(at.answered("/v1/responses")) == 2 and at.reused("/v1/responses") >= 0.95
    check_transcript(at.server, "codex")


@installed("opencode", "npm install -g opencode-ai")
def test_opencode(desk: Open) -> None:
    """It asks for a title and for the task at the same time, runs the tool, sends the result, and prints the answer."""
    call = ['{"name": "bash", "arguments": {"command": "echo written > made.txt", ', '"description": "Write a file"}}']
    with desk(call, WRITTEN) as at:
        options = {"baseURL": f"{at.server.url}/v1"}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"caller": {}}}
        config = {"model": "local/caller", "provider": {"local": provider}}
        (at.project / "opencode.json").write_text(json.dumps(config))
        output = at.run("opencode", "run", "--format=json", "Write made.txt")
    events = [*map(json.loads, output.splitlines())]
    assert [event["part"]["text"] for event in events if event["type"] == "text"] == [WRITTEN]
    assert (at.project / "made.txt").read_text() == "written\n"
    assert at.reused("/v1/chat/completions") >= 0.95
    check_transcript(at.server, "opencode")


@installed("aider", "pipx install aider-chat")
def test_aider(desk: Open) -> None:
    """It asks for an edit in its own format, and makes it."""
    edit = "made.txt\n<<<<<<< SEARCH\n=======\nwritten\n>>>>>>> REPLACE\n"
    with desk(["unused"], edit) as at:
        options = ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
        options += ["--no-show-release-notes", "--edit-format=diff", "--message=Write made.txt", "made.txt"]
        address = {"OPENAI_API_BASE": f"{at.server.url}/v1", "OPENAI_API_KEY": "none"}
        at.run("aider", "--model=openai/caller", *options, **address)
    assert (at.project / "made.txt").read_text() == "written\n"
    check_transcript(at.server, "aider")


PACKAGES = ("@ai-sdk/openai-compatible", "ai", "zod")


@pytest.mark.needs("npm on PATH, of node 20 or newer", shutil.which("npm") is not None)
def test_ai_sdk(caller: Path, demo: Path, tmp_path: Path) -> None:
    """Its packages are those in the folder LLAMA_NPU2_AI_SDK; without that, they are installed for this test."""
    folder = os.environ.get("LLAMA_NPU2_AI_SDK")
    if not folder:
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", *PACKAGES], cwd=tmp_path, check=True)
        folder = str(tmp_path)
    (tmp_path / "script").mkdir()
    (tmp_path / "script/node_modules").symlink_to(Path(folder, "node_modules"))
    script = shutil.copy(HERE / "support/ai_sdk.mjs", tmp_path / "script")
    with serving(caller, others=[demo], before=NOTING) as running:
        command = ["node", "--preserve-symlinks-main", str(script), f"{running.url}/v1"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    with closing(load(demo)) as llm:
        alone = llm.generate([{"role": "user", "content": "The capital of France is"}], max_tokens=200).whole()
    assert found["text"] == "".join(found["chunks"]) == alone.text and len(found["chunks"]) > 1
    assert found["usage"] == found["streamedUsage"] == len(alone.tokens)
    assert found["asked"] == [ARGUMENTS] * 2 and found["steps"] == 2
    assert found["answer"] == found["streamedAnswer"] == ANSWER
    assert {"tool-call", "tool-result", "text-delta", "finish"} <= {*found["parts"]}
    assert found["structured"].keys() == {"size", "founded"}
    assert found["unknown"][0] == 404 and "there is no model other" in found["unknown"][1]
    assert found["tooLong"][0] == 400 and "the context is 2048" in found["tooLong"][1]
    check_transcript(running, "ai-sdk")
