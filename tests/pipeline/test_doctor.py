"""Doctor's verdicts on wheels of the compiler and on releases of XRT, and the guide for users, which says the same."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from llama_npu2.devices.xrt import limits
from stages.commands import doctor
from stages.targets.cpu import toolchain as host_toolchain
from stages.targets.npu2 import known_good, toolchain
from stages.targets.npu2.known_good import COMPILERS, LEAST, PEANO
from tests.conftest import ROOT
from tests.support.pyxrt_standin import install

PACKAGES = {"aircc": "mlir_air", "aiecc": "mlir_aie", "Peano": "llvm-aie"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Of this machine's tools, only a host compiler is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host_toolchain, "host_compiler_fingerprint", lambda: "a compiler")
    for name in ("PEANO_INSTALL_DIR", "AIE_API_INCLUDE", "XILINX_XRT"):
        monkeypatch.delenv(name, raising=False)
    _forget()
    yield
    _forget()
    sys.modules.pop("pyxrt", None)


def _forget() -> None:
    for find in toolchain.NPU_TOOLS.values():
        find.cache_clear()  # type: ignore[attr-defined]


def _wheels(site: Path, versions: dict[str, str]) -> None:
    """What pip would have installed."""
    programs = {"mlir_air": "bin/aircc", "mlir_aie": "bin/aiecc", "llvm-aie": "bin/clang++"}
    for package, version in versions.items():
        program = site / package / programs[package]
        program.parent.mkdir(parents=True)
        program.write_text("")
        about = site / f"{package.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (site / "mlir_aie/include/aie_api").mkdir(parents=True)
    (site / "mlir_aie/include/aie_api/aie.hpp").write_text("")


GOOD = {"mlir_air": "0.0.1.2026050904+8de3c9f", "mlir_aie": COMPILERS[0].mlir_aie, "llvm-aie": PEANO}
WHEELS = [
    ({}, {"aircc": "yes", "aiecc": "yes", "Peano": "yes", "AIE API headers": "yes"}),
    ({"mlir_air": "0.0.1.2026073005+d3c5f87", "mlir_aie": "1.4.0"}, {"aircc": "yes", "aiecc": "yes"}),
    ({"mlir_air": "0.0.1.2026010104+abcdef0"}, {"aircc": "old", "aiecc": "yes"}),
    (
        {"mlir_air": "0.0.1.2026082904+36ce5af", "mlir_aie": "1.4.3.dev31+gaf819a8"},
        {"aircc": "other", "aiecc": "other"},
    ),
    ({"mlir_aie": "0.0.1.2025120104+abcdef0"}, {"aiecc": "old"}),
    ({"llvm-aie": "22.0.0.2026081201+046b11f9"}, {"Peano": "other"}),
]


@pytest.mark.parametrize(("versions", "states"), WHEELS, ids=lambda value: "-".join(value.values()) or "checked")
def test_wheels_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, versions: dict[str, str], states: dict[str, str]
) -> None:
    _wheels(tmp_path / "site", GOOD | versions)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    rows = {row.what: row for row in doctor.report(tmp_path)}
    assert {what: rows[what].found for what in states} == states
    for what, package in PACKAGES.items():
        assert rows[what].version == (GOOD | versions)[package]
        assert (rows[what].get == "") == (rows[what].found == "yes")
    assert (doctor.conclusions(list(rows.values()))["build npu2"] == "yes") == ("old" not in states.values())
    fingerprint = toolchain.npu_fingerprint()
    assert fingerprint is not None
    assert set((GOOD | versions).values()) <= set(fingerprint.split("; ")), "another wheel rebuilds"


def test_a_tool_beside_a_wheel_is_not_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _wheels(tmp_path / "site", GOOD)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert metadata.version("mlir_air") == GOOD["mlir_air"]
    (tmp_path / "aircc").write_text("#!/bin/sh\necho LLVM version 22.1.0\n")
    (tmp_path / "aircc").chmod(0o755)
    row = next(row for row in doctor.report(tmp_path) if row.what == "aircc")
    assert (row.found, row.version) == ("other", "LLVM version 22.1.0")


RELEASES = [
    ("2.19.194", "old", ""),
    ("2.20.197", "old", ""),
    ("2.21.21", "old", ""),
    ("2.21.75", "yes", "(with run lists; a context for each program, XRT 2.23 shares them)"),
    ("2.23.0", "yes", "(with run lists)"),
]


@pytest.mark.parametrize(("version", "state", "remark"), RELEASES)
def test_releases_of_xrt(tmp_path: Path, version: str, state: str, remark: str) -> None:
    """By what the bindings of that release have, and by its number: both say the same."""
    install(version=version)
    (tmp_path / "opt/xilinx/xrt").mkdir(parents=True)
    (tmp_path / "opt/xilinx/xrt/version.json").write_text(f'{{"BUILD_VERSION": "{version}"}}')
    rows = {row.what: row for row in doctor.report(tmp_path)}
    assert (rows["XRT"].found, rows["pyxrt"].found) == (state, state)
    assert rows["pyxrt"].version.endswith(remark)


@pytest.mark.parametrize(("limit", "state"), [(8 << 20, "no"), (limits.HEAP, "other"), (resource.RLIM_INFINITY, "yes")])
def test_locked_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, state: str) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (limit, limit))
    rows = doctor.report(tmp_path)
    assert next(row for row in rows if row.what == "locked memory").found == state
    assert ("locked memory" in doctor.conclusions(rows)["run npu2"]) == (state == "no")


# The guide says what the table says

GUIDE = (ROOT / doctor.GUIDE).read_text()
COMMANDS = re.sub(r"\s*\\\n\s*", " ", GUIDE)
"""With commands of several lines in one."""


@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda compiler: compiler.commit)
def test_guide_installs_the_compilers_that_were_checked(compiler: known_good.Compiler) -> None:
    assert compiler.install in COMMANDS
    assert compiler.commit in GUIDE
    assert compiler.mlir_aie in GUIDE


def test_guide_installs_nothing_else() -> None:
    assert set(re.findall(r"https://github\.com/\S+/releases/\S+", GUIDE)) == {p for c in COMPILERS for p in c.pages}
    requirements = {requirement for compiler in COMPILERS for requirement in compiler.requirements}
    assert set(re.findall(r"'((?:mlir_air|llvm-aie)[^']*)'", GUIDE)) == requirements
    first, *others = (COMMANDS.index(compiler.install) for compiler in COMPILERS)
    assert all(first < other for other in others), "in the table's order"


def test_guide_installs_the_packages_of_xrt() -> None:
    lines = re.findall(r"^ +sudo apt install (.*xrt.*)$", GUIDE, re.MULTILINE)
    assert len(lines) == 2, "with the system's packages, and from AMD's archive"
    for line in lines:
        assert set(line.split()) - {"amdxdna-dkms"} == set(known_good.XRT_PACKAGES)
    assert "sudo add-apt-repository ppa:amd-team/xrt" in GUIDE


def test_guide_names_the_versions_that_are_needed() -> None:
    known = {least for name, (least, _) in LEAST.items() if name == "XRT"} | {known_good.SHARED_CONTEXT}
    assert known <= set(re.findall(r"XRT (\d[\d.]*\d)", GUIDE))
    assert f"Linux {LEAST['Linux'][0]} or newer" in GUIDE
    assert f"firmware {LEAST['NPU firmware'][0]} or newer" in GUIDE
    assert f"fw_version  # {LEAST['NPU firmware'][0]} or more" in GUIDE
    assert f"{limits.WATCHDOG:g} s" in GUIDE
    assert f"{limits.HEAP >> 20} MiB" in GUIDE
