"""The table of formats: how a tensor's values are stored, one Python module each.

A *format* says which values a tensor can hold: bf16, or blocks of quantised values with their scales. It is stored as
elements of a *dtype*; block formats store bytes. A format's *layouts* are the orders in which kernels read it. Every
module of this package that has `FORMAT` is in the table: to add a format is to add a module.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from stages.weights.format import Format


@functools.cache
def formats() -> dict[str, Format]:
    """Every format by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {module.FORMAT.name: module.FORMAT for module in modules if hasattr(module, "FORMAT")}
