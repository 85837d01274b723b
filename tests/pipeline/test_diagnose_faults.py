"""Kernels made wrong by a sign, an index, a rounding or a scale, compiled and run: `doit diagnose` names the launch."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llama_npu2 import load
from stages.graph import Build
from stages.graph.options import parse_options
from stages.proof.diagnosis.diagnose import diagnose
from stages.proof.diagnosis.report import Report
from tests.conftest import doit, write_checkpoint

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Fault:
    """`old` in a file of `kernel_src` becomes `new`. `found`: kernel, phase and layer (from 0) of the first launch that
    is wrong; `variables`: of the build."""

    kind: str
    file: str
    old: str
    new: str
    found: tuple[str, str, int | None]
    variables: tuple[str, ...] = ()
    model: str = ""
    """Empty for a Llama."""

    def __str__(self) -> str:
        return f"{self.kind} in {self.file}: {self.found[0]}{''.join(f' {each}' for each in self.variables)}"


def cut_off(to: str, value: str, count: str) -> str:
    """C++ of the host that stores a vector in bf16 with the lower half of each value cut off."""
    lower = "static_cast<bf16>(((u32v)cut)[j] >> 16)"
    return f"{{ const f32v cut = {value}; for (int64_t j = 0; j < lanes && j < {count}; j++) ({to})[j] = {lower}; }}"


FIRST = ("prefill", 0)
CONVOLVED = "convolved"
ONE_LAYER = ("weights=bf16,w_down.1=int8",)

HOST = [
    Fault("sign", "rope.cc", "a * cosine - b * sine", "a * cosine + b * sine", ("rope", *FIRST)),
    Fault("index", "rope.cc", "table + i / heads * head_dim", "table + (i / heads + 1) * head_dim", ("rope", *FIRST)),
    Fault(
        "rounding",
        "rope.cc",
        "store_bf16(out + d, a * cosine - b * sine, count);",
        cut_off("out + d", "a * cosine - b * sine", "count"),
        ("rope", *FIRST),
    ),
    Fault("scale", "norm.h", "static_cast<float>(cols);", "static_cast<float>(cols + 1);", ("rms_norm", *FIRST)),
    Fault("sign", "norm.h", "* (load_bf16(weight + i", "* (-load_bf16(weight + i", ("rms_norm", *FIRST)),
    Fault(
        "rounding",
        "norm.h",
        "(once ? normal : to_float(to_bf16(normal)))",
        "normal",
        ("rms_norm", *FIRST),
    ),
    Fault("index", "append_kv_panels.h", "= v[d];", "= v[d ^ 1];", ("append_kv_panels", *FIRST)),
    Fault(
        "index",
        "append_kv_panels.h",
        "offset = p % kv_block_positions",
        "offset = (p ^ 1) % kv_block_positions",
        ("append_kv_panels", *FIRST),
    ),
    Fault(
        "scale",
        "attention_core.h",
        "log2_e / sqrtf(scalar)",
        "log2_e / sqrtf(scalar + 1)",
        ("flash_attention_panels", *FIRST),
    ),
    Fault(
        "rounding",
        "attention_core.h",
        "store_bf16(out + d, load<f32v>(total + d) * scale, head_dim - d);",
        cut_off("out + d", "load<f32v>(total + d) * scale", "head_dim - d"),
        ("flash_attention_panels", *FIRST),
    ),
    Fault(
        "rounding",
        "kv_format.h",
        "store_bf16(out + i, weight);",
        cut_off("out + i", "weight", "lanes"),
        ("flash_attention_panels", *FIRST),
    ),
    Fault(
        "index",
        "decode_attention.h",
        "attend(tile, shape, kv, pos, task, following)",
        "attend(tile, shape, kv, pos - 1, task, following)",
        ("decode_attention_panels", "decode", 0),
    ),
    Fault(
        "index",
        "gemm.cc",
        "const bf16 *weights[] = {weight};\n    Gemm<StoreBf16>",
        "const bf16 *weights[] = {weight + 2};\n    Gemm<StoreBf16>",
        ("gemm_qkv", *FIRST),
    ),
    Fault(
        "sign",
        "epilogue.h",
        "rounded(sums + i) + load_bf16(residual",
        "rounded(sums + i) - load_bf16(residual",
        ("gemm_add", *FIRST),
    ),
    Fault(
        "rounding",
        "epilogue.h",
        "rounded(sums + i) + load_bf16(residual",
        "load<f32v>(sums + i) + load_bf16(residual",
        ("gemm_add", *FIRST),
    ),
    Fault(
        "index",
        "epilogue.h",
        "gated(rounded(sums + i), rounded(sums + group_columns + i), activation)",
        "gated(rounded(sums + group_columns + i), rounded(sums + i), activation)",
        ("gemm_silu", *FIRST),
    ),
    Fault(
        "rounding",
        "epilogue.h",
        "store_bf16(o + i, to.bias == nullptr ? sum : sum + load_bf16(to.bias + column + i, count - i), count - i);",
        cut_off("o + i", "sum", "count - i"),
        ("gemm_qkv", *FIRST),
    ),
    Fault(
        "index",
        "gemm.cc",
        "const bf16 *weights[] = {weight};\n    Gemm<StoreF32>",
        "const bf16 *weights[] = {weight + 2};\n    Gemm<StoreF32>",
        ("gemm_f32", "logits@64", None),
    ),
    Fault("scale", "epilogue.h", "o[i] = sums[i];", "o[i] = sums[i] * 1.001f;", ("gemv_f32", "prefill", None)),
    Fault(
        "index",
        "gemv.cc",
        "gemv_panels(weights, x, out_cols, cols, AddResidual{residual, out",
        "gemv_panels(weights, x, out_cols, cols, AddResidual{residual + 1, out",
        ("gemv_add", "decode", 0),
    ),
    Fault(
        "index",
        "short_conv.cc",
        "load_bf16(weight + t * cols + c, count)",
        "load_bf16(weight + (taps - t) * cols + c, count)",
        ("short_conv", *FIRST),
        model=CONVOLVED,
    ),
    Fault(
        "index",
        "short_conv.cc",
        "oldest = pos + r",
        "oldest = pos / 2 + r",
        ("short_conv", "decode", 0),
        model=CONVOLVED,
    ),
    Fault("rounding", "short_conv.cc", "to_float(to_bf16(sum))", "sum", ("short_conv", *FIRST), model=CONVOLVED),
    Fault("index", "embed.cc", "token = tokens[row];", "token = tokens[row] ^ 1;", ("embed", "prefill", None)),
    Fault(
        "rounding",
        "fixed_point.h",
        "nearest(load_bf16(x + i, count - i) * fixed.inverse)",
        "__builtin_convertvector(load_bf16(x + i, count - i) * fixed.inverse, i32v)",
        ("int8_gemm_add", "prefill", 1),
        ONE_LAYER,
    ),
    Fault(
        "index",
        "grouped_kernels.h",
        "{bytes(weight)};\n    GroupedGemm<FORMAT, AddResidual>",
        "{bytes(weight) + 16};\n    GroupedGemm<FORMAT, AddResidual>",
        ("int8_gemm_add", "prefill", 1),
        ONE_LAYER,
    ),
    Fault(
        "index",
        "grouped_kernels.h",
        "{bytes(weight)};\n    GroupedGemv<FORMAT, AddResidual>(weights, out_cols, cols, {residual",
        "{bytes(weight)};\n    GroupedGemv<FORMAT, AddResidual>(weights, out_cols, cols, {residual + 1",
        ("int8_gemv_add", "decode", 1),
        ONE_LAYER,
    ),
]
"""Of target cpu."""

NPU_INT4 = ("weights=int4",)
PROMPT = ("prefill@64", 0)
FLOOR = "aie::tile::current().set_rounding(aie::rounding_mode::floor)"

ARRAY = [
    Fault(
        "index",
        "short_conv.cc",
        "seen + (ROWS + r) * COLS + c",
        "seen + r * COLS + c",
        ("short_conv", *PROMPT),
        model=CONVOLVED,
    ),
    Fault(
        "sign",
        "short_conv.cc",
        "sum = aie::mac(sum, now,",
        "sum = aie::msc(sum, now,",
        ("short_conv", *PROMPT),
        model=CONVOLVED,
    ),
    Fault("sign", "add.cc", "aie::add(wide,", "aie::sub(wide,", ("add", *PROMPT)),
    Fault("scale", "rms_norm.h", "(1.0f / Cols) + eps", "(1.0f / (Cols + 1)) + eps", ("rms_norm", *PROMPT)),
    Fault(
        "sign",
        "rope.h",
        "aie::mac(aie::mac(product(second, cos), first, sin.hi)",
        "aie::mac(aie::msc(product(second, cos), first, sin.hi)",
        ("rope_q", *PROMPT),
    ),
    Fault("rounding", "rope.cc", "use_nearest_even()", FLOOR, ("rope_q", *PROMPT)),
    Fault("index", "gemm.cc", "b + n % WIDE * COLUMN", "b + (n + 1) % WIDE * COLUMN", ("gemm", *PROMPT)),
    Fault(
        "rounding",
        "gemm.cc",
        "use_nearest_even();\n    bfloat16 *out",
        f"{FLOOR};\n    bfloat16 *out",
        ("gemm", *PROMPT),
    ),
    Fault("rounding", "gemv.cc", "use_nearest_even()", FLOOR, ("gemv", "decode", 0)),
    Fault("index", "gemv.cc", "spread(x + k)", "spread(x + (k ^ EDGE))", ("gemv", "decode", 0)),
    Fault("scale", "silu.h", "halves_of(LOG2E)", "halves_of(1.4375f)", ("silu_and_mul", *PROMPT)),
    # As the core's own exponential has it.
    Fault("fit", "exp2.h", "{11394, 3706, 1284}", "{16384, 0, 0}", ("flash_attention", *PROMPT)),
    Fault(
        "index",
        "silu_and_mul.cc",
        "(gate + i, up + i, out + i)",
        "(up + i, gate + i, out + i)",
        ("silu_and_mul", *PROMPT),
    ),
    Fault("scale", "flash_attention.h", "LOG2E / root(HD)", "LOG2E / root(HD + 1)", ("flash_attention", *PROMPT)),
    Fault(
        "rounding",
        "flash_attention.h",
        "const float *stats, bfloat16 *q) {\n    use_nearest_even()",
        f"const float *stats, bfloat16 *q) {{\n    {FLOOR}",
        ("flash_attention", *PROMPT),
    ),
    Fault(
        "sign",
        "grouped_sums.h",
        "sum = aie::sub(sum, product(split(total.least)",
        "sum = aie::add(sum, product(split(total.least)",
        ("int4_norm_gemv", "decode@128", 0),
        NPU_INT4,
    ),
    Fault(
        "index",
        "grouped_sums.h",
        "aie::shuffle_down(inputs, k * EDGE)",
        "aie::shuffle_down(inputs, (k ^ 1) * EDGE)",
        ("int4_norm_gemv", "decode@128", 0),
        NPU_INT4,
    ),
    Fault(
        "scale",
        "grouped.h",
        "const int32 wanted = exponent - ONE - 14;",
        "const int32 wanted = exponent - ONE - 15;",
        ("int4_norm_gemv", "decode@128", 0),
        NPU_INT4,
    ),
    Fault(
        "index",
        "feed_forward.cc",
        "sums + down / DOWN_STEPS * LANES",
        "sums + (down / DOWN_STEPS ^ 1) * LANES",
        ("int4_feed_forward", "decode@128", 0),
        NPU_INT4,
    ),
    Fault(
        "sign",
        "joined_sums.h",
        "aie::add(sum, aie::load_v<EACH>(x + at))",
        "aie::sub(sum, aie::load_v<EACH>(x + at))",
        ("int4_feed_forward", "decode@128", 0),
        NPU_INT4,
    ),
    Fault(
        "rounding",
        "grouped_gemv.cc",
        "    round_sums(acc, out);",
        f"    {FLOOR};\n    round_sums(acc, out);",
        ("int4_norm_gemv", "decode@128", 0),
        NPU_INT4,
    ),
    Fault(
        "index",
        "token_attention.cc",
        "aie::store_v(out + (query + r) * HD + d,",
        "aie::store_v(out + (query + (r ^ 1)) * HD + d,",
        ("token_attention", "decode@128", 0),
        NPU_INT4,
    ),
    Fault(
        "sign",
        "grouped_gemv.cc",
        "aie::add(sum, aie::load_v<LANES>(added))",
        "aie::sub(sum, aie::load_v<LANES>(added))",
        ("int4_gemv_add", "decode@128", 0),
        NPU_INT4,
    ),
    Fault(
        "index",
        "grouped_gemv.cc",
        "norm_row<COLS>(x, weight, x, eps);",
        "norm_row<COLS>(x, weight - WIDE, x, eps);",
        ("int4_norm_gemv", "decode@128", 0),
        NPU_INT4,
    ),
    Fault(
        "index",
        "token_attention.cc",
        "rotate_heads<1, HD>(k, table, row);",
        "copy(k, HD, row), (void)table;",
        ("token_attention", "decode@128", 0),
        NPU_INT4,
    ),
]
"""Faults of target npu2-sim, whose compiler is the host's."""

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 17,
    "layer_types": ["sliding_attention", "full_attention"],
}
"""Fields of a model with norms of results, an offset, windows and another activation."""

ON_GEMMA = [
    Fault("index", "flash_attention.h", "bound + SEES - 1", "bound + SEES", ("flash_attention", *PROMPT)),
    Fault("offset", "rms_norm.h", "bf16_bits(OFFSET)", "bf16_bits(0)", ("rms_norm", *PROMPT)),
    Fault("scale", "silu.h", "0.044715f * FIRST", "0.04f * FIRST", ("silu_and_mul", *PROMPT)),
    Fault(
        "sum",
        "feed_forward.cc",
        "norm_row<COLS>(sums, sums + OUTS, sums, eps);\n    add_row<COLS>(x, sums);",
        "norm_row<COLS>(sums, sums + OUTS, sums, eps);\n    add_row<COLS>(sums, x);",
        ("int4_sandwich_feed_forward", "decode@128", 0),
        NPU_INT4,
    ),
]
"""Faults of target npu2-sim in `GEMMA`."""


@pytest.fixture(scope="module")
def checkout(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled project to edit, beside a model that the array can run."""
    root = shutil.copytree(project, tmp_path_factory.mktemp("faults") / "checkout")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_checkpoint(root / "tiles", head_dim=32, vocab_size=300, **sizes)
    write_checkpoint(root / "gemma", head_dim=32, vocab_size=300, **sizes, **GEMMA)
    layers = {"full_attn_idxs": [1], "num_hidden_layers": 3, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
    family = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_act": None}
    write_checkpoint(root / CONVOLVED, head_dim=32, vocab_size=300, **sizes, **layers, **family)
    return root


@contextlib.contextmanager
def edited(path: Path, old: str, new: str) -> Iterator[None]:
    text = path.read_text()
    assert old in text, f"{path.name} has no {old!r}"
    path.write_text(text.replace(old, new))
    try:
        yield
    finally:
        path.write_text(text)


def diagnosed(checkout: Path, *variables: str) -> Report:
    """What is found of what is compiled there."""
    run = doit("compile", *variables, cwd=checkout)
    assert run.returncode == 0, run.stdout + run.stderr
    given = dict(each.split("=", 1) for each in variables) | {"artifacts": str(checkout / "artifacts")}
    build = Build(parse_options(given | {"model": str(checkout / given["model"])}))
    with contextlib.closing(load(build.directory)) as llm:
        return diagnose(build, llm)


def check(checkout: Path, kernels: str, fault: Fault, *variables: str) -> None:
    with edited(checkout / "kernel_src" / kernels / fault.file, fault.old, fault.new):
        report = diagnosed(checkout, *variables, *fault.variables)
    assert not report.passed
    first = report.wrong[0]
    print(report.verdict)
    assert (first.op.kernel.name, str(first.op.phase), first.op.layer) == fault.found, report.verdict
    if fault.variables == ONE_LAYER:
        assert {finding.op.layer for finding in report.wrong} == {1}


@pytest.mark.parametrize("fault", HOST, ids=str)
def test_a_wrong_kernel_of_the_host_is_named(checkout: Path, fault: Fault) -> None:
    check(checkout, "cpu", fault, f"model={fault.model or 'model'}", "target=cpu")


@pytest.mark.parametrize("fault", ARRAY, ids=str)
def test_a_wrong_tile_function_is_named(checkout: Path, fault: Fault) -> None:
    check(checkout, "aie2p", fault, f"model={fault.model or 'tiles'}", "target=npu2-sim", "npu.buckets=64")


@pytest.mark.parametrize("fault", ON_GEMMA, ids=str)
def test_a_wrong_tile_function_of_gemma_is_named(checkout: Path, fault: Fault) -> None:
    check(checkout, "aie2p", fault, "model=gemma", "target=npu2-sim", "npu.buckets=64")


@pytest.mark.parametrize(
    "variables",
    [
        ("model=model", "target=cpu"),
        ("model=model", "target=cpu", "weights=int4", "kv=int8"),
        ("model=model", "target=cpu", "weights=w8a8"),
        ("model=model", "target=cpu", "weights=int6,w_down.0=int8_f32_16"),
        (f"model={CONVOLVED}", "target=cpu", "weights=int4"),
        (f"model={CONVOLVED}", "target=npu2-sim", "npu.buckets=64", "weights=int4"),
        ("model=tiles", "target=npu2-sim", "npu.buckets=64"),
        ("model=tiles", "target=npu2-sim", "npu.buckets=64", "npu.grouping=separate"),
        ("model=tiles", "target=npu2-sim", "npu.buckets=64", "weights=int4"),
        ("model=tiles", "target=npu2-sim", "npu.buckets=64", "weights=int8"),
        ("model=tiles", "target=npu2-sim", "npu.buckets=64", "weights=int6"),
        ("model=tiles", "target=npu2-sim", "npu.buckets=64", "npu.matmul=bfp16"),
        ("model=gemma", "target=npu2-sim", "npu.buckets=64", "weights=int4"),
        ("model=gemma", "target=npu2-sim", "npu.buckets=64", "npu.grouping=separate"),
    ],
    ids=" ".join,
)
def test_no_fault_is_found_where_there_is_none(checkout: Path, variables: tuple[str, ...]) -> None:
    report = diagnosed(checkout, *variables)
    assert report.passed, report.verdict
