"""Remotes: bytes by name, on file systems of fsspec and on the Hugging Face hub.

They are `file://`, `s3://`, `memory://`, `http(s)://` (read-only) and `hf://`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urldefrag, urljoin
from uuid import uuid4

from llama_npu2.errors import UserError, first_line
from stages.engine.files import fsync_path
from stages.engine.tree import Tree

BLOCK = 8 << 20
"""Bytes that are moved at a time. They are whole huge pages, so that a file that is written in blocks is mapped in huge
pages."""

_CONNECTIONS = 8
_ATTEMPTS = 4
_FIRST_PAUSE = 0.5
"""Seconds before the second attempt; the pause doubles with each further one."""
_ABANDONED = 24 * 3600
"""Seconds until an upload that was not finished is removed."""

_STALL = 30.0
"""Seconds without a byte after which a transfer has failed, and seconds that any transfer may take."""
_SLOWEST = 16 << 10
"""Bytes per second that a web server must send at least: a slower answer may never end."""
_DEEPEST = 4
"""Most folders below the root: `objects/sha256/aa/...`, `artifacts/<model>/<directory>/<signer>.json`."""
_MOST_NAMES = 100_000
_MOST_PAGES = 1000
_LARGEST_PAGE = 4 << 20
"""Most bytes of a web server's list of files."""
_OURS = re.compile(r"[0-9a-f]{32}")

_PATHS = 500
"""Number of files in one request to the hub."""
_REPOSITORY = re.compile(
    r"(?:(?P<kind>datasets|models)/)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<path>.+))?"
)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class RemoteError(UserError):
    """A remote cannot be used now, or not in this way."""


class Remote:
    """A file system that writes a file atomically, as object stores do. Methods raise RemoteError."""

    writable = True

    def __init__(self, url: str, files: Any, root: str) -> None:
        self.url, self._files, self._root = url, files, root.rstrip("/")

    def read(self, name: str, limit: int) -> bytes | None:
        """Return a small file's content, None if there is none. Raises RemoteError for more than `limit` bytes."""
        with self._explained(), contextlib.suppress(FileNotFoundError):
            data = self._beginning(name, limit + 1)
            if len(data) > limit:
                raise RemoteError(f"remote {self.url}: {name} has more than {limit} bytes")
            return data
        return None

    def _beginning(self, name: str, length: int) -> bytes:
        """Return the first `length` bytes of a file, or all."""
        data: bytes = self._files.cat_file(self._path(name), start=0, end=length)
        return data

    def blocks(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """Yield a file's bytes from `start` to `end`, resuming after a lost connection.

        Raises RemoteError, also if there is no such file.
        """
        attempt = 0
        while start < end:
            try:
                with self._explained():
                    for block in self._run(name, start, end):
                        start, attempt = start + len(block), 0
                        yield block
                if start < end:
                    raise RemoteError(f"remote {self.url}: {name} ends {end - start} bytes too early")
            except FileNotFoundError:
                raise RemoteError(f"remote {self.url}: {name} is not there: push it again") from None
            except RemoteError:
                attempt += 1
                if attempt == _ATTEMPTS:
                    raise
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))

    def _run(self, name: str, start: int, end: int) -> Iterator[bytes]:
        with self._files.open(self._path(name), "rb", block_size=BLOCK, cache_type="none") as file:
            try:
                file.seek(start)
            except ValueError:
                # The server has no ranges: skip the bytes that are here.
                for position in range(0, start, BLOCK):
                    file.read(min(BLOCK, start - position))
            while start < end and (block := file.read(min(BLOCK - start % BLOCK, end - start))):
                start += len(block)
                yield block

    def missing(self, sizes: Mapping[str, int]) -> set[str]:
        """Return those of the files in `sizes` that the remote does not have in their size."""

        def is_absent(name: str) -> bool:
            with self._explained(), contextlib.suppress(FileNotFoundError):
                return bool(self._files.info(self._path(name))["size"] != sizes[name])
            return True

        return {name for name, absent in zip(sizes, self.parallel(is_absent, sizes), strict=True) if absent}

    def put(self, files: Mapping[str, Path | bytes], moved: Callable[[int], object] = lambda count: None) -> None:
        """Write files in parallel. `moved` is called with the bytes of each."""

        def write(name: str) -> None:
            try:
                with self._explained():
                    self._write(self._path(name), files[name])
            except FileNotFoundError as error:
                raise RemoteError(f"remote {self.url}: cannot write {name}: {first_line(error)}") from None
            moved(_size(files[name]))

        self.parallel(write, files)

    def _write(self, path: str, content: Path | bytes) -> None:
        if isinstance(content, Path):
            self._files.put_file(str(content), path)
        else:
            self._files.pipe_file(path, content)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._explained(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def names(self, prefix: str) -> list[str]:
        """Return the sorted names of the files below a prefix, `_DEEPEST` folders deep.

        Raises RemoteError if the remote cannot list them, or there are more than `_MOST_NAMES`.
        """
        with self._explained(), contextlib.suppress(FileNotFoundError):
            paths = list(itertools.islice(self._listed(prefix), _MOST_NAMES + 1))
            if len(paths) > _MOST_NAMES:
                raise RemoteError(f"remote {self.url}: lists more than {_MOST_NAMES} files below {prefix or '/'}")
            return sorted(path.removeprefix(self._root).lstrip("/") for path in paths)
        return []

    def _listed(self, prefix: str) -> Iterator[str]:
        """Yield the paths of the files below a prefix."""
        yield from map(str, self._files.find(self._path(prefix), maxdepth=_DEEPEST))

    def local(self, name: str) -> Path | None:
        """Return the path of a file of the remote on this machine's file systems; None if it is not on one."""
        return None

    def parallel(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Return the results of `work` for each item, several at a time."""
        todo = list(items)
        if len(todo) < 2:  # most often it is one, for which starting a thread takes longer than a short file
            return list(map(work, todo))
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return list(pool.map(work, todo))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn any exception of a library into a RemoteError, except for FileNotFoundError."""
        try:
            yield
        except (UserError, FileNotFoundError):
            raise
        except Exception as error:
            raise RemoteError(f"remote {self.url}: {first_line(error)}") from None


class Folder(Remote):
    """A directory, also one that several machines mount. Others may write to it, so no link below it is followed."""

    @cached_property
    def _tree(self) -> Tree:
        return Tree(Path(self._root))

    def _beginning(self, name: str, length: int) -> bytes:
        with os.fdopen(self._tree.open_regular(name), "rb") as file:
            return file.read(length)

    def _run(self, name: str, start: int, end: int) -> Iterator[bytes]:
        with os.fdopen(self._tree.open_regular(name), "rb") as file:
            file.seek(start)
            while start < end and (block := file.read(min(BLOCK - start % BLOCK, end - start))):
                start += len(block)
                yield block

    def missing(self, sizes: Mapping[str, int]) -> set[str]:
        def is_absent(name: str) -> bool:
            with self._explained(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                status = self._tree.status(name)
                return not stat.S_ISREG(status.st_mode) or status.st_size != sizes[name]
            return True

        return set(filter(is_absent, sizes))

    def remove(self, name: str) -> None:
        with self._explained():
            self._tree.remove_file(name)

    def local(self, name: str) -> Path | None:
        with self._explained():
            self._tree.check(name)
        return Path(self._path(name))

    def _listed(self, prefix: str) -> Iterator[str]:
        return (self._path(path.as_posix()) for path in self._tree.files(prefix))

    def _write(self, path: str, content: Path | bytes) -> None:
        name = path.removeprefix(self._root).lstrip("/")
        self._tree.check(name)
        unfinished = f"{self._unfinished}/{uuid4().hex}"
        try:
            with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as source:
                with os.fdopen(self._tree.open_own(unfinished), "r+b") as file:
                    while block := source.read(BLOCK):
                        file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
            self._tree.take(Path(self._path(unfinished)), name)
            fsync_path(Path(path).parent)
        except BaseException:
            with contextlib.suppress(OSError):
                self._tree.remove_file(unfinished)
            raise

    @cached_property
    def _unfinished(self) -> str:
        """The folder of unfinished files.

        Those of killed processes are removed when this is first asked for: files with names that `_write` gives, and
        nothing else that somebody put there.
        """
        folder = "unfinished"
        with self._tree.opened(folder, create=True):
            pass
        for name in filter(_OURS.fullmatch, self._tree.names(folder)):
            with contextlib.suppress(OSError):
                status = self._tree.status(f"{folder}/{name}")
                if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > _ABANDONED:
                    self._tree.remove_file(f"{folder}/{name}")
        return folder


class _Links(HTMLParser):
    """Collects the targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attrs if tag == "a" and name == "href" and value]


class Site(Remote):
    """The files that a web server lists on its pages."""

    writable = False

    def put(self, files: Mapping[str, Path | bytes], moved: Callable[[int], object] = lambda count: None) -> None:
        raise RemoteError(f"remote {self.url} can only be read: push to what the web server shows")

    def _beginning(self, name: str, length: int) -> bytes:
        """Read in blocks: a server's answer may have no end, whatever it was asked for."""
        return b"".join(self._run(name, 0, length))

    def _run(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """Yield blocks as a Remote does, but limit the time of each by `_SLOWEST`.

        A server may send a byte now and then for ever, which a timeout between two bytes does not notice.
        """
        from fsspec.asyn import sync

        with self._files.open(self._path(name), "rb", block_size=BLOCK, cache_type="none") as file:
            fetch = getattr(file, "async_fetch_range", None)
            if fetch is None:  # the server has no ranges, so its answer is read as it comes
                yield from self._stream(file, name, start, end)
                return
            end = min(end, file.size)
            while start < end:
                until = min(start - start % BLOCK + BLOCK, end)
                block = sync(self._files.loop, fetch, start, until, timeout=_STALL + (until - start) / _SLOWEST)
                if not block:
                    return
                # A server may send more than it was asked for.
                block = block[: until - start]
                start += len(block)
                yield block

    def _stream(self, file: Any, name: str, start: int, end: int) -> Iterator[bytes]:
        begun, position, block = time.monotonic(), 0, b""
        while position < end and (block := file.read(min(BLOCK, end - position))):
            position += len(block)
            if position > start:
                yield block[max(0, len(block) - (position - start)) :]
            if time.monotonic() - begun > _STALL + position / _SLOWEST:
                raise RemoteError(f"remote {self.url}: {name} arrives at less than {_SLOWEST} bytes/s")

    def _listed(self, prefix: str) -> Iterator[str]:
        """Yield the files below a prefix, following the links of pages to pages below them, `_DEEPEST` folders deep."""
        top = f"{self._path(prefix)}/"
        pages, seen = [(top, 0)], {top}
        for page, depth in pages:
            if len(seen) > _MOST_NAMES:
                raise RemoteError(f"remote {self.url}: its pages link to more than {_MOST_NAMES} others")
            if depth and not page.endswith("/"):
                yield page
                continue
            content = self.read(page.removeprefix(f"{self._root}/"), _LARGEST_PAGE)
            links = _Links()
            links.feed((content or b"").decode(errors="replace"))
            for target in (urldefrag(urljoin(page, link)).url for link in links.targets):
                if target.startswith(page) and target not in seen and depth < _DEEPEST:
                    seen.add(target)
                    pages.append((target, depth + 1))
            if len(pages) > _MOST_PAGES and sum(link.endswith("/") for link, _ in pages) > _MOST_PAGES:
                raise RemoteError(f"remote {self.url}: lists more than {_MOST_PAGES} pages below {prefix or '/'}")


class Hub(Remote):
    """A repository of the Hugging Face hub, where files are written as commits.

    A missing one is made, as a private one.
    """

    def __init__(self, url: str, files: Any, root: str) -> None:
        super().__init__(url, files, root)
        match = _REPOSITORY.fullmatch(self._root)
        if not match:
            raise RemoteError(f"remote {url}: give hf://ORG/NAME or hf://datasets/ORG/NAME")
        self._prefix = match["path"] or ""
        self._place = {
            "repo_id": match["repo"],
            "repo_type": "dataset" if match["kind"] == "datasets" else "model",
            "revision": match["revision"],
        }

    @cached_property
    def _api(self) -> Any:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        return HfApi(endpoint=self._files.endpoint, token=self._files.token)

    @cached_property
    def _api_of_repository(self) -> Any:
        """The hub's API, after making sure that the repository exists."""
        repository = {key: self._place[key] for key in ("repo_id", "repo_type")}
        self._api.create_repo(**repository, private=True, exist_ok=True)
        return self._api

    def missing(self, sizes: Mapping[str, int]) -> set[str]:
        from huggingface_hub.errors import RepositoryNotFoundError

        present: dict[str, int] = {}
        """The sizes of the files that the hub has, by path, without those whose digest is not that of their name."""
        with self._explained(), contextlib.suppress(RepositoryNotFoundError):
            names = list(sizes)
            for first in range(0, len(names), _PATHS):
                paths = [self._in_repository(name) for name in names[first : first + _PATHS]]
                infos = self._api.get_paths_info(paths=paths, **self._place)
                present |= {info.path: info.size for info in infos if _has_its_digest(info)}
        return {name for name, size in sizes.items() if present.get(self._in_repository(name)) != size}

    def put(self, files: Mapping[str, Path | bytes], moved: Callable[[int], object] = lambda count: None) -> None:
        from huggingface_hub import CommitOperationAdd

        if not files:
            return
        with self._explained():
            self._api_of_repository.create_commit(
                **self._place,
                operations=[
                    CommitOperationAdd(self._in_repository(name), path_or_fileobj=content)
                    for name, content in files.items()
                ],
                commit_message=f"llama-npu2: {len(files)} files",
            )
            self._files.invalidate_cache()
        moved(sum(map(_size, files.values())))

    def remove(self, name: str) -> None:
        from huggingface_hub.errors import EntryNotFoundError

        with self._explained(), contextlib.suppress(EntryNotFoundError):
            self._api.delete_file(self._in_repository(name), **self._place)

    def _in_repository(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")


def _has_its_digest(info: Any) -> bool:
    """Return whether the hub's own SHA-256 of a file, if it has one, is that of the object's name."""
    sha256 = getattr(getattr(info, "lfs", None), "sha256", None)
    return sha256 is None or "objects/sha256/" not in info.path or info.path.replace("/", "").endswith(sha256)


def _size(content: Path | bytes) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


_KINDS: dict[str, type[Remote]] = {"file": Folder, "local": Folder, "http": Site, "https": Site, "hf": Hub}


def _options(protocol: str) -> dict[str, Any]:
    """Return the default options of a file system, which the user's configuration overrides."""
    if protocol == "s3":
        return {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60}, "use_listings_cache": False}
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout

        return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=10, sock_read=_STALL)}}
    return {}


_KNOWN = "give a directory, file://, s3://, https:// or hf://ORG/NAME"
_PACKAGES = "pip install -e '.[share]'"


def check_url(url: str) -> str:
    """Return the protocol of a remote's URL. Raises UserError if it is unknown, or its package is not installed."""
    try:
        from fsspec.core import get_filesystem_class
        from fsspec.utils import get_protocol

        protocol: str = get_protocol(url)
        get_filesystem_class(protocol)
    except ImportError as error:
        raise UserError(f"remote {url}: {first_line(error)}: {_PACKAGES}") from None
    except ValueError as error:
        raise UserError(f"remote {url}: {first_line(error)}: {_KNOWN}") from None
    return protocol


def open_remote(url: str) -> Remote:
    """Open the remote that a URL or a path names.

    The configuration of fsspec applies (`FSSPEC_S3_ENDPOINT_URL`, `AWS_PROFILE`, `HF_TOKEN` ...). Raises UserError.
    """
    protocol = check_url(url)
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    try:
        files, root = url_to_fs(url, **(_options(protocol) | conf.get(protocol, {})))
    except Exception as error:
        raise RemoteError(f"remote {url}: {first_line(error)}: {_KNOWN}") from None
    return _KINDS.get(protocol, Remote)(url, files, root)
