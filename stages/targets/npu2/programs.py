"""Compiles MLIR modules into ELFs for the NPU with aircc, and explains its failures.

The kernel of each ELF gets a name of its own, so that programs can share a hardware context. aiecc calls the kernel of
every ELF after its device, `main`, and gives each launch a kernel of its own besides. A hardware context takes no two
kernels of the same name. The names are in a configuration file that aiecc leaves; aiebu-asm builds the ELF again from a
changed copy of it.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_npu2.devices.xrt.limits import RUNS_SHARE, heap_bytes
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.files import read_json, write_json
from stages.engine.object_cache import cached_object, copy_cached
from stages.engine.objects import complaint, linked
from stages.engine.places import LOGS, ROOT
from stages.engine.progress import say
from stages.engine.tree import Tree
from stages.targets.npu2.toolchain import aiebu_asm, aiecc, aircc, need_npu_tools, peano
from stages.targets.npu2.toolchain import npu_fingerprint as fingerprint

TIME_LIMIT = 3600
"""Seconds that aircc may take for one ELF. Decode modules take seconds, prefill modules minutes."""

STACK_BYTES = 4 << 30
"""Stack limit of aircc, whose passes recurse deeply over long modules. Without a limit its threads get only 2 MiB."""

if TYPE_CHECKING:
    from stages.targets.npu2.audit import Findings

__all__ = ["DESCRIBES", "SUFFIX", "Job", "command_line", "fingerprint", "link", "write_program"]

SUFFIX = ".elf"
DESCRIBES = True
INTERMEDIATE = "air_project"
"""The directory for aircc's temporary files."""
ELF, FACTS, LOG = "out.elf", "facts.json", "log"
"""The ELF as aircc makes it, and what the cache has besides: the description of the ELF and aircc's log."""
MODULE = "air.mlir"
CONFIGURATION = "full_elf_config.json"
"""The input of aiebu-asm, which aiecc leaves among its temporary files."""

STOCK = "main"
"""aiecc's name for every program's kernel."""

RENAME_LIMIT = 600
"""Seconds that aiebu-asm may take."""

_UNIT_NAME = re.compile(r"(?:aie\.device\([^)]*\)|air\.segment|air\.herd|air\.launch)\s+@(\w+)")


@frozen
class Job:
    """One ELF to make."""

    program: str
    """Its name, for messages."""
    mlir: str
    """The text of the module."""
    function: str
    options: Sequence[str] = ()
    """Additional options of aircc."""
    objects: Mapping[str, Path] = field(default_factory=dict)
    """The objects that it links, by the name that the module uses."""


def write_program(module: Path, library: str, cache: Path, work: Path) -> list[Path]:
    """Write `elf/LIBRARY.elf`, its description `elf/LIBRARY.json` and `build/logs/LIBRARY.log` (step action).

    A program with the same text, objects and compilers that was built before, as of the model that this one is a
    fine-tune of, comes out of `cache`.

    Args:
        module: The MLIR; the description of the module is next to it.

    Returns:
        The objects that the program links.

    Raises:
        UserError: aircc failed, or its output did not pass the audit. The log is then in the artifact directory.
    """
    need_npu_tools()
    description, objects = read_json(module.with_suffix(".json")), linked(module)
    job = Job(library, module.read_text(), description["function"], description["options"], objects)
    made_by = (fingerprint(), library, job.function, tuple(job.options))
    sources = [module, *objects.values(), *_judges()]

    def pack(output: Path) -> list[Path]:
        scratch = work / "aircc"
        log, facts = make(job, scratch, module.parents[2] / LOGS / f"{library}.log")
        _pack(output, {ELF: (scratch / ELF).read_bytes(), FACTS: json.dumps(facts).encode(), LOG: log.encode()})
        shutil.rmtree(scratch)
        return []

    copy_cached(partial(cached_object, cache, library, made_by, sources, pack), packed := work / "packed")
    made = _unpacked(packed)
    packed.unlink()
    tree = Tree(work)
    tree.write(Path("elf") / f"{library}{SUFFIX}", made[ELF])
    # A dot in the name is a bucket, not a suffix.
    write_json(work / "elf" / f"{library}.json", json.loads(made[FACTS]))
    tree.write(LOGS / f"{library}.log", made[LOG])
    return list(objects.values())


def _judges() -> list[Path]:
    """Return the project's sources that decide how aircc is run and what the audit refuses.

    They are a part of the key, so that no program is taken from the cache that today's rules would refuse.
    """
    return [path for room in ("air", "targets/npu2") for path in sorted((ROOT / "stages" / room).glob("*.py"))]


def _pack(path: Path, files: Mapping[str, bytes]) -> None:
    """Write an archive of files, which is the same for the same content."""
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def _unpacked(path: Path) -> dict[str, bytes]:
    """Return the files of an archive."""
    with tarfile.open(path) as archive:
        return {entry.name: file.read() for entry in archive if (file := archive.extractfile(entry))}


def make(job: Job, scratch: Path, failed_log: Path) -> tuple[str, dict[str, Any]]:
    """Compile and audit a program in the new directory `scratch`, and give its kernel a name of its own.

    Returns:
        (log, description of the ELF as JSON)

    Raises:
        UserError: After writing the log to `failed_log`.
    """
    log = link(job, scratch, failed_log)
    findings = _audit(job, scratch, log, failed_log)
    if findings.resets % 2:
        # The compiler adds resets where a DMA repeats, so the number of launches does not tell the number of resets.
        log += f"\n{job.program}: {findings.resets} resets of the array a dispatch, an odd number: linked again\n"
        shutil.rmtree(scratch)
        job = replace(job, mlir=with_settling_toggled(job.mlir))
        log += link(job, scratch, failed_log)
        findings = _audit(job, scratch, log, failed_log, even=True)
    size = instructions(scratch / INTERMEDIATE, job.function).stat().st_size
    kernel, reason = rename(scratch / INTERMEDIATE, job.function, scratch / ELF, kernel_name(job.program))
    notes = [f"its kernel stays {kernel}, so that it shares no context: {reason}"] if reason else []
    log += "".join(f"\n{job.program}: {note}" for note in (*notes, *findings.notes))
    return log, {"kernel": kernel, "instruction_bytes": size, **asdict(findings)}


def with_settling_toggled(mlir: str) -> str:
    """Add the launch that settles the number of resets, or remove it."""
    module = air.parse_mlir(mlir)
    air.toggle_settling(module)
    return air.to_mlir(module)


def _audit(job: Job, scratch: Path, log: str, failed_log: Path, even: bool = False) -> Findings:
    """Raise UserError, after writing the log, if the program would not run right.

    `even`: refuse an odd number of resets too.
    """
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
    """Write the log of a failure to `LOGS` of the artifact directory, which may come from another machine."""
    directory = path.parents[len(LOGS.parts)]
    Tree(directory).write(path.relative_to(directory), log.encode())


def link(job: Job, scratch: Path, failed_log: Path) -> str:
    """Run aircc in the new directory `scratch`, where it leaves `out.elf`. Return its log.

    Raises:
        UserError: After writing the log to `failed_log`.
    """
    scratch.mkdir(parents=True)
    (scratch / MODULE).write_text(job.mlir)
    for name, path in job.objects.items():
        # aiecc looks for what `link_with` names in its working directory.
        shutil.copyfile(path, scratch / name)
    started = time.monotonic()
    status, log = _run(command_line(job), scratch)
    tries = 1
    while status == -signal.SIGSEGV and tries < _TRIES:
        # Some passes iterate in the order of addresses: the same module may pass at the next attempt.
        tries += 1
        status, log = _run_again(job, scratch, f"{log}\n{job.program}: aircc crashed (SIGSEGV), tried again\n")
    if status and _NO_ROOM in log:
        why = "no room after the buffers for static data, linked again with buffers one after the other"
        status, log = _run_again(job, scratch, f"{log}\n{job.program}: {why}\n", _sequential(scratch))
    problem = _problem(job, status, log, scratch)
    if problem is None:
        return log
    header = f"{' '.join(command_line(job))}\nended with {status} after {time.monotonic() - started:.0f} s\n\n"
    _leave_log(failed_log, header + log)
    raise UserError(f"{job.program}: {problem}: the whole log is {failed_log}")


_TRIES = 8
"""How often aircc is run that crashes, which takes it seconds: attention of two rows of cores with a token
each makes up to three runs of four crash (mlir-air of 2026-05-08, where it makes channels of a herd's transfers)."""

_NO_ROOM = "will not fit in region 'data'"
"""The linker's words where static data of a core finds no room. It puts it after the highest buffer, and the compiler
deals buffers to four banks: the last can be full while others are not (until mlir-aie #3406)."""


def _sequential(scratch: Path) -> Path:
    """Return a new directory with an `aiecc` that puts buffers one after the other: aircc has no option for that."""
    directory, driver = scratch / "sequential", aiecc()
    assert driver
    directory.mkdir()
    script = directory / "aiecc"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(str(driver.path))} --alloc-scheme=basic-sequential "$@"\n')
    script.chmod(0o755)
    return directory


def _run_again(job: Job, scratch: Path, log: str, *first: Path) -> tuple[int | None, str]:
    """Run aircc once more, and return its exit status and both logs."""
    shutil.rmtree(scratch / INTERMEDIATE, ignore_errors=True)
    status, more = _run(command_line(job), scratch, *first)
    return status, log + more


def command_line(job: Job) -> list[str]:
    """Return aircc's command for one ELF, to be run in the directory of the module and its objects. The tools exist."""
    driver, compiler = aircc(), peano()
    assert driver and compiler
    # XRT finds the kernel by instance name; if that is not the name of the function, it hangs at run time.
    names = ["--elf-name", ELF, "--xclbin-instance-name", job.function, "--tmpdir", INTERMEDIATE]
    compilers = ["--peano", str(compiler.path), "--no-xchesscc", "--no-xbridge"]
    fixed = ["--device", "npu2", MODULE, "--output-format", "elf"]
    return [str(driver.path), *fixed, *names, f"--stack-size={limits.STACK_BYTES}", *compilers, *job.options]


def _run(command: Sequence[str], directory: Path, *first: Path) -> tuple[int | None, str]:
    """Run a command. Return its exit status (None after `TIME_LIMIT`) and its output. `first`: see `environment`."""
    say(f"waiting for {Path(command[0]).name}")
    with (directory / "log").open("w+b") as log:
        child = subprocess.Popen(
            command,
            cwd=directory,
            env=environment(*first),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=raise_stack,
        )
        try:
            status: int | None = child.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if child.poll() is None:
                # The children of aircc are in its session: none may outlive it.
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        log.seek(0)
        return status, log.read().decode(errors="replace")


def environment(*first: Path) -> dict[str, str]:
    """Return an environment in which aircc finds aiecc.

    aiecc must be on PATH, where wheels do not put it, or in a directory of `first`.
    """
    tools = [*map(str, first), *(str(tool.path.parent) for tool in (aircc(), aiecc()) if tool)]
    return os.environ | {"PATH": os.pathsep.join([*dict.fromkeys(tools), os.environ.get("PATH", os.defpath)])}


def raise_stack() -> None:
    """Raise the stack limit of this process to `STACK_BYTES`, or as far as it may."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    soft = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def _problem(job: Job, status: int | None, log: str, scratch: Path) -> str | None:
    """Return what went wrong, in the words of the tool if it has any; None if the ELF is complete."""
    if status is None:
        return f"aircc was stopped after {TIME_LIMIT} s"
    # Directories are left out.
    error = re.sub(r"[\w.+-]*/(?=\S)", "", complaint(log))[:400]
    if status == -signal.SIGKILL:
        return "aircc was killed, probably for lack of memory: build with doit -n 1 or on a machine with 16 GiB"
    if status < 0:
        return f"aircc crashed ({signal.Signals(-status).name}): {error}: try again, or npu.grouping=separate"
    if status and _NO_ROOM in log:
        return f"aircc: {error}: raise STATIC_BYTES in stages/air/limits.py"
    if status:
        return f"aircc: {error}{_failed_launch(job, error, scratch)}"
    elf = scratch / ELF
    if not elf.is_file() or elf.stat().st_size == 0:
        return f"aircc made no ELF, though it reports success: {error}"
    if not has_instance(elf.read_bytes(), job.function):
        return f"aircc made an ELF without the program {job.function}: {error}"
    if "Error generating NPU instructions" in log:
        return f"aircc made an ELF without instructions: {error}"
    return None


def has_instance(elf: bytes, function: str) -> bool:
    """Tell whether these bytes are an ELF with a symbol of this name."""
    return elf.startswith(b"\x7fELF") and b"\0" + function.encode() + b"\0" in elf


def _failed_launch(job: Job, error: str, scratch: Path) -> str:
    """Return the launch that an error is about: the last one that begins at or before the line that it names."""
    match = re.search(r'"?([\w.-]+\.mlir)"?:(\d+)', error)
    paths = [path for path in (scratch, scratch / INTERMEDIATE) if match and (path / match[1]).is_file()]
    if not match or not paths:
        return ""
    lines = (paths[0] / match[1]).read_text(errors="replace").splitlines()[: int(match[2])]
    names = _UNIT_NAME.findall("\n".join(lines))
    if not names:
        return ""
    segments = re.findall(r"air\.segment @(\w+)", job.mlir)
    number = f", launch {segments.index(names[-1]) + 1} of {len(segments)}" if names[-1] in segments else ""
    return f" (in {names[-1]}{number})"


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
        run = subprocess.run(command, cwd=elf.parent, capture_output=True, text=True, check=False, timeout=RENAME_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return STOCK, f"aiebu-asm: {error}"
    content = renamed.read_bytes() if renamed.is_file() else b""
    if run.returncode or not content.startswith(b"\x7fELF") or mangled(name) not in content:
        return STOCK, f"aiebu-asm ended with {run.returncode}: {complaint(run.stderr + run.stdout)[:200]}"
    renamed.replace(elf)
    return name, ""
