"""Target `npu2-sim`: the NPU's own programs (the same MLIR and C++ tile functions), executed on the host.

The simulator refuses what the hardware would refuse: memory sizes, channels, descriptors, alignment, queue depth.
"""

from llama_npu2.artifact.cpu_features import cpu_features
from stages.targets import Target
from stages.targets.cpu.toolchain import host_system, need_host_compiler
from stages.targets.npu2 import KERNEL_SET
from stages.targets.npu2.groupings import CONTEXT, GROUPINGS

TARGET = Target(
    name="npu2-sim",
    device="sim",
    kernel_set=KERNEL_SET,
    static=True,
    groupings=GROUPINGS,
    default_grouping="fused",
    context=CONTEXT,
    # Tile functions are compiled for all features of this CPU.
    machine=lambda: {"features": cpu_features()},
    built_on=lambda: {"features": cpu_features(), **host_system()},
    need_tools=need_host_compiler,
)
