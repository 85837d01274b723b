"""The steps that make the NPU targets' programs; the rest of the graph is shared with `cpu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.aircc import npu_elf
from stages.npu_build import sim_elf, write_module
from stages.npu_plans import NpuProgram, npu_programs
from stages.steps import Step
from stages.toolchain import host_compiler_fingerprint, npu_fingerprint

if TYPE_CHECKING:
    from stages.graph import Graph


def npu_steps(graph: Graph) -> Iterator[Step]:
    """Two steps per program: its MLIR, and what executes it."""
    for program in _programs(graph):
        yield _module(graph, program)
        yield _compiled(graph, program) if graph.target == "npu2" else _simulated(graph, program)


def npu_entries(graph: Graph) -> dict[str, dict[str, Any]]:
    """Program name -> its file and entry point."""
    return {
        p.name: {"file": _file(graph, p).as_posix(), "entry": p.group.name, "host": False} for p in _programs(graph)
    }


def _programs(graph: Graph) -> list[NpuProgram]:
    return npu_programs(graph.options.grouping, graph.buckets)


def _module(graph: Graph, program: NpuProgram) -> Step:
    return graph.step(
        f"module:{program.name}",
        f"Generate the MLIR of {program.name} from its description.",
        partial(write_module, graph.directory, program.name, program.group.name),
        [_mlir(program), _mlir(program).with_suffix(".json")],
        [graph.directory / "build/config.json"],
        arguments={"grouping": graph.options.grouping, "bucket": program.bucket},
    )


def _simulated(graph: Graph, program: NpuProgram) -> Step:
    module = graph.directory / _mlir(program)
    return graph.step(
        f"elf:{program.name}",
        f"Lower {program.name} to a simulated program.",
        partial(sim_elf, module, program.name, graph.artifacts / ".cache/tiles"),
        [_file(graph, program)],
        [module],
        tool=host_compiler_fingerprint,
    )


def _compiled(graph: Graph, program: NpuProgram) -> Step:
    module = graph.directory / _mlir(program)
    return graph.step(
        f"elf:{program.name}",
        f"Compile {program.name} for the NPU with Peano and aircc.",
        partial(npu_elf, module, program.name, graph.artifacts / ".cache/peano"),
        [_file(graph, program)],
        [module, module.with_suffix(".json")],
        tool=npu_fingerprint,
        # So that without the tools everything else is built before the one line that names them.
        after=("weights", "tokenizer", "elf:host", *(f"module:{p.name}" for p in _programs(graph))),
    )


def _mlir(program: NpuProgram) -> Path:
    # A dot in the name is a bucket, not a suffix.
    return Path("build/modules") / f"{program.name}.mlir"


def _file(graph: Graph, program: NpuProgram) -> Path:
    return Path("elf") / f"{program.name}.{'elf' if graph.target == 'npu2' else 'so'}"
