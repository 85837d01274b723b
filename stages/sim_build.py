"""Programs of `npu2-sim`: modules lowered to host C++ and tile functions, compiled and linked for this machine.

Tile functions are the C++ that the NPU runs, compiled against `kernel_src/sim`.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp

from runtime.cpu_features import cpu_features
from runtime.errors import UserError
from stages.air_checks import public_function
from stages.air_text import parse_mlir
from stages.air_to_host import lower
from stages.files import write_json
from stages.object_cache import CachedObject, cached_object
from stages.objects import run_compiler
from stages.tile_objects import FEATURES, object_path, write_tile_objects
from stages.toolchain import native_fingerprint

SOURCES = Path(__file__).resolve().parent.parent / "kernel_src"
HEADERS = tuple(SOURCES / name for name in ("aie2p/tile.h", "sim/device.hpp", "sim/aie_api/aie.hpp"))
"""What the simulator's objects are made from, besides their source."""

FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-fno-math-errno", "-w")
DEVICE_OBJECT = Path("objects/sim/device.o")


@dataclass(frozen=True)
class TileObject:
    """An object a module links: a source of `kernel_src/aie2p` and the macros that the object's name spells out."""

    name: str
    source: Path
    defines: tuple[str, ...]

    @staticmethod
    def parse(name: str) -> TileObject:
        """`gemm_tk32_tm64_tn128.o` -> gemm.cc with TK=32, TM=64, TN=128 and the variant's suffix."""
        stems = [p for p in sorted((SOURCES / "aie2p").glob("*.cc")) if name.startswith(p.stem + "_")]
        match = re.fullmatch(r"(?:_[a-z_]+?\d+)+", name[len(stems[-1].stem) : -2]) if stems else None
        if not name.endswith(".o") or match is None:
            raise UserError(f"object {name}: no source in kernel_src/aie2p has this name")
        pairs = re.findall(r"_([a-z_]+?)(\d+)(?=_|$)", match.group())
        return TileObject(
            name, stems[-1], (*(f"-D{k.upper()}={v}" for k, v in pairs), f"-DVARIANT={match.group()[1:]}")
        )


DEVICE = TileObject("device.o", SOURCES / "sim/device.cc", ())
"""What every program runs on; links like a tile function."""


def tile_objects(module: ModuleOp) -> list[TileObject]:
    """What the module's declarations link, each once, in order."""
    names = dict.fromkeys(
        op.attributes["link_with"].data  # type: ignore[attr-defined]
        for op in module.body.block.ops
        if isinstance(op, func.FuncOp) and op.is_declaration
    )
    return [TileObject.parse(name) for name in names]


def sim_objects(stem: str, descriptions: Sequence[Path], cache: Path, work: Path) -> list[Path]:
    """Step action: the objects of one kernel that modules ask for. Returns the source and the headers it includes."""

    def compile_variant(name: str, flags: Sequence[str]) -> CachedObject:
        return compile_object(TileObject(name, SOURCES / f"aie2p/{stem}.cc", tuple(flags)), options(), cache)

    return _relative(write_tile_objects(stem, descriptions, compile_variant, work))


def sim_device(cache: Path, work: Path) -> list[Path]:
    """Step action: the object that every simulated program runs on, and what of this CPU they are compiled for. Returns
    its source and headers."""
    made = compile_object(DEVICE, options(), cache)
    output = work / "build" / DEVICE_OBJECT
    output.parent.mkdir(parents=True)
    shutil.copyfile(made.path, output)
    write_json(work / FEATURES, cpu_features())
    return _relative(made.read)


def sim_elf(module: Path, program: str, work: Path) -> list[Path]:
    """Step action: lower a module to host C++ and link it with its objects; returns those and the headers."""
    mlir, built = parse_mlir(module.read_text()), module.parents[1]
    objects = [object_path(built, part.source.stem, part.name) for part in tile_objects(mlir)]
    objects.append(built / DEVICE_OBJECT)
    with tempfile.TemporaryDirectory() as scratch:
        link(mlir, objects, work / "elf" / f"{program}.so", Path(scratch), options())
    return [*objects, *_relative(HEADERS)]


def build(
    mlir: str,
    target: Path,
    work: Path,
    cache: Path,
    checks: bool = True,
    flags: Sequence[str] = (),
    ping_pong: bool = True,
) -> Path:
    """Lower, compile and link MLIR text, as given to `aircc`, to the shared object `target`.

    `cache`: objects of tile functions and of the device, shared between programs and named by content. `checks`:
    fences and never-written bytes at run time. `flags`: more compiler options. Raises UserError.
    """
    module, chosen = parse_mlir(mlir), options(checks, flags)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(lambda part: compile_object(part, chosen, cache), [*tile_objects(module), DEVICE]))
    return link(module, [part.path for part in made], target, work, chosen, ping_pong)


def options(checks: bool = True, flags: Sequence[str] = ()) -> list[str]:
    """Compiler options that every part of a program shares."""
    return [*FLAGS, f"-DSIM_CHECKS={int(checks)}", f"-I{SOURCES / 'sim'}", *flags]


def link(
    module: ModuleOp, objects: Sequence[Path], target: Path, work: Path, chosen: Sequence[str], ping_pong: bool = True
) -> Path:
    """The shared object `target` of a module and the objects it calls; `work` keeps the C++."""
    work.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    source = work / f"{public_function(module).sym_name.data}.cc"
    source.write_text(lower(module, ping_pong))
    program = source.with_suffix(".o")
    run_compiler([*chosen, "-c", str(source), "-o", str(program)], str(source))
    run_compiler(["-shared", "-Wl,-Bsymbolic", "-o", str(target), str(program), *map(str, objects)], target.name)
    return target


def compile_object(part: TileObject, chosen: Sequence[str], cache: Path) -> CachedObject:
    """The object for the simulator, from `cache` when its content and options are known there."""

    def make(output: Path) -> list[Path]:
        run_compiler([*chosen, *part.defines, "-c", str(part.source), "-o", str(output)], str(part.source))
        return [part.source, *HEADERS]

    made_by = (native_fingerprint(), tuple(chosen), part.defines)
    return cached_object(cache, Path(part.name).stem, made_by, [part.source, *HEADERS], make)


def _relative(paths: Sequence[Path]) -> list[Path]:
    """As receipts name files of the project."""
    return sorted(path.relative_to(SOURCES.parent) for path in paths)
