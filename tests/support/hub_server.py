"""A small hub: repositories that huggingface_hub makes, commits to, lists and reads, in memory, without a history."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS_BYTES = 1 << 20
"""Files of this size go where large files go."""


class HubServer:
    """`files`: content by repository and path. `received`: bytes of files that were sent here."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.received = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                hub.answer(self)

            do_GET = do_HEAD = do_POST = do_PUT = answer

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(request.path).path)
        routes = {
            r"/api/repos/create": self.create,
            r"/upload/(?P<oid>\w+)": self.upload,
            r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch": self.batch,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/\w+": self.preupload,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/\w+": self.commit,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/paths-info/\w+": self.paths,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/\w+(/(?P<below>.*))?": self.tree,
            r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/\w+)?": self.info,
        }
        if match := re.fullmatch(r"/(?P<repo>[^/]+/[^/]+)/resolve/\w+/(?P<path>.+)", path):
            self.send_file(request, **match.groupdict())
            return
        for pattern, action in routes.items():
            match = re.fullmatch(pattern, path)
            if match and match.groupdict().get("repo", "") in {"", *self.files}:
                self.send(request, 200, json.dumps(action(body, **match.groupdict())).encode())
                return
        self.send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def create(self, body: bytes) -> Any:
        wanted = json.loads(body)
        repo = f"{wanted['organization']}/{wanted['name']}"
        self.files.setdefault(repo, {})
        return {"url": f"{self.endpoint}/{repo}"}

    def preupload(self, body: bytes, repo: str) -> Any:
        files = json.loads(body)["files"]
        modes = [(file["path"], "lfs" if file["size"] >= LFS_BYTES else "regular") for file in files]
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes]}

    def batch(self, body: bytes, repo: str) -> Any:
        objects = []
        for wanted in json.loads(body)["objects"]:
            known = wanted["oid"] in self.large
            actions = {} if known else {"upload": {"href": f"{self.endpoint}/upload/{wanted['oid']}"}}
            objects.append({**wanted, **({"actions": actions} if actions else {})})
        return {"transfer": "basic", "objects": objects}

    def upload(self, body: bytes, oid: str) -> Any:
        assert hashlib.sha256(body).hexdigest() == oid
        self.large[oid] = body
        self.received += len(body)
        return {}

    def commit(self, body: bytes, repo: str) -> Any:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
                self.received += len(self.files[repo][value["path"]])
            elif line["key"] == "lfsFile":
                self.files[repo][value["path"]] = self.large[value["oid"]]
        return {"commitUrl": f"{self.endpoint}/{repo}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}

    def paths(self, body: bytes, repo: str) -> Any:
        wanted = parse_qs(body.decode())["paths"]
        return [self.entry(repo, path) for path in wanted if path in self.files[repo]]

    def tree(self, body: bytes, repo: str, below: str | None) -> Any:
        return [self.entry(repo, path) for path in self.files[repo] if path.startswith(f"{below}/" if below else "")]

    def info(self, body: bytes, repo: str) -> Any:
        return {"_id": "1", "id": repo, "sha": COMMIT, "siblings": [], "private": True, "gated": False}

    def entry(self, repo: str, path: str) -> Any:
        return {"type": "file", "path": path, "size": len(self.files[repo][path]), "oid": "0" * 40}

    def send_file(self, request: BaseHTTPRequestHandler, repo: str, path: str) -> None:
        content = self.files.get(repo, {}).get(path)
        if content is None:
            self.send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        tag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
            first, last = int(span[1]), min(int(span[2] or len(content) - 1), len(content) - 1)
            tag["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self.send(request, 206, content[first : last + 1], tag)
        else:
            self.send(request, 200, content, tag)

    def send(
        self, request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            self.write(request, data)

    def write(self, request: BaseHTTPRequestHandler, data: bytes) -> None:
        request.wfile.write(data)


Server = TypeVar("Server", bound=HubServer)


@contextmanager
def hub_server(hub: Server) -> Iterator[Server]:
    """A hub until the block ends."""
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
