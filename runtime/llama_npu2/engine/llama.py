"""A loaded model: text and chat messages to tokens, and the loop that generates a reply token by token."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import BLOCK_POSITIONS
from llama_npu2.engine import retrieval
from llama_npu2.engine.batch.chances import Chances
from llama_npu2.engine.batch.drafts import Drafts, Wanted
from llama_npu2.engine.batch.pace import Pace
from llama_npu2.engine.completion import Completion, Logprob, Reply, Stats
from llama_npu2.engine.contexts import read_context, write_context
from llama_npu2.engine.drafting import Drafting, check_drafts, kv_memory_beside
from llama_npu2.engine.engine import Engine, common_prefix
from llama_npu2.engine.generation import Asked, Generation
from llama_npu2.engine.step import Run
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.options import Sampling
from llama_npu2.text.chat_template import REASONING, ChatTemplate, texts_of
from llama_npu2.text.pooling import check_pooling
from llama_npu2.text.rendering import split_at_marks, without_marks
from llama_npu2.text.replies import Piece
from llama_npu2.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llama_npu2.engine.serving import Serving
    from llama_npu2.text.grammars import Constraint, Grammars

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""Text, messages, or token ids. A message has `role` and `content` (a text, or parts of text), or `tool_calls`."""


def load(
    artifact_dir: str | Path,
    threads: int = 0,
    second_copy: bool = False,
    kv_memory: int = 0,
    draft: str | Path = "",
) -> Llama:
    """Open an artifact directory, or a file of `doit export`.

    Args:
        artifact_dir: where it is.
        threads: 0 for all CPUs of this process.
        second_copy: whether to keep a copy of the weights in the format in which an NPU multiplies prompts with them,
            instead of unpacking them for every prompt.
        kv_memory: the most bytes that K and V of all sequences may take, on the NPU with those of its own cache; 0: as
            many as one sequence takes that fills the context. Those of `draft` are among them.
        draft: artifacts of a small model with the same tokenizer, which drafts tokens for this one to check; on the
            CPU. Drafts change no token.

    Raises:
        UserError: if it cannot be used.
    """
    return Llama(Manifest.open(artifact_dir), threads, second_copy, kv_memory, draft)


class Llama(Engine):
    """An engine with its tokenizer and chat template, which generates text.

    It is for one thread at a time: another one that uses it meanwhile gets a UserError. `engine` makes many replies at
    a time.
    """

    speculate: bool
    """Whether `generate`, `chat` and `complete` draft tokens, where the device can check several at once."""

    def __init__(
        self,
        manifest: Manifest,
        threads: int = 0,
        second_copy: bool = False,
        kv_memory: int = 0,
        draft: str | Path = "",
    ) -> None:
        small = Manifest.open(draft) if draft else None
        if small:
            check_drafts(draft, small, manifest)
            kv_memory = kv_memory_beside(kv_memory, small, manifest)
        super().__init__(manifest, threads, second_copy, kv_memory)
        self.eos = frozenset(manifest.model["eos"])
        self.stats = Stats()
        self._serving: Serving | None = None
        try:
            self._drafting = Drafting(small, self) if small else None
        except BaseException:
            super().close()
            raise
        self.speculate, self._pace, self._chances = self.most_tokens > 1, Pace(), Chances()

    @property
    def description(self) -> str:
        """The formats of weights and KV cache, the device, and what drafts."""
        drafting = self._drafting
        by = f", drafts by {drafting.engine.manifest.model['name']}" if drafting else ""
        return f"{super().description}{by}"

    def __repr__(self) -> str:
        return f"<Llama {self.manifest.model['name']}: {self.description}, context of {self.context_length} tokens>"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return Tokenizer.open(self.manifest.storage)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template, whose process is then started; None for base models."""
        return ChatTemplate.open(self.manifest.storage)

    def encode(self, prompt: Prompt, raw: bool = False, template: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: messages always go through the chat template; token ids are returned as they are.
            raw: whether a string is tokenised as it is. Else it goes through the chat template, if there is one.
            template: what the chat template gets besides: `tools`, `documents` and variables that it reads. Control
                tokens that texts of it or of messages spell out are encoded as ordinary text.

        Raises:
            UserError: if the prompt is empty, or the template or the tokenizer refuses it.
        """
        if not len(prompt):
            raise UserError("the prompt is empty: give some text")
        if isinstance(prompt[0], Integral):
            return [int(token) for token in cast(Sequence[int], prompt)]
        if isinstance(prompt, str) and (raw or self.chat_template is None):
            if template:
                raise UserError("a prompt without a chat template takes no variables of one: leave them out")
            return self._tokenised(prompt, special_tokens=True)
        if self.chat_template is None:
            raise UserError("this model has no chat template: give a plain text prompt")
        alone = [{"role": "user", "content": prompt}]
        messages = alone if isinstance(prompt, str) else cast(list[Mapping[str, Any]], list(prompt))
        given = dict(template or {})
        spelt = without_marks("\0".join(texts_of([messages, given])))
        controls = {text: special for text, special in self.tokenizer.added.items() if text in spelt}
        text = self._timed("host", "template", partial(self.chat_template.render, messages, controls=controls, **given))
        if not controls:
            return self._tokenised(text, special_tokens=False)
        parts = split_at_marks(text, controls)
        ids: list[int] = self._timed("host", "tokenise", self.tokenizer.encode_parts, parts)
        return ids

    def _tokenised(self, text: str, special_tokens: bool) -> list[int]:
        ids: list[int] = self._timed("host", "tokenise", self.tokenizer.encode, text, special_tokens)
        return ids

    def generate(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        keep_context: bool = False,
        number: int = 0,
        template: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Reply:
        """Return the reply, which comes as it is iterated; `stats` is complete once it is whole.

        Args:
            prompt: as for `encode`.
            raw: as for `encode`.
            keep_context: whether to keep the part of the KV cache that the new prompt begins with (chat) instead of
                starting afresh.
            number: which of the replies to a seed, as `complete` numbers them.
            template: as for `encode`.
            **sampling: fields of `options.Sampling`. By default replies are greedy and end after 256 tokens.

        Raises:
            UserError: for a prompt or an option that cannot be used.
        """
        options = Sampling.given(sampling)
        options.check_one_text()
        self._check_prompt(prompt)
        completion = Completion()
        self._check_unserved()

        def pieces() -> Iterator[Piece]:
            processed = self._process(prompt, raw, keep_context, template)
            yield from self._reply(processed, options, completion, number)

        return Reply(pieces(), completion)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Reply:
        """Return the answer to the last of a conversation's messages, as `generate` does.

        What an earlier call processed of the same conversation is not processed again.

        Args:
            messages: `{"role", "content"}` each: `system` or none, then `user` and `assistant` in turn; the template
                may take `tool_calls`, `reasoning_content` and the role `tool` as well.
            tools: JSON schemas of functions that the model may call.
            documents: what the answer may rely on, mostly `title` and `text` each.
            **options: fields of `options.Sampling`; all others are variables of the chat template, such as
                `enable_thinking`.
        """
        known = {each.name for each in fields(Sampling)}
        sampling = {name: value for name, value in options.items() if name in known}
        template = {name: value for name, value in options.items() if name not in known}
        given = {"tools": tools, "documents": documents} | template
        template = {name: value for name, value in given.items() if value is not None or name in template}
        return self.generate(list(messages), keep_context=True, template=template, **sampling)

    def embed(self, texts: str | Sequence[str], dimensions: int = 0, instruction: str = "") -> np.ndarray:
        """Return embeddings of texts, f32 `[texts, dimensions]`, each of length 1 where the model says so.

        Args:
            texts: one text or several.
            dimensions: only so many of each, the first ones; 0: all.
            instruction: what queries are for, as in "retrieve passages that answer the query"; documents have none.

        Raises:
            UserError: if the model makes no embeddings of a last token, or a text is too long.
        """
        embedding = self.embedding(dimensions, instruction)
        texts = [texts] if isinstance(texts, str) else texts
        ids = [self._tokenised(embedding.text(text), special_tokens=True) for text in texts]
        with self._alone():
            rows = [embedding.of(self._hidden_after(text)) for text in ids]
        return np.stack(rows) if rows else np.empty((0, embedding.dimensions), np.float32)

    def embedding(self, dimensions: int = 0, instruction: str = "") -> retrieval.Embedding:
        """Return how texts are embedded, with arguments and errors as for `embed`."""
        normalised = check_pooling(self.manifest.storage)
        return retrieval.Embedding(self.manifest.model["emb"], normalised, dimensions, instruction)

    def rerank(self, query: str, documents: Sequence[str], instruction: str = "") -> list[retrieval.Ranked]:
        """Return documents with their relevance to a query, the most relevant ones first.

        The beginning that all prompts share is processed once.

        Args:
            query: what is looked for.
            documents: the texts to judge.
            instruction: what makes a document relevant; by default, that it answers a web search.

        Raises:
            UserError: if the model has no such prompt, or a document is too long.
        """
        relevance = retrieval.Relevance(self.tokenizer, query, instruction)
        prompts = [relevance.prompt(document) for document in documents]
        with self._alone():
            scores = [relevance.of(self._logits_after(prompt)) for prompt in prompts]
        return retrieval.ranked(scores, documents)

    def _check_prompt(self, prompt: Prompt) -> None:
        """Check that a prompt is what `encode` takes. Raises TypeError, UserError."""
        known = isinstance(prompt, Iterable)
        if isinstance(prompt, str) or (known and all(isinstance(token, Integral) for token in prompt)):
            return
        said = {"content", "tool_calls", *REASONING}
        if not known or not all(isinstance(each, Mapping) and "role" in each and said & each.keys() for each in prompt):
            raise TypeError("a prompt is a text, a list of token ids, or a list of messages with role and content")
        if self.chat_template is None:
            raise UserError("this model has no chat template: give a plain text prompt")

    def complete(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        keep_context: bool = False,
        template: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Iterator[Completion]:
        """Yield `n` replies, each when it is whole. The prompt is processed once.

        A reply to a seed depends on its number alone, not on `n`. With `prompt_logprobs` all of the prompt is
        processed, at the cost of `score`. Arguments and errors are those of `generate`.
        """
        options = Sampling.given(sampling)
        self._check_prompt(prompt)
        self._check_unserved()
        processed = self._process(prompt, raw, keep_context, template, options.prompt_logprobs)
        for number in range(options.n):
            completion = Completion(prompt_logprobs=processed.logprobs)
            yield Reply(self._reply(processed, options, completion, number), completion).whole()
            processed = replace(processed, started=time.perf_counter(), reused=len(processed.ids))

    def _process(
        self,
        prompt: Prompt,
        raw: bool,
        keep_context: bool,
        template: Mapping[str, Any] | None,
        logprobs: int | None = None,
    ) -> _Prompt:
        """Process a prompt.

        Args:
            logprobs: if not None, also compute how likely each token of the prompt is, with that many alternatives.
        """
        started, self.stats = time.perf_counter(), Stats()
        ids = self._encoded(prompt, raw, template)
        with self._alone():
            if not keep_context or logprobs is not None:
                self._rewind(0)
            reused = self._keep(ids)
            if logprobs is None:
                return _Prompt(ids, self._copied(self._logits_after(ids)), started, reused)
            rows = self._logits_from(ids, 0)
            prompt_logprobs = [Logprob.of(token, next(rows), logprobs) for token in ids[1:]]
            return _Prompt(ids, next(rows).copy(), started, reused, prompt_logprobs)

    def _encoded(self, prompt: Prompt, raw: bool, template: Mapping[str, Any] | None) -> list[int]:
        ids = self.encode(prompt, raw, template)
        if len(ids) >= self.context_length:
            raise UserError(f"the prompt has {len(ids)} tokens, the context is {self.context_length}: {self.shorter}")
        return ids

    def _generation(self, asked: Asked, completion: Completion) -> Generation:
        constraint = self.constraint(asked.options)
        return Generation(asked, completion, self.tokenizer, self.eos, self.context_length, self._timed, constraint)

    def constraint(self, options: Sampling) -> Constraint | None:
        """Return what a reply with these options has to follow. It is compiled once. Raises UserError."""
        if not options.schema and not options.grammar:
            return None
        return self._grammars.constraint(options.schema, options.grammar)

    @cached_property
    def _grammars(self) -> Grammars:
        from llama_npu2.text.grammars import Grammars

        return Grammars(self.tokenizer, self.eos, self.manifest.model["vocab"])

    def _reply(self, prompt: _Prompt, options: Sampling, completion: Completion, number: int) -> Iterator[Piece]:
        """Yield the pieces of a reply, and fill in `completion` but for its texts."""
        generation = self._generation(Asked(prompt.ids, options, number, prompt.started), completion)
        self.stats = stats = completion.stats
        stats.prompt_tokens, stats.reused_tokens = len(prompt.ids) - prompt.reused, prompt.reused
        yield from generation.take(prompt.logits)
        model = self._drafting.model if self._drafting else None
        drafts = Drafts(self._pace, model, self._chances) if self.speculate else None
        try:
            while not generation.finished:
                yield from self._go_on(generation, drafts)
        finally:
            if drafts:
                drafts.forget(generation)
        yield from generation.flush()

    def _go_on(self, generation: Generation, drafts: Drafts | None) -> Iterator[Piece]:
        """Yield the pieces of a reply's next token, and of those after it that were drafted."""
        ids = generation.ids
        with self._alone():
            drafted, logits = self._next(generation, drafts)
            pieces = generation.take(logits[0])  # as long as nobody else overwrites them
        accepted = 0
        for token, row in zip([*drafted, None], [*logits[1:], None], strict=True):
            yield from pieces
            if generation.finished or ids[-1] != token or row is None:
                break
            accepted += 1
            pieces = generation.take(row)
        if drafts and drafted:
            self.rewind(common_prefix(self._cached, ids[:-1]))
            drafts.note(generation, len(drafted), accepted)

    def _next(self, generation: Generation, drafts: Drafts | None) -> tuple[list[int], np.ndarray]:
        """Return the drafted next tokens of a reply, and the logits `[1 + drafts, vocab]` after it and each of them.

        Without drafts they are valid until the next token.
        """
        ids = generation.ids
        # What is traced or profiled are the phases, in which tokens come one by one.
        if not drafts or self._traced or self._timed.recorder or self._keep(ids) < len(ids) - 1:
            return [], self._logits_after(ids)[None]
        (drafted,) = drafts.draft([Wanted(generation, ids, self.context_length - len(ids))], self.most_tokens - 1)
        if not self.holds_many and not self._chunks.tokens_phase(len(ids) - 1, 1 + len(drafted)):
            drafted = []
        started = time.perf_counter()
        logits = self._drafts_checked(ids, drafted) if drafted else self._logits_after(ids)[None]
        self._pace.note(len(logits), len(logits), time.perf_counter() - started)
        return drafted, logits

    def _drafts_checked(self, ids: list[int], drafted: list[int]) -> np.ndarray:
        """Append the last of `ids` and the drafts to the context; return the logits after each, `[1 + drafts, vocab]`.

        Drafts that are not chosen are forgotten later, because whoever takes a piece of the reply may use the model,
        and its context, before the next row is looked at.
        """
        position, tokens = len(ids) - 1, [ids[-1], *drafted]
        if self.holds_many:
            table = range(-(-(position + len(tokens)) // BLOCK_POSITIONS))
            logits = self.steps.step([Run(tokens, position, table, len(tokens))])
        else:
            phase = self._chunks.tokens_phase(position, len(tokens))
            assert phase
            logits = self._run_tokens(phase, tokens, position)
        self._cached += tokens
        return logits.copy()

    def engine(self, *, speculate: bool = True) -> Serving:
        """Return an async engine, which generates many replies at once. Close it, or use it in a `with` block.

        Sequences share the steps and the KV cache: `kv_memory` says how many there is room for. On an NPU they take
        turns. Every reply has the tokens that it has alone. As long as the engine is open, only it can generate.

        Args:
            speculate: whether to draft tokens, by looking up what followed the last ones before, or by the model that
                `load(draft=)` names. Drafts change no token.

        Raises:
            UserError: if one is open already.
        """
        from llama_npu2.engine.batch.scheduler import Scheduler  # for engines alone: asyncio takes 50 ms
        from llama_npu2.engine.serving import Serving

        with self._alone():
            self._rewind(0)
            turns = None if self.holds_many else self.turns
            steps = turns or self.steps
            rows, context = steps.rows, self.context_length
            model = self._drafting.model if self._drafting else None
            work = Scheduler(steps, BLOCK_POSITIONS, rows, context, speculate, model=model, turns=turns)
            key = self._context_key if self.holds_many else None
            self._serving = Serving(work, self._asked, self._checked, key, self._unserved)
            return self._serving

    def save_context(self, path: str | Path) -> int:
        """Write the tokens in the KV cache, with it, to a file that its owner alone can read; return their number.

        Raises UserError if there are none, the file cannot be written, or as `engine`.
        """
        with self._alone():
            if not self._cached:
                raise UserError(f"{path}: the KV cache is empty: process a prompt first")
            blocks = range(-(-self.position // BLOCK_POSITIONS))
            write_context(Path(path), self._context_key, self._cached, map(self.steps.read_block, blocks))
            return self.position

    def load_context(self, path: str | Path) -> int:
        """Fill the KV cache with what `save_context` wrote; return the number of tokens.

        A prompt that begins with them goes on from there, with `keep_context`. Raises UserError if the file is damaged,
        of another model, instruction set or format of the cache, not its owner's alone, or as `engine`.
        """
        self._check_unserved()
        steps, size = self.steps, len(self.steps.read_block(0))
        ids, blocks = read_context(Path(path), self._context_key, size, BLOCK_POSITIONS, self.context_length)
        self._check_vocabulary(ids)
        with self._alone():
            self._rewind(0)
            for block, content in enumerate(blocks):
                steps.write_block(block, content)
            self._cached += ids
            return self.position

    @property
    def _context_key(self) -> dict[str, Any]:
        """What must be equal for a KV cache on disk to be what this model computes."""
        weights = hashlib.sha256(self.manifest.content).hexdigest()
        cache = self.manifest.model.get("kv", "bf16")
        return {"manifest": weights, "instruction set": self.device.instruction_set, "KV cache": cache}

    def _asked(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        number: int = 0,
        template: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Generation:
        """Return a reply that nothing was processed for."""
        started, options = time.perf_counter(), Sampling.given(sampling)
        replace(options, logprobs=None).check_one_text()
        self._check_prompt(prompt)
        ids = self._encoded(prompt, raw, template)
        self._check_vocabulary(ids)
        return self._generation(Asked(ids, options, number, started), Completion())

    def _check_unserved(self) -> None:
        """Raise UserError while an engine is open, which has the caches."""
        if self._serving:
            raise UserError("an engine is open on this model: submit to it, or close it first")

    def _unserved(self) -> None:
        self._serving = None

    def close(self) -> None:
        """Release the device, and end the chat template's process."""
        if self._serving:
            self._serving.close()
        if template := self.__dict__.get("chat_template"):
            template.close()
        if self._drafting:
            self._drafting.close()
        super().close()


@frozen
class _Prompt:
    """A processed prompt, after which replies go on."""

    ids: list[int]
    logits: np.ndarray
    """The logits after the last of `ids`."""
    started: float
    """When the reply was asked for, by `time.perf_counter`."""
    reused: int
    """How many of the tokens the KV cache held already."""
    logprobs: list[Logprob] | None = None
