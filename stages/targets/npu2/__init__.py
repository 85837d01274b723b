"""Target `npu2`: the NPU of Strix, Strix Halo and Krackan, programmed with MLIR-AIR and Peano, run through XRT.

Prompts keep K and V interleaved by head in one buffer, so that attention needs one stream per column; the host attends
for a token, unless its weights come in groups. Shapes are fixed, so programs of prompts come in buckets, and those that
attend in windows of the cache.
"""

from stages.targets import Target
from stages.targets.npu2.groupings import CONTEXT, GROUPINGS
from stages.targets.npu2.objects import KERNEL_SET
from stages.targets.npu2.toolchain import need_npu_tools, usable_here

TARGET = Target(
    name="npu2",
    device="xrt",
    kernel_set=KERNEL_SET,
    static=True,
    groupings=GROUPINGS,
    default_grouping="fused",
    foreign_tools=True,
    context=CONTEXT,
    built_on=lambda: {"generation": KERNEL_SET},
    suits=usable_here,
    need_tools=need_npu_tools,
    rank=1,
)
