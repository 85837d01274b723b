"""lm-evaluation-harness on artifacts, beside its own model on the same checkpoint, with a task that lies here."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_npu2 import UserError
from llama_npu2.lm_eval import __main__ as command
from stages.model.sources import DEMO
from tests.conftest import ROOT

needs_lm_eval = pytest.mark.skipif(
    not find_spec("lm_eval"), reason="lm_eval is not installed: pip install -e '.[evaluate]'"
)

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}
CHOICES = """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: What is the capital of {{country}}? Answer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
num_fewshot: 2
fewshot_split: test
fewshot_config: {sampler: first_n}
"""
TEXTS = """\
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""
REPLIES = """\
task: replies
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "The capital of {{country}} is"
doc_to_target: " {{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of tasks and what they ask, which the harness reads without a network."""
    folder = tmp_path_factory.mktemp("tasks")
    names = list(CAPITALS.values())
    rows = [
        {"country": country, "choices": names, "answer": number}
        | {"text": f"The capital of {country} is {names[number]}. " * 6}
        for number, country in enumerate(CAPITALS)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choices", CHOICES), ("texts", TEXTS), ("replies", REPLIES)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "data.jsonl")))
    with pytest.MonkeyPatch.context() as patched:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patched.setenv(name, "1")
        patched.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        yield folder


def samples(model: Any, folder: Path) -> dict[str, list[tuple[Any, Any]]]:
    """By task: for each question what it is, and what the model answers."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, tasks=["choices", "texts", "replies"], task_manager=manager, bootstrap_iters=0)
    return {
        task: [(sample["doc"]["country"], sample["filtered_resps"]) for sample in rows]
        for task, rows in found["samples"].items()
    }


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.verify
def test_answers_are_those_of_the_harness_own_model(demo: Path, tasks: Path) -> None:
    """With the very same weights in float32: choices and replies are equal; log-likelihoods are no further off than
    those of its run in bf16 are, times 1.5."""
    pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    from lm_eval.models.huggingface import HFLM

    from llama_npu2.lm_eval.model import LlamaNpu2

    ours = LlamaNpu2(str(demo), max_length=64)
    try:
        answers = samples(ours, tasks)
    finally:
        ours.llm.close()
    exact, rounded = (
        samples(HFLM(str(DEMO), dtype=dtype, device="cpu", batch_size=1, max_length=64), tasks)
        for dtype in ("float32", "bfloat16")
    )

    def likelihoods(found: dict[str, list[tuple[Any, Any]]]) -> np.ndarray:
        choices = [choice[0] for _, resps in found["choices"] for choice in resps]
        return np.array(choices + [float(resps[0]) for _, resps in found["texts"]])

    for country, resps in answers["choices"]:
        best = max(range(len(resps)), key=lambda number: resps[number][0])
        theirs = dict(exact["choices"])[country]
        assert best == max(range(len(theirs)), key=lambda number: theirs[number][0])
        assert [greedy for _, greedy in resps] == [greedy for _, greedy in theirs]
    assert answers["replies"] == exact["replies"]
    assert answers["replies"][0][1] == [" Paris"]
    off, allowed = (np.abs(likelihoods(each) - likelihoods(exact)) for each in (answers, rounded))
    assert off.mean() <= 1.5 * allowed.mean()


@needs_lm_eval
def test_what_requests_begin_with_is_processed_once(demo: Path) -> None:
    """The examples in front of both questions, each question, and the choices one by one, which are as likely as by
    themselves, to the bit."""
    from lm_eval.api.instance import Instance

    from llama_npu2.lm_eval.model import LlamaNpu2

    examples = "".join(f"The capital of {country} is {city}. " for country, city in CAPITALS.items()) * 2
    pairs = [
        (f"{examples}The capital of {country} is", f" {city}")
        for city in CAPITALS.values()
        for country in ("Peru", "Oz")
    ]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    model, processed = LlamaNpu2(str(demo)), 0
    run = model.llm._run

    def counted(phase: str, ids: list[int]) -> None:
        nonlocal processed
        processed += len(ids)
        run(phase, ids)

    with contextlib.closing(model.llm), pytest.MonkeyPatch.context() as patched:
        patched.setattr(model.llm, "_run", counted)
        together = model.loglikelihood(requests, disable_tqdm=True)
        examples_alone = len(model.tok_encode(examples))
        questions = {text: len(model.tok_encode(text)) for text, _ in pairs}
        choices = sum(len(model.tok_encode(text + choice)) - questions[text] for text, choice in pairs)
        assert processed < sum(questions.values()) - examples_alone + choices
        for request, found in zip(requests, together, strict=True):
            model.llm.reset()
            assert model.loglikelihood([request], disable_tqdm=True) == [found]
        assert processed > len(pairs) * examples_alone


@needs_lm_eval
def test_texts_become_tokens_once(demo: Path) -> None:
    """A chat template writes the token that texts begin with; a reply that is begun stays open."""
    from llama_npu2.lm_eval.model import LlamaNpu2

    model = LlamaNpu2(str(demo))
    with contextlib.closing(model.llm):
        history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good "}]
        text = model.apply_chat_template(history, add_generation_prompt=False)
        assert text.endswith("Good") and model.apply_chat_template(history[:1]).endswith("<|end_header_id|>")
        begin = model.prefix_token_id
        assert model.tok_encode(text).count(begin) == model.tok_encode("Hello").count(begin) == 1
        assert model.tok_encode("Hello", add_special_tokens=False).count(begin) == 0
        assert model.llm.tokenizer.inner.id_to_token(model.eot_token_id) == "<|end_of_text|>"


@needs_lm_eval
def test_what_a_task_asks_of_a_reply(demo: Path) -> None:
    """Is what our options say, or refused; samples are those of numpy's generator, which the harness seeds."""
    from llama_npu2.lm_eval.model import LlamaNpu2

    model = LlamaNpu2(str(demo), max_gen_toks=5)
    with contextlib.closing(model.llm):
        greedy = {"max_tokens": 5, "stop": ("a",), "temperature": 0.0}
        assert model._sampling({"until": "a", "do_sample": False, "temperature": 1.0}) == greedy
        np.random.seed(3)
        drawn = model._sampling({"until": ["", "b"], "temperature": 0.5, "top_p": 0.9, "max_tokens": 7})
        np.random.seed(3)
        assert drawn == {
            "max_tokens": 7,
            "stop": ("b",),
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": np.random.randint(2**31),
        }
        with pytest.raises(UserError, match="generation argument num_beams is unknown: known are "):
            model._sampling({"num_beams": 4})
        with pytest.raises(UserError, match=r"max_gen_toks=9000: must be less than max_length="):
            from lm_eval.api.instance import Instance

            model.generate_until([Instance("generate_until", {}, ("Hello", {"max_gen_toks": 9000}), 0)])


@needs_lm_eval
@pytest.mark.slow
def test_the_command_line_is_the_harness_own(demo: Path, tasks: Path, tmp_path: Path) -> None:
    given = ["--model", "llama-npu2", "--model_args", f"path={demo},threads=1", "--tasks", "choices", "--limit", "3"]
    where = ["--include_path", str(tasks), "--output_path", str(tmp_path / "results.json")]
    run = subprocess.run(
        [sys.executable, "-m", "llama_npu2.lm_eval", *given, *where],
        env=os.environ | {"PYTHONPATH": str(ROOT / "runtime")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "|choices|" in run.stdout
    (results,) = tmp_path.glob("results_*.json")
    found = json.loads(results.read_text())
    assert found["config"]["model"] == "llama-npu2" and found["n-samples"]["choices"]["effective"] == 3
    assert found["results"]["choices"]["acc,none"] > 0.5, "of six choices"


def test_without_the_harness_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert command.main() == 1
    assert capsys.readouterr().err == "error: lm_eval is not installed: pip install lm_eval\n"
