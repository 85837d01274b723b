"""Replies that follow a schema or a grammar: each is whole and allowed, or says that it was cut off."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.engine import generation
from llama_npu2.engine.completion import Completion
from llama_npu2.options import OptionError, Sampling
from llama_npu2.text.grammars import Constraint, Grammars
from llama_npu2.text.replies import Marks
from llama_npu2.text.tokenizer import Tokenizer
from stages.model.families import parse_config
from stages.model.presets import PRESETS
from stages.model.random_weights import write_random_weights
from tests.conftest import ROOT, build
from tests.support.vocabulary import trained

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b", None, 1.5]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "flags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[Llama]:
    model = load(demo)
    yield model
    model.close()


def schemas(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of a kind that people write: nested, of unions, enums, patterns, bounds, with keys of all scripts."""
    names = ("a", "größe", "日本", "a b", 'q"uote', "", "\\", "🙂", "long_name_of_a_property")
    leaves: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": "integer", "minimum": (low := draw.randint(-99, 99)), "maximum": low + draw.randint(0, 1000)},
        lambda: {"type": "number", "minimum": 0, "maximum": draw.choice([1, 2.5, 1000])},
        lambda: {"type": "string", "maxLength": draw.randint(0, 8)},
        lambda: {"type": "string", "pattern": draw.choice(["^[a-c]{2,4}$", "^(x|yz)-[0-9]{1,3}$", "^[A-Z][a-z]?$"])},
        lambda: {"type": "string", "format": draw.choice(["date", "time", "uuid", "ipv4"])},
        lambda: {"enum": draw.sample(["red", 'g"n', "", 7, -1.5, True, None, ["x"], {"y": [1]}], draw.randint(1, 5))},
        lambda: {"const": draw.choice(["fixed", 0, None, {"k": "v"}])},
    ]
    if not depth or draw.random() < 0.3:
        return draw.choice(leaves)()
    kind = draw.random()
    if kind < 0.15:
        return {"anyOf": [schemas(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
    if kind < 0.3:
        low = draw.randint(0, 1)
        return {"type": "array", "items": schemas(draw, depth - 1), "minItems": low, "maxItems": low + 1}
    properties = {name: schemas(draw, depth - 1) for name in draw.sample(names, draw.randint(0, 3))}
    required = [name for name in properties if draw.random() < 0.7]
    found = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind < 0.45:
        leaf = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
        leaf |= {"required": ["next"], "additionalProperties": False}
        found["properties"]["list"] = {"$ref": "#/$defs/n"}
        found["$defs"] = {"n": leaf}
    return found


def whole_schema(draw: random.Random) -> dict[str, Any]:
    """A schema whose definitions stand at its top, as `$ref` asks for them there."""
    schema = schemas(draw)
    if '"$ref"' in json.dumps(schema) and "$defs" not in schema:
        return whole_schema(draw)
    return schema


async def replies(llm: Llama, each: int, seeds: range) -> tuple[int, int]:
    """Ask for replies to schemas, `each` to each; return how many were whole and how many cut off."""
    whole = cut = 0
    with llm.engine() as engine:
        for seed in seeds:
            schema = whole_schema(random.Random(seed))
            streams = [
                engine.submit(
                    "The capital of France is",
                    raw=True,
                    schema=schema,
                    temperature=1.0,
                    seed=seed,
                    number=number,
                    max_tokens=6 if number % 10 == 9 else 200,
                )
                for number in range(each)
            ]
            for made in await asyncio.gather(*(stream.whole() for stream in streams)):
                if made.finish_reason == "length":
                    cut += 1
                    continue
                whole += 1
                jsonschema.Draft202012Validator(schema, format_checker=None).validate(json.loads(made.text))
    return whole, cut


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, 11))])
def test_replies_are_what_their_schemas_allow(llm: Llama, part: int) -> None:
    """The thorough ones are 10,000 replies to 330 schemas."""
    seeds, each = (range(20), 4) if part == 0 else (range(33 * part, 33 * part + 33), 31)
    whole, cut = asyncio.run(replies(llm, each, seeds))
    print(f"{whole} whole, {cut} cut off")
    assert whole > 0.75 * (whole + cut) and cut


def test_without_the_mask_replies_are_not_allowed(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Constraint, "restrict", lambda self, logits: None)
    with pytest.raises(UserError, match="cannot be followed"):
        llm.generate("The capital of France is", schema=PERSON).whole()


@pytest.mark.parametrize("speculate", [True, False])
def test_in_an_engine_and_alone_replies_are_the_same(llm: Llama, speculate: bool) -> None:
    asked = [{"schema": PERSON, "temperature": 1.0, "seed": seed, "max_tokens": 100} for seed in range(6)]
    alone = [llm.generate("Tell me", **each).whole() for each in asked]

    async def main() -> list[Completion]:
        with llm.engine(speculate=speculate) as engine:
            streams = [engine.submit("Tell me", **each) for each in asked]
            return [await stream.whole() for stream in streams]

    assert [made.tokens for made in asyncio.run(main())] == [made.tokens for made in alone]
    for made in alone:
        assert made.finish_reason == "stop"
        jsonschema.validate(json.loads(made.text), PERSON)


def test_a_grammar(llm: Llama) -> None:
    made = llm.generate("Yes or no?", grammar='start: "yes" | "no"').whole()
    assert made.text in ("yes", "no") and made.finish_reason == "stop"
    (first, second) = llm.complete("x", grammar="start: /[0-9]{4}/", n=2, temperature=1.0, seed=1)
    assert first.text != second.text and all(made.text.isdigit() and len(made.text) == 4 for made in (first, second))


def test_a_reply_that_cannot_end_is_cut_off(llm: Llama) -> None:
    made = llm.generate("x", schema={"type": "string", "minLength": 1000}, max_tokens=9).whole()
    assert made.finish_reason == "length" and len(made.tokens) == 9


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"schema": "{"}, "must be a JSON schema"),
        ({"schema": "[]"}, "must be a JSON schema"),
        ({"schema": {1: {2, 3}}}, "must be a JSON schema"),
        ({"schema": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"schema": {"contains": {}}}, "Unimplemented keys"),
        ({"schema": {"x-guidance": {"lenient": True}, "contains": {}}}, "Unimplemented keys"),
        ({"schema": {"pattern": "(?=x)y", "type": "string"}}, "look-around"),
        ({"schema": "false"}, "cannot be followed"),
        ({"grammar": "start: nope"}, "unknown name"),
        ({"grammar": 'start: "a"', "schema": {}}, "leave one out"),
    ],
)
def test_what_cannot_be_followed_is_refused(llm: Llama, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        llm.generate("x", **asked).whole()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_an_empty_schema_allows_all_json(llm: Llama) -> None:
    for schema in ({}, "true"):
        asked = {"schema": schema, "max_tokens": 9, "temperature": 1.0}
        made = [llm.generate("x", seed=seed, **asked).whole() for seed in range(30)]
        assert any(each.finish_reason == "stop" and json.loads(each.text) is None for each in made)


def test_a_schema_that_nothing_fulfils_is_refused_before_the_first_token(llm: Llama) -> None:
    for schema in ({"$ref": "#"}, {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}):
        with pytest.raises(OptionError, match="cannot be followed"):
            llm.constraint(Sampling(schema=json.dumps(schema)))


class _Letters:
    """A tokenizer of letters with marks of reasoning and of calls."""

    def __init__(self) -> None:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Inner

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = Inner(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        inner.add_tokens([AddedToken(mark) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
        inner.add_special_tokens([AddedToken("<end>", special=True)])
        self.tokenizer = Tokenizer(inner)

    def id(self, text: str) -> int:
        found = self.tokenizer.id(text)
        assert found is not None
        return found


def test_what_a_model_thinks_is_free_and_its_answer_is_not() -> None:
    letters = _Letters()
    tokenizer, end = letters.tokenizer, letters.id("<end>")
    vocabulary = tokenizer.inner.get_vocab_size()
    grammars = Grammars(tokenizer, {end}, vocabulary)
    wishes = [*tokenizer.encode("so", False), end, letters.id("<tool_call>"), letters.id("</think>")]
    wishes += [letters.id("<think>"), *tokenizer.encode("no", False)]
    made = Completion()
    asked = generation.Asked([letters.id("<think>")], Sampling(schema='{"enum": ["x"]}', max_tokens=50), 0, 0.0)
    constraint = grammars.constraint(asked.options.schema, "")
    reply = generation.Generation(asked, made, tokenizer, {end}, 100, lambda kind, name, f, *a: f(*a), constraint)
    while not reply.finished:
        logits = np.zeros(vocabulary, np.float32)
        for at, token in enumerate(reversed(wishes)):
            logits[token] = at + 1
        for piece in reply.take(logits):
            made.add(piece)
        if made.tokens[-1] in wishes:
            wishes.remove(made.tokens[-1])
        elif wishes and wishes[0] in (end, letters.id("<tool_call>")):
            del wishes[0]
    for piece in reply.flush():
        made.add(piece)
    assert made.reasoning.startswith("s") and "o" in made.reasoning and made.text == '"x"' and not made.tool_calls
    assert Marks(tokenizer).opens


def test_a_mark_is_no_text_of_an_answer() -> None:
    letters = _Letters()
    vocabulary = letters.tokenizer.inner.get_vocab_size()
    constraint = Grammars(letters.tokenizer, {letters.id("<end>")}, vocabulary).constraint('{"type": "string"}', "")
    constraint.follow(letters.id('"'))
    logits = np.zeros(vocabulary, np.float32)
    constraint.restrict(logits)
    assert logits[letters.id("a")] == logits[letters.id("<")] == 0
    for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<end>"):
        assert np.isneginf(logits[letters.id(mark)]), mark


def test_the_command_line(demo: Path) -> None:
    command = [sys.executable, "-m", "llama_npu2", "run", str(demo), "Tell me"]
    schema = json.dumps(
        {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]} | {"additionalProperties": False}
    )
    run = subprocess.run(
        [*command, f"--schema={schema}", "--json"], cwd=ROOT / "runtime", capture_output=True, text=True, check=True
    )
    assert json.loads(json.loads(run.stdout)["text"])["a"] in (1, 2)
    run = subprocess.run([*command, "--schema=x"], cwd=ROOT / "runtime", capture_output=True, text=True)
    assert run.stderr == 'error: --schema=x: must be a JSON schema, as in {"type":"object"}\n'


def test_a_missing_package_names_the_extra(demo: Path) -> None:
    script = "import sys; sys.modules['llguidance'] = None; from llama_npu2.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "run", str(demo), "x", "--schema={}"]
    run = subprocess.run(command, cwd=ROOT / "runtime", capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == "error: the package llguidance is not installed: pip install 'llama-npu2[grammar]'\n"


_TEXT = {"type": "string"}
_LEAF = {"type": "object", "properties": {"c": {"type": "number"}, "d": {"enum": ["red", "green", None, 3]}}}
_LEAF |= {"required": ["c", "d"], "additionalProperties": False}
_NODE = {"type": "object", "properties": {"v": _TEXT, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
_NODE |= {"required": ["v", "c"], "additionalProperties": False}
LONG: dict[str, Any] = {
    "people": {"type": "array", "items": {**PERSON, "properties": {**PERSON["properties"], "name": _TEXT}}},
    "nested": {"type": "array", "items": {"type": "array", "items": _LEAF, "minItems": 2}, "minItems": 9},
    "recursive": {"$defs": {"n": _NODE}, "$ref": "#/$defs/n"},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -12.5, "maximum": 99999}, "minItems": 60},
    "enums": {"type": "array", "items": {"enum": [f"value {i} of many" for i in range(500)]}, "minItems": 60},
    "patterns": {
        "type": "array",
        "items": {
            "anyOf": [{"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4,8}$"}, {"type": "string", "format": "uuid"}]
        },
        "minItems": 60,
    },
    "any": {},
}
"""Schemas of replies that go on for long."""


@pytest.mark.slow
def test_masks_cost_little(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the vocabulary and the shapes of Llama-3.2-1B. Replies with and without schemas come in turn."""
    config = PRESETS["llama-3.2-1b"]
    trained(config["vocab_size"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_random_weights(parse_config(config, "test"), tmp_path / "model.safetensors")
    costs: list[float] = []
    monkeypatch.setattr(Constraint, "restrict", _timed(Constraint.restrict, costs.append))
    monkeypatch.setattr(Constraint, "follow", _timed(Constraint.follow, lambda seconds: add(costs, seconds)))
    ratios, tokens = [], []
    with closing(load(build(tmp_path, artifacts, weights="int4"))) as llm:
        llm.speculate = False
        asked = {"raw": True, "max_tokens": 32, "temperature": 1.0, "logit_bias": dict.fromkeys(llm.eos, -100.0)}
        for seed in range(-1, 3):
            for name, schema in LONG.items():
                forced = llm.generate(name, schema=schema, seed=seed % 9, **asked).whole()
                free = llm.generate(name, seed=seed % 9, **asked).whole()
                if seed < 0:
                    costs.clear()  # schemas are compiled
                elif len(forced.tokens) > 8:
                    ratios.append(forced.stats.tpot / free.stats.tpot)
                    tokens.append(free.stats.tpot)
    token, (median, p99) = statistics.median(tokens), np.percentile(costs, (50, 99))
    quartiles = ", ".join(f"{100 * (quartile - 1):+.1f} %" for quartile in np.percentile(ratios, (25, 50, 75)))
    print(f"a token takes {1e3 * token:.1f} ms; of it {len(costs)} masks: median {1e3 * median:.2f} ms", end="")
    print(f" ({median / token:.1%}), p99 {1e3 * p99:.2f} ms; a token with a schema takes {quartiles} (quartiles)")
    assert median <= 0.03 * token and p99 <= 2e-3


def add(costs: list[float], seconds: float) -> None:
    """Add the time of a further part to what a mask has taken."""
    costs[-1] += seconds


def _timed(method: Callable[..., Any], note: Callable[[float], Any]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> None:
        started = time.perf_counter()
        method(*arguments)
        note(time.perf_counter() - started)

    return timed
