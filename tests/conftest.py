"""Shared fixtures: checkpoints made on the spot and artifact directories built from them."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from filelock import FileLock
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from llama_npu2 import trust
from llama_npu2.options import option_name
from llama_npu2.trust import PublicKey, envelopes, settings
from stages.graph import Build
from stages.graph.options import Options, parse_options
from stages.model import families
from stages.model.config import Config
from stages.model.families import parse_config
from stages.model.random_weights import write_byte_tokenizer
from stages.targets.cpu.toolchain import host_compiler
from stages.targets.npu2_sim.toolchain import LEVEL
from tests.support import browser

if TYPE_CHECKING:
    from tests.support.cpu_kernels_util import Library

pytest_plugins = [
    "tests.support.left_out",
    "tests.support.balanced",
    "tests.support.kept_objects",
    "tests.support.forked",
]

# Half of the time of a process that a test starts would be compiling what is imported.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).parents[1]

if (compiler := host_compiler()) and "-Werror" not in compiler:
    # Warnings are errors in all that is compiled here, by the command lines that tests run as well.
    os.environ["CXX"] = shlex.join([*compiler, "-Werror"])
    host_compiler.cache_clear()

os.environ[LEVEL] = "0"
"""Tests run a program of the simulator a few times: to optimise it would take longer than that saves."""

# What the user of this machine trusts is not theirs; parallel workers share it.
_trust = None if "PYTEST_XDIST_WORKER" in os.environ else tempfile.TemporaryDirectory(prefix="llama-npu2-")
if _trust:
    os.environ["LLAMA_NPU2_CONFIG"] = _trust.name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the collector of garbage a million objects that are made while tests are collected, and stay: looking
    at them takes a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(100_000)  # a module of the array alone is a million objects, which stay
        gc.enable()


needs_llama_cpp = pytest.mark.skipif(
    not (importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf")),
    reason="llama-cpp-python and gguf are not installed: pip install -e '.[bench]'",
)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}

A_LLAMA = parse_config(CONFIG, "test")
"""A model whose programs are asked for, whatever its sizes."""

ODD_WIDTHS: dict[str, Any] = {
    "hidden_size": 75,
    "intermediate_size": 101,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "vocab_size": 331,
}
"""Changes to `CONFIG`: nothing is a multiple of a vector, a panel or a group."""


def random_tensors(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights in float32 that leave no part of the model without effect on the logits."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in families.tensors(config).items():
        scale = 1.0 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.2
        tensor = generator.standard_normal(shape, np.float32) * scale
        tensors[name] = (tensor if len(shape) == 2 else tensor + 1).astype(np.float32)
    return tensors


def write_checkpoint(directory: Path, shards: int = 1, dtype: Any = bfloat16, seed: int = 0, **changes: Any) -> Config:
    """A small random checkpoint in Hugging Face format; `changes` override fields of `CONFIG` (None removes one)."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(raw))
    config = parse_config(raw, "test")
    tensors = {name: tensor.astype(dtype) for name, tensor in random_tensors(config, seed).items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    else:
        names = list(tensors)
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[shard::shards]}
            save_file(part, directory / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_byte_tokenizer(config, directory)
    return config


def doit(*arguments: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a doit command line as a user would who asks for the names of steps."""
    from tests.support import forked

    command = [sys.executable, "-m", "doit", *map(str, arguments)]
    env = os.environ | forked.VERBOSE | (env or {})
    return forked.run(command, cwd=cwd, env=env, timeout=600)


def outputs_of_two_runs(script: str) -> set[bytes]:
    """What a Python script writes in two processes that order their sets differently."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "runtime"},
            capture_output=True,
            check=True,
        )
        for seed in ("1", "2")
    ]
    return {run.stdout for run in runs}


def of_command_line(variables: Mapping[str, object]) -> dict[str, str]:
    """Variables by the names of the fields of `Options`, as doit's command line has them."""
    names = {each.name: option_name(each) for each in fields(Options)}
    return {names[name]: str(value) for name, value in variables.items()}


def build(checkpoint: Path | str, artifacts: Path, *, portable: bool = False, **variables: object) -> Path:
    """What doit builds before it runs a model, in this process, which has imported it all; returns the directory.

    Steps run one after the other. doit itself runs in tests of the pipeline. `portable`: for all instruction sets, as
    `doit compile` does, which takes two to four times as long. The demo with default options is always built so, as the
    `demo` fixture has it: while one test builds a directory in another way, others find no manifest there.
    """
    given = {"model": str(checkpoint), "artifacts": str(artifacts), **of_command_line(variables)}
    options = parse_options({"target": "cpu"} | given)
    build = Build(options, portable)
    if str(checkpoint) == "demo" and build.directory.name == "cpu":
        build = Build(options, portable=True)
    build.need_tools()
    with build.project.lock:
        for step in build.steps.values():
            failed = step.run()
            assert failed is None, f"{step.name}: {failed.message}"
        build.finish()
    return build.directory


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One artifacts root for the whole session, parallel workers included, so that kernels are compiled once."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "artifacts"
    root.mkdir(exist_ok=True)
    from tests.support.kept_objects import give

    with FileLock(root.with_suffix(".lock")):
        give(root)
    return root


@pytest.fixture(scope="session")
def demo(artifacts: Path) -> Path:
    """Artifact directory of the shipped model, built once per test session. Not to be changed by a test."""
    return build("demo", artifacts, portable=True)


@pytest.fixture(scope="session")
def library(demo: Path, artifacts: Path) -> Library:
    """Shared objects with all host kernels."""
    del demo  # it filled the object cache, which another worker would fill as well
    from tests.support.cpu_kernels_util import Library

    return Library(artifacts.with_name("cpu_kernels"), artifacts / ".cache/objects")


SOURCES = ("dodo.py", "stages", "runtime", "kernel_src", "models/demo")

unfinished = shutil.ignore_patterns(".?*", "*.pyc.*")
"""For copies of directories in which other processes write: files that get their name when they are complete."""


@pytest.fixture(scope="session")
def project(demo: Path, artifacts: Path) -> Path:
    """A copy of the project beside a small checkpoint `model`, compiled with the kernels of the session, once for all
    parallel workers. Not to be changed by a test."""
    del demo  # it filled the object cache
    root = artifacts.with_name("project")
    with FileLock(root.with_suffix(".lock")):
        if not (root / "artifacts/model/cpu/manifest.json").exists():
            shutil.rmtree(root, ignore_errors=True)  # another worker may have failed
            _compile_copy(root, artifacts)
    return root


def _compile_copy(root: Path, artifacts: Path) -> None:
    for name in SOURCES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=unfinished)
        else:
            shutil.copy(ROOT / name, root / name)
    shutil.copytree(artifacts / ".cache", root / "artifacts/.cache", ignore=unfinished)
    write_checkpoint(root / "model")
    assert "manifest" in ran(doit("compile", "model=model", cwd=root))


def _linked_if_kept(source: str, to: str) -> None:
    """Copy a file. One that is never changed in place, of the object cache or of Python's own, is a link to the same
    content."""
    (os.link if "/.cache/objects/" in source or source.endswith(".pyc") else shutil.copy2)(source, to)


@pytest.fixture
def built(project: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A compiled project to edit. It stays where the test fails: all together are 100,000 files, which a later run
    would remove before its first test."""
    copied = shutil.copytree(project, tmp_path / "checkout", copy_function=_linked_if_kept)
    failed = request.session.testsfailed
    yield copied
    if request.session.testsfailed == failed:
        shutil.rmtree(copied, ignore_errors=True)  # a test may have made parts of it read-only


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for the tests of a file; skips where there is none.

    Playwright's event loop runs as long as it is open, beside which no other one can.
    """
    with browser.chromium() as started:
        yield started


@pytest.fixture
def look_at(chromium: Any) -> browser.Look:
    """What is wrong with a page: see `tests/support/browser.py`."""
    return partial(browser.look_at, chromium)


@pytest.fixture
def opened(chromium: Any) -> Iterator[browser.Opened]:
    """A page to use; an error of it or a request fails the test."""
    faults: list[str] = []
    yield partial(browser.opened, chromium, faults=faults)
    assert not faults


Become = Callable[[str], PublicKey]


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Become:
    """Makes this process that of a user of some name, who may be new; returns their key."""

    def to_be(name: str) -> PublicKey:
        monkeypatch.setenv(settings.DIRECTORY, str(tmp_path / name))
        return envelopes.own_key()

    return to_be


def change_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest of a copy, whose files may be links, as somebody who builds here could."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.unlink()
    path.write_text(json.dumps(manifest))
    trust.mark_own(directory, path.read_bytes())


_STEP = re.compile(r"[a-z]+(:[\w./:]+)?")
"""What the name of a step looks like."""


def ran(run: subprocess.CompletedProcess[str]) -> set[str]:
    """Names of the steps that a doit run executed."""
    assert run.returncode == 0, run.stdout + run.stderr
    return {line for line in run.stderr.splitlines() if _STEP.fullmatch(line)}


def complaints(run: subprocess.CompletedProcess[str]) -> list[str]:
    """What a doit run said on standard error besides the names of the steps that it executed."""
    return [line for line in run.stderr.strip().splitlines() if not _STEP.fullmatch(line)]


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every file of an artifact directory, by relative path."""
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
