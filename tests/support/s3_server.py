"""A server with the part of S3 that a store needs. Its objects are files, so that it can be killed and started again.

    python -m tests.support.s3_server PORT DIRECTORY

Buckets are directories below DIRECTORY. It takes any credentials, and knows no uploads in parts.
"""

from __future__ import annotations

import re
import sys
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from uuid import uuid4
from xml.sax.saxutils import escape

_XML = {"Content-Type": "application/xml"}


class S3Handler(BaseHTTPRequestHandler):
    """Answers requests for objects below `root`."""

    root: Path
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._do(self._get)

    def do_HEAD(self) -> None:
        self._do(self._get)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self._do(lambda: self._put(content))

    def do_DELETE(self) -> None:
        self._do(self._delete)

    def _do(self, method: object) -> None:
        try:
            method()  # type: ignore[operator]
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", _XML)
        except OSError:
            self._answer(503, b"<Error><Code>ServiceUnavailable</Code></Error>", _XML)

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def _path(self) -> Path:
        return self.root / unquote(urlsplit(self.path).path).strip("/")

    def _get(self) -> None:
        asked = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        if "list-type" in asked:
            self._list(asked.get("prefix", ""), asked.get("delimiter", ""), int(asked.get("max-keys", "1000")))
            return
        content, modified = self._path.read_bytes(), self._path.stat().st_mtime
        known = {"ETag": '"0"', "Last-Modified": formatdate(modified, usegmt=True)}
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, size = int(part[1]), len(content)
            content = content[start : int(part[2]) + 1 if part[2] else size]
            self._answer(206, content, known | {"Content-Range": f"bytes {start}-{start + len(content) - 1}/{size}"})
        else:
            self._answer(200, content, known)

    def _list(self, prefix: str, delimiter: str, most: int) -> None:
        """Answer with the names that begin with a prefix, and with the folders below it instead of what is in them."""
        bucket, folder = self._path, prefix.rpartition("/")[0]
        bucket.stat()  # raises where the whole store is lost, which is not an empty one
        files = {path.relative_to(bucket).as_posix(): path for path in (bucket / folder).rglob("*") if path.is_file()}
        files = {name: path for name, path in sorted(files.items()) if name.startswith(prefix)}
        below = {name: name[len(prefix) :].partition(delimiter)[1] if delimiter else "" for name in files}
        folders = {prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter for name in files if below[name]}
        inside = [name for name in files if not below[name]]
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{files[name].stat().st_size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in inside[:most]
        )
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        count = len(inside[:most]) + len(folders)
        body = (
            f"<ListBucketResult><KeyCount>{count}</KeyCount><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        )
        self._answer(200, body.encode(), _XML)

    def _put(self, content: bytes) -> None:
        unfinished = self.root / f"unfinished {uuid4().hex}"
        unfinished.write_bytes(content)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.replace(self._path)
        finally:
            unfinished.unlink(missing_ok=True)
        self._answer(200, headers={"ETag": '"0"'})

    def _delete(self) -> None:
        self._path.unlink(missing_ok=True)
        self._answer(204)


def main(port: str, directory: str) -> None:
    handler = type("Handler", (S3Handler,), {"root": Path(directory)})
    ThreadingHTTPServer(("127.0.0.1", int(port)), handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
