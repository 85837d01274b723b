"""Dataclasses that never change, made in a quarter of the time.

Python compiles six functions for each frozen dataclass. A command loads more than a hundred of them, which took a fifth
of its time where nothing is stale. Here a class has its own `__init__`, and shares the other methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError, dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform, overload

_Class = TypeVar("_Class", bound=type)


@overload
def frozen(cls: _Class, /) -> _Class: ...
@overload
def frozen(*, eq: bool) -> Callable[[_Class], _Class]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: Any = None, /, *, eq: bool = True) -> Any:
    """Make of a class what `dataclass(frozen=True, eq=eq)` makes of it; `fields`, `replace` and `asdict` take it, too.

    Args:
        eq: whether instances with equal fields are equal and have equal hashes; else each equals itself alone.
    """
    return partial(_frozen, eq=eq) if cls is None else _frozen(cls, eq)


def _frozen(cls: Any, eq: bool) -> Any:
    """Give the class its `__init__` and fields by `dataclass`, and the methods that it does not define itself."""
    dataclass(eq=False, repr=False)(cls)
    methods: dict[str, Callable[..., Any]] = {"__repr__": _repr, "__setattr__": _set_once, "__delattr__": _refuse}
    if eq:
        methods |= _comparison(cls)
    for name, method in methods.items():
        # Of a class that has only `__eq__` Python sets `__hash__` to None.
        if cls.__dict__.get(name) is None:
            setattr(cls, name, method)
    return cls


def _comparison(cls: Any) -> dict[str, Callable[..., Any]]:
    """Return `__eq__` and `__hash__` of a class, by the fields that take part in them."""
    compared = _values(each.name for each in fields(cls) if each.compare)
    hashed = _values(each.name for each in fields(cls) if (each.compare if each.hash is None else each.hash))

    def equal(self: object, other: object) -> bool:
        return compared(self) == compared(other) if self.__class__ is other.__class__ else NotImplemented

    return {"__eq__": equal, "__hash__": lambda self: hash(hashed(self))}


def _values(names: Iterable[str]) -> Callable[[Any], Any]:
    """Return a function that returns a tuple of the values of these fields."""
    known = tuple(names)
    if len(known) > 1:
        return attrgetter(*known)
    return lambda instance: tuple(getattr(instance, name) for name in known)


def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _set_once(self: Any, name: str, value: object) -> None:
    """Set a field, as `__init__` does. Raises FrozenInstanceError for a field that is set, and for all other names."""
    if name in self.__dict__ or name not in self.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    self.__dict__[name] = value


def _refuse(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
