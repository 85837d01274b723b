"""What it means when a rung breaks, and what to try: a line each."""

from __future__ import annotations

import re
from dataclasses import dataclass

GUIDE = "docs/tutorials/ryzen-ai.md"


@dataclass(frozen=True)
class Fault:
    meaning: str
    remedy: str


class Broken(Exception):
    """A rung breaks: `cause` names an entry of the table, `detail` has the numbers or what the tools said."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


DEVICE, CONTEXT, KERNEL, TILE, LISTS, SWITCH, TIMES, HEAP, PROGRAM, LAYER, PROMPT, TOKEN, WATCHDOG = (
    "device",
    "context",
    "first kernel",
    "tile function",
    "run list",
    "context switch",
    "times",
    "heap",
    "program",
    "layer",
    "prompt",
    "token",
    "watchdog",
)
"""Rungs."""

_NO_LISTS = "LLAMA_NPU2_RUNLIST=0 in the environment does without them; a newer firmware"

_ANY = ""
"""On any rung that has no entry of its own."""

FAULTS: dict[tuple[str, str], Fault] = {
    (DEVICE, "no bindings"): Fault(
        "Python finds no pyxrt: XRT is not installed, or for another Python",
        "install the package that doit doctor names, and use the Python it was built for",
    ),
    (DEVICE, "old bindings"): Fault(
        "this XRT's bindings cannot open a context from an ELF file", f"a newer XRT: {GUIDE} says which"
    ),
    (DEVICE, "gone"): Fault(
        "there is no device: the driver is not loaded, or does not know this NPU", "doit doctor, then dmesg | grep xdna"
    ),
    (DEVICE, "failed"): Fault(
        "the device is there and does not open",
        "doit doctor: group render, firmware, driver; end what else uses the NPU",
    ),
    (CONTEXT, "failed"): Fault(
        "driver or firmware refuse the ELF: versions that do not belong together",
        "driver, firmware and XRT from one release, then reboot; dmesg names the command that was refused",
    ),
    (CONTEXT, "no kernel"): Fault(
        "the context takes the ELF, but XRT does not find the kernel in it",
        "compilers and XRT of the versions that doit doctor lists: the ELF names its kernel in another way",
    ),
    (KERNEL, "timeout"): Fault(
        "the smallest program hangs: control code or data movement, not arithmetic",
        "the firmware and compiler versions that doit doctor lists; then report it",
    ),
    (KERNEL, "failed"): Fault(
        "the firmware ends the smallest program with an error", "driver, firmware and XRT from one release; dmesg"
    ),
    (KERNEL, "later dispatch"): Fault(
        "right once, then not: the array is not reset between dispatches, for the firmware ignores the load of an "
        "image that is loaded already",
        "rebuild (rm -r artifacts/selftest): resets per dispatch must be even, the ELF has an odd number",
    ),
    (LISTS, "failed"): Fault("the firmware takes no run lists of ELF runs", _NO_LISTS),
    (LISTS, "timeout"): Fault("a list of runs hangs where each run alone does not", _NO_LISTS),
    (LISTS, "wrong"): Fault("runs of a list overlap, where each alone is right", _NO_LISTS),
    (LISTS, "zeros"): Fault("runs of a list are left out, where each alone is right", _NO_LISTS),
    (LISTS, "later dispatch"): Fault("later runs of a list overlap or are left out, alone they are right", _NO_LISTS),
    (LISTS, "none"): Fault("this XRT has no run lists: each call is submitted alone", "a newer XRT is faster"),
    (SWITCH, "refused"): Fault(
        "programs cannot share a context, and there is no second one", f"end what else uses the NPU; {GUIDE} on XRT"
    ),
    (SWITCH, "later dispatch"): Fault(
        "after another context's turn a program computes something else: the switch does not restore the array",
        "a newer driver and firmware; until then programs must share a context",
    ),
    (PROGRAM, "wrong"): Fault(
        "its tile functions are right alone, not joined: a launch reads what the one before has not written yet, or a "
        "tile has another size",
        "npu.grouping=separate, which joins fewer launches; npu.matmul=bf16 if it was bfp16",
    ),
    (PROGRAM, "zeros"): Fault(
        "a launch of the program does nothing", "npu.grouping=separate, which joins fewer launches"
    ),
    (PROGRAM, "timeout"): Fault(
        "the program hangs, or takes longer than the driver waits",
        "npu.buckets=64: if that runs, it takes too long; if not, npu.grouping=separate",
    ),
    (LAYER, "wrong"): Fault(
        "each program is right alone: what one hands to the next is not (a sync, a view, the order in a run list)",
        "LLAMA_NPU2_RUNLIST=0: if that is right, run lists overlap calls",
    ),
    (PROMPT, "wrong"): Fault(
        "a layer is right, all of them are not: a later layer's buffers, or errors that add up",
        "npu.matmul=bf16 if it was bfp16; then report it",
    ),
    (TOKEN, "wrong"): Fault(
        "the prompt is right, its tokens are not: the cache, or the row of the position",
        "report it, with the model's name",
    ),
    (WATCHDOG, "timeout"): Fault(
        "the driver ends a command that takes half of its watchdog's time",
        "the driver's parameter tdr_timeout_ms; the report's times say how long the command took",
    ),
    (WATCHDOG, "not recovered"): Fault(
        "the driver did not bring the device back", "sudo modprobe -r amdxdna && sudo modprobe amdxdna, or reboot"
    ),
    (_ANY, "timeout"): Fault(
        "it hangs: a transfer waits for one that never comes, or a core does not end",
        "report it; dmesg shows which column",
    ),
    (_ANY, "failed"): Fault("the driver or the firmware refuses it", "dmesg; versions by doit doctor"),
    (_ANY, "gone"): Fault(
        "the device is gone: the driver was reset or unloaded", "dmesg; reboot if it does not return"
    ),
    (_ANY, "no memory"): Fault(
        "the driver has no more memory", "ulimit -l unlimited, and end other programs that use the NPU"
    ),
    (_ANY, "zeros"): Fault(
        "it says that it ran and wrote nothing, or wrote zeros",
        "the compiler versions that doit doctor lists; report it",
    ),
    (_ANY, "no numbers"): Fault(
        "part of the result was never computed: memory that was not filled, or a tile function's error",
        "the compiler versions that doit doctor lists; report it",
    ),
    (_ANY, "wrong"): Fault(
        "the tile function computes something else here than on the simulator: its compiler, or an instruction",
        "the compiler versions that doit doctor lists; report it with the numbers",
    ),
    (_ANY, "elsewhere"): Fault(
        "results land where they do not belong: an address of a transfer",
        "the compiler versions that doit doctor lists",
    ),
    (_ANY, "later dispatch"): Fault(
        "right once, then not: something of the dispatch before is still there (resets that are odd in number, a lock)",
        "rebuild with the compiler versions that doit doctor lists; report it",
    ),
    (_ANY, "unsteady"): Fault(
        "each result is near enough, but not the same bits: two transfers or cores race", "report it with the numbers"
    ),
}


def fault(rung: str, cause: str) -> Fault:
    """The rung's own entry, or that for any rung."""
    return FAULTS.get((rung, cause)) or FAULTS.get((_ANY, cause)) or FAULTS[_ANY, "failed"]


_SAID = (
    ("timeout", r"TIMEOUT|did not finish|timed out"),
    ("gone", r"No such device|err=-19\b|Could not open device"),
    ("no memory", r"Cannot allocate memory|err=-12\b|No space left|err=-28\b|no .* more beside"),
    ("no bindings", r"needs XRT's Python bindings"),
    ("old bindings", r"cannot load ELF|incompatible constructor"),
    ("no kernel", r"no ELF found with|Unable to find group|kernel instance"),
)


def cause_of(message: str) -> str:
    """What an error line of the runtime or of the driver is about."""
    return next((cause for cause, pattern in _SAID if re.search(pattern, message)), "failed")
