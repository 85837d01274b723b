"""What is packed can be unpacked: every layout of every format. Files are written as they are mapped best."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from stages.weights import blobs
from stages.weights.formats import formats
from stages.weights.formats.mxfp4 import MAGNITUDES
from stages.weights.scales import symmetric

CASES = [
    (form.name, layout)
    for form in formats().values()
    for layout in ("plain", *form.layouts)
    # Those whose panels take whole rows of cores, or blocks, are tested with other shapes (test_lanes, test_bfp16).
    if (form.cut is None or "lanes" not in layout) and layout != "pairs"
]


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize("shape", [(24, 48), (64, 16), (40, 8)])
def test_unpack_is_the_inverse(name: str, layout: str, shape: tuple[int, int]) -> None:
    form = formats()[name]
    values = np.random.default_rng(1).integers(-100, 100, shape)
    stored = form.quantise(values.astype(np.float32) if name != "i32" else values.astype(np.int32))
    packed = form.arrange(stored, layout)
    assert packed.shape == form.packed_shape(shape, layout)
    np.testing.assert_array_equal(form.unpack(packed, layout, shape), form.dequantise(stored, shape[1]))


@pytest.mark.parametrize("unit", [1.0, 2.0**-9])
def test_mxfp4_rounds_to_the_nearest_number(unit: float) -> None:
    """Halves go to the even one. A group's largest value, 6 units, decides its scale."""
    values = np.arange(-96, 97, dtype=np.float32) / 16
    groups = np.zeros((len(values), 32), np.float32)
    groups[:, 0], groups[:, 17] = 6, values
    form = formats()["mxfp4"]
    got = form.dequantise(form.quantise(groups * np.float32(unit)), 32)[:, 17] / unit
    # Even numbers first: of two that are as near, that is the one.
    order = np.array([*MAGNITUDES[::2], *MAGNITUDES[1::2]])
    nearest = order[np.abs(np.abs(values)[:, None] - order).argmin(axis=1)]
    np.testing.assert_array_equal(got, np.copysign(nearest, values))


class _Recorded(io.FileIO):
    """A file that keeps where each write began."""

    began: ClassVar[list[int]] = []

    def write(self, data: Any) -> int | None:
        self.began.append(self.tell())
        return super().write(data)


@pytest.mark.parametrize("name", ["int4", "int6", "int8", "w8a8"])
@pytest.mark.parametrize("value", [0.25, -0.25, -3e-3, 0.0])
def test_equal_weights_stay_what_they_are(name: str, value: float) -> None:
    """Nothing is lost where a group has one value, of either sign: a scale or a minimum holds it."""
    form, weight = formats()[name], np.full((32, 64), value, np.float32)
    np.testing.assert_allclose(form.dequantise(form.quantise(weight), 64), weight, rtol=2.0**-8)


def test_files_are_written_in_whole_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "HUGE_PAGE", 4096)
    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: io.BufferedWriter(_Recorded(path, "w"), buffering))
    arrays = [(np.arange(size) % 127).astype(np.int8) for size in (5000, 20000, 1)]
    tensors = [(str(i), "i8", array.shape) for i, array in enumerate(arrays)]
    offsets = blobs.write_safetensors(tmp_path / "file", tensors, iter(arrays), 64)
    assert _Recorded.began == list(range(0, (tmp_path / "file").stat().st_size, 4096))
    whole = np.fromfile(tmp_path / "file", np.int8)
    for name, array in zip(offsets, arrays, strict=True):
        assert np.array_equal(whole[offsets[name] :][: array.size], array)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_scale_with_the_least_error_is_chosen(weighted: bool) -> None:
    """The chosen scale is one of those whose squared error, summed in float64, is the least of all attempts.

    Groups have outliers, so that the attempts differ."""
    rng = np.random.default_rng(3)
    groups = rng.standard_t(2, (256, 32)).astype(np.float32)
    weights = rng.exponential(1, groups.shape).astype(np.float32) if weighted else np.ones_like(groups)
    chosen = symmetric(groups, -8, 7, weights if weighted else None)
    for values, weight, scale in zip(groups.astype(np.float64), weights.astype(np.float64), chosen, strict=True):
        fits = []
        for stretch in np.linspace(-0.9, 1.2, 8):
            numbers = np.clip(np.rint(values * (7 + stretch) / np.abs(values).max()), -8, 7)
            fit = (weight * values * numbers).sum() / (weight * numbers**2).sum()
            fits.append(((weight * (values - fit * numbers) ** 2).sum(), fit))
        best = min(fits)
        assert any(error <= 1.0001 * best[0] and np.isclose(scale, fit, rtol=1e-4) for error, fit in fits)
