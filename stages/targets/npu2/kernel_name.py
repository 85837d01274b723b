"""Gives the kernel of each ELF a name of its own, so that programs can share a hardware context.

aiecc calls the kernel of every ELF after its device, `main`, and gives each launch a kernel of its own besides. A
hardware context takes no two kernels of the same name. The names are in a configuration file that aiecc leaves;
aiebu-asm builds the ELF again from a changed copy of it.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from stages.engine.files import read_json
from stages.engine.objects import complaint
from stages.targets.npu2.toolchain import aiebu_asm

CONFIGURATION = "full_elf_config.json"
"""The input of aiebu-asm, which aiecc leaves among its temporary files."""

STOCK = "main"
"""aiecc's name for every program's kernel."""

TIME_LIMIT = 600


def kernel_name(library: str) -> str:
    """Return a kernel name for a library: a C++ identifier, because the ELF holds the name mangled."""
    name = re.sub(r"\W", "_", library)
    return name if re.match(r"[A-Za-z]", name) else f"k_{name}"


def mangled(kernel: str) -> bytes:
    """Return the beginning of the ELF symbols of a kernel (XRT, `xrt_elf.cpp`, `demangle`)."""
    return f"_Z{len(kernel)}{kernel}".encode()


def own_entry(directory: Path, function: str) -> dict[str, Any]:
    """Return the kernel entry that runs `function`, from the configuration in `directory`. Raises UserError."""
    try:
        kernels = read_json(directory / CONFIGURATION)["xrt-kernels"]
        return next(kernel for kernel in kernels if any(instance["id"] == function for instance in kernel["instance"]))
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        raise UserError(f"aircc left no {CONFIGURATION} with the program {function}") from None


def instructions(directory: Path, function: str) -> Path:
    """Return the file with the instruction stream of `function`. Raises UserError if aircc left none."""
    entry = own_entry(directory, function)
    name = next(instance["TXN_ctrl_code_file"] for instance in entry["instance"] if instance["id"] == function)
    # Older releases of aiecc write an absolute path, newer ones a path relative to the configuration.
    path = directory / name
    if not path.is_file():
        raise UserError(f"aircc left no instructions of {function}: {path.name} is missing")
    return path


def rename(directory: Path, function: str, elf: Path, name: str) -> tuple[str, str]:
    """Build the ELF again with one kernel, `name`, that runs `function`.

    Args:
        directory: aircc's temporary files.

    Returns:
        (name of the kernel, reason): the reason is empty on success; otherwise it says why the ELF was left unchanged.
    """
    tool = aiebu_asm()
    if tool is None:
        return STOCK, "aiebu-asm is not found"
    entry = own_entry(directory, function)
    instances = [instance for instance in entry["instance"] if instance["id"] == function]
    configuration = directory / "renamed_elf_config.json"
    configuration.write_text(json.dumps({"xrt-kernels": [entry | {"name": name, "instance": instances}]}))
    renamed = directory / "renamed.elf"
    command = [str(tool.path), "-t", "aie2_config", "-j", str(configuration), "-o", str(renamed)]
    try:
        run = subprocess.run(command, cwd=elf.parent, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return STOCK, f"aiebu-asm: {error}"
    content = renamed.read_bytes() if renamed.is_file() else b""
    if run.returncode or not content.startswith(b"\x7fELF") or mangled(name) not in content:
        return STOCK, f"aiebu-asm ended with {run.returncode}: {complaint(run.stderr + run.stdout)[:200]}"
    renamed.replace(elf)
    return name, ""
