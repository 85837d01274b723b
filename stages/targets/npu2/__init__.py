"""Target `npu2`: the NPU of Strix, Strix Halo and Krackan, programmed with MLIR-AIR and Peano, run through XRT.

Prefill keeps K and V in one buffer, interleaved by head, so that attention needs one stream per column. In decode the
host computes attention, unless weights are stored in groups. Shapes are fixed: there is a prefill program for each
bucket, and programs with attention come in one for each context bucket (window).
"""

from stages.targets import Target
from stages.targets.npu2.groupings import CONTEXT, GROUPINGS
from stages.targets.npu2.toolchain import need_npu_tools, runs_here, suits

KERNEL_SET = "aie2p"

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
    suits=suits,
    runs_here=runs_here,
    need_tools=need_npu_tools,
    rank=1,
)
