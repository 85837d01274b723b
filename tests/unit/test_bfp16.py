"""Block floating point: values, their order, and the host that makes it of weights in bf16."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

from stages.kernels.unpacking import written_part
from stages.weights.formats import bfp16, formats
from tests.support.cpu_kernels_util import Kernels, guarded, machine_isas


@pytest.fixture(params=machine_isas())
def kernels(request, library):
    team = Kernels(library, request.param, 2)
    yield team
    team.close()


def values(rows: int, cols: int) -> np.ndarray:
    """Of all sizes that weights have, and smaller ones."""
    rng = np.random.default_rng([rows, cols])
    wide = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-140, 20, (rows, cols // 8)).repeat(8, axis=1))
    wide[:, ::5] = 0
    wide[0] = 0
    return wide.astype(bfloat16)


def test_a_block_has_the_exponent_of_its_largest_value() -> None:
    block = np.array([[1.0, -1.984375, 0.0078125, 0.0234375, 0, 0.5, -0.5, 1.5]], np.float32)
    assert bfp16.quantise(block).view(np.uint8).tolist() == [[127, 64, 256 - 127, 0, 2, 0, 32, 256 - 32, 96]]
    # 1.9921875 would be 127.5: the exponent is one more.
    assert bfp16.quantise(np.array([1.9921875, 1.0], np.float32)).view(np.uint8).tolist() == [128, 64, 32, *[0] * 6]


def test_values_are_off_by_half_a_step_at_most() -> None:
    given = values(16, 256).astype(np.float32)
    stored = bfp16.quantise(given)
    got = bfp16.dequantise(stored, 256)
    steps = np.exp2(stored.reshape(16, -1, 9)[:, :, :1].view(np.uint8).astype(np.float32) - 133).repeat(8, axis=1)
    assert (np.abs(got - given) <= steps.reshape(16, -1) / 2).all()
    assert (np.abs(stored.reshape(16, -1, 9)[:, :, 1:].astype(int)) <= 127).all()
    assert (bfp16.quantise(got) == stored).all() and (got.astype(bfloat16) == got).all()


@pytest.mark.parametrize("shape", [(16, 48), (64, 16), (48, 720)])
def test_blocks_of_two_times_eight_rows_take_turns(shape: tuple[int, int]) -> None:
    rows, cols = shape
    stored = bfp16.quantise(values(*shape))
    packed = bfp16.FORMAT.arrange(stored, "pairs")
    assert packed.shape == bfp16.FORMAT.packed_shape(shape, "pairs") == (rows // 16, cols // 8, 2, 72)
    assert packed[-1, 1, 1, 9:18].tobytes() == stored[-7, 9:18].tobytes()
    assert (bfp16.FORMAT.layout("pairs").unpack(packed, stored.shape) == stored).all()


@pytest.mark.parametrize("rows, cols", [(32, 64), (48, 720)])
def test_the_host_makes_it_of_bf16(kernels: Kernels, rows: int, cols: int) -> None:
    weight = values(rows, cols)
    packed = guarded(formats()["bf16"].pack(weight, "blocks"))
    want, out = bfp16.FORMAT.pack(weight, "pairs"), guarded(np.zeros((rows // 16, cols // 8, 2, 72), np.int8))
    kernels("unpack_bfp16", packed, out, rows, cols, 0, rows, 0, 1)
    assert out.tobytes() == want.tobytes()
    both = guarded(np.zeros((rows // 16, cols // 8, 2, 72), np.int8))
    for which in (1, 0):
        kernels("unpack_bfp16", packed, both, rows // 2, cols, which * rows // 2, rows, which, 2)
    made = bfp16.FORMAT.unpack(both, "pairs", (rows, cols))
    for which, half in enumerate(np.split(bfp16.dequantise(bfp16.quantise(weight), cols), 2)):
        assert (written_part(made, {"apart": 2, "to": which}).reshape(half.shape) == half).all()
