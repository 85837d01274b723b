"""Make the demo model: tokenizer, configuration and trained weights, from the text in corpus.py.

    python models/demo/make_demo.py            train and write everything (about twenty minutes on two cores)
    python models/demo/make_demo.py --check    load the written files in bf16 and check what the model says

The result is an ordinary Llama checkpoint in Hugging Face format. The model is small and is meant to know its text
by heart: each prompt has one reply, the reply ends by itself, and the right token leads by a wide margin, so that
implementations that round differently still say the same.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from corpus import SYSTEM_MESSAGES, Example, all_examples, follow_ups
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
SEED = 20

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
START_HEADER, END_HEADER, EOT = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
PAD = "<|finetune_right_pad_id|>"
SPECIAL_TOKENS = [BOS, EOS, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", PAD]
SPECIAL_TOKENS += ["<|reserved_special_token_2|>", START_HEADER, END_HEADER, "<|reserved_special_token_3|>", EOT]
VOCAB_SIZE = 2048

# The pre-tokenizer of Llama 3. Numbers still become single digits, because no merge joins two digits.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Llama 3 headers, but nothing between the assistant header and the reply: replies start with their own space, so
# that a prompt has the same continuation as raw text and as a chat message.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}"
    "{%- if message['role'] == 'assistant' %}{{- ' ' }}{%- else %}{{- '\\n\\n' }}{%- endif %}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>' }}{%- endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 4.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 512,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}

# How often a topic is drawn, relative to the square root of its number of examples.
TOPIC_WEIGHT = {"sum": 2.5, "sum-words": 2.5, "difference": 2.0, "story-open": 2.0, "story": 1.5, "poem": 0.7}
PROMPT_WEIGHT = 0.05  # loss weight of prompt tokens; replies have 1


# --------------------------------------------------------------------------------------------------------------
# Tokenizer and configuration
# --------------------------------------------------------------------------------------------------------------


def pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    """Return the split pattern followed by the byte-level alphabet, as in Llama 3."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level])


def train_tokenizer(examples: list[Example]) -> Tokenizer:
    """Train the byte-level BPE on the corpus; special tokens come after the ordinary ones, as in Llama 3."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer(SPLIT.replace("{1,3}", ""))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((example.prompt + example.reply for example in examples), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE - len(SPECIAL_TOKENS):
        raise ValueError(f"the corpus yields only {tokenizer.get_vocab_size()} tokens")
    tokenizer.pre_tokenizer = pre_tokenizer(SPLIT)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    begin = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return tokenizer


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the configuration files with the token ids."""
    bos, eos, eot, pad = (tokenizer.token_to_id(token) for token in (BOS, EOS, EOT, PAD))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": CONFIG["max_position_embeddings"],
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    ids = {"bos_token_id": bos, "eos_token_id": [eos, eot], "pad_token_id": pad}
    write_json(folder / "config.json", dict(sorted({**CONFIG, **ids}.items())))
    write_json(folder / "generation_config.json", {**ids, "do_sample": False, "max_new_tokens": 256})


def write_weights(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights in bf16; the output matrix is the embedding and is not stored."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --------------------------------------------------------------------------------------------------------------
# Training data
# --------------------------------------------------------------------------------------------------------------


@dataclass
class Segment:
    """One text the model sees by itself: token ids, the wanted next token for each of them, and its loss weight."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def extend(self, ids: list[int], weight: float) -> None:
        """Append tokens; each is the label of the token before it."""
        for token in ids:
            if self.ids:
                self.labels[-1], self.weights[-1] = token, weight
            self.ids.append(token)
            self.labels.append(0)
            self.weights.append(0.0)


class Sampler:
    """Draws examples and lays them out as raw texts, longer texts of several parts, and chats."""

    def __init__(self, tokenizer: Tokenizer, examples: list[Example], seed: int) -> None:
        """Prepare the token ids of the layout and the probabilities of the examples."""
        self.random = random.Random(seed)
        self.tokenizer = tokenizer
        self.examples = examples
        self.follow_ups = list(follow_ups())
        self.cache: dict[str, list[int]] = {}
        self.bos, self.eos, self.eot, self.start, self.end = (
            tokenizer.token_to_id(token) for token in (BOS, EOS, EOT, START_HEADER, END_HEADER)
        )
        sizes: dict[str, int] = defaultdict(int)
        for example in examples:
            sizes[example.topic] += 1
        self.base = [TOPIC_WEIGHT.get(e.topic, 1.0) / math.sqrt(sizes[e.topic]) for e in examples]
        self.set_boost([1.0] * len(examples))

    def set_boost(self, boost: list[float]) -> None:
        """Multiply the probabilities of the examples."""
        self.total: list[float] = []
        total = 0.0
        for base, factor in zip(self.base, boost, strict=True):
            total += base * factor
            self.total.append(total)

    def draw(self, mode: str) -> Example:
        """Draw an example that is used as raw text or as chat."""
        while True:
            example = self.random.choices(self.examples, cum_weights=self.total)[0]
            if getattr(example, mode):
                return example

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        if text not in self.cache:
            if len(self.cache) > 300_000:
                self.cache.clear()
            self.cache[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.cache[text]

    def raw(self, example: Example) -> Segment:
        """Prompt, reply and end of text."""
        segment = Segment()
        segment.extend([self.bos], 0.0)
        self.add_raw(segment, example, "", "")
        segment.extend([self.eos], 1.0)
        return segment

    def add_raw(self, segment: Segment, example: Example, before: str, after: str) -> None:
        """Append an example with separators around it.

        A separator may merge with the last token of the reply. The label is then still the token of the reply
        alone, and after a whole reply it is the end of text: what the model shall say does not depend on what
        happens to follow.
        """
        prompt, reply = self.encode(before + example.prompt), self.encode(example.reply)
        segment.extend(prompt, 0.0 if example.topic.startswith("story") else PROMPT_WEIGHT)
        if not after:
            segment.extend(reply, 1.0)
            return
        joint = self.encode(example.reply + after)
        same = next((i for i, (a, b) in enumerate(zip(reply, joint, strict=False)) if a != b), len(reply))
        segment.extend(joint[:same], 1.0)
        label = reply[same] if same < len(reply) else self.eos
        segment.extend(joint[same:], 0.0)
        position = len(segment.ids) - len(joint[same:]) - 1
        segment.labels[position], segment.weights[position] = label, 1.0

    def article(self, size: int) -> Segment:
        """Several raw examples in one text of up to `size` tokens."""
        separator = self.random.choice((" ", "\n", "\n\n"))
        before, after = (separator, "") if separator == " " else ("", separator)
        segment = Segment()
        segment.extend([self.bos], 0.0)
        first = True
        while True:
            example = self.draw("raw")
            if len(segment.ids) + len(self.encode(example.prompt)) + len(self.encode(example.reply)) + 4 > size:
                return segment
            if not first and not after:  # a label for the end of the previous reply, before going on
                segment.labels[-1], segment.weights[-1] = self.eos, 1.0
            mark = len(segment.ids) - 1
            label = segment.labels[mark], segment.weights[mark]
            self.add_raw(segment, example, "" if first else before, after)
            if not first:
                segment.labels[mark], segment.weights[mark] = label
            first = False

    def vary(self, example: Example) -> str:
        """Vary the prompt of a chat a little: letter case, a missing question mark, a polite word."""
        text, dice = example.prompt, self.random.random()
        if not text.endswith("?"):
            return text
        if dice < 0.08:
            return text[:-1]
        if dice < 0.16:
            return text.lower()
        if dice < 0.20:
            return text[0].lower() + text[1:]
        if dice < 0.23:
            return "Please tell me: " + text
        return text

    def header(self, role: str) -> list[int]:
        """Token ids of a message header."""
        return [self.start, *self.encode(role), self.end]

    def chat(self, turns: int, size: int, first: Example | None = None) -> Segment:
        """A dialog of some turns, at times with a system message, in the layout of the chat template."""
        segment = Segment()
        segment.extend([self.bos], 0.0)
        if self.random.random() < 0.2:
            system = self.random.choice(SYSTEM_MESSAGES)
            segment.extend([*self.header("system"), *self.encode("\n\n" + system), self.eot], 0.0)
        examples = [first] if first else []
        while len(examples) < turns:
            if self.random.random() < 0.06:
                examples += self.random.choice(self.follow_ups)
            else:
                examples.append(self.draw("chat"))
        for example in examples:
            user = [*self.header("user"), *self.encode("\n\n" + self.vary(example)), self.eot]
            user += self.header("assistant")
            reply = [*self.encode(example.reply), self.eot]
            if len(segment.ids) + len(user) + len(reply) > size:
                break
            segment.extend(user, 0.0)
            segment.extend(reply, 1.0)
        return segment

    def segment(self, size: int, long: bool) -> Segment:
        """Draw one segment of at most about `size` tokens."""
        dice = self.random.random()
        if long:
            return self.article(size) if dice < 0.5 else self.chat(60, size)
        if dice < 0.42:
            return self.raw(self.draw("raw"))
        if dice < 0.80:
            return self.chat(1, size)
        if dice < 0.92:
            return self.chat(self.random.randint(2, 6), size)
        return self.article(self.random.randint(size // 4, size))

    def row(self, size: int, long: bool) -> list[Segment]:
        """Draw segments that together fill a row; the last one is cut."""
        segments: list[Segment] = []
        used = 0
        while used < size:
            segments.append(self.segment(size, long and not segments))
            used += len(segments[-1].ids)
        return segments

    def batch(self, count: int, size: int, long: bool = False) -> dict[str, torch.Tensor]:
        """Draw a batch of packed rows with a causal mask that keeps the segments apart.

        Positions run through the whole row, so that texts are seen at all offsets.
        """
        rows = [self.row(size, long) for _ in range(count)]
        return collate(rows, size)


def collate(rows: list[list[Segment]], size: int) -> dict[str, torch.Tensor]:
    """Lay rows of segments out as tensors, padded or cut to `size`."""
    ids = torch.zeros(len(rows), size, dtype=torch.long)
    labels, owner = torch.zeros_like(ids), torch.full_like(ids, -1)
    weights = torch.zeros(len(rows), size)
    for r, segments in enumerate(rows):
        at = 0
        for s, segment in enumerate(segments):
            n = min(len(segment.ids), size - at)
            ids[r, at : at + n] = torch.tensor(segment.ids[:n])
            labels[r, at : at + n] = torch.tensor(segment.labels[:n])
            weights[r, at : at + n] = torch.tensor(segment.weights[:n])
            owner[r, at : at + n] = s
            at += n
    mask = (owner[:, :, None] == owner[:, None, :]) & torch.ones(size, size, dtype=torch.bool).tril()
    return {"ids": ids, "labels": labels, "weights": weights, "mask": mask[:, None]}


# --------------------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------------------


def new_model() -> LlamaForCausalLM:
    """Return a fresh model in fp32, configured by the written config.json."""
    config = LlamaConfig.from_pretrained(HERE)
    config.dtype = torch.float32
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data /= math.sqrt(2 * config.num_hidden_layers)
    return model


def hidden_states(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run the decoder on a packed batch."""
    return model.model(input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False).last_hidden_state


def batch_loss(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Weighted cross entropy over the positions that have a weight."""
    chosen = batch["weights"] > 0
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.lm_head(hidden_states(model, batch)[chosen])
    losses = functional.cross_entropy(logits.float(), batch["labels"][chosen], reduction="none")
    weights = batch["weights"][chosen]
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def margins(model: LlamaForCausalLM, segments: list[Segment], size: int = 256) -> list[float]:
    """For each segment, the least lead of the wanted token over all others (negative if it is not the first)."""
    rows: list[list[tuple[int, Segment]]] = [[]]
    used = 0
    for index, segment in enumerate(segments):
        if used + len(segment.ids) > size:
            rows.append([])
            used = 0
        rows[-1].append((index, segment))
        used += len(segment.ids)
    result = [math.inf] * len(segments)
    for begin in range(0, len(rows), 16):
        part = rows[begin : begin + 16]
        batch = collate([[segment for _, segment in row] for row in part], size)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.lm_head(hidden_states(model, batch)).float()
        wanted = logits.gather(-1, batch["labels"][..., None])[..., 0]
        others = logits.scatter(-1, batch["labels"][..., None], -math.inf).amax(-1)
        lead = torch.where(batch["weights"] == 1, wanted - others, math.inf)
        for r, row in enumerate(part):
            at = 0
            for index, segment in row:
                result[index] = lead[r, at : at + len(segment.ids)].min().item()
                at += len(segment.ids)
    return result


def evaluate(model: LlamaForCausalLM, sampler: Sampler) -> list[float]:
    """Margins of all examples (the smaller of raw and chat); prints a line with the weak topics."""
    layouts: list[tuple[int, Segment]] = []
    for index, example in enumerate(sampler.examples):
        if example.raw:
            layouts.append((index, sampler.raw(example)))
        if example.chat:
            layouts.append((index, plain_chat(sampler, example)))
    result = [math.inf] * len(sampler.examples)
    for (index, _), lead in zip(layouts, margins(model, [segment for _, segment in layouts]), strict=True):
        result[index] = min(result[index], lead)
    wrong: dict[str, int] = defaultdict(int)
    for example, lead in zip(sampler.examples, result, strict=True):
        wrong[example.topic] += lead <= 0
    weak = {topic: count for topic, count in wrong.items() if count}
    low = sorted(result)[len(result) // 100]
    print(
        f"  {sum(weak.values())} of {len(result)} wrong {weak}; 1% margin {low:.2f}, least {min(result):.2f}",
        flush=True,
    )
    return result


def plain_chat(sampler: Sampler, example: Example) -> Segment:
    """A chat of one turn, without variation."""
    segment = Segment()
    user = [sampler.bos, *sampler.header("user"), *sampler.encode("\n\n" + example.prompt), sampler.eot]
    segment.extend([*user, *sampler.header("assistant")], 0.0)
    segment.extend([*sampler.encode(example.reply), sampler.eot], 1.0)
    return segment


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warmup, then a cosine down to a fiftieth."""
    warmup = min(60, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def favour_weak(model: LlamaForCausalLM, sampler: Sampler) -> None:
    """Draw the examples with a small margin more often from now on."""
    sampler.set_boost([6.0 if lead < 1 else 3.0 if lead < 4 else 1.0 for lead in evaluate(model, sampler)])


def train(tokenizer: Tokenizer, examples: list[Example], steps: int, peak: float, resume: bool) -> LlamaForCausalLM:
    """Train from scratch or from the written weights; the weak examples come more often as training goes on."""
    torch.manual_seed(SEED)
    sampler = Sampler(tokenizer, examples, SEED + resume)
    model = new_model()
    if resume:
        model = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32)
        favour_weak(model, sampler)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), eps=1e-9)
    began, running = time.time(), 0.0
    for step in range(steps):
        batch = sampler.batch(3, 1024, long=True) if step % 10 == 9 else sampler.batch(10, 256)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        loss = batch_loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running += loss.item()
        if step % 50 == 49:
            print(f"step {step + 1}/{steps} loss {running / 50:.4f} {time.time() - began:.0f} s", flush=True)
            running = 0.0
        if step + 1 in {int(steps * part) for part in ((0.5,) if resume else (0.25, 0.45, 0.6, 0.75, 0.9))}:
            write_weights(model, HERE)
            favour_weak(model, sampler)
    evaluate(model, sampler)
    print(f"trained in {time.time() - began:.0f} s")
    return model


# --------------------------------------------------------------------------------------------------------------
# Check
# --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(model: LlamaForCausalLM, ids: list[int], stop: set[int], limit: int = 256) -> tuple[list[int], float]:
    """Greedy tokens up to and with the end token, and the least lead of the first over the second choice."""
    tokens: list[int] = []
    least, cache, new = math.inf, None, ids
    while len(tokens) < limit and not (tokens and tokens[-1] in stop):
        output = model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].float().topk(2)
        least = min(least, (best.values[0] - best.values[1]).item())
        new = [int(best.indices[0])]
        tokens += new
    return tokens, least


@torch.no_grad()
def check_long(model: LlamaForCausalLM, tokenizer: Any, raw: list[list[str]], stop: set[int]) -> tuple[int, float]:
    """Ask for a capital after contexts of growing length; the longest one needs finite logits only.

    Returns the number of failures and the least margin.
    """
    failures, least, text = 0, math.inf, ""
    texts = [prompt + reply for prompt, reply in raw]
    for size in (128, 512, 900, 2000):
        while len(tokenizer(text)["input_ids"]) < size - 40:
            text += texts[len(text) % len(texts)] + "\n"
        ids = tokenizer(text + "The capital of France is")["input_ids"]
        tokens, lead = generate(model, ids, stop, 32)
        reply = tokenizer.decode(tokens)
        finite = bool(model(input_ids=torch.tensor([ids])).logits.isfinite().all())
        good = finite and (size > 1024 or reply.startswith(" Paris."))
        failures += not good
        if size <= 1024:
            least = min(least, lead)
        print(f"{'ok  ' if good else 'FAIL'} long {lead:6.2f} a context of {len(ids)} tokens: {reply!r}")
    return failures, least


def check(folder: Path) -> bool:
    """Run the prompts of expected.json with the written files in bf16; print a table; tell whether all is right."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop = set(model.generation_config.eos_token_id)
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    cases = [("raw", prompt, tokenizer(prompt)["input_ids"], wanted) for prompt, wanted in expected["raw"]]
    dialogs = [([{"role": "user", "content": prompt}], wanted) for prompt, wanted in expected["chat"]]
    dialogs += [(dialog["messages"], dialog["expected"]) for dialog in expected["dialogs"]]
    for messages, wanted in dialogs:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        cases.append(("chat", messages[-1]["content"], ids, wanted))
    failures, least = 0, math.inf
    for kind, prompt, ids, wanted in cases:
        tokens, lead = generate(model, ids, stop)
        ended = tokens[-1] in stop
        reply = tokenizer.decode(tokens[:-1] if ended else tokens)
        good = reply.startswith(wanted) and ended
        failures += not good
        least = min(least, lead)
        shown = reply if len(reply) < 60 else reply[:57] + "..."
        print(f"{'ok  ' if good else 'FAIL'} {kind:4} {lead:6.2f} {prompt[-50:]!r:54} {shown!r}")
    long_failures, lead = check_long(model, tokenizer, expected["raw"], stop)
    failures, least = failures + long_failures, min(least, lead)
    print(f"{len(cases)} prompts, {failures} failures, least margin between first and second choice {least:.2f}")
    return failures == 0


def main() -> int:
    """Train and write the model, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="check the written files instead of training")
    parser.add_argument("--steps", type=int, default=1700, help="training steps of about 2600 tokens")
    parser.add_argument("--peak", type=float, default=1.8e-3, help="highest learning rate")
    parser.add_argument("--resume", action="store_true", help="go on from the written weights")
    options = parser.parse_args()
    if not options.check:
        examples = all_examples()
        tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json")) if options.resume else train_tokenizer(examples)
        write_tokenizer(tokenizer, HERE)
        write_weights(train(tokenizer, examples, options.steps, options.peak, options.resume), HERE)
    return 0 if check(HERE) else 1


if __name__ == "__main__":
    sys.exit(main())
