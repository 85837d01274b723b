"""What a remote, somebody on the way to it, or a directory that somebody prepared can do to who pulls: be refused with
the reason. Nothing is written outside of the artifact directory, and nothing is current that was altered."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llama_npu2 import trust
from llama_npu2.errors import UserError
from stages.engine.places import INCOMING, PULLED
from stages.engine.project import RECEIPTS, WORK
from stages.sharing.remotes import RemoteError, open_remote
from tests.conftest import Become
from tests.support.machines import Machine, url

__all__ = ["url"]

Change = Callable[[dict[str, Any]], object]
DIGEST = "0" * 64


@pytest.fixture
def pushed(url: str, tmp_path: Path, become: Become) -> Machine:
    """anna's, who pushed; ben, who trusts her, is at work."""
    key = become("anna")
    one = Machine(tmp_path / "a")
    one.build()
    (one.directory / "artifact/said").write_text("verified")
    one.push(url)
    become("ben")
    trust.add_key(key, "Anna")
    return one


def stored(url: str) -> dict[str, bytes]:
    """Everything on a remote, by name."""
    remote = open_remote(url)
    return {name: remote.read(name, 1 << 20) or b"" for name in remote.names("")}


def offer_name(url: str) -> str:
    return next(name for name in stored(url) if name.startswith("artifacts/"))


def resign(url: str, become: Become, change: Change, purpose: str = "artifacts") -> None:
    """anna says something else: whom one trusts may have been robbed, or be mistaken."""
    name = offer_name(url)
    become("anna")
    said = json.loads(trust.verify(stored(url)[name], "artifacts").payload)
    change(said)
    open_remote(url).put({name: trust.sign(json.dumps(said).encode(), purpose)})
    become("ben")


def outside(directory: Path) -> dict[Path, bytes]:
    """All that lies beside the artifact directory of a machine, but for users' settings."""
    files = (path for path in directory.parent.rglob("*") if path.is_file() and directory not in path.parents)
    return {path: path.read_bytes() for path in files if path.parent.name not in ("anna", "ben")}


def refused(machine: Machine, url: str, complaint: str) -> None:
    """A pull ends in one line, writes nothing outside, and leaves nothing of it in place."""
    before = outside(machine.directory)
    with pytest.raises(UserError) as caught:
        machine.pull(url)
    assert complaint in str(caught.value)
    assert str(caught.value).isprintable()
    assert outside(machine.directory) == before
    assert not (machine.directory / "artifact/joined").exists()


def output(label: str, **blob: Any) -> Change:
    """A step has one more output, or another one."""
    entry = {"sha256": DIGEST, "size": 1} | blob
    return lambda said: said["runs"][0]["outputs"].update({label: entry})


SAID: dict[str, tuple[Change, str]] = {
    "path above": (output("../x"), "is no path"),
    "path above, later": (output("elf/../../x"), "is no path"),
    "absolute path": (output("/tmp/x"), "is no path"),
    "path of Windows": (output("elf\\..\\..\\x"), "is no path"),
    "device of Windows": (output("C:x"), "is no path"),
    "zero byte": (output("a\0b"), "is no path"),
    "terminal": (output("\x1b]0;owned\x07"), "is no path"),
    "other direction": (output("gnp.\u202eexe"), "is no path"),
    "Unicode that is not composed": (output("e\u0301"), "is no path"),
    "names that differ in case": (output("COPIED"), "are one file on some machines"),
    "names that differ in form": (output("cop\u0131ed".replace("\u0131", "\uff49")), "are one file on some machines"),
    "mark of an own build": (output("manifest.local"), "where the build keeps its state"),
    "receipt": (output(f"{RECEIPTS}/copy.json"), "where the build keeps its state"),
    "work in progress": (output(f"{WORK}/x"), "where the build keeps its state"),
    "same file of two steps": (output("joined"), "is malformed"),
    "digest that is a path": (output("x", sha256="../" * 21 + "x"), "is malformed"),
    "digest of another kind": (output("x", sha256="A" * 64), "is malformed"),
    "size below zero": (output("x", size=-1), "is malformed"),
    "size of no disk": (output("x", size=1 << 60), "is malformed"),
    "size that is text": (output("x", size="1"), "is malformed"),
    "outputs that are a list": (lambda said: said["runs"][0].update(outputs=[]), "is malformed"),
    "input outside": (lambda said: said["runs"][0]["declared"].update({"../x": DIGEST}), "is malformed"),
    "module that is a path": (lambda said: said["runs"][0]["key"].update(module="../os"), "is malformed"),
    "name of a step": (lambda said: said["runs"][0].update(step="\x1b[2J"), "is malformed"),
    "time that is a script": (lambda said: said.update(pushed="9\n\x1b[2Jdone"), "is malformed"),
    "withheld step": (lambda said: said["withheld"].append("\x1b[2J"), "is malformed"),
    "artifact of another name": (lambda said: said.update(artifact="other/cpu"), "is malformed"),
    "nothing": (dict.clear, "is malformed"),
    "size that does not fit": (lambda said: said["runs"][0]["outputs"]["copied"].update(size=5), "is damaged"),
    "content that is not there": (output("x", sha256=DIGEST), "is not there"),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_trusted_signer_says(
    name: str, url: str, pushed: Machine, tmp_path: Path, become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.sharing.remotes._FIRST_PAUSE", 0)
    change, complaint = SAID[name]
    resign(url, become, change)
    refused(Machine(tmp_path / "b"), url, complaint)


def test_what_was_said_for_another_purpose(url: str, pushed: Machine, tmp_path: Path, become: Become) -> None:
    resign(url, become, lambda said: None, "steps")
    refused(Machine(tmp_path / "b"), url, "it is for 'application/vnd.llama-npu2.steps'")


def test_an_offer_under_another_name(url: str, pushed: Machine, tmp_path: Path) -> None:
    """A right offer of anna's, moved."""
    name = offer_name(url)
    open_remote(url).put({name.replace("model/cpu", "model/other"): stored(url)[name]})
    machine = Machine(tmp_path / "b")
    exchange = machine.exchange(url)
    with pytest.raises(UserError, match="about model/other is malformed"):
        type(exchange)(exchange.store, exchange.project, "model/other", ()).pull(machine.steps())


def test_an_unknown_signer_in_the_place_of_a_trusted_one(
    url: str, pushed: Machine, tmp_path: Path, become: Become
) -> None:
    """Files are named by their signers; what counts is who signed."""
    name = offer_name(url)
    said = json.loads(stored(url)[name])["payload"]
    become("carl")
    envelope = json.loads(trust.sign(b"", "artifacts")) | {"payload": said}
    open_remote(url).put({name: json.dumps(envelope).encode()})
    become("ben")
    refused(Machine(tmp_path / "b"), url, "was altered")


def test_a_signer_who_was_removed(url: str, pushed: Machine, tmp_path: Path) -> None:
    trust.remove_key("Anna")
    refused(Machine(tmp_path / "b"), url, "the key 'Anna' that you removed")


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "bit": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "shorter": lambda content: content[:-1],
    "empty": lambda content: b"",
    "exchanged": lambda content: content[::-1],
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_that_are_not_what_their_names_say(
    name: str, url: str, pushed: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.sharing.remotes._FIRST_PAUSE", 0)
    changed = {n: CONTENTS[name](content) for n, content in stored(url).items() if n.startswith("objects/")}
    open_remote(url).put(changed)
    refused(Machine(tmp_path / "b"), url, "too early" if name in ("shorter", "empty") else "is damaged")


LINKS: dict[str, Callable[[Path, Path], object]] = {
    "symbolic": lambda path, target: path.symlink_to(target),
    "hard": lambda path, target: path.hardlink_to(target),
}


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("place", ["received", "state", "beside", "output"])
def test_links_that_lie_ready(kind: str, place: str, url: str, pushed: Machine, tmp_path: Path) -> None:
    """In a directory that came from elsewhere, where a pull writes: they are replaced, not written through."""
    machine, precious = Machine(tmp_path / "b"), tmp_path / "precious"
    precious.write_text("mine")
    (blob,) = (path for path in stored(url) if stored(url)[path] == b"source")
    received = (INCOMING / "pull" / blob.removeprefix("objects/sha256/").replace("/", "")).as_posix()
    where = {"received": received, "state": PULLED.as_posix(), "beside": "said", "output": "copied"}[place]
    path = machine.directory / "artifact" / where
    path.parent.mkdir(parents=True, exist_ok=True)
    if place == "state":
        precious.write_text("{}")
    LINKS[kind](path, precious)
    before = precious.read_text()
    machine.pull(url)
    assert precious.read_text() == before
    assert machine.build() == []


@pytest.mark.parametrize("name", ["build", "build/incoming", "build/work", "build/receipts"])
def test_directories_that_lead_elsewhere(name: str, url: str, pushed: Machine, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "b")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/precious").write_text("mine")
    path = machine.directory / "artifact" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / "elsewhere")
    refused(machine, url, "lies behind a link out of")


def test_a_pipe_that_lies_ready(url: str, pushed: Machine, tmp_path: Path) -> None:
    """Where it would be waited for ever."""
    machine = Machine(tmp_path / "b")
    (blob,) = (path for path in stored(url) if stored(url)[path] == b"source")
    path = machine.directory / "artifact" / INCOMING / "pull" / blob.removeprefix("objects/sha256/").replace("/", "")
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    machine.pull(url)
    assert machine.build() == []


class _Bomb(BaseHTTPRequestHandler):
    """A page that is small while it is sent."""

    page = b""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with contextlib.suppress(OSError):  # who reads it has had enough
            self.wfile.write(self.page)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def bomb(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(_Bomb, "page", zlib.compress(bytes(96 << 20), wbits=31))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bomb)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_page_that_unpacks_to_more_than_it_may(bomb: str) -> None:
    remote = open_remote(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteError, match="has more than 1048576 bytes"):
            remote.read("artifacts/x", 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("payload", [b"[" * 100_000, b"\xff", b"null", b'{"a": 1', b'{"a": NaN}', b"9" * 100_000])
def test_payloads_that_are_no_offer(payload: bytes, url: str, pushed: Machine, tmp_path: Path, become: Become) -> None:
    become("anna")
    open_remote(url).put({offer_name(url): trust.sign(payload, "artifacts")})
    become("ben")
    refused(Machine(tmp_path / "b"), url, "")


# What somebody who can write to a shared folder may have put there


@pytest.fixture
def folder(tmp_path: Path, become: Become) -> Path:
    """A shared folder that anna pushed to; ben, who trusts her, is at work. Beside it lie his documents."""
    key = become("anna")
    one = Machine(tmp_path / "a")
    one.build()
    shared = tmp_path / "shared"
    one.push(str(shared))
    become("ben")
    trust.add_key(key, "Anna")
    documents = tmp_path / "documents"
    for name in ("letter", "0" * 32, "sha256/aa/x", "model/cpu/x.json"):
        (documents / name).parent.mkdir(parents=True, exist_ok=True)
        (documents / name).write_text("mine")
        os.utime(documents / name, (0, 0))
    return shared


def all_below(directory: Path) -> dict[str, tuple[float, bytes]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime, path.read_bytes()) for path in files}


FOLDERS = ("unfinished", "objects", "objects/sha256", "artifacts", "artifacts/model", "artifacts/model/cpu", "steps")


@pytest.mark.parametrize("act", ["push", "pull", "push and pull"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_in_a_shared_folder_leads_nowhere(name: str, act: str, folder: Path, tmp_path: Path) -> None:
    """What lies behind it is neither removed nor written over nor added to."""
    path = folder / name
    if path.is_dir():
        shutil.rmtree(path)
    path.symlink_to(tmp_path / "documents")
    before = all_below(tmp_path / "documents")
    machine = Machine(tmp_path / "b")
    for each in act.split(" and "):
        machine.build()
        with contextlib.suppress(UserError):
            getattr(machine, each)(str(folder))
    assert all_below(tmp_path / "documents") == before


def test_a_push_names_the_link(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder / "unfinished", ignore_errors=True)
    (folder / "unfinished").symlink_to(tmp_path / "documents")
    machine = Machine(tmp_path / "b")
    machine.build()
    with pytest.raises(UserError, match="lies behind a link out of"):
        machine.push(str(folder))


def test_only_own_leftovers_are_removed(folder: Path, tmp_path: Path) -> None:
    unfinished = folder / "unfinished"
    unfinished.mkdir(exist_ok=True)
    (unfinished / ("a" * 32)).write_text("left")
    (unfinished / "letter").write_text("mine")
    (unfinished / ("b" * 32)).mkdir()
    os.mkfifo(unfinished / ("c" * 32))
    for path in unfinished.iterdir():
        os.utime(path, (0, 0))
    machine = Machine(tmp_path / "b")
    machine.build()
    machine.push(str(folder))
    assert {path.name[:1] for path in unfinished.iterdir()} == {"l", "b", "c"}


def test_nothing_is_done_through_links(folder: Path, tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    (folder / "way").symlink_to(documents)
    (folder / "name").symlink_to(documents / "letter")
    before, remote = all_below(documents), open_remote(str(folder))
    assert remote.missing({"name": 4}) == {"name"}
    for act in (remote.remove, remote.local, lambda name: remote.missing({name: 4}), lambda name: remote.read(name, 9)):
        with pytest.raises(UserError, match="lies behind a link out of"):
            act("way/letter")
    with pytest.raises(UserError):
        remote.read("name", 9)
    with pytest.raises(UserError):
        list(remote.blocks("name", 0, 4))
    assert not [name for name in remote.names("") if name.startswith("way/")] and remote.names("way") == []
    remote.put({"name": b"new"})
    remote.remove("name")
    assert all_below(documents) == before and not (folder / "name").is_symlink()


def test_a_folder_that_lists_without_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.sharing.remotes._MOST_NAMES", 1)
    with pytest.raises(RemoteError, match="lists more than 1 files below objects"):
        open_remote(str(folder)).names("objects")


def instead(folder: Path, pattern: str, make: Callable[[Path], object]) -> None:
    for path in [path for path in folder.glob(pattern) if path.is_file()]:
        path.unlink()
        make(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


IN_PLACE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "sparse file": sparse,
    "empty file": Path.touch,
    "link": lambda path: path.symlink_to("/etc/passwd"),
}


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("what", ["artifacts/*/*/*.json", "objects/*/*/*", "steps/*/*/*.json"])
def test_other_things_in_the_place_of_files(
    what: str, kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull is refused in one line or right, at once; a push afterwards ends too."""
    monkeypatch.setattr("stages.sharing.remotes._FIRST_PAUSE", 0)
    instead(folder, what, IN_PLACE[kind])
    machine = Machine(tmp_path / "b")
    for act in (machine.pull, machine.push):
        try:
            act(str(folder))
        except UserError as error:
            assert str(error).isprintable()
        machine.build()


def test_why_the_only_offer_cannot_be_read_is_said(folder: Path, tmp_path: Path) -> None:
    instead(folder, "artifacts/*/*/*.json", os.mkfifo)
    with pytest.raises(UserError, match="is not a regular file"):
        Machine(tmp_path / "b").pull(str(folder))


def test_an_object_of_wrong_content_is_mended_by_the_next_push(folder: Path, tmp_path: Path, become: Become) -> None:
    (damaged, *_) = sorted(path for path in folder.glob("objects/*/*/*") if path.stat().st_size)
    right = damaged.read_bytes()
    damaged.write_bytes(bytes([right[0] ^ 1]) + right[1:])
    become("anna")
    Machine(tmp_path / "a").push(str(folder))
    assert damaged.read_bytes() == right
    become("ben")
    Machine(tmp_path / "b").pull(str(folder))


def second_signer(folder: Path, tmp_path: Path, become: Become) -> Path:
    """carl, whom ben trusts as well, pushed the same; returns the file of his offer."""
    before = set(folder.glob("artifacts/*/*/*.json"))
    key = become("carl")
    machine = Machine(tmp_path / "c")
    machine.build()
    machine.push(str(folder))
    become("ben")
    trust.add_key(key, "Carl")
    (offer,) = set(folder.glob("artifacts/*/*/*.json")) - before
    return offer


@pytest.mark.parametrize("kind", [*IN_PLACE, "malformed offer"])
def test_one_bad_offer_hides_no_other(
    kind: str, folder: Path, tmp_path: Path, become: Become, capsys: pytest.CaptureFixture[str]
) -> None:
    offer = second_signer(folder, tmp_path, become)
    offer.unlink()
    if kind == "malformed offer":
        become("carl")
        offer.write_bytes(trust.sign(b'{"pushed": "9999"}', "artifacts"))
        become("ben")
    else:
        IN_PLACE[kind](offer)
    machine = Machine(tmp_path / "b")
    machine.pull(str(folder))
    assert machine.build() == []


def test_what_does_not_fit_is_not_received(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("stages.engine.files.shutil.disk_usage", lambda path: usage._replace(free=1))
    with pytest.raises(UserError, match=r"needs .* GB in .*, 0.0 GB are free"):
        Machine(tmp_path / "b").pull(str(folder))


# What a web server may do


class _Server(BaseHTTPRequestHandler):
    """Lists folders without end, sends a byte now and then, or nothing at all, by the first part of the path."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 62))
        self.send_header(
            "Accept-Ranges", "bytes" if "/ranges" in self.path or self.path.startswith("/more") else "none"
        )
        self.end_headers()

    def do_GET(self) -> None:
        if "/deep" in self.path:
            return self._page('<a href="more/">more</a>')
        if "/wide" in self.path:
            return self._page("".join(f'<a href="{i}/">x</a>' for i in range(3000)))
        if "/files" in self.path:
            return self._page("".join(f'<a href="{i}">x</a>' for i in range(3000)))
        if "/elsewhere" in self.path:
            return self._page(
                '<a href="/other/x">x</a><a href="http://127.0.0.1:1/x">x</a><a href="../x">x</a><a href="x">x</a>'
            )
        if "/more" in self.path:
            return self._page("x" * 1000, 206)
        if "/large" in self.path:
            return self._page("x" * (8 << 20))
        if "/silent" in self.path:
            time.sleep(20)
            return None
        self.send_response(206 if "/ranges" in self.path else 200)
        self.send_header("Content-Length", str(1 << 20))
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(200):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.1)
        return None

    def _page(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    started = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    started.daemon_threads = True
    threading.Thread(target=started.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{started.server_port}"
    started.shutdown()
    started.server_close()


@pytest.mark.parametrize("kind", ["drip", "ranges", "silent"])
def test_a_server_that_never_ends(kind: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.sharing.remotes._STALL", 0.5)
    monkeypatch.setattr("stages.sharing.remotes._SLOWEST", 1 << 20)
    remote, started = open_remote(f"{server}/{kind}"), time.monotonic()
    with pytest.raises(RemoteError):
        remote.read("artifacts/x", 1 << 16)
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [("wide", "lists more than 20 pages"), ("files", "link to more than 2000 others"), ("large", "more than 4194304")],
)
def test_a_server_that_lists_without_end(
    kind: str, complaint: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.sharing.remotes._MOST_PAGES", 20)
    monkeypatch.setattr("stages.sharing.remotes._MOST_NAMES", 2000 if kind == "files" else 100_000)
    with pytest.raises(RemoteError, match=complaint):
        open_remote(f"{server}/{kind}").names("artifacts")


def test_links_that_lead_deeper_are_followed_four_times(server: str) -> None:
    assert open_remote(f"{server}/deep").names("artifacts") == []


def test_links_that_lead_elsewhere_are_not_followed(server: str) -> None:
    assert open_remote(f"{server}/elsewhere").names("artifacts") == ["artifacts/x"]


def test_a_server_that_sends_more_than_it_was_asked_for(server: str) -> None:
    assert b"".join(open_remote(f"{server}/more").blocks("x", 0, 10)) == b"x" * 10
