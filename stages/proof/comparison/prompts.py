"""Prompts in a file: one per line, or JSON lines (`.jsonl`) with `prompt` and, if they are to have names, `id`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llama_npu2.errors import UserError, first_line
from llama_npu2.schema import load_json, record, text

SHIPPED = Path(__file__).with_name("prompts.txt")
JSON_LINES = ".jsonl"
_LINE = record(
    {"prompt": text(r"(?s)(?=.*\S)[^\ud800-\udfff]*", "some text")},
    {"id": text(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}", "one line of at most 200 characters")},
)


@dataclass(frozen=True)
class Prompt:
    """`id`: of no other prompt of its file; the number of its line, from 1, where the file does not say."""

    id: str
    text: str

    @property
    def name(self) -> str:
        """In results."""
        return f"prompt {self.id}"


def read_prompts(path: Path) -> list[Prompt]:
    """One at least, in the file's order; blank lines are none. Raises UserError."""
    where = f"prompts={path}"
    try:
        # Not splitlines, which takes some characters within JSON strings for ends of lines.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: {first_line(error)}: give a text file with a prompt per line") from None
    read = _from_json if path.suffix == JSON_LINES else Prompt
    found: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompt = read(str(number), line)
            except ValueError as error:
                raise UserError(f"{where}: line {number}: {first_line(error)}: mend it") from None
            if prompt.id in found:
                raise UserError(f"{where}: line {number}: id {prompt.id} is another prompt's: give each its own")
            found[prompt.id] = prompt
    if not found:
        raise UserError(f"{where}: there is no prompt in it: write one per line")
    return list(found.values())


def _from_json(number: str, line: str) -> Prompt:
    """ValueError for what is not such an object."""
    value = load_json(line.encode())
    _LINE(value)
    return Prompt(value.get("id", number), value["prompt"])
