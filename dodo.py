"""The build graph of llama-npu2: from a checkpoint to an artifact directory, and what can be done with one.

doit compile [model=...] [target=...]     build what is stale
doit run prompt="..."                     build what is stale, then generate
doit list                                 the commands and the steps, each with a sentence
doit help COMMAND                         the variables of a command
doit why [STEP]                           what is stale, and what changed
"""

# ruff: noqa: E402
from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path

gc.disable()  # while modules load it takes a tenth of the time and finds nothing

sys.path.insert(0, str(Path(__file__).parent / "runtime"))
sys.path.insert(0, str(Path(__file__).parent))

from stages.engine.ahead import start_ahead

start_ahead(sys.argv[1:])  # where the package is not installed, whose plugin does that earlier

from stages.commands.tasks import commands, group, step
from stages.engine.doit_tasks import DOIT_CONFIG  # noqa: F401 - doit reads it
from stages.engine.streams import end_with_readers

gc.freeze()
gc.enable()
end_with_readers()
if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as it was before modules were loaded


def task_command():
    """What people ask for; `stages.graph.options.COMMANDS` has a sentence for each."""
    yield from commands()


def task_checkpoint():
    """Resolve model=..., check every tensor's name, shape and type, record what was found."""
    return step("checkpoint")


def task_tokenizer():
    """Copy the tokenizer, its chat template and the generation settings."""
    return step("tokenizer")


def task_plan():
    """Derive which buffers there are and which program runs on which, phase by phase."""
    return step("plan")


def task_calibration():
    """With calibrate=..., round the weights layer by layer for the inputs that a text gives them."""
    yield from group("calibration")


def task_weights():
    """Pack the weights into blobs, in the layout that the kernels read."""
    return step("weights")


def task_module():
    """Derive each program's source from the parts it joins."""
    yield from group("module")


def task_object():
    """Compile each kernel source to objects."""
    yield from group("object")


def task_elf():
    """Link each program."""
    yield from group("elf")


def task_manifest():
    """Describe the artifact directory: slots, plans, weights, digests."""
    return step("manifest")


def task_probe():
    """Build the programs of `doit selftest`."""
    yield from group("probe")
