"""Several servers behind a proxy, whose configuration keeps a session on one machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.serving import Server, free_port, serving, wait_for

CONFIGURATION = ROOT / "deploy/haproxy.cfg"
RAW = "/v1/completions"
PROMPT = "Once upon a time there was a king who had a castle and a horse."


@pytest.fixture
def proxied(demo: Path, tmp_path: Path) -> Iterator[tuple[Server, list[Server]]]:
    """A proxy, and the two servers behind it."""
    (tmp_path / "keys").write_text("one\ntwo\n")
    options = ("--host=127.0.0.1", f"--api-key-file={tmp_path / 'keys'}")
    with serving(demo, *options) as first, serving(demo, *options) as second:
        ports = {"CLIENTS": free_port(), "ONE": first.port, "TWO": second.port}
        addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        command = ["haproxy", "-db", "-f", CONFIGURATION]
        with subprocess.Popen(command, env=os.environ | addresses, text=True) as process:
            try:
                yield Server(ports["CLIENTS"], process), [first, second]  # type: ignore[arg-type]
            finally:
                process.terminate()


@pytest.mark.needs("haproxy", shutil.which("haproxy") is not None)
def test_a_session_stays_on_a_machine_until_it_is_gone(proxied: tuple[Server, list[Server]]) -> None:
    proxy, servers = proxied

    def cached(session: str, key: str = "one") -> int:
        headers = {"Authorization": f"Bearer {key}"} | ({"X_Session_Id": session} if session else {})
        found = proxy.ask(RAW, {"model": "demo", "prompt": f"{session} {PROMPT}", "max_tokens": 1}, **headers)
        assert found.status == 200, found.content
        return int(found.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    def is_up() -> bool:
        with contextlib.suppress(OSError):
            return proxy.ask("/health").status == 200
        return False

    def counts() -> list[int]:
        return [sum(line.startswith("POST") for line in server.lines) for server in servers]

    wait_for(is_up)
    sessions = [f"session {at}" for at in range(12)]
    for session in [*sessions, ""]:
        cached(session)
        assert cached(session) > 8, session
    wait_for(lambda: sum(counts()) == 26)  # a server prints its line after the reply is sent
    assert min(counts()) > 3
    assert proxy.ask(RAW, {"model": "demo", "prompt": "x"}).status == 401
    assert servers[0].stop() == 0
    assert all(cached(session) >= 0 for session in sessions)
