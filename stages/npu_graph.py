"""The steps that make the NPU targets' programs; the rest of the graph is shared with `cpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.aircc import npu_elf
from stages.elfs import all_elfs
from stages.npu_build import write_module
from stages.npu_modules import groups
from stages.npu_plans import NpuProgram, npu_programs
from stages.peano import npu_objects
from stages.sim_build import DEVICE_OBJECT, sim_device, sim_elf, sim_objects
from stages.steps import Step
from stages.tile_objects import DIRECTORY, FEATURES, TILE_SOURCES
from stages.toolchain import native_fingerprint, npu_fingerprint, peano_fingerprint

if TYPE_CHECKING:
    from stages.graph import Graph


def npu_steps(graph: Graph) -> Iterator[Step]:
    """Per program its MLIR and what executes it; per kernel the objects that the programs link."""
    programs = npu_programs(graph.options.grouping, graph.buckets)
    modules = [_module(graph, program) for program in programs]
    descriptions = [step.outputs[1] for step in modules]
    make, link = (_npu_object, _compiled) if graph.target == "npu2" else (_sim_object, _simulated)
    objects = [make(graph, stem, descriptions) for stem in _kernels(graph)]
    if graph.target == "npu2-sim":
        objects.append(_sim_device(graph))
    yield from modules
    yield from objects
    # An ELF reads just the objects that it links: which, its action finds out.
    yield from (link(graph, program, tuple(step.name for step in objects)) for program in programs)


def npu_entries(graph: Graph) -> dict[str, dict[str, Any]]:
    """Program name -> its file and entry point."""
    return {
        p.name: {"file": _file(graph, p).as_posix(), "entry": p.group.name, "host": False}
        for p in npu_programs(graph.options.grouping, graph.buckets)
    }


def _kernels(graph: Graph) -> list[str]:
    """Sources of the tile functions that the grouping's programs call."""
    parts = {name for group in groups(graph.options.grouping) for name, _ in group.parts}
    return sorted({launch.kernel.source for name in parts for launch in all_elfs()[name].launches})


def _module(graph: Graph, program: NpuProgram) -> Step:
    return graph.step(
        f"module:{program.name}",
        f"Generate the MLIR of {program.name} from its description.",
        partial(write_module, graph.directory, program.name, program.group.name),
        [_mlir(program), _mlir(program).with_suffix(".json")],
        [graph.directory / "build/config.json"],
        arguments={
            "grouping": graph.options.grouping,
            "bucket": program.bucket,
            "bfp16": graph.options.matmul == "bfp16" and program.group.prefill,
        },
    )


def _npu_object(graph: Graph, stem: str, descriptions: Sequence[Path]) -> Step:
    return _object(
        graph,
        stem,
        partial(npu_objects, stem, descriptions, graph.artifacts / ".cache/peano"),
        descriptions,
        tool=peano_fingerprint,
        # So that without the tools everything else is built before the one line that names them.
        after=("weights", "tokenizer", "elf:host"),
    )


def _sim_object(graph: Graph, stem: str, descriptions: Sequence[Path]) -> Step:
    action = partial(sim_objects, stem, descriptions, graph.artifacts / ".cache/tiles")
    return _object(graph, stem, action, descriptions, tool=native_fingerprint)


def _object(graph: Graph, stem: str, action: Any, descriptions: Sequence[Path], **more: Any) -> Step:
    source = TILE_SOURCES / f"{stem}.cc"
    return graph.step(
        f"object:aie2p/{stem}",
        f"Compile {source} in every variant that a program links.",
        action,
        [DIRECTORY / stem],
        [source, *descriptions],
        **more,
    )


def _sim_device(graph: Graph) -> Step:
    return graph.step(
        "object:sim/device",
        "Compile what every simulated program runs on.",
        partial(sim_device, graph.artifacts / ".cache/tiles"),
        ["build" / DEVICE_OBJECT, FEATURES],
        tool=native_fingerprint,
    )


def _simulated(graph: Graph, program: NpuProgram, objects: tuple[str, ...]) -> Step:
    module = graph.directory / _mlir(program)
    return graph.step(
        f"elf:{program.name}",
        f"Lower {program.name} to a simulated program.",
        partial(sim_elf, module, program.name),
        [_file(graph, program)],
        [module],
        tool=native_fingerprint,
        after=objects,
    )


def _compiled(graph: Graph, program: NpuProgram, objects: tuple[str, ...]) -> Step:
    module = graph.directory / _mlir(program)
    return graph.step(
        f"elf:{program.name}",
        f"Compile {program.name} for the NPU with aircc.",
        partial(npu_elf, module, program.name),
        [_file(graph, program)],
        [module, module.with_suffix(".json")],
        tool=npu_fingerprint,
        after=objects,
    )


def _mlir(program: NpuProgram) -> Path:
    # A dot in the name is a bucket, not a suffix.
    return Path("build/modules") / f"{program.name}.mlir"


def _file(graph: Graph, program: NpuProgram) -> Path:
    return Path("elf") / f"{program.name}.{'elf' if graph.target == 'npu2' else 'so'}"
