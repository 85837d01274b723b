"""Write the reference pages that follow from the code: commands, model families, options and Python.

`python docs/generate.py` writes them; `tests/pages/test_documents.py` fails where they are not current.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "runtime"), str(ROOT)]

from llama_npu2.__main__ import COMMANDS as OF_RUNTIME  # noqa: E402
from llama_npu2.__main__ import GROUPS as GROUPS_OF_RUNTIME  # noqa: E402
from llama_npu2.errors import UserError  # noqa: E402
from llama_npu2.options import Option, options_of  # noqa: E402
from stages.graph.options import COMMANDS, GROUPS, table, variables  # noqa: E402
from stages.model.families import families, parse_config  # noqa: E402
from stages.model.presets import PRESETS  # noqa: E402
from stages.targets import Target, targets  # noqa: E402

_MADE = "<!-- Made by docs/generate.py. -->\n"
_API = (
    ("engine/llama.py", ("load", "Llama")),
    ("engine/engine.py", ("Engine",)),
    ("engine/serving.py", ("Serving", "Stream")),
    ("engine/completion.py", ("Completion", "Stats", "Logprob")),
    ("engine/trace.py", ("TracedCall",)),
    ("devices/spans.py", ("Recorder", "Span")),
    ("errors.py", ("UserError",)),
)
"""The modules of the runtime, and what of them a user of `load` meets."""


def pages() -> dict[str, str]:
    """Return the text of each page by its path below `docs/reference`."""
    return {
        "commands.md": commands(),
        "families.md": model_families(),
        "options.md": options(),
        "python.md": python(),
    }


def commands() -> str:
    """Return the page of all commands."""
    taken = table()
    lines = [
        _MADE,
        "# Commands\n",
        "`doit help COMMAND` prints the same in a terminal, with each option's sentence.\n",
    ]
    for group, members in GROUPS.items():
        lines += [f"## {group}\n"]
        for name, sentence in members.items():
            shared = [each for each in taken[name] if len(each.commands) > len(COMMANDS) / 2]
            own = [each for each in taken[name] if each not in shared]
            lines += [f"### doit {name}\n", f"{sentence}.\n"]
            lines += [
                f"- {what}: {_links(listed)}" for what, listed in (("Its own", own), ("Shared", shared)) if listed
            ]
            lines += [""]
    lines += ["## With an artifact directory alone\n", "`llama-npu2 DIR PROMPT` is `llama-npu2 run DIR PROMPT`.\n"]
    known = list(options_of(*GROUPS_OF_RUNTIME))
    for name, sentence in OF_RUNTIME.items():
        flags = ", ".join(
            f"[`{each.flag}`](options.md#{_anchor(each.name)})" for each in known if name in each.commands
        )
        lines += [f"### llama-npu2 {name}\n", f"{sentence[0].upper()}{sentence[1:]}.\n"]
        lines += [f"Options: {flags}.\n"] if flags else []
    return "\n".join(lines)


def model_families() -> str:
    lines = [
        "# Model families",
        "",
        "A family is a module of `stages/model/families`. "
        "A target that a family or a size does not run on says so in one line.",
        "",
        "| family | `model_type` | architectures | in GGUF files | targets | sizes for `model=random:` |",
        "|---|---|---|---|---|---|",
    ]
    for family in families().values():
        sizes = [name for name, fields in PRESETS.items() if fields["model_type"] == family.model_type]
        architectures = ", ".join(f"`{name}`" for name in (*family.architectures, *family.wrapped))
        runs = ", ".join(f"`{name}`" for name, target in targets().items() if _runs(target, sizes[:1]))
        names = ", ".join(f"`{name}`" for name in sizes)
        gguf = f"`{family.gguf.architecture}`" if family.gguf else ""
        lines.append(f"| {family.title} | `{family.model_type}` | {architectures} | {gguf} | {runs} | {names} |")
    return "\n".join([*lines, ""])


def _runs(target: Target, sizes: list[str]) -> bool:
    try:
        for size in sizes:
            target.check(parse_config(PRESETS[size], size).within(target.context))
    except UserError:
        return False
    return True


def options() -> str:
    """Return the page of all options."""
    lines = [_MADE, "# Options\n"]
    lines += [
        "Options of `doit` are written `name=value`, in any order. A command refuses options that it does not take."
    ]
    lines += ["An option with a flag is one of `llama-npu2`, too.\n"]
    runtime = {each.name: each for each in options_of(*GROUPS_OF_RUNTIME)}
    known = variables()
    for name, each in (known | {name: each for name, each in runtime.items() if name not in known}).items():
        facts = [("default", each.shown_default or ("off" if each.type == "bool" else "none")), ("unit", each.unit)]
        facts += [("values", ", ".join(f"`{choice}`" for choice in each.choices)), ("bounds", _bounds(each))]
        takers = [f"doit {command}" for command in each.commands] if name in known else []
        if name in runtime:
            takers += [f"llama-npu2 {command}" for command in runtime[name].commands if command in OF_RUNTIME]
            facts += [("flag", f"`{each.flag}`")]
        facts += [("commands", ", ".join(f"[{title}](commands.md#{title.replace(' ', '-')})" for title in takers))]
        lines += [f"## {name}=\n", f"{each.help[0].upper()}{each.help[1:]}.\n"]
        lines += [f"- {what}: {value}" for what, value in facts if value] + [""]
    return "\n".join(lines)


def _bounds(option: Option) -> str:
    words = {"least": "at least", "most": "at most", "above": "above"}
    return ", ".join(f"{words[name]} {value}" for name, value in option.bounds.items())


def _links(listed: list[Option]) -> str:
    return ", ".join(f"[`{each.name}=`](options.md#{_anchor(each.name)})" for each in listed)


def _anchor(name: str) -> str:
    """Return the anchor of an option's heading, as both GitHub and the site make it."""
    return re.sub(r"[^\w-]", "", name.lower())


def python() -> str:
    """Return the page of the runtime's Python interface."""
    lines = [
        _MADE,
        "# Python\n",
        "`from llama_npu2 import load, Llama, UserError`. Everything else is reached from these.\n",
    ]
    for module, names in _API:
        tree = ast.parse((ROOT / "runtime/llama_npu2" / module).read_text())
        found = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        for name in names:
            lines += _described(found[name], "##")
    return "\n".join(lines)


def _described(node: ast.FunctionDef | ast.ClassDef, level: str, owner: str = "") -> Iterator[str]:
    title = f"{owner}.{node.name}" if owner else node.name
    yield f"{level} {title}\n"
    if isinstance(node, ast.FunctionDef):
        yield f"```python\n{_signature(node)}\n```\n"
    yield from _prose(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        yield from _attributes(node)
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                yield from _described(member, f"{level}#", node.name)


def _signature(node: ast.FunctionDef) -> str:
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if any(isinstance(each, ast.Name) and each.id in ("property", "cached_property") for each in node.decorator_list):
        return f"{node.name}{result.replace(' -> ', ': ')}"
    return f"{node.name}({ast.unparse(node.args)}){result}"


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield a line for each field, with the text that stands under it."""
    for member, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
            text = following.value.value if _is_text(following) else ""
            declared = f"{ast.unparse(member.target)}: {ast.unparse(member.annotation)}"
            yield f"- `{declared}` {' '.join(text.split())}".rstrip()
    yield ""


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _prose(docstring: str) -> Iterator[str]:
    """Yield the lines of a docstring; entries of its sections (`Args:`) become a list."""
    section = False
    for line in docstring.splitlines():
        if heading := re.fullmatch(r"(Args|Returns|Yields|Raises):", line):
            section = True
            yield f"{heading[1]}:\n"
        elif section and (entry := re.match(r"    (\w+): (.*)", line)):
            yield f"- `{entry[1]}`: {entry[2]}"
        else:
            yield line.strip() if section else line
    yield ""


if __name__ == "__main__":
    for name, text in pages().items():
        (ROOT / "docs/reference" / name).write_text(text)
