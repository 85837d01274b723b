"""A checkpoint whose weights are constructed: it calls a tool if there is one, and says what came of it.

Where its template begins a thought, it thinks first. Where a grammar holds it to JSON, it closes what it may close.

The embedding of a token is a dimension of its own. The LM head is a table of the token that follows each one. The one
attention head looks for the results of tools, and if there are none, for tools. What it finds is a dimension, too, and
decides what follows the beginning of a reply. Where a call ends, the head looks at the calls and the beginning of the
reply instead: the share of the calls says how many there are, and decides whether another one follows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stages.model import families
from stages.model.families import parse_config

ARGUMENTS = {"city": "Paris", "unit": "°C"}
CALL = ['{"name": "get_weather", "arguments": {"city": "Paris", ', '"unit": "°C"}}']
ANSWER = "It is sunny in Paris."
TOOLS, RESULT, REPLY, END = "<|tools|>", "<|tool|>", "<|assistant|>", "<|end|>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
LAST = '"} }'
"""Ends a forced call whose last argument is a text. No prompt has it: templates write no space there."""
THINK, THOUGHT, THOUGHT_OUT = "<think>", "So I look at the sky.", "</think>"
TEMPLATE = """
{%- if reasoning_effort %}{{ '<|system|>Effort: ' ~ reasoning_effort ~ '<|end|>' }}{% endif %}
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ '<|tool|>' ~ message.name ~ ': ' }}
    {%- elif message.role == 'assistant' %}{{ '<|assistant|>' }}
    {%- else %}{{ '<|' ~ message.role ~ '|>' }}{% endif %}
    {%- if message.reasoning_content %}{{ '<think>' ~ message.reasoning_content ~ '</think>' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"""


def write_caller(
    directory: Path, call: Sequence[str] = CALL, answer: str = ANSWER, context: int = 4096, calls: int = 1
) -> None:
    """Write the checkpoint.

    Args:
        directory: where it is written.
        call: the call of a tool that it writes, each part one token.
        answer: what it says of the call's result, and without tools.
        context: the most tokens of prompt and reply.
        calls: how many times it writes the call, in a conversation that had no reply before.
    """
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text) for text in (OPEN, CLOSE, LAST, *call, answer, THINK, THOUGHT, THOUGHT_OUT)])
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in (TOOLS, RESULT, REPLY, END, "<|user|>", "<|system|>")]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": END}))

    vocabulary = tokenizer.get_vocab_size()
    called, told, closed, width = vocabulary, vocabulary + 1, vocabulary + 2, vocabulary + 3
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e9,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(END),
    }
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else np.zeros(shape, np.float32)
        for name, shape in families.tensors(parse_config(raw, "test")).items()
    }
    ids = tokenizer.get_vocab()
    tensors["model.embed_tokens.weight"][:, :vocabulary] = np.eye(vocabulary)
    attention = "model.layers.0.self_attn"
    query, key, value, output = (tensors[f"{attention}.{each}_proj.weight"] for each in "qkvo")
    of_tools, of_calls = 7, 6  # pairs of dimensions that positions hardly turn
    query[of_tools, :vocabulary] = 1
    query[of_tools, [ids[CLOSE], ids[LAST]]] = 0
    query[of_calls, [ids[CLOSE], ids[LAST]]] = 1
    looked_for = [(TOOLS, of_tools, 1, called), (RESULT, of_tools, 2, told)]
    looked_for += [(CLOSE, of_calls, 1, closed), (LAST, of_calls, 1, closed)]
    for at, (text, of, weight, found) in enumerate(looked_for):
        key[of, ids[text]] = weight
        value[at, ids[text]] = 1 / 16
        output[found, at] = 1
    key[of_calls, ids[REPLY]] = 1
    follows = [(OPEN, call[0]), *pairwise(call), (call[-1], CLOSE)]
    follows += [(CLOSE, OPEN), (LAST, ",")] if calls > 1 else [(CLOSE, END)]
    follows += [(before, '"') for before in "{[:"]
    follows += [(answer, END), (THINK, THOUGHT), (THOUGHT, THOUGHT_OUT)]
    head = tensors["lm_head.weight"]
    for at, text in enumerate(("[", ",", "]", "}", '"', LAST, END), 1):
        head[ids[text], :vocabulary] = at / 10
    for text, after in follows:
        head[ids[after], ids[text]] = 10
    head[ids[answer], ids[REPLY]] = head[ids[answer], ids[THOUGHT_OUT]] = 3
    head[ids[OPEN], called] = head[ids[answer], told] = 5
    if calls > 1:  # The share is 1 / 2 after one call, 2 / 3 after two: 10 is weighed between the last two shares.
        between = ((calls - 1) / calls + calls / (calls + 1)) / 2
        head[[ids[END], ids["]"]], closed] = 10 * 16 / width**0.5 / between
    save_file({name: each.astype(bfloat16) for name, each in tensors.items()}, directory / "model.safetensors")
