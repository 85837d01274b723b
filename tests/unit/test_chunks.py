"""Which phases process a text, by what each takes."""

from __future__ import annotations

import pytest

from llama_npu2.artifact.plan import Phase
from llama_npu2.engine.chunks import Chunk, Chunks, decode_phase

TIMES = {
    "decode@128": 10.0,
    "decode@512": 20.0,
    "prefill@128": 50.0,
    "prefill@128@512": 60.0,
    "prefill@256": 80.0,
    "prefill@256@512": 100.0,
}


def milliseconds(times: dict[str, float]) -> dict[Phase, float]:
    return {Phase.parse(phase): time for phase, time in times.items()}


CHUNKS = Chunks(milliseconds(TIMES), [128, 512])


def cut(chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    return [(str(each.phase), each.start, each.end) for each in chunks]


@pytest.mark.parametrize(
    "start, end, wanted",
    [
        (0, 1, [("decode@128", 0, 1)]),
        (0, 4, [("decode@128", at, at + 1) for at in range(4)]),
        (0, 6, [("prefill@128", 0, 6)]),
        (0, 129, [("prefill@128", 0, 128), ("decode@512", 128, 129)]),
        (0, 200, [("prefill@256", 0, 200)]),
        (0, 384, [("prefill@256", 0, 256), ("prefill@128@512", 256, 384)]),
        (126, 129, [("decode@128", 126, 127), ("decode@128", 127, 128), ("decode@512", 128, 129)]),
        (100, 200, [("prefill@128@512", 100, 200)]),
        (5, 5, []),
    ],
)
def test_the_cheapest_sequence(start: int, end: int, wanted: list[tuple[str, int, int]]) -> None:
    chosen = CHUNKS.cheapest(start, end)
    assert cut(chosen) == wanted
    assert CHUNKS.cost(start, end) == sum(TIMES[str(each.phase)] for each in chosen)


def test_at_the_end_of_the_cache_a_chunk_begins_earlier() -> None:
    assert cut(CHUNKS.cheapest(450, 512)) == [("prefill@128@512", 384, 512)]
    assert cut(CHUNKS.cheapest(250, 512)) == [("prefill@128@512", 250, 378), ("prefill@256@512", 256, 512)]


def test_one_bucket_that_holds_the_context_serves_every_start() -> None:
    alone = Chunks(milliseconds({"decode": 100.0, "prefill@128": 50.0}), [])
    assert cut(alone.cheapest(100, 110)) == [("prefill@128", 0, 110)]
    assert cut(alone.cheapest(128, 129)) == [("decode", 128, 129)], "behind all buckets"


@pytest.mark.parametrize("start, end", [(0, 300), (1, 100), (120, 140), (255, 512), (300, 301)])
def test_nothing_is_cheaper(start: int, end: int) -> None:
    """Against all sequences of chunks and single tokens in any order."""
    known = {end: 0.0}
    for at in range(end - 1, start - 1, -1):
        found = [TIMES[str(decode_phase([128, 512], at))] + known[at + 1]]
        for rows, phase in ((128, "prefill@128"), (256, "prefill@256")):
            begin = min(at, 512 - rows)
            found.append(TIMES[phase + "@512" * (begin > 0)] + known[min(begin + rows, end)])
        known[at] = min(found)
    assert CHUNKS.cost(start, end) == known[start]
