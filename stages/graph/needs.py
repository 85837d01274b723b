"""The disk and memory that building and running a model takes, computed before anything of it is there.

They follow from the configuration, the plan, and the sizes of formats. The needs of compilers, Python and code are
measured: here, or once, as the constants say.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2.cli.peak import PRINT_PEAK
from llama_npu2.devices.xrt.limits import HEAP
from llama_npu2.frozen import frozen
from stages.engine.places import python_environment
from stages.model import families
from stages.model.buffers import Buffer
from stages.model.calibration import WINDOW, WINDOWS
from stages.model.config import ANGLES, Config, table
from stages.model.grouping import Grouping, programs
from stages.model.importers.directory import TOKENIZER_FILES
from stages.model.packing import WRITERS, blobs
from stages.model.plan import Plan, make_plan
from stages.model.policy import Policy
from stages.model.random_weights import AHEAD, CHUNK
from stages.model.sources import HubSource, Listed, RandomSource, Source
from stages.model.unpacking import UNPACKED
from stages.targets import Target
from stages.weights.blobs import PAGE, safetensors_bytes
from stages.weights.format import PACKED_AT_ONCE
from stages.weights.formats import formats

CODE = 4.8e6
"""Bytes of programs, objects (in the artifacts and in the cache), receipts and manifest on target cpu with bf16
weights: `doit fit measure=1` of the demo model, g++ 12, code for all CPUs."""

CODE_OF_FORMAT, CODE_OF_FURTHER = 4.9e6, 1.6e6
"""Bytes that the first format with scales adds, and each further one: its products, in each program."""

COMPILER = 283 << 20
"""Memory of g++ 12 on the largest of the host's kernels. Those of `bf16` and of 8 bits take 180 to 220 MiB of it."""

TOKENIZER_BASE, TOKENIZER_TOKEN, TOKENIZER_BYTE = 2.5e6, 155, 6.7
"""Memory of a tokenizer, of each token in its vocabulary, and of each byte of its file: tokenizers 0.23, vocabularies
of 2 and 128 thousand, with merges and without."""

SAMPLE = 1 << 16
"""Positions of the table that is made to measure the memory of that."""

RUN_IMPORTS = "import llama_npu2.__main__, llama_npu2.engine.llama, llama_npu2.devices.cpu, jinja2.sandbox, jinja2.ext"
"""The imports of a run with a chat template."""

WORKING = "activations and unpacked weights"
"""The purpose of activations on a device and of the weights that the host unpacks for prompts."""


@frozen
class Needs:
    """The needs of one model in one policy on one target, in bytes."""

    source: Source
    config: Config
    target: Target
    policy: Policy
    buckets: Sequence[int]
    files: Mapping[str, Listed]
    """The checkpoint's files."""
    second_copy: bool = False
    """Whether weights are there twice: as stored, and as prompts take them."""

    @cached_property
    def plan(self) -> Plan:
        grouping = self.target.grouping(self.target.default_grouping)
        return make_plan(self.config, grouping, self.target.kernel_set, self.buckets, self.policy)

    # Disk

    @property
    def download(self) -> int:
        """Bytes from the hub; what is in its cache is not fetched again."""
        return self._absent if isinstance(self.source, HubSource) else 0

    @property
    def _absent(self) -> int:
        return sum(file.nbytes for file in self.files.values() if not file.here)

    @property
    def disk(self) -> int:
        """Bytes of checkpoint, artifacts and cached objects that are not here yet."""
        return self._absent + self.artifacts

    @property
    def artifacts(self) -> int:
        """Bytes of artifacts and cached objects."""
        packed = sum(safetensors_bytes(tensors, PAGE) for tensors in blobs(self._packed).values())
        further = len(set(self.policy.formats) - {"bf16"}) - 1
        scaled = CODE_OF_FORMAT + further * CODE_OF_FURTHER if further >= 0 else 0
        return packed + self._tokenizer + int(CODE + scaled)

    @property
    def calibration(self) -> int:
        """The most bytes that `calibrate=` adds.

        They are activations before each layer, of the checkpoint's layers and of rounded ones, for the longest text
        that it reads, and rounded weights.
        """
        activations = 2 * (self.config.layers + 1) * WINDOWS * WINDOW * self.config.emb * np.dtype(bfloat16).itemsize
        return activations + sum(buffer.nbytes for buffer in self._packed.values() if formats()[buffer.format].grid)

    @property
    def _packed(self) -> dict[str, Buffer]:
        return {name: buffer for name, buffer in self.plan.buffers.items() if buffer.packed}

    @property
    def _tokenizer(self) -> int:
        taken = (name for name in self.files if any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES))
        return sum(self.files[name].nbytes for name in taken)

    # Memory of a build

    @property
    def build(self) -> int:
        """The most anonymous memory of a build; pages of files can be given back at any time."""
        return process_memory()["RssAnon"] + max(COMPILER, self._packing, self._generating)

    @property
    def _packing(self) -> int:
        """`WRITERS` files at a time, of each one tensor: as it is read, as it is packed, and temporaries."""
        largest = sorted(
            max(self._packing_of(self.plan.buffers[name]) for name, *_ in tensors)
            for tensors in blobs(self._packed).values()
        )
        return sum(largest[-WRITERS:])

    def _packing_of(self, buffer: Buffer) -> int:
        values = int(np.prod(buffer.shape))
        if buffer.kind == "table":
            return int(buffer.shape[0] * _table_memory(self.config)) + buffer.nbytes
        at_once = PACKED_AT_ONCE if formats()[buffer.format].layout(buffer.layout).panels else values
        working = _packing_memory(buffer.format, buffer.layout) if len(buffer.shape) >= 2 else 0
        return 2 * values + buffer.nbytes + int(min(values, at_once) * working)

    @property
    def _generating(self) -> int:
        """Random weights: the tensors that are made ahead of the one that is written, and a chunk of each in f32."""
        if not isinstance(self.source, RandomSource) or not self._absent:
            return 0
        sizes = [int(np.prod(shape)) for shape in families.tensors(self.config).values()]
        windows = (sizes[first : first + AHEAD + 1] for first in range(len(sizes)))
        return max(sum(2 * size + 8 * min(size, CHUNK) for size in window) for window in windows)

    # Memory of a run

    def resident(self, context: int) -> int:
        """Bytes of a run with `context` positions in the KV cache, of which the NPU has all from the start."""
        used = self.config.max_seq if self.pinned else context
        return (
            runtime_memory()
            + self._tokenizer_memory
            + self.plan.nbytes(name for name, buffer in self.plan.buffers.items() if buffer.kind != "cache")
            + sum(b.nbytes * used // self.config.max_seq for b in self.plan.buffers.values() if b.kind == "cache")
            + (copied_bytes(self.plan) if self.second_copy else 0)
        )

    @property
    def _tokenizer_memory(self) -> int:
        return int(TOKENIZER_BASE + self.config.vocab * TOKENIZER_TOKEN + self._tokenizer * TOKENIZER_BYTE)

    @property
    def pinned(self) -> int:
        """Bytes of locked memory; 0 where the host runs all programs."""
        if self.target.device != "xrt":
            return 0
        grouping = self.target.grouping(self.target.default_grouping)
        of_plan = self.plan, self.config, grouping, self.buckets, self.policy
        return sum(locked_memory(*of_plan, self.second_copy).values())


def locked_memory(
    plan: Plan,
    config: Config,
    grouping: Grouping,
    buckets: Sequence[int],
    policy: Policy,
    second_copy: bool = False,
) -> dict[str, int]:
    """Return the bytes of locked memory by purpose: the buffers of a plan's device programs, and the driver's heap.

    `config`, `grouping`, `buckets` and `policy` are those that the plan was made from.

    Args:
        second_copy: whether the weights that the host unpacks for prompts are kept for every layer.
    """
    host = {program.name for program in programs(config, grouping, buckets, policy) if program.host}
    calls = [call for phase in plan.phases.values() for call in phase if call.program not in host]
    by_purpose: dict[str, set[str]] = {purpose: set() for purpose in ("weights", "KV cache", WORKING)}
    for name in {name for call in calls for name in call.names}:
        if not (second_copy and name.startswith(UNPACKED)):
            by_purpose[_purpose(plan.buffers[name])].add(name)
    sizes = {purpose: plan.nbytes(names) for purpose, names in by_purpose.items()} | {"driver": HEAP}
    return sizes | ({"second copy": copied_bytes(plan)} if second_copy else {})


def copied_bytes(plan: Plan) -> int:
    """Return the bytes of the weights that the host unpacks for prompts, of all layers."""
    calls = (call for phase in plan.phases.values() for call in phase)
    unpacked = {(name, call.layer) for call in calls for name in call.names if name.startswith(UNPACKED)}
    return sum(plan.buffers[name].nbytes for name, _ in unpacked)


def _purpose(buffer: Buffer) -> str:
    if buffer.packed:
        return "weights"
    return "KV cache" if buffer.kind == "cache" else WORKING


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that Python and numpy allocate while `work` runs."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@functools.cache
def _packing_memory(form: str, layout: str) -> float:
    """Return the bytes of temporaries per value while a matrix is packed, besides itself and the result.

    They are measured on a matrix that is packed at once; formats pack a large one in parts.
    """
    side = math.isqrt(PACKED_AT_ONCE)
    packed = Buffer("weight", form, (side, side), layout)
    sample = np.ones(packed.shape, bfloat16)
    return (peak_bytes(lambda: formats()[form].pack(sample, layout)) - packed.nbytes) / sample.size


@functools.cache
def _table_memory(config: Config) -> float:
    """Return the bytes per position that making the table of rotations takes."""
    return peak_bytes(lambda: table(config, ANGLES + next(iter(config.decoder.ropes)), SAMPLE)) / SAMPLE


@functools.cache
def runtime_memory() -> int:
    """Return the memory of a Python that imported the modules of a run, files of code included."""
    run = [sys.executable, "-c", f"{RUN_IMPORTS}\n{PRINT_PEAK}"]
    return int(subprocess.run(run, env=python_environment(), capture_output=True, check=True, text=True).stdout) << 10


def process_memory(pid: int | str = "self") -> dict[str, int]:
    """Return bytes by the names in `/proc/<pid>/status`. OSError where there is no such process."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) << 10 for line in lines if line[-1:] == ["kB"]}
