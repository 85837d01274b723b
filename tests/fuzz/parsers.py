"""What is fuzzed: for each parser its seeds, how they are damaged, and what is done with what it reads."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.mutate import mutated_bytes, mutated_json

CORPUS = Path(__file__).with_name("corpus")
ARTIFACTS = "LLAMA_NPU2_FUZZED"
"""Environment variable: artifact directories of target cpu, with colons between, whose manifests are damaged."""

Run = Callable[[str, bytes], object]
"""What is done with an input: the name of the seed that it comes from, and its content."""


@dataclass(frozen=True)
class Parser:
    """`opened`: given an empty directory, what takes inputs; `seeds`: by name; `damage`: makes an input of one."""

    opened: Callable[[Path], AbstractContextManager[Run]]
    seeds: Callable[[], Mapping[str, bytes]]
    damage: Callable[[Random, bytes, Sequence[bytes]], bytes]

    def case(self, seed: int, number: int) -> tuple[str, bytes]:
        """The input of a number: first come the seeds as they are."""
        seeds = self.seeds()
        if number < len(seeds):
            return [*seeds.items()][number]
        rng = Random(f"{seed}:{number}")
        name = rng.choice([*seeds])
        return name, self.damage(rng, seeds[name], [*seeds.values()])


def damaged_json(rng: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """By structure, and now and then by bytes."""
    if rng.random() < 0.1:
        return mutated_bytes(rng, content, others)
    return json.dumps(mutated_json(rng, json.loads(content))).encode()


def files(name: str) -> Callable[[], Mapping[str, bytes]]:
    """The seeds that lie in a folder of the corpus."""
    return lambda: {path.name: path.read_bytes() for path in sorted((CORPUS / name).iterdir())}


def _manifests() -> dict[str, bytes]:
    return {path: (Path(path) / "manifest.json").read_bytes() for path in os.environ[ARTIFACTS].split(":")}


@contextlib.contextmanager
def _load_and_run(scratch: Path) -> Iterator[Run]:
    """A prompt, tokens behind it and the last of the context, in buffers between guard pages."""
    from llama_npu2 import Llama
    from llama_npu2.devices import cpu, sim
    from llama_npu2.manifest import Manifest
    from llama_npu2.trust import mark_own
    from tests.fuzz.guarded import GuardedDevice

    cpu.CpuDevice = sim.CpuDevice = GuardedDevice  # type: ignore[misc]
    copies = {path: shutil.copytree(path, scratch / str(i)) for i, path in enumerate(_manifests())}

    def run(path: str, content: bytes) -> None:
        (copies[path] / "manifest.json").write_bytes(content)
        mark_own(copies[path], content)
        GuardedDevice.at_end = len(content) % 4 > 0
        with contextlib.closing(Llama(Manifest.open(copies[path]), 2)) as llm:
            "".join(llm.generate("The capital of France is", max_tokens=3, temperature=0.5, seed=0))
            llm.prefill(llm.encode("word " * 600, raw=True)[: llm.context_length - llm.position - 2])
            llm._history += [0] * (llm.context_length - llm.position - 1)
            llm.decode(0)

    yield run


PARSERS = {"manifest": Parser(_load_and_run, _manifests, damaged_json)}
