"""What a `tokenizer.json` may make of a text. The library that runs it sets no limits of its own, and its author is a
stranger.

The file is judged before the library sees it. That must cost little, as Python takes half as long to parse a large one
as the library does: nearly all of it is the vocabulary in `model`, which is judged by its bytes. The other sections,
which stand in front of it in what the library writes, are parsed, and the library gets them again behind the model. It
takes the last of equal keys, so it uses what was judged whatever else the file says. The tests hold that.

`GROWTH` and `DECODED` are the table: every kind of component that the library knows, and the most that it may multiply
the bytes of a text by.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.errors import UserError
from llama_npu2.schema import load_json

MOST_BYTES = 64 << 20
"""Bytes of the file. The largest that is known, Gemma's, has 33 MB."""
MOST_GROWTH = 200
"""How many times as many bytes a text may become before it is cut into tokens. Unicode's own NFKC may make 11 times as
many of some text, and space signs of three bytes three times."""
MOST_DECODED = 8
"""The same of tokens that become text. Those of checkpoints make none of it longer."""
MOST_INSERTED = 1024
"""Tokens that a text gets besides its own."""
MOST_COMPONENTS = 64
"""Parts of a section, such as the normalizers of a sequence."""
MOST_VALUES = 1_500_000
"""Commas of the file, which are between values. Gemma's has 1.34 million. The library takes up to 350 bytes for each,
where a vocabulary has scores."""
LONGEST_TOKEN = 8 << 10
"""Bytes of a token, within a factor of two."""
LONGEST_ADDED = 1000
"""Characters of a token that is found before a text is cut, or that stands for what is in no vocabulary."""
MOST_ADDED = 4 << 20
"""Bytes of all added tokens, once they are normalized."""
LONGEST_SETTING = 10_000
"""Characters of an expression, or of any other setting of a component."""
LONGEST_MAPPED = 60
"""Bytes that a map of characters has for one of them. Unicode has 33 at most."""
LONGEST_WORD = 1000
"""Characters of a word that WordPiece looks for parts in: its time grows with their cube."""

_SECTIONS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_NESTED = ("normalizers", "pretokenizers", "processors", "decoders")
"""Keys under which a sequence has its components."""
_PARSED_AT_ONCE = 8 << 20
"""Bytes in front of the model."""
_COUNTED_AT_ONCE = 1 << 18
_CHARSMAP = "precompiled_charsmap"

Component = Mapping[str, Any]
Growth = float | Callable[[Component], float]


class Judged(ValueError):
    """Why a tokenizer is refused, in words that begin with a field's name."""


def _length(component: Component, name: str) -> int:
    """Bytes of a text."""
    value = component.get(name)
    return len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else 0


def _replaced(component: Component) -> float:
    """An expression, and an empty pattern, may match between all characters."""
    content, pattern = _length(component, "content"), component.get("pattern")
    found = _length(pattern, "String") if isinstance(pattern, dict) else 0
    return content / found if found else 1 + content


def _precompiled(component: Component) -> float:
    """What stands for a character ends with a zero. Where it is long, Unicode's character takes three bytes."""
    try:
        content = base64.b64decode(component.get(_CHARSMAP) or "", validate=True)
    except (TypeError, ValueError):
        raise Judged(f"{_CHARSMAP} must be base64") from None
    texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
    longest = max(map(len, texts))
    if longest > LONGEST_MAPPED:
        raise Judged(f"{_CHARSMAP} has a text of {longest} bytes for a character, at most {LONGEST_MAPPED} are allowed")
    return longest / 3


def _inserted_if_empty(name: str) -> Callable[[Component], float]:
    """A space replaces a text: an empty one is found before and behind every character."""
    return lambda component: 1 if _length(component, name) else 3


GROWTH: Mapping[str, Mapping[str, Growth]] = {
    "normalizer": {
        "Sequence": 1,
        "Bert": 8,
        "BertNormalizer": 8,
        "Strip": 1,
        "StripAccents": 1,
        "NFC": 3,
        "NFD": 3,
        "NFKC": 11,
        "NFKD": 11,
        "Lowercase": 1.5,
        "Nmt": 1,
        "ByteLevel": 2,
        "Precompiled": _precompiled,
        "Replace": _replaced,
        # Each piece gets it, and there are at most half as many as bytes: added tokens are between them.
        "Prepend": lambda component: 1 + _length(component, "prepend") / 2,
    },
    "pre_tokenizer": {
        "Sequence": 1,
        "BertPreTokenizer": 1,
        "ByteLevel": lambda component: 4 if component.get("add_prefix_space", True) else 2,
        "CharDelimiterSplit": 1,
        "Digits": 1,
        "FixedLength": 1,
        "Metaspace": lambda component: 1 + _length(component, "replacement"),
        "Punctuation": 1,
        "Split": 1,
        "UnicodeScripts": 1,
        "Whitespace": 1,
        "WhitespaceSplit": 1,
    },
}
"""Of the components that a text goes through. The factors of all of them are multiplied."""

DECODED: Mapping[str, Growth] = {
    "Sequence": 1,
    "BPEDecoder": _inserted_if_empty("suffix"),
    "ByteFallback": 1,
    "ByteLevel": 1.5,
    "CTC": _inserted_if_empty("word_delimiter_token"),
    "Fuse": 1,
    "Metaspace": 1,
    "Replace": _replaced,
    "Strip": 1,
    "WordPiece": 2,
}
"""Of the components that tokens go through."""

_OWNERS: Mapping[str, tuple[str, ...]] = {
    "prepend": ("Prepend",),
    "content": ("Replace", "Strip"),
    _CHARSMAP: ("Precompiled",),
    "replacement": ("Metaspace",),
    "suffix": ("BPEDecoder",),
    "word_delimiter_token": ("CTC",),
    **dict.fromkeys(("single", "pair", "special_tokens"), ("TemplateProcessing",)),
    **dict.fromkeys(_NESTED, ("Sequence",)),
}
"""Types that have a key. A component of another type may not: the library tries other types where one does not fit."""

PROCESSORS = ("Sequence", "BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing")

MODEL_SETTINGS = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise UserError for a refused tokenizer."""
    try:
        yield
    except Judged as error:
        raise UserError(f"{path} is refused: {error}: use another tokenizer.json") from None


def check_size(size: int) -> None:
    """Of the file in bytes, before it is read. Raises ValueError."""
    if size > MOST_BYTES:
        raise Judged(f"it has {size} bytes, at most {MOST_BYTES} are read")


def judged(file: io.BytesIO) -> bytes:
    """The same tokenizer for the library, without truncation and padding. `file` becomes that too: nothing is copied.
    Raises ValueError for one that may take too much, and for one that is no JSON."""
    sections, end = _parsed(file.getvalue())
    _judge_sections(sections)
    used = {name: sections.get(name) for name in _SECTIONS} | {"truncation": None, "padding": None}
    file.seek(end)
    rest = file.read()[1:]
    file.seek(end)
    file.write(b"," + json.dumps(used).encode()[1:] + rest)
    return file.getvalue()


def judge_model(settings: Mapping[str, Any]) -> None:
    """Those of `MODEL_SETTINGS` that a model has. Raises ValueError."""
    for name in MODEL_SETTINGS[:-1]:
        value = settings.get(name)
        if isinstance(value, str) and len(value) > LONGEST_ADDED:
            raise Judged(f"model.{name} has {len(value)} characters, at most {LONGEST_ADDED} are allowed")
    longest = settings.get(MODEL_SETTINGS[-1])
    if isinstance(longest, (int, float)) and longest > LONGEST_WORD:
        raise Judged(f"model.{MODEL_SETTINGS[-1]} is {longest}, at most {LONGEST_WORD} is allowed")


def _parsed(content: bytes) -> tuple[Mapping[str, Any], int]:
    """The sections but for `model`, which is judged by its bytes, and where the last brace is. Raises ValueError."""
    check_size(len(content))
    _check_values(content)
    end = content.rfind(b"}")
    start = content.find(b'"model"', 0, _PARSED_AT_ONCE)
    if start >= 0:
        try:
            # Only in front of a key of the outermost object is this the rest of a whole text.
            sections = load_json(content[:start] + b'"model":0}')
        except ValueError:
            sections = {}
        if isinstance(sections, dict) and sections.keys() >= {*_SECTIONS}:
            _check_strings(content, start)
            return sections, end
    sections = load_json(content)
    if not isinstance(sections, dict):
        raise Judged("it must be a JSON object")
    _judge_vocabulary(sections.pop("model", None))
    return sections, end


def _check_values(content: bytes) -> None:
    octets, most = np.frombuffer(content, np.uint8), MOST_VALUES
    if len(octets) > most:
        parts = range(0, len(octets), _COUNTED_AT_ONCE)
        commas = sum(int(np.count_nonzero(octets[at : at + _COUNTED_AT_ONCE] == ord(","))) for at in parts)
        if commas > most:
            raise Judged(f"it has {commas} values, at most {most} are allowed")


def _judge_vocabulary(model: Any) -> None:
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    for each in vocabulary if isinstance(vocabulary, (dict, list)) else ():
        token = each[0] if isinstance(each, list) and each else each
        if isinstance(token, str) and len(token) > LONGEST_TOKEN:
            raise Judged(f"model.vocab has a token of {len(token)} characters, at most {LONGEST_TOKEN} are allowed")


def _check_strings(content: bytes, start: int) -> None:
    """Of the strings behind `start` none is longer than two of the stretches that each have a quote."""
    for at in range(start, len(content) - LONGEST_TOKEN, LONGEST_TOKEN):
        if content.find(b'"', at, at + LONGEST_TOKEN) < 0:
            raise Judged(f"model has more than {LONGEST_TOKEN} bytes without a quote, as of a token of that length")


def _judge_sections(sections: Mapping[str, Any]) -> None:
    grown = 1.0
    for section, table in GROWTH.items():
        grown = _judge_growth(sections.get(section), section, table, grown, MOST_GROWTH)
    _judge_growth(sections.get("decoder"), "decoder", DECODED, 1.0, MOST_DECODED)
    _judge_inserted(sections.get("post_processor"))
    _judge_added(sections.get("added_tokens"), grown)


def _judge_growth(value: Any, section: str, table: Mapping[str, Growth], grown: float, most: float) -> float:
    """How many times as many bytes a text has behind a section as before the first one: `grown` before this one."""
    for path, component in _components(value, section, table):
        growth = table[component["type"]]
        try:
            factor = growth(component) if callable(growth) else growth
        except Judged as error:
            raise Judged(f"{path}.{error}") from None
        grown *= max(1.0, factor)
        if grown > most:
            raise Judged(f"{path} may make a text {_figure(grown)} times as long, at most {most} times is allowed")
    return grown


def _components(
    value: Any, section: str, known: Mapping[str, Any] | tuple[str, ...]
) -> Iterator[tuple[str, Component]]:
    """Each component of a section, with its path. Raises ValueError for what the library would have to guess about."""
    left, count = [(section, value)] if value is not None else [], 0
    while left:
        path, component = left.pop()
        count += 1
        if count > MOST_COMPONENTS:
            raise Judged(f"{section} has more than {MOST_COMPONENTS} components")
        if not isinstance(component, dict) or component.get("type") not in known:
            raise Judged(f"{path} must be of a type among {', '.join(known)}")
        for key, setting in component.items():
            for text in _texts(setting):
                if key != _CHARSMAP and len(text) > LONGEST_SETTING:
                    raise Judged(f"{path}.{key} has {len(text)} characters, at most {LONGEST_SETTING} are allowed")
        for key in component.keys() & _OWNERS.keys():
            if component["type"] not in _OWNERS[key]:
                raise Judged(f"{path}.{key} belongs to the type {_OWNERS[key][0]}, not to {component['type']}")
        for key in component.keys() & {*_NESTED}:
            if not isinstance(component[key], list):
                raise Judged(f"{path}.{key} must be a list")
            left += [(f"{path}.{key}[{index}]", each) for index, each in reversed([*enumerate(component[key])])]
        yield path, component


def _texts(setting: Any) -> Iterator[str]:
    """A setting that is a text, or those in it."""
    inner = setting.values() if isinstance(setting, dict) else setting if isinstance(setting, list) else (setting,)
    yield from (each for each in inner if isinstance(each, str))


def _judge_inserted(value: Any) -> None:
    """Tokens that a text gets, and how many times it is there itself."""
    inserted = 0
    for path, component in _components(value, "post_processor", PROCESSORS):
        inserted += max((_inserted(component, path, template) for template in ("single", "pair")), default=0)
        if inserted > MOST_INSERTED:
            raise Judged(f"{path} inserts {inserted} tokens, at most {MOST_INSERTED} are allowed")


def _inserted(component: Component, path: str, template: str) -> int:
    pieces, tokens = component.get(template) or (), component.get("special_tokens") or {}
    if not isinstance(pieces, (list, tuple)) or not isinstance(tokens, dict):
        raise Judged(f"{path}.{template} must be a list, and special_tokens an object")
    inserted, texts = 0, 0
    for piece in pieces:
        special = piece.get("SpecialToken") if isinstance(piece, dict) else None
        if special is None:
            texts += 1
            continue
        known = tokens.get(str(special.get("id"))) if isinstance(special, dict) else None
        inserted += (
            sum(len(each) for each in known.values() if isinstance(each, list)) if isinstance(known, dict) else 0
        )
    if texts > 2:
        raise Judged(f"{path}.{template} has the text {texts} times")
    for token in tokens.values():
        for text in token.get("tokens") or () if isinstance(token, dict) else ():
            if not isinstance(text, str) or len(text) > LONGEST_ADDED:
                raise Judged(f"{path}.special_tokens must have texts of at most {LONGEST_ADDED} characters")
    return inserted


def _judge_added(value: Any, grown: float) -> None:
    """Tokens that are looked for before a text is cut. They are normalized when they are read."""
    if value is not None and not isinstance(value, list):
        raise Judged("added_tokens must be a list")
    total = 0.0
    for index, token in enumerate(value or ()):
        length = _length(token, "content") if isinstance(token, dict) else 0
        if length > LONGEST_ADDED:
            raise Judged(f"added_tokens[{index}].content has {length} bytes, at most {LONGEST_ADDED} are allowed")
        total += length * grown
    if total > MOST_ADDED:
        raise Judged(f"added_tokens may take {_figure(total)} bytes once normalized, at most {MOST_ADDED} are allowed")


def _figure(value: float) -> str:
    return "endlessly many" if math.isinf(value) else f"{value:.3g}"
