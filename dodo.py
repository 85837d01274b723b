"""The build graph of llama-npu2: from a checkpoint to an artifact directory, and what can be done with one.

doit compile [model=...] [target=...]     build what is stale
doit run prompt="..."                     build what is stale, then generate
doit list                                 every task with a sentence
doit why [STEP]                           what is stale, and what changed
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "runtime"))
sys.path.insert(0, str(Path(__file__).parent))

from stages.commands.tasks import command, estimate, group, quality, report_complete, selftest, step
from stages.engine.doit_tasks import DOIT_CONFIG, NAMES  # noqa: F401 - doit reads the former
from stages.engine.streams import end_with_readers

end_with_readers()


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


def task_compile():
    """Build the artifact directory: everything that is stale, nothing else."""
    return report_complete()


def task_generate():
    """Generate text from prompt=... (what `doit run prompt=...` does)."""
    return command("generate")


def task_chat():
    """Hold a conversation with the model in the terminal."""
    return command("chat")


def task_bench():
    """Measure prefill, decode, start and memory against what the machine can do."""
    return command("bench")


def task_profile():
    """Show where the time of a prompt and of a token goes: programs, launches, host and Python."""
    return command("profile")


def task_verify():
    """Compare logits and tokens with transformers, on prompts=FILE; a page, and JUnit and JSON for CI."""
    return command("verify")


def task_perplexity():
    """Measure how well the artifacts, as they run, predict text=FILE: window=, stride=, recipe=; json=1."""
    return command("perplexity")


def task_diagnose():
    """Say where a run goes wrong: each layer against transformers, each launch against its reference; prompt=..."""
    return command("diagnose")


def task_quality():
    """Compare what formats of weights lose, all or weights=..., beside llama.cpp's files with peers=llama.cpp."""
    return quality()


def task_export():
    """Make one file of the artifacts and the runtime, output=FILE, for `python FILE "some text"`."""
    return command("export")


def task_doctor():
    """Say which tools and devices this machine has, and what therefore works; json=1."""
    return command("doctor", built=False)


def task_fit():
    """Say what a model will need before anything is downloaded, by format, and what fits here; measure=1 tries it."""
    return command("fit", built=False)


def task_du():
    """Say what takes space: per model, target and kind, what is there twice, caches and checkpoints; json=1."""
    return command("du", built=False)


def task_gc():
    """Show what no complete artifact directory needs; keep=14d (or 5G, or 20) removes what that does not keep."""
    return command("gc", built=False)


def task_probe():
    """Build the programs of `doit selftest`."""
    yield from group("probe")


def task_selftest():
    """Bring up an NPU rung by rung, say what the first fault means, measure; risky=1 also what may reset it."""
    return selftest()


def task_estimate():
    """Estimate time and limit of every launch on the NPU, show the array on a page; published=1, measured=FILE."""
    return estimate()


def task_trust():
    """Show whose native code is run; key=KEY|DIR (name=...) allows a signer or one directory, remove=KEY forbids."""
    return command("trust", built=False)


def task_provenance():
    """Show from what and how the artifacts were built, who vouches for them, what was measured; json=1."""
    return command("provenance", built=False)


def task_push():
    """Offer the artifact directory to others at remote=...; include=weights with those of a private checkpoint."""
    return command("push")


def task_pull():
    """Take an artifact directory from remote=..., where somebody whom you trust pushed it."""
    return command("pull", built=False)


def task_graph():
    """Show the steps as a page and as JSON: the state of each and why, what it took and wrote, what depends on it."""
    return command("graph", built=False)


def task_why():
    """Say for each step, or for those named behind it, whether it is current, and if not, what changed; json=1."""
    return command("why", built=False, pos_arg=NAMES)
