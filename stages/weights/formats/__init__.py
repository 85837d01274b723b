"""The table of formats: how a tensor's values are stored, one Python module each.

A *format* says which values a tensor can hold: bf16, or blocks of quantised values with their scales. It is stored as
elements of a *dtype*; block formats are stored as bytes. The *layouts* of a format are the orders in which kernels read
it. The table contains every module of this package that has `FORMAT`, so adding a format means adding a module.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from stages.weights.format import Format


@functools.cache
def formats() -> dict[str, Format]:
    """Return every format by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {module.FORMAT.name: module.FORMAT for module in modules if hasattr(module, "FORMAT")}
