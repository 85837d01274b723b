"""What several files of tests of the array use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def only_new_objects_are_collected() -> Iterator[None]:
    """For tests that collect garbage: they do not look at what was there before them, which takes a second each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
