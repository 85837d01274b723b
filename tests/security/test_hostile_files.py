"""Links, pipes, devices and sizes where files of artifacts and checkpoints are expected: each is done without harm or
refused in one line, in little time and memory, and nothing outside is changed."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_npu2 import trust
from llama_npu2.trust import envelopes, settings
from stages.engine.digests import Digests, _canonical
from stages.engine.files import content_digest, content_sha256
from tests.conftest import CONFIG, unfinished, write_checkpoint
from tests.support.hostile import ACTIONS, MEMORY, OLD, Held, World, age, attempt, compile_all, reply

Attack = Callable[[World], object]
Place = Callable[[World], Path]

CASES: dict[str, tuple[str, Attack, str]] = {}
"""By name: the action, what was prepared, and what the refusal must say; an empty text where anything that holds
will do."""


@pytest.fixture(scope="module")
def pristine(artifacts: Path, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A built directory, its remote, and documents with the same names."""
    del demo  # it filled the object cache
    world = World(tmp_path_factory.mktemp("pristine"))
    write_checkpoint(world.checkpoint)
    shutil.copytree(artifacts / ".cache/objects", world.artifacts / ".cache/objects", ignore=unfinished)
    envelopes.own_key()
    compile_all(world)
    ACTIONS["push"](world)
    (world.root / "expected").write_text(reply(world))
    shutil.copytree(world.directory, world.documents)
    for path in (path for path in world.documents.rglob("*") if path.is_file()):
        path.write_text(f"my own {path.name}")
    for name in ("build/work/weights", "build/incoming/pull", "build/logs", "build/calibrated", "objects", "cpu"):
        (world.documents / name).mkdir(parents=True, exist_ok=True)
        (world.documents / name / "letter.json").write_text("my own letter")
    age(world.documents)
    return world


@pytest.fixture
def world(pristine: World, tmp_path: Path) -> World:
    return pristine.copy(tmp_path / "world")


def inside(name: str) -> Place:
    """A place in the artifact directory, or in `artifacts/`, where the name begins with @."""
    return lambda world: world.artifacts / name[1:] if name[0] == "@" else world.directory / name


def put(name: str, make: Callable[[Path, World], object]) -> Attack:
    """Something else in the place of what is there."""

    def attack(world: World) -> None:
        path = inside(name)(world)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path, world)

    return attack


def counterpart(path: Path, world: World) -> Path:
    """The user's document of the same name, or one of theirs."""
    if path.is_relative_to(world.directory):
        return world.documents / path.relative_to(world.directory)
    return world.documents if path.suffix == "" else world.documents / "manifest.json"


def sparse(path: Path, world: World) -> None:
    """Bytes that take no disk, but more memory than an action may take if they are read whole."""
    with path.open("wb") as file:
        file.truncate(MEMORY + (256 << 20))


LINK = "a link to documents"
KINDS: dict[str, Callable[[Path, World], object]] = {
    LINK: lambda path, world: path.symlink_to(counterpart(path, world)),
    "a pipe": lambda path, world: os.mkfifo(path),
    "an endless device": lambda path, world: path.symlink_to("/dev/zero"),
    "a folder": lambda path, world: (path / "x").mkdir(parents=True),
    "a sparse file": sparse,
}

FOLDERS = (
    *("weights", "tokenizer", "elf", "build", "build/objects", "build/modules", "build/receipts", "build/code"),
    *("build/work", "build/incoming", "build/logs", "build/calibrated"),
    *("@.cache", "@.cache/objects", "@.locks", "@model", "@model/cpu"),
)
FILES = (
    *("manifest.json", "manifest.local", "manifest.sig", "provenance.json", "build/receipts/weights.json"),
    *("build/receipts/elf-host.json", "build/plan.json", "build/packing.json", "build/weights.json"),
    *("build/config.json", "build/checkpoint.json", "build/modules/host.json", "build/pulled.json"),
    *("tokenizer/tokenizer.json", "elf/host.so", "@.digests.json", "@.durations.json", "@.locks/model-cpu.lock"),
)

for _folder in FOLDERS:
    for _action in ("compile", "gc", "clean", "pull"):
        CASES[f"{_action}: {_folder} is {LINK}"] = (_action, put(_folder, KINDS[LINK]), "")
for _file in FILES:
    for _kind, _make in KINDS.items():
        for _action in ("compile", "clean") if _kind == LINK else ("compile",):
            CASES[f"{_action}: {_file} is {_kind}"] = (_action, put(_file, _make), "")
for _file in ("manifest.json", "manifest.local", "manifest.sig", "tokenizer/tokenizer.json", "elf/host.so"):
    for _kind, _make in KINDS.items():
        CASES[f"run: {_file} is {_kind}"] = ("run", put(_file, _make), "")
for _file in ("manifest.json", "build/receipts/weights.json", "@.digests.json"):
    for _kind in ("a pipe", "an endless device", "a sparse file"):
        for _action in ("why", "gc", "du", "pull"):
            CASES[f"{_action}: {_file} is {_kind}"] = (_action, put(_file, KINDS[_kind]), "")


def changed(path: Path, change: Callable[[dict], object]) -> None:
    """Edit a JSON file; its other names keep what they have."""
    content = json.loads(path.read_text())
    change(content)
    path.unlink()
    path.write_text(json.dumps(content))


def linked_and_incomplete(world: World) -> None:
    """A model's directory on another disk, in which a build was stopped."""
    put("@model", lambda path, world: path.symlink_to(world.documents))(world)
    (world.documents / "cpu/build").mkdir()


def stopped(name: str) -> Attack:
    """What a build left behind that was stopped, in which a link leads to documents."""

    def attack(world: World) -> None:
        path = inside(name)(world)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(world.documents)
        age(world.directory)

    return attack


def receipt_names(label: str, part: str = "inputs") -> Attack:
    """The receipt of a step that is no more names a file, with the checksum left out as older receipts have it."""

    def attack(world: World) -> None:
        path = world.directory / "build/receipts/gone.json"
        receipt = {"key": {}, "declared": [], "inputs": {}, "outputs": {}} | {part: {label: "0" * 32}}
        path.write_text(json.dumps(receipt))

    return attack


def input_is(label: str) -> Attack:
    """The receipt of a step that is there says that it came upon this file, which a build must then look at."""

    def attack(world: World) -> None:
        def change(receipt: dict) -> None:
            receipt.pop("xxh3")
            receipt["inputs"][label] = "0" * 32

        changed(world.directory / "build/receipts/plan.json", change)

    return attack


def generated(name: str) -> Attack:
    """Where generated weights go lies a link, or a folder of the user's own."""

    def attack(world: World) -> None:
        path = world.artifacts / "random-config" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(world.documents)

    return attack


for _name in ("build/work/x", "build/incoming/x", "build/work/weights", "weights/.x", "elf/.half", "@model/.c.tmp-1"):
    CASES[f"gc: {_name} is {LINK}"] = ("gc", stopped(_name), "")
    CASES[f"compile: {_name} is {LINK}"] = ("compile", stopped(_name), "")
for _label in (
    "/proc/kmsg",
    "/proc/self/mem",
    "/dev/zero",
    "/",
    "/etc/passwd",
    "../../../documents/letter",
    "x" * 5000,
):
    CASES[f"compile: an input is {_label[:40]}"] = ("compile", input_is(_label), "")
    CASES[f"why: an input is {_label[:40]}"] = ("why", input_is(_label), "")
for _label in ("../../../documents/manifest.json", "/etc/passwd", "a/../../x", "\x00", "x" * 300, "gone/letter.json"):
    CASES[f"compile: an output is {_label[:40]!r}"] = ("compile", receipt_names(_label, "outputs"), "")
CASES["gc: the model is a link, and incomplete"] = ("gc", linked_and_incomplete, "")
CASES["compile: random weights go through a link"] = ("random", generated("checkpoint"), "")
CASES["compile: the model of random weights is a link"] = ("random", generated(""), "")
CASES["gc: generated weights behind a link"] = ("gc", generated("checkpoint"), "")


def of_checkpoint(name: str, make: Callable[[Path, World], object]) -> Attack:
    def attack(world: World) -> None:
        (world.checkpoint / name).unlink(missing_ok=True)
        make(world.checkpoint / name, world)

    return attack


def configured(**fields: object) -> Attack:
    def attack(world: World) -> None:
        (world.checkpoint / "config.json").write_text(json.dumps(CONFIG | fields))

    return attack


def header_says(header: object, length: int | None = None) -> Attack:
    """Weights whose header is this, as text or JSON."""

    def attack(world: World) -> None:
        content = json.dumps(header).encode()
        size = len(content) if length is None else length
        (world.checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", size) + content)

    return attack


LIMITS = {
    "max_position_embeddings": "or the table of rotations is too large",
    "vocab_size": "must be a positive integer, and at most 16777216",
    "num_hidden_layers": "must be a positive integer, and at most 4096",
    "num_key_value_heads": "must be a positive integer, and below 2^31",
}
"""What is said of fields that have a limit of their own. Others are refused for what follows from them."""

_HUGE = {"dtype": "BF16", "shape": [1 << 40], "data_offsets": [0, 1 << 41]}
for _file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "quantize_config.json"):
    for _kind in ("a pipe", "an endless device", "a folder", "a sparse file"):
        CASES[f"compile: {_file} of the checkpoint is {_kind}"] = ("compile", of_checkpoint(_file, KINDS[_kind]), "")
for _field, _value in {
    "max_position_embeddings": (1 << 31) - 1,
    "vocab_size": (1 << 31) - 1,
    "num_hidden_layers": (1 << 31) - 1,
    "hidden_size": (1 << 31) - 1,
    "intermediate_size": 1 << 30,
    "head_dim": 1 << 30,
    "num_attention_heads": 1 << 30,
    "num_key_value_heads": 1 << 40,
    "rms_norm_eps": 1e400,
    "rope_theta": -1,
    "eos_token_id": [2] * 100_000,
}.items():
    _complaint = LIMITS.get(_field, "")
    CASES[f"compile: {_field} is beyond all"] = ("compile", configured(**{_field: _value}), _complaint)
    CASES[f"random: {_field} is beyond all"] = ("random", configured(**{_field: _value}), _complaint)
for _name, _header in {
    "a size that overflows": {"model.norm.weight": _HUGE},
    "nothing": {},
    "a list": [],
    "nested deeply": "[" * 100_000,
}.items():
    CASES[f"compile: the header of weights is {_name}"] = ("compile", header_says(_header), "")
CASES["compile: the header of weights is 2^62 bytes long"] = ("compile", header_says({}, 1 << 62), "")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CASES)
def test_held(name: str, world: World, record_property: Callable[[str, object], None]) -> None:
    action, attack, complaint = CASES[name]
    attack(world)
    held = attempt(world, {**ACTIONS, "random": random_weights}[action])
    record_property("held", f"{held.refused or 'done'} ({held.seconds:.1f} s, {held.grown >> 20} MiB)")
    assert not held.wrong, held.wrong
    assert complaint in held.refused


def random_weights(world: World) -> None:
    compile_all(world, model=f"random:{world.checkpoint}/config.json")


def test_enough_cases() -> None:
    assert len(CASES) >= 150


# What an undisturbed directory does, and that the trial itself would see a fault


@pytest.mark.sampled(3)
@pytest.mark.parametrize("action", ["compile", "run", "why", "gc", "du", "pull", "clean"])
def test_nothing_is_prepared(action: str, world: World) -> None:
    assert attempt(world, ACTIONS[action]) == Held(
        seconds=pytest.approx(30, abs=30), grown=pytest.approx(0, abs=1 << 29)
    )


def never(world: World) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda world: (world.documents / "manifest.json").unlink(), "changed outside"),
        (lambda world: (world.documents / "manifest.json").write_text("x"), "changed outside"),
        (lambda world: (world.documents / "new").mkdir(), "changed outside"),
        (lambda world: bytearray(600 << 20).count(1), "it took"),
        (lambda world: {}["x"], "KeyError"),
        (never, "it hangs"),
    ],
)
def test_faults_are_seen(fault: Attack, why: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "it hangs":
        monkeypatch.setattr("tests.support.hostile.SECONDS", 2)
    assert why in attempt(world, fault).wrong


# Whose word is taken


def lie_about(world: World, path: Path, sha256: str) -> None:
    """Say in the memory of digests that a file is still what it was, as far as that can be done without a secret."""
    status = path.stat()
    signature = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    memory = world.artifacts / ".digests.json"
    content = json.loads(memory.read_text())
    known = Digests(memory)._entries
    for what, found in (("", known[str(path)][-1] if str(path) in known else ""), ("sha256 ", sha256)):
        content["known"][f"{what}{path}"] = [*signature, found]
    memory.unlink()
    memory.write_text(json.dumps(content))


def remember(world: World, path: Path, xxh3: str, sha256: str) -> None:
    """Say in this user's own memory of digests that a file has these."""
    digests, status = Digests(world.artifacts / ".digests.json"), path.stat()
    signature = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    digests._entries |= {str(path): [*signature, xxh3], f"sha256 {path}": [*signature, sha256]}
    digests._dirty = True
    digests.save()


def test_a_memory_of_digests_is_not_believed_about_native_code(world: World) -> None:
    """Even where it is this user's own: the source is altered in place, its size stays, and the memory lies."""
    compile_all(world)
    source = world.directory / "build/modules/host.cc"
    before, content = content_sha256(source), source.read_bytes()
    source.unlink()
    source.write_bytes(content[:-1] + b" ")
    xxh3 = json.loads((world.directory / "build/receipts/module-host.json").read_text())["outputs"]
    remember(world, source, xxh3["build/modules/host.cc"], before)
    (world.directory / "elf/host.so").unlink()
    held = attempt(world, ACTIONS["compile"])
    assert held.wrong == "" and "was not built by you" in held.refused


def test_a_memory_of_digests_is_not_believed_about_what_is_in_place(world: World) -> None:
    """A step runs again, and the memory says that what it makes lies there already: something else does."""
    compile_all(world)
    library = world.directory / "elf/host.so"
    content, digests = library.read_bytes(), (content_digest(library), content_sha256(library))
    library.unlink()
    library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    remember(world, library, *digests)
    (world.directory / "build/receipts/elf-host.json").unlink()
    held = attempt(world, ACTIONS["compile"])
    assert (held.wrong, held.refused) == ("", "") and library.read_bytes() == content


def test_a_memory_of_digests_of_somebody_else_is_not_read(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_all(world)
    memory = world.artifacts / ".digests.json"
    assert Digests(memory)._entries
    weights = next((world.directory / "weights").iterdir())
    lie_about(world, weights, "0" * 64)
    assert Digests(memory)._entries == {}
    compile_all(world)
    assert Digests(memory)._entries
    monkeypatch.setenv(settings.DIRECTORY, str(tmp_path / "another"))
    assert Digests(memory)._entries == {}
    trust.own_mac(b"", "")
    assert Digests(memory)._entries == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("content", ["[]", "{}", '{"known": 1, "mac": 2}', '{"known": {"a": 1}, "mac": ""}', "{"])
def test_a_damaged_memory_of_digests_counts_as_none(content: str, world: World) -> None:
    memory = world.artifacts / ".digests.json"
    memory.unlink()
    memory.write_text(content)
    assert Digests(memory)._entries == {}
    assert not attempt(world, ACTIONS["compile"]).wrong


def test_a_memory_of_another_shape_is_read_as_none(world: World) -> None:
    """It was written by this user, with another version of the project."""
    memory = world.artifacts / ".digests.json"
    memory.unlink()
    known: dict[str, list] = {"imports x": [1, 2]}
    memory.write_text(json.dumps({"known": known, "mac": trust.own_mac(_canonical(known), "digests 1")}))
    assert Digests(memory)._entries == {}


# Directories that are links are a supported use


def test_a_model_on_another_disk(world: World, tmp_path: Path) -> None:
    """It is built, run and listed; gc removes nothing of it."""
    elsewhere = tmp_path / "disk"
    (world.artifacts / "model").rename(elsewhere)
    (world.artifacts / "model").symlink_to(elsewhere)
    (elsewhere / "cpu/elf/host.so").unlink()
    (elsewhere / "cpu/weights/old.safetensors").write_text("left")
    age(elsewhere)
    assert not attempt(world, ACTIONS["compile"]).wrong
    assert (elsewhere / "cpu/elf/host.so").exists()
    for action in ("run", "gc", "du"):
        held = attempt(world, ACTIONS[action])
        assert (held.wrong, held.refused) == ("", "")
    assert (elsewhere / "cpu/weights/old.safetensors").exists() and OLD > 0
