"""`doit du` and `doit gc`: what is counted, what goes, and what never does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llama_npu2 import UserError
from stages.commands import du, gc
from stages.commands.gc import Keep
from stages.engine import housekeeping
from stages.engine.housekeeping import ArtifactDirectory, Unneeded, directories, remove, unneeded
from stages.engine.leftovers import Leftovers
from stages.engine.lock import ProcessLock
from stages.engine.object_cache import CachedObject
from stages.engine.objects import write_objects
from stages.engine.tree import Tree
from stages.graph import Build
from stages.graph.options import parse_options
from tests.conftest import ROOT, doit, ran, snapshot

DAY = 86400


def write(path: Path, content: str = "x", days: float = 30) -> Path:
    """A file that was written so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    for each in (path, *path.parents[:3]):
        os.utime(each, (then := time.time() - days * DAY, then))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One complete directory, with leftovers of all kinds; one that is not complete; and a cache."""
    root, whole = tmp_path / "artifacts", tmp_path / "artifacts/model/cpu"
    write(whole / "elf/host.so", "code")
    write(whole / "elf/gone.so", "old code")
    write(whole / "elf/.host.so.abc", "half")
    write(whole / "weights/head.safetensors", "weights")
    write(whole / "build/objects/cpu/gemm/gemm.o")
    write(whole / "build/work/weights/weights/head.safetensors")
    write(whole / "build/calibrated/layer_000.safetensors")
    write(whole / "notes.txt", "the user's own")
    write(whole / "verified.json", "{}")
    outputs = ["elf/host.so", "build/objects/cpu/gemm/gemm.o", "build/calibrated/layer_000.safetensors"]
    receipt = {"key": {}, "declared": [], "inputs": {}, "outputs": dict.fromkeys(outputs, "0")}
    write(whole / "build/receipts/elf-host.json", json.dumps(receipt))
    files = {name: {"sha256": name} for name in ("elf/host.so", "weights/head.safetensors")}
    write(whole / "manifest.json", json.dumps({"files": files}))
    write(root / "model/npu2/build/plan.json")
    write(root / "random-x/checkpoint/generated-from")
    write(root / ".cache/objects/gemm-1.json")
    write(root / ".cache/objects/gemm-1.o", "object")
    write(root / ".cache/objects/.gemm-2.123-4.o", "half an object")
    write(root / "model/README", "the user's own")
    return root


def paths(root: Path, items: list[Unneeded]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for item in items:
        found.setdefault(item.kind, []).extend(path.relative_to(root).as_posix() for path in item.paths)
    return {kind: sorted(names) for kind, names in found.items()}


UNNEEDED = {
    "abandoned work": [".cache/objects/.gemm-2.123-4.o", "model/cpu/build/work/weights", "model/cpu/elf/.host.so.abc"],
    "old outputs": ["model/cpu/elf/gone.so"],
    "incomplete": ["model/npu2"],
    "checkpoint": ["random-x/checkpoint"],
    "cached object": [".cache/objects/gemm-1.json", ".cache/objects/gemm-1.o"],
}


def test_what_nobody_needs_is_found_and_goes(root: Path) -> None:
    assert paths(root, unneeded(root)) == UNNEEDED
    kept = {path for path in root.rglob("*") if path.is_file()}
    kept -= {root / name for names in UNNEEDED.values() for name in names}
    kept -= {root / "model/npu2/build/plan.json", root / "random-x/checkpoint/generated-from"}
    kept -= {root / "model/cpu/build/work/weights/weights/head.safetensors"}
    assert all(remove(root, item) for item in unneeded(root))
    assert {path for path in root.rglob("*") if path.is_file() and ".locks" not in path.parts} == kept
    assert unneeded(root) == []


def test_what_others_remove_meanwhile_is_not_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, names = unneeded(root), Tree.names

    def outdated(tree: Tree, *where: Any) -> list[str]:
        return [*names(tree, *where), *(["gone.json", "gone.o"] if where == (housekeeping.CACHE,) else [])]

    monkeypatch.setattr(Tree, "names", outdated)
    assert unneeded(root) == found


def test_calibration_goes_only_when_asked(root: Path) -> None:
    assert "calibration" not in paths(root, unneeded(root))
    (item,) = (item for item in unneeded(root, calibration=True) if item.kind == "calibration")
    assert not remove(root, item), "it was not asked for"
    assert remove(root, item, calibration=True)
    assert not (root / "model/cpu/build/calibrated").exists()


def test_what_somebody_builds_stays(root: Path) -> None:
    (item,) = (item for item in unneeded(root) if item.kind == "incomplete")
    lock = ArtifactDirectory(root, "model", "npu2").lock
    with lock:
        script = f"import sys; sys.path[:0] = {sys.path!r}\n" + (
            "from pathlib import Path; from stages.engine.housekeeping import remove, unneeded\n"
            f"root = Path({str(root)!r})\n"
            "print([remove(root, item) for item in unneeded(root) if item.kind == 'incomplete'])"
        )
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == "[False]"
    write(root / "model/npu2/manifest.json", '{"files": {}}')
    assert not remove(root, item), "it was completed since it was found"
    assert (root / "model/npu2/build/plan.json").exists()


def test_what_no_lock_guards_stays_while_it_is_new(root: Path) -> None:
    fresh = write(root / ".cache/objects/gemm-3.5-6.o", days=0)
    assert {path for item in unneeded(root) if not remove(root, item) for path in item.paths} == {fresh}


@pytest.mark.parametrize("stays", ["nothing", "another process holds the lock", "it was there", "it was accepted"])
def test_which_directory_a_failed_build_leaves(stays: str, tmp_path: Path) -> None:
    directory, lock = tmp_path / "artifacts/model/cpu", ProcessLock(tmp_path / "artifacts/.locks/model-cpu.lock")
    if stays == "it was there":
        write(directory / "notes")
    accepted = directory / "build/accepted"
    leftovers = Leftovers(directory, directory / "build/work", lock, tmp_path / "artifacts/.digests.json", accepted)
    write(directory / "build/half")
    if stays == "it was accepted":
        write(accepted)
    lock.held = stays != "another process holds the lock"
    leftovers.remove(failed=True)
    assert (directory / "build/half").exists() == (stays != "nothing")


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside/file")
    (root / "model/npu2/build/link").symlink_to(outside.parent)
    (root / "model/cpu/elf/link.so").symlink_to(outside)
    assert all(remove(root, item) for item in unneeded(root))
    assert outside.exists() and not (root / "model/cpu/elf/link.so").is_symlink()


def item(kind: str, days: float, nbytes: int = 1 << 20) -> Unneeded:
    return Unneeded(kind, (Path(f"{kind}{days}"),), nbytes, 100 * DAY - days * DAY)


@pytest.mark.parametrize(
    ("keep", "stay"), [("0", 0), ("1", 2), ("2", 3), ("48h", 1), ("7d", 2), ("3w", 4), ("2M", 2), ("1G", 4), ("0K", 0)]
)
def test_keep(keep: str, stay: int) -> None:
    items = [item("a", 1), item("a", 3), item("a", 20), item("b", 10)]
    assert len(items) - len(list(Keep.parse(keep).removed(items, 100 * DAY))) == stay


@pytest.mark.parametrize("keep", ["", "d", "-1", "1.5d", "7 d", "7m", "1e3", "9" * 10])
def test_what_keep_cannot_be(keep: str) -> None:
    with pytest.raises(UserError, match=r"keep=.*14d"):
        Keep.parse(keep)


def command_line(root: Path, **variables: str) -> Build:
    return Build(parse_options({"artifacts": str(root)} | variables))


def test_shows_first_and_removes_when_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(root)
    shown = doit("gc", f"artifacts={root}")
    assert shown.returncode == 0, shown.stderr
    assert "would go" in shown.stdout and "doit gc keep=14d removes" in shown.stdout
    assert snapshot(root) == before
    gc.run(command_line(root, keep="0", dry_run="1"))
    assert snapshot(root) == before
    capsys.readouterr()
    gc.run(command_line(root, keep="0", json="1"))
    assert {row["outcome"] for row in json.loads(capsys.readouterr().out)} == {"removed"}
    assert not (root / "model/npu2").exists()
    gc.run(command_line(root))
    assert capsys.readouterr().out == "there is nothing to remove\n"


def test_du_counts_every_byte_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root / "model/cpu", root / "model/copy")
    (root / "model/copy/weights/head.safetensors").unlink()
    os.link(root / "model/cpu/weights/head.safetensors", root / "model/copy/weights/head.safetensors")
    assert du.duplicated(directories(root)) == len("code"), "a second name of the same file is no second copy"
    du.run(command_line(root, json="1"))
    found = json.loads(capsys.readouterr().out)
    rows = {row["directory"]: row for row in found["artifacts"]}
    assert [rows[name]["complete"] for name in ("cpu", "npu2")] == [True, False]
    files = [path for path in (root / "model/cpu").rglob("*") if path.is_file()]
    assert sum(rows["cpu"]["bytes"].values()) == sum(path.stat().st_size for path in files)
    assert rows["cpu"]["bytes"]["weights"] == len("weights")
    assert found["shared"]["cached objects"] == len("xobjecthalf an object")
    du.run(command_line(root))
    table = capsys.readouterr().out
    assert "npu2 (incomplete)" in table and "doit gc" in table


def test_an_object_that_vanishes_is_made_again(tmp_path: Path) -> None:
    made: list[str] = []

    def compile_one(name: str, flags: object) -> CachedObject:
        made.append(name)
        path = tmp_path / "cache.o"
        if len(made) > 1:
            path.write_text("object")
        return CachedObject(path, ())

    write_objects("cpu/gemm", {"gemm.o": []}, compile_one, tmp_path / "work")
    assert (tmp_path / "work/build/objects/cpu/gemm/gemm.o").read_text() == "object"
    assert made == ["gemm.o"] * 2


@pytest.mark.slow
def test_beside_builds_and_runs(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody tidies all the time, also objects that are new, and only spares what compilers are writing; what is
    complete always runs, and what is built is whole."""
    monkeypatch.setattr(housekeeping, "RECENT", 0)
    artifacts, stop, removed = built / "artifacts", threading.Event(), []

    def tidy() -> None:
        while not stop.is_set():
            found = [item for item in unneeded(artifacts) if item.directory or item.kind == "cached object"]
            removed.extend(item.kind for item in found if remove(artifacts, item))

    thread = threading.Thread(target=tidy)
    thread.start()
    try:
        whole = artifacts / "model/cpu"
        command = [sys.executable, "-m", "llama_npu2", str(whole), "a", "--raw", "--max-tokens=4"]
        for weights in ("int8", "int4", "w8a8"):
            ran(doit("compile", "model=model", f"weights={weights}", cwd=built))
            subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT / "runtime")}, check=True)
    finally:
        stop.set()
        thread.join()
    assert "cached object" in removed
    assert all(directory.complete for directory in directories(artifacts))
    for name in ("", "weights=int8", "weights=int4", "weights=w8a8"):
        assert ran(doit("compile", "model=model", *filter(None, [name]), cwd=built)) == set()
