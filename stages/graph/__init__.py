"""The steps of a build for one model and target, and its needs of disk and memory."""

from stages.graph.build import Build
from stages.graph.wiring import Library, Wiring

__all__ = ["Build", "Library", "Wiring"]
