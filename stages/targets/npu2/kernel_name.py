"""What XRT calls a program. aiecc calls every ELF's kernel after its device, `main`, and gives each launch a kernel of
its own besides; a hardware context takes no two kernels of one name, so programs of these names never share one. The
configuration that aiecc leaves says the names, and aiebu-asm makes the ELF from it again.
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
"""What aiecc tells aiebu-asm, which it leaves beside its other files."""

STOCK = "main"
"""aiecc's name for every program's kernel."""

TIME_LIMIT = 600


def kernel_name(library: str) -> str:
    """A name for the kernel of a library: as C++ writes one, since the ELF holds it mangled."""
    name = re.sub(r"\W", "_", library)
    return name if re.match(r"[A-Za-z]", name) else f"k_{name}"


def mangled(kernel: str) -> bytes:
    """How a symbol of the ELF begins that is a kernel's (XRT, `xrt_elf.cpp`, `demangle`)."""
    return f"_Z{len(kernel)}{kernel}".encode()


def own_entry(made: Path, function: str) -> dict[str, Any]:
    """Of the configuration in the directory `made`, the kernel that runs `function`. UserError where there is none."""
    try:
        kernels = read_json(made / CONFIGURATION)["xrt-kernels"]
        return next(kernel for kernel in kernels if any(one["id"] == function for one in kernel["instance"]))
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        raise UserError(f"aircc left no {CONFIGURATION} with the program {function}") from None


def instructions(made: Path, function: str) -> Path:
    """The file with the instruction stream of `function`. UserError where aircc left none."""
    entry = own_entry(made, function)
    named = next(one["TXN_ctrl_code_file"] for one in entry["instance"] if one["id"] == function)
    # Older releases of aiecc name it absolutely, newer ones relative to the configuration.
    path = made / named
    if not path.is_file():
        raise UserError(f"aircc left no instructions of {function}: {path.name} is missing")
    return path


def rename(made: Path, function: str, elf: Path, name: str) -> tuple[str, str]:
    """Make the ELF again with one kernel, `name`, that runs `function`. Returns the name that it has now, and why not
    `name` if it is not that: the ELF is then as it was."""
    tool = aiebu_asm()
    if tool is None:
        return STOCK, "aiebu-asm is not found"
    entry = own_entry(made, function)
    instance = [one for one in entry["instance"] if one["id"] == function]
    described = made / "renamed_elf_config.json"
    described.write_text(json.dumps({"xrt-kernels": [entry | {"name": name, "instance": instance}]}))
    renamed = made / "renamed.elf"
    command = [str(tool.path), "-t", "aie2_config", "-j", str(described), "-o", str(renamed)]
    try:
        run = subprocess.run(command, cwd=elf.parent, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return STOCK, f"aiebu-asm: {error}"
    content = renamed.read_bytes() if renamed.is_file() else b""
    if run.returncode or not content.startswith(b"\x7fELF") or mangled(name) not in content:
        return STOCK, f"aiebu-asm ended with {run.returncode}: {complaint(run.stderr + run.stdout)[:200]}"
    renamed.replace(elf)
    return name, ""
