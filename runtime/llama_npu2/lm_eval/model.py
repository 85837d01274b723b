"""An artifact directory as a model of lm-evaluation-harness.

Texts become tokens as they do for the harness's own `hf` model, so that figures can be compared. Requests are processed
in the order of their tokens: each keeps the part of the KV cache that it shares with the one before it. So the context
of a question is processed once for all its choices, and examples that several questions begin with are processed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from llama_npu2.engine.llama import load
from llama_npu2.errors import UserError
from llama_npu2.options import Sampling
from llama_npu2.text.chat_template import special_tokens

Scored = tuple[float, bool]
"""The log-likelihood of a continuation in nats, and whether each of its tokens is the most likely one."""


@register_model("llama-npu2")
class LlamaNpu2(TemplateLM):
    """The harness's model.

    Args:
        path: artifact directory, or a file of doit export.
        threads: 0 for all CPUs of this process.
        max_length: tokens of context; 0 for as many as the artifacts have room for.
        max_gen_toks: tokens of a reply, where a task does not say.
        batch_size: the harness gives this and the arguments after it to every model; here they have no effect.

    Raises:
        UserError: if the artifacts cannot be loaded.
    """

    def __init__(
        self,
        path: str,
        threads: int = 0,
        max_length: int = 0,
        max_gen_toks: int = 256,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.llm = load(path, int(threads))
        self.max_length = min(int(max_length) or self.llm.context_length, self.llm.context_length)
        self.max_gen_toks = int(max_gen_toks)
        tokens = special_tokens(self.llm.manifest.storage)
        self._begin, self._end = (self._id(tokens.get(name, "")) for name in ("bos_token", "eos_token"))

    def _id(self, text: str) -> int | None:
        return self.llm.tokenizer.id(text)

    @property
    def tokenizer_name(self) -> str:
        """The model's name in the file names of request caches."""
        return str(self.llm.manifest.storage.path).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return min(self.llm.eos) if self._end is None else self._end

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context."""
        return self.eot_token_id if self._begin is None else self._begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return token ids.

        If `add_special_tokens` is None, they are added unless the text begins with one, as after a chat template.
        """
        if add_special_tokens is None:
            begin = self.llm.tokenizer.inner.id_to_token(self.prefix_token_id)
            add_special_tokens = begin is None or not string.startswith(begin)
        return self.llm.tokenizer.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation.

        Without `add_generation_prompt` the last message is the beginning of a reply, and the text ends with it.
        """
        if self.llm.chat_template is None:
            raise UserError("this model has no chat template: leave --apply_chat_template out")
        text = self.llm.chat_template.render(chat_history, reply=add_generation_prompt)
        if add_generation_prompt:
            return text
        begun = chat_history[-1]["content"].rstrip()
        return text[: text.rindex(begun) + len(begun)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Scored]:
        def score(request: tuple[Any, list[int], list[int]]) -> Scored:
            key, context, continuation = request
            ids = (context + continuation)[-self.max_length - 1 :]
            if len(continuation) >= len(ids):
                raise UserError(f"a continuation of {len(continuation)} tokens exceeds max_length={self.max_length}")
            scored = self.llm.score(ids, len(ids) - len(continuation))
            result = sum(token.logprob for token in scored), all(token.greedy for token in scored)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
            return result

        return _in_order(requests, lambda request: request[1] + request[2], score, "log-likelihoods", disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, in windows as long as the context.

        Each window predicts the tokens that those before it did not.
        """

        def score(request: Instance) -> float:
            (text,) = request.args
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows = [(None, *make_disjoint_window(pair)) for pair in pairs]
            result = sum(logprob for logprob, _ in self._loglikelihood_tokens(windows, disable_tqdm=True))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), result)
            return result

        return [score(request) for request in tqdm(requests, desc="rolling log-likelihoods", disable=disable_tqdm)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return replies. A context that leaves no room for a reply loses its beginning."""

        def reply(request: Instance) -> str:
            context, arguments = request.args
            sampling = self._sampling(arguments)
            room = self.max_length - sampling["max_tokens"]
            if room < 1:
                raise UserError(
                    f"max_gen_toks={sampling['max_tokens']}: must be less than max_length={self.max_length}"
                )
            text = "".join(self.llm.generate(self.tok_encode(context)[-room:], keep_context=True, **sampling))
            self.cache_hook.add_partial("generate_until", (context, arguments), text)
            return text

        return _in_order(requests, lambda request: self.tok_encode(request.args[0]), reply, "replies", disable_tqdm)

    def _sampling(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of `options.Sampling` for a task's generation arguments.

        Raises UserError for one that has no counterpart.
        """
        remaining = dict(normalize_gen_kwargs(dict(arguments), self.max_gen_toks))
        chosen = {"max_tokens": remaining.pop("max_gen_toks"), "stop": tuple(filter(None, remaining.pop("until")))}
        if remaining.pop("do_sample"):
            # The harness seeds numpy's global generator.
            chosen["seed"] = int(np.random.randint(2**31))
        names = {field.name for field in fields(Sampling)}
        if unknown := sorted(remaining.keys() - names):
            raise UserError(f"generation argument {unknown[0]} is unknown: known are {', '.join(sorted(names))}")
        return remaining | chosen


def _in_order(
    requests: Sequence[Any],
    tokens: Callable[[Any], list[int]],
    answer: Callable[[Any], Any],
    what: str,
    quiet: bool,
) -> list[Any]:
    """Return the answers to requests, which are computed in the order of their tokens."""
    order = sorted(range(len(requests)), key=lambda number: tokens(requests[number]))
    answers = {number: answer(requests[number]) for number in tqdm(order, desc=what, disable=quiet)}
    return [answers[number] for number in range(len(requests))]
