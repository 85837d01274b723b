"""Converts the tokenizer of a GGUF file to the files that Hugging Face's tokenizers read.

`gpt2` is byte-level BPE with merges, on text that one of llama.cpp's sets of expressions has cut
(`src/llama-vocab.cpp`); `llama` is SentencePiece's BPE, whose merges follow from the tokens' scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llama_npu2.errors import UserError, first_line
from stages.model.config import ConfigFields

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Kinds of tokens (`llama_token_type`) that are found in text before it is cut."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN, _GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _REST
    for end, digits in (("", r"\p{N}"), (_SUFFIX + "?", r"\p{N}{1,3}"))
)
"""As in the models' own tokenizers. llama.cpp takes letters outside of ASCII for both upper and lower case here."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "pixtral", "tekken")
"""Sets whose words are one token if they are in the vocabulary, whatever the merges; texts begin with `bos`."""
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_CUTS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "granite-docling"), (_GPT2,)),
    **dict.fromkeys((*_WHOLE_WORDS[:-1], "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _SINGLE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT_4O,)),
    "tekken": (_TEKKEN,),
}
"""The expressions of each `tokenizer.ggml.pre`, each applied to the pieces of the one before."""
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "</s>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)
"""Control tokens that end a text whether or not the metadata say so, as in llama.cpp."""
_RETURNS = {"<|return|>", "<|call|>"}
"""Where both are there, `<|end|>` ends only a part of an answer."""
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def end_tokens(meta: ConfigFields, vocab: int) -> list[int]:
    """Return the tokens that end a text: those that the metadata name, and those known by their text.

    Raises UserError.
    """
    named = [f"{_PREFIX}{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = {token for name in named for token in meta.token_ids(name, vocab)}
    tokens, kinds = (meta.values.get(_PREFIX + name) for name in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(kinds, list):
        pairs = zip(tokens[:vocab], kinds, strict=False)
        known = {token: i for i, (token, kind) in enumerate(pairs) if kind == _CONTROL and token in _ENDS}
        if known.keys() >= _RETURNS:
            known.pop("<|end|>", None)
        ids |= {*known.values()}
    return sorted(ids)


def tokenizer_files(meta: ConfigFields) -> Mapping[str, bytes]:
    """Return the content of `tokenizer.json` and `tokenizer_config.json`. Raises UserError."""
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if (kind := meta.values.get(_PREFIX + "model")) not in makers:
        raise meta.fail(_PREFIX + "model", f"only tokenizers {', '.join(makers)} are supported")
    vocabulary = _Vocabulary(meta)
    try:
        tokenizer = makers[kind](vocabulary)
        _finish(tokenizer, vocabulary)
        text = tokenizer.to_str()
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{meta.where}: its tokenizer cannot be made: {first_line(error)}") from None
    return {"tokenizer.json": text.encode(), "tokenizer_config.json": json.dumps(_config(vocabulary)).encode()}


class _Vocabulary:
    """Typed access to `tokenizer.ggml.*`. Raises UserError."""

    def __init__(self, meta: ConfigFields) -> None:
        self.meta = meta
        self.tokens: list[str] = self.column("tokens", str)
        self.kinds: list[int] = self.column("token_type", int, len(self.tokens))
        self.ids = {token: i for i, token in reversed([*enumerate(self.tokens)])}

    def get(self, name: str, default: Any = None) -> Any:
        return self.meta.values.get(_PREFIX + name, default)

    def column(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        values = self.get(name)
        if not isinstance(values, list) or not values or not all(isinstance(value, kind) for value in values):
            raise UserError(f"{self.meta.where}: {_PREFIX}{name} must be an array of {kind.__name__}")
        if length is not None and len(values) != length:
            raise UserError(f"{self.meta.where}: {_PREFIX}{name} has {len(values)} values for {length} tokens")
        return values

    def special(self, name: str) -> str | None:
        """Return the token whose id stands under `<name>_token_id`, None where there is none."""
        ids = self.meta.token_ids(f"{_PREFIX}{name}_token_id", len(self.tokens))
        return self.tokens[ids[0]] if ids else None


def _byte_level(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = vocabulary.get("pre", "default")
    if name not in _CUTS:
        raise vocabulary.meta.fail(_PREFIX + "pre", f"only {', '.join(_CUTS)} are supported")
    merges = [tuple(merge.split(" ")) for merge in vocabulary.column("merges", str)]
    model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=name in _WHOLE_WORDS)
    tokenizer = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = vocabulary.column("scores", float, len(vocabulary.tokens))
    unknown = vocabulary.special("unknown") or vocabulary.tokens[0]
    merges = _merges(vocabulary.ids, scores)
    model = models.BPE(vocab=vocabulary.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    first = [normalizers.Prepend("▁")] if vocabulary.get("add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if first else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(ids: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that together are a token, the best scored first."""
    merges = []
    for token, i in ids.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += [(-scores[i], i, pair) for pair in cuts if pair[0] in ids and pair[1] in ids]
    return [pair for *_, pair in sorted(merges)]


def _finish(tokenizer: Any, vocabulary: _Vocabulary) -> None:
    """Add the tokens that are found before text is cut, and the tokens that a text begins and ends with."""
    from tokenizers import AddedToken, processors

    added = [(i, kind) for i, kind in enumerate(vocabulary.kinds) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    keeps = _KEEP_SPACE if _strips(vocabulary.meta) else vocabulary.ids
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED, rstrip=token not in keeps)
            for token, kind in ((vocabulary.tokens[i], kind) for i, kind in added)
        ]
    )
    begins = vocabulary.get("model") == "llama" or vocabulary.get("pre") in _WHOLE_WORDS
    begin = vocabulary.special("bos") if vocabulary.get("add_bos_token", begins) else None
    end = vocabulary.special("eos") if vocabulary.get("add_eos_token", False) else None
    if begin or end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*filter(None, (begin,)), "$A", *filter(None, (end,))],
            special_tokens=[(token, vocabulary.ids[token]) for token in {begin, end} if token],
        )


def _strips(meta: ConfigFields) -> bool:
    """Whether tokens take the spaces behind them: of Phi 3's, whose files say so only by the model's name."""
    name = meta.values.get("general.name")
    return isinstance(name, str) and any(phi in name.lower() for phi in ("phi-3", "phi3"))


def _config(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the fields of `tokenizer_config.json`: the chat template, and the special tokens that it may name."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    fields: dict[str, Any] = {field: vocabulary.special(name) for field, name in names.items()}
    fields["chat_template"] = vocabulary.meta.values.get("tokenizer.chat_template")
    return {"clean_up_tokenization_spaces": False} | {name: value for name, value in fields.items() if value}
