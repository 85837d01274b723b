"""What of the tools and the hardware is here, what each is needed for, how to get it, and what therefore works."""

from __future__ import annotations

import json as json_module
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llama_npu2.table import Column, fitted
from stages.graph import Build
from stages.targets.cpu import toolchain as host_toolchain
from stages.targets.npu2 import toolchain
from stages.targets.npu2.known_good import KNOWN_GOOD, LEAST, version

GUIDE = "docs/ryzen-ai.md"
BUILD_MEMORY = 16 << 30
BUILD_DISK = 20 << 30


@dataclass(frozen=True)
class Row:
    """`found`: yes | no | old | other; `old` cannot work, `other` was not tried. `version`: what was found."""

    what: str
    found: str
    version: str
    needed_for: str
    get: str

    @property
    def works(self) -> bool:
        return self.found in ("yes", "other")


def report(system: Path = Path("/")) -> list[Row]:
    """One row per tool, device and limit. `system`: root of the file system to look at."""
    return [*_build_rows(), *_run_rows(system), *_machine_rows()]


def _row(what: str, version_found: str | None, needed_for: str, get: str, known: str = "") -> Row:
    if version_found is None:
        return Row(what, "no", "", needed_for, get)
    if what in LEAST and version(version_found) < version(LEAST[what][0]):
        return Row(what, "old", version_found, needed_for, f"at least {LEAST[what][0]}, for {LEAST[what][1]}")
    other = bool(known) and known not in version_found
    return Row(what, "other" if other else "yes", version_found, needed_for, f"tried: {known}" if other else "")


def _build_rows() -> Iterator[Row]:
    yield _row("host compiler", host_toolchain.host_compiler_fingerprint(), "build: every target", "apt install g++")
    wheels = f"pip install 'mlir_air[aie]', from the pages that {GUIDE} lists"
    for name, find in toolchain.NPU_TOOLS.items():
        found = find()
        known = KNOWN_GOOD["LLVM"] if name in ("aircc", "aiecc") else ""
        yield _row(name, found.version if found else None, "build: npu2", wheels, known)


def _run_rows(system: Path) -> Iterator[Row]:
    npu = toolchain.npu(system)
    driver, firmware = (npu.driver or None, npu.firmware or None) if npu else (None, None)
    yield _npu_row(npu)
    yield _row("NPU driver", driver, "run: npu2", f"Linux {LEAST['Linux'][0]} or newer, {GUIDE}")
    yield _row("NPU firmware", firmware, "run: npu2", f"linux-firmware, then reboot, {GUIDE}")
    yield _row("Linux", platform.release(), "run: npu2", "")
    yield _row("XRT", toolchain.xrt_version(system), "run: npu2", f"the packages that {GUIDE} lists")
    bindings = toolchain.pyxrt()
    get = "source /opt/xilinx/xrt/setup.sh, with the Python that XRT was built for"
    if bindings is None:
        yield _row("pyxrt", None, "run: npu2", get)
    elif not bindings.elf_contexts:
        yield Row("pyxrt", "old", bindings.path, "run: npu2", f"XRT {LEAST['XRT'][0]} or newer")
    else:
        lists = "with" if bindings.runlist else "without"
        yield _row("pyxrt", f"{bindings.path} ({lists} run lists)", "run: npu2", get)


def _npu_row(npu: toolchain.Npu | None) -> Row:
    what, needed_for = "NPU", "run: npu2"
    if npu is None:
        return Row(what, "no", "", needed_for, f"a Ryzen AI 300 or newer, and its driver, {GUIDE}")
    name = f"{npu.node}: {npu.name or 'unknown'}, {npu.columns} columns"
    if not npu.columns:
        return Row(what, "old", name, needed_for, "a Ryzen AI 300 or newer: this one is no NPU2")
    if not npu.usable:
        return Row(
            what, "no", name, needed_for, f"sudo usermod -aG render {os.environ.get('USER', '$USER')}, log in again"
        )
    return Row(what, "yes", name, needed_for, "")


def _machine_rows() -> Iterator[Row]:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(Path.cwd()).free
    unlimited = limit == resource.RLIM_INFINITY
    yield Row(
        "locked memory",
        "yes" if unlimited else "no",
        "unlimited" if unlimited else _gib(limit),
        "run: npu2, models larger than it",
        "" if unlimited else f"memlock unlimited in /etc/security/limits.d, {GUIDE}",
    )
    yield _amount("memory", memory, BUILD_MEMORY, "build: npu2 prefill; run: the weights")
    yield _amount("free disk", free, BUILD_DISK, "build: a checkpoint and its copies in each target's layout")


def _amount(what: str, found: int, wanted: int, needed_for: str) -> Row:
    enough = found >= wanted * 0.9
    return Row(what, "yes" if enough else "other", _gib(found), needed_for, "" if enough else f"better {_gib(wanted)}")


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.3g} GiB"


def conclusions(rows: Sequence[Row]) -> dict[str, str]:
    """What can be done here -> `yes`, or `no: ` and what is missing."""
    works = {row.what: row.works for row in rows}

    def verdict(*needed: str) -> str:
        missing = [name for name in needed if not works[name]]
        return f"no: {', '.join(missing)}" if missing else "yes"

    return {
        "build and run cpu": verdict("host compiler"),
        "build and run npu2-sim": verdict("host compiler"),
        "build npu2": verdict("host compiler", *toolchain.NPU_TOOLS),
        "run npu2": verdict("NPU", "NPU driver", "XRT", "pyxrt"),
    }


def table(rows: Sequence[Row]) -> str:
    """Aligned columns; the last tells how to get what is not there."""
    columns = [Column(title) for title in ("", "found", "version", "needed for", "how to get it")]
    return fitted(columns, [(row.what, row.found, row.version, row.needed_for, row.get) for row in rows])


def run(build: Build) -> None:
    """`doit doctor`."""
    doctor(build.options.json)


def doctor(json: bool = False) -> None:
    """Print the report, as a table or as one JSON object."""
    rows = report()
    verdicts = conclusions(rows)
    if json:
        described = {"tools": [asdict(row) for row in rows], "works": verdicts, "known_good": KNOWN_GOOD}
        print(json_module.dumps(described, indent=1))
        return
    print(table(rows))
    print()
    for what, answer in verdicts.items():
        print(f"{what}: {answer}")
    sys.stdout.flush()
