"""Log-probabilities of prompts over HTTP are those of `Llama.score`, and what lm-evaluation-harness makes of them."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest

from llama_npu2 import Llama
from stages.model.sources import DEMO
from tests.support.serving import Server

TEXT = "The capital of France is"
PATH = "/v1/completions"


def scored(llm: Llama, ids: list[int], top: int = 0) -> tuple[list[float], list[list[float]]]:
    llm.reset()
    scores = llm.score(ids, 1, top)
    return [each.logprob for each in scores], [[logprob for _, logprob in each.top] for each in scores]


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": TEXT, "temperature": 0, "echo": True, "logprobs": 2, **more}


def test_a_prompt_alone_is_scored(client: openai.OpenAI, llm: Llama) -> None:
    ids = llm.encode(TEXT, raw=True)
    logprobs, top = scored(llm, ids, 2)
    made = client.completions.create(**asked(max_tokens=0))
    (choice,) = made.choices
    assert choice.text == TEXT and choice.finish_reason == "length" and choice.logprobs
    assert choice.logprobs.token_logprobs == [None, *logprobs]
    assert [each and [*each.values()] for each in choice.logprobs.top_logprobs or []] == [None, *top]
    assert choice.logprobs.tokens and choice.logprobs.tokens[0] == "<|begin_of_text|>"
    offsets = choice.logprobs.text_offset or []
    for token, offset in zip(choice.logprobs.tokens[1:], offsets[1:], strict=True):
        assert TEXT[offset:].startswith(token)
    assert made.usage and (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(ids), 0)


@pytest.mark.parametrize("n", [1, 2])
def test_a_reply_follows_the_scores(client: openai.OpenAI, server: Server, llm: Llama, n: int) -> None:
    for prompt in (TEXT, [llm.encode(text, raw=True) for text in (TEXT, "Once", "x")], [5]):
        lists = prompt if isinstance(prompt[0], list) else [llm.encode(prompt, raw=True)]
        whole = client.completions.create(**asked(prompt=prompt, max_tokens=3, n=n))
        assert whole.usage and len(whole.choices) == n * len(lists)
        for at, choice in enumerate(whole.choices):
            ids = lists[at // n]
            (alone,) = llm.complete(ids, max_tokens=3, logprobs=2)
            reply = [each.logprob for each in alone.logprobs or []]
            expected = [None, *(scored(llm, ids)[0] if len(ids) > 1 else []), *reply]
            assert choice.logprobs and choice.logprobs.token_logprobs == expected
            assert choice.text.endswith(alone.text) and choice.finish_reason == alone.finish_reason
        streamed: dict[int, tuple[str, list[float | None], list[int]]] = {}
        for chunk in client.completions.create(**asked(prompt=prompt, max_tokens=3, n=n), stream=True):
            for choice in chunk.choices:
                text, values, offsets = streamed.get(choice.index, ("", [], []))
                if choice.logprobs:
                    values = values + (choice.logprobs.token_logprobs or [])
                    offsets = offsets + (choice.logprobs.text_offset or [])
                streamed[choice.index] = text + choice.text, values, offsets
        for at, choice in enumerate(whole.choices):
            assert choice.logprobs
            assert streamed[at] == (choice.text, choice.logprobs.token_logprobs, choice.logprobs.text_offset)


def test_a_prompt_that_fills_the_context_is_scored(server: Server, llm: Llama) -> None:
    ids = [at % 2000 for at in range(llm.context_length)]
    found = server.ask(PATH, asked(prompt=ids, max_tokens=0, stream=True, stream_options={"include_usage": True}))
    assert found.status == 200 and f'"prompt_tokens":{len(ids)}' in found.content.decode()
    (choice,) = server.ask(PATH, asked(prompt=ids, max_tokens=0)).json["choices"]
    assert choice["logprobs"]["token_logprobs"][1:] == scored(llm, ids)[0]


def test_what_was_processed_before_is_said(server: Server) -> None:
    prompt = [7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29]
    before = server.ask(PATH, asked(prompt=prompt, max_tokens=1, logprobs=None)).json["usage"]
    now = server.ask(PATH, asked(prompt=prompt, max_tokens=1)).json["usage"]
    assert before["prompt_tokens_details"] == {"cached_tokens": 0}
    assert now["prompt_tokens_details"]["cached_tokens"] <= 1, "each of its tokens but the last is processed again"


ASKED_BY_THE_HARNESS = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


def test_requests_of_the_harness_give_its_scores(server: Server, llm: Llama) -> None:
    """What `local-completions` sends, and how it reads the answer: also where the reply ends at once."""
    questions = [f"The capital of {name} is" for name in ("France", "Peru", "Oz")]
    pairs = [(question, f" {city}.") for question in questions for city in ("Paris", "Lima", "Rome")]
    contexts = [llm.encode(question, raw=True) for question, _ in pairs]
    texts = [llm.encode(question + city, raw=True) for question, city in pairs]
    texts += [[*texts[0], 2039], [5, next(iter(llm.eos))]]  # the first is followed by an end token
    contexts += [contexts[0], [5]]
    found = server.ask(PATH, {"model": "demo", "prompt": texts, **ASKED_BY_THE_HARNESS}).json
    for ids, context, choice in zip(texts, contexts, found["choices"], strict=True):
        values, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert len(values) == len(ids) + 1
        llm.reset()
        wanted = llm.score(ids, len(context))
        assert values[len(context) : -1] == [each.logprob for each in wanted]
        greedy = [value == max(top[at].values()) for at, value in enumerate(values) if at >= len(context)][:-1]
        assert greedy == [each.greedy for each in wanted]


@pytest.mark.skipif(not find_spec("lm_eval"), reason="lm_eval is not installed: pip install -e '.[evaluate]'")
@pytest.mark.skipif(not find_spec("transformers"), reason="needs the verify extra: pip install -e '.[verify]'")
def test_the_harness_over_http_gives_the_scores_of_the_process(server: Server, demo: Path) -> None:
    pytest.importorskip("tenacity", reason="needs lm_eval's API models: pip install 'lm_eval[api]'")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from llama_npu2.lm_eval.model import LlamaNpu2

    pairs = [
        (f"The capital of {country} is", f" {city}")
        for country in ("France", "Peru")
        for city in ("Paris", "Lima", "Rome. The end")
    ]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    remote = LocalCompletionsAPI(
        base_url=f"{server.url}{PATH}",
        tokenizer_backend="huggingface",
        model="demo",
        tokenizer=str(DEMO),
        batch_size=4,
        add_bos_token=True,
        max_length=256,
    )
    here = LlamaNpu2(str(demo), max_length=256)
    with closing(here.llm):
        assert remote.loglikelihood(requests, disable_tqdm=True) == here.loglikelihood(requests, disable_tqdm=True)
