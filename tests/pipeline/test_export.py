"""`doit export`: one file that runs where it lies, what it holds unchanged, and what happens if it is damaged."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import UserError, errors, load
from llama_npu2.__main__ import main, parse
from llama_npu2.artifact.check import check_files
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.trust import LOCAL
from stages.commands import export as export_module
from stages.commands.export import export, runtime_archive
from stages.graph import Build
from stages.graph.options import parse_options
from stages.weights.blobs import PAGE
from tests.conftest import ROOT
from tests.support.serving import serving

PROMPT = "The capital of France is"


def exported(directory: Path, output: Path) -> Path:
    export(directory, output, {LOCAL: (directory / LOCAL).read_bytes()})
    return output


@pytest.fixture(scope="module")
def one(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model in one file. Not to be changed by a test."""
    return exported(demo, tmp_path_factory.mktemp("export") / "demo.pyz")


def python(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    return subprocess.run([sys.executable, *map(str, command)], cwd="/", env=clean, capture_output=True, text=True)


def test_runs_where_it_lies(one: Path, tmp_path: Path) -> None:
    """From a file that cannot be written, by another name, and without a file of its own."""
    (tmp_path / "tmp").mkdir()
    copy = Path(shutil.copy(one, tmp_path / "copy.pyz"))
    copy.chmod(0o444)
    (tmp_path / "link").symlink_to(copy)
    run = python(tmp_path / "link", PROMPT, "--raw", TMPDIR=str(tmp_path / "tmp"))
    assert (run.returncode, run.stdout) == (0, " Paris.\n"), run.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


def test_same_logits_from_the_file_itself(one: Path, demo: Path) -> None:
    ours, theirs = load(one), load(demo)
    try:
        np.testing.assert_array_equal(ours.prefill([1, 2, 3]), theirs.prefill([1, 2, 3]))
        np.testing.assert_array_equal(ours.decode(4), theirs.decode(4))
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
        assert str(one) in mapped, "weights are mapped, not read"
    finally:
        ours.close()
        theirs.close()


def test_equal_artifacts_make_equal_bytes(one: Path, demo: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    assert exported(copy, tmp_path / "again.pyz").read_bytes() == one.read_bytes()


def test_every_content_begins_at_a_page(one: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of members with sizes of 64 bits, too."""
    monkeypatch.setattr(export_module, "ZIP64_LIMIT", 100_000)
    for path in (one, exported(demo, tmp_path / "large.pyz")):
        manifest = Manifest.open(path)
        assert {manifest.file(name).start % PAGE for name in manifest.files} == {0}
        check_files(manifest)
    assert one.read_bytes() != path.read_bytes()


def test_the_command_line_is_the_runtimes(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["hello", "--raw"], str(one)).artifacts == str(one)
    assert main(["check"], str(one)) == 0
    assert "all as built" in capsys.readouterr().out
    assert main([], str(one)) == 1
    assert capsys.readouterr().err.startswith('error: no prompt: give "some text" after')
    assert main(["check", str(one)]) == 0, "as an artifact directory"


def test_it_serves_with_the_page(one: Path) -> None:
    """The files of the page are read from the file, too."""
    before = f"import sys; sys.path.insert(0, {str(one)!r}); import llama_npu2; assert '.pyz' in llama_npu2.__file__"
    with serving(one, before=before) as server:
        for path, file in (("/", "index.html"), ("/page/page.js", "page.js")):
            found = server.ask(path, Accept="text/html")
            assert found.content == (ROOT / "runtime/llama_npu2/serve/page" / file).read_bytes()


def test_messages_name_the_command_that_works_there(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--chat"], str(one)) == 1
    assert capsys.readouterr().err == f"error: --chat is now a command: python {one} chat\n"
    assert main(["hi", "--nonsense"], str(one)) == 1
    assert f"python {one} run --help" in capsys.readouterr().err
    assert errors.program == "llama-npu2", "what does not run from the file says its own name"


def test_what_python_lacks_is_named(one: Path) -> None:
    run = python("-S", one, PROMPT)
    assert run.returncode == 1
    assert run.stderr.startswith("error: this Python has no numpy, ml_dtypes, tokenizers, jinja2: ")
    assert run.stderr.endswith("-m pip install numpy ml_dtypes tokenizers jinja2\n")


def test_elsewhere_it_is_asked_for(one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_NPU2_CONFIG", str(tmp_path))
    with pytest.raises(UserError, match=r"not built by you.*--trust=sha256:(\w+) allows just this") as refused:
        load(one)
    monkeypatch.setenv("LLAMA_NPU2_TRUST", str(refused.value).partition("--trust=")[2].split()[0])
    load(one).close()


def test_a_file_that_was_cut_off(one: Path, tmp_path: Path) -> None:
    content, cut = one.read_bytes(), tmp_path / "cut.pyz"
    ends = [0, 1, 100, PAGE, len(content) // 2, len(content) - len(runtime_archive()), len(content) - 1]
    for end in ends:
        cut.write_bytes(content[:end])
        with pytest.raises(UserError, match="no whole file of doit export"):
            load(cut)
    cut.write_bytes(content[: len(content) // 2])
    assert "copy it again" in python(cut, PROMPT).stderr


def test_damage_is_refused(one: Path, tmp_path: Path) -> None:
    """Bits of what says where things are, and of native code: it is what was built, or it is not run."""
    content, manifest = one.read_bytes(), Manifest.open(one)
    library = manifest.file("elf/host.so")
    index = len(content) - len(runtime_archive())
    generator, damaged, refused = random.Random(0), tmp_path / "damaged.pyz", 0
    damaged.write_bytes(content)
    for _ in range(200):
        at, bit = generator.randrange(index - 1500, index), 1 << generator.randrange(8)
        with damaged.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ bit]))
        try:
            Manifest.open(damaged).host_library.read_bytes()
        except UserError:
            refused += 1
        with damaged.open("r+b") as file:
            file.seek(at)
            file.write(content[at : at + 1])
    assert refused > 20
    with damaged.open("r+b") as file:
        file.seek(library.start + library.size // 2)
        file.write(b"\xff" * 16)
    with pytest.raises(UserError, match=r"damaged.pyz/elf/host.so is not what was built"):
        Manifest.open(damaged).host_library.read_bytes()


@pytest.mark.parametrize("members", ["artifact", "runtime", "runtime alone"])
@pytest.mark.parametrize("offset", [2**31, 2**62, 2**63, 2**64 - 1])
def test_offsets_beyond_the_file_are_refused(members: str, offset: int, tmp_path: Path) -> None:
    """As a 64-bit extra field of the central directory gives them (APPNOTE.TXT 6.3.10, 4.5.3)."""

    def archive(damaged: bool) -> bytes:
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as file:
            file.writestr("manifest.json", "{}")
            if damaged:
                file.infolist()[0].header_offset = offset
        return content.getvalue()

    damaged = tmp_path / "damaged.pyz"
    artifact = b"" if members == "runtime alone" else archive(members == "artifact")
    damaged.write_bytes(artifact + archive(members != "artifact"))
    with pytest.raises(UserError, match="no whole file of doit export"):
        Manifest.open(damaged)


def test_a_member_that_is_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    whole, artifact = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(artifact, "w") as file:
        file.writestr("manifest.json", "{}")
        file.infolist()[0].file_size = file.infolist()[0].compress_size = 1 << 30
    with zipfile.ZipFile(whole, "w") as file:
        file.writestr("__main__.py", "")
    damaged = tmp_path / "damaged.pyz"
    damaged.write_bytes(artifact.getvalue() + whole.getvalue())
    with pytest.raises(UserError, match=r"manifest.json is not stored as it is\): copy it again"):
        Manifest.open(damaged)


def test_what_is_not_as_built_is_not_exported(demo: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy")
    with (copy / "weights/head.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(UserError, match=r"head.safetensors is not what was built: run doit compile"):
        exported(copy, tmp_path / "out.pyz")
    with pytest.raises(UserError, match=r"none/out.pyz cannot be written: No such file"):
        exported(demo, tmp_path / "none/out.pyz")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"], "nothing is left of it"


def test_signed_for_others(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"artifacts": str(demo.parents[1]), "target": "cpu", "output": str(tmp_path / "demo.pyz")}
    export_module.run(Build(parse_options(options)))
    assert capsys.readouterr().out.startswith(f"{tmp_path}/demo.pyz: ")
    assert Manifest.open(tmp_path / "demo.pyz").signature, "its signature"
    assert os.access(tmp_path / "demo.pyz", os.X_OK)
