"""What a user can get wrong: each gives one line that names the thing, a non-zero exit, and leaves nothing broken."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llama_npu2.errors import UserError
from stages.graph import Build
from stages.graph.options import parse_options
from stages.proof.comparison.continuations import read_prompts
from tests.conftest import ROOT, change_manifest, complaints, doit, ran, snapshot, write_checkpoint
from tests.support import forked

Damage = Callable[[Path], Any]


def one_line(run: subprocess.CompletedProcess[str], fragment: str) -> None:
    """The run failed, with a single line on standard error, besides names of steps, that says why."""
    assert run.returncode != 0, run.stdout
    lines = complaints(run)
    assert len(lines) == 1, run.stderr
    assert lines[0].lower().startswith("error: ")
    assert fragment in lines[0]


def refusal(**variables: object) -> str:
    """What the first step that fails says, without a command line's process."""
    try:
        for step in Build(parse_options({name: str(value) for name, value in variables.items()})).steps.values():
            if failed := step.run():
                return str(failed.message)
    except UserError as error:
        return str(error)
    raise AssertionError("it was built")


def set_config(**changes: Any) -> Damage:
    def damage(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def edit_tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Damage:
    def damage(model: Path) -> None:
        path = model / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def truncate(name: str, keep: float) -> Damage:
    def damage(model: Path) -> None:
        path = model / name
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])

    return damage


def write(name: str, text: str) -> Damage:
    return lambda model: (model / name).write_text(text)


def remove(name: str) -> Damage:
    return lambda model: (model / name).unlink()


def only_pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def shard_index(**entries: str) -> Damage:
    def damage(model: Path) -> None:
        names = load_file(model / "model.safetensors")
        weight_map = dict.fromkeys(names, "model.safetensors") | entries
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


NORM = "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj.weight"

CHECKPOINTS: dict[str, tuple[Damage, str]] = {
    "no_config": (remove("config.json"), "config.json"),
    "config_not_json": (write("config.json", "{"), "not valid JSON"),
    "config_cut_off": (truncate("config.json", 0.5), "): the checkpoint is incomplete or damaged, download it again"),
    "config_not_object": (
        write("config.json", "[]"),
        "must hold a JSON object, it holds a list: the checkpoint is incomplete or damaged",
    ),
    "config_not_utf8": (lambda m: (m / "config.json").write_bytes(b"\xff\xfe{}"), "not valid JSON"),
    "other_architecture": (set_config(architectures=["PhiForCausalLM"]), 'architectures = ["PhiForCausalLM"]'),
    "other_model_type": (set_config(model_type="phi"), 'model_type = "phi"'),
    "attention_bias": (set_config(attention_bias=True), "attention_bias = true"),
    "mlp_bias": (set_config(mlp_bias=True), "mlp_bias = true"),
    "other_activation": (set_config(hidden_act="gelu"), 'hidden_act = "gelu"'),
    "quantised": (
        set_config(quantization_config={"quant_method": "bitsandbytes"}),
        'quant_method = "bitsandbytes": only awq, ',
    ),
    "quantised_by_name_alone": (
        set_config(quantization_config={"quant_method": "fp8"}),
        'quant_method = "fp8": no tensor is quantised: take quantization_config out',
    ),
    "other_rope": (set_config(rope_scaling={"rope_type": "dynamic", "factor": 4.0}), '"dynamic"'),
    "rope_not_object": (set_config(rope_scaling=4), "rope_scaling = 4"),
    "rope_without_factor": (set_config(rope_scaling={"rope_type": "linear"}), "factor = null"),
    "zero_layers": (set_config(num_hidden_layers=0), "num_hidden_layers = 0"),
    "negative_size": (set_config(hidden_size=-64), "hidden_size = -64"),
    "size_is_text": (set_config(hidden_size="64"), 'hidden_size = "64"'),
    "heads_do_not_divide": (set_config(num_key_value_heads=3), "num_key_value_heads = 3"),
    "odd_head_dim": (set_config(head_dim=15), "head_dim = 15"),
    "end_token_outside": (set_config(eos_token_id=[1, 3000]), "eos_token_id = [1, 3000]"),
    "tied_is_text": (set_config(tie_word_embeddings="yes"), "tie_word_embeddings"),
    "no_tokenizer": (remove("tokenizer.json"), "no tokenizer.json"),
    "tokenizer_not_json": (truncate("tokenizer.json", 0.5), "tokenizer.json is not valid JSON"),
    "no_weights": (remove("model.safetensors"), "neither model.safetensors nor"),
    "only_pickle": (only_pickle, "pickle"),
    "empty_weights": (truncate("model.safetensors", 0), "is damaged"),
    "truncated_weights": (truncate("model.safetensors", 0.6), "is damaged"),
    "truncated_header": (truncate("model.safetensors", 0.001), "is damaged"),
    "corrupt_header": (lambda m: flip(m / "model.safetensors", 8), "is damaged"),
    "missing_tensor": (edit_tensors(lambda t: t.pop(NORM)), NORM),
    "no_architecture": (set_config(architectures=None, model_type="phi"), 'model_type = "phi"'),
    "no_type_but_a_list": (set_config(architectures=None, model_type=["llama"]), 'model_type = ["llama"]'),
    "neither_architecture_nor_type": (set_config(architectures=None, model_type=None), "model_type = null"),
    "unexpected_tensor": (edit_tensors(lambda t: t.update(bias=t[NORM])), "ignore=bias leaves it out"),
    "wrong_shape": (edit_tensors(lambda t: t.update({Q: t[Q][:-1].copy()})), Q),
    "wrong_dtype": (edit_tensors(lambda t: t.update({Q: t[Q].astype(np.float64)})), "F64"),
    "integer_dtype": (edit_tensors(lambda t: t.update({Q: t[Q].astype(np.int8)})), "I8"),
    "missing_shard": (
        shard_index(**{Q: "model-00002-of-00002.safetensors"}),
        "model-00002-of-00002.safetensors is miss",
    ),
    "shard_outside": (shard_index(**{Q: "../model.safetensors"}), "../model.safetensors"),
    "absolute_shard": (shard_index(**{Q: "/etc/passwd"}), "/etc/passwd"),
    "shard_index_not_json": (write("model.safetensors.index.json", "nope"), "not valid JSON"),
    "shard_index_empty": (write("model.safetensors.index.json", "{}"), "weight_map"),
    "shard_is_number": (shard_index(**{Q: 7}), "weight_map names 7"),  # type: ignore[arg-type]
}


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def test_tensors_that_may_be_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    edit_tensors(lambda t: t.update({"extra.one": t[NORM], "extra.two": t[NORM], "other": t[NORM]}))(tmp_path / "model")
    command = ("checkpoint", f"model={tmp_path / 'model'}", f"artifacts={tmp_path / 'artifacts'}")
    one_line(doit(*command, "ignore=extra.*"), "unexpected tensor other")
    assert doit(*command, "ignore=extra.*,other").returncode == 0


def test_the_model_type_will_do_for_an_architecture(tmp_path: Path) -> None:
    """As in transformers: some checkpoints have no `architectures`."""
    write_checkpoint(tmp_path / "model", architectures=None)
    command = ("checkpoint", f"model={tmp_path / 'model'}", f"artifacts={tmp_path / 'artifacts'}")
    assert doit(*command).returncode == 0


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bad_checkpoint(name: str, tmp_path: Path) -> None:
    damage, fragment = CHECKPOINTS[name]
    write_checkpoint(tmp_path / "model")
    damage(tmp_path / "model")
    message = refusal(model=tmp_path / "model", artifacts=tmp_path / "artifacts")
    assert fragment in message and "\n" not in message
    left = {
        p.relative_to(tmp_path / "artifacts/model/cpu").as_posix() for p in tmp_path.glob("artifacts/model/cpu/**/*")
    }
    assert not {name for name in left if name.startswith(("elf", "weights", "tokenizer", "manifest"))}
    assert not [p for p in (tmp_path / "artifacts").rglob("*") if ".tmp-" in p.name]


REFUSED = ("other_architecture", "config_not_json", "truncated_weights", "no_tokenizer")
RUNNERS = [(), ("-n", "0"), ("-n", "2", "-P", "process")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("runner", RUNNERS, ids=["serial", "process", "thread"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_leaves_nothing(name: str, runner: tuple[str, ...], tmp_path: Path) -> None:
    """Also where other steps ran beside the one that refused it: what these left in shared caches may stay."""
    damage, fragment = CHECKPOINTS[name]
    write_checkpoint(tmp_path / "model")
    damage(tmp_path / "model")
    artifacts = tmp_path / "below/artifacts"
    command = ("run", *runner, "prompt=hi", f"model={tmp_path / 'model'}", f"artifacts={artifacts}")
    one_line(doit(*command), fragment)
    if not runner and name != "no_tokenizer":
        assert not artifacts.parent.exists()
    assert not (artifacts / "model").exists() and not (artifacts / ".locks/model-cpu.lock").exists()


def test_a_refused_model_leaves_what_was_there(tmp_path: Path) -> None:
    """Artifacts of another target or another model stay, and so does an empty directory."""
    write_checkpoint(tmp_path / "model")
    CHECKPOINTS["other_architecture"][0](tmp_path / "model")
    artifacts = tmp_path / "artifacts"
    before = ("model/cpu-int4/manifest.json", "other/cpu/manifest.json", ".locks/model-cpu.lock")
    for name in before:
        (artifacts / name).parent.mkdir(parents=True)
        (artifacts / name).write_text("{}")
    command = ("run", "prompt=hi", f"model={tmp_path / 'model'}", f"artifacts={artifacts}")
    for _ in range(2):
        one_line(doit(*command), "PhiForCausalLM")
        assert set(snapshot(artifacts)) - {".digests.json"} == set(before)
        assert not (artifacts / "model/cpu/build").exists()
        (artifacts / "model/cpu").mkdir(exist_ok=True)
    assert (artifacts / "model/cpu").is_dir()


def test_a_refused_change_leaves_the_build(built: Path) -> None:
    before = snapshot(built / "artifacts/model")
    CHECKPOINTS["other_architecture"][0](built / "model")
    one_line(doit("run", "prompt=hi", "model=model", cwd=built), "PhiForCausalLM")
    assert snapshot(built / "artifacts/model") == before


def test_a_step_by_itself_stays(tmp_path: Path) -> None:
    """Nothing failed, although no model is accepted yet."""
    write_checkpoint(tmp_path / "model")
    ran(doit("checkpoint", f"model={tmp_path / 'model'}", f"artifacts={tmp_path / 'artifacts'}"))
    assert (tmp_path / "artifacts/model/cpu/build/receipts/checkpoint.json").is_file()


COMMAND_LINES: dict[str, tuple[tuple[str, ...], str]] = {
    "misspelt_variable": (("run", "prmpt=hi"), "did you mean prompt="),
    "unknown_variable": (("run", "zzz=1"), "zzz= is not a variable"),
    "unknown_target": (("compile", "target=cpuu"), "target=cpuu: choose one of cpu, npu2, npu2-sim"),
    "number_is_text": (("run", "prompt=hi", "max_tokens=many"), "max_tokens=many"),
    "not_for_this_command": (("run", "prompt=hi", "keep=14d"), "keep= is for doit gc"),
    "not_for_a_machine": (("doctor", "temperature=1"), "temperature= is for doit run, chat"),
    "not_for_a_list": (("list", "seed=1"), "seed= is for doit run, chat"),
    "misspelt_command": (("cmopile",), "cmopile is neither a command nor a step: did you mean compile?"),
    "misspelt_model": (("compile", "model=deom"), "model=deom: no such directory or GGUF file: did you mean demo?"),
    "negative_tokens": (("run", "prompt=hi", "max_tokens=-1"), "max_tokens=-1"),
    "negative_temperature": (("run", "prompt=hi", "temperature=-0.1"), "temperature=-0.1"),
    "nan_temperature": (("run", "prompt=hi", "temperature=nan"), "temperature=nan"),
    "top_p_zero": (("run", "prompt=hi", "top_p=0"), "top_p=0"),
    "top_k_negative": (("run", "prompt=hi", "top_k=-2"), "top_k=-2"),
    "raw_is_text": (("run", "prompt=hi", "raw=maybe"), "raw=maybe"),
    "no_calibration_text": (
        ("compile", "weights=int4", "calibrate=gone.txt"),
        "calibrate=gone.txt: there is no",
    ),
    "nothing_to_calibrate": (("compile", "weights=int8", "calibrate=default"), "can use it: choose int4, int6"),
    "nothing_to_include": (("push", "include=all"), "include=all: must be weights"),
    "no_remote": (("pull",), "no remote: name one, as in remote=file:///mnt/shared"),
    "unknown_cache": (("compile", "cache=nope://x"), "remote nope://x: Protocol not known: nope: give a directory"),
    "unknown_kv": (("compile", "kv=int4"), "kv=int4: choose one of bf16, int8"),
    "unknown_matmul": (("compile", "target=npu2", "npu.matmul=fp8"), "npu.matmul=fp8: choose one of bf16, bfp16"),
    "unknown_grouping": (
        ("compile", "target=npu2-sim", "npu.grouping=spec"),
        "npu.grouping=spec: target npu2-sim has separate, ",
    ),
    "no_repeats": (("bench", "repeats=0"), "repeats=0: must be at least 1"),
    "no_such_model": (("compile", "model=/no/such/directory"), "/no/such/directory"),
    "unknown_random": (("compile", "model=random:llama-9"), "random:llama-9"),
    "key_of_nobody": (("trust", "key=nonsense"), "is no Ed25519 key"),
    "remove_nobody": (("trust", "remove=nobody"), "no trusted key is called nobody"),
    "model_name_of_nothing": (("compile", "model=llama"), "model=llama"),
    "model_is_a_file": (("run", "prompt=hi", "model=README.md"), "not one that ends in .gguf: give the directory that"),
    "model_is_a_file_of_a_checkpoint": (
        ("run", "prompt=hi", "model=models/demo/model.safetensors"),
        "give the directory that holds it, models/demo",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", COMMAND_LINES)
def test_bad_command_line(name: str, tmp_path: Path) -> None:
    arguments, fragment = COMMAND_LINES[name]
    one_line(doit(*arguments, f"artifacts={tmp_path}"), fragment)
    assert list(tmp_path.iterdir()) == []


TOOLS = "target npu2 needs aircc, aiecc, Peano, AIE API headers"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("command", "target", "said"),
    [("run", "npu2", TOOLS), ("bench", "npu2", TOOLS), ("selftest", "npu2", TOOLS), ("run", "cpu", "CXX=")],
)
def test_missing_tools_are_said_before_any_step_runs(command: str, target: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    nothing = dict.fromkeys(("PEANO_INSTALL_DIR", "AIE_API_INCLUDE", "CXX", "PATH"), str(tmp_path / "empty"))
    run = doit(command, f"target={target}", f"artifacts={tmp_path / 'artifacts'}", env=nothing)
    assert run.returncode != 0 and run.stderr.startswith(f"error: {said}") and run.stderr.count("\n") == 1
    assert not (tmp_path / "artifacts").exists()


PROMPTS: dict[str, tuple[str, bytes, str]] = {
    "none": ("prompts.txt", b" \n\n", "the file has no prompt"),
    "not_utf8": ("prompts.txt", b"caf\xe9\n", "give a text file with a prompt per line"),
    "not_json": ("prompts.jsonl", b'{"prompt": "a"}\n{\n', "line 2: "),
    "not_an_object": ("prompts.jsonl", b"[]\n", "line 1: it = [] must be an object"),
    "no_prompt": ("prompts.jsonl", b'{"text": "a"}\n', "must be an object with prompt"),
    "blank_prompt": ("prompts.jsonl", b'{"prompt": " \\n"}\n', "must be some text"),
    "half_a_character": ("prompts.jsonl", b'{"prompt": "\\ud800"}\n', "must be some text"),
    "number_as_id": ("prompts.jsonl", b'{"prompt": "a", "id": 3}\n', "id = 3 must be one line"),
    "id_of_two_lines": ("prompts.jsonl", b'{"prompt": "a", "id": "b\\nc"}\n', "must be one line"),
    "same_id": (
        "prompts.jsonl",
        b'{"prompt": "a", "id": "2"}\n{"prompt": "b"}\n',
        "line 2: id 2 is taken by another prompt",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_bad_prompts(name: str, tmp_path: Path) -> None:
    file, content, fragment = PROMPTS[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_prompts(tmp_path / file)
    assert str(raised.value).startswith(f"prompts={tmp_path / file}: ") and fragment in str(raised.value)


def test_missing_prompts_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_prompts(tmp_path / "gone")


def runtime(directory: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command, arguments = ("run", arguments) if arguments[:1] != ("chat",) else ("chat", arguments[1:])
    line = [sys.executable, "-m", "runtime", command, str(directory), *arguments]
    return forked.run(line, cwd=ROOT, input=stdin, timeout=120)


RUNTIME: dict[str, tuple[tuple[str, ...], str]] = {
    "no_prompt": ((), "no prompt"),
    "empty_prompt": (("",), "prompt is empty"),
    "long_prompt": (("word " * 9000,), "context is"),
    "bad_temperature": (("hi", "--temperature=-1"), "--temperature=-1"),
    "bad_tokens": (("hi", "--max-tokens=0"), "--max-tokens=0: must be at least 1"),
    "bad_bias": (("hi", "--logit-bias=the:1"), "--logit-bias=the:1: must be a token's number, a colon"),
    "logprobs_without_json": (("hi", "--n=2", "--logprobs=1"), "--logprobs=1: not for one text"),
    "replies_of_a_chat": (("chat", "--n=2"), "--n is for llama-npu2 run"),
    "no_draft": (("hi", "--draft=nowhere"), "nowhere is not a directory"),
    "bad_threads": (("hi", "--threads=-3"), "--threads=-3: must be at least 0"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RUNTIME)
def test_bad_runtime_call(name: str, demo: Path) -> None:
    arguments, fragment = RUNTIME[name]
    one_line(runtime(demo, *arguments), fragment)


def edit_manifest(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda directory: change_manifest(directory, change)


def garbage(name: str) -> Damage:
    """Other bytes of the same size."""
    return lambda directory: (directory / name).write_bytes(bytes((directory / name).stat().st_size))


ARTIFACTS: dict[str, tuple[Damage, str]] = {
    "not_a_directory": (shutil.rmtree, "is not a directory"),
    "no_manifest": (remove("manifest.json"), "no manifest.json"),
    "manifest_not_json": (truncate("manifest.json", 0.5), "cannot be read"),
    "manifest_is_list": (write("manifest.json", "[]"), "not a manifest"),
    "manifest_from_the_future": (edit_manifest(lambda m: m.update(format=99)), "format 99"),
    "manifest_of_an_older_release": (edit_manifest(lambda m: m.update(format=1)), "run doit compile"),
    "unknown_device": (edit_manifest(lambda m: m["target"].update(device="gpu")), "gpu"),
    "device_outside": (edit_manifest(lambda m: m["target"].update(device="../os")), "../os"),
    "manifest_lacks_section": (edit_manifest(lambda m: m.pop("plans")), "must be an object with plans"),
    "other_machine": (edit_manifest(lambda m: m["target"].update(machine="riscv64")), "riscv64"),
    "missing_blob": (remove("weights/layer_000.safetensors"), "layer_000.safetensors is missing"),
    "truncated_blob": (truncate("weights/layer_000.safetensors", 0.5), "bytes instead of"),
    "missing_program": (remove("elf/o_ffn.so"), "o_ffn.so is missing"),
    "garbage_program": (garbage("elf/o_ffn.so"), "o_ffn.so is not what was built"),
    "garbage_tokenizer": (garbage("tokenizer/tokenizer.json"), "tokenizer.json is not what was built"),
    "plan_names_no_program": (
        edit_manifest(lambda m: m["programs"].pop("o_ffn")),
        "for o_ffn, which is not among",
    ),
    "plan_names_no_buffer": (
        edit_manifest(lambda m: m["buffers"].pop("swiglu")),
        "for swiglu, which is not among",
    ),
    "plan_lacks_a_slot": (
        edit_manifest(lambda m: m["plans"]["decode"][1]["buffers"].pop()),
        "binds 15 buffers to 16",
    ),
    "weight_outside_its_file": (
        edit_manifest(lambda m: m["buffers"]["model.norm.weight"].update(offset=1 << 40)),
        "lies outside",
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ARTIFACTS)
def test_bad_artifacts(name: str, demo: Path, tmp_path: Path) -> None:
    damage, fragment = ARTIFACTS[name]
    copy = shutil.copytree(demo, tmp_path / "cpu")
    damage(copy)
    one_line(runtime(copy, "hi"), fragment)


def test_artifacts_cannot_be_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    (tmp_path / "artifacts").write_text("a file where a directory must go")
    run = doit("compile", f"model={tmp_path / 'model'}", f"artifacts={tmp_path / 'artifacts'}")
    one_line(run, str(tmp_path / "artifacts"))


def test_disk_full(built: Path) -> None:
    """A file size limit stands for a full disk: the repack fails in one line and nothing of the old build is lost."""
    before = snapshot(built / "artifacts/model/cpu")
    write_checkpoint(built / "model", seed=1, vocab_size=300)
    limited = "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); "
    limited += "sys.argv = ['doit', 'compile', 'model=model']; sys.path.insert(0, ''); "
    limited += "runpy.run_module('doit', run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", limited], cwd=built, capture_output=True, text=True)
    one_line(run, "cannot build weights: a file would be larger than 19.5 KiB, see ulimit -f: raise that, or")
    after = snapshot(built / "artifacts/model/cpu")
    unchanged = {name for name in before if not name.startswith("build/")}
    assert {name: after.get(name) for name in unchanged} == {name: before[name] for name in unchanged}
    assert doit("compile", "model=model", cwd=built).returncode == 0


def test_failed_rebuild_keeps_the_old_artifacts(built: Path) -> None:
    before = snapshot(built / "artifacts/model/cpu")
    truncate("model.safetensors", 0.5)(built / "model")
    one_line(doit("compile", "model=model", cwd=built), "is damaged")
    after = snapshot(built / "artifacts/model/cpu")
    assert after == before


def test_compiler_error_is_one_line(built: Path) -> None:
    source = built / "kernel_src/cpu/rope.cc"
    source.write_text("int broken(\n")
    one_line(doit("compile", "model=model", cwd=built), "rope.cc does not compile")
    assert doit("run", "prompt=hi", "model=model", cwd=built).returncode != 0


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_npu2.errors import UserError
    from stages.targets.cpu import toolchain

    monkeypatch.setattr(toolchain, "host_compiler", lambda: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="no C\\+\\+ compiler found: install one"):
        toolchain.need_host_compiler()


def test_missing_compiler_named_by_environment(built: Path) -> None:
    source = built / "kernel_src/cpu/rope.cc"
    source.write_text(source.read_text() + "\n")
    run = doit("compile", "model=model", cwd=built, env={"CXX": "/no/such/compiler"})
    one_line(run, "CXX=/no/such/compiler")


def test_hub_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real download code against a hub that cannot be reached."""
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(tmp_path / "hf")}
    one_line(doit("compile", "model=some/model", f"artifacts={tmp_path / 'a'}", env=env), "some/model")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("error", "fragment"),
    [
        ("GatedRepoError", "accept its licence"),
        ("RepositoryNotFoundError", "does not exist or is private"),
        ("RevisionNotFoundError", "no such revision"),
        ("LocalEntryNotFoundError", "cannot be reached"),
    ],
)
def test_hub_refusals(error: str, fragment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    from llama_npu2.errors import UserError
    from stages.model.sources import HubSource

    kind = getattr(errors, error)

    def refuse(*_: Any, **__: Any) -> str:
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match=fragment) as caught:
        HubSource("meta-llama/Llama-3.2-1B", "main").fetch()
    assert "\n" not in str(caught.value)


def test_hub_cache_on_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    from stages.model.sources import HubSource

    def fill(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fill)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    said = rf"org/name \(revision main\): the disk is full: .* free in {tmp_path} .*, or set HF_HOME to another place$"
    with pytest.raises(UserError, match=said):
        HubSource("org/name", "main").fetch()


def test_hub_download_asks_for_just_the_files_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fnmatch

    import huggingface_hub

    from llama_npu2.errors import UserError
    from stages.model.sources import HubSource, resolve

    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match=r"org/name has no config.json: .* as org/name/NAME.gguf$"):
        HubSource("org/name", "v1").fetch()
    (tmp_path / "config.json").write_text("{}")
    assert HubSource("org/name", "v1").fetch() == tmp_path
    wanted = [
        file
        for file in (
            "config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "original/consolidated.00.pth",
            "pytorch_model.bin",
            "tokenizer.json",
            "USE_POLICY.md",
        )
        if any(fnmatch.fnmatch(file, pattern) for pattern in asked["allow_patterns"])
    ]
    assert (asked["repo"], asked["revision"]) == ("org/name", "v1")
    assert wanted == ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json"]
    one = resolve("org/name-GGUF/Q8_0/some-00002-of-00002.gguf", tmp_path / "artifacts", "v1")
    assert one.name == "org--name-GGUF--Q8_0--some"
    with pytest.raises(UserError, match=r"has no file Q8_0/some-00002-of-00002\.gguf: check the name"):
        one.fetch()
    (tmp_path / "Q8_0").mkdir()
    (tmp_path / "Q8_0/some-00001-of-00002.gguf").touch()
    assert one.fetch() == tmp_path / "Q8_0/some-00001-of-00002.gguf"
    assert asked["repo"] == "org/name-GGUF"
    assert asked["allow_patterns"] == [f"Q8_0/some-0000{number}-of-00002.gguf" for number in (1, 2)]
