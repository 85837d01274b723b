"""numpy and ml_dtypes for modules that are imported before it is known whether anything is computed.

Each is imported when something of it is first used. To find that all is current needs neither, and would take a third
longer with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ml_dtypes as ml_dtypes
    import numpy as np
else:

    class _Module:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module(self._name), name)
            setattr(self, name, value)  # the next use finds it without this method
            return value

    np, ml_dtypes = _Module("numpy"), _Module("ml_dtypes")

__all__ = ["ml_dtypes", "np"]
