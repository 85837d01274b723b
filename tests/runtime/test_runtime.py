"""The runtime on the demo model and on small random ones: text, sampling, streaming, limits, what it imports."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.__main__ import parse
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.storage import Directory
from llama_npu2.engine import llama
from llama_npu2.engine.engine import Engine
from llama_npu2.engine.sampling import sampler
from llama_npu2.options import Running, Sampling, add_arguments, chosen, to_arguments
from llama_npu2.text import sandbox
from llama_npu2.text.chat_template import ChatTemplate
from llama_npu2.text.tokenizer import TextStream, Tokenizer
from tests.conftest import ROOT, build, change_manifest, doit, write_checkpoint
from tests.support.runtime_process import run_module

_THREADS = Path("/proc/self/task")
EXPECTED = json.loads((ROOT / "models/demo/expected.json").read_text())


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[Llama]:
    model = load(demo)
    yield model
    model.close()


def reply(llm: Llama, prompt: str, **options: object) -> str:
    return "".join(llm.generate(prompt, **({"max_tokens": 120} | options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt", "start"), EXPECTED["raw"], ids=lambda text: text[:24])
def test_demo_completes(llm: Llama, prompt: str, start: str) -> None:
    text = reply(llm, prompt, raw=True)
    assert text.startswith(start)
    assert llm.stats.finish_reason == "stop", "the reply ends by itself"


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("prompt", "start"), EXPECTED["chat"], ids=lambda text: text[:24])
def test_demo_answers(llm: Llama, prompt: str, start: str) -> None:
    assert reply(llm, prompt).startswith(start)
    assert llm.stats.finish_reason == "stop"
    for stop, by in (([", 9", ", 7"], ", 7"), ([", 7", ", 7, 8"], ", 7"), (["never"], "")):
        (made,) = llm.complete("1, 2, 3, 4,", raw=True, stop=stop)
        assert made.stopped_by == by


def test_doit_run_prints_the_completion(demo: Path) -> None:
    run = doit("run", "prompt=The capital of France is", f"artifacts={demo.parents[1]}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(" Paris")
    assert "tokens/s" in run.stderr


def test_chunked_prefill_equals_one_and_steps_agree(artifacts: Path, tmp_path: Path) -> None:
    """A prompt of several chunks, up to the very end of the context. Single steps add in another order."""
    write_checkpoint(tmp_path / "long", max_position_embeddings=1200)
    llm = load(build(tmp_path / "long", artifacts))
    ids = np.random.default_rng(0).integers(0, 300, 1200).tolist()
    at_once = llm.prefill(ids)
    assert llm.position == 1200
    llm.reset()
    llm.prefill(ids[:700])
    np.testing.assert_array_equal(llm.prefill(ids[700:]), at_once)
    llm.rewind(1195)
    steps = [llm.decode(token) for token in ids[1195:]]
    np.testing.assert_allclose(steps[-1], at_once, atol=0.1 * at_once.std())
    with pytest.raises(UserError, match="1201 tokens exceed"):
        llm.decode(0)
    llm.close()


def test_logits_contract(llm: Llama) -> None:
    llm.reset()
    first = llm.prefill([1, 2, 3])
    assert first.dtype == np.float32
    assert first.shape == (llm.manifest.model["vocab"],)
    kept = first.copy()
    llm.decode(4)
    np.testing.assert_array_equal(first, kept, "earlier logits are the caller's")
    llm.reset()
    np.testing.assert_array_equal(llm.prefill([1, 2, 3]), kept)


def test_logits_without_a_copy_are_overwritten_by_the_next_token(llm: Llama) -> None:
    llm.reset()
    own = llm.decode(1, copy=False)
    kept, after = own.copy(), llm.decode(2)
    assert (own == after).all() and (own != kept).any()
    assert not np.shares_memory(own, after)


@pytest.mark.parametrize("bad", [[], [-1], [10**9]])
def test_bad_tokens_are_refused(llm: Llama, bad: list[int]) -> None:
    llm.reset()
    with pytest.raises(UserError):
        llm.prefill(bad)
    assert llm.position == 0


def test_rope_scaling_reaches_the_text(llm: Llama) -> None:
    """Short prompts forgive an unscaled rotary table; some 900 tokens of context do not."""
    context = "\n".join(prompt + answer for prompt, answer in EXPECTED["raw"] * 2)
    ids = llm.encode(context, raw=True)[:880]
    prompt = llm.tokenizer.decode(ids) + "\nThe capital of France is"
    assert reply(llm, prompt, raw=True, max_tokens=2).startswith(" Paris")


def test_threads_do_not_change_the_text(demo: Path) -> None:
    texts = set()
    for threads in (1, 2, 3):
        llm = load(demo, threads)
        texts.add(reply(llm, "Once upon a time", raw=True))
        llm.close()
    assert len(texts) == 1


def test_generation_is_repeatable_and_seeded(llm: Llama) -> None:
    hot = {"raw": True, "temperature": 5.0, "max_tokens": 20}
    assert reply(llm, "Once", seed=1, **hot) == reply(llm, "Once", seed=1, **hot)
    assert reply(llm, "Once", seed=1, **hot) != reply(llm, "Once", seed=2, **hot)


def test_max_tokens_and_reason(llm: Llama) -> None:
    reply(llm, "Once upon a time", raw=True, max_tokens=3)
    assert (llm.stats.generated_tokens, llm.stats.finish_reason) == (3, "length")


def test_context_limit_ends_a_reply(artifacts: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "short", max_position_embeddings=24, eos_token_id=None)
    llm = load(build(tmp_path / "short", artifacts))
    list(llm.generate("twelve bytes", max_tokens=1000))
    assert llm.stats.finish_reason == "length"
    assert llm.position == 24
    llm.close()


def test_stop_string_is_cut_off(llm: Llama) -> None:
    whole = reply(llm, "1, 2, 3, 4,", raw=True)
    assert ", 7" in whole
    assert reply(llm, "1, 2, 3, 4,", raw=True, stop=[", 7"]) == whole[: whole.index(", 7")]
    assert llm.stats.finish_reason == "stop"


def test_conversation_reuses_the_cache(llm: Llama) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    first = "".join(llm.generate(messages, keep_context=True))
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Thank you."}]
    whole = len(llm.encode(messages))
    second = "".join(llm.generate(messages, keep_context=True))
    assert llm.stats.prompt_tokens < whole / 2
    assert second == "".join(llm.generate(messages)), "as from a fresh cache"
    assert llm.stats.prompt_tokens == whole


def test_token_ids_are_a_prompt(llm: Llama) -> None:
    ids = llm.encode("The capital of France is", raw=True)
    assert llm.encode(ids) == llm.encode(np.array(ids)) == ids
    assert reply(llm, ids) == reply(llm, "The capital of France is", raw=True)


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> Tokenizer:
    from stages.model.families import parse_config
    from stages.model.random_weights import write_byte_tokenizer
    from tests.conftest import CONFIG

    (tmp_path / "tokenizer").mkdir()
    write_byte_tokenizer(parse_config(CONFIG, "test"), tmp_path / "tokenizer")
    return Tokenizer.open(Directory(tmp_path))


TEXT = "naïve 日本語 🙂👩\u200d🚀 end"


def test_pieces_are_whole_characters(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer)
    pieces = [stream.push(token) for token in byte_tokenizer.encode(TEXT, special_tokens=False)]
    assert "".join(pieces) + stream.flush() == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    assert sum(map(bool, pieces)) == len(TEXT), "each character comes as soon as it is complete"


@pytest.mark.parametrize("stop", ["語", "🙂👩", "ve 日", "end"])
def test_stop_string_across_tokens(byte_tokenizer: Tokenizer, stop: str) -> None:
    stream, out = TextStream(byte_tokenizer, [stop, "never"]), ""
    for token in byte_tokenizer.encode(TEXT, special_tokens=False):
        out += stream.push(token)
        if stream.stopped_by:
            break
    assert out == TEXT[: TEXT.index(stop)] and stream.stopped_by == stop


def test_held_back_text_is_released(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer, ["abcd"])
    out = "".join(stream.push(t) for t in byte_tokenizer.encode("xabc", special_tokens=False))
    assert (out, stream.flush()) == ("x", "abc")


LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03], np.float32))


def frequencies(**options: float) -> np.ndarray:
    draw = sampler(Sampling(seed=0, **options))  # type: ignore[arg-type]
    return np.bincount([draw(LOGITS) for _ in range(20000)], minlength=5) / 20000


def test_sampling_follows_the_distribution() -> None:
    np.testing.assert_allclose(frequencies(temperature=1.0), np.exp(LOGITS), atol=0.015)


def test_temperature_sharpens() -> None:
    want = np.exp(LOGITS / 0.5)
    np.testing.assert_allclose(frequencies(temperature=0.5), want / want.sum(), atol=0.015)


def test_top_k_and_top_p_cut_the_tail() -> None:
    np.testing.assert_allclose(frequencies(temperature=1.0, top_k=2), [2 / 3, 1 / 3, 0, 0, 0], atol=0.015)
    # 0.5 + 0.25 < 0.8 <= 0.5 + 0.25 + 0.15: the nucleus is three tokens.
    np.testing.assert_allclose(frequencies(temperature=1.0, top_p=0.8), np.array([50, 25, 15, 0, 0]) / 90, atol=0.015)


def test_tiny_top_p_is_greedy() -> None:
    assert frequencies(temperature=1.0, top_p=1e-6)[0] == 1


def test_chat_template_is_sandboxed_and_strict(tmp_path: Path) -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}",
        {"bos_token": "<s>"},
    )
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>[user]hi>"
    assert template.render([{"role": "user", "content": "hi"}], reply=False) == "<s>[user]hi"
    with pytest.raises(UserError, match="refuses these messages: no"):
        ChatTemplate("{{ raise_exception('no') }}", {}).render([])
    with pytest.raises(UserError, match="cannot render"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render([])
    with pytest.raises(UserError, match="not valid jinja"):
        ChatTemplate("{% if %}", {}).check()
    with pytest.raises(UserError, match="not valid jinja"):
        ChatTemplate("{% if %}", {}).render([])


def test_json_output(demo: Path) -> None:
    result = json.loads(run_module(demo, "The capital of France is", "--raw", "--json").stdout)
    assert result["text"].startswith(" Paris")
    assert result["finish_reason"] == "stop"
    assert result["generated_tokens"] > 1


def test_prompt_from_standard_input(demo: Path) -> None:
    assert run_module(demo, "-", "--raw", stdin="The capital of France is").stdout.startswith(" Paris")


def test_check_finds_a_flipped_bit(demo: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy")
    count = len(json.loads((copy / "manifest.json").read_text())["files"])
    whole = run_module(copy, command="check")
    assert whole.returncode == 0, whole.stderr
    assert re.fullmatch(rf"{count} files, \d+\.\d\d GiB: all as built \(\d+\.\d s\)\n", whole.stdout)
    blob = copy / "weights/layer_001.safetensors"
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    damaged = run_module(copy, command="check")
    assert (damaged.returncode, damaged.stdout) == (1, "")
    assert damaged.stderr == f"error: {blob} is not what was built: copy the directory again or run doit compile\n"


@pytest.mark.parametrize("device", ["tpu", "libraries", "xrt.session", "../cpu", ""])
def test_only_a_device_of_the_runtime_is_opened(demo: Path, tmp_path: Path, device: str) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy", copy_function=os.link)
    change_manifest(copy, lambda manifest: manifest["target"].update(device=device))
    with pytest.raises(UserError, match=r"is for the device .*, which this runtime does not have"):
        load(copy)


@pytest.mark.parametrize("section", ["buffers", "programs"])
def test_an_unknown_dtype_is_refused(demo: Path, tmp_path: Path, section: str) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy", copy_function=os.link)
    manifest = json.loads((copy / "manifest.json").read_text())
    first = next(iter(manifest[section].values()))
    (first if section == "buffers" else first["slots"][0])["dtype"] = "f8"
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match='dtype = "f8" must be one of bf16, f32, i32, i8'):
        load(copy)


OUT_OF_BOUNDS = [
    ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    ({"temperature": -0.5}, "temperature=-0.5: must be at least 0"),
    ({"temperature": math.nan}, "temperature=nan: must be finite and at least 0"),
    ({"temperature": math.inf}, "temperature=inf: must be finite and at least 0"),
    ({"top_k": -1}, "top_k=-1: must be at least 0"),
    ({"top_p": 0}, "top_p=0: must be above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p=1.5: must be above 0 and at most 1"),
    ({"seed": -1}, "seed=-1: must be at least 0"),
    ({"min_p": 1.5}, "min_p=1.5: must be at least 0 and at most 1"),
    ({"repetition_penalty": 0}, "repetition_penalty=0: must be at least 0.01 and at most 100"),
    ({"presence_penalty": 3}, "presence_penalty=3: must be at least -2 and at most 2"),
    ({"n": 0}, "n=0: must be at least 1"),
    *(
        ({"logit_bias": bias}, f"logit_bias={bias}: must be a token's number, a colon and -100 to 100, as in 13:-100")
        for bias in ("13", "13:nan", "-1:2", "1:101", "a:b", "")
    ),
]


@pytest.mark.parametrize(("given", "message"), OUT_OF_BOUNDS, ids=lambda value: str(value)[:30])
def test_options_are_refused_alike_everywhere(llm: Llama, given: dict[str, Any], message: str) -> None:
    from stages.graph.options import parse_options

    (name, value), *_ = given.items()
    for use in (
        lambda: next(llm.generate("hi", **given)),
        lambda: parse_options({name: str(value)}),
        lambda: chosen(Sampling, parse(["DIR", f"--{name.replace('_', '-')}={value}"])),
    ):
        with pytest.raises(UserError) as caught:
            use()
        assert str(caught.value).replace(".0:", ":") == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": "3"}, "max_tokens='3': must be a whole number"),
        ({"max_tokens": 3.5}, "max_tokens=3.5: must be a whole number"),
        ({"seed": True}, "seed=True: must be a whole number"),
        ({"temperature": "hot"}, "temperature='hot': must be a number"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_options_of_another_type_are_refused(llm: Llama, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        next(llm.generate("hi", **given))
    assert str(caught.value) == message


def test_numbers_of_numpy_and_none_are_taken(llm: Llama) -> None:
    given = {"max_tokens": np.int64(3), "temperature": np.float32(0), "stop": None, "seed": None, "top_k": None}
    assert llm.generate("hi", **given).text == llm.generate("hi", max_tokens=3).text


@pytest.mark.parametrize("prompt", [None, 5, ["hi"], [{"content": "hi"}]], ids=str)
def test_what_is_no_prompt_is_refused(llm: Llama, prompt: Any) -> None:
    with pytest.raises(TypeError, match="a prompt is a text, a list of token ids, or a list of messages"):
        llm.generate(prompt)


@pytest.mark.parametrize("prompt", ["a\udcff", [{"role": "user", "content": "a\udcff"}]], ids=["text", "messages"])
def test_a_text_that_is_not_unicode_is_refused(llm: Llama, prompt: Any) -> None:
    """Python makes such texts of standard input and arguments in another encoding."""
    with pytest.raises(UserError, match=r"the text is not UTF-8 \('\\udcff' is half of a character\)"):
        next(llm.generate(prompt))


def test_another_thread_is_refused_and_disturbs_nothing(llm: Llama) -> None:
    asked: dict[str, Any] = {"max_tokens": 200, "logit_bias": dict.fromkeys(llm.eos, -100.0)}
    alone, refused = llm.generate("Once", **asked).text, 0
    with ThreadPoolExecutor(1) as pool:
        while not refused:
            growing = pool.submit(lambda: llm.generate("Once", **asked).text)
            while not growing.done():
                try:
                    llm.generate("Twice", max_tokens=1, keep_context=True).whole()
                except UserError as error:
                    assert "the model is at work in another thread: llm.engine()" in str(error)
                    refused += 1
            error = growing.exception()
            assert "another thread" in str(error) if error else growing.result() == alone
    assert llm.generate("Once", **asked).text == alone


USES: dict[str, Callable[[Llama, Path], object]] = {
    "prefill": lambda llm, _: llm.prefill([1, 2, 3]) if llm.position < 2000 else llm.reset(),
    "decode": lambda llm, _: llm.decode(1) if llm.position < 2000 else llm.reset(),
    "score": lambda llm, _: llm.score([1, 2, 3]),
    "reset": lambda llm, _: llm.reset(),
    "rewind": lambda llm, _: llm.rewind(1),
    "engine": lambda llm, _: llm.engine().close(),
    "save_context": lambda llm, path: llm.save_context(path / "context"),
    "load_context": lambda llm, path: llm.load_context(path / "saved"),
}


@pytest.mark.parametrize("use", USES)
def test_no_use_of_a_model_disturbs_that_of_another_thread(llm: Llama, tmp_path: Path, use: str) -> None:
    """Two threads in native code would crash."""
    asked: dict[str, Any] = {"max_tokens": 200, "logit_bias": dict.fromkeys(llm.eos, -100.0)}
    alone, refused = llm.generate("Once", **asked).text, 0
    llm.save_context(tmp_path / "saved")
    with ThreadPoolExecutor(1) as pool:
        while not refused:
            growing = pool.submit(lambda: llm.generate("Once", **asked).text)
            while not growing.done():
                try:
                    USES[use](llm, tmp_path)
                except UserError as error:
                    assert "the model is at work in another thread" in str(error)
                    refused += 1
                time.sleep(0.001)  # else the other thread may never get the model
            error = growing.exception()
            assert re.search("another thread|an engine is open", str(error)) if error else growing.result() == alone


def test_a_model_is_closed_once_another_thread_has_its_token(demo: Path) -> None:
    for _ in range(20):
        with load(demo) as llm, ThreadPoolExecutor(1) as pool:
            growing = pool.submit(llm.generate("Once", max_tokens=500, logit_bias=dict.fromkeys(llm.eos, -100.0)).whole)
            while not llm.position:
                time.sleep(0.001)
            llm.close()
            assert "the model is closed" in str(growing.exception())


def test_a_closed_model_says_so(demo: Path) -> None:
    with load(demo) as llm:
        begun = llm.generate("hi", max_tokens=20)
        next(begun)
    llm.close()  # once more
    for use in (lambda: next(llm.generate("hi")), lambda: llm.prefill([1]), begun.whole):
        with pytest.raises(UserError, match="the model is closed: load it again"):
            use()


@pytest.mark.skipif(not _THREADS.is_dir(), reason="threads are not listed on this system")
def test_a_model_that_cannot_be_opened_or_is_forgotten_leaves_no_threads(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is asked for one again and again."""

    def fails(small: Manifest, large: Engine) -> None:
        raise UserError("no room for the small model")

    before = len([*_THREADS.iterdir()])
    with pytest.raises(UserError, match="give more"):
        load(demo, threads=5, kv_memory=1000)
    monkeypatch.setattr(llama, "Drafting", fails)
    with pytest.raises(UserError, match="no room for the small model"):
        load(demo, threads=5, draft=demo)
    load(demo, threads=5)
    gc.collect()  # nobody closes that one
    assert len([*_THREADS.iterdir()]) <= before


def test_numbers_too_large_for_a_float_are_refused(llm: Llama) -> None:
    with pytest.raises(UserError, match="must be above 0 and at most 1"):
        next(llm.generate("hi", top_p=10**400))


def test_help_says_defaults() -> None:
    """A switch has none to say."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, Sampling, Running)
    shown = " ".join(parser.format_help().split())
    assert "always takes the most likely token (default: 0)" in shown and "(tokens; default: 256)" in shown
    assert shown.endswith("for more memory")


def test_options_survive_a_command_line() -> None:
    options = Sampling(max_tokens=3, temperature=0.5, seed=7, stop=("a b", "-x"))
    for running in (Running(threads=2), Running(second_copy=True)):
        arguments = parse(["DIR", *to_arguments(options, Sampling), *to_arguments(running, Running, command="run")])
        assert chosen(Sampling, arguments) == options
        assert chosen(Running, arguments) == running
    assert Sampling(stop="one").stop == ("one",)  # type: ignore[arg-type]


def test_a_second_copy_of_what_is_used_as_it_is_stored_is_refused(demo: Path) -> None:
    with pytest.raises(
        UserError, match=r"npu.second_copy=1: prompts of .*cpu take weights as they are stored: leave it out"
    ):
        load(demo, second_copy=True)


def test_chat_session(demo: Path) -> None:
    run = run_module(demo, command="chat", stdin="The capital of France is\n/reset\nThe capital of Italy is\n/exit\n")
    first, second = run.stdout.splitlines()
    assert "Paris" in first
    assert "Rome" in second


def loaded_by(code: str) -> dict[str, str]:
    """Modules that a fresh process has after `code`, and their files."""
    code += "\nimport json; print(json.dumps({n: getattr(m, '__file__', None) or '' for n, m in sys.modules.items()}))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "runtime")}
    command = [sys.executable, "-c", f"import sys\n{code}"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    modules: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return modules


def test_importing_the_runtime_pulls_in_no_build_tool() -> None:
    rooms = ["engine.llama", "cli.session", "cli.bench", "cli.profile", "artifact.check"]
    names = ["__main__", *rooms, "devices.cpu", "devices.sim", "devices.xrt"]
    modules = loaded_by("\n".join(f"import llama_npu2.{name}" for name in names))
    forbidden = {
        "stages",
        "doit",
        "torch",
        "transformers",
        "safetensors",
        "huggingface_hub",
        "xdsl",
        "xxhash",
        "filelock",
        "prompt_toolkit",
        "rich",
    }
    assert not forbidden & {name.partition(".")[0] for name in modules}


def test_options_load_no_numpy() -> None:
    assert "numpy" not in loaded_by("import llama_npu2.__main__; llama_npu2.__main__.parse(['DIR', 'hi'])")


def test_no_module_is_loaded_under_two_names(demo: Path) -> None:
    start = f"import runpy\nsys.argv = ['runtime', {str(demo)!r}, 'hi', '--max-tokens=1']\n"
    modules = loaded_by(start + "try: runpy.run_module('runtime', run_name='__main__')\nexcept SystemExit: pass")
    files = [file for name, file in modules.items() if file.startswith(str(ROOT)) and name != "__main__"]
    assert str(ROOT / "runtime/llama_npu2/engine/llama.py") in files
    assert len(files) == len(set(files))


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets_say_the_same(demo: Path, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_NPU2_ISA", isa)
    run = run_module(demo, "The capital of France is", "--raw")
    assert run.stdout.startswith(" Paris")
    assert isa in run.stderr


@pytest.mark.thorough
def test_a_rebuilt_directory_is_loaded_anew_in_one_process(artifacts: Path, tmp_path: Path) -> None:
    """The dynamic loader would hand out the old programs."""
    logits = []
    for heads in (2, 4):
        write_checkpoint(tmp_path / "rebuilt", num_attention_heads=heads, head_dim=16)
        llm = load(build(tmp_path / "rebuilt", artifacts), 1)
        logits.append(llm.prefill([1, 2, 3]))
        llm.close()
    write_checkpoint(tmp_path / "fresh", num_attention_heads=4, head_dim=16)
    llm = load(build(tmp_path / "fresh", artifacts), 1)
    np.testing.assert_array_equal(logits[1], llm.prefill([1, 2, 3]))
    llm.close()


def test_bench_measures_every_test_against_its_limit(artifacts: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "bench", max_position_embeddings=160)
    directory = build(tmp_path / "bench", artifacts)
    run = run_module(directory, "--repeats=2", "--json", "--streams=1,3", command="bench")
    assert run.returncode == 0, run.stderr
    results = {r["test"]: r for r in json.loads(run.stdout)["results"]}
    assert {"read bandwidth", "bf16 peak", "pp128", "tg32 @ 0", "cold start", "peak memory"} <= results.keys()
    assert "pp512" not in results, "longer than the context"
    for test in ("pp128", "tg32 @ 0", "tg32 x 1", "tg32 x 3"):
        assert len(results[test]["values"]) == len(results[test]["limits"]) == 2
        assert results[test]["share"] > 0
    refused = run_module(directory, "--streams=1,999", command="bench")
    assert refused.returncode == 1
    assert re.fullmatch(r"error: --streams=999: a step of \S+ has \d+ rows at most\n", refused.stderr)


TEMPLATES = {
    "endless": "it takes longer than 0.3 s",
    "doubles": "it takes (more than 256 MiB|longer than 0.3 s)",
    "power": "it takes longer than 0.3 s",
    "repeats": "it takes more than 256 MiB",
    "pads": "it takes more than 256 MiB",
    "formats": "it takes more than 256 MiB",
    "format_filter": "it takes more than 256 MiB",
    "format_method": "it takes more than 256 MiB",
    "recursion": "recursion",
    "escapes": "unsafe",
    "types": "list",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LONGEST", 0.3)
    template = ChatTemplate((ROOT / f"tests/fuzz/corpus/template/{name}.jinja").read_text(), {})
    with pytest.raises(UserError, match=f"cannot render these messages: .*{TEMPLATES[name]}"):
        template.render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers(temperature: float, value: float) -> None:
    with pytest.raises(UserError, match="logits are not finite numbers"):
        sampler(Sampling(temperature=temperature))(np.array([1, value, 2], np.float32))


def test_tiny_temperature_is_greedy() -> None:
    assert sampler(Sampling(temperature=5e-324, seed=0))(np.array([-1, 3, 2, 3e38], np.float32)) == 3


def test_a_tokenizer_that_fails_is_one_line(tmp_path: Path) -> None:
    """The library panics where a post-processor names a token that is not there."""
    content = json.loads((ROOT / "tests/fuzz/corpus/tokenizer/sentencepiece.json").read_text())
    content["post_processor"]["special_tokens"].clear()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"tokenizer.* (cannot encode this text|cannot be read)"):
        Tokenizer.open(Directory(tmp_path)).encode("hi", special_tokens=True)
