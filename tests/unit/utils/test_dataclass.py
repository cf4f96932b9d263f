"""Classes of `ckptcore.utils.dataclass` behave as the library's; nothing is compiled before its use."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
import sys
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from ckptcore.utils.dataclass import dataclass

T = TypeVar("T")
MADE = {"library": dataclasses.dataclass, "quick": dataclass}


def declare(make: Any) -> dict[str, type]:
    """The same classes, made by the library or by ours."""

    @make(frozen=True, slots=True)
    class Value:
        """A value."""

        a: int
        b: str = "x"
        c: dict[str, int] = field(default_factory=dict)
        hidden: int = field(default=3, repr=False, compare=False)
        kept: ClassVar[int] = 7

        @property
        def double(self) -> int:
            return 2 * self.a

    @make(frozen=True)
    class Checked:
        """A value that checks itself."""

        a: int
        made: list[int] = field(default_factory=list, init=False)

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError(f"a must be positive (got {self.a})")
            self.made.append(self.a)

    @make(frozen=True, slots=True, kw_only=True)
    class Named:
        """A value with arguments by name."""

        a: int
        b: float = 0.5

    @make(slots=True)
    class Changing:
        """A value that changes."""

        a: int
        b: list[int] = field(default_factory=list)

    @make
    class Plain:
        """Without settings, and with its own methods."""

        a: float
        self_: int = 0

        def __repr__(self) -> str:
            return "plain"

        def __eq__(self, other: object) -> bool:
            return True

    @make(frozen=True, slots=True, eq=False)
    class Same:
        """Equal by identity."""

        a: list[int]

    @make(frozen=True, slots=True)
    class Row(Generic[T]):
        """One of any type."""

        row: T

    @make(frozen=True, slots=True)
    class Empty:
        """Without fields."""

    @make(frozen=True, slots=True)
    class Below(Value):
        """A dataclass below another."""

        d: int = 0

    @make(slots=True)
    class Fixed:
        """With fields that are no arguments."""

        a: int
        b: int = field(default=4, init=False)

    @make(frozen=True, slots=True)
    class Hashed:
        """With fields that are hashed and not compared, and the other way round."""

        a: int
        b: int = field(default=1, hash=True, compare=False)
        c: list[int] = field(default_factory=list, hash=False)

    return {name: kind for name, kind in locals().items() if isinstance(kind, type)}


LIBRARY, QUICK = declare(dataclasses.dataclass), declare(dataclass)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Value", (1,), {}),
    ("Value", (1, "y"), {"c": {"k": 1}, "hidden": 9}),
    ("Value", (), {}),
    ("Value", (1, 2, {}, 4, 5), {}),
    ("Value", (1,), {"unknown": 2}),
    ("Checked", (4,), {}),
    ("Checked", (-4,), {}),
    ("Named", (), {"a": 1}),
    ("Named", (1,), {}),
    ("Changing", (1,), {}),
    ("Plain", (float("nan"),), {}),
    ("Same", ([1],), {}),
    ("Row", ([1],), {}),
    ("Row", (float("nan"),), {}),
    ("Empty", (), {}),
    ("Below", (1,), {"d": 4}),
    ("Fixed", (1,), {}),
    ("Fixed", (1, 2), {}),
    ("Hashed", (1,), {"b": 2}),
    ("Hashed", (1,), {"c": [3]}),
]


def outcome(do: Any) -> Any:
    try:
        return do()
    except Exception as error:
        return type(error), re.sub(r"declare\.<locals>\.", "", str(error))


@pytest.mark.parametrize(("name", "arguments", "named"), CALLS)
def test_values_are_those_of_the_library(
    name: str, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    theirs, ours = (outcome(lambda kind=kinds[name]: kind(*arguments, **named)) for kinds in (LIBRARY, QUICK))
    if isinstance(theirs, tuple):
        assert ours == theirs
        return
    equal = QUICK[name](*arguments, **named)
    assert repr(ours) == repr(theirs)
    assert [(f.name, getattr(ours, f.name)) for f in dataclasses.fields(ours)] == [
        (f.name, getattr(theirs, f.name)) for f in dataclasses.fields(theirs)
    ]
    assert (ours == equal) is (theirs == LIBRARY[name](*arguments, **named))
    assert (ours == theirs) is (name == "Plain")
    assert outcome(lambda: hash(ours)) == outcome(lambda: hash(theirs)) or name == "Same"
    first = dataclasses.fields(ours)[0].name if name != "Empty" else "none"
    assert (
        outcome(lambda: setattr(ours, first, 5)) == outcome(lambda: setattr(theirs, first, 5))
        or name == "Empty"
    )
    assert outcome(lambda: delattr(ours, first)) == outcome(lambda: delattr(theirs, first)) or name == "Empty"


@pytest.mark.parametrize("name", LIBRARY)
def test_classes_are_those_of_the_library(name: str) -> None:
    theirs, ours = LIBRARY[name], QUICK[name]
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
    assert ours.__doc__ == theirs.__doc__
    assert ours.__match_args__ == theirs.__match_args__  # type: ignore[attr-defined]
    assert getattr(ours, "__slots__", None) == getattr(theirs, "__slots__", None)
    assert ours.__init__.__annotations__ == theirs.__init__.__annotations__  # type: ignore[misc]
    assert ours.__init__.__qualname__ == theirs.__init__.__qualname__  # type: ignore[misc]
    assert repr(ours.__dataclass_params__) == repr(theirs.__dataclass_params__)  # type: ignore[attr-defined]
    assert {n for n in vars(theirs) if n.startswith("__")} <= {n for n in vars(ours) if n.startswith("__")}


@dataclass(frozen=True, slots=True)
class Copied:
    """A value that goes through pickle."""

    a: int
    b: tuple[int, ...] = field(default=(), compare=False)


def test_copies_are_equal() -> None:
    value = Copied(1, (2, 3))
    copies = [
        copy.copy(value),
        copy.deepcopy(value),
        dataclasses.replace(value),
        Copied(**dataclasses.asdict(value)),
    ]
    copies += [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(2, 6)]
    for each in copies:
        assert (each.a, each.b, each) == (1, (2, 3), value)
    assert dataclasses.replace(value, a=4).a == 4
    match value:
        case Copied(a, b):
            assert (a, b) == (1, (2, 3))


@dataclasses.dataclass(frozen=True)
class Below(Copied):
    """A class of the library below one of ours."""

    c: int = 0


def test_a_class_of_the_library_may_have_one_of_ours_as_its_base() -> None:
    value = Below(1, (2,), 3)
    for each in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert (each.a, each.b, each.c) == (1, (2,), 3)
    assert Below(1, (2,), 3) == Below(1, (4,), 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Below(1).c = 2  # type: ignore[misc]


def test_nothing_is_compiled_before_the_first_value() -> None:
    @dataclass(frozen=True, slots=True)
    class Later:
        a: int

    assert not inspect.isfunction(vars(Later)["__init__"])
    assert Later(1).a == 1
    assert inspect.isfunction(vars(Later)["__init__"])


def test_every_module_makes_its_classes_with_it() -> None:
    root = Path(sys.modules["ckptcore"].__file__ or "").parent
    below = ("errors.py", "redaction.py", "utils/dataclass.py")  # what it uses itself
    others = [p for p in root.rglob("*.py") if str(p.relative_to(root)) not in below]
    library = re.compile(r"^from dataclasses import .*\bdataclass\b", re.MULTILINE)
    found = [p for p in others if library.search(p.read_text())]
    assert found == []
