"""Limits on a `tokenizer.json`, which may come from a stranger: the library that runs it sets no limits of its own.

The file is judged before the library sees it. That must cost little, as Python takes half as long to parse a large one
as the library does: nearly all of it is the vocabulary in `model`, which is judged by its bytes. The library writes the
other sections in front of the model. They are parsed, and the library gets them again after the model. It takes the
last of equal keys, so it uses the sections that were judged, whatever else the file says. The tests check that.

`GROWTH` and `DECODED` list every kind of component that the library has, and the most by which each may multiply the
bytes of a text.
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

from llama_npu2.errors import UserError
from llama_npu2.schema import load_json

MOST_BYTES = 64 << 20
"""Most bytes of the file. The largest known one, Gemma's, has 33 MB."""
MOST_GROWTH = 200
"""Most by which the bytes of a text may be multiplied before it is cut into tokens. Unicode's own NFKC multiplies those
of some texts by 11, and space signs of three bytes by three."""
MOST_DECODED = 8
"""Most by which bytes may be multiplied when tokens become text. Checkpoints' tokenizers make no text longer."""
MOST_INSERTED = 1024
"""Most tokens that a text gets besides its own."""
MOST_COMPONENTS = 64
"""Most components of a section, such as the normalizers of a sequence."""
MOST_VALUES = 1_500_000
"""Most commas of the file, which are between values. Gemma's has 1.34 million. The library takes up to 350 bytes for
each value, where a vocabulary has scores."""
LONGEST_TOKEN = 8 << 10
"""Most bytes of a token, within a factor of two."""
LONGEST_ADDED = 1000
"""Most characters of a token that is found before a text is cut, or that stands for text without a token."""
MOST_ADDED = 4 << 20
"""Most bytes of all added tokens, once they are normalized."""
LONGEST_SETTING = 10_000
"""Most characters of an expression, or of any other setting of a component."""
LONGEST_MAPPED = 60
"""Most bytes to which a map of characters maps one of them. Unicode's maps have at most 33."""
LONGEST_WORD = 1000
"""Most characters of a word that WordPiece cuts into tokens: its time grows with their cube."""

_SECTIONS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_NESTED = ("normalizers", "pretokenizers", "processors", "decoders")
"""Keys under which a sequence has its components."""
_PARSED_AT_ONCE = 8 << 20
"""Most bytes in front of the model that are parsed without it."""
_COUNTED_AT_ONCE = 1 << 18
_CHARSMAP = "precompiled_charsmap"

Component = Mapping[str, Any]
Growth = float | Callable[[Component], float]


class Judged(ValueError):
    """The reason why a tokenizer is refused; it begins with a field's name."""


def _length(component: Component, name: str) -> int:
    """Return the bytes of a component's text; 0 if it has none of that name."""
    value = component.get(name)
    return len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else 0


def _replaced(component: Component) -> float:
    """Return the growth of a replacement. An expression, and an empty pattern, may match between all characters."""
    content, pattern = _length(component, "content"), component.get("pattern")
    replaced = _length(pattern, "String") if isinstance(pattern, dict) else 0
    return content / replaced if replaced else 1 + content


def _precompiled(component: Component) -> float:
    """Return the growth of a map of characters, whose texts end with a zero byte.

    The characters that Unicode maps to long texts have three bytes.
    """
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
    """Return the growth where a space replaces a text. An empty one is found before and after every character."""
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
        # Each piece gets the text, and there are at most half as many pieces as bytes: added tokens are between them.
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
"""The growth of each component that a text goes through, by section. The factors are multiplied."""

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
"""The growth of each component that tokens go through."""

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
"""The types that may have a key. Other types may not, because the library tries other types where one does not fit."""

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
    """Check the bytes of the file, before it is read. Raises ValueError."""
    if size > MOST_BYTES:
        raise Judged(f"it has {size} bytes, at most {MOST_BYTES} are read")


def judged(file: io.BytesIO) -> bytes:
    """Judge a tokenizer, and return it for the library, without truncation and padding.

    `file` is changed instead of copied. Raises ValueError for a tokenizer that may take too much, and for one that is
    no JSON.
    """
    sections, end = _parsed(file.getvalue())
    _judge_sections(sections)
    used = {name: sections.get(name) for name in _SECTIONS} | {"truncation": None, "padding": None}
    file.seek(end)
    rest = file.read()[1:]
    file.seek(end)
    file.write(b"," + json.dumps(used).encode()[1:] + rest)
    return file.getvalue()


def judge_model(settings: Mapping[str, Any]) -> None:
    """Judge those of `MODEL_SETTINGS` that a model has. Raises ValueError."""
    for name in MODEL_SETTINGS[:-1]:
        value = settings.get(name)
        if isinstance(value, str) and len(value) > LONGEST_ADDED:
            raise Judged(f"model.{name} has {len(value)} characters, at most {LONGEST_ADDED} are allowed")
    longest = settings.get(MODEL_SETTINGS[-1])
    if isinstance(longest, (int, float)) and longest > LONGEST_WORD:
        raise Judged(f"model.{MODEL_SETTINGS[-1]} is {longest}, at most {LONGEST_WORD} is allowed")


def _parsed(content: bytes) -> tuple[Mapping[str, Any], int]:
    """Return the sections without `model`, which is judged by its bytes, and the offset of the last brace.

    Raises ValueError.
    """
    check_size(len(content))
    _check_values(content)
    end = content.rfind(b"}")
    start = content.find(b'"model"', 0, _PARSED_AT_ONCE)
    if start >= 0:
        try:
            # This completes a JSON text only if the key is one of the outermost object.
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
    import numpy as np

    octets, most = np.frombuffer(content, np.uint8), MOST_VALUES
    if len(octets) > most:
        parts = range(0, len(octets), _COUNTED_AT_ONCE)
        commas = sum(int(np.count_nonzero(octets[at : at + _COUNTED_AT_ONCE] == ord(","))) for at in parts)
        if commas > most:
            raise Judged(f"it has {commas} values, at most {most} are allowed")


def _judge_vocabulary(model: Any) -> None:
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    for entry in vocabulary if isinstance(vocabulary, (dict, list)) else ():
        token = entry[0] if isinstance(entry, list) and entry else entry
        if isinstance(token, str) and len(token) > LONGEST_TOKEN:
            raise Judged(f"model.vocab has a token of {len(token)} characters, at most {LONGEST_TOKEN} are allowed")


def _check_strings(content: bytes, start: int) -> None:
    """Check that there is a quote in every `LONGEST_TOKEN` bytes from `start` on: no string is twice as long."""
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
    """Return the growth of a text after a section, where `grown` is that before the section."""
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
    value: Any, section: str, types: Mapping[str, Any] | tuple[str, ...]
) -> Iterator[tuple[str, Component]]:
    """Yield each component of a section, with its path. Raises ValueError where the library would have to guess."""
    left, count = [(section, value)] if value is not None else [], 0
    while left:
        path, component = left.pop()
        count += 1
        if count > MOST_COMPONENTS:
            raise Judged(f"{section} has more than {MOST_COMPONENTS} components")
        if not isinstance(component, dict) or component.get("type") not in types:
            raise Judged(f"{path} must be of a type among {', '.join(types)}")
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
            left += [(f"{path}.{key}[{index}]", inner) for index, inner in reversed([*enumerate(component[key])])]
        yield path, component


def _texts(setting: Any) -> Iterator[str]:
    """Yield a setting that is a text, or the texts in it."""
    inner = setting.values() if isinstance(setting, dict) else setting if isinstance(setting, list) else (setting,)
    yield from (value for value in inner if isinstance(value, str))


def _judge_inserted(value: Any) -> None:
    """Judge the number of tokens that a text gets, and how often the text itself is in the result."""
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
        entry = tokens.get(str(special.get("id"))) if isinstance(special, dict) else None
        inserted += sum(len(ids) for ids in entry.values() if isinstance(ids, list)) if isinstance(entry, dict) else 0
    if texts > 2:
        raise Judged(f"{path}.{template} has the text {texts} times")
    for token in tokens.values():
        for text in token.get("tokens") or () if isinstance(token, dict) else ():
            if not isinstance(text, str) or len(text) > LONGEST_ADDED:
                raise Judged(f"{path}.special_tokens must have texts of at most {LONGEST_ADDED} characters")
    return inserted


def _judge_added(value: Any, grown: float) -> None:
    """Judge the tokens that are looked for before a text is cut. They are normalized when they are read."""
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
