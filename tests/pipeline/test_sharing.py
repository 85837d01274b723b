# ruff: noqa: F811 - arguments of tests are fixtures
"""What machines make for one another: what is taken, what is not, and what a remote can do to a build."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
from doit.exceptions import TaskFailed
from safetensors.numpy import load_file, save_file

from llama_npu2 import trust
from llama_npu2.errors import UserError
from llama_npu2.trust.envelopes import own_key
from stages.engine.digests import Digests
from stages.engine.doit_tasks import command_task
from stages.engine.places import CACHE
from stages.engine.tree import Tree
from stages.graph import Build
from stages.graph.options import parse_options
from stages.model.sources.local import DEMO
from stages.sharing import remotes
from stages.sharing.cache import offer_run
from stages.sharing.records import Blob, check_labels
from stages.sharing.remotes import Remote, RemoteError, open_remote
from stages.sharing.store import Damaged, Store
from tests.support.machines import Machine, url  # noqa: F401 - a fixture


def as_user(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("LLAMA_NPU2_CONFIG", str(directory))


def test_a_step_that_ran_elsewhere_does_not_run(url: str, tmp_path: Path) -> None:
    assert Machine(tmp_path / "a", url).build() == ["copy", "join"]
    other = Machine(tmp_path / "b", url)
    assert other.build() == []
    assert other.build() == []


CHANGES: dict[str, Callable[[Machine], Any]] = {
    "input": lambda machine: machine.source.write_text("another source"),
    "parameter": lambda machine: machine.params.update(level=2),
    "tool": lambda machine: machine.more.update(tool=lambda: "compiler 2"),
    "machine": lambda machine: machine.more.update(machine_key=lambda: {"cpu": "another"}),
    "unknown circumstances": lambda machine: machine.more.update(machine_key=lambda: None),
    "missing tool": lambda machine: machine.more.update(tool=lambda: None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_can_change_an_output_is_in_its_address(
    change: Callable[[Machine], Any], url: str, tmp_path: Path
) -> None:
    Machine(tmp_path / "a", url).build()
    other = Machine(tmp_path / "b", url)
    change(other)
    assert "copy" in other.build()


def test_changed_code_is_another_address(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(tmp_path / "a", url).build()
    monkeypatch.setattr("stages.engine.code.Code.sha256", lambda self, module: "0" * 64)
    assert Machine(tmp_path / "b", url).build() == ["copy", "join"]


def test_what_a_step_comes_upon_decides_too(url: str, tmp_path: Path) -> None:
    """As a compiler cache does: under one address lie runs that read different headers."""
    Machine(tmp_path / "a", url).build()
    other = Machine(tmp_path / "b", url)
    other.header.write_text("another header")
    assert other.build() == ["join"]
    for name, header in (("c", "header"), ("d", "another header")):
        third = Machine(tmp_path / name, url)
        third.header.write_text(header)
        assert third.build() == []


def test_only_what_trusted_signers_made_is_taken(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_user(monkeypatch, tmp_path / "alice")
    Machine(tmp_path / "a", url).build()
    alice = own_key()
    as_user(monkeypatch, tmp_path / "bob")
    assert Machine(tmp_path / "b", url).build() == ["copy", "join"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("not used: steps/") and f"doit trust key='{alice}'" in line
    as_user(monkeypatch, tmp_path / "carol")
    trust.add_key(alice, "alice")
    assert Machine(tmp_path / "c", url).build() == []
    assert all(line.endswith(": fetched") for line in capsys.readouterr().err.splitlines())


def test_private_outputs_stay(url: str, tmp_path: Path) -> None:
    Machine(tmp_path / "a", url, private=True).build()
    assert Machine(tmp_path / "b", url).build() == ["copy"]


def damaged(content: bytes) -> dict[str, bytes]:
    return {
        "flipped": bytes([content[0] ^ 1]) + content[1:],
        "truncated": content[: len(content) // 2],
        "longer": content + b"x",
    }


@pytest.mark.parametrize("kind", ["flipped", "truncated", "longer", "gone"])
@pytest.mark.parametrize("what", ["objects", "steps"])
def test_a_damaged_remote_costs_a_build_and_no_more(
    what: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "_FIRST_PAUSE", 0)
    url = f"file://{tmp_path}/remote"
    Machine(tmp_path / "a", url).build()
    for path in [path for path in (tmp_path / "remote" / what).rglob("*") if path.is_file()]:
        if kind == "gone":
            path.unlink()
        else:
            path.write_bytes(damaged(path.read_bytes())[kind])
    other = Machine(tmp_path / "b", url)
    made = other.build()
    # A file that is too long has the content that was asked for in front.
    assert made == ([] if (what, kind) == ("objects", "longer") else ["copy", "join"])
    lines = capsys.readouterr().err.splitlines(keepends=True)
    said = "".join(line for line in lines if not line.endswith(": fetched\n"))
    assert "Traceback" not in said and all("not used" in line for line in said.splitlines())
    assert bool(said) == (made != [] and (what, kind) != ("steps", "gone"))
    assert not (tmp_path / "b/artifact/build/work/copy").exists()


def test_a_remote_that_fails_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote").write_text("a file where a directory should be")
    assert Machine(tmp_path / "a", f"file://{tmp_path}/remote").build() == ["copy", "join"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "cache= is not used from here on" in lines[0]


def test_pushed_directories_are_pulled_and_current(url: str, tmp_path: Path) -> None:
    one = Machine(tmp_path / "a")
    one.build()
    (one.directory / "artifact/said").write_text("verified")
    content = len("source" + "sourceheader" + "verified")
    assert (one.push(url), one.push(url)) == (content, 0)
    other = Machine(tmp_path / "b")
    assert (other.pull(url), other.pull(url)) == (content, 0)
    assert (other.directory / "artifact/said").read_text() == "verified"
    assert all(step.is_current() for step in other.steps().values())
    assert other.build() == []


def test_a_pull_mends_what_is_damaged(url: str, tmp_path: Path) -> None:
    """Also where the manifest is there: it goes when the first file is replaced, and comes back last."""
    one = Machine(tmp_path / "a")
    one.outputs = ("elf/program", "manifest.json")
    one.build()
    one.push(url)
    other = Machine(tmp_path / "b")
    other.outputs = one.outputs
    other.pull(url)
    (other.directory / "artifact/elf/program").unlink()
    other.pull(url)
    assert (other.directory / "artifact/elf/program").read_text() == "source"
    assert other.build() == []


def test_a_full_disk_ends_a_pull_in_one_line(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    one.build()
    one.push(url)
    monkeypatch.setattr("stages.sharing.store.Store.receive", refuse)
    (pull,) = command_task(lambda: bool(other.pull(url)), [], [])["actions"]
    failed = pull()
    assert isinstance(failed, TaskFailed) and "the disk is full: " in failed.message


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_pulled_is_stale_where_sources_differ(url: str, tmp_path: Path) -> None:
    one = Machine(tmp_path / "a")
    one.build()
    one.push(url)
    other = Machine(tmp_path / "b")
    other.header.write_text("another header")
    other.pull(url)
    assert other.build() == ["join"]


def test_an_older_offer_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    one.build()
    one.push(url)
    store = open_remote(url)._files.store
    old = {path: file.getvalue() for path, file in store.items() if "artifacts" in path}
    monkeypatch.setattr("stages.sharing.travel._TIME", "9%Y")
    one.push(url)
    other.pull(url)
    for path, content in old.items():
        open_remote(url)._files.pipe_file(path, content)
    with pytest.raises(UserError, match=r"was pushed at .* the directory here at"):
        other.pull(url)


def test_a_remote_without_an_offer_says_what_it_has(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Machine(tmp_path / "b")
    with pytest.raises(UserError, match="has no model/cpu; it has no artifacts"):
        other.pull(url)
    as_user(monkeypatch, tmp_path / "alice")
    one = Machine(tmp_path / "a")
    one.build()
    one.push(url)
    as_user(monkeypatch, tmp_path / "bob")
    with pytest.raises(trust.Untrusted, match="whom you do not trust: to trust it, doit trust key="):
        other.pull(url)


HOSTILE = [
    *("", "../up", "/absolute", "a/../b", "a//b", "a/./b", "a\\b", "c:d", "line\nbreak", "a /b", "e\u0301"),
    *("build/receipts/x", "manifest.local"),
]


@pytest.mark.parametrize("label", HOSTILE)
def test_hostile_paths_are_refused(label: str) -> None:
    with pytest.raises(UserError):
        check_labels([label])


@pytest.mark.parametrize("labels", [("a/B", "a/b"), ("\ufb01", "fi")])
def test_paths_that_some_machines_take_for_one_are_refused(labels: tuple[str, str]) -> None:
    with pytest.raises(UserError, match="are one file"):
        check_labels(labels)


class Flaky(Remote):
    """Drops a connection after so many bytes of a file, as often as it is told to."""

    drops = 0
    moved = 0

    def _run(self, name: str, start: int, end: int) -> Iterator[bytes]:
        for block in super()._run(name, start, end):
            if self.drops and len(block) > 5:
                self.drops -= 1
                self.moved += 5
                yield block[:5]
                raise ConnectionError("reset by peer")
            self.moved += len(block)
            yield block


@pytest.fixture
def flaky(url: str, monkeypatch: pytest.MonkeyPatch) -> Flaky:
    monkeypatch.setattr(remotes, "_FIRST_PAUSE", 0)
    remote = open_remote(url)
    return Flaky(url, remote._files, remote._root)


def sent(store: Store, path: Path, content: bytes) -> Blob:
    path.write_bytes(content)
    blob = Blob(str(store.digests.sha256(path)), len(content))
    store.send({blob: path})
    return blob


def test_transfers_go_on_where_they_were_dropped(flaky: Flaky, tmp_path: Path) -> None:
    store = Store(flaky, Digests(tmp_path / ".digests"))
    blob = sent(store, tmp_path / "file", bytes(range(100)))
    flaky.drops = 10
    (received,) = store.receive([blob], Tree(tmp_path), PurePath("incoming")).values()
    assert received.read_bytes() == bytes(range(100)) and flaky.moved == 100


def test_the_next_command_goes_on_where_one_was_stopped(
    flaky: Flaky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(flaky, Digests(tmp_path / ".digests"))
    blob = sent(store, tmp_path / "file", bytes(range(100)))
    monkeypatch.setattr(remotes, "_ATTEMPTS", 1)
    flaky.drops = 1
    with pytest.raises(RemoteError, match="reset by peer"):
        store.receive([blob], Tree(tmp_path), PurePath("incoming"))
    store.receive([blob], Tree(tmp_path), PurePath("incoming"))
    assert flaky.moved == 100


def test_a_damaged_rest_is_received_anew(flaky: Flaky, tmp_path: Path) -> None:
    store = Store(flaky, Digests(tmp_path / ".digests"))
    blob = sent(store, tmp_path / "file", bytes(range(100)))
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / blob.sha256).write_bytes(b"not it")
    with pytest.raises(Damaged):
        store.receive([blob], Tree(tmp_path), PurePath("incoming"))
    (received,) = store.receive([blob], Tree(tmp_path), PurePath("incoming")).values()
    assert received.read_bytes() == bytes(range(100))


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing more of a file ends as on a full disk: what fits is written, the rest is not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_half_a_file_on_a_full_disk_is_not_taken_for_one(tmp_path: Path) -> None:
    store = Store(open_remote(str(tmp_path / "remote")), Digests(tmp_path / ".digests"))
    content = bytes(range(256)) * 64
    path = tmp_path / "file"
    path.write_bytes(content)
    blob = Blob(str(store.digests.sha256(path)), len(content))
    with largest_file(5000), pytest.raises(RemoteError):
        store.send({blob: path})
    assert store.remote.missing({blob.name: blob.size}) == {blob.name}
    store.send({blob: path})
    with largest_file(5000), pytest.raises(OSError):
        store.receive([blob], Tree(tmp_path), PurePath("incoming"))
    (received,) = store.receive([blob], Tree(tmp_path), PurePath("incoming")).values()
    assert received.read_bytes() == content


def test_a_file_that_changes_while_it_is_sent_is_not_left_there(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(open_remote(url), Digests(tmp_path / ".digests"))
    path = tmp_path / "file"
    path.write_bytes(b"before")
    blob = Blob(str(store.digests.sha256(path)), 6)
    path.write_bytes(b"behind")
    with pytest.raises(UserError, match="changed while it was sent"):
        store.send({blob: path})
    assert store.remote.missing({blob.name: 6}) == {blob.name}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nothing://x", "give a directory, file://"),
        ("hf://only", "give hf://ORG/NAME"),
        ("gs://bucket", "pip install"),
    ],
)
def test_a_url_that_names_no_remote(given: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_remote(given)


def test_a_fine_tune_finds_its_programs_in_a_store(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other weights, other ends of texts: what holds these is made here, and modules. Nothing is compiled."""
    made = Build(parse_options({"artifacts": str(demo.parents[1]), "target": "cpu"}))
    store = Store(open_remote(str(tmp_path / "store")), made.project.digests)
    for step in made.steps.values():
        if not step.private:
            offer_run(store, step)
    tuned = tmp_path / "tuned"
    shutil.copytree(DEMO, tuned)
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps(config | {"eos_token_id": 5, "bos_token_id": 6}))
    tensors = load_file(tuned / "model.safetensors")
    save_file({name: tensor[::-1].copy() for name, tensor in tensors.items()}, tuned / "model.safetensors")
    given = {"model": str(tuned), "artifacts": str(tmp_path / "artifacts"), "cache": str(tmp_path / "store")}
    build = Build(parse_options(given | {"target": "cpu"}))
    for step in build.steps.values():
        assert step.run() is None
    fetched = {line.removesuffix(": fetched") for line in capsys.readouterr().err.splitlines()}
    made_here = {name.partition(":")[0] for name in build.steps.keys() - fetched}
    assert made_here == {"checkpoint", "tokenizer", "plan", "weights", "module", "manifest"}
    assert (build.directory / "elf/host.so").read_bytes() == (demo / "elf/host.so").read_bytes()
    assert not (build.artifacts / CACHE).exists(), "no compiler left anything"
