"""Replies with what is asked of them: penalties and filters, log-probabilities, several to a prompt, seeds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.engine.completion import Logprob
from llama_npu2.engine.sampling import Adjustment, distribution, log_softmax
from llama_npu2.options import Sampling
from stages.graph.options import parse_options
from tests.conftest import ROOT, doit

VOCAB = 500
HOT: dict[str, Any] = {"raw": True, "temperature": 2.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[Llama]:
    model = load(demo)
    yield model
    model.close()


def logits(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * 4).astype(np.float32)


def adjusted(options: Sampling, row: np.ndarray, prompt: Sequence[int], reply: Sequence[int]) -> np.ndarray:
    adjust = Adjustment(options, prompt)
    for token in reply:
        adjust.follow(token)
    return adjust(row)


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(8))
def test_filters_are_those_of_transformers(seed: int) -> None:
    """The same tokens are left, as likely, for random settings one upon the other."""
    torch = pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    from transformers.generation import logits_process as theirs

    rng, row = np.random.default_rng(seed), logits(seed)
    prompt, reply = rng.integers(0, VOCAB, 30).tolist(), rng.integers(0, VOCAB, 10).tolist()
    biases = {int(token): float(rng.normal()) for token in rng.integers(0, VOCAB, 5)}
    penalty, temperature = float(rng.uniform(0.5, 2)), float(rng.uniform(0.3, 3))
    top_k, top_p, min_p = int(rng.integers(5, VOCAB)), float(rng.uniform(0.5, 1)), float(rng.uniform(0, 0.1))
    adjusting = theirs.LogitsProcessorList(
        [
            theirs.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()]),
            theirs.RepetitionPenaltyLogitsProcessor(penalty),
        ]
    )
    filtering = theirs.LogitsProcessorList(
        [
            theirs.TemperatureLogitsWarper(temperature),
            theirs.TopKLogitsWarper(top_k),
            theirs.TopPLogitsWarper(top_p),
            theirs.MinPLogitsWarper(min_p),
        ]
    )
    there = torch.tensor([prompt + reply])
    before = adjusting(there, torch.tensor(row)[None])
    wanted = torch.softmax(filtering(there, before.clone())[0].double(), -1).numpy()
    options = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
        logit_bias=biases,  # type: ignore[arg-type]
    )
    found = adjusted(options, row, prompt, reply)
    np.testing.assert_array_equal(found, before[0].numpy())
    ids, probabilities = distribution(found, options)
    assert sorted(ids) == np.flatnonzero(wanted).tolist()
    # torch divides by the temperature in float32.
    np.testing.assert_allclose(probabilities, wanted[ids], rtol=1e-5)


@pytest.mark.parametrize(("top_k", "left"), [(0, VOCAB), (1, 1), (2, 2), (VOCAB - 1, VOCAB - 1), (VOCAB, VOCAB)])
def test_top_k_keeps_the_most_likely(top_k: int, left: int) -> None:
    row = logits(1)
    ids, probabilities = distribution(row, Sampling(temperature=1.0, top_k=top_k))
    assert sorted(ids) == sorted(np.argsort(-row)[:left]) and abs(probabilities.sum() - 1) < 1e-12


def test_penalties_of_the_reply_follow_their_formula() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, of the reply alone; bias and repetition come before."""
    row, prompt, reply = logits(0), [1, 2, 2, 3], [5, 5, 5, 2]
    counts = np.bincount(reply, minlength=VOCAB)
    options = Sampling(presence_penalty=0.5, frequency_penalty=-0.25)
    wanted = row - np.float32(-0.25) * counts - np.float32(0.5) * (counts > 0)
    np.testing.assert_array_equal(adjusted(options, row, prompt, reply), wanted.astype(np.float32))
    options = Sampling(presence_penalty=0.5, repetition_penalty=2.0, logit_bias="3:-100,7:1.5")  # type: ignore[arg-type]
    wanted = row.copy()
    wanted[[3, 7]] += np.array([-100, 1.5], np.float32)
    there = [1, 2, 3, 5]
    wanted[there] = np.where(wanted[there] < 0, wanted[there] * 2, wanted[there] / 2)
    wanted[[2, 5]] -= 0.5
    np.testing.assert_array_equal(adjusted(options, row, prompt, reply), wanted)


def test_min_p_is_a_part_of_the_most_likely() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    ids, kept = distribution(np.log(probabilities).astype(np.float32), Sampling(temperature=1, min_p=0.25))
    assert ids.tolist() == [0, 1, 2]
    np.testing.assert_allclose(kept, probabilities[:3] / 0.9, rtol=1e-6)


def test_penalties_change_what_is_said(llm: Llama) -> None:
    (plain,) = llm.complete("one, one, one,", raw=True, max_tokens=20)
    (other,) = llm.complete("one, one, one,", raw=True, max_tokens=20, presence_penalty=2, frequency_penalty=2)
    assert len(set(other.tokens)) > len(set(plain.tokens))
    (without,) = llm.complete("one, one, one,", raw=True, max_tokens=20, logit_bias={plain.tokens[0]: -100})
    assert plain.tokens[0] not in without.tokens
    with pytest.raises(UserError, match="logit_bias: token 999999 is outside the vocabulary of 2048"):
        list(llm.complete("one", raw=True, logit_bias="999999:1"))


def test_scores_are_by_the_logits_of_decode(llm: Llama) -> None:
    """Bit for bit, over several chunks of a prompt, with some of the cache kept and without."""
    ids = np.random.default_rng(0).integers(0, 2048, 601).tolist()
    llm.reset()
    wanted = [Logprob.of(token, llm.decode(before), 2) for before, token in pairwise(ids)]
    llm.reset()
    assert llm.score(ids, top=2) == wanted
    for first in (600, 512, 513, 1):
        assert llm.score(ids, first, top=2) == wanted[first - 1 :]
    llm.reset()
    assert wanted[299].logprob == log_softmax(llm.prefill(ids[:300]))[ids[300]]
    for bad, message in (([1], "first=1: must be"), ([1, 10**6], "outside the vocabulary"), ([1] * 2050, "exceed the")):
        with pytest.raises(UserError, match=message):
            llm.score(bad)


def test_log_probabilities_of_prompt_and_reply(llm: Llama) -> None:
    """Whatever temperature and penalties: those of the model, as `score` has them."""
    asked: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 1, "seed": 5, "repetition_penalty": 1.3}
    (made,) = llm.complete("Once upon a time there", **HOT, **asked)
    ids = llm.encode("Once upon a time there", raw=True)
    assert made.logprobs == llm.score(ids + made.tokens, len(ids), top=3)
    assert made.prompt_logprobs == llm.score(ids, top=1)
    assert made.logprobs and made.prompt_logprobs
    for each in made.logprobs:
        assert [p for _, p in each.top] == sorted((p for _, p in each.top), reverse=True)
        assert each.greedy == (each.token == each.top[0][0])
    assert {each.greedy for each in made.logprobs} == {True, False}, "it was sampled"


def test_replies_depend_on_seed_and_number_alone(llm: Llama) -> None:
    """Not on how many there are, on what else is sampled meanwhile, here or anywhere, or on who uses the cache."""
    three = [made.text for made in llm.complete("Once", seed=1, n=3, **HOT)]
    assert len(set(three)) == 3
    assert [made.text for made in llm.complete("Once", seed=1, n=2, **HOT)] == three[:2]
    np.random.seed(0)
    assert ["".join(llm.generate("Once", seed=1, number=i, **HOT)) for i in range(3)] == three
    one, other = (llm.generate("Once", seed=1, number=i, **HOT) for i in (0, 2))
    turns = [(next(one, ""), next(other, "")) for _ in range(HOT["max_tokens"])]
    assert ["".join(pieces) for pieces in zip(*turns, strict=True)] == [three[0], three[2]]
    assert three[0] != "".join(llm.generate("Once", seed=1 << 32, **HOT))


def test_the_prompt_is_processed_once(llm: Llama) -> None:
    endless = dict.fromkeys(llm.eos, -100.0)
    first, second = llm.complete("Once upon a time", n=2, logit_bias=endless, **HOT)
    count = len(llm.encode("Once upon a time", raw=True))
    assert (first.stats.prompt_tokens, first.stats.reused_tokens) == (count, 0)
    assert (second.stats.prompt_tokens, second.stats.reused_tokens) == (0, count)
    assert first.stats.generated_tokens == len(first.tokens) == 24
    assert first.finish_reason == "length"


def test_json_lines_have_a_reply_each(demo: Path) -> None:
    command = [sys.executable, "-m", "runtime", str(demo), "Once upon", "--raw", "--json", "--n=2", "--logprobs=1"]
    command += ["--prompt-logprobs=0", "--temperature=1", "--seed=4", "--max-tokens=5", "--stop=zzz", "--stop=yyy"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    made = [json.loads(line) for line in run.stdout.splitlines()]
    llm = load(demo)
    wanted = list(llm.complete("Once upon", **(HOT | {"temperature": 1, "max_tokens": 5}), seed=4, n=2, logprobs=1))
    tokenizer = llm.tokenizer.inner
    for found, reply in zip(made, wanted, strict=True):
        assert found["text"] == reply.text and found["tokens"] == reply.tokens
        assert found["finish_reason"] == "length" and found["tpot"] > 0
        assert [entry["token"] for entry in found["logprobs"]] == reply.tokens
        for entry, known in zip(found["logprobs"], reply.logprobs or [], strict=True):
            assert entry["piece"] == tokenizer.id_to_token(known.token)
            assert (entry["logprob"], entry["top"][0]["logprob"]) == (known.logprob, known.top[0][1])
        assert len(found["prompt_logprobs"]) == len(llm.encode("Once upon", raw=True)) - 1
    llm.close()


def test_variables_reach_the_reply(demo: Path) -> None:
    """Several stop strings and biases in one variable of doit; more than one reply, one after the other."""
    given = ["prompt=1, 2, 3, 4,", "raw=1", 'stop=[", 9", ", 7"]', "logit_bias=0:-100", "n=2"]
    run = doit("run", f"artifacts={demo.parents[1]}", *given)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "--- 1 of 2 ---\n 5, 6\n--- 2 of 2 ---\n 5, 6\n"
    run = doit("run", f"artifacts={demo.parents[1]}", "json=1", *given)
    assert [json.loads(line)["text"] for line in run.stdout.splitlines()] == [" 5, 6"] * 2


def test_stop_strings_of_a_variable() -> None:
    for text, stop in (("a, b", ("a, b",)), ('["a", "\\n"]', ("a", "\n")), ("[a]", ("[a]",)), ('["a"', None)):
        if stop is None:
            with pytest.raises(UserError, match=r"must be text, or several as in \[\"one\",\"two\"\]"):
                parse_options({"stop": text})
        else:
            assert parse_options({"stop": text}).stop == stop


def test_a_stream_is_one_text(llm: Llama) -> None:
    for given in ({"n": 2}, {"logprobs": 0}, {"prompt_logprobs": 1}):
        with pytest.raises(UserError, match="not for one text as it comes: use complete"):
            next(llm.generate("Once", **given))


def test_options_of_a_reply_are_plain_values() -> None:
    options = Sampling(logit_bias={3: 1.5, 4: -100})  # type: ignore[arg-type]
    assert Sampling(**asdict(options)) == options
    assert options.biases() == {3: 1.5, 4: -100}
