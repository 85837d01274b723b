"""Read prompts from a file: one per line, or JSON lines (`.jsonl`) with `prompt` and, optionally, `id`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llama_npu2.errors import UserError, first_line, reason
from llama_npu2.schema import load_json, record, text

SHIPPED = Path(__file__).with_name("prompts.txt")
JSON_LINES = ".jsonl"
_LINE = record(
    {"prompt": text(r"(?s)(?=.*\S)[^\ud800-\udfff]*", "some text")},
    {"id": text(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}", "one line of at most 200 characters")},
)


@dataclass(frozen=True)
class Prompt:
    """A prompt of a file."""

    id: str
    """Unique in its file; the number of its line, from 1, unless the file says it."""
    text: str

    @property
    def name(self) -> str:
        """The name in results."""
        return f"prompt {self.id}"


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file, at least one, without blank lines. Raises UserError."""
    where = f"prompts={path}"
    try:
        # Not splitlines: it splits at some characters that may be inside JSON strings.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: {reason(error)}: give a text file with a prompt per line") from None
    read = _from_json if path.suffix == JSON_LINES else Prompt
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompt = read(str(number), line)
            except ValueError as error:
                raise UserError(f"{where}: line {number}: {first_line(error)}: mend it") from None
            if prompt.id in prompts:
                raise UserError(f"{where}: line {number}: id {prompt.id} is taken by another prompt: give each its own")
            prompts[prompt.id] = prompt
    if not prompts:
        raise UserError(f"{where}: the file has no prompt: write one per line")
    return list(prompts.values())


def _from_json(number: str, line: str) -> Prompt:
    """Parse a JSON line. Raises ValueError if it is not such an object."""
    value = load_json(line.encode())
    _LINE(value)
    return Prompt(value.get("id", number), value["prompt"])
