"""Many clients at a time: conversations over HTTP with any server that speaks OpenAI's API, and what came when."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import numpy as np

from stages.proof.comparison.divergence import TEXT

_SYSTEMS = 3
"""How many system prompts the conversations share."""
_TURNS = 4
"""Most turns of a conversation."""


@dataclass(frozen=True)
class Script:
    """What one side says in a conversation, and how the replies are made."""

    system: str
    questions: tuple[str, ...]
    options: tuple[Mapping[str, Any], ...]
    """Fields of the request of each turn."""


def script(number: int, steady: bool) -> Script:
    """Return a conversation, whose lengths are drawn by its number.

    Args:
        number: of the conversation.
        steady: whether all replies are alike, as any server can make them; else some are greedy, some are drawn, and
            some follow a schema.
    """
    draw, lines = random.Random(number), TEXT.read_text(encoding="utf-8").splitlines()

    def passage(least: int, most: int) -> str:
        """Return lines of the text that ships: facts, questions and answers of 10 to 15 words each."""
        count = draw.randint(least, most)
        first = draw.randrange(len(lines) - count)
        return " ".join(lines[first : first + count])

    system = " ".join(lines[30 * (number % _SYSTEMS) :][: 4 + 4 * (number % _SYSTEMS)])
    turns = draw.randint(1, _TURNS)
    wishes = ("Say more about this:", "What is wrong here?", "Put this in other words:", "Make a story of this:")
    questions = tuple(f"{draw.choice(wishes)} {passage(1, 4)}" for _ in range(turns))
    options = tuple({"max_tokens": draw.randint(16, 96), **({} if steady else _kind(draw))} for _ in range(turns))
    return Script(f"You know this. {system}", questions, options)


def _kind(draw: random.Random) -> dict[str, Any]:
    """Return fields that say how a reply is made."""
    chance = draw.random()
    if chance < 0.5:
        return {"temperature": 0}
    if chance < 0.85:
        return {"temperature": draw.choice((0.7, 1.0)), "seed": draw.randrange(99), "top_p": draw.choice((0.9, 1.0))}
    properties = {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {
        "temperature": 0.5,
        "seed": draw.randrange(99),
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    }


@dataclass
class Answered:
    """What came of one request."""

    asked: Mapping[str, Any]
    text: str = ""
    finished: str = ""
    """Why the reply ended; empty where it did not."""
    tokens: int = 0
    """How many the reply has, as the server counts them."""
    started: float = field(default_factory=time.perf_counter)
    pieces: list[float] = field(default_factory=list)
    """When each piece of a stream came."""
    error: str = ""

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Add an event of a stream."""
        text = ""
        for choice in chunk.get("choices", ()):
            text += choice["delta"].get("content") or ""
            self.finished = choice["finish_reason"] or self.finished
        if text:
            self.text += text
            self.pieces.append(time.perf_counter())
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
        if usage := chunk.get("usage"):
            self.tokens = usage["completion_tokens"]


class Client:
    """Asks one server, and keeps what came."""

    def __init__(self, url: str, model: str, hurried: bool = True) -> None:
        """Initialise a client that has asked nothing.

        Args:
            url: of the server.
            model: what requests name.
            hurried: whether it reads as fast as it can; else it takes little at a time, and waits.
        """
        self._model, self._hurried = model, hurried
        options = [] if hurried else [(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)]
        # One connection a request: a server may close one that is kept, just when it is used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=options)
        self.http = httpx.AsyncClient(base_url=url, timeout=600, transport=transport)
        self.answers: list[Answered] = []

    def request(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request."""
        return {"model": self._model, "messages": [*messages], **options}

    async def stream(self, asked: Mapping[str, Any], most: int | None = None, reset: bool = False) -> Answered:
        """Ask for a stream.

        Args:
            asked: the request, without what says that it is a stream.
            most: after so many pieces the connection is closed, whatever is still to come.
            reset: whether it is closed as that of a killed process is, rather than in peace.
        """
        made = self._begun(asked)
        body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                made.error = (await response.aread()).decode()
                return made
            async with aclosing(response.aiter_lines()) as lines:
                while len(made.pieces) != most and (line := await anext(lines, None)) is not None:
                    if line.startswith("data: {"):
                        made.take(json.loads(line[6:]))
                        if not self._hurried:
                            await asyncio.sleep(0.05)
            if reset and len(made.pieces) == most:
                stream = response.extensions["network_stream"].get_extra_info("socket")
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return made

    async def whole(self, asked: Mapping[str, Any]) -> Answered:
        """Ask for an answer in one piece."""
        made = self._begun(asked)
        response = await self.http.post("/v1/chat/completions", json=asked)
        if response.status_code != 200:
            made.error = response.text
            return made
        answer = response.json()
        (choice,) = answer["choices"]
        made.text, made.finished = choice["message"]["content"], choice["finish_reason"]
        made.tokens = answer["usage"]["completion_tokens"]
        return made

    def _begun(self, asked: Mapping[str, Any]) -> Answered:
        self.answers.append(Answered(asked))
        return self.answers[-1]


class Load:
    """What came in some time."""

    def __init__(self, answers: Sequence[Answered], begin: float, end: float) -> None:
        """Count what came between two times of `time.perf_counter`, of all answers."""

        def within(each: float) -> bool:
            return begin <= each <= end

        self.replies = sum(within(each.pieces[-1]) for each in answers if each.finished and each.pieces)
        """How many streams ended."""
        self.rate = sum(within(piece) for each in answers for piece in each.pieces) / (end - begin)
        """Pieces of streams a second; nearly all of them are tokens."""
        streams = [each for each in answers if each.pieces]
        self.first = np.array([each.pieces[0] - each.started for each in streams if within(each.pieces[0])])
        """Seconds to the first piece of each stream."""
        pairs = [pair for each in streams for pair in pairwise(each.pieces) if within(pair[1])]
        self.gaps = np.array([later - sooner for sooner, later in pairs])
        """Seconds between pieces of streams."""

    def __str__(self) -> str:
        times = (
            f"{name} p50 {1e3 * np.percentile(found, 50):.0f} ms, p99 {1e3 * np.percentile(found, 99):.0f} ms"
            for name, found in (("first token", self.first), ("between tokens", self.gaps))
            if len(found)
        )
        return "; ".join((f"{self.replies} replies, {self.rate:.1f} tokens/s", *times))


async def conversations(
    url: str, model: str, count: int, seconds: float, ends: Sequence[int], first: int = 0, warm: float = 0.0
) -> Load:
    """Have clients lead steady conversations one after the other for some time; return what came of it.

    What came of the replies that the end of the time cuts off counts, too.

    Args:
        url: of the server.
        model: what requests name.
        count: of clients.
        seconds: how long.
        ends: the tokens that would end a reply.
        first: the number of the first conversation, so that another run has others.
        warm: seconds before that, which do not count: all clients begin with a prompt then.
    """
    clients, numbers = [Client(url, model) for _ in range(count)], itertools.count(first)
    steady = {"temperature": 0, "logit_bias": {str(end): -100 for end in ends}}

    async def lead(client: Client) -> None:
        for number in numbers:
            said = script(number, steady=True)
            messages = [{"role": "system", "content": said.system}]
            for question, options in zip(said.questions, said.options, strict=True):
                messages.append({"role": "user", "content": question})
                made = await client.stream(client.request(messages, {**steady, **options}))
                assert not made.error and made.tokens == options["max_tokens"], made
                messages.append({"role": "assistant", "content": made.text})

    began = time.perf_counter() + warm
    tasks = [asyncio.ensure_future(lead(client)) for client in clients]
    done, left = await asyncio.wait(tasks, timeout=warm + seconds, return_when=asyncio.FIRST_COMPLETED)
    ended = time.perf_counter()
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    for client in clients:
        await client.http.aclose()
    for task in done:
        task.result()
    return Load([answer for client in clients for answer in client.answers], began, ended)
