"""Memory that kernels ask for: one that goes beyond it ends its process, and damages nothing."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from stages.targets.cpu.toolchain import FLAGS, INCLUDE, need_host_compiler

_PROGRAM = """
#include <cstring>
#include "team.h"

int main(int, char **arguments) {
    const size_t asked = std::strtoull(arguments[1], nullptr, 10), touched = std::strtoull(arguments[2], nullptr, 10);
    Scratch scratch;
    const size_t all[] = {asked / 2, 3 * asked, asked};
    for (size_t bytes : all) std::memset(scratch.at_least(bytes), 1, bytes);
    static_cast<volatile char *>(scratch.at_least(asked))[touched] = 1;
    scratch.release();
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scratch")
    source, output = directory / "scratch.cc", directory / "scratch"
    source.write_text(_PROGRAM)
    subprocess.run([*need_host_compiler(), *FLAGS, INCLUDE, str(source), "-o", str(output)], check=True)
    return output


@pytest.mark.parametrize("asked", [1, 64, 4095, 4096, 100_000])
def test_memory_ends_where_nothing_may_be_touched(program: Path, asked: int) -> None:
    def touching(byte: int) -> int:
        return subprocess.run([program, str(asked), str(byte)], check=False).returncode

    assert touching(asked - 1) == 0
    assert touching(-(-asked // 64) * 64) == -signal.SIGSEGV, "in whole lines"
