"""A loaded model: text and chat messages to tokens, and the loop that generates a reply token by token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.engine.completion import Completion, Logprob, Stats
from llama_npu2.engine.engine import Engine
from llama_npu2.engine.sampling import sampler
from llama_npu2.errors import UserError
from llama_npu2.options import Sampling
from llama_npu2.text.chat_template import ChatTemplate
from llama_npu2.text.tokenizer import TextStream, Tokenizer

Prompt = str | Sequence[dict[str, str]] | Sequence[int]
"""Text, messages with `role` and `content`, or token ids."""


def load(artifact_dir: str | Path, threads: int = 0, second_copy: bool = False) -> Llama:
    """Open an artifact directory, or a file of `doit export`.

    Args:
        artifact_dir: where it is.
        threads: 0 for all CPUs of this process.
        second_copy: whether to keep a copy of the weights in the format in which an NPU multiplies prompts with them,
            instead of unpacking them for every prompt.

    Raises:
        UserError: if it cannot be used.
    """
    return Llama(Manifest.open(artifact_dir), threads, second_copy)


class Llama(Engine):
    """An engine with its tokenizer and chat template, which generates text. Not thread-safe."""

    def __init__(self, manifest: Manifest, threads: int = 0, second_copy: bool = False) -> None:
        super().__init__(manifest, threads, second_copy)
        self.eos = frozenset(manifest.model["eos"])
        self.stats = Stats()

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

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: messages always go through the chat template; token ids are returned as they are.
            raw: whether a string is tokenised as it is. Else it goes through the chat template, if there is one.

        Raises:
            UserError: if the prompt is empty, or the template or the tokenizer refuses it.
        """
        if not len(prompt):
            raise UserError("the prompt is empty: give some text")
        if isinstance(prompt[0], Integral):
            return [int(token) for token in cast(Sequence[int], prompt)]
        if isinstance(prompt, str) and (raw or self.chat_template is None):
            return self._tokenised(prompt, special_tokens=True)
        if self.chat_template is None:
            raise UserError("this model has no chat template: give a plain text prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        _ = self.tokenizer  # it is read while the template's process starts
        text = self._timed("host", "template", self.chat_template.render, messages)
        return self._tokenised(text, special_tokens=False)

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
        **sampling: Any,
    ) -> Iterator[str]:
        """Yield the reply in pieces of whole UTF-8 characters; `stats` is complete once the iterator is.

        Args:
            prompt: as for `encode`.
            raw: as for `encode`.
            keep_context: whether to keep the part of the KV cache that the new prompt begins with (chat) instead of
                starting afresh.
            number: which of the replies to a seed, as `complete` numbers them.
            **sampling: fields of `options.Sampling`. By default replies are greedy and end after 256 tokens.

        Raises:
            UserError: for a prompt or an option that cannot be used.
        """
        options = Sampling.given(sampling)
        options.check_one_text()
        self._check_prompt(prompt)
        return self._pieces(prompt, raw, keep_context, options, number)

    def _pieces(self, prompt: Prompt, raw: bool, keep_context: bool, options: Sampling, number: int) -> Iterator[str]:
        yield from self._reply(self._process(prompt, raw, keep_context), options, Completion(), number)

    def chat(self, messages: Sequence[dict[str, str]], **sampling: Any) -> Iterator[str]:
        """Yield the answer to the last of a conversation's messages, as `generate` does.

        What an earlier call processed of the same conversation is not processed again.

        Args:
            messages: `{"role", "content"}` each: `system` or none, then `user` and `assistant` in turn.
            **sampling: fields of `options.Sampling`.
        """
        return self.generate(list(messages), keep_context=True, **sampling)

    def _check_prompt(self, prompt: Prompt) -> None:
        """Check that a prompt is what `encode` takes. Raises TypeError, UserError."""
        if isinstance(prompt, str) or all(isinstance(token, Integral) for token in prompt):
            return
        if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt):
            raise TypeError("a prompt is a text, a list of token ids, or a list of messages with role and content")
        if self.chat_template is None:
            raise UserError("this model has no chat template: give a plain text prompt")

    def complete(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        keep_context: bool = False,
        **sampling: Any,
    ) -> Iterator[Completion]:
        """Yield `n` replies, each when it is whole. The prompt is processed once.

        A reply to a seed depends on its number alone, not on `n`. With `prompt_logprobs` all of the prompt is
        processed, at the cost of `score`. Arguments and errors are those of `generate`.
        """
        options = Sampling.given(sampling)
        self._check_prompt(prompt)
        processed = self._process(prompt, raw, keep_context, options.prompt_logprobs)
        for number in range(options.n):
            completion = Completion(prompt_logprobs=processed.logprobs)
            completion.text = "".join(self._reply(processed, options, completion, number))
            yield completion
            processed = replace(processed, started=time.perf_counter(), reused=len(processed.ids))

    def _process(self, prompt: Prompt, raw: bool, keep_context: bool, logprobs: int | None = None) -> _Prompt:
        """Process a prompt.

        Args:
            logprobs: if not None, also compute how likely each token of the prompt is, with that many alternatives.
        """
        started, self.stats = time.perf_counter(), Stats()
        ids = self.encode(prompt, raw)
        if len(ids) >= self.context_length:
            raise UserError(f"the prompt has {len(ids)} tokens, the context is {self.context_length}: {self.shorter}")
        if not keep_context or logprobs is not None:
            self.reset()
        reused = self._keep(ids)
        if logprobs is None:
            return _Prompt(ids, self._logits_after(ids), started, reused)
        rows = self._logits_from(ids, 0)
        prompt_logprobs = [Logprob.of(token, next(rows), logprobs) for token in ids[1:]]
        return _Prompt(ids, next(rows).copy(), started, reused, prompt_logprobs)

    def _reply(self, prompt: _Prompt, options: Sampling, completion: Completion, number: int) -> Iterator[str]:
        """Yield the pieces of a reply, and fill in `completion` but for its text."""
        stream, choose = TextStream(self.tokenizer, options.stop), sampler(options, prompt.ids, number)
        logits, ids, first = prompt.logits, list(prompt.ids), 0.0
        completion.logprobs = None if options.logprobs is None else []
        self.stats = stats = completion.stats
        stats.prompt_tokens, stats.reused_tokens = len(ids) - prompt.reused, prompt.reused
        while not stats.finish_reason:
            if completion.tokens:
                ids.append(completion.tokens[-1])
                logits = self._logits_after(ids)
            token = self._timed("host", "sample", choose, logits)
            now = time.perf_counter()
            first = first or now
            stats.ttft, stats.decode_time = first - prompt.started, now - first
            completion.tokens.append(token)
            stats.generated_tokens += 1
            if completion.logprobs is not None:
                completion.logprobs.append(Logprob.of(token, logits, options.logprobs or 0))
            piece = "" if token in self.eos else self._timed("host", "detokenise", stream.push, token)
            if token in self.eos or stream.stopped:
                stats.finish_reason = "stop"
            elif stats.generated_tokens >= options.max_tokens or len(ids) >= self.context_length:
                stats.finish_reason = "length"
            if piece := piece + (stream.flush() if stats.finish_reason else ""):
                yield piece

    def close(self) -> None:
        """Release the device, and end the chat template's process."""
        if template := self.__dict__.get("chat_template"):
            template.close()
        super().close()


@dataclass(frozen=True)
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
