"""The tool versions of the NPU that were checked, the oldest ones that can work, and where to get them.

`doit doctor` compares a machine with them; a test compares `docs/tutorials/ryzen-ai.md` with them.
"""

from __future__ import annotations

import re

from llama_npu2.frozen import frozen

_RELEASES = "https://github.com/Xilinx/{}/releases/expanded_assets/{}"
PEANO = "21.0.0.2026080601+f4a72c27"
"""The `llvm-aie` version that mlir-air's own tests on NPU2 pin (`buildAndTestRyzenAI.yml`, 2026-08); they got wrong
numbers with the LLVM 22 nightly 22.0.0.2026081201."""


@frozen
class Compiler:
    """A commit of mlir-air whose passes were checked with this project's modules, and the nightly wheel after it."""

    commit: str
    date: str
    wheel: tuple[str, str]
    """Version range of the `mlir_air` wheel: (at least, less than). A nightly's version has the hour of its build."""
    mlir_aie: str
    """The `mlir_aie` version that the extra `aie` of this wheel pins."""
    mlir_aie_page: str
    """The release of mlir-aie whose page has that wheel."""

    @property
    def requirements(self) -> tuple[str, ...]:
        """The requirements for pip."""
        return f"mlir_air[aie]>={self.wheel[0]},<{self.wheel[1]}", f"llvm-aie=={PEANO}"

    @property
    def pages(self) -> tuple[str, ...]:
        """The pages where pip finds `mlir_air`, `mlir_aie` and `llvm-aie`."""
        return (
            _RELEASES.format("mlir-air", "latest-air-wheels"),
            _RELEASES.format("mlir-aie", self.mlir_aie_page),
            _RELEASES.format("llvm-aie", "nightly"),
        )

    @property
    def install(self) -> str:
        """The pip command."""
        wanted = (f"'{requirement}'" for requirement in self.requirements)
        return " ".join(["pip install", *wanted, *(f"-f {page}" for page in self.pages)])


COMPILERS = (
    Compiler(
        "4216fa496",
        "2026-05-08",
        ("0.0.1.2026050904", "0.0.1.2026050924"),
        "0.0.1.2026050821+b37dc33",
        "latest-wheels-3",
    ),
    Compiler("5c49b46c0", "2026-07-29", ("0.0.1.2026073000", "0.0.1.2026073024"), "1.4.0", "latest-wheels-4"),
)
"""The first is the one to install. The sources were checked, built with LLVM 22.1 and mlir-aie as of `MLIR_AIE`; nobody
has run the wheels with this project."""

MLIR_AIE = ("979629649", "2026-04-23")
"""Commit and date."""

XRT_PACKAGES = ("libxrt-npu2", "libxrt-utils", "libxrt-utils-npu", "python3-xrt")
"""Packages of Ubuntu 26.04, and of AMD's archive for 24.04 (ppa:amd-team/xrt, which also has the driver)."""

LEAST: dict[str, tuple[str, str]] = {
    "XRT": ("2.21.75", "hardware contexts from ELF files in its Python bindings"),
    "NPU firmware": ("1.1", "the command that runs ELF programs"),
    "Linux": ("7.0", "a driver that takes this firmware"),
    "mlir_air": (COMPILERS[0].wheel[0], "what was checked first"),
    "mlir_aie": ("0.0.1.2026042300", "what was checked first"),
}
"""The oldest version of each tool that can work, and what needs it.

All our runs are ELF programs. The driver refuses them unless the firmware has `AIE2_NPU_COMMAND`, which it asks for by
the protocol's version: 6.15 or 7 (xdna-driver, `npu4_regs.c`). Kernels before 7.0 take protocol 6.12 only (#1074), so
firmware 1.0. A driver from a package, or brought to an older kernel by a distribution, is known by the firmware that
runs on it.
"""

SHARED_CONTEXT = "2.23"
"""The first XRT whose bindings add a program to a context (`add_config`); before, each program has its own context."""

NPU2_DEVICES: dict[tuple[str, str], str] = {
    ("0x17f0", "0x10"): "Strix",
    ("0x17f0", "0x11"): "Strix Halo",
    ("0x17f0", "0x20"): "Krackan",
}
"""(PCI device, revision) -> product. All have 8 columns."""

NPU1_DEVICE = "0x1502"
NPU2_COLUMNS = 8


def checked(package: str, installed: str) -> bool:
    """Tell whether a wheel of the compiler has the version that was checked, or the first one after it."""
    if package == "mlir_air":
        return any(version(first) <= version(installed) < version(end) for first, end in (c.wheel for c in COMPILERS))
    return installed in ({PEANO} if package == "llvm-aie" else {compiler.mlir_aie for compiler in COMPILERS})


def known_good() -> dict[str, str]:
    """Return the versions that were checked, as text for people."""
    return {
        "mlir-air": ", ".join(f"{compiler.commit} ({compiler.date})" for compiler in COMPILERS),
        "mlir-aie": "{} ({})".format(*MLIR_AIE),
        "llvm-aie": PEANO,
        "compilers": COMPILERS[0].install,
        **{f"least {what}": least for what, (least, _) in LEAST.items()},
    }


def version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `2.23.0-rc1` -> (2, 23, 0)."""
    numbers = []
    for part in re.split("[-+]", text)[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
