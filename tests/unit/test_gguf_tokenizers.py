"""Tokenizers of GGUF files against llama.cpp's, which reads the same metadata: ids of texts that are hard to cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stages.model.importers.gguf import GgufFile
from stages.proof.comparison.gguf_file import silenced
from tests.conftest import needs_llama_cpp
from tests.support.quantised_files import gguf, metadata_of

pytestmark = needs_llama_cpp

TEXTS = (
    "I'll say: it's 1234567 o'clock, 3.14! WE'RE here, you'VE, 'Tis, x'll'd",
    "  two  spaces\t and\n\nlines \r\n\r\n   \n end \n",
    "\t\tdef f(x):\n\t\treturn x//2 +/- ://a/\n/\n\n",
    "naïve émigré, 日本語テキスト, читали 🙂👩‍👩‍👧 ½ ² ٣٤٥ Ⅷ",
    "CamelCaseHTTPServer snake_case XMLHttpRequest2000Foo iPhone15",
    "a.b.c,d;e!!!??? --- ...\u00a0\u2003\u3000x\u200by ﬁ ﷺ",
    "$100+5=105 <a href='x'>^~|`{}[]</a> \\n %s #1",
    "   leading",
    "trailing   ",
    " ",
    "\n",
    "",
    "a",
    "12 345 6789 0",
)
CASED = "чита\u0301ли éÉ ÀÉÎõü ΓΔπδ ЖЗий éA Éa ǅab ʰa"
"""llama.cpp's expressions for `gpt-4o` and `tekken` do not know marks, and the case of these letters."""
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|bos|>", "<tool>")

Both = tuple[Callable[[str, bool], list[int]], Callable[[str, bool], list[int]]]


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    """A vocabulary whose merges cross all borders, so that every cut can be seen."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, min_frequency=1, initial_alphabet=alphabet, special_tokens=[*CONTROLS], show_progress=False
    )
    trained.train_from_iterator([*TEXTS, CASED], trainer)
    metadata = metadata_of(trained)
    assert len(metadata["merges"]) > 200
    return metadata | {"bos_token_id": 2, "eos_token_id": 1}


def opened(path: Path, metadata: dict[str, Any]) -> Iterator[Both]:
    """Encoders of the tokenizer in a GGUF file, ours and llama.cpp's: (text, whether tokens are added) -> ids."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in metadata.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](name if "." in name else f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_str(GgufFile(path).tokenizer()["tokenizer.json"].decode())
    api = silenced()
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(bytes(path), params)
    assert model, f"llama.cpp does not read {path}"
    vocab = api.llama_model_get_vocab(model)

    def theirs(text: str, add: bool) -> list[int]:
        tokens = (api.llama_token * 4096)()
        raw = text.encode()
        return [*tokens[: api.llama_tokenize(vocab, raw, len(raw), tokens, 4096, add, True)]]

    yield lambda text, add: tokenizer.encode(text, add_special_tokens=add).ids, theirs
    api.llama_model_free(model)


PRE = (
    *("default", "gpt-2", "llama-bpe", "lfm2", "dbrx", "smollm", "refact"),
    *("qwen2", "gpt-4o", "tekken", "command-r", "starcoder", "olmo", "smaug-bpe", "llama4", "deepseek-r1-qwen"),
    *("falcon3", "pixtral", "kanana2", "granite-docling"),
)


@pytest.mark.parametrize("pre", PRE)
def test_byte_level(pre: str, byte_level: dict[str, Any], tmp_path: Path) -> None:
    for ours, theirs in opened(tmp_path / "v.gguf", byte_level | {"pre": pre}):
        for text in (*TEXTS, "".join(TEXTS), f"{CONTROLS[0]}user\n{TEXTS[0]}{CONTROLS[1]}\n{CONTROLS[3]}", CASED):
            if text == CASED and pre in ("gpt-4o", "llama4", "kanana2", "tekken"):
                continue
            for add in (True, False):
                assert ours(text, add) == theirs(text, add), (text, add)


@pytest.fixture(scope="module")
def sentencepiece() -> dict[str, Any]:
    """A vocabulary as Gemma's: runs of spaces and lines are tokens of their own, what is unknown becomes bytes."""
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=900, min_frequency=1, show_progress=False)
    trained.train_from_iterator([text.replace(" ", "▁").replace("🙂", "") for text in TEXTS], trainer)
    model = json.loads(trained.to_str())["model"]
    unions = dict.fromkeys("".join(merge) for merge in model["merges"])
    words = [*unions, *(word for word in model["vocab"] if word not in unions and len(word) == 1)]
    own = ["  ", "   ", "\n\n", "<table>", "</s>"]
    words = [word for word in words if word not in own]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    controls = ["<pad>", "<|endoftext|>", "<s>", "<unk>", "<end_of_turn>"]
    kinds = [3, 3, 3, 2, 3, *[4] * len(own), *[6] * 256, *[1] * len(words)]
    scores = [0.0] * (len(controls) + len(own) + 256) + [-float(i) for i in range(len(words))]
    tokens = [*controls, *own, *bytes_, *words]
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    return {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, **ids}


SENTENCEPIECE = {
    "prefix": {"add_space_prefix": True},
    "no-prefix": {"add_space_prefix": False},
    "phi-3": {"general.name": "Some Phi-3 model"},
}


@pytest.mark.parametrize("case", SENTENCEPIECE)
def test_sentencepiece(case: str, sentencepiece: dict[str, Any], tmp_path: Path) -> None:
    assert len(sentencepiece["tokens"]) > 600
    for ours, theirs in opened(tmp_path / "v.gguf", sentencepiece | SENTENCEPIECE[case]):
        for text in (
            *TEXTS,
            "".join(TEXTS),
            f"<s> user\n\n\n{TEXTS[0]}<end_of_turn> \nx <|endoftext|> x</s>y <table> <table> z",
        ):
            for add in (True, False):
                assert ours(text, add) == theirs(text, add), (text, add)
