"""Many sequences on built models: what many have at once is what each has alone, to the bit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.engine.completion import Completion
from llama_npu2.engine.serving import Serving


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[Llama]:
    model = load(demo)
    yield model
    model.close()


async def collected(engine: Serving, prompt: Any, **asked: Any) -> Completion:
    return await engine.submit(prompt, raw=True, **asked).whole()


def test_streams_are_what_generate_gives(llm: Llama) -> None:
    texts = ["The capital of France is", "The capital of Spain is", "Once upon a time"]
    expected = [llm.generate(text, raw=True, max_tokens=12).whole() for text in texts]

    async def main() -> list[Completion]:
        with llm.engine() as engine:
            return list(await asyncio.gather(*(collected(engine, text, max_tokens=12) for text in texts)))

    for found, wanted in zip(asyncio.run(main()), expected, strict=True):
        assert (found.text, found.tokens, found.finish_reason) == (wanted.text, wanted.tokens, wanted.finish_reason)
        assert found.stats.prompt_tokens + found.stats.reused_tokens == wanted.stats.prompt_tokens
        assert found.stats.ttft > 0


def test_nobody_else_uses_the_model_of_an_open_engine(llm: Llama) -> None:
    asked: dict[str, Any] = {"raw": True, "max_tokens": 30, "logit_bias": dict.fromkeys(llm.eos, -100.0)}
    begun, alone = llm.generate("Twice", **asked), llm.generate("Once", **asked).whole().tokens
    next(begun)

    async def main() -> list[int]:
        with llm.engine() as engine:
            stream = engine.submit("Once", **asked)
            await anext(stream)
            for use in (begun.whole, lambda: llm.prefill([5]), lambda: llm.decode(5), lambda: llm.score([5, 6])):
                with pytest.raises(UserError, match="an engine is open"):
                    use()
            return (await stream.whole()).tokens

    assert asyncio.run(main()) == alone


def test_a_stream_can_be_cancelled_and_an_engine_closed_at_any_time(llm: Llama) -> None:
    async def main() -> None:
        with llm.engine() as engine:
            with pytest.raises(UserError, match="an engine is open"):
                llm.generate("a")
            with pytest.raises(UserError, match="an engine is open"):
                llm.engine()
            stream = engine.submit("Once upon a time", raw=True, max_tokens=2000)
            pieces = [await anext(stream) for _ in range(3)]
            stream.cancel()
            pieces += [piece async for piece in stream]  # those that had come
            assert stream.completion.text == "".join(pieces) and len(stream.ids) < 1000
            left = engine.submit([5] * 1500, max_tokens=9)
            await asyncio.sleep(0.02)
        with pytest.raises(UserError, match="closed"):
            await left.whole()
        with pytest.raises(UserError, match="closed"):
            engine.submit("a")

    asyncio.run(main())
    assert llm.generate("The capital of France is", raw=True, max_tokens=2).text


def test_a_step_wakes_an_event_loop_once_whatever_it_brings(llm: Llama) -> None:
    """Each time costs two system calls, and Python's lock while the next step is planned."""
    texts = ["Once upon a time", "The capital of France is", "Tell me", "Twice"]
    asked: dict[str, Any] = {"max_tokens": 40, "logit_bias": dict.fromkeys(llm.eos, -100.0)}
    with llm.engine(speculate=False) as engine:

        async def main() -> tuple[list[str], int]:
            loop, woken = asyncio.get_running_loop(), list[object]()
            wake = loop.call_soon_threadsafe

            def counted(*arguments: Any, **more: Any) -> asyncio.Handle:
                woken.append(arguments)
                return wake(*arguments, **more)

            loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
            replies = await asyncio.gather(*(collected(engine, text, **asked) for text in texts))
            return [reply.text for reply in replies], len(woken)

        alone, few = asyncio.run(main())
        steps = engine.counts.steps
        with ThreadPoolExecutor(2) as threads:  # an event loop each
            both = [threads.submit(asyncio.run, main()) for _ in range(2)]
        assert [found.result()[0] for found in both] == [alone, alone]
    assert 40 <= steps < 60 and few <= steps + 1, "beside the pieces of a step come the ends of the last one's replies"


def test_who_closes_their_event_loop_is_not_waited_for(llm: Llama) -> None:
    async def leave(engine: Serving) -> None:
        engine.submit("Once", raw=True, max_tokens=4000, logit_bias=dict.fromkeys(llm.eos, -100.0))

    with llm.engine() as engine:
        asyncio.run(leave(engine))
        assert asyncio.run(collected(engine, "The capital of France is", max_tokens=4)).text
        steps = 0
        while steps < engine.counts.steps:
            steps = engine.counts.steps
            time.sleep(0.2)
        assert steps < 100


def test_prompts_that_cannot_be_processed_are_refused(llm: Llama) -> None:
    async def main() -> None:
        with llm.engine() as engine:
            for prompt, asked, message in (
                ([5] * 5000, {}, "the context is"),
                ([10**6], {}, "outside the vocabulary"),
                ("a", {"n": 2}, "n"),
                ("", {}, "empty"),
            ):
                with pytest.raises(UserError, match=message):
                    engine.submit(prompt, **asked)

    asyncio.run(main())


def test_a_saved_context_goes_on_as_if_it_had_been_processed(llm: Llama, tmp_path: Path) -> None:
    prompt, more = [at % 500 for at in range(300)], [7, 8, 9]
    fresh = llm.generate(prompt + more, max_tokens=8).whole()
    llm.reset()
    llm.prefill(prompt)
    assert llm.save_context(tmp_path / "context") == 300
    llm.generate([3] * 700, max_tokens=1).whole()
    assert llm.load_context(tmp_path / "context") == 300
    found = llm.generate(prompt + more, max_tokens=8, keep_context=True).whole()
    assert found.tokens == fresh.tokens and found.stats.reused_tokens == 300

    async def again() -> Completion:
        with llm.engine() as engine:
            assert engine.load_context(tmp_path / "context") == 300
            assert engine.save_context(tmp_path / "other", prompt) == 300
            assert engine.load_context(tmp_path / "other") == 300
            with pytest.raises(UserError, match="nothing of this text"):
                engine.save_context(tmp_path / "own", prompt, "somebody")
            with pytest.raises(UserError, match="of other namespace"):
                engine.load_context(tmp_path / "other", "somebody")
            return await collected(engine, prompt + more, max_tokens=8)

    llm.generate([3] * 700, max_tokens=1).whole()
    found = asyncio.run(again())
    assert found.tokens == fresh.tokens and found.stats.reused_tokens == 300
    assert (tmp_path / "other").read_bytes() == (tmp_path / "context").read_bytes()
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o600
