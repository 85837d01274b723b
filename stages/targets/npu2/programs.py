"""MLIR modules -> ELFs for the NPU, by aircc; and what to say when it refuses one."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_npu2.devices.xrt.limits import RUNS_SHARE, heap_bytes
from llama_npu2.errors import UserError
from stages import air
from stages.air import limits
from stages.engine.files import read_json, write_json
from stages.engine.objects import complaint, linked
from stages.engine.places import LOGS
from stages.engine.progress import say
from stages.engine.tree import Tree
from stages.targets.npu2.kernel_name import instructions, kernel_name, rename
from stages.targets.npu2.toolchain import aiecc, aircc, need_npu_tools, peano
from stages.targets.npu2.toolchain import npu_fingerprint as fingerprint

TIME_LIMIT = 3600
"""Seconds for one ELF. Decode modules take seconds, prefill modules minutes."""

STACK_BYTES = 4 << 30
"""Passes recurse deeply over long modules. Not unlimited, because that leaves their threads with 2 MiB each."""

if TYPE_CHECKING:
    from stages.targets.npu2.audit import Findings

__all__ = ["DESCRIBES", "SUFFIX", "Job", "command_line", "fingerprint", "link", "write_program"]

SUFFIX = ".elf"
DESCRIBES = True
INTERMEDIATE = "air_project"
ELF = "out.elf"
MODULE = "air.mlir"

_UNIT = re.compile(r"(?:aie\.device\([^)]*\)|air\.segment|air\.herd|air\.launch)\s+@(\w+)")


@dataclass(frozen=True)
class Job:
    """One ELF to make: text of the module, its function, aircc's extra options, the objects that it links by name."""

    program: str
    mlir: str
    function: str
    options: Sequence[str] = ()
    objects: Mapping[str, Path] = field(default_factory=dict)


def write_program(module: Path, library: str, work: Path, time_limit: int = TIME_LIMIT) -> list[Path]:
    """Step action: `elf/LIBRARY.elf`, what is to be known of it as `elf/LIBRARY.json`, and `build/logs/LIBRARY.log`, of
    a module's MLIR and the description beside it. Returns the objects that it links.

    Raises UserError. When aircc fails, or what it made does not pass the audit, its log is left in the artifact
    directory.
    """
    need_npu_tools()
    about, objects = read_json(module.with_suffix(".json")), linked(module)
    job = Job(library, module.read_text(), about["function"], about["options"], objects)
    scratch = work / "aircc"
    log, told = make(job, scratch, module.parents[2] / LOGS / f"{library}.log", time_limit)
    (work / "elf").mkdir(exist_ok=True)
    (scratch / ELF).rename(work / "elf" / f"{library}{SUFFIX}")
    # A dot in the name is a bucket, not a suffix.
    write_json(work / "elf" / f"{library}.json", told)
    Tree(work).write(LOGS / f"{library}.log", log.encode())
    shutil.rmtree(scratch)
    return list(objects.values())


def make(job: Job, scratch: Path, failed_log: Path, time_limit: int = TIME_LIMIT) -> tuple[str, dict[str, Any]]:
    """Link a program in the new directory `scratch`, audit what came of it, and give its kernel a name of its own.
    Returns the log, and what is to be known of the ELF. Raises UserError, after writing the log to `failed_log`."""
    log = link(job, scratch, failed_log, time_limit)
    findings = _audited(job, scratch, log, failed_log)
    if findings.resets % 2:
        # The compiler adds resets of its own where a DMA repeats, which the number of launches does not tell.
        log += f"\n{job.program}: {findings.resets} resets of the array a dispatch, an odd number: linked again\n"
        shutil.rmtree(scratch)
        job = replace(job, mlir=_toggled(job.mlir))
        log += link(job, scratch, failed_log, time_limit)
        findings = _audited(job, scratch, log, failed_log, even=True)
    size = instructions(scratch / INTERMEDIATE, job.function).stat().st_size
    kernel, why_not = rename(scratch / INTERMEDIATE, job.function, scratch / ELF, kernel_name(job.program))
    notes = [f"its kernel stays {kernel}, so that it shares no context: {why_not}"] if why_not else []
    log += "".join(f"\n{job.program}: {note}" for note in (*notes, *findings.notes))
    return log, {"kernel": kernel, "instruction_bytes": size, **asdict(findings)}


def _toggled(mlir: str) -> str:
    module = air.parse_mlir(mlir)
    air.toggle_settling(module)
    return air.to_mlir(module)


def _audited(job: Job, scratch: Path, log: str, failed_log: Path, even: bool = False) -> Findings:
    """UserError, after writing the log, if what aircc made would not run right. `even`: nor an odd number of resets."""
    # Loads MLIR's framework, which an up-to-date build does not need.
    from stages.targets.npu2.audit import audit_made

    try:
        findings = audit_made(job.program, air.parse_mlir(job.mlir), scratch / INTERMEDIATE, job.function)
        if even and findings.resets % 2:
            raise UserError(f"{job.program}: resets the array {findings.resets} times a dispatch, which must be even")
        size = instructions(scratch / INTERMEDIATE, job.function).stat().st_size
        limits.require(job.program, "bytes of the NPU's heap for runs", heap_bytes(size), RUNS_SHARE)
    except UserError as error:
        _leave_log(failed_log, f"{log}\n{error}\n")
        raise UserError(f"{error}: the whole log is {failed_log}") from None
    return findings


def _leave_log(path: Path, log: str) -> None:
    """Write the log of what failed into the artifact directory (`LOGS` in it), which may have come from elsewhere."""
    directory = path.parents[len(LOGS.parts)]
    Tree(directory).write(path.relative_to(directory), log.encode())


def link(job: Job, scratch: Path, failed_log: Path, time_limit: int = TIME_LIMIT) -> str:
    """Run aircc in the new directory `scratch`, where `out.elf` then is; returns its log. Raises UserError, after
    writing the log to `failed_log`."""
    scratch.mkdir(parents=True)
    (scratch / MODULE).write_text(job.mlir)
    for name, path in job.objects.items():
        # aiecc looks for what `link_with` names in its working directory.
        shutil.copyfile(path, scratch / name)
    started = time.monotonic()
    status, log = _run(command_line(job), scratch, time_limit)
    if status == -signal.SIGSEGV:
        # Some passes walk containers in the order of addresses: the same module may pass when tried again.
        shutil.rmtree(scratch / INTERMEDIATE, ignore_errors=True)
        crashed = f"{log}\n{job.program}: aircc crashed (SIGSEGV), tried again\n"
        status, log = _run(command_line(job), scratch, time_limit)
        log = crashed + log
    problem = _problem(job, status, log, scratch, time_limit)
    if problem is None:
        return log
    header = f"{' '.join(command_line(job))}\nended with {status} after {time.monotonic() - started:.0f} s\n\n"
    _leave_log(failed_log, header + log)
    raise UserError(f"{job.program}: {problem}: the whole log is {failed_log}")


def command_line(job: Job) -> list[str]:
    """aircc's command for one ELF, to be run where the module and its objects are. The tools are there."""
    driver, compiler = aircc(), peano()
    assert driver and compiler
    # XRT finds the kernel by instance name; with another one than the function's it hangs at run time.
    names = ["--elf-name", ELF, "--xclbin-instance-name", job.function, "--tmpdir", INTERMEDIATE]
    stack = f"--stack-size={limits.STACK_BYTES}"
    compilers = ["--peano", str(compiler.path), "--no-xchesscc", "--no-xbridge"]
    return [
        str(driver.path),
        "--device",
        "npu2",
        MODULE,
        "--output-format",
        "elf",
        *names,
        stack,
        *compilers,
        *job.options,
    ]


def _run(command: Sequence[str], directory: Path, time_limit: int) -> tuple[int | None, str]:
    """Exit status (None: out of time) and everything the command said."""
    say(f"waiting for {Path(command[0]).name}")
    with (directory / "log").open("w+b") as log:
        child = subprocess.Popen(
            command,
            cwd=directory,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=raise_stack,
        )
        try:
            status: int | None = child.wait(time_limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if child.poll() is None:
                # aircc's own children are in its session: none may outlive it.
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        log.seek(0)
        return status, log.read().decode(errors="replace")


def environment() -> dict[str, str]:
    """aircc finds aiecc on PATH, which wheels do not put there."""
    tools = [str(tool.path.parent) for tool in (aircc(), aiecc()) if tool]
    return os.environ | {"PATH": os.pathsep.join([*dict.fromkeys(tools), os.environ.get("PATH", os.defpath)])}


def raise_stack() -> None:
    """Raise this process's stack limit as far as it may."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    soft = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def _problem(job: Job, status: int | None, log: str, scratch: Path, time_limit: int) -> str | None:
    """What went wrong, in the tool's own words where it has any; None if the ELF is there and whole."""
    if status is None:
        return f"aircc was stopped after {time_limit} s"
    # Without directories.
    error = re.sub(r"[\w.+-]*/(?=\S)", "", complaint(log))[:400]
    if status == -signal.SIGKILL:
        return "aircc was killed, probably for lack of memory: build with doit -n 1 or on a machine with 16 GiB"
    if status < 0:
        return f"aircc crashed ({signal.Signals(-status).name}): {error}: try again, or grouping=separate"
    if status:
        return f"aircc: {error}{_unit(job, error, scratch)}"
    elf = scratch / ELF
    if not elf.is_file() or elf.stat().st_size == 0:
        return f"aircc made no ELF, though it reports success: {error}"
    if not has_instance(elf.read_bytes(), job.function):
        return f"aircc made an ELF without the program {job.function}: {error}"
    if "Error generating NPU instructions" in log:
        return f"aircc made an ELF without instructions: {error}"
    return None


def has_instance(elf: bytes, function: str) -> bool:
    """Whether these are bytes of an ELF that has a symbol of this name."""
    return elf.startswith(b"\x7fELF") and b"\0" + function.encode() + b"\0" in elf


def _unit(job: Job, error: str, scratch: Path) -> str:
    """Which launch the error is about: the last one that begins at or before the line that it names."""
    match = re.search(r'"?([\w.-]+\.mlir)"?:(\d+)', error)
    paths = [path for path in (scratch, scratch / INTERMEDIATE) if match and (path / match[1]).is_file()]
    if not match or not paths:
        return ""
    lines = (paths[0] / match[1]).read_text(errors="replace").splitlines()[: int(match[2])]
    names = _UNIT.findall("\n".join(lines))
    if not names:
        return ""
    segments = re.findall(r"air\.segment @(\w+)", job.mlir)
    number = f", launch {segments.index(names[-1]) + 1} of {len(segments)}" if names[-1] in segments else ""
    return f" (in {names[-1]}{number})"
