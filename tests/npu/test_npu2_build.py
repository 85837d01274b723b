"""Building for the NPU: command lines by a recorder, failures by fakes, and both by the real aircc when it is there."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from llama_npu2.errors import UserError
from stages.air import parse_mlir, to_mlir, toggle_settling
from stages.commands import doctor
from stages.engine.places import KERNELS, OBJECTS
from stages.kernels import kernels
from stages.targets import forget_tools
from stages.targets.cpu import toolchain as host_toolchain
from stages.targets.npu2 import known_good, objects, programs, toolchain
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.levels import VARIABLE, level_of
from stages.targets.npu2.modules import build_module
from stages.targets.npu2.programs import kernel_name
from tests.conftest import ROOT, build, doit, ran
from tests.npu.printed import missing
from tests.support.npu_shapes import DEMO, device_program, device_programs
from tests.support.npu_tools import install, script
from tests.support.objects import PEANO_OBJECT

FACTS = ROOT / "tests/support/aircc_options.txt"


def _hello() -> str:
    add = kernels()["add"]
    assert add.tiling and add.program
    module = add.program(add.tiling({"rows": 64, "cols": 256})).module
    toggle_settling(module)
    return to_mlir(module)


HELLO = _hello()
OBJECT = "add_count2048.o"


@pytest.fixture(autouse=True)
def _fresh_tools() -> Iterator[None]:
    forget_tools()
    yield
    forget_tools()


RECORD = """
if "--version" in args:
    sys.exit(print("fake 22.1.0"))
here = pathlib.Path.cwd()
record = {"args": args, "cwd": str(here), "files": sorted(p.name for p in here.iterdir()), "path": os.environ["PATH"]}
"""
COMPILER = f"""{RECORD}
pathlib.Path(os.environ["RECORD_CC"]).write_text(json.dumps(record))
source = next(a for a in args if a.endswith(".cc"))
if "-D__AIE_API_AIE_ADF_HPP__" not in args:
    sys.exit("aie_api/aie.hpp:12: fatal error: 'adf.h' file not found")
headers = f"{{pathlib.Path(source).with_name('tile.h')}} /opt/api/aie_api/aie.hpp"
pathlib.Path(args[args.index("-MF") + 1]).write_text(f"x.o: {{source}} {{headers}}")
content = peano_object + " ".join(a for a in args if a.startswith("-D")).encode()
pathlib.Path(args[args.index("-o") + 1]).write_bytes(content)
"""
AIRCC = f"""{RECORD}
pathlib.Path(os.environ["RECORD"]).write_text(json.dumps(record))
print(os.environ.get("AIRCC_SAYS", "fine"), file=sys.stderr)
if made := os.environ.get("AIRCC_MAKES"):
    content = made.encode().decode("unicode_escape").encode("latin1")
    pathlib.Path(args[args.index("--elf-name") + 1]).write_bytes(content)
    if "AIRCC_LEAVES" in os.environ:
        leave(args, os.environ["AIRCC_LEAVES"])
exec(os.environ.get("AIRCC_DOES", ""))
sys.exit(int(os.environ.get("AIRCC_STATUS", "0")))
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of every tool, which record what they were asked."""
    root = tmp_path / "tools"
    for name, value in install(root, COMPILER, AIRCC, RECORD).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RECORD", str(root / "record.json"))
    monkeypatch.setenv("RECORD_CC", str(root / "cc.json"))
    monkeypatch.setenv("AIRCC_MAKES", r"\x7fELF..\0add\0")
    monkeypatch.setenv("AIRCC_LEAVES", "lambda text, mlir: text")
    return root


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A module as the graph leaves it: MLIR and what else its compilation needs to know."""
    path = tmp_path / "artifacts/build/modules/hello.128.mlir"
    path.parent.mkdir(parents=True)
    path.write_text(HELLO)
    about = {
        "function": "add",
        "options": ["--debug-ir"],
        "objects": {OBJECT: ["aie2p/add", "-DCOUNT=2048", "-DVARIANT=count2048"]},
    }
    path.with_suffix(".json").write_text(json.dumps(about))
    linked = tmp_path / "artifacts" / OBJECTS / "aie2p/add" / OBJECT
    linked.parent.mkdir(parents=True)
    linked.write_text("an object")
    return path


def make(module: Path, tmp_path: Path) -> list[Path]:
    work = tmp_path / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    return programs.write_program(module, "hello.128", tmp_path / "cache", work)


def options_of(help_text: str) -> set[str]:
    return set(re.findall(r"^\s+(--?[a-z][\w-]*)", help_text, re.MULTILINE))


def _facts() -> dict[str, list[str]]:
    lines = [line.split() for line in FACTS.read_text().splitlines() if line and not line.startswith("#")]
    return {name: kind for name, *kind in lines}


def check_options(arguments: list[str]) -> list[str]:
    """Assert that every option is one of aircc's and has the value it wants; returns what is no option."""
    facts, rest, todo = _facts(), [], list(arguments)
    while todo:
        argument = todo.pop(0)
        name, given, value = argument.partition("=")
        if not argument.startswith("-"):
            rest.append(argument)
            continue
        assert name in facts, f"aircc has no option {name}"
        kind = facts[name]
        if kind == ["flag"]:
            assert not given, argument
        elif kind != ["optional"] and not given:
            value = todo.pop(0)
        if kind in (["list"], ["integer"]):
            assert value.isdigit(), argument
        elif len(kind) > 1:
            assert value in kind, argument
    return rest


# With fakes


def test_elf_is_made_in_its_own_directory(tools: Path, module: Path, tmp_path: Path) -> None:
    assert make(module, tmp_path) == [tmp_path / "artifacts/build/objects/aie2p/add" / OBJECT], "what it linked"
    produced = {p.relative_to(tmp_path / "work").as_posix() for p in (tmp_path / "work").rglob("*") if p.is_file()}
    assert produced == {"elf/hello.128.elf", "elf/hello.128.json", "build/logs/hello.128.log"}
    record = json.loads((tools / "record.json").read_text())
    assert record["files"] == sorted([OBJECT, "air.mlir", "log"]), "the module and its objects, where aiecc looks"
    assert check_options(record["args"]) == ["air.mlir"]
    assert record["args"][record["args"].index("--xclbin-instance-name") + 1] == "add"
    assert "--debug-ir" in record["args"]
    assert str(tools / "other") in record["path"].split(":")


def test_a_program_that_was_made_before_is_not_made_again(tools: Path, module: Path, tmp_path: Path) -> None:
    """Unless something that decides on it has changed, or what was kept has."""

    def made() -> dict[str, bytes]:
        (tools / "record.json").unlink(missing_ok=True)
        make(module, tmp_path)
        work = tmp_path / "work"
        return {path.relative_to(work).as_posix(): path.read_bytes() for path in work.rglob("*") if path.is_file()}

    def asked() -> bool:
        return (tools / "record.json").exists()

    first = made()
    assert asked()
    assert made() == first and not asked()
    for kept in (tmp_path / "cache").glob("*.o"):
        kept.write_bytes(kept.read_bytes()[:-1])
    assert made() == first and asked(), "what was altered is not used"
    (linked,) = make(module, tmp_path)
    linked.write_bytes(linked.read_bytes() + b"more")
    made()
    assert asked(), "it links another object"
    about = json.loads(module.with_suffix(".json").read_text())
    module.with_suffix(".json").write_text(json.dumps(about | {"options": ["--verbose"]}))
    made()
    assert asked(), "aircc has other options"


@pytest.mark.thorough
def test_a_fine_tune_has_the_programs_of_its_model(built: Path, fakes: dict[str, str], tmp_path: Path) -> None:
    """Other weights, another name, other ends of texts: none of these is in a program."""
    first = ran(doit(*COMPILE, cwd=built, env=fakes))
    programs = {name for name in first if name.startswith("elf:") and name != "elf:host"}
    shutil.copytree(built / "models/demo", tuned := built / "models/tuned")
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps(config | {"eos_token_id": 5, "bos_token_id": 6}))
    tensors = load_file(tuned / "model.safetensors")
    save_file({name: tensor[::-1].copy() for name, tensor in tensors.items()}, tuned / "model.safetensors")
    nowhere = fakes | {"SIMULATED": str(tmp_path / "nowhere")}  # so that aircc would fail
    again = doit(COMPILE[0], "model=models/tuned", *COMPILE[2:], cwd=built, env=nowhere)
    assert again.returncode == 0, again.stderr
    assert programs <= ran(again)
    for name in programs:
        one, other = (
            (built / f"artifacts/{model}/npu2/elf/{name.removeprefix('elf:')}.elf").read_bytes()
            for model in ("demo", "tuned")
        )
        assert one == other


def objects_of(module: Path, tmp_path: Path, source: str = "aie2p/add") -> list[Path]:
    work = tmp_path / "objects"
    shutil.rmtree(work, ignore_errors=True)
    return objects.write_objects(source, [module], tmp_path / "cache", work)


def test_objects_are_compiled_for_the_npu_once(
    tools: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # sources are found from anywhere
    read = objects_of(module, tmp_path)
    assert read == [KERNELS / "aie2p/add.cc", KERNELS / "aie2p/tile.h"], "the source and its headers"
    made = tmp_path / "objects" / OBJECTS / "aie2p/add" / OBJECT
    assert made.read_bytes().endswith(b"-DCOUNT=2048 -DVARIANT=count2048")
    arguments = json.loads((tools / "cc.json").read_text())["args"]
    assert {"--target=aie2p-none-unknown-elf", "-O2", "-std=c++20"} <= set(arguments)
    assert f"-I{tools / 'include'}" in arguments
    (tools / "cc.json").unlink()
    objects_of(module, tmp_path)
    assert not (tools / "cc.json").exists(), "it came from the cache"
    for stored in (tmp_path / "cache").glob("*.o"):
        stored.write_text("damaged")
    objects_of(module, tmp_path)
    assert made.read_bytes().endswith(b"-DCOUNT=2048 -DVARIANT=count2048")


def test_objects_of_a_kernel_are_what_modules_ask_for(tools: Path, module: Path, tmp_path: Path) -> None:
    del tools
    other = module.with_name("other.mlir")
    wanted = {f"add_count{n}.o": ["aie2p/add", f"-DCOUNT={n}", f"-DVARIANT=count{n}"] for n in (64, 2048)}
    wanted["rope_hd64.o"] = ["aie2p/rope", "-DHD=64", "-DVARIANT=hd64"]
    other.with_suffix(".json").write_text(json.dumps({"objects": wanted}))
    objects.write_objects("aie2p/add", [module, other], tmp_path / "cache", tmp_path / "work")
    assert {p.name for p in (tmp_path / "work" / OBJECTS).rglob("*.o")} == {"add_count64.o", OBJECT}
    assert objects_of(module, tmp_path, "aie2p/rope") == [], "nothing asks for it"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_every_program_gets_options_that_aircc_has(tools: Path, grouping: str) -> None:
    del tools
    for program in device_programs(grouping):
        built = build_module(program, DEMO.dimensions())
        command = programs.command_line(programs.Job(program.name, "", built.name, built.options))
        assert check_options(command[1:]) == ["air.mlir"]
        assert command[command.index("--xclbin-instance-name") + 1] == program.entry


# The graph, with fakes that keep what matters: an object is its source without comments, an ELF what is simulated

FAKE_PEANO = """
if "--version" in args:
    sys.exit(print("fake 22.1.0"))
source = pathlib.Path(next(a for a in args if a.endswith(".cc")))
text = [a for a in args if a.startswith(("-D", "-O"))]
for line in source.read_text().splitlines():
    code, _, comment = line.partition("//")
    if code and (not comment.startswith(" only ") or comment[6:] in args):
        text.append(code)
pathlib.Path(args[args.index("-o") + 1]).write_bytes(peano_object + "\\n".join(text).encode())
pathlib.Path(args[args.index("-MF") + 1]).write_text(f"x.o: {source} {source.with_name('tile.h')}")
"""
FAKE_AIRCC = """
if "--version" in args:
    sys.exit(print("fake 22.1.0"))
name = args[args.index("--xclbin-instance-name") + 1]
made = [p for p in pathlib.Path(os.environ["SIMULATED"]).iterdir() if p.name in (f"{name}.so", f"{name}.64.so")]
objects = [p.read_bytes() for p in sorted(pathlib.Path.cwd().glob("*.o"))]
pathlib.Path(args[args.index("--elf-name") + 1]).write_bytes(made[0].read_bytes() + b"".join(objects))
leave(args, "lambda text, mlir: text")
"""
FAKE_AIEBU = """
if "--version" in args:
    sys.exit(print("fake 1.0"))
name = json.loads(pathlib.Path(args[args.index("-j") + 1]).read_text())["xrt-kernels"][0]["name"]
facts = b"llama-npu2-standin:" + json.dumps({"kernel": name}).encode()
content = pathlib.Path("out.elf").read_bytes() + f"_Z{len(name)}{name}Pc".encode()
pathlib.Path(args[args.index("-o") + 1]).write_bytes(content + facts)
sys.exit(int(os.environ.get("AIEBU_STATUS", "0")))
"""
COMPILE = ("compile", "model=models/demo", "target=npu2", "npu.buckets=64")
LINKS_SILU = {f"elf:{name}" for name in ("prefill_up.64", "decode_layer", "decode_last")}


@pytest.fixture
def fakes(tmp_path: Path, artifacts: Path) -> dict[str, str]:
    """An environment with everything that builds for the NPU."""
    root = tmp_path / "fakes"
    simulated = build("demo", artifacts, target="npu2-sim", buckets="64,128") / "elf"
    script(root / "bin/aiebu-asm", FAKE_AIEBU)
    return install(root, FAKE_PEANO, FAKE_AIRCC, FAKE_AIRCC) | {"SIMULATED": str(simulated)}


@pytest.mark.thorough
def test_a_changed_tile_function_reaches_the_elfs_that_link_it(built: Path, fakes: dict[str, str]) -> None:
    first = ran(doit(*COMPILE, cwd=built, env=fakes))
    assert {"object:aie2p/gemm", "object:aie2p/silu_and_mul", "elf:rms_gemv_rope", "manifest"} | LINKS_SILU <= first
    assert ran(doit(*COMPILE, cwd=built, env=fakes)) == set()
    source = built / "kernel_src/aie2p/silu_and_mul.cc"
    source.write_text(source.read_text() + "\n// a comment\n")
    assert ran(doit(*COMPILE, cwd=built, env=fakes)) == {"object:aie2p/silu_and_mul"}
    source.write_text(source.read_text() + "int more;\n")
    assert ran(doit(*COMPILE, cwd=built, env=fakes)) == {"object:aie2p/silu_and_mul", "manifest"} | LINKS_SILU
    (wide,) = {name for name in _linked(built, "prefill_up.64") if name.startswith("silu")}
    flag = f"-DCOUNT={wide.removeprefix('silu_and_mul_count').removesuffix('.o')}"
    source.write_text(source.read_text() + f"int wide; // only {flag}\n")
    changed = {"object:aie2p/silu_and_mul", "elf:prefill_up.64", "manifest"}
    assert ran(doit(*COMPILE, cwd=built, env=fakes)) == changed, "decode links another variant"
    header = built / "kernel_src/aie2p/tile.h"
    header.write_text(header.read_text() + "\n// a comment\n")
    objects = {task for task in first if task.startswith("object:aie2p/")}
    assert ran(doit(*COMPILE, cwd=built, env=fakes)) == objects


@pytest.mark.thorough
def test_a_level_of_its_own_rebuilds_one_source(built: Path, fakes: dict[str, str]) -> None:
    ran(doit(*COMPILE, cwd=built, env=fakes))
    chosen = fakes | {VARIABLE: "silu_and_mul=1"}
    assert ran(doit(*COMPILE, cwd=built, env=chosen)) == {"object:aie2p/silu_and_mul", "manifest"} | LINKS_SILU
    made = (built / "artifacts/demo/npu2" / OBJECTS / "aie2p").rglob("*.o")
    levels = {(path.parent.name == "silu_and_mul", b"-O1" in path.read_bytes()) for path in made}
    assert levels == {(True, True), (False, False)}
    assert ran(doit(*COMPILE, cwd=built, env=chosen)) == set()
    assert ran(doit(*COMPILE, cwd=built, env=fakes)) == {"object:aie2p/silu_and_mul", "manifest"} | LINKS_SILU


@pytest.mark.parametrize(
    "text", ["silu=1", "silu_and_mul", "silu_and_mul=9", "=1", "silu_and_mul=1 rope=2", "../cpu/add=1"]
)
def test_levels_that_name_nothing_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(
        UserError, match=rf"^{VARIABLE}: \S+ is not SOURCE=LEVEL, a name in kernel_src/aie2p and 0 to 3$"
    ):
        level_of("aie2p/add")


def test_levels_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "silu_and_mul=1, rope=3")
    monkeypatch.setattr("stages.targets.npu2.levels.LEVELS", {"rope": "1", "gemm": "1"})
    sources = ("silu_and_mul", "rope", "gemm", "add")
    assert [level_of(f"aie2p/{source}") for source in sources] == ["1", "3", "1", "2"]


ROOMLESS = """
said = pathlib.Path(os.environ["RECORD"]).with_name("aiecc.json")
driver = next(p for p in map(pathlib.Path, os.environ["PATH"].split(":")) if (p / "aiecc").exists())
said.write_text(json.dumps([str(driver), os.path.realpath(driver / "aiecc"), (driver / "aiecc").read_text()]))
if "--alloc-scheme=basic-sequential" not in (driver / "aiecc").read_text():
    sys.exit("ld.lld: error: section '.data' will not fit in region 'data': overflowed by 128 bytes")
"""


def test_static_data_without_room_is_linked_with_buffers_in_a_row(
    tools: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bank by bank, buffers can fill the last bank while others have room."""
    monkeypatch.setenv("AIRCC_DOES", ROOMLESS)
    make(module, tmp_path)
    assert "hello.128: no room after the buffers for static data, linked again" in logged(tmp_path)
    _, _, script_text = json.loads((tools / "aiecc.json").read_text())
    assert f'exec {tools / "other/aiecc"} --alloc-scheme=basic-sequential "$@"' in script_text
    monkeypatch.setenv("AIRCC_DOES", ROOMLESS.replace("--alloc-scheme=basic-sequential", "nothing"))
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(
        UserError, match=r"aircc: ld\.lld: error: section '\.data' will not fit in region 'data'.*: raise STATIC_BYTES"
    ):
        make(module, tmp_path)


def _linked(checkout: Path, program: str) -> set[str]:
    return set(json.loads((checkout / f"artifacts/demo/npu2/build/modules/{program}.json").read_text())["objects"])


@pytest.mark.thorough
def test_artifacts_of_another_machine_need_no_tools(built: Path, fakes: dict[str, str], tmp_path: Path) -> None:
    """Copied into a checkout on a machine that has nothing but Python and XRT: no task runs, text comes."""
    ran(doit(*COMPILE, cwd=built, env=fakes))
    other = tmp_path / "other"
    shutil.copytree(built, other, ignore=shutil.ignore_patterns("artifacts"))
    shutil.copytree(built / "artifacts/demo/npu2", other / "artifacts/demo/npu2")
    (other / "pyxrt.py").write_text("import tests.support.pyxrt_standin\n")
    (tmp_path / "empty").mkdir()
    nothing = dict.fromkeys(("PEANO_INSTALL_DIR", "AIE_API_INCLUDE", "CXX", "PATH"), str(tmp_path / "empty"))
    bindings = {"PYTHONPATH": f"{other}{os.pathsep}{ROOT}", "PYXRT_STANDIN": "{}", "TMPDIR": str(tmp_path)}
    assert ran(doit(*COMPILE, cwd=other, env=nothing)) == set()
    prompt = ("run", *COMPILE[1:], "prompt=The capital of France is", "raw=1", "max_tokens=4")
    run = doit(*prompt, cwd=other, env=nothing | bindings)
    assert (run.returncode, run.stdout.partition(".")[0]) == (0, " Paris"), run.stderr


FAILURES: dict[str, tuple[dict[str, str], str]] = {
    "error": (
        {"AIRCC_STATUS": "1", "AIRCC_SAYS": 'loc("air.mlir":25:5): error: too big\nCompilation failed'},
        r'aircc: loc\("air.mlir":25:5\): error: too big \(in add_herd_2\)',
    ),
    "segment": (
        {"AIRCC_STATUS": "1", "AIRCC_SAYS": "air_project/air.mlir:22:1: error: no room"},
        r"error: no room \(in add_segment_1, launch 2 of 2\)",
    ),
    "silent": ({"AIRCC_STATUS": "3", "AIRCC_SAYS": ""}, "aircc: no message"),
    "no elf": ({"AIRCC_MAKES": "", "AIRCC_SAYS": "Error: lost"}, "made no ELF, though it reports success: Error: lost"),
    "wrong instance": ({"AIRCC_MAKES": r"\x7fELF..\0other\0"}, "without the program add"),
    "not an elf": ({"AIRCC_MAKES": r"text\0add\0"}, "without the program add"),
    "no instructions": ({"AIRCC_SAYS": "Error generating NPU instructions"}, "an ELF without instructions"),
    "killed": ({"AIRCC_DOES": "os.kill(os.getpid(), 9)"}, "killed, probably for lack of memory.*doit -n 1"),
    "crash": ({"AIRCC_DOES": "os.kill(os.getpid(), 11)"}, "crashed.*SIGSEGV"),
    "slow": ({"AIRCC_DOES": "import time; time.sleep(60)"}, "stopped after 1 s"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("failure", FAILURES)
def test_failure_is_one_line_and_leaves_the_log(
    tools: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    del tools
    environment, message = FAILURES[failure]
    monkeypatch.delenv("AIRCC_LEAVES")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(programs, "TIME_LIMIT", 1)
    with pytest.raises(UserError, match=message) as caught:
        make(module, tmp_path)
    log = tmp_path / "artifacts/build/logs/hello.128.log"
    assert str(caught.value).startswith("hello.128: ")
    assert str(log) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "--xclbin-instance-name add" in log.read_text()


def test_a_crash_of_the_compiler_is_tried_again(
    tools: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tools
    once = f"open({str(tmp_path / 'crashed')!r}, 'x'); os.kill(os.getpid(), 11)"
    monkeypatch.setenv("AIRCC_DOES", f"os.path.exists({str(tmp_path / 'crashed')!r}) or exec({once!r})")
    make(module, tmp_path)
    assert "hello.128: aircc crashed (SIGSEGV), tried again" in logged(tmp_path)


def told(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "work/elf/hello.128.json").read_text())
    return found


def logged(tmp_path: Path) -> str:
    return (tmp_path / "work/build/logs/hello.128.log").read_text()


_DOUBLED = 'lambda text, mlir: re.sub("( +aiex.dma_start_task.*\\n)", r"\\1\\1", text, count=3)'
_RESET = "      aiex.npu.load_pdi {device_ref = @add_segment_1_reset}\\n    }\\n  } {dlti"
_RESET_FIRST = f'lambda text, mlir: text.replace("    }}\\n  }} {{dlti", "{_RESET}", 1)'


def test_what_would_compute_garbage_is_refused_and_leaves_the_log(
    tools: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tools
    monkeypatch.setenv("AIRCC_LEAVES", _DOUBLED)
    with pytest.raises(
        UserError, match=r"^hello.128, launch 2 of 2 .* reads 45056 bytes of a, the module says"
    ) as caught:
        make(module, tmp_path)
    log = tmp_path / "artifacts/build/logs/hello.128.log"
    assert str(log) in str(caught.value) and "reads 45056 bytes of a" in log.read_text()
    assert not (tmp_path / "work/elf").exists()


def test_an_odd_number_of_resets_is_linked_again(
    tools: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler adds resets which the launches do not tell: the one that settled them goes."""
    monkeypatch.setenv("AIRCC_LEAVES", _RESET_FIRST)
    make(module, tmp_path)
    assert (told(tmp_path)["resets"], told(tmp_path)["launches"], told(tmp_path)["settled"]) == (2, 1, False)
    assert "hello.128: 3 resets of the array a dispatch, an odd number: linked again" in logged(tmp_path)
    assert json.loads((tools / "record.json").read_text())["files"] == sorted([OBJECT, "air.mlir", "log"])


def test_a_launch_more_is_linked_where_it_is_missing(tools: Path, module: Path, tmp_path: Path) -> None:
    del tools
    unsettled = parse_mlir(HELLO)
    toggle_settling(unsettled)
    module.write_text(to_mlir(unsettled))
    make(module, tmp_path)
    assert (told(tmp_path)["resets"], told(tmp_path)["settled"]) == (2, True)


def test_resets_that_stay_odd_are_refused(
    tools: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tools
    only_settled = f'lambda text, mlir: ({_RESET_FIRST})(text, mlir) if "settle" in mlir else text'
    monkeypatch.setenv("AIRCC_LEAVES", only_settled)
    with pytest.raises(
        UserError, match=r"^hello.128: resets the array 1 times a dispatch, which must be even: the whole"
    ):
        make(module, tmp_path)


def test_a_stream_that_the_heap_cannot_hold_is_refused(
    tools: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tools
    monkeypatch.setattr(programs, "RUNS_SHARE", 1024)
    with pytest.raises(UserError, match=r"^hello.128: needs \d+ of bytes of the NPU's heap for runs, the NPU has 1024"):
        make(module, tmp_path)


def assembler(tools: Path, body: str) -> None:
    script(tools / "bin/aiebu-asm", f"if '--version' in args:\n    sys.exit(print('fake 1.0'))\n{body}")
    forget_tools()


_ASSEMBLE = """
config = json.loads(pathlib.Path(args[args.index("-j") + 1]).read_text())
(kernel,) = config["xrt-kernels"]
assert args[:2] == ["-t", "aie2_config"] and [one["id"] for one in kernel["instance"]] == ["add"]
name = kernel["name"]
pathlib.Path(args[args.index("-o") + 1]).write_bytes(f"\\x7fELF..\\0add\\0_Z{len(name)}{name}PcPc".encode("latin1"))
"""


def test_kernels_of_different_programs_have_different_names(tools: Path, module: Path, tmp_path: Path) -> None:
    assembler(tools, _ASSEMBLE)
    make(module, tmp_path)
    assert told(tmp_path)["kernel"] == "hello_128"
    assert b"_Z9hello_128Pc" in (tmp_path / "work/elf/hello.128.elf").read_bytes()
    assert told(tmp_path)["instruction_bytes"] == 16 + 2 * 32, "of the program alone"


NAMELESS = {
    "no assembler": ("", "aiebu-asm is not found"),
    "fails": (f"{_ASSEMBLE}\nsys.exit('no such PDI')", "aiebu-asm ended with 1: no such PDI"),
    "makes nothing": ("pass", "aiebu-asm ended with 0: no message"),
    "another name": (_ASSEMBLE.replace("{len(name)}{name}", "4main"), "aiebu-asm ended with 0: no message"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("why", NAMELESS)
def test_a_kernel_that_cannot_be_renamed_stays_main(
    tools: Path, module: Path, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, said = NAMELESS[why]
    if body:
        assembler(tools, body)
    else:
        monkeypatch.setattr("stages.targets.npu2.programs.aiebu_asm", lambda: None)
    make(module, tmp_path)
    assert told(tmp_path)["kernel"] == "main"
    assert (tmp_path / "work/elf/hello.128.elf").read_bytes() == b"\x7fELF..\0add\0", "as aircc made it"
    assert f"hello.128: its kernel stays main, so that it shares no context: {said}" in logged(tmp_path)


def test_an_assembler_that_comes_later_makes_the_programs_again(tools: Path) -> None:
    before = toolchain.npu_fingerprint()
    assembler(tools, _ASSEMBLE)
    assert before != toolchain.npu_fingerprint()


@pytest.mark.parametrize(
    ("library", "name"), [("decode_layer", "decode_layer"), ("o_ffn.512", "o_ffn_512"), ("7b", "k_7b"), ("_x", "k__x")]
)
def test_names_of_kernels_are_as_cpp_writes_them(library: str, name: str) -> None:
    assert kernel_name(library) == name


def test_stack_is_raised_for_aircc_alone(
    tools: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tools / "stack"
    does = (
        f"import resource; pathlib.Path({str(report)!r}).write_text(str(resource.getrlimit(resource.RLIMIT_STACK)[0]))"
    )
    monkeypatch.setenv("AIRCC_DOES", does)
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_STACK)
    make(module, tmp_path)
    wanted = programs.STACK_BYTES if hard == resource.RLIM_INFINITY else min(programs.STACK_BYTES, hard)
    assert int(report.read_text()) == wanted
    assert resource.getrlimit(resource.RLIMIT_STACK)[0] == before


ON_THE_STACK = "  40: 5b 01 \tvst\tlfl0, [sp, #-128];\tnops\n"
"""As Peano's disassembler shows that a FIFO's state goes to the stack."""


@pytest.mark.parametrize("where", ["in the object", "in the compiler"])
def test_a_fifo_on_the_stack_is_avoided_by_fewer_sums(tools: Path, module: Path, tmp_path: Path, where: str) -> None:
    script(tools / "peano/bin/llvm-objdump", _shows(ON_THE_STACK, unless=b"-DFEWER_ACCUMULATORS"))
    if where == "in the compiler":
        refused = "error in backend: immediate operand value -56 is not a multiple of 64"
        fails = f"if '-DFEWER_ACCUMULATORS=1' not in args: sys.exit('fatal error: {refused}')\n"
        script(tools / "peano/bin/clang++", f"peano_object = {PEANO_OBJECT!r}\n{fails}{COMPILER}")
    objects_of(module, tmp_path)
    assert b"-DFEWER_ACCUMULATORS=1" in (tmp_path / "objects" / OBJECTS / "aie2p/add" / OBJECT).read_bytes()


def test_a_fifo_that_stays_on_the_stack_is_refused(tools: Path, module: Path, tmp_path: Path) -> None:
    script(tools / "peano/bin/llvm-objdump", _shows(ON_THE_STACK))
    with pytest.raises(UserError, match=r"^add_count2048.o: Peano keeps the state of a FIFO .*npu.matmul=bf16$"):
        objects_of(module, tmp_path)


@pytest.mark.parametrize(
    "instruction",
    ["vst x0, [sp, #-64]", "vldb.pop.512 ex0, [p0, lf0, r24]", "vst.push ex2, [p3, sf, r27]", "st r8, [sp]"],
)
def test_other_uses_of_stack_and_fifo_are_fine(tools: Path, module: Path, tmp_path: Path, instruction: str) -> None:
    script(tools / "peano/bin/llvm-objdump", _shows(instruction))
    objects_of(module, tmp_path)
    assert b"FEWER" not in (tmp_path / "objects" / OBJECTS / "aie2p/add" / OBJECT).read_bytes()


def _shows(instruction: str, unless: bytes = b"nothing") -> str:
    """A disassembler that shows an instruction, unless the object was made with a flag."""
    return f"if {unless!r} not in pathlib.Path(args[-1]).read_bytes(): print({instruction!r})"


def test_source_that_does_not_compile(tools: Path, module: Path, tmp_path: Path) -> None:
    body = f"{RECORD}\nprint('add.cc:7:3: error: no such intrinsic\\nnote: x', file=sys.stderr); sys.exit(1)"
    script(tools / "peano/bin/clang++", body)
    with pytest.raises(
        UserError, match=r"add.cc does not compile for the NPU as add_count2048.o: add.cc:7:3: error: no such"
    ):
        objects_of(module, tmp_path)


def test_missing_tools_are_named_in_one_line(
    tools: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert toolchain.npu_fingerprint()
    shutil.rmtree(tools / "bin")
    monkeypatch.setenv("PATH", str(tools / "other"))
    monkeypatch.setenv("PEANO_INSTALL_DIR", str(tmp_path / "nowhere"))
    forget_tools()
    assert toolchain.npu_fingerprint() is None
    for action in (make, objects_of):
        with pytest.raises(
            UserError, match="target npu2 needs aircc, Peano, not found on this machine: see doit doctor"
        ):
            action(module, tmp_path)


# Doctor


@pytest.fixture
def laptop(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a machine that has everything."""
    del tools
    about = tmp_path / "system/sys/class/accel/accel0/device"
    about.mkdir(parents=True)
    (about / "device").write_text("0x17f0\n")
    (about / "revision").write_text("0x11\n")
    (about / "fw_version").write_text("1.1.2.64\n")
    driver = tmp_path / "system/sys/bus/pci/drivers/amdxdna"
    driver.mkdir(parents=True)
    (about / "driver").symlink_to(driver)
    (tmp_path / "system/dev/accel").mkdir(parents=True)
    (tmp_path / "system/dev/accel/accel0").write_text("")
    (tmp_path / "system/opt/xilinx/xrt").mkdir(parents=True)
    (tmp_path / "system/opt/xilinx/xrt/version.json").write_text('{"BUILD_VERSION": "2.23.0"}')
    monkeypatch.delenv("XILINX_XRT", raising=False)
    bindings: Any = types.ModuleType("pyxrt")
    bindings.hw_context = type("hw_context", (), {"add_config": None})
    bindings.runlist = None
    monkeypatch.setitem(sys.modules, "pyxrt", bindings)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path / "system"


def found(rows: list[doctor.Row]) -> dict[str, str]:
    return {row.what: row.found for row in rows}


def test_doctor_on_a_machine_with_everything(laptop: Path) -> None:
    rows = doctor.report(laptop)
    by_name = {row.what: row for row in rows}
    assert by_name["NPU"].version.endswith("accel0: Strix Halo, 8 columns")
    assert by_name["NPU driver"].version == "amdxdna of the kernel"
    assert by_name["NPU firmware"].version == "1.1.2.64"
    assert by_name["pyxrt"].version.endswith("(with run lists)")
    assert set(doctor.conclusions(rows).values()) == {"yes"}


def test_the_tutorial_quotes_doctor(
    laptop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = doctor.report(laptop)
    monkeypatch.setattr(doctor, "report", lambda: rows)
    doctor.doctor()
    assert missing("doctor", capsys.readouterr().out.replace(str(laptop), "").splitlines()) == []


DRIVERS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    # Release of Linux, version of the driver's package, firmware: what doctor says of these two.
    "ubuntu 26.04": ("7.0.0-15-generic", "", "1.1.2.64", {}),
    "ubuntu 25.10": ("6.17.0-8-generic", "", "1.0.0.166", {"NPU firmware": "old", "Linux": "old"}),
    "debian backports": ("6.18.5+deb13-amd64", "", "1.0.0.63", {"NPU firmware": "old", "Linux": "old"}),
    "24.04 with the package": ("6.17.0-35-generic", "2.23.0_20260407,6fc926d0", "1.1.2.65", {}),
    "24.04, package without reboot": ("6.17.0-35-generic", "2.23.0", "1.0.0.166", {"NPU firmware": "old"}),
    "old linux-firmware": ("7.0.3", "", "1.0.20.31", {"NPU firmware": "old"}),
    "driver brought to an older kernel": ("6.12.0-211.el10.x86_64", "", "1.1.2.64", {}),
    "firmware not known": ("6.18.5", "", "", {"NPU firmware": "other", "Linux": "old"}),
}


@pytest.mark.parametrize("machine", DRIVERS)
def test_doctor_judges_firmware_and_driver(laptop: Path, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """Kernels before 7.0 take firmware 1.0 only, which runs no ELF programs; 1.1 runs under newer drivers only."""
    release, package, firmware, states = DRIVERS[machine]
    monkeypatch.setattr(doctor.platform, "release", lambda: release)
    (laptop / "sys/class/accel/accel0/device/fw_version").write_text(firmware)
    if package:
        (laptop / "sys/module/amdxdna").mkdir(parents=True)
        (laptop / "sys/module/amdxdna/version").write_text(package)
    rows = doctor.report(laptop)
    judged = {row.what: row for row in rows if row.what in ("NPU firmware", "Linux")}
    assert {what: row.found for what, row in judged.items()} == {"NPU firmware": "yes", "Linux": "yes"} | states
    missing = ", ".join(what for what, state in states.items() if state == "old")
    assert doctor.conclusions(rows)["run npu2"] == (f"no: {missing}" if missing else "yes")
    if states.get("NPU firmware") == "old":
        stuck = "Linux" in states
        assert judged["NPU firmware"].get.startswith("at least 1.1, for the command that runs ELF programs: ")
        assert ("makes the NPU vanish" in judged["NPU firmware"].get) == stuck, "there it must not be replaced alone"
        assert ("then reboot" in judged["NPU firmware"].get) != stuck


_XCLBIN_ONLY = "__init__(self: pyxrt.hw_context, device: pyxrt.device, uuid: pyxrt.uuid) -> None"
_WITH_ELF = f"{_XCLBIN_ONLY}\n__init__(self: pyxrt.hw_context, device: pyxrt.device, elf: pyxrt.elf) -> None"


@pytest.mark.parametrize("signatures, state", [(_XCLBIN_ONLY, "old"), (_WITH_ELF, "yes")])
def test_doctor_reads_whether_a_context_takes_an_elf(
    laptop: Path, monkeypatch: pytest.MonkeyPatch, signatures: str, state: str
) -> None:
    """Bindings before `add_config` say it in a signature, where `self` is no ELF."""

    def init(self: Any) -> None: ...

    init.__doc__ = signatures
    monkeypatch.setattr(sys.modules["pyxrt"], "hw_context", type("hw_context", (), {"__init__": init}))
    assert found(doctor.report(laptop))["pyxrt"] == state


CHANGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "first generation": (
        lambda root: (root / "sys/class/accel/accel0/device/device").write_text("0x1502"),
        "NPU",
        "old",
    ),
    "old XRT": (
        lambda root: (root / "opt/xilinx/xrt/version.json").write_text('{"BUILD_VERSION": "2.19.0"}'),
        "XRT",
        "old",
    ),
    "no node": (lambda root: (root / "dev/accel/accel0").unlink(), "NPU", "no"),
    "no XRT": (lambda root: (root / "opt/xilinx/xrt/version.json").unlink(), "XRT", "no"),
    "no firmware": (lambda root: (root / "sys/class/accel/accel0/device/fw_version").unlink(), "NPU firmware", "other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_doctor_says_what_is_missing(laptop: Path, change: str) -> None:
    do, what, state = CHANGES[change]
    do(laptop)
    rows = doctor.report(laptop)
    row = next(row for row in rows if row.what == what)
    assert row.found == state
    assert row.get or state == "other", "how to get it"
    runs = doctor.conclusions(rows)["run npu2"]
    assert (what in runs) == (change != "no firmware")


def test_doctor_without_any_tool(laptop: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PEANO_INSTALL_DIR", str(tmp_path))
    monkeypatch.setenv("AIE_API_INCLUDE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pyxrt", None)
    monkeypatch.setattr(host_toolchain, "host_compiler_fingerprint", lambda: None)
    monkeypatch.setattr(doctor.platform, "release", lambda: "6.18.0")
    for find in toolchain.NPU_TOOLS.values():
        find.cache_clear()  # type: ignore[attr-defined]
    verdicts = doctor.conclusions(doctor.report(tmp_path))
    assert verdicts["build npu2"] == "no: host compiler, aircc, aiecc, Peano, AIE API headers"
    assert verdicts["run npu2"].startswith("no: NPU, NPU driver, NPU firmware, Linux, XRT, pyxrt")
    assert verdicts["build and run cpu"] == "no: host compiler"


def test_doctor_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.doctor()
    text = capsys.readouterr().out
    assert "build npu2: " in text
    assert len({line.index("for") for line in text.splitlines()[:1]}) == 1
    doctor.doctor(json=True)
    content = json.loads(capsys.readouterr().out)
    assert {row["what"] for row in content["tools"]} >= {"NPU", "XRT", "Peano", "locked memory"}
    assert content["works"].keys() == {"build and run cpu", "build and run npu2-sim", "build npu2", "run npu2"}


@pytest.mark.parametrize(("text", "number"), [("2.23.0", (2, 23, 0)), ("6.14.0-29-generic", (6, 14, 0)), ("x", ())])
def test_version(text: str, number: tuple[int, ...]) -> None:
    assert known_good.version(text) == number


# With the real aircc


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """An empty directory, if aircc is there; with what Peano there is, which may be none."""
    if toolchain.aircc() is None:
        pytest.skip("needs aircc on PATH")
    (tmp_path / OBJECT).write_text("not read before linking")
    return tmp_path


@pytest.mark.toolchain
def test_real_aircc_has_the_options(real: Path) -> None:
    driver = toolchain.aircc()
    assert driver
    run = subprocess.run([driver.path, "--help"], capture_output=True, text=True, check=True, cwd=real)
    assert options_of(run.stdout) >= _facts().keys()


def link_real(real: Path, monkeypatch: pytest.MonkeyPatch, mlir: str, linked: list[str], **job: Any) -> str:
    if toolchain.peano() is None:
        # Enough to find it; the first step that needs it fails.
        script(real / "peano/bin/clang++", "sys.exit(1)")
        monkeypatch.setenv("PEANO_INSTALL_DIR", str(real / "peano"))
        toolchain.peano.cache_clear()
    described = programs.Job("hello", mlir, **job, objects=dict.fromkeys(linked, real / OBJECT))
    return programs.link(described, real / "scratch", real / "hello.log", 1200)


@pytest.mark.toolchain
def test_real_aircc_makes_an_elf(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_peano = toolchain.peano() is None
    try:
        link_real(real, monkeypatch, HELLO, [OBJECT], function="add")
    except UserError as error:
        assert without_peano, error
        assert re.search(r"Peano|opt|llc|clang", str(error) + (real / "hello.log").read_text())
    else:
        assert programs.has_instance((real / "scratch/out.elf").read_bytes(), "add")


REFUSED = {
    "too large for L1": (
        lambda text: text.replace("memref<2048xbf16, 2 : i32>", "memref<28672xbf16, 2 : i32>"),
        r"hello: aircc: .*allocated buffers exceeded available memory \(in add_segment_1, launch 2 of 2\)",
    ),
    "mistyped": (
        lambda text: text.replace("memref<64x256xbf16> {", "memref<64x25xbf16> {", 1),
        r"hello: aircc: loc\(\"air.mlir\":\d+:\d+\): error: use of value '%out' expects different type",
    ),
}


@pytest.mark.toolchain
@pytest.mark.parametrize("change", REFUSED)
def test_real_aircc_refusal_names_the_launch(real: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    edit, message = REFUSED[change]
    with pytest.raises(UserError, match=message):
        link_real(real, monkeypatch, edit(HELLO), [OBJECT], function="add")


@pytest.mark.toolchain
@pytest.mark.slow
@pytest.mark.parametrize(
    ("grouping", "name"), [(g, program.entry) for g in GROUPINGS for program in device_programs(g)]
)
def test_real_aircc_takes_every_program(real: Path, monkeypatch: pytest.MonkeyPatch, grouping: str, name: str) -> None:
    built = build_module(device_program(name, grouping), DEMO.dimensions())
    without_peano = toolchain.peano() is None
    linked = [variant.object for variant in built.variants]
    try:
        link_real(real, monkeypatch, built.text(), linked, function=built.name, options=built.options)
    except UserError as error:
        assert without_peano, error
        assert re.search(r"Peano|opt|llc|clang", str(error) + (real / "hello.log").read_text())
