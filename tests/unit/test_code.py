"""Which modules count as a step's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.engine import code, definitions
from stages.engine.code import Code
from stages.engine.digests import Digests
from stages.engine.places import ROOT
from stages.engine.syntax import syntax


def modules(tmp_path: Path, module: str) -> set[str]:
    files = Code(Digests(tmp_path / "digests.json")).files(module)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_imports_are_found_in_any_form() -> None:
    source = b"""
import stages.a, stages.b as c
from stages.d import (
    e,  # a comment, with from stages.no import way
    f as g,
)
text = "from stages.no import way"
def lazy():
    from stages.h import i; import stages.j
from . import k
from ..l import m
if TYPE_CHECKING:
    from stages.no import way
"""
    assert syntax(source).imports == [
        (0, "stages.a", ""),
        (0, "stages.b", ""),
        (0, "stages.d", "e"),
        (0, "stages.d", "f"),
        (0, "stages.h", "i"),
        (0, "stages.j", ""),
        (1, "", "k"),
        (2, "l", "m"),
    ]


def test_what_is_imported_by_name_counts(tmp_path: Path) -> None:
    """Tables find their members with importlib; who uses a table may use any of them."""
    found = modules(tmp_path, "stages.model.plan")
    assert {"stages/kernels/gemm.py", "stages/model/parts/builders.py", "stages/weights/formats/bf16.py"} <= found


def test_a_modules_data_counts_and_has_names(tmp_path: Path) -> None:
    """Rates of the machine decide on descriptions of programs, and an edit of one is told by its name."""
    assert "stages/estimate/constants.toml" in modules(tmp_path, "stages.estimate.price")
    data, was = tmp_path / "data.toml", {}
    for content in ("[a]\nvalue = 1\n[b]\nvalue = 1\n", "[a]\nvalue = 1\n[b]\nvalue = 2\n"):
        data.write_text(content)
        now = definitions._of_file(data, content)
        assert not was or {name for name in now if now[name] != was[name]} == {"b"}
        was = now


@pytest.mark.parametrize("module", ["stages.model.packing", "stages.model.checkpoint", "stages.graph.manifest"])
def test_weights_do_not_depend_on_programs(module: str, tmp_path: Path) -> None:
    """An edited kernel or target must not pack gigabytes again."""
    found = modules(tmp_path, module)
    assert not [name for name in found if name.startswith(("stages/kernels", "stages/targets", "stages/model/parts"))]


def test_a_member_does_not_bring_its_package(tmp_path: Path) -> None:
    assert "stages/air/builder.py" not in modules(tmp_path, "stages.weights.constants")


def test_every_module_is_found() -> None:
    """None of the project's imports leads nowhere."""
    for path in [*ROOT.glob("stages/**/*.py"), *ROOT.glob("runtime/llama_npu2/**/*.py")]:
        for level, module, member in syntax(path.read_bytes()).imports:
            if module.partition(".")[0] in ("stages", "llama_npu2"):
                assert level == 0, f"{path}: relative import"
                assert code._file(module) or code._file(f"{module}.{member}"), f"{path}: {module}"
