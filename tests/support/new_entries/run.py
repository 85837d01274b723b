"""A program of the new kernel over a weight in the new format, through a target's own rooms and the runtime's device.

`python run.py DIRECTORY TARGET`: builds below DIRECTORY; the exit status says whether the result is the reference's.
"""

import sys
from pathlib import Path

import numpy as np

from llama_npu2.artifact.plan import WHOLE
from llama_npu2.artifact.storage import File
from llama_npu2.devices import Binding, Call, StoredWeight
from llama_npu2.devices.cpu import CpuDevice
from llama_npu2.devices.libraries import open_library
from llama_npu2.devices.sim import SimProgram, SimSubmission
from llama_npu2.devices.spans import Timer
from stages import air
from stages.engine.objects import source_file
from stages.kernels import kernels
from stages.model.grouping import Program
from stages.model.part import PartBuilder, PartKey
from stages.targets.cpu.instruction_sets import objects_of
from stages.targets.cpu.modules import cpu_source
from stages.targets.cpu.objects import compile_host
from stages.targets.cpu.programs import link_host
from stages.targets.cpu.prototypes import prototypes_of
from stages.targets.npu2.modules import build_module
from stages.targets.npu2_sim.objects import compile_tile
from stages.targets.npu2_sim.programs import link
from stages.weights.blobs import PAGE, write_safetensors
from stages.weights.formats import formats

ROWS, COLS = 16, 64

b = PartBuilder()
args = {
    "weight": b.slot("w", ("rows", "cols"), "weight", format="tiny8"),
    "out": b.slot("out", ("rows", "cols"), "output"),
}
b.launch("unpack", args, rows="rows", cols="cols")
PART = b.build_keyed(PartKey("unpack_weight"))
SIZES = {"rows": ROWS, "cols": COLS}


def host_library(directory: Path) -> Path:
    objects = []
    for source in (name for stem in ("unpack", "team", "peaks", "peak_loops") for name in objects_of(stem)):
        objects.append(directory / f"{Path(source).name}.o")
        stem, _, isa = Path(source).name.partition(".")
        compile_host(source_file(source), objects[-1], prototypes_of(stem, isa), isa)
    glue = directory / "glue.cc"
    glue.write_text(cpu_source([PART], SIZES))
    link_host(glue, objects, directory / "host.so")
    return directory / "host.so"


def sim_library(directory: Path) -> Path:
    slots = {slot.name: slot.name for slot in PART.slots}
    program = Program(PART.name, PART.name, (PART,), PART.slots, (slots,), host=False)
    module = build_module(program, SIZES)
    objects = [
        compile_tile(source, directory, name, flags).path
        for source, name, flags in [
            *((f"aie2p/{v.stem}", v.object, v.flags()) for v in module.variants),
            ("sim/device", "device.o", []),
        ]
    ]
    return link(air.parse_mlir(module.text()), objects, directory / "sim.so", directory)


def main(directory: Path, target: str) -> bool:
    values = np.random.default_rng(0).normal(size=(ROWS, COLS)).astype(np.float32)
    layout = PART.layout_of("w", {"cpu": "cpu", "npu2-sim": "aie2p"}[target])
    tiny8 = formats()["tiny8"]
    packed = tiny8.pack(values, layout)
    assert packed.shape == tiny8.packed_shape(values.shape, layout)
    blob = directory / "weight.safetensors"
    places = write_safetensors(blob, [("w", tiny8.dtype, packed.shape)], iter([packed]), PAGE)
    device = CpuDevice(File.at(host_library(directory)), 2)
    [weight] = device.load_weights([StoredWeight(File.at(blob), places["w"], packed.nbytes)])
    out = device.alloc(2 * ROWS * COLS)
    bindings = [Binding(weight, WHOLE, 0), Binding(out, WHOLE, 0)]
    if target == "cpu":
        entry = device.load_program(File.at(directory / "host.so"), PART.name, host=True)
        device.prepare([Call(entry, bindings)]).run(1, 0)
    else:
        program = SimProgram(open_library(File.at(sim_library(directory))), PART.name)
        SimSubmission(device, [Call(program, bindings)], Timer()).run(1, 0)
    expected = kernels()["unpack"].reference(tiny8.quantise(values), ROWS, COLS)
    return bool((out.bytes == expected.reshape(-1).view(np.uint8)).all()) and bool(expected.astype(np.float32).any())


if __name__ == "__main__":
    sys.exit(not main(Path(sys.argv[1]), sys.argv[2]))
