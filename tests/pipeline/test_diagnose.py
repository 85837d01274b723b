"""`doit diagnose`: faults put into single calls are named, right artifacts are not; what it prints and writes.

Kernels that are wrong themselves are in `test_diagnose_faults.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doit.exceptions import TaskFailed
from ml_dtypes import bfloat16

from llama_npu2 import Llama, UserError, load
from llama_npu2.artifact.plan import DECODE
from llama_npu2.devices import Submission
from stages.commands import diagnose as command
from stages.engine.places import KERNELS
from stages.graph import Build
from stages.graph.options import parse_options
from stages.kernels.append_kv import reference_panels, rows_of_panels
from stages.proof.comparison import transformers_model
from stages.proof.diagnosis.bounds import in_fixed_point, ulp
from stages.proof.diagnosis.diagnose import diagnose, inside
from stages.proof.diagnosis.ops import Op, ops
from stages.proof.diagnosis.report import Report, compared
from stages.weights.formats import formats
from tests.conftest import ODD_WIDTHS, build, of_command_line, write_checkpoint
from tests.pipeline.test_diagnose_faults import ARRAY, HOST, ON_GEMMA
from tests.support.browser import Look
from tests.support.faults import ON_ARRAY, ON_HOST, Fault, Tampered, not_a_number, sign

NO_PACKAGES = "torch and transformers are not installed"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Launches are judged without transformers, and nothing is built to look inside fused ones."""
    monkeypatch.setattr("stages.proof.diagnosis.diagnose.inside", lambda *_: [])

    def missing(*_: Any) -> None:
        raise UserError(NO_PACKAGES)

    if not request.node.get_closest_marker("verify"):
        monkeypatch.setattr(transformers_model, "layer_outputs", missing)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tmp_path_factory.mktemp("diagnosed") / "diagnosed"
    write_checkpoint(checkpoint, **ODD_WIDTHS)
    return checkpoint


def built(model: Path | str, artifacts: Path, **variables: str) -> Build:
    given = {"target": "cpu", **variables}
    build(model, artifacts, **given)
    return Build(parse_options({"model": str(model), "artifacts": str(artifacts), **of_command_line(given)}))


@pytest.fixture(scope="module")
def host(odd: Path, artifacts: Path) -> Build:
    return built(odd, artifacts)


@pytest.fixture(scope="module")
def array(artifacts: Path) -> Build:
    return built("demo", artifacts, target="npu2-sim", buckets="64,128")


def found(build: Build, change: Callable[[Llama], object] = lambda llm: None) -> Report:
    with contextlib.closing(load(build.directory)) as llm:
        change(llm)
        return diagnose(build, llm)


@pytest.fixture(scope="module")
def grouped(odd: Path, artifacts: Path) -> Build:
    return built(odd, artifacts, weights="int4", kv="int8")


@pytest.mark.parametrize("which", ["host", "array", pytest.param("grouped", marks=pytest.mark.thorough)])
def test_no_fault_is_found_where_there_is_none(which: str, request: pytest.FixtureRequest) -> None:
    report = found(request.getfixturevalue(which))
    assert report.passed and not report.layers and NO_PACKAGES in report.without_layers, report.verdict
    assert (
        report.verdict == f"diagnose: no fault found: all {len(report.findings)} launches agree with their references"
    )
    assert all(finding.elements for finding in report.findings)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", ON_HOST, ids=str)
def test_a_fault_in_one_call_is_named(host: Build, fault: Fault) -> None:
    named(host, fault)


def test_where_numbers_end_is_named(host: Build) -> None:
    """Logits that are no numbers have no likelihood, which says nothing of where that began."""
    named(host, Fault(not_a_number, "logits@64", "rms_norm", None))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ON_ARRAY, ids=str)
def test_a_fault_in_one_call_of_the_array_is_named(array: Build, fault: Fault) -> None:
    named(array, fault)


def named(build: Build, fault: Fault) -> None:
    where: list[Op] = []
    report = found(build, lambda llm: where.append(fault(build, llm)))
    first = report.wrong[0].op
    assert (first.phase, first.call, first.index) == (where[0].phase, where[0].call, where[0].index), report.verdict
    place = "outside of the layers" if fault.layer is None else f"layer {fault.layer}"
    assert report.verdict.startswith(f"diagnose: FAULT in launch {first.index + 1} of {first.program}, {place}")


def test_values_around_the_worst_are_shown(host: Build) -> None:
    """One element is wrong, and everything else right."""

    def one(values: np.ndarray) -> None:
        values[..., 7] += values.dtype.type(64)

    report = found(host, lambda llm: Fault(one, "decode", "gemv_add", 1)(host, llm))
    worst = report.wrong[0].worst
    assert worst and worst.index == (7,) and worst.first == 4 and worst.slot == "res1"
    apart = np.subtract(worst.ours, worst.reference)
    assert np.abs(apart[3] - 64) < 1 and not apart[[0, 1, 2, 4, 5, 6]].any()


def test_what_is_left_in_a_cache_hides_nothing(host: Build) -> None:
    """A row that is not written holds what a run before left there: the right one."""

    def unwritten(llm: Llama) -> None:
        at = ops(host, llm.manifest)[DECODE]
        call = next(op.call for call in at for op in call if op.kernel.name == "append_kv_panels")
        llm.prefill(range(30, 78))
        kept = llm.memory.array("k_cache.0").copy()
        prepare, cut = llm.device.prepare, llm.calls[DECODE][call]

        def prepared(calls: list[Any]) -> Submission:
            made = prepare(calls)
            return (
                Tampered(made, put_back, llm.memory.array("k_cache.0"), list(kept.shape)) if calls[0] is cut else made
            )

        def put_back(values: np.ndarray) -> None:
            values[...] = before

        before = kept
        llm.device.prepare = prepared

    first = found(host, unwritten).wrong[0].op
    assert (first.kernel.name, first.phase, first.layer) == ("append_kv_panels", DECODE, 0)


@pytest.mark.verify
def test_layers_are_compared_with_transformers(host: Build) -> None:
    pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    report = found(host)
    assert report.passed, report.verdict
    assert [(layer.layer, layer.part) for layer in report.layers] == [
        (i, p) for i in (0, 1) for p in ("prompt", "tokens")
    ]
    assert all(layer.ours.error > 0 and layer.times < 1.5 and layer.ours.cosine > 0.999 for layer in report.layers)


def test_a_layer_drifts_where_it_is_further_off_than_a_bit() -> None:
    rng = np.random.default_rng(1)
    exact = rng.standard_normal((8, 64))
    noise = rng.standard_normal((8, 64)) * 2.0**-9

    def layer(times: float, bounded: bool = True) -> Any:
        return compared(0, list(exact + times * noise), [exact, exact + noise], None, 6, bounded)

    assert [part.drifts for part in layer(1.9)] == [False, False]
    assert [part.drifts for part in layer(2.1)] == [True, True]
    assert [part.drifts for part in layer(2.1, bounded=False)] == [False, False]
    assert layer(float("nan"))[0].drifts, "no number is no reason to pass"


def test_a_report_is_printed_and_written(
    host: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], look_at: Look
) -> None:
    """Of a fault in a fused launch: it is looked into, and the page looked at in a browser."""
    monkeypatch.setattr("stages.proof.diagnosis.diagnose.inside", inside)
    monkeypatch.setattr(command, "load", lambda *given: tampered(host))
    to = Build(
        parse_options(
            {"model": host.options.model, "artifacts": host.options.artifacts, "target": "cpu", "output": str(tmp_path)}
        )
    )
    assert isinstance(command.run(to), TaskFailed)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2].startswith(
        "diagnose: FAULT in launch 3 of o_ffn, layer 1, prefill: gemm_silu(normed2, w_gate, w_up) -> swiglu: off by"
    )
    assert printed[-1] == str(tmp_path / "diagnose.html")
    content = json.loads((tmp_path / "diagnose.json").read_text())
    alone = ["gemm", "add", "rms_norm", "gemm", "gemm", "silu_and_mul", "gemm", "add"]
    assert [(launch["kernel"], launch["wrong"]) for launch in content["unfused"]] == [(name, "") for name in alone]
    assert "  silu_and_mul(gate, up) -> swiglu: right" in printed
    assert content["first_launch"]["kernel"] == "gemm_silu" and content["first_launch"]["layer"] == 1
    assert not content["passed"] and content["not_run"] == ["prefill_chunk"]
    assert look_at(tmp_path / "diagnose.html") == []


def tampered(build: Build) -> Llama:
    llm = load(build.directory)
    Fault(sign, "prefill", "gemm_silu", 1)(build, llm)
    return llm


def test_every_phase_is_run_if_asked_for(host: Build) -> None:
    full = Build(
        parse_options({"model": host.options.model, "artifacts": host.options.artifacts, "target": "cpu", "full": "1"})
    )
    with contextlib.closing(load(full.directory)) as llm:
        assert diagnose(full, llm).passed


@pytest.mark.parametrize("stored", ["bf16", "int8_rows"])
@pytest.mark.parametrize("positions, head_dim", [(1, 2), (130, 10), (256, 64)])
def test_rows_come_back_out_of_panels(stored: str, positions: int, head_dim: int) -> None:
    k, v = (np.random.default_rng(s).standard_normal((positions, 3, head_dim)).astype(bfloat16) for s in (0, 1))
    panels = reference_panels(k, v, stored)
    for rows, given in zip(rows_of_panels(*panels, head_dim, positions, stored), (k, v), strict=True):
        form = formats()[stored]
        np.testing.assert_array_equal(rows, form.dequantise(form.quantise(given), head_dim))


def test_units_in_the_last_place() -> None:
    values = np.array([1, 1.5, 2, -3, 2.0**-20, 0], np.float32)
    np.testing.assert_array_equal(ulp(values)[:5], np.float32([2.0**-7, 2.0**-7, 2.0**-6, 2.0**-6, 2.0**-27]))
    assert ulp(values)[5] > 0


def test_fixed_point_keeps_fifteen_bits() -> None:
    x = np.array([1.9921875, 2.0**-7, 2.0**-14 * 1.5, 0], bfloat16)
    np.testing.assert_array_equal(in_fixed_point(x), np.float32([1.9921875, 2.0**-7, 2.0**-13, 0]))


def test_faults_are_of_the_code_as_it_is() -> None:
    """To try the faults of `test_diagnose_faults` takes minutes. One whose text is gone would be noticed by nobody."""
    for kernels, faults in (("cpu", HOST), ("aie2p", [*ARRAY, *ON_GEMMA])):
        for fault in faults:
            assert fault.old in (KERNELS / kernels / fault.file).read_text(), fault
