"""Finds the NPU's tools, driver and device. Their versions are fingerprints: a changed tool rebuilds what it made."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

import xxhash

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.targets.npu2.known_good import NPU1_DEVICE, NPU2_COLUMNS, NPU2_DEVICES

# The NPU's tools


@frozen
class Tool:
    """A tool on this machine."""

    path: Path
    version: str
    """The version of its wheel, else its own `--version` line."""
    wheel: str = ""
    """The Python package that it came with, if its version is that of the package."""


def _packages(*parts: str) -> Iterator[Path]:
    """Yield the existing paths `parts` below the directories of Python packages: the tools come as wheels."""
    for directory in map(Path, sys.path):
        if (path := directory.joinpath(*parts)).exists():
            yield path


def _program(name: str, package: str, placed: Iterable[Path] = ()) -> Tool | None:
    """Return a program on PATH, in the `bin` of its wheel, or the first of `placed` that is there.

    Nothing puts the `bin` of a wheel on PATH.
    """
    on_path = shutil.which(name)
    elsewhere = (*_packages(package, "bin", name), *filter(Path.is_file, placed))
    program = Path(on_path) if on_path else next(iter(elsewhere), None)
    return _tool(program, program, package) if program else None


def _version_line(program: Path) -> str:
    """Return the line of `--version` that has a version in it, else the first line."""
    try:
        run = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "does not start"
    lines = [line.strip() for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"\d\.\d|[0-9a-f]{7}", line)), lines[0] if lines else "no version")


def _tool(path: Path, program: Path, package: str) -> Tool:
    """Use the version of the wheel where there is one: two nightlies may have programs with the same version line."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        wheel = metadata.distribution(package)
        if Path(str(wheel.locate_file(package))).resolve() in program.resolve().parents:
            return Tool(path, wheel.version, package)
    return Tool(path, _version_line(program))


@functools.cache
def peano() -> Tool | None:
    """Return the root of the Peano compiler: `PEANO_INSTALL_DIR`, else the `llvm-aie` wheel."""
    chosen = os.environ.get("PEANO_INSTALL_DIR")
    roots = [Path(chosen)] if chosen else list(_packages("llvm-aie"))
    for root in roots:
        if (root / "bin/clang++").exists():
            return _tool(root.resolve(), root / "bin/clang++", "llvm-aie")
    return None


@functools.cache
def aircc() -> Tool | None:
    return _program("aircc", "mlir_air")


@functools.cache
def aiecc() -> Tool | None:
    return _program("aiecc", "mlir_aie")


@functools.cache
def aiebu_asm() -> Tool | None:
    """Return the assembler of ELFs (aiecc contains it too): on PATH, in a wheel, or where XRT installs it."""
    placed = (Path("/opt/xilinx") / package / "bin/aiebu-asm" for package in ("xrt", "aiebu"))
    return _program("aiebu-asm", "mlir_aie", placed)


@functools.cache
def aie_api() -> Tool | None:
    """Return the include directory of `aie_api/aie.hpp`.

    It is `AIE_API_INCLUDE`, else next to aiecc, else in the `mlir_aie` wheel.
    """
    chosen = os.environ.get("AIE_API_INCLUDE")
    driver = aiecc()
    next_to_driver = [driver.path.resolve().parents[1] / "include"] if driver else []
    for root in [Path(chosen)] if chosen else [*next_to_driver, *_packages("mlir_aie", "include")]:
        if (root / "aie_api/aie.hpp").is_file():
            return Tool(root.resolve(), _headers_version(root / "aie_api"))
    return None


def _headers_version(directory: Path) -> str:
    """Return a digest of the headers' names and sizes, because they carry no version."""
    files = sorted((p.relative_to(directory).as_posix(), p.stat().st_size) for p in directory.rglob("*.hpp"))
    return f"{len(files)} headers, {xxhash.xxh3_64_hexdigest(repr(files).encode())[:8]}"


NPU_TOOLS: dict[str, Callable[[], Tool | None]] = {
    "aircc": aircc,
    "aiecc": aiecc,
    "Peano": peano,
    "AIE API headers": aie_api,
}


def need_npu_tools(*names: str) -> None:
    """Raise UserError if one of these tools is missing. `names`: keys of `NPU_TOOLS`; none: all."""
    missing = [name for name in names or NPU_TOOLS if NPU_TOOLS[name]() is None]
    if missing:
        raise UserError(f"target npu2 needs {', '.join(missing)}, not found on this machine: see doit doctor")


def npu_fingerprint() -> str | None:
    """Return the versions of the tools that make an NPU program; None if one is missing."""
    tools, assembler = [find() for find in NPU_TOOLS.values()], aiebu_asm()
    versions = [*(tool.version for tool in tools if tool), assembler.version if assembler else "no aiebu-asm"]
    return "; ".join(versions) if all(tools) else None


def peano_fingerprint() -> str | None:
    """Return the versions of compiler and headers that make an object for the NPU; None if one is missing."""
    compiler, headers = peano(), aie_api()
    return f"{compiler.version}; {headers.version}" if compiler and headers else None


# The NPU and what runs it


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


@frozen
class Npu:
    """An accelerator device node."""

    node: Path
    name: str
    """Empty if it is not a known NPU."""
    columns: int
    """0 if it is not a known NPU2."""
    driver: str
    """Name and version."""
    packaged: bool
    """Whether the driver has a version of its own: it comes from a package, not with the kernel."""
    firmware: str
    usable: bool
    """Whether this user may open it."""


def npu(system: Path = Path("/")) -> Npu | None:
    """Return the first device below `/dev/accel`, an NPU2 before any other."""
    devices = [_npu(system, node) for node in sorted(system.glob("dev/accel/accel*"))]
    return max(devices, key=lambda device: device.columns, default=None)


def _npu(system: Path, node: Path) -> Npu:
    properties = system / "sys/class/accel" / node.name / "device"
    device, revision = _read(properties / "device") or "", _read(properties / "revision") or ""
    name = NPU2_DEVICES.get((device, revision), "")
    driver = (properties / "driver").resolve().name if (properties / "driver").exists() else ""
    version = _read(system / "sys/module" / driver / "version") if driver else None
    return Npu(
        node,
        name or ("NPU of the first generation" if device == NPU1_DEVICE else ""),
        NPU2_COLUMNS if name else 0,
        f"{driver} {version or 'of the kernel'}".strip() if driver else "",
        bool(version),
        _read(properties / "fw_version") or "",
        os.access(node, os.R_OK | os.W_OK),
    )


@frozen
class Pyxrt:
    """XRT's Python bindings."""

    path: str
    runlist: bool
    """Whether they have run lists."""
    elf_contexts: bool
    """Whether a hardware context takes an ELF. Running needs that."""
    shared_contexts: bool
    """Whether a hardware context takes several ELFs."""


def pyxrt() -> Pyxrt | None:
    """Return what XRT's Python bindings can do; None if they are not installed."""
    try:
        import pyxrt as bindings
    except ImportError:
        return None
    context = getattr(bindings, "hw_context", None)
    signatures = (getattr(context, "__init__", None) or context).__doc__ or ""
    shared = hasattr(context, "add_config")
    # The whole word: every signature has a `self`.
    elf_contexts = shared or re.search(r"\belf\b", signatures) is not None
    return Pyxrt(getattr(bindings, "__file__", "") or "", hasattr(bindings, "runlist"), elf_contexts, shared)


def xrt_version(system: Path = Path("/")) -> str | None:
    """Return the version of the installed XRT, from its own record, else from its tool."""
    for directory in (os.environ.get("XILINX_XRT", ""), system / "opt/xilinx/xrt", system / "usr/share/xrt"):
        record = _read(Path(directory) / "version.json") if directory else None
        if record:
            try:
                return str(json.loads(record)["BUILD_VERSION"])
            except (ValueError, KeyError, TypeError):
                continue
    tool = shutil.which("xrt-smi")
    match = re.search(r"\d+\.\d+[\d.]*", _version_line(Path(tool))) if tool else None
    return match.group() if match else None


def runs_here() -> bool:
    """Tell whether this machine has the NPU, and what it takes to run programs on it."""
    device, bindings = npu(), pyxrt()
    return bool(device and device.columns and device.usable and bindings and bindings.elf_contexts)


def suits(model: Path) -> bool:
    """Tell whether this machine should run the target by default: it has the NPU and what it takes to use it.

    That is either a model's artifacts for it (below `model`) or the tools that build them. If there is an NPU that
    cannot be used, print why.
    """
    device = npu()
    if device is None or not device.columns:
        return False
    if not device.usable:
        reason = "this user may not open it"
    elif pyxrt() is None:
        reason = "XRT's pyxrt is not installed"
    elif not (model / "npu2/manifest.json").is_file() and npu_fingerprint() is None:
        reason = "there are no npu2 artifacts of this model and not all tools to build them"
    else:
        return True
    print(f"an NPU is here, but {reason}: using target=cpu (see doit doctor)", file=sys.stderr)
    return False
