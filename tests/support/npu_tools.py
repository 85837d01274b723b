"""The NPU's tools as scripts that do what the tests need of them."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT
from tests.support.objects import PEANO_OBJECT


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without packages, which take half of a start; what needs them looks for them.
    path.write_text(f"#!{sys.executable} -S\nimport sys, os, json, pathlib\nargs = sys.argv[1:]\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


_HELD = tempfile.TemporaryDirectory(prefix="left-by-aircc-")

LEAVE = f"""
def leave(args, edit):
    import hashlib, shutil
    mlir = pathlib.Path("air.mlir").read_text()
    function = args[args.index("--xclbin-instance-name") + 1]
    kept = pathlib.Path({_HELD.name!r}, hashlib.sha256("|".join((mlir, function, edit)).encode()).hexdigest())
    if not kept.exists():
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "runtime")!r}]
        import re, site
        site.main()
        from tests.support.npu_ir import write_made
        change = eval(edit, dict(re=re))
        part = kept.with_suffix(f".{{os.getpid()}}")
        write_made(part, mlir, function, lambda text: change(text, mlir))
        config = part / "full_elf_config.json"
        config.write_text(config.read_text().replace(str(part), "TMPDIR"))
        part.rename(kept)
    to = pathlib.Path(args[args.index("--tmpdir") + 1])
    shutil.copytree(kept, to, dirs_exist_ok=True)
    config = to / "full_elf_config.json"
    config.write_text(config.read_text().replace("TMPDIR", str(to.absolute())))
"""
"""A function that leaves what aircc and aiecc do for the audit, changed by `edit`, and keeps it: it takes a second."""


def install(root: Path, clang: str, aircc: str, aiecc: str) -> dict[str, str]:
    """Write fakes of every tool that builds for the NPU; returns the environment in which they are found."""
    script(root / "peano/bin/clang++", f"peano_object = {PEANO_OBJECT!r}\n{clang}")
    script(root / "bin/aircc", LEAVE + aircc)
    script(root / "other/aiecc", aiecc)
    (root / "include/aie_api").mkdir(parents=True)
    (root / "include/aie_api/aie.hpp").write_text("")
    return {
        "PATH": f"{root}/bin:{root}/other:{os.environ['PATH']}",
        "PEANO_INSTALL_DIR": str(root / "peano"),
        "AIE_API_INCLUDE": str(root / "include"),
    }
