"""`doit doctor`: which tools and hardware this machine has, what each is for, how to get it, and what works here."""

from __future__ import annotations

import json as json_module
import os
import platform
import resource
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from llama_npu2.cli.table import amount, fitted
from llama_npu2.devices.xrt.limits import HEAP
from llama_npu2.frozen import frozen
from stages.graph import Build
from stages.targets.cpu import toolchain as host_toolchain
from stages.targets.npu2 import toolchain
from stages.targets.npu2.known_good import (
    COMPILERS,
    LEAST,
    SHARED_CONTEXT,
    XRT_PACKAGES,
    checked,
    known_good,
    version,
)

GUIDE = "docs/tutorials/ryzen-ai.md"
NEW_DRIVER = f"Linux {LEAST['Linux'][0]} or newer, or the driver package (amdxdna-dkms), {GUIDE}"
NEW_FIRMWARE = f"linux-firmware or the driver package, sudo update-initramfs -u, then reboot, {GUIDE}"
NO_OTHER = "Newer firmware under this driver makes the NPU vanish"
HEADERS = "AIE API headers"
BUILD_MEMORY = 16 << 30
BUILD_DISK = 20 << 30


@frozen
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


def _row(what: str, version_found: str | None, needed_for: str, get: str) -> Row:
    if version_found is None:
        return Row(what, "no", "", needed_for, get)
    return _old(what, what, version_found, needed_for, get) or Row(what, "yes", version_found, needed_for, "")


def _old(what: str, name: str, version_found: str, needed_for: str, get: str) -> Row | None:
    """If it is older than the oldest that can work of what the table calls `name`."""
    if name not in LEAST or version(version_found) >= version(LEAST[name][0]):
        return None
    return Row(what, "old", version_found, needed_for, f"at least {LEAST[name][0]}, for {LEAST[name][1]}: {get}")


def _build_rows() -> Iterator[Row]:
    yield _row("host compiler", host_toolchain.host_compiler_fingerprint(), "build: every target", "apt install g++")
    for name, find in toolchain.NPU_TOOLS.items():
        yield _tool_row(name, find())


def _tool_row(what: str, tool: toolchain.Tool | None) -> Row:
    needed_for = "build: npu2"
    wanted = " ".join(f"'{requirement}'" for requirement in COMPILERS[0].requirements)
    get = f"pip install {wanted}, from the pages that {GUIDE} lists"
    if tool is None:
        return Row(what, "no", "", needed_for, get)
    if old := _old(what, tool.wheel, tool.version, needed_for, get):
        return old
    # Headers have no version of their own: they belong to the aiecc that they came with.
    if what == HEADERS or checked(tool.wheel, tool.version):
        return Row(what, "yes", tool.version, needed_for, "")
    return Row(what, "other", tool.version, needed_for, f"tried: {get}")


def _run_rows(system: Path) -> Iterator[Row]:
    npu = toolchain.npu(system)
    driver, firmware = (npu.driver or None, npu.firmware or None) if npu else (None, None)
    linux = _linux_row(npu)
    yield _npu_row(npu)
    yield _row("NPU driver", driver, "run: npu2", NEW_DRIVER)
    if npu and npu.usable and not firmware:
        yield Row("NPU firmware", "other", "not known", "run: npu2", "")
    else:
        yield _row("NPU firmware", firmware, "run: npu2", NEW_FIRMWARE if linux.works else f"{NEW_DRIVER}. {NO_OTHER}")
    yield linux
    packages = f"apt install {' '.join(XRT_PACKAGES)}, {GUIDE}"
    yield _row("XRT", toolchain.xrt_version(system), "run: npu2", packages)
    bindings = toolchain.pyxrt()
    get = f"apt install {XRT_PACKAGES[-1]}, or source /opt/xilinx/xrt/setup.sh; with the Python that XRT was built for"
    if bindings is None:
        yield _row("pyxrt", None, "run: npu2", get)
    elif not bindings.elf_contexts:
        yield Row("pyxrt", "old", bindings.path, "run: npu2", f"XRT {LEAST['XRT'][0]} or newer")
    else:
        lists = "with" if bindings.runlist else "without"
        shares = "" if bindings.shared_contexts else f"; a context for each program, XRT {SHARED_CONTEXT} shares them"
        yield _row("pyxrt", f"{bindings.path} ({lists} run lists{shares})", "run: npu2", get)


def _linux_row(npu: toolchain.Npu | None) -> Row:
    """Judge the kernel by its version only where nothing tells whether its driver is a newer one."""
    row = _row("Linux", platform.release(), "run: npu2", NEW_DRIVER)
    proven = npu and (npu.packaged or version(npu.firmware) >= version(LEAST["NPU firmware"][0]))
    return replace(row, found="yes", get="") if proven else row


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
        "yes" if unlimited else "other" if limit >= HEAP else "no",
        "unlimited" if unlimited else amount(limit),
        f"run: npu2, {HEAP >> 20} MiB to open it, and the weights",
        "" if unlimited else f"memlock unlimited in /etc/security/limits.d, {GUIDE}",
    )
    yield _amount("memory", memory, BUILD_MEMORY, "build: npu2 prefill; run: the weights")
    yield _amount("free disk", free, BUILD_DISK, "build: a checkpoint and its copies in each target's layout")


def _amount(what: str, found: int, wanted: int, needed_for: str) -> Row:
    enough = found >= wanted * 0.9
    return Row(
        what, "yes" if enough else "other", amount(found), needed_for, "" if enough else f"better {amount(wanted)}"
    )


def conclusions(rows: Sequence[Row]) -> dict[str, str]:
    """Return `yes` for each thing that can be done here, or `no: ` and the names of the missing rows."""
    works = {row.what: row.works for row in rows}

    def verdict(*needed: str) -> str:
        missing = [name for name in needed if not works[name]]
        return f"no: {', '.join(missing)}" if missing else "yes"

    return {
        "build and run cpu": verdict("host compiler"),
        "build and run npu2-sim": verdict("host compiler"),
        "build npu2": verdict("host compiler", *toolchain.NPU_TOOLS),
        "run npu2": verdict("NPU", "NPU driver", "NPU firmware", "Linux", "XRT", "pyxrt", "locked memory"),
    }


def table(rows: Sequence[Row]) -> str:
    """Return aligned columns, and below them how to get what is not there."""
    titles = ("", "found", "version", "needed for")
    lines = [fitted(titles, [(row.what, row.found, row.version, row.needed_for) for row in rows])]
    ways: dict[str, list[str]] = {}
    for row in rows:
        if row.get:
            ways.setdefault(row.get, []).append(row.what)
    lines += ["", "How to get what is missing:"] * bool(ways)
    for way, names in ways.items():
        lines += [f"  {', '.join(names)}:", *_wrapped(way)]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    # What is to be typed stays whole.
    return textwrap.wrap(text, 78, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def run(build: Build) -> None:
    """`doit doctor`."""
    doctor(build.options.json)


def doctor(json: bool = False) -> None:
    """Print the report, as a table or as one JSON object."""
    rows = report()
    verdicts = conclusions(rows)
    if json:
        described = {"tools": [asdict(row) for row in rows], "works": verdicts, "known_good": known_good()}
        print(json_module.dumps(described, indent=1))
        return
    print(table(rows))
    print()
    for what, answer in verdicts.items():
        print(f"{what}: {answer}")
    sys.stdout.flush()
