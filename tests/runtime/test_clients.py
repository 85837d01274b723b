"""Programs of others, as they are installed, with the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import build
from tests.support.caller import ANSWER, write_caller
from tests.support.serving import Server, serving

CLAUDE = shutil.which("claude")
CALL = ['{"name": "Bash", "arguments": {"command": "echo hello > called.txt", ', '"description": "Say hello"}}']
CONTEXT = 1 << 17
"""Tokens: those of the prompt are its bytes, some 80,000."""

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that calls the tool Bash, and then says what came of it."""
    checkpoint = tmp_path_factory.mktemp("caller") / "caller"
    write_caller(checkpoint, CALL, context=CONTEXT)
    with serving(build(checkpoint, artifacts)) as running:
        yield running


@pytest.mark.needs("claude on PATH: npm install -g @anthropic-ai/claude-code", CLAUDE is not None)
def test_claude_code(server: Server, tmp_path: Path) -> None:
    """It gets a call, runs the tool, sends the result, and prints the answer."""
    (tmp_path / "home").mkdir()
    (tmp_path / "project").mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path / "home"),
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "caller",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "caller",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    command = [str(CLAUDE), "-p", "--output-format=json", "--allowedTools=Bash", "--", "Say hello."]
    run = subprocess.run(
        command, cwd=tmp_path / "project", env=environment, capture_output=True, text=True, timeout=570, check=False
    )
    print(run.stdout, run.stderr, *server.lines, sep="\n")
    found = json.loads(run.stdout)
    assert (found["is_error"], found["result"], found["num_turns"]) == (False, ANSWER, 2)
    assert (tmp_path / "project/called.txt").read_text() == "hello\n"
    answered = [line for line in server.lines if line.startswith("POST /v1/messages")]
    assert len(answered) == 2 and all(" 200, " in line for line in answered)
    processed, cached = map(int, re.findall(r"(\d+) processed, (\d+) cached", answered[-1])[0])
    assert cached / (processed + cached) >= 0.95
    assert found["usage"]["cache_read_input_tokens"] >= cached
