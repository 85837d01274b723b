"""`doit fit`: what it says against what builds leave and take."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llama_npu2 import UserError
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.cli.table import amount
from stages.commands.fit import Machine, needs_of, peak_memory, policies, programs_there
from stages.graph import Build
from stages.graph.needs import WORKING, Needs, locked_memory
from stages.graph.options import Options, parse_options
from stages.model.families import parse_config
from stages.model.plan import make_plan
from stages.model.policy import parse_policy
from stages.model.presets import PRESETS
from stages.model.sources import config_of
from stages.model.unpacking import UNPACKED
from stages.sharing.cache import offer_run
from stages.sharing.census import Count
from stages.sharing.remotes import open_remote
from stages.sharing.store import Store
from stages.targets import targets
from tests.conftest import ROOT, doit


def needs(artifacts: Path, **variables: str) -> Needs:
    build = Build(parse_options({"artifacts": str(artifacts), "target": "cpu"} | variables))
    return needs_of(build, policies(build)[0])


def test_disk_is_what_the_build_left(demo: Path, artifacts: Path) -> None:
    found = needs(artifacts, weights="bf16")
    objects = sum(path.stat().st_size for path in (artifacts / ".cache/objects").iterdir())
    built = sum(path.stat().st_size for path in demo.rglob("*") if path.is_file())
    # Other tests fill the cache: what of it is the demo's, objects and programs, is also in its directory.
    made = [*(demo / "build/objects").rglob("*.o"), *(demo / "elf").iterdir()]
    own = sum(path.stat().st_size for path in made)
    assert own <= objects
    assert found.disk == pytest.approx(built + own, rel=0.05)
    assert found.download == found.pinned == 0


def test_weights_are_counted_to_the_byte(demo: Path, artifacts: Path) -> None:
    found = needs(artifacts, weights="bf16")
    packed = sum(path.stat().st_size for path in (demo / "weights").iterdir())
    assert sum(b.nbytes for b in found.plan.buffers.values() if b.packed) <= packed
    manifest = Manifest.open(demo)
    assert {name: b.nbytes for name, b in found.plan.buffers.items()} == {
        n: manifest.nbytes(n) for n in manifest.buffers
    }
    large = [needs(artifacts, model="random:llama-3.2-1b", weights=weights) for weights in ("int8", "bf16")]
    assert large[0].artifacts < large[1].artifacts, "of a small model, the code of a format outweighs what it saves"


def test_a_cache_counts_as_far_as_it_is_filled(artifacts: Path) -> None:
    found = needs(artifacts, model="random:llama-3.2-1b")
    cache = 2 * 2 * found.config.layers * found.config.kv_heads * found.config.head_dim
    assert found.resident(1000) - found.resident(0) == 1000 * cache
    assert needs(artifacts, model="random:llama-3.2-1b", kv="int8").resident(1000) < found.resident(1000)


def test_random_weights_are_disk_and_no_download(artifacts: Path) -> None:
    found = needs(artifacts, model="random:llama-3.2-1b")
    assert found.download == 0
    assert found.disk - found.artifacts == pytest.approx(2 * 1.2358e9, rel=0.01)
    assert found.build > 2 * 2 * 128256 * 2048, "the vocabulary as it is read and as it is packed"


def test_the_npu_pins_what_its_programs_use(artifacts: Path) -> None:
    found = needs(artifacts, model="random:llama-3.2-1b", target="npu2", weights="int8")
    buffers = make_plan(
        found.config, found.target.grouping("fused"), found.target.kernel_set, found.buckets, found.policy
    ).buffers
    layers = sum(b.nbytes for name, b in buffers.items() if b.blob.startswith("layer_"))
    embedding = buffers["model.embed_tokens.weight"].nbytes
    assert layers < found.pinned < sum(b.nbytes for b in buffers.values()) + (64 << 20)
    assert found.resident(1) - found.pinned < embedding + (200 << 20)


def test_all_that_is_locked_is_little_more_than_the_weights() -> None:
    """But for caches. Prompts are unpacked into room for one layer, in bfp16 9 bytes for 8 of its weights."""
    npu2, buckets = targets()["npu2"], Options().bucket_list()
    for model in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"):
        config = parse_config(PRESETS[model], model).within(4096)
        policy, grouping = parse_policy("int4", matmul="bfp16"), npu2.grouping("fused")
        plan = make_plan(config, grouping, npu2.kernel_set, buckets, policy)
        held = locked_memory(plan, config, grouping, buckets, policy)
        attention = 2 * config.emb * config.head_dim * (config.heads + config.kv_heads)
        unpacked = [buffer.nbytes for name, buffer in plan.buffers.items() if name.startswith(UNPACKED)]
        assert sum(unpacked) == (attention + 3 * config.emb * config.ffn) * 9 // 8
        assert held["KV cache"] == 4096 * config.layers * 2 * config.kv_heads * config.head_dim * 2
        assert sum(unpacked) < held[WORKING] < 0.15 * held["weights"]
        copied = locked_memory(plan, config, grouping, buckets, policy, second_copy=True)
        assert copied["second copy"] == config.layers * sum(unpacked) and copied[WORKING] <= held[WORKING]


def test_calibration_leaves_activations_and_weights(artifacts: Path) -> None:
    """`int8` is not calibrated."""
    mixed, plain = (
        needs(artifacts, model="random:llama-3.2-1b", weights=f"{chosen}vocab=bf16") for chosen in ("int4,", "int8,")
    )
    activations = 2 * 17 * 16384 * 2048 * 2
    rounded = sum(b.nbytes for b in mixed.plan.buffers.values() if b.format == "int4")
    assert (mixed.calibration, plain.calibration) == (activations + rounded, activations)


def test_what_is_short_is_named(artifacts: Path) -> None:
    found = needs(artifacts, model="random:llama-3.2-1b", target="npu2")
    plenty = Machine(disk=1 << 50, memory=1 << 50, locked=None)
    assert plenty.lacks(found, 1) == []
    short = {"disk": {"disk": found.disk - 1}, "locked memory": {"locked": found.pinned - 1}}
    for what, limit in short.items():
        assert replace(plenty, **limit).lacks(found, 1) == [what]
    assert replace(plenty, memory=1 << 20).lacks(found, 1) == ["memory to build", "memory to run"]


def test_artifacts_without_a_checkpoint_need_nothing(demo: Path, artifacts: Path, tmp_path: Path) -> None:
    (tmp_path / "copied").mkdir()
    build = Build(parse_options({"artifacts": str(tmp_path), "model": "copied", "target": "cpu"}))
    with pytest.raises(UserError, match="its checkpoint is not here"):
        config_of(build.source)


def test_table_and_json(tmp_path: Path) -> None:
    run = doit("fit", f"artifacts={tmp_path / 'none'}")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    header, *rows = lines[: lines.index("")]
    assert header.split()[:4] == ["weights", "download", "disk", "build"]
    assert {"bf16", "int8", "int4", "w8a8"} <= {row.split()[0] for row in rows}
    assert "free" in lines[-1]
    assert not (tmp_path / "none").exists()
    (row,) = json.loads(doit("fit", "weights=int4", "json=1").stdout)["formats"]
    assert row["weights"] == "int4" and row["disk"] > 0 and row["lacks"] == []


def test_amounts_have_three_digits() -> None:
    assert [amount(n << 20) for n in (0, 1, 1023, 1 << 10)] == ["-", "1.00 MiB", "1023 MiB", "1.00 GiB"]


def test_memory_of_all_processes_counts(tmp_path: Path) -> None:
    """100 MB here and as many in a child."""
    hold = "b = b'x' * 100_000_000; import time; time.sleep(0.3)"
    script = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {hold!r}]); {hold}; p.wait()"
    assert 200e6 < peak_memory([sys.executable, "-c", script]) < 260e6
    with pytest.raises(UserError, match="the build failed: oh"):
        peak_memory([sys.executable, "-c", "import sys; sys.exit('oh')"])


KEEPS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from stages.engine.digests import Digests
from stages.engine.steps import Project, Step
from stages.engine.lock import ProcessLock
from stages.graph.needs import process_memory

def act(work):
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda size: np.ones(size << 20, np.uint8).sum(), [20] * 8))
    (work / "out").write_text("made")

here = Path(sys.argv[1])
step = Step(Project(here, Digests(here / "digests"), ProcessLock(here / "lock")), "step", "", act, (here / "out",))
before = process_memory()["RssAnon"]
assert step.run() is None
print(process_memory()["RssAnon"] - before)
"""


def test_a_step_gives_its_memory_back(tmp_path: Path) -> None:
    """Also that of its threads: glibc would keep 20 MB."""
    run = subprocess.run([sys.executable, "-c", KEEPS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 10 << 20


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("model", ["demo", "random:smollm2-135m"])
def test_measured(model: str, weights: str, tmp_path: Path) -> None:
    run = doit("fit", f"model={model}", f"weights={weights}", "measure=1", f"artifacts={tmp_path}")
    assert run.returncode == 0, run.stderr
    errors = {line.split()[1]: float(line.split()[-1]) for line in run.stdout.splitlines()[1:]}
    assert abs(errors["disk"]) < 5
    assert -10 < errors["build"] < 60, "it is what the largest kernel takes, which not every format has"
    assert abs(errors["run"]) < 10


def test_a_remote_says_how_many_programs_it_has(demo: Path, artifacts: Path, tmp_path: Path) -> None:
    """Without the objects that they link, or with other ones, none can be taken."""
    given = {"artifacts": str(artifacts), "target": "cpu"}
    made = Build(parse_options(given))
    remote = tmp_path / "store"
    store = Store(open_remote(str(remote)), made.project.digests)
    asked = Build(parse_options({"artifacts": str(tmp_path / "none"), "target": "cpu", "cache": str(remote)}))

    def found() -> Count:
        return programs_there(asked, made.policy)

    programs = [step for name, step in made.steps.items() if name.startswith("elf:")]
    assert found() == Count(0, len(programs))
    for step in programs[:-1]:
        offer_run(store, step)
    assert found() == Count(0, len(programs))
    for name, step in made.steps.items():
        if name.startswith("object:"):
            offer_run(store, step)
    assert found() == Count(len(programs) - 1, len(programs))
    lines = doit("fit", "target=cpu", "weights=bf16", f"cache={remote}", f"artifacts={tmp_path / 'none'}").stdout
    assert "programs" in lines and f"{len(programs) - 1} of {len(programs)}" in lines
    assert not (tmp_path / "none").exists()
