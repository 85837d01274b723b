"""The cost of a step on a worker: `python -m tests.support.fleet_cost [STEPS [WORKERS [SECONDS]]]`.

Steps that do nothing, or sleep for SECONDS, are built with workers of which each has a process, and before that with a
store alone. What remains is what a step costs: look-ups, the order, the scheduler, signatures, files that are flushed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from tests.support.fleets import TOOL, Client, Grid, scheduler, until


def main(steps: str = "1000", workers: str = "4", seconds: str = "0") -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        os.environ |= {"LLAMA_NPU2_CONFIG": f"{name}/trust", TOOL: "version 1"}
        alone = Client(scratch / "alone", scratch / "another store", "", count=steps, seconds=seconds)
        show("a store alone", alone, int(steps))
        with scheduler(scratch) as (address, _):
            grid = Grid(address, scratch)
            for _ in range(int(workers)):
                grid.start("version 1")
            client = Client(scratch / "client", grid.store, address, count=steps, seconds=seconds)
            until(lambda: len(client.fleet._connected().workers()) == int(workers))
            show(f"{workers} workers", client, int(steps))
            assert not client.here and client.made.keys() == alone.made.keys()
            grid.stop()


def show(what: str, client: Client, steps: int) -> None:
    started = time.perf_counter()
    assert not client.build()
    seconds = time.perf_counter() - started
    print(f"{what:20} {seconds:.1f} s, {1000 * seconds / (steps + 1):.1f} ms a step", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
