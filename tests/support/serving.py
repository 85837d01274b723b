"""A server in a process of its own, and requests that no client library would send."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.support import forked

HASTY = """
from llama_npu2.serve import body, events, listen
body.TIMEOUT = listen._HEAD_TIMEOUT = 0.7
listen._IDLE_TIMEOUT = 1
events.HEARTBEAT = 0.01
"""
"""Makes a server impatient."""


@dataclass
class Answered:
    """What came back."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class Server:
    """A running server."""

    port: int
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    """What it printed on standard error."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, method: str = "", **headers: str) -> Answered:
        """Send a request; `body` may be bytes, or what becomes JSON. Names of headers have _ for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if content is not None else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method or ("GET" if content is None else "POST"), path, content, sent)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answered(response.status, found, response.read())

    def stop(self) -> int:
        """Ask it to end; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(directory: Path, *options: str, others: Sequence[Path] = (), before: str = "") -> Iterator[Server]:
    """Run `llama-npu2 serve` on a free port; `others` are further models, `before` is Python that runs first."""
    script = f"{before}\nimport sys\nfrom llama_npu2.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "serve", *map(str, (directory, *others)), "--port=0", *options]
    with tempfile.TemporaryFile() as output:
        # What runs first decides what is imported, which a fork has imported before.
        start = subprocess.Popen if before else forked.Popen
        process = start(
            command,
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'runtime'}"},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
        lines: list[str] = []
        try:
            assert process.stderr
            for line in process.stderr:
                lines.append(line.rstrip())
                if line.startswith("listening on"):
                    break
            assert lines and lines[-1].startswith("listening on"), lines
            reader = threading.Thread(target=_collect, args=(process.stderr, lines), daemon=True)
            reader.start()
            yield Server(int(lines[-1].partition("/v1")[0].rpartition(":")[2]), process, lines)
            if process.poll() is None:
                process.terminate()
            process.wait(60)
            reader.join(10)
            output.seek(0)
            assert not output.read()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _collect(stream: Any, lines: list[str]) -> None:
    lines += (line.rstrip() for line in stream)


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_for(fact: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until a function returns something that is true."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)
