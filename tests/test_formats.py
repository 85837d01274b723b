"""What is packed can be unpacked: every layout of every format."""

from __future__ import annotations

import numpy as np
import pytest

from stages.weights.formats import formats

CASES = [
    (form.name, layout)
    for form in formats().values()
    for layout in ("plain", *form.layouts)
    # Those whose panels take whole rows of cores are tested with other shapes (test_lanes).
    if form.cut is None or "lanes" not in layout
]


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize("shape", [(24, 48), (64, 16), (40, 8)])
def test_unpack_is_the_inverse(name: str, layout: str, shape: tuple[int, int]) -> None:
    form = formats()[name]
    values = np.random.default_rng(1).integers(-100, 100, shape)
    stored = form.quantise(values.astype(np.float32) if name != "i32" else values.astype(np.int32))
    packed = form.layout(layout).pack(stored)
    assert packed.shape == form.packed_shape(shape, layout)
    np.testing.assert_array_equal(form.unpack(packed, layout, shape), form.dequantise(stored, shape[1]))
