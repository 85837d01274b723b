"""The wheel alone, without the checkout, answers a prompt: one package, beside the four that it imports."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.long
"""`pytest -m long tests/pipeline/test_wheel.py`"""

NEEDED = ("numpy", "ml_dtypes", "tokenizers", "jinja2", "markupsafe")
"""What the runtime imports, and what jinja2 does."""


def run(*command: object, cwd: Path) -> str:
    """Standard output of a command that sees nothing of the checkout's environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the checkout, because the build writes beside what it reads."""
    pytest.importorskip("pdm.backend", reason="the wheel is built without network: pip install pdm-backend")
    root = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", "dodo.py"):
        shutil.copy(ROOT / name, root / name)
    for name in ("runtime", "stages", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", "wheels")
    run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=root)
    (path,) = (root / "wheels").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts directory of an environment that has the wheel, and of everything else just what the runtime needs."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root)
    python = root / "bin/python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=root).strip())
    for name in NEEDED:
        for file in importlib.metadata.files(name) or ():
            if not file.is_absolute() and ".." not in file.parts and "__pycache__" not in file.parts:
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), packages / file)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=root,
    )
    return root / "bin"


def test_the_wheel_holds_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"llama_npu2"}
    assert len(tops) == 2
    page = ROOT / "runtime/llama_npu2/serve/page"
    assert {f"llama_npu2/serve/page/{path.name}" for path in page.iterdir() if path.is_file()} <= names


def test_the_wheel_answers_without_the_checkout(installed: Path, demo: Path, tmp_path: Path) -> None:
    for command in ([installed / "llama-npu2"], [installed / "python", "-m", "llama_npu2"]):
        assert run(*command, demo, "The capital of France is", "--raw", cwd=tmp_path).startswith(" Paris")
    api = "from llama_npu2 import load; import sys; print(*load(sys.argv[1]).generate('1, 2, 3,', raw=True), sep='')"
    assert run(installed / "python", "-c", api, demo, cwd=tmp_path).startswith(" 4")


def test_no_general_name_is_taken(installed: Path, tmp_path: Path) -> None:
    look = "import importlib.util as u; print(*(bool(u.find_spec(n)) for n in ('runtime', 'stages', 'llama_npu2')))"
    assert run(installed / "python", "-c", look, cwd=tmp_path).split() == ["False", "False", "True"]
