"""Several servers behind a proxy: the configuration of the documents keeps a session on one machine."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.serving import Server, free_port, serving, wait_for

PAGE = ROOT / "docs/how-to/serve.md"
RAW = "/v1/completions"
PROMPT = "Once upon a time there was a king who had a castle and a horse."


@pytest.fixture
def proxied(demo: Path, tmp_path: Path) -> Iterator[tuple[Server, list[Server]]]:
    """A proxy, as the page configures it, and the two servers behind it."""
    (tmp_path / "keys").write_text("one\ntwo\n")
    options = ("--host=127.0.0.1", f"--api-key-file={tmp_path / 'keys'}")
    (text,) = re.findall(r"```haproxy\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with serving(demo, *options) as first, serving(demo, *options) as second:
        ports = {"8080": free_port(), "8001": first.port, "8002": second.port}
        (tmp_path / "haproxy.cfg").write_text(re.sub(r"(?<=:)80\d\d", lambda port: str(ports[port[0]]), text))
        with subprocess.Popen(["haproxy", "-db", "-f", tmp_path / "haproxy.cfg"], text=True) as process:
            try:
                yield Server(ports["8080"], process), [first, second]  # type: ignore[arg-type]
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
