"""What somebody could do to artifacts on their way: refused with the reason, before any native code is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest

from llama_npu2 import load, trust
from llama_npu2.__main__ import main
from llama_npu2.artifact.check import check_files
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.storage import File
from llama_npu2.devices import libraries
from llama_npu2.errors import UserError
from llama_npu2.trust import settings
from stages.commands import provenance as provenance_command
from stages.commands import trust as trust_command
from stages.engine.object_cache import cached_object
from stages.graph import Build
from stages.graph.options import parse_options
from stages.sharing.provenance import signed
from tests.conftest import ROOT, Become, change_manifest

HOST = "elf/host.so"
Attack = Callable[[Path], object]


@pytest.fixture(scope="session")
def pristine(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model's artifacts, signed by anna, who is somebody else; nothing says that they are own."""
    directory = tmp_path_factory.mktemp("anna") / "cpu"
    shutil.copytree(demo, directory, copy_function=os.link)
    (directory / trust.LOCAL).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(settings.DIRECTORY, str(directory.with_name("config")))
        (directory / trust.SIGNATURE).write_bytes(signed(directory))
        trust.mark_own(directory.parent, (directory / "manifest.json").read_bytes())
    return directory


@pytest.fixture
def arrived(pristine: Path, tmp_path: Path, become: Become) -> Path:
    """A copy of that, whose files may be links, at ben's, who trusts anna."""
    key = trust.PublicKey.parse((pristine.parent / "config" / "signing_key.pub").read_text())
    become("ben")
    trust.add_key(key, "Anna")
    return shutil.copytree(pristine, tmp_path / "arrived/cpu", copy_function=os.link)


def replace(name: str, change: Callable[[bytes], bytes]) -> Attack:
    """Another file in place of one, whose other names keep what they have."""

    def attack(directory: Path) -> None:
        content = change((directory / name).read_bytes())
        (directory / name).unlink()
        (directory / name).write_bytes(content)

    return attack


def flip(name: str) -> Attack:
    return replace(name, lambda content: content[:-1] + bytes([content[-1] ^ 1]))


def exchange(one: str, other: str) -> Attack:
    def attack(directory: Path) -> None:
        (directory / one).rename(directory / "x")
        (directory / other).rename(directory / one)
        (directory / "x").rename(directory / other)

    return attack


def special(name: str, make: Attack) -> Attack:
    def attack(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return attack


def behind_a_link(name: str) -> Attack:
    """What it leads to is, for now, what it must be."""

    def attack(directory: Path) -> None:
        (directory / name).rename(directory.parents[1] / "outside")
        (directory / name).symlink_to(directory.parents[1] / "outside")

    return attack


def marked_by_another(directory: Path) -> None:
    """With the mark of who built it, which says nothing to others."""
    (directory / trust.SIGNATURE).unlink()
    (directory / trust.LOCAL).write_bytes((directory.parents[1] / "mark").read_bytes())


def marked_for_another(directory: Path) -> None:
    """With a mark that ben has made, of something else."""
    (directory / trust.SIGNATURE).unlink()
    trust.mark_own(directory, b"{}")


def signed_for_the_cache(directory: Path) -> None:
    """By anna's key, and the right statement: but as what the cache holds."""
    envelope = json.loads((directory / trust.SIGNATURE).read_text())
    envelope["payloadType"] = "application/vnd.llama-npu2.step"
    (directory / trust.SIGNATURE).unlink()
    (directory / trust.SIGNATURE).write_text(json.dumps(envelope))


def older(directory: Path) -> None:
    """Somebody takes a program back to an older one, and keeps the signature."""
    manifest = directory / "manifest.json"
    content = json.loads(manifest.read_text())
    content["format"] -= 1
    manifest.unlink()
    manifest.write_text(json.dumps(content))


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NOT_LOADED: dict[str, tuple[Attack, str]] = {
    "not signed": (special(trust.SIGNATURE, lambda path: None), "not built by you, and it is not signed"),
    "mark of who built it": (marked_by_another, "not built by you"),
    "own mark of something else": (marked_for_another, "not built by you"),
    "bit of the manifest": (replace("manifest.json", lambda c: c.replace(b'"seq"', b'"sep"', 1)), "manifest"),
    "blank behind the manifest": (replace("manifest.json", lambda c: c + b" "), "not about this manifest"),
    "older version": (older, "reads format"),
    "signature of something else": (signed_for_the_cache, "it is for 'application/vnd.llama-npu2.step'"),
    "bit of the signature": (flip(trust.SIGNATURE), "not signed correctly"),
    "signature cut": (replace(trust.SIGNATURE, lambda c: c[: len(c) // 2]), "it is not JSON"),
    "signature without end": (special(trust.SIGNATURE, sparse), "bytes"),
    "signature that nests": (replace(trust.SIGNATURE, lambda c: b"[" * 200_000), "it is not JSON"),
    "signature that is a pipe": (special(trust.SIGNATURE, os.mkfifo), "it is not signed"),
    "signature that is a device": (special(trust.SIGNATURE, lambda path: path.symlink_to("/dev/zero")), "not signed"),
    "manifest that is a pipe": (special("manifest.json", os.mkfifo), "has no manifest.json"),
    "manifest that nests": (replace("manifest.json", lambda c: b'{"a":' * 200_000), "manifest.json"),
    "bit of host programs": (flip(HOST), "host.so is not what was built"),
    "bit of a program": (flip("elf/o_ffn.so"), "o_ffn.so is not what was built"),
    "programs exchanged": (exchange("elf/o_ffn.so", "elf/o_gemv_ffn.so"), "o_ffn.so"),
    "program cut": (replace("elf/o_ffn.so", lambda c: c[:-1]), "bytes instead of"),
    "program longer": (replace("elf/o_ffn.so", lambda c: c + b"\0"), "bytes instead of"),
    "program without end": (special("elf/o_ffn.so", sparse), "bytes instead of"),
    "program that is a pipe": (special("elf/o_ffn.so", os.mkfifo), "o_ffn.so is missing"),
    "program that is a device": (special("elf/o_ffn.so", lambda p: p.symlink_to("/dev/zero")), "o_ffn.so is missing"),
    "program that is a directory": (special("elf/o_ffn.so", Path.mkdir), "o_ffn.so is missing"),
    "program behind a link": (behind_a_link("elf/o_ffn.so"), "o_ffn.so is a link out of the directory"),
    "programs behind a link": (behind_a_link("elf"), "is a link out of the directory"),
    "name in other case": (lambda d: (d / HOST).rename(d / "elf/HOST.so"), "host.so is missing"),
    "name in other Unicode": (lambda d: (d / HOST).rename(d / "elf/h\u043est.so"), "host.so is missing"),
}


def refused(action: Callable[[], object], complaint: str, made: Collection[str] = ()) -> None:
    """In one line, and no library is loaded but those that were `made` (SHA-256) by a trusted signer."""
    before = set(libraries._loaded)
    with pytest.raises(UserError) as caught:
        action()
    assert complaint in str(caught.value)
    assert str(caught.value).isprintable()
    assert set(libraries._loaded) - before <= set(made)


def test_what_a_trusted_signer_made_runs(arrived: Path) -> None:
    llm = load(arrived, 1)
    assert "".join(llm.generate("The capital of France is", raw=True, max_tokens=1)) == " Paris"
    llm.close()


@pytest.mark.parametrize("name", NOT_LOADED)
def test_not_loaded(name: str, arrived: Path, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack, complaint = NOT_LOADED[name]
    monkeypatch.setattr(libraries, "_loaded", {})
    shutil.copy(pristine.parent / trust.LOCAL, tmp_path / "mark")
    attack(arrived)
    files = Manifest.open(pristine).files.values()
    refused(lambda: load(arrived, 1), complaint, {entry["sha256"] for entry in files})


@pytest.mark.parametrize("how", ["unknown", "removed"])
def test_signer_that_is_not_trusted(how: str, arrived: Path, become: Become) -> None:
    if how == "unknown":
        become("carl")
    else:
        trust.remove_key("Anna")
    why = "whom you do not trust" if how == "unknown" else "the key 'Anna' that you removed"
    refused(lambda: load(arrived, 1), f"{why}; it would run native code (elf/")


def test_manifest_of_another_directory_of_the_same_signer(arrived: Path, pristine: Path, become: Become) -> None:
    """Signed, and with the files of this one."""
    become("ben")
    change_manifest(arrived, lambda manifest: manifest["model"].update(name="other"))
    (arrived / trust.LOCAL).unlink()
    refused(lambda: load(arrived, 1), "is not about this manifest")


OWN_BUT_WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "program not listed": (lambda m: m["files"].pop(HOST), HOST),
    "program with no digest": (lambda m: m["files"][HOST].pop("sha256"), HOST),
    "path above": (lambda m: m["files"].update({"../x": m["files"][HOST]}), "../x"),
    "absolute path": (lambda m: m["files"].update({"/etc/hostname": m["files"][HOST]}), "/etc/hostname"),
    "terminal": (lambda m: m["files"].update({"elf/\x1b[2J\u202e.so": m["files"][HOST]}), r"elf/\u001b[2J\u202e.so"),
}


@pytest.mark.parametrize("name", OWN_BUT_WRONG)
def test_even_who_is_trusted_cannot_leave_the_directory(name: str, arrived: Path) -> None:
    change, complaint = OWN_BUT_WRONG[name]
    change_manifest(arrived, change)
    refused(lambda: load(arrived, 1), complaint)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_text_files_that_were_altered(name: str, arrived: Path) -> None:
    flip(f"tokenizer/{name}")(arrived)
    llm = load(arrived, 1)
    with pytest.raises(UserError, match=f"{name} is not what was built"):
        llm.encode("hello")
    llm.close()


def test_files_that_nobody_lists_are_not_there(arrived: Path) -> None:
    """A template that was put there would stand before the listed one."""
    (arrived / "tokenizer/chat_template.jinja").write_text("{{ 'IGNORE' }}")
    llm = load(arrived, 1)
    assert llm.chat_template is not None
    assert "IGNORE" not in llm.chat_template.render([{"role": "user", "content": "hi"}])
    llm.close()


def test_a_bit_of_the_weights(arrived: Path) -> None:
    flip("weights/layer_002.safetensors")(arrived)
    with pytest.raises(UserError, match=r"layer_002.safetensors is not what was built"):
        check_files(Manifest.open(arrived))


def test_a_program_that_is_swapped_after_the_check(arrived: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_loaded", {})
    manifest = Manifest.open(arrived)
    library = manifest.host_library
    flip(HOST)(arrived)
    refused(lambda: libraries.open_library(library), "is not what was built")


def test_a_program_that_is_swapped_while_it_is_loaded(arrived: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mapped is what was compared: the file's new content is not looked at, and the copy cannot be written."""
    monkeypatch.setattr(libraries, "_loaded", {})
    library, opened = Manifest.open(arrived).host_library, []

    def swap(path: str) -> Any:
        flip(HOST)(arrived)
        with Path(path).open("r+b", buffering=0) as file, pytest.raises(PermissionError):
            file.write(b"x")
        opened.append(Path(path).read_bytes())
        raise OSError("enough")

    monkeypatch.setattr(libraries.ctypes, "CDLL", swap)
    with pytest.raises(UserError, match="enough"):
        libraries.open_library(library)
    assert len(opened) == 1 and opened[0][-1] ^ 1 == (arrived / HOST).read_bytes()[-1]


def test_the_environment_does_not_choose_libraries(arrived: Path, tmp_path: Path) -> None:
    """Not by the loader's search path, the working directory, or names that shadow the runtime's files."""
    for place in (tmp_path, tmp_path / "elf"):
        place.mkdir(exist_ok=True)
        (place / "host.so").write_bytes(b"not this one")
    run = subprocess.run(
        [sys.executable, "-m", "llama_npu2", arrived, "The capital of France is", "--raw", "--max-tokens=1"],
        cwd=tmp_path,
        env=os.environ | {"LD_LIBRARY_PATH": f"{tmp_path}:elf", "PYTHONPATH": str(ROOT / "runtime")},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (0, " Paris\n")


def test_hard_links_do_not_lead_out(arrived: Path, tmp_path: Path, become: Become) -> None:
    """Marking a directory as trusted writes a file of its own, whatever had the name."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (arrived / trust.LOCAL).hardlink_to(precious)
    trust.mark_own(arrived, b"{}")
    assert precious.read_text() == "mine"


# Builds that go on from what somebody else made


def build_of(arrived: Path) -> Build:
    """With `arrived` as the artifacts of the shipped model."""
    artifacts = arrived.parent.rename(arrived.parents[1] / "demo").parent
    return Build(parse_options({"artifacts": str(artifacts), "target": "cpu"}))


FOREIGN: dict[str, tuple[Attack, str]] = {
    "nobody signed it": (special(trust.SIGNATURE, lambda path: None), "manifest"),
    "object exchanged": (flip("build/objects/cpu/gemm.portable/gemm.portable.o"), "object:cpu/gemm.portable"),
    "source altered": (replace("build/modules/host.cc", lambda c: c + b"// x"), "module:host"),
    "program altered": (flip("elf/o_ffn.so"), "elf:o_ffn"),
}


def forge(directory: Path) -> None:
    """Let every receipt say what is there, as far as that can be done without a key."""
    from stages.engine.files import content_digest

    for path in (directory / "build/receipts").glob("*.json"):
        receipt = json.loads(path.read_text())
        receipt["outputs"] = {label: content_digest(directory / label) for label in receipt["outputs"]}
        del receipt["xxh3"]  # an older receipt has none
        receipt["sizes"] = {label: (directory / label).stat().st_size for label in receipt["outputs"]}
        receipt["inputs"] |= {
            label: content_digest(directory / label) for label in receipt["inputs"] if (directory / label).is_file()
        }
        path.unlink()
        path.write_text(json.dumps(receipt))


@pytest.mark.parametrize("name", FOREIGN)
def test_steps_do_not_take_what_nobody_vouches_for(name: str, arrived: Path) -> None:
    attack, step = FOREIGN[name]
    attack(arrived)
    forge(arrived)
    build = build_of(arrived)
    why = build.steps[step].why_stale()
    assert why == "was not built by you, and nobody whom you trust signed it"
    failed = build.steps[step].run()
    assert failed and "doit trust key=" in failed.message


def test_steps_take_what_a_trusted_signer_vouches_for(arrived: Path) -> None:
    build = build_of(arrived)
    assert {step.name: why for step in build.steps.values() if (why := step.why_stale())} == {}
    before = {path: path.stat().st_ino for path in build.directory.iterdir()}
    build.finish()
    assert {path: path.stat().st_ino for path in build.directory.iterdir()} == before, "who signed it is still named"


def test_links_in_a_build_directory_lead_nowhere(arrived: Path, tmp_path: Path) -> None:
    build = build_of(arrived)
    (tmp_path / "outside").mkdir()
    shutil.rmtree(build.directory / "elf")
    (build.directory / "elf").symlink_to(tmp_path / "outside")
    failed = build.steps["elf:o_ffn"].run()
    assert failed and "lies behind a link out of" in failed.message
    build.steps["elf:o_ffn"].clean()
    assert list((tmp_path / "outside").iterdir()) == []


def test_receipts_do_not_remove_files_elsewhere(arrived: Path, tmp_path: Path) -> None:
    """Of a step that is no more, whose outputs lie behind a link."""
    build = build_of(arrived)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/precious").write_text("mine")
    (build.directory / "gone").symlink_to(tmp_path / "outside")
    receipt = {"key": {}, "declared": [], "inputs": {}, "outputs": {"gone/precious": ""}}
    (build.directory / "build/receipts/gone.json").write_text(json.dumps(receipt))
    with pytest.raises(UserError, match="behind a link"):
        build.project.prune(build.steps)
    assert (tmp_path / "outside/precious").read_text() == "mine"


def test_objects_that_somebody_put_into_the_cache(tmp_path: Path, become: Become) -> None:
    become("ben")
    made = []

    def make(path: Path) -> list[Path]:
        path.write_bytes(b"own")
        made.append(path)
        return []

    cached = cached_object(tmp_path / "cache", "x", "c++", [], make)
    assert cached_object(tmp_path / "cache", "x", "c++", [], make) == cached and len(made) == 1
    assert made[0].name.startswith("."), "copies of the cache leave out an object that is not whole"
    become("carl")
    assert cached_object(tmp_path / "cache", "x", "c++", [], make).path.read_bytes() == b"own"
    assert len(made) == 2, "an entry of another user is made again"
    cached.path.write_bytes(b"bad")
    assert cached_object(tmp_path / "cache", "x", "c++", [], make).path.read_bytes() == b"own"


def test_a_file_without_digest_is_refused(arrived: Path) -> None:
    with pytest.raises(UserError, match="is not what was built"):
        File(arrived / HOST, arrived / HOST, 0, 4, "").read_bytes()


# What users say about it


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit status and output, whichever, of the slim command line."""
    status = main(list(map(str, arguments)))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_allowing_a_directory(arrived: Path, become: Become, capsys: pytest.CaptureFixture[str]) -> None:
    """As the refusal says, and just as it is."""
    (arrived / trust.SIGNATURE).unlink()
    status, text = said(capsys, arrived, "hi")
    assert status == 1 and f"llama-npu2 trust {arrived} allows just this directory" in text
    status, text = said(capsys, "trust", arrived)
    native = len(list((arrived / "elf").iterdir()))
    assert (status, text) == (0, f"trusted as it is: {arrived}, with {native} files of native code\n")
    assert said(capsys, arrived, "1, 2, 3,", "--raw", "--max-tokens=2")[1].startswith(" 4")
    become("carl")
    assert said(capsys, arrived, "hi")[0] == 1


def test_allowing_a_signer(arrived: Path, become: Become, capsys: pytest.CaptureFixture[str]) -> None:
    become("carl")
    refusal = said(capsys, arrived, "hi")[1]
    key = re.search(r"llama-npu2 trust '(ssh-ed25519 \S+)' allows all that it signs", refusal)
    assert key
    assert said(capsys, "trust", key[1], "--name", "Anna")[0] == 0
    assert re.search(r"trusted: SHA256:\S+ Anna\n", said(capsys, "trust")[1])
    assert said(capsys, arrived, "1, 2, 3,", "--raw", "--max-tokens=2")[1].startswith(" 4")
    assert "no longer trusted: Anna" in said(capsys, "trust", "--remove", "Anna")[1]
    assert "that you removed" in said(capsys, arrived, "hi")[1]


def test_allowing_for_one_run(
    arrived: Path, become: Become, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    become("carl")
    monkeypatch.setenv("LLAMA_NPU2_TRUST", "")
    digest = hashlib.sha256((arrived / "manifest.json").read_bytes()).hexdigest()
    run = (arrived, "1, 2, 3,", "--raw", "--max-tokens=2")
    assert said(capsys, *run, f"--trust=sha256:{digest}")[1].startswith(" 4")
    monkeypatch.setenv("LLAMA_NPU2_TRUST", "")
    assert said(capsys, *run, f"--trust=sha256:{'0' * 64}")[0] == 1


@pytest.mark.parametrize("what", ["nonsense", "ssh-rsa AAAAB3NzaC1yc2EAAAA", ""])
def test_what_cannot_be_trusted(what: str, become: Become, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    become("ben")
    status, text = said(capsys, "trust", what) if what else said(capsys, "trust", tmp_path)
    assert status == 1 and text.startswith("error: ") and text.count("\n") == 1


def test_a_build_goes_on_from_a_directory_that_was_allowed(arrived: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (arrived / trust.SIGNATURE).unlink()
    build = build_of(arrived)
    assert build.steps["elf:host"].why_stale()
    options = replace_fields(build.options, key=str(build.directory))
    trust_command.run(Build(options))
    assert "trusted as it is" in capsys.readouterr().out
    assert {step.name: why for step in Build(options).steps.values() if (why := step.why_stale())} == {}


def test_provenance_is_what_the_signer_said(arrived: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace("provenance.json", lambda content: content.replace(b'"demo"', b'"else"'))(arrived)
    build = build_of(arrived)
    provenance_command.run(build)
    shown = capsys.readouterr().out
    assert re.search(r"^vouched for by +Anna \(SHA256:", shown, re.M) and re.search(r"^model +demo$", shown, re.M)
    assert re.search(r"^from +checkpoint/model.safetensors [0-9a-f]{16}$", shown, re.M)
    provenance_command.run(Build(replace_fields(build.options, json=True)))
    statement = json.loads(capsys.readouterr().out)
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    manifest = (build.directory / "manifest.json").read_bytes()
    assert statement["subject"][0]["digest"]["sha256"] == hashlib.sha256(manifest).hexdigest()
    byproducts = {entry["name"] for entry in statement["predicate"]["runDetails"]["byproducts"]}
    assert {"elf/host.so", "build/modules/host.cc", "build/objects/cpu/gemm.portable/gemm.portable.o"} <= byproducts


def test_a_measurement_is_signed_if_it_is_of_this_manifest(arrived: Path, become: Become) -> None:
    become("ben")
    digest = hashlib.sha256((arrived / "manifest.json").read_bytes()).hexdigest()
    for manifest, names in ((digest, ["verified.json"]), ("0" * 64, [])):
        (arrived / "verified.json").write_text(json.dumps({"manifest": manifest, "passed": True}))
        payload = json.loads(base64.b64decode(json.loads(signed(arrived))["payload"]))
        made = payload["predicate"]["runDetails"]["byproducts"]
        assert [entry["name"] for entry in made if "annotations" in entry] == names


def test_other_tools_read_what_is_signed(pristine: Path) -> None:
    """The reference implementations of DSSE, in-toto's statement and SLSA's provenance."""
    from google.protobuf.json_format import ParseDict
    from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
    from in_toto_attestation.v1.statement_pb2 import Statement
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey

    content = json.loads((pristine / trust.SIGNATURE).read_text())
    text = content["signatures"][0]["keyid"]
    key = SSlibKey(text, "ed25519", "ed25519", {"public": trust.PublicKey.parse(text).raw.hex()})
    envelope = Envelope.from_dict(content)
    assert list(envelope.verify([key], 1)) == [text]
    said = json.loads(envelope.payload)
    assert ParseDict(said, Statement()).subject[0].name == "manifest.json"
    assert ParseDict(said["predicate"], Provenance()).build_definition.resolved_dependencies
