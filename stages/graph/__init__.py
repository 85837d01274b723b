"""The steps of a build, wired for one model and target, and what it takes."""

from stages.graph.build import Build
from stages.graph.wiring import Library, Wiring

__all__ = ["Build", "Library", "Wiring"]
