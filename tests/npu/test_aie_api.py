"""The AIE2P kernels and their host stand-in keep to declarations of the real AIE API headers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = sorted((ROOT / "kernel_src/aie2p").glob("*.*"))
STAND_IN = ROOT / "kernel_src/sim/aie_api/aie.hpp"


@dataclass(frozen=True)
class Declaration:
    least: int
    most: int


def read_facts() -> tuple[set[str], dict[str, Declaration]]:
    """Names of types and enumerators, and callables by qualified name."""
    names, callables = set(), {}
    for line in (ROOT / "tests/support/aie_api_declarations.txt").read_text().splitlines():
        kind, name, *rest = line.split() if line and not line.startswith("#") else ("", "")
        if kind in ("type", "enumerator"):
            names.add(name)
        elif kind:
            callables[name] = Declaration(int(rest[1]), int(rest[2]))
    return names, callables


def stripped(path: Path) -> str:
    """Source without comments, strings and preprocessor lines."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
    return re.sub(r'"[^"\n]*"', '""', re.sub(r"^\s*#[^\n]*", "", text, flags=re.M))


def matching(text: str, start: int, pair: str = "()") -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    raise ValueError(f"unbalanced at {text[start : start + 40]!r}")


def arguments(text: str) -> list[str]:
    """Split at top-level commas; `<` opens only after a name, as template arguments do."""
    parts, depth, current = [], 0, ""
    for i, char in enumerate(text):
        template = char == "<" and text[i - 1 : i].isidentifier() and text[i + 1 : i + 2] != " "
        opens = char in "([{" or template
        closes = char in ")]}" or (char == ">" and text[i - 1 : i] not in ("-", " "))
        depth += opens - closes
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [p for p in (*parts, current) if p.strip()]


def calls(text: str, pattern: str) -> list[tuple[str, int]]:
    """(name, argument count) of calls `pattern` finds; template arguments may stand between name and parenthesis."""
    found = []
    for match in re.finditer(pattern, text):
        at = match.end()
        if text[at : at + 1] == "<":
            at = matching(text, at, "<>") + 1
        if text[at : at + 1] == "(":
            found.append((match.group(1), len(arguments(text[at + 1 : matching(text, at)]))))
    return found


def body_of(text: str, opening: str) -> str:
    start = text.index("{", text.index(opening))
    return text[start + 1 : matching(text, start, "{}")]


def without(text: str, opening: str) -> str:
    """`text` without the blocks that `opening` begins."""
    while opening in text:
        at = text.index(opening)
        end = matching(text, text.index("{", at), "{}")
        text = text[:at] + text[end + 1 :]
    return text


def flat(text: str) -> str:
    """`text` with every brace block emptied."""
    out, depth = "", 0
    for char in text:
        if char == "{" and depth == 0:
            out += "{"
        depth += (char == "{") - (char == "}")
        if depth == 0:
            out += char
    return out


def declared(text: str) -> list[tuple[str, int, int]]:
    """(name, least, most arguments) of the functions whose bodies are emptied blocks."""
    found = []
    for match in re.finditer(r"\b(\w+)\(", text):
        end = matching(text, match.end() - 1)
        if not re.match(r"\s*(const\s*)?(:[^{;]*)?\{", text[end + 1 :]):
            continue
        params = arguments(text[match.end() : end])
        optional = sum("=" in p for p in params)
        found.append((match.group(1), len(params) - optional, len(params)))
    return found


NAMES, CALLABLES = read_facts()


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.name)
def test_kernels_use_only_declared_names(path: Path) -> None:
    text = stripped(path)
    for name in re.findall(r"\baie::(\w+)", text):
        assert f"aie::{name}" in NAMES or f"aie::{name}" in CALLABLES, name
    for enumerator in re.findall(r"\brounding_mode::(\w+)", text):
        assert f"rounding_mode::{enumerator}" in NAMES, enumerator


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.name)
def test_kernels_call_with_declared_arity(path: Path) -> None:
    text = stripped(path)
    for name, count in calls(text, r"\baie::(\w+)"):
        if f"aie::{name}" in CALLABLES:
            fact = CALLABLES[f"aie::{name}"]
            assert fact.least <= count <= fact.most, f"aie::{name} with {count} arguments"
    for name, count in calls(text, r"\.(?:template )?(\w+)"):
        facts = [fact for key, fact in CALLABLES.items() if not key.startswith("aie::") and key.endswith(f"::{name}")]
        assert any(f.least <= count <= f.most for f in facts), f"member {name} with {count} arguments"


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.name)
def test_vectors_are_not_kept_in_arrays(path: Path) -> None:
    """An array that a loop indexes lies on the stack unless the compiler unrolls that loop."""
    text = stripped(path)
    vectors = ["Pair<[^;]*>", "aie::[^;]*>", *re.findall(r"\busing (\w+) = aie::", text)]
    assert re.findall(rf"^\s*(?:const )?(?:{'|'.join(vectors)}) \w+\[[^;]*;", text, flags=re.M) == []


def unaligned(text: str) -> str:
    while "alignas(" in text:
        at = text.index("alignas(")
        text = text[:at] + text[matching(text, at + len("alignas")) + 1 :]
    return text


def check_all(owner: str, text: str) -> None:
    for name, least, most in declared(flat(text)):
        fact = CALLABLES.get(f"{owner}::{name}")
        assert fact is not None and fact.least <= least and most <= fact.most, f"{owner}::{name}/{least}-{most}"


def test_stand_in_declares_nothing_else() -> None:
    text = unaligned(without(without(body_of_all(stripped(STAND_IN)), "namespace sim"), "namespace detail"))
    check_all("aie", text)
    owners = re.findall(r"^(?:class|struct) +(\w+)(?=\s*[:{])", text, flags=re.M)
    assert {f"aie::{owner}" for owner in owners} <= NAMES
    for owner in owners:
        head = re.search(rf"^(?:class|struct) +{owner}\b", text, flags=re.M)
        assert head is not None
        check_all(owner, body_of(text, head.group()).split("private:")[0])


def body_of_all(text: str) -> str:
    return body_of(text, "namespace aie {")


def test_every_fact_is_implemented() -> None:
    """The list grows with the kernels, not ahead of them."""
    text = body_of_all(stripped(STAND_IN))
    for name in CALLABLES:
        assert re.search(rf"\b{name.split('::')[-1]}\(", text), name


def test_macros_do_not_clash_with_template_parameters() -> None:
    """The real headers use one-letter names (M, N, K, T) as template parameters."""
    for path in KERNELS:
        assert not [m for m in re.findall(r"\b[A-Z]\b", stripped(path)) if m not in ("L", "T")], path.name


def test_no_buffer_of_a_tile_function_is_another() -> None:
    """A compiler that is not told must store before it loads what comes next."""
    found = 0
    for source in KERNELS:
        for signature in re.findall(r'extern "C" void AIE_FN\(\w+\)\((.*?)\) \{', source.read_text(), re.DOTALL):
            named = re.findall(r"\*(__restrict )?(\w+)", signature)
            assert [name for told, name in named if not told] == [], source
            found += len(named)
    assert found > 100
