"""A catalogue of models, formats and targets on workers of which some have the NPU's tools: stand-ins that are slow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from stages.commands import fleet
from stages.graph import Build
from stages.graph.options import parse_options
from stages.targets import forget_tools
from stages.targets.npu2 import programs
from tests.conftest import ROOT
from tests.npu.test_npu2_build import FAKE_AIEBU, FAKE_PEANO
from tests.support.fleets import scheduler
from tests.support.npu_tools import install, script
from tests.support.unlike_workers import unlike_workers, what_ran

pytest.importorskip("distributed")

MODELS = {"a": {}, "b": {"num_hidden_layers": 3}, "c": {"intermediate_size": 512}}
"""What differs from the demo: the second has the programs of the first."""
FORMATS = ("bf16", "int8", "int4")
VERSION = "fake 22.1.0"
AIRCC = """
if "--version" in args:
    sys.exit(print("{version}"))
import hashlib, time
time.sleep(0.5)
name = args[args.index("--xclbin-instance-name") + 1]
made_from = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(pathlib.Path.cwd().glob("*.[mo]*"))))
content = b"\\x7fELF\\0" + name.encode() + b"\\0" + made_from.digest()
pathlib.Path(args[args.index("--elf-name") + 1]).write_bytes(content)
leave(args, "lambda text, mlir: text")
"""
"""Takes its time, and makes of a module and of its objects what begins as an ELF, and says of what it was made."""


def tools(root: Path, version: str = VERSION) -> dict[str, str]:
    """Install the NPU's tools in a version; return the environment in which they are found."""
    script(root / "bin/aiebu-asm", FAKE_AIEBU)
    aircc = AIRCC.replace("{version}", version)
    return install(root, FAKE_PEANO, aircc, aircc)


def catalogue(directory: Path) -> Path:
    """Write a catalogue of all models in all formats for both targets."""
    demo = json.loads((ROOT / "models/demo/config.json").read_text())
    names = []
    for name, changes in MODELS.items():
        path = directory / f"model-{name}/config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(demo | changes))
        names.append(f"random:{path}")
    file = directory / "catalogue.toml"
    lists = {"model": names, "weights": FORMATS, "target": ("cpu", "npu2")}
    lines = [f"{name} = {json.dumps(values)}" for name, values in lists.items()]
    file.write_text("\n".join(["[[build]]", *lines, '"npu.buckets" = "64"', ""]))
    return file


@pytest.mark.thorough
def test_workers_leave_what_a_local_build_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full, other = tools(tmp_path / "tools"), tools(tmp_path / "other tools", "fake 21.0.0")
    kinds = {"full": (8 << 30, full), "also": (8 << 30, full), "small": (1 << 30, full), "other": (8 << 30, other)}
    for name, value in full.items():
        monkeypatch.setenv(name, value)
    forget_tools()
    monkeypatch.setattr(fleet, "find_spec", lambda name: None)  # nothing is verified
    file, store = catalogue(tmp_path), tmp_path / "store"
    with scheduler(tmp_path) as (address, _), unlike_workers(address, store, tmp_path, kinds) as log:
        there = built(file, tmp_path / "there", {"on": address, "cache": str(store)})
    ran = what_ran(log)
    assert len(ran) == len({each.address for each in ran}), "no step was run twice"
    assert {each.worker for each in ran} == kinds.keys(), "each had something to do"
    linked = {each.worker for each in ran if each.module == programs.__name__}
    assert linked == {"full", "also"}, "the others lack memory, or have another version"
    here = built(file, tmp_path / "here", {})
    assert there.keys() == here.keys() and len(here) == 2 * len(MODELS) * len(FORMATS)
    for artifact, files in here.items():
        assert there[artifact].keys() == files.keys(), artifact
        assert [name for name in files if there[artifact][name] != files[name]] == [], artifact
    assert "Traceback" not in capfd.readouterr().err


def built(file: Path, artifacts: Path, given: Mapping[str, str]) -> dict[str, dict[str, bytes]]:
    """Bring the catalogue up to date; return the files that each artifact directory has, but for what is local."""
    options = {"artifacts": str(artifacts), "output": f"{artifacts} page", **given}
    assert fleet.run(Build(parse_options(options, ["fleet"])), str(file)) is None
    rows = json.loads(Path(f"{artifacts} page/catalogue.json").read_text())
    found = {}
    for row in rows:
        directory = artifacts / row["artifact"]
        files = (path for path in directory.rglob("*") if path.is_file())
        names = {path.relative_to(directory).as_posix(): path for path in files}
        local = ("build/receipts/", "build/code/", "build/logs/", "manifest.local")
        found[row["artifact"]] = {name: path.read_bytes() for name, path in names.items() if not name.startswith(local)}
    return found
