"""`frozen` makes of a class what `dataclass(frozen=True)` makes of it, but for the functions that classes share."""

import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import pytest

from llama_npu2.frozen import frozen


def point(decorator: Callable[[type], type]) -> Any:
    class Point:
        x: int
        names: tuple[str, ...] = ()
        notes: list[str] = field(default_factory=list, hash=False)
        origin: str = field(default="", compare=False)
        secret: str = field(default="", repr=False)

    return decorator(Point)


OURS, USUAL = point(frozen), point(dataclass(frozen=True))

ARGUMENTS: list[dict[str, Any]] = [
    {"x": 1},
    {"x": 2},
    {"x": 1, "names": ("a",)},
    {"x": 1, "notes": ["b"]},
    {"x": 1, "origin": "elsewhere"},
    {"x": 1, "secret": "c"},
]


def test_points_are_equal_where_those_of_a_dataclass_are() -> None:
    for one in ARGUMENTS:
        ours, usual = OURS(**one), USUAL(**one)
        assert repr(ours) == repr(usual) and hash(ours) == hash(usual) and asdict(ours) == asdict(usual)
        assert [OURS(**other) == ours for other in ARGUMENTS] == [USUAL(**other) == usual for other in ARGUMENTS]
        assert repr(replace(ours, names=("d",))) == repr(replace(usual, names=("d",)))
    assert OURS(1) != USUAL(1) and OURS(1) != 1
    assert [each.name for each in fields(OURS)] == [each.name for each in fields(USUAL)]


@pytest.mark.parametrize("value", [OURS(1), USUAL(1)], ids=["frozen", "dataclass"])
def test_nothing_is_set_twice(value: Any) -> None:
    for name in ("x", "names", "other"):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(value, name, 3)
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del value.x
    assert value.x == 1


@frozen
class One:
    value: Any

    @cached_property
    def twice(self) -> Any:
        return 2 * self.value


@frozen
class Named(One):
    name: str = "n"

    def __repr__(self) -> str:
        return self.name


@frozen(eq=False)
class Itself:
    value: int


def test_classes_may_inherit_and_have_methods_of_their_own() -> None:
    named = Named([1], "m")
    assert repr(named) == "m" and named.twice == [1, 1] and named == Named([1], "m") != One([1])
    assert pickle.loads(pickle.dumps(named)) == named
    with pytest.raises(TypeError, match="unhashable"):
        hash(named)
    assert repr(One(None)) == "One(value=None)" and One(None) == One(None)


def test_without_eq_each_equals_itself_alone() -> None:
    first, second = Itself(1), Itself(1)
    assert first == first != second and len({first, second}) == 2 and repr(first) == "Itself(value=1)"


def test_methods_are_shared() -> None:
    """To compile them for each class takes the time that this saves."""
    assert all(getattr(OURS, name) is getattr(One, name) for name in ("__repr__", "__setattr__", "__delattr__"))
