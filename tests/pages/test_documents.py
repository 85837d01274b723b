"""Documents are true: links and paths exist, commands run, options are known, reference pages are current."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from stages.graph.options import COMMANDS, parse_options
from tests.conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("kernel_src/**/*.md")])
BEGINNINGS = [ROOT / "README.md", *sorted(ROOT.glob("docs/tutorials/*.md"))]
HOW_TOS = sorted(ROOT.glob("docs/how-to/*.md"))
"""Pages whose commands are run, the latter by `-m slow`."""
PROSE = [ROOT / "README.md", *sorted(ROOT.glob("docs/explanation/*.md"))]
_PIECE = re.compile(
    r"<!-- test: skip( all)?, ([^\n]*) -->"
    r"|```python\n(.*?)```"
    r"|```.*?```"
    r"|(?<=\n\n)((?:    [^\n]*\n)+)",
    re.DOTALL,
)
"""A comment about blocks, or a block: of Python, of another language, or an indented one."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    """A block of code of a page."""

    page: Path
    number: int
    language: str
    """`python`, or `sh` for an indented one."""
    text: str
    skip: str
    """The reason that the text gives for not running it, or an empty text."""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of code of a page.

    A comment `<!-- test: skip, REASON -->` is about the block that follows it, with `skip all` about all that follow.
    """
    number, always, skip = 0, "", ""
    for every, reason, python, shell in _PIECE.findall(page.read_text()):
        if reason:
            always, skip = (reason, "") if every else (always, reason)
        elif python or shell:
            number += 1
            text = python or "\n".join(line[4:] for line in shell.splitlines())
            yield Block(page, number, "python" if python else "sh", text, skip or always)
            skip = ""


ALL = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in ALL if block.language == "sh"]


def commands(block: Block) -> list[str]:
    """The command lines of a block, without comments, those of several lines as one."""
    text = re.sub(r"\s*\\\n\s*", " ", block.text)
    return [line for line in (re.sub(r"\s+#.*", "", each).strip() for each in text.splitlines()) if line]


# Links, paths, words


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, anchor = link.partition("#")
        if not place.startswith(("http:", "https:")):
            target = page.parent / place if place else page
            assert target.exists(), f"{name(page)}: {link}"
            assert not anchor or anchor in anchors(target), f"{name(page)}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page: Path) -> None:
    """A path in backticks, of a folder of the project."""
    if page.name == "changelog.md":
        return
    for path in re.findall(r"`((?:stages|runtime|kernel_src|tests|models|docs|deploy)/[\w./-]*)`", page.read_text()):
        assert (ROOT / path).exists(), f"{name(page)}: {path}"


def test_the_map_names_what_is_there() -> None:
    """Each room of `stages` and of the runtime has its line in ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for room in [*(ROOT / "stages").iterdir(), *(ROOT / "runtime/llama_npu2").iterdir()]:
        if room.is_dir() and not room.name.startswith("_"):
            assert re.search(rf"^ +{room.name}/ ", text, re.MULTILINE), room


def test_variables_of_the_environment_are_documented() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    sources = [path for folder in ("stages", "runtime", "tests") for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in sources for name in re.findall(r"\bLLAMA_NPU2_[A-Z]+\b", path.read_text())}
    assert names <= set(re.findall(r"`(LLAMA_NPU2_[A-Z]+)`", page))


def sentences(page: Path) -> list[int]:
    """Words of each sentence, without tables, code and headings."""
    text = re.sub(r"```.*?```|<figure.*?</figure>", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"^(\||    |#|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = [part for paragraph in re.split(r"\n\s*\n", text) for part in re.split(r"(?<=[.!?:;])\s+", paragraph)]
    return [len(part.split()) for part in parts if len(part.split()) > 2]


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_sentences_are_short(page: Path) -> None:
    words = sorted(sentences(page))
    assert statistics.mean(words) <= 18 and words[int(0.9 * len(words))] <= 30


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_merge_is_left_open(page: Path) -> None:
    assert not re.search(r"^(<{7}|={7}|>{7})( |$)", page.read_text(), re.MULTILINE)


def test_readme_is_short_and_keeps_its_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert '    pip install --no-compile -e . && doit run prompt="The capital of France is"\n' in text
    assert "    pip install -e '.[test]' && pytest\n" in text


def test_reference_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for page, text in generate.pages().items():
        assert (ROOT / "docs/reference" / page).read_text() == text, f"{page}: run python docs/generate.py"


# Commands


@pytest.mark.parametrize("block", SHELL, ids=lambda block: f"{name(block.page)}:{block.number}")
def test_commands_take_their_options(block: Block) -> None:
    """Also where a block is not run: each variable of a `doit` line is one that the command takes."""
    for line in commands(block):
        line = line.rpartition("&&")[2].strip()
        words = shlex.split(line.replace("...", "1")) if line.startswith("doit ") else []
        if command := next((word for word in words[1:] if word in COMMANDS), ""):
            values = dict(word.split("=", 1) for word in words[1:] if re.match(r"[a-z_.0-9]+=", word))
            parse_options(values, [command])


@pytest.fixture(scope="module")
def checkout(project: Path, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with documents, in which the demo model is built already."""
    root = shutil.copytree(project, tmp_path_factory.mktemp("documents") / "checkout")
    shutil.copytree(ROOT / "docs", root / "docs")
    shutil.copytree(demo, root / "artifacts/demo/cpu", dirs_exist_ok=True)
    return root


def installed(line: str) -> str:
    """A command line without the installation, which is there already, and without `pytest`, which is running."""
    parts = [part.strip() for part in line.split("&&")]
    return " && ".join(part for part in parts if not re.match(r"pip install|pytest\b", part))


def run(pages: Iterable[Path], *marks: pytest.MarkDecorator) -> list[object]:
    """The parameters of a test that runs the commands of pages."""
    parameters = []
    for page in pages:
        reasons = [block.skip for block in blocks(page)]
        skip = [pytest.mark.skip(reason=f"{name(page)}: {reasons[0]}")] if reasons and all(reasons) else []
        parameters += [pytest.param(page, marks=[*marks, *skip], id=name(page))] if reasons else []
    return parameters


@pytest.mark.thorough
@pytest.mark.parametrize("page", [*run(BEGINNINGS), *run(HOW_TOS, pytest.mark.slow)])
def test_commands_run(page: Path, checkout: Path) -> None:
    """All commands of a page, in its order, in one checkout."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": tools, "PYTHONPATH": f"{checkout / 'runtime'}{os.pathsep}{checkout}"}
    python = []
    for block in blocks(page):
        if block.skip:
            continue
        if block.language == "python":
            python.append(block.text)
            continue
        for line in commands(block):
            if line := installed(line):
                done = subprocess.run(line, shell=True, cwd=checkout, env=environment, capture_output=True, text=True)
                assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
                if "France" in line and " run " in line:
                    assert " Paris." in done.stdout, line
    if python:
        script = [sys.executable, "-c", "\n".join(python)]
        done = subprocess.run(script, cwd=checkout, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
