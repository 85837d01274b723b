"""Fixtures that several files of tests of the array use."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module")
def only_new_objects_are_collected() -> None:
    """Spare tests that collect garbage the objects that were there before: looking at them takes a second each time."""
    gc.collect()
    gc.freeze()
