"""ELF description -> source of one program: for `cpu`, the C++ glue that calls the kernels in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.config import read_config
from stages.elfs import RUNTIME_SCALARS, Dim, Elf, Launch, all_elfs
from stages.fusion import fuse
from stages.kernels import Arg

_C_TYPES = {"bf16": "bf16", "f32": "float", "i32": "int32_t"}


def write_cpu_source(directory: Path, program: str, names: Sequence[str], work: Path) -> None:
    """Step action: the source of a program that holds the named ELFs, for the configuration in `directory`."""
    known = all_elfs()
    dimensions = read_config(directory / "build/config.json").dimensions()
    path = work / "build/modules" / f"{program}.cc"
    path.parent.mkdir(parents=True)
    path.write_text(cpu_source([known[name] for name in names], dimensions))


def cpu_glue(elf: Elf, dimensions: Mapping[str, float]) -> str:
    """C++ of one entry point. All threads run it; they meet at a barrier only where data flow demands it."""
    index = {slot.name: i for i, slot in enumerate(elf.slots)}
    lines = [f'extern "C" void {elf.name}(void *const *slots, const Dims *dims, Worker *worker) {{']
    written: set[str] = set()
    read: set[str] = set()
    for launch in fuse(elf):
        if launch.reads() & written or launch.writes() & (written | read):
            lines.append("  worker->barrier();")
            written, read = set(), set()
        lines.append(f"  {_kernel_call(launch, index, dimensions)}")
        written |= launch.writes()
        read |= launch.reads()
    return "\n".join([*lines, "}", ""])


def cpu_source(elfs: list[Elf], dimensions: Mapping[str, float]) -> str:
    """A translation unit with the entry points of one or more ELFs."""
    return '#include "kernels.h"\n\n' + "\n".join(cpu_glue(elf, dimensions) for elf in elfs)


def _kernel_call(launch: Launch, index: Mapping[str, int], dimensions: Mapping[str, float]) -> str:
    tensors = [_tensor(arg, index[launch.args[arg.name]]) for arg in launch.kernel.args]
    scalars = [_scalar(launch.scalars[name], dimensions) for name in launch.kernel.params]
    return f"{launch.kernel.name}({', '.join([*tensors, *scalars, '*worker'])});"


def _tensor(arg: Arg, slot: int) -> str:
    const = "" if arg.written else "const "
    return f"static_cast<{const}{_C_TYPES[arg.dtype]} *>(slots[{slot}])"


def _scalar(value: Dim | float, dimensions: Mapping[str, float]) -> str:
    if isinstance(value, str):
        if value in RUNTIME_SCALARS:
            return f"dims->{value}"
        value = dimensions[value]
    return f"{value!r}f" if isinstance(value, float) else str(value)
