"""Where a checkpoint has weights: rows of tensors that hold several slots, and the order of a head's rows."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from stages.model.config import rope_table
from stages.model.decoder import Rope
from stages.model.families.place import Location, Place, whole

SLOTS = ("wq", "wk", "wv")
COUNTS = {"wq": 24, "wk": 12, "wv": 12}


@pytest.mark.parametrize("turned", [None, 0, 2, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_turn_as_in_their_checkpoint(turned: int | None, interleaved: bool) -> None:
    """Rows that a checkpoint turns in its own way are those that we turn in halves, and their products are equal."""
    head_dim, rope = 12, Rope(theta=100.0, turned=turned, interleaved=interleaved)
    count = head_dim if turned is None else turned
    q, k = np.random.default_rng(0).standard_normal((2, 5, head_dim))

    def theirs(x: np.ndarray) -> np.ndarray:
        out = x.copy()
        for pair in range(count // 2):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + count // 2)
            angles = np.arange(5) * 100.0 ** (-2 * pair / max(count, 1))
            out[:, a] = x[:, a] * np.cos(angles) - x[:, b] * np.sin(angles)
            out[:, b] = x[:, b] * np.cos(angles) + x[:, a] * np.sin(angles)
        return out

    order, table = rope.rows(head_dim) or [*range(head_dim)], rope_table(rope, head_dim, 5)
    cos, sin = np.split(table.astype(np.float64), 2, axis=1)

    def ours(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x[:, order], 2, axis=1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)

    np.testing.assert_allclose(ours(q), theirs(q)[:, order], atol=1e-6)
    np.testing.assert_allclose(ours(q) @ ours(k).T, theirs(q) @ theirs(k).T, atol=1e-5)


@pytest.mark.parametrize("head", [None, Rope(turned=4).rows(6), Rope(interleaved=True).rows(6)])
def test_rows_that_follow_one_another(head: list[int] | None) -> None:
    tensor, place = np.arange(96).reshape(48, 2), Place("qkv", SLOTS)
    pieces = {
        slot: Location("qkv", tensor.shape, partial(place.rows, slot, COUNTS, None if slot == "wv" else head))
        for slot in SLOTS
    }
    values = {slot: tensor[at.rows] for slot, at in pieces.items()}
    order = np.array(head or range(6))
    assert (values["wq"] == tensor[:24].reshape(4, 6, 2)[:, order].reshape(24, 2)).all()
    assert (values["wk"] == tensor[24:36].reshape(2, 6, 2)[:, order].reshape(12, 2)).all()
    assert (values["wv"] == tensor[36:]).all()
    assert (whole([(pieces[slot], values[slot]) for slot in SLOTS]) == tensor).all()


def test_rows_that_alternate() -> None:
    tensor = np.arange(12)
    places = {slot: Place("gate_up", ("w_gate", "w_up"), alternate=True) for slot in ("w_gate", "w_up")}
    counts = dict.fromkeys(places, 6)
    pieces = [Location("gate_up", (12,), partial(place.rows, slot, counts)) for slot, place in places.items()]
    assert tensor[pieces[0].rows].tolist() == [0, 2, 4, 6, 8, 10]
    assert tensor[pieces[1].rows].tolist() == [1, 3, 5, 7, 9, 11]
    assert (whole([(at, tensor[at.rows]) for at in pieces]) == tensor).all()
    assert {place.name(slot) for slot, place in places.items()} == {"gate_up.w_gate", "gate_up.w_up"}
