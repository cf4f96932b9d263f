"""Make dataclasses whose methods are compiled when they are first used.

`dataclasses.dataclass` compiles six methods of each class, in 0.4 ms. ckptcore has 350 classes, and a command
imports up to 250 of them and makes values of a few: this took a tenth of a small conversion. Here the library
collects the fields and makes slots, and the methods are closures, except for ``__init__``, which is compiled
for the first value.

`dataclass` takes the settings ``frozen``, ``slots``, ``kw_only`` and ``eq``. Classes with other settings, or
with a dataclass as their base, are the library's own. Everything that takes dataclasses (`fields`, `replace`,
`asdict`, pickle, copy, match) takes these.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from reprlib import recursive_repr
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **settings: bool) -> Any:
        """Make a dataclass, as `dataclasses.dataclass` does."""
        return _made(cls, settings) if cls is not None else lambda decorated: _made(decorated, settings)


_SETTINGS = {"frozen", "slots", "kw_only", "eq"}


def _made(cls: type, settings: dict[str, bool]) -> type:
    if not settings.keys() <= _SETTINGS or any(map(dataclasses.is_dataclass, cls.__mro__)):
        library_class: type = dataclasses.dataclass(**settings)(cls)
        return library_class
    defined = set(vars(cls))  # the methods that it defines itself
    frozen, eq = settings.get("frozen", False), settings.get("eq", True)
    layout_settings = {name: settings[name] for name in ("slots", "kw_only") if name in settings}
    cls = dataclasses.dataclass(cls, init=False, repr=False, eq=False, **layout_settings)
    params = vars(cls)["__dataclass_params__"]
    params.init, params.repr, params.eq, params.frozen = True, True, eq, frozen
    fields = dataclasses.fields(cls)
    methods: dict[str, Any] = {"__init__": _Init(cls), "__repr__": _repr([f.name for f in fields if f.repr])}
    if eq:
        compared = [f for f in fields if f.compare]
        values = _getter([f.name for f in compared])
        methods["__eq__"] = _eq(values)
        hashed = [f for f in fields if (f.compare if f.hash is None else f.hash)]
        methods["__hash__"] = _hash(values if hashed == compared else _getter([f.name for f in hashed]))
        if not frozen:
            methods["__hash__"] = None
    if frozen:
        methods |= _frozen(cls, frozenset(f.name for f in fields))
    if frozen and settings.get("slots", False):
        methods |= _pickled()
    if "__eq__" in defined and vars(cls)["__hash__"] is None:  # Python has set it, not the class
        defined.discard("__hash__")
    # As in the library, a method that the class defines itself is kept.
    for name, method in methods.items():
        if name not in defined:
            if isinstance(method, FunctionType):
                method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
                method.__module__ = cls.__module__
            setattr(cls, name, method)
    return cls


class _Init:
    """The ``__init__`` of a class, compiled when it is looked up."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __get__(self, instance: object | None, owner: type) -> Any:
        init = _init(self._cls)
        self._cls.__init__ = init  # type: ignore[misc]
        return init if instance is None else MethodType(init, instance)


def _init(cls: type) -> FunctionType:
    """Compile ``__init__``: as the library writes it, with names that no field can have."""
    settings, absent = vars(cls)["__dataclass_params__"], dataclasses.MISSING
    slots = "__slots__" in vars(cls)  # then a default is no attribute of the class
    fields = [
        f
        for f in dataclasses.fields(cls)
        if f.init or f.default_factory is not absent or (slots and f.default is not absent)
    ]
    constants: dict[str, Any] = {"_dataclass_set": object.__setattr__, "_dataclass_absent": _ABSENT}
    ordered = list[str]()
    keywords = list[str]()
    body = list[str]()
    for n, field in enumerate(fields):
        name, value = field.name, field.name
        default = ""
        if field.default is not absent:
            constants[f"_dataclass_{n}"], default = field.default, f"=_dataclass_{n}"
            value = name if field.init else f"_dataclass_{n}"
        elif field.default_factory is not absent:
            constants[f"_dataclass_{n}"], default = field.default_factory, "=_dataclass_absent"
            value = f"_dataclass_{n}()"
            if field.init:
                value += f" if {name} is _dataclass_absent else {name}"
        if field.init:
            (keywords if field.kw_only else ordered).append(f"{name}{default}")
        body.append(
            f"_dataclass_set(self, {name!r}, {value})" if settings.frozen else f"self.{name} = {value}"
        )
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join(["self", *ordered, *(["*", *keywords] if keywords else [])])
    lines = "\n  ".join(body or ["pass"])
    # The defaults are arguments of a function around it: a field may have the name of any global.
    source = f"def make({', '.join(constants)}):\n def __init__({parameters}):\n  {lines}\n return __init__"
    namespace: dict[str, Any] = {}
    exec(source, vars(sys.modules[cls.__module__]), namespace)
    init: FunctionType = namespace["make"](**constants)
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = {f.name: f.type for f in fields if f.init} | {"return": None}
    return init


class _Absent:
    """An argument that was not given, where each value has its own default."""

    def __repr__(self) -> str:
        return "<factory>"


_ABSENT = _Absent()


def _getter(names: Sequence[str]) -> Callable[[Any], Any]:
    """Return a function that returns the tuple of these attributes."""
    if len(names) > 1:
        return attrgetter(*names)
    return (lambda value: (getattr(value, names[0]),)) if names else lambda value: ()


def _repr(names: Sequence[str]) -> Callable[[Any], str]:
    @recursive_repr()
    def __repr__(self: Any) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({values})"

    return __repr__


def _eq(values: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def __eq__(self: Any, other: Any) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(values: Callable[[Any], Any]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _frozen(cls: Any, names: frozenset[str]) -> dict[str, Callable[..., None]]:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _pickled() -> dict[str, Callable[..., Any]]:
    # The fields of the value's own class: one below may have more.
    def __getstate__(self: Any) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def __setstate__(self: Any, state: Sequence[Any]) -> None:
        for field, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)

    return {"__getstate__": __getstate__, "__setstate__": __setstate__}
