"""Several models in one server: what loads them, what unloads them, and what goes on meanwhile."""

from __future__ import annotations

import asyncio
import math
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llama_npu2 import Llama, load
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.engine.generation import Generation
from llama_npu2.errors import UserError
from llama_npu2.options import Listening, OptionError, Sampling, seconds_of
from llama_npu2.serve.events import unless_gone
from llama_npu2.serve.failures import GoneError, RequestError
from llama_npu2.serve.model import Model
from llama_npu2.serve.models import Keeping, Models, distinct_names
from llama_npu2.serve.replies import Replies
from llama_npu2.text.replies import Kind, Piece
from tests.conftest import ROOT, change_manifest
from tests.support import forked
from tests.support.serving import Server, serving

ASK = [{"role": "user", "content": "The capital of France is"}]


@pytest.fixture(scope="module")
def three(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The demo model, the same one under the name `second`, and a copy under its own."""
    root = tmp_path_factory.mktemp("models")
    second, copy = (Path(shutil.copytree(demo, root / name / "cpu")) for name in ("second", "copy"))
    change_manifest(second, lambda manifest: manifest["model"].update(name="second"))
    change_manifest(copy, lambda manifest: manifest)
    return [demo, second, copy]


@pytest.fixture(scope="module")
def server(three: list[Path]) -> Iterator[Server]:
    with serving(three[0], others=three[1:]) as running:
        yield running


# Over HTTP


def chat(server: Server, model: str, **more: Any) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    made = client.chat.completions.create(model=model, messages=ASK, temperature=0, **more)  # type: ignore[call-overload]
    assert made.model == model.removesuffix(":latest")
    return str(made.choices[0].message.content)


def states(server: Server) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in server.ask("/v1/models").json["data"]}


def measured(server: Server) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(server.ask("/metrics").content.decode())
    samples = (sample for each in families for sample in each.samples)
    return {(sample.name.removeprefix("llama_npu2_"), sample.labels["model"]): sample.value for sample in samples}


def test_models_are_loaded_when_requests_name_them(server: Server, three: list[Path]) -> None:
    (tagged,) = (name for name in states(server) if ":" in name)
    assert tagged == "demo:copy/cpu"
    assert states(server) == {"demo": "loaded", "second": "unloaded", tagged: "unloaded"}
    assert "on demand: second, demo:copy/cpu" in server.lines[0]
    # What is known without loading
    assert server.ask("/props?model=second").json["model_alias"] == "second"
    assert server.ask("/props").json["model_alias"] == "demo"
    assert server.ask(f"/v1/models/{tagged}").json["context_length"] == 2048
    assert server.ask("/v1/models/demo:latest").json["id"] == "demo"
    assert server.ask("/health").json == {"status": "ok"}
    refused = server.ask("/v1/chat/completions", {"model": "second", "messages": ASK, "temperature": 9})
    assert refused.status == 400 and states(server)["second"] == "unloaded"
    assert measured(server)["loads_total", "second"] == 0
    llm = load(three[0])
    alone = llm.generate(ASK).text
    llm.close()
    assert [chat(server, name) for name in ("demo", "second", "second:latest", tagged)] == [alone] * 4
    assert states(server) == dict.fromkeys(("demo", "second", tagged), "loaded")
    found = measured(server)
    assert (found["loads_total", "second"], found["loaded", "second"], found["replies_total", "second"]) == (1, 1, 2)
    assert found["engine_steps_total", tagged] > 0
    assert server.ask("/v1/chat/completions", {"model": "third", "messages": ASK}).status == 404


def test_other_requests_of_a_model_that_is_not_loaded(three: list[Path]) -> None:
    with serving(three[0], "--keep-alive=0", others=three[1:2]) as running:
        asked = {"model": "second", "content": "Paris"}
        ids = running.ask("/tokenize", asked).json["tokens"]
        assert running.ask("/detokenize", {"model": "second", "tokens": ids}).json == {"content": "Paris"}
        assert measured(running)["loads_total", "second"] >= 1


@pytest.mark.parametrize(
    ("others", "options", "message"),
    [
        (["nowhere"], [], "nowhere is not a directory: give an artifact directory"),
        (["DEMO"], [], "is given twice"),
        ([], ["--keep-alive=soon"], "--keep-alive=soon: must be a time, such as 90s"),
        ([], ["--memory=1"], "demo takes"),
    ],
)
def test_mistakes_are_found_before_the_server_listens(
    demo: Path, others: list[str], options: list[str], message: str
) -> None:
    directories = [str(demo), *(each.replace("DEMO", str(demo)) for each in others)]
    command = [sys.executable, "-m", "llama_npu2", "serve", *directories, "--port=0", *options]
    run = forked.run(command, cwd=ROOT / "runtime", timeout=60)
    assert run.returncode == 1 and message in run.stderr and run.stderr.count("\n") == 1, run.stderr


def test_names_of_models() -> None:
    def named(*places: str) -> list[str]:
        class Given:
            def __init__(self, place: str) -> None:
                self.directory, self.model = Path(place), {"name": "qwen"}

        return distinct_names([Given(place) for place in places])  # type: ignore[misc]

    assert named("/a/cpu", "/a/cpu-int4") == ["qwen", "qwen:cpu-int4"]
    assert named("/a/cpu", "/b/cpu", "/b/cpu-int4") == ["qwen", "qwen:b/cpu", "qwen:b/cpu-int4"]
    with pytest.raises(UserError, match="twice"):
        named("/a/cpu", "/a/../a/cpu")


def test_times() -> None:
    for text, seconds in (("90", 90), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25), ("0", 0), ("-0s", 0)):
        assert seconds_of(text) == pytest.approx(seconds)
    assert seconds_of("-1") == seconds_of("-5m") == math.inf
    for text in ("", "m", "5 m", "1h-30m", "1e9", "5x", "-", "9" * 400, "1h" * 9 + "x"):
        with pytest.raises(ValueError):
            seconds_of(text)
    with pytest.raises(OptionError):
        Listening(keep_alive="x")
    assert Listening(keep_alive="5m").keep_alive_seconds() == 300 and Listening().keep_alive_seconds() is None


# What is loaded, and for how long

Run = Callable[[Models, list[Model]], Awaitable[None]]


@asynccontextmanager
async def kept(directories: list[Path], **keeping: Any) -> AsyncIterator[tuple[Models, list[Model]]]:
    """The models of directories, none of which is loaded."""
    async with Models([Manifest.open(each) for each in directories], Keeping(**{"open": load} | keeping)) as models:
        yield models, [*models]


async def reply(model: Model, n: int = 1) -> str:
    """What a request for `n` replies gets."""
    await model.hold()
    try:
        replies = Replies(model, n)
        try:
            replies.start([await model.encode(ASK, "messages")], Sampling(max_tokens=20), n)
            async with aclosing(replies.pieces()) as pieces:
                return "".join([piece.text async for _, piece in pieces if piece and piece.kind is Kind.TEXT])
        finally:
            replies.close()
    finally:
        model.release()


def loaded(models: list[Model]) -> list[bool]:
    return [model.usable for model in models]


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not fact():
            await asyncio.sleep(0.01)


def test_the_model_that_was_used_longest_ago_makes_room(three: list[Path]) -> None:
    async def main() -> None:
        takes = Model("x", Manifest.open(three[0]), None, 1).memory  # type: ignore[arg-type]
        async with kept(three, memory=2.5 * takes) as (_, models):
            one, two, three_ = models
            texts = [await reply(model) for model in (one, two)]
            assert loaded(models) == [True, True, False]
            counts = two.counts
            await reply(one)
            assert await reply(three_) == texts[0] == texts[1]
            assert loaded(models) == [True, False, True] and two.counts == counts and two.counters.replies == 1
            # A model that a request holds stays
            await one.hold()
            await reply(two)
            assert loaded(models) == [True, True, False]
            await two.hold()
            with pytest.raises(RequestError, match="come again soon") as raised:
                await reply(three_)
            assert raised.value.status == 503 and raised.value.headers["retry-after"] == "5"
            assert loaded(models) == [True, True, False] and not three_.failed
            two.release()
            await reply(three_)
            assert loaded(models) == [True, False, True]
            one.release()
        async with kept(three, memory=takes - 1) as (_, models):
            with pytest.raises(RequestError, match="start the server with more") as raised:
                await reply(models[0])
            assert raised.value.status == 503 and "retry-after" not in raised.value.headers

    asyncio.run(main())


def test_idle_models_are_unloaded_and_others_are_not(three: list[Path]) -> None:
    async def main() -> None:
        async with kept(three[:2], keep_alive=0.1) as (models, (one, two)):
            await one.hold()
            text = await reply(two)
            assert 0 < models.expires_in(two) <= 0.1
            await until(lambda: two.loaded is None)
            await asyncio.sleep(0.2)
            assert one.usable and two.counters.replies == 1
            one.release()
            await one.hold(math.inf)  # as a request may say
            one.release()
            assert await reply(two) == text and two.loads == 2
            await until(lambda: two.loaded is None)
            assert one.usable and one.loads == 1 and models.expires_in(one) == math.inf
            await one.hold(0)
            one.release()
            await until(lambda: one.loaded is None)

    asyncio.run(main())


class Gate:
    """Loads models once it is opened, and notes how many it loads at a time."""

    def __init__(self) -> None:
        self.opened, self.at_a_time, self.most = threading.Event(), 0, 0

    def load(self, directory: Path) -> Llama:
        self.at_a_time += 1
        self.most = max(self.most, self.at_a_time)
        assert self.opened.wait(20)
        self.at_a_time -= 1
        return load(directory)


def test_one_model_is_loaded_at_a_time_and_requests_of_others_go_on(three: list[Path]) -> None:
    gate = Gate()

    async def main() -> None:
        async with kept(three, open=gate.load) as (_, (one, two, third)):
            gate.opened.set()
            text = await reply(one)
            gate.opened.clear()
            waiting = [asyncio.ensure_future(reply(model)) for model in (two, two, third)]
            await until(lambda: two.waiting == 2 and third.waiting == 1)
            assert two.state == third.state == "loading"
            assert await reply(one) == text and not any(task.done() for task in waiting)
            gate.opened.set()
            assert await asyncio.gather(*waiting) == [text] * 3
            assert gate.most == 1 and two.loads == third.loads == 1

    asyncio.run(main())


def test_who_waits_for_a_load_may_go_away(three: list[Path]) -> None:
    gate = Gate()

    async def main() -> None:
        async with kept(three[:2], open=gate.load, most_replies=2) as (_, (one, two)):
            gone = asyncio.Event()

            async def receive() -> Any:
                await gone.wait()
                return {"type": "http.disconnect"}

            leaves = asyncio.ensure_future(unless_gone(receive, one.hold()))
            stays = asyncio.ensure_future(reply(one))
            never = asyncio.ensure_future(unless_gone(receive, two.hold()))
            await until(lambda: one.waiting == 2 and two.waiting == 1)
            with pytest.raises(RequestError, match="2 requests wait") as raised:
                await reply(one)
            assert raised.value.status == 429 and one.counters.put_off == 1
            gone.set()
            for task in (leaves, never):
                with pytest.raises(GoneError):
                    await task
            assert (one.holds, one.waiting, two.holds) == (1, 1, 0)
            gate.opened.set()
            assert await stays and one.holds == 0
            assert await reply(two) and two.loads == 1  # what nobody waited for any more was not loaded

    asyncio.run(main())


def test_a_load_that_fails_harms_nobody_else(
    three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Path(shutil.copytree(three[1], tmp_path / "cpu"))

    async def main() -> None:
        async with kept([three[0], broken]) as (_, (one, two)):
            text = await reply(one)
            tokenizer = broken / "tokenizer/tokenizer.json"
            content = tokenizer.read_bytes()
            tokenizer.write_bytes(content.replace(b"a", b"b", 1))
            for _ in range(2):
                with pytest.raises(RequestError, match="second cannot be loaded: the server's log says why") as raised:
                    await reply(two)
                assert raised.value.status == 503 and two.failed and two.state == "unloaded" and two.holds == 0
            assert "is not what was built" in capsys.readouterr().err
            assert await reply(one) == text
            tokenizer.write_bytes(content)
            assert await reply(two) == text and not two.failed
            change_manifest(broken, lambda manifest: manifest["model"].update(name="third"))
            await two.hold(0)
            two.release()
            await until(lambda: two.loaded is None)
            with pytest.raises(RequestError):
                await reply(two)
            assert "has changed since the server started: restart it" in capsys.readouterr().err

    asyncio.run(main())


def test_an_engine_that_has_failed_is_opened_anew(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with kept(three[:2]) as (_, (one, two)):
            text = await reply(one)
            await reply(two)

            def fails() -> None:
                raise OSError("the device is gone")

            for n in (1, 2):
                monkeypatch.setattr(one.engine._scheduler, "step", fails)
                with pytest.raises(RequestError, match="the engine has failed") as raised:
                    await reply(one, n)
                assert raised.value.status == 503
                assert not one.usable and one.state == "unloaded" and two.usable
                assert await reply(one) == text and one.loads == n + 1
            assert await reply(two) == text and two.loads == 1

    asyncio.run(main())


def test_a_reply_that_has_failed_leaves_the_engine_as_it_is(
    three: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with kept(three[:1]) as (_, (one,)):
            text, take = await reply(one), Generation.take
            failing: list[Generation] = []

            def taken(generation: Generation, logits: np.ndarray) -> list[Piece]:
                if not failing:
                    failing.append(generation)
                if generation is failing[0]:
                    raise ValueError("no such token")
                return take(generation, logits)

            monkeypatch.setattr(Generation, "take", taken)
            failed, whole = await asyncio.gather(reply(one), reply(one), return_exceptions=True)
            assert isinstance(failed, RequestError) and failed.status == 500, failed
            assert str(failed) == "the server has failed: its log says how"
            assert whole == text and one.usable and one.loads == 1
            assert "ValueError: no such token" in capsys.readouterr().err

    asyncio.run(main())
