"""Remotes: bytes by name, on what fsspec reaches (`file://`, `s3://`, `http(s)://` to read, `memory://`) and on the
Hugging Face hub (`hf://`)."""

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
"""Bytes that are moved at a time. Whole huge pages: what is written in such pieces is mapped as them."""

_CONNECTIONS = 8
_ATTEMPTS = 4
_FIRST_PAUSE = 0.5
"""Seconds; doubled from one attempt to the next."""
_ABANDONED = 24 * 3600
"""Seconds until an upload that was not finished is removed."""

_STALL = 30.0
"""Seconds without a byte after which a transfer has failed, and that any transfer may take."""
_SLOWEST = 16 << 10
"""Bytes per second that a web server must send. Less is taken for one that never ends."""
_DEEPEST = 4
"""Folders below the root: `objects/sha256/aa/...`, `artifacts/<model>/<directory>/<signer>.json`."""
_MOST_NAMES = 100_000
_MOST_PAGES = 1000
_LARGEST_PAGE = 4 << 20
"""Bytes of a web server's list of files."""
_OURS = re.compile(r"[0-9a-f]{32}")

_PATHS = 500
"""Files that the hub is asked about at once."""
_REPOSITORY = re.compile(
    r"(?:(?P<kind>datasets|models)/)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<path>.+))?"
)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class RemoteError(UserError):
    """A remote that cannot be used now, or not in this way."""


class Remote:
    """A file system on which a file is written at once or not at all, as object stores do it."""

    writable = True

    def __init__(self, url: str, files: Any, root: str) -> None:
        self.url, self._files, self._root = url, files, root.rstrip("/")

    def read(self, name: str, limit: int) -> bytes | None:
        """A small file, None if it is not there. RemoteError if it cannot be read or has more bytes than `limit`."""
        with self._explained(), contextlib.suppress(FileNotFoundError):
            data = self._beginning(name, limit + 1)
            if len(data) > limit:
                raise RemoteError(f"remote {self.url}: {name} has more than {limit} bytes")
            return data
        return None

    def _beginning(self, name: str, length: int) -> bytes:
        """Of a file, `length` bytes or all."""
        data: bytes = self._files.cat_file(self._path(name), start=0, end=length)
        return data

    def blocks(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """A file's bytes from `start` to `end`, which go on where a connection was lost. RemoteError, also if there is
        no such file."""
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
                # A server that knows no ranges: read over what is here.
                for position in range(0, start, BLOCK):
                    file.read(min(BLOCK, start - position))
            while start < end and (block := file.read(min(BLOCK - start % BLOCK, end - start))):
                start += len(block)
                yield block

    def missing(self, sizes: Mapping[str, int]) -> set[str]:
        """Those of these files that are not there in their size. RemoteError."""

        def absent(name: str) -> bool:
            with self._explained(), contextlib.suppress(FileNotFoundError):
                return bool(self._files.info(self._path(name))["size"] != sizes[name])
            return True

        return {name for name, gone in zip(sizes, self.parallel(absent, sizes), strict=True) if gone}

    def put(self, files: Mapping[str, Path | bytes], moved: Callable[[int], object] = lambda count: None) -> None:
        """Write files, all that are not small in parallel. `moved` gets the bytes of each. RemoteError."""

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
        """RemoteError."""
        with self._explained(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def names(self, prefix: str) -> list[str]:
        """List the files below a prefix, `_DEEPEST` folders deep, where a remote can list them.

        Raises RemoteError, also where there are more than `_MOST_NAMES`.
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
        """Where a file of the remote lies on this machine's file systems; None for what is reached otherwise."""
        return None

    def parallel(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """`work` for each item, as many at once as a remote likes."""
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return list(pool.map(work, items))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever a library raises as one line; that a file is not there stays what it is."""
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
        """The folder of files that are not whole yet. Those of processes that did not live to see it are removed: files
        with names that `_write` gives, and nothing else that somebody put there."""
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
    """Collects where the links of a page lead to, in `targets`."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attrs if tag == "a" and name == "href" and value]


class Site(Remote):
    """What a web server shows."""

    writable = False

    def put(self, files: Mapping[str, Path | bytes], moved: Callable[[int], object] = lambda count: None) -> None:
        raise RemoteError(f"remote {self.url} can only be read: push to what the web server shows")

    def _beginning(self, name: str, length: int) -> bytes:
        """In blocks: what a server sends may have no end, whatever it was asked for."""
        return b"".join(self._run(name, 0, length))

    def _run(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """As in a Remote, but that a block may take no longer than `_SLOWEST` lets it: a server may send a byte now and
        then for ever, which no timeout between two bytes sees."""
        from fsspec.asyn import sync

        with self._files.open(self._path(name), "rb", block_size=BLOCK, cache_type="none") as file:
            fetch = getattr(file, "async_fetch_range", None)
            if fetch is None:  # the server knows no ranges, and what has arrived is read as it comes
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
        """Follow the links of pages to what lies below them, `_DEEPEST` folders deep."""
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
            if len(pages) > _MOST_PAGES and sum(each.endswith("/") for each, _ in pages) > _MOST_PAGES:
                raise RemoteError(f"remote {self.url}: lists more than {_MOST_PAGES} pages below {prefix or '/'}")


class Hub(Remote):
    """A repository of the Hugging Face hub, where files are written as commits. It is made, private, where there is
    none."""

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
        """Of one that is there."""
        repository = {key: self._place[key] for key in ("repo_id", "repo_type")}
        self._api.create_repo(**repository, private=True, exist_ok=True)
        return self._api

    def missing(self, sizes: Mapping[str, int]) -> set[str]:
        from huggingface_hub.errors import RepositoryNotFoundError

        found: dict[str, int] = {}
        """Sizes by path, of files that hold what their names say as far as the hub says what they hold."""
        with self._explained(), contextlib.suppress(RepositoryNotFoundError):
            names = list(sizes)
            for first in range(0, len(names), _PATHS):
                paths = [self._in_repository(name) for name in names[first : first + _PATHS]]
                infos = self._api.get_paths_info(paths=paths, **self._place)
                found |= {info.path: info.size for info in infos if _holds_its_name(info)}
        return {name for name, size in sizes.items() if found.get(self._in_repository(name)) != size}

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


def _holds_its_name(info: Any) -> bool:
    """Whether the hub's own SHA-256 of a file, where it has one, is that of the object's name."""
    sha256 = getattr(getattr(info, "lfs", None), "sha256", None)
    return sha256 is None or "objects/sha256/" not in info.path or info.path.replace("/", "").endswith(sha256)


def _size(content: Path | bytes) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


_KINDS: dict[str, type[Remote]] = {"file": Folder, "local": Folder, "http": Site, "https": Site, "hf": Hub}


def _options(protocol: str) -> dict[str, Any]:
    """What a file system is opened with, below what the user configured."""
    if protocol == "s3":
        return {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60}, "use_listings_cache": False}
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout

        return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=10, sock_read=_STALL)}}
    return {}


_KNOWN = "give a directory, file://, s3://, https:// or hf://ORG/NAME"
_PACKAGES = "pip install -e '.[share]'"


def check_url(url: str) -> str:
    """The protocol of a remote's URL, once it is known and what it takes is installed. Raises UserError."""
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
    """The remote that a URL or a path names. What fsspec is configured with (`FSSPEC_S3_ENDPOINT_URL`, `AWS_PROFILE`,
    `HF_TOKEN` ...) holds. Raises UserError."""
    protocol = check_url(url)
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    try:
        files, root = url_to_fs(url, **(_options(protocol) | conf.get(protocol, {})))
    except Exception as error:
        raise RemoteError(f"remote {url}: {first_line(error)}: {_KNOWN}") from None
    return _KINDS.get(protocol, Remote)(url, files, root)
