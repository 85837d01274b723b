"""Commands of this Python as forks of a process that has imported what they import.

A start takes 0.05 s of CPU time instead of 0.4. To a test it is a process as any other: a child of this one, with its
own environment, directory, files, signals and exit status. Where that cannot be had, it is started as usual: on other
systems, and where variables that an import has read have other values. Tests of what a start takes or imports use
`subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_start: dict[str, str] = {}
"""The environment that tests begin with."""
_OWN = {"stages": ROOT, "llama_npu2": ROOT / "runtime"}
"""Packages of which there are copies: only commands that would find those of this checkout have them imported."""
_OTHERS = (
    "doit.doit_cmd",
    "doit.tools",
    "asyncio",
    "cloudpickle",
    "configparser",
    "email.parser",
    "filelock",
    "http.client",
    "importlib.metadata",
    "jinja2",
    "llguidance",
    "ml_dtypes",
    "multiprocessing.connection",
    "numpy",
    "safetensors",
    "sqlite3",
    "starlette.applications",
    "threadpoolctl",
    "tokenizers",
    "tomllib",
    "tqdm",
    "uvicorn",
    "xxhash",
)
_OF_DOIT = (
    "llama_npu2.checkout",
    "llama_npu2.devices.xrt",
    "stages.commands.verbs",
    "stages.commands.words",
    "stages.engine.bar",
    "stages.engine.doit_tasks",
    "stages.graph",
    "stages.kernels.*",
    "stages.model.families.*",
    "stages.sharing.provenance",
    "stages.targets.cpu.programs",
    "stages.targets.npu2.groupings",
    "stages.targets.npu2.toolchain",
)
"""Not `stages.commands.tasks`, which reads the command line."""
_OF_THE_RUNTIME = ("llama_npu2.cli.completion", "llama_npu2.engine.llama", "llama_npu2.serve.listen")
VERBOSE = {"LLAMA_NPU2_VERBOSITY": "1"}
"""The environment with which doit names steps."""
_BY_OTHERS = ("GLIBC_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "RAYON_", "TQDM_")
"""What variables begin with that are read by what is no Python, or looked for among all."""
_ALIKE = {"KMP_DUPLICATE_LIB_OK", "PYTHONPATH"}
"""Variables that may differ: threadpoolctl sets the first when it is imported, and a fork is told the other."""
_SUBREAPER = 36
"""The option of prctl(2) that makes this process the parent of orphans among those that come from it."""


def pytest_configure() -> None:
    _start.update(os.environ | VERBOSE)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process of `sys.executable -m MODULE` or `-c CODE`, forked where possible."""

    def _execute_child(self, *given: Any) -> None:
        what = inspect.signature(super()._execute_child).bind(*given).arguments
        request = _request(what)
        server = request and _server(*_imported(request))
        if not request or not server or not server.suits(request["environment"]):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        streams = [what["p2cread"], what["c2pwrite"], what["errwrite"]]
        files = [number if each == -1 else each for number, each in enumerate(streams)]
        self.pid = server.fork(request, [*files, *request["pass_fds"]])
        self._child_created = True
        of_pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(what[name] for name in of_pipes))  # type: ignore[attr-defined]


def run(
    command: Sequence[str], *, input: str | None = None, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run` does with text, whose output is captured."""
    pipe = subprocess.PIPE
    stdin = {} if input is None else {"stdin": pipe}
    with Popen(command, stdout=pipe, stderr=pipe, text=True, **stdin, **options) as process:
        try:
            output, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _request(what: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a server has to know, None where a process is not one of those."""
    executable, *arguments = map(os.fspath, what["args"])
    plain = executable == sys.executable and len(arguments) > 1 and arguments[0] in ("-m", "-c")
    if sys.platform != "linux" or not plain or what["preexec_fn"] or not what["close_fds"]:
        return None
    environment = dict(os.environ if what["env"] is None else what["env"])
    cwd = Path.cwd() / (what["cwd"] or "")
    searched = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    return {
        "arguments": arguments,
        "cwd": str(cwd),
        "environment": environment,
        "path": [str(cwd) if arguments[0] == "-m" else "", *(str(cwd / each) for each in searched), *_installed()],
        "pass_fds": sorted(what["pass_fds"]),
        "session": what["start_new_session"],
    }


@cache
def _installed() -> list[str]:
    """Return where Python looks for what is installed."""
    script = "import json, sys; print(json.dumps(sys.path[1:]))"
    environment = {name: value for name, value in _start.items() if name != "PYTHONPATH"}
    return json.loads(subprocess.check_output([sys.executable, "-c", script], env=environment))  # type: ignore[no-any-return]


def _imported(request: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules that a server should have for a command."""
    path = [Path(request["cwd"], each) for each in request["path"]]
    found = [next((each.resolve() for each in path if (each / name).is_dir()), None) for name in _OWN]
    if found != list(_OWN.values()):
        return _OTHERS
    return (*_OTHERS, *(_OF_DOIT if request["arguments"][1] == "doit" else _OF_THE_RUNTIME))


class _Server:
    """A process of `fork_server.py`."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._connection, other = socket.socketpair()
        self._turn = threading.Lock()
        path = [f"{ROOT}", f"{ROOT / 'runtime'}", *filter(None, _start.get("PYTHONPATH", "").split(os.pathsep))]
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(other.fileno()), *modules]
        environment = _start | {"PYTHONPATH": os.pathsep.join(path)}
        with other:
            self._process = subprocess.Popen(command, env=environment, pass_fds=[other.fileno()])
        self._stream = self._connection.makefile("rwb")
        atexit.register(self._end)

    @cached_property
    def _read(self) -> list[str]:
        """Environment variables that were read by what it imported."""
        return json.loads(self._stream.readline())  # type: ignore[no-any-return]

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Return whether what it imported would have found the same."""
        with self._turn:
            read = {*self._read, *(name for name in {*environment, *_start} if name.startswith(_BY_OTHERS))}
        return all(environment.get(name) == _start.get(name) for name in read - _ALIKE)

    def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        """Return the number of a child of this process that a fork has become."""
        with self._turn:
            _prctl(_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [b"\n"], list(files))
                self._stream.write(json.dumps(request).encode() + b"\n")
                self._stream.flush()
                return int(self._stream.readline())
            finally:
                _prctl(_SUBREAPER, 0)

    def _end(self) -> None:
        self._stream.close()
        self._connection.close()
        self._process.wait()


@cache
def _server(*modules: str) -> _Server:
    return _Server(modules)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
