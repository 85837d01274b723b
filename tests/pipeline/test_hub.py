"""The hub download against a small server that speaks the hub's protocol: real client code, no network."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import complaints, doit, ran, write_checkpoint

REPO = "org/small"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves one checkpoint directory as a model repository and remembers what was asked for."""

    def __init__(self, files: Path) -> None:
        self.files, self.gated, self.fetched = files, False, list[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}", "HF_HUB_DISABLE_XET": "1"}

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.partition("?")[0]
        if path.startswith(f"/api/models/{REPO}/tree/"):
            entries = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40}
                for p in self.files.iterdir()
            ]
            self.send(request, 200, json.dumps(entries).encode(), {}, body)
        elif path.startswith(f"/api/models/{REPO}"):
            files = [{"rfilename": p.name, "size": p.stat().st_size} for p in self.files.iterdir()]
            info = {"_id": "1", "id": REPO, "sha": COMMIT, "siblings": files}
            self.send(request, 200, json.dumps(info).encode(), {}, body)
        elif path.startswith(f"/{REPO}/resolve/"):
            self.send_file(request, self.files / path.rpartition("/")[2], body)
        else:
            self.send(request, 404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def send_file(self, request: BaseHTTPRequestHandler, path: Path, body: bool) -> None:
        if self.gated:
            self.send(request, 403, b"", {"X-Error-Code": "GatedRepo"}, body)
        elif not path.is_file():
            self.send(request, 404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        else:
            data = path.read_bytes()
            if body:
                self.fetched.append(path.name)
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.send(request, 200, data, headers, body)

    def send(
        self, request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str], body: bool
    ) -> None:
        request.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    write_checkpoint(tmp_path / "repository", shards=2)
    (tmp_path / "repository/pytorch_model.bin").write_bytes(b"not wanted")
    (tmp_path / "repository/README.md").write_text("not wanted")
    server = Hub(tmp_path / "repository")
    yield server
    server.server.shutdown()


def test_download_build_and_stay_current(hub: Hub, built: Path, tmp_path: Path) -> None:
    env = hub.environment | {"HF_HOME": str(tmp_path / "cache")}
    fit = doit("fit", f"model={REPO}", "weights=bf16", "json=1", cwd=built, env=env)
    assert hub.fetched == ["config.json"], "nothing else is needed to say what the download will be"
    assert "weights" in ran(doit("compile", f"model={REPO}", cwd=built, env=env))
    brought = sum((hub.files / name).stat().st_size for name in hub.fetched if name != "config.json")
    assert [row["download"] for row in json.loads(fit.stdout)["formats"]] == [brought]
    assert (built / "artifacts/org--small/cpu/manifest.json").is_file()
    assert "pytorch_model.bin" not in hub.fetched
    assert sorted(hub.fetched) == sorted(set(hub.fetched)), "each file is fetched once"
    hub.server.shutdown()
    offline = {"HF_HOME": str(tmp_path / "empty"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert ran(doit("compile", f"model={REPO}", cwd=built, env=offline)) == set(), "what is built needs no hub"


@pytest.mark.thorough
def test_fit_fetches_no_quantised_weights(hub: Hub, tmp_path: Path) -> None:
    """What they hold decides on the steps of a build, which are not asked for."""
    config = json.loads((hub.files / "config.json").read_text())
    (hub.files / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    run = doit("fit", f"model={REPO}", "json=1", env=hub.environment | {"HF_HOME": str(tmp_path / "cache")})
    assert run.returncode == 0, run.stderr
    assert hub.fetched == ["config.json"]
    assert {row["weights"] for row in json.loads(run.stdout)["formats"]} >= {"bf16", "int8", "int4"}


def test_gated_repository(hub: Hub, built: Path, tmp_path: Path) -> None:
    hub.gated = True
    run = doit("compile", f"model={REPO}", cwd=built, env=hub.environment | {"HF_HOME": str(tmp_path / "cache")})
    assert run.returncode == 1
    assert len(complaints(run)) == 1
    assert "accept its licence" in run.stderr


def test_missing_repository(hub: Hub, built: Path, tmp_path: Path) -> None:
    run = doit("compile", "model=org/other", cwd=built, env=hub.environment | {"HF_HOME": str(tmp_path / "cache")})
    assert run.returncode == 1
    assert len(complaints(run)) == 1
    assert "does not exist or is private" in run.stderr
