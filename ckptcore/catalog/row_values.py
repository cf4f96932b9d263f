"""Build the values of rows, whatever a program wrote into the database: an odd value makes one row odd.

SQLite keeps any value in any column, PostgreSQL has times beyond the calendar, and JSON columns are text on
both. A row whose value is not of its column's type has an empty value there, and says so in its field
``trouble``; other rows are not affected. Whoever decides by a row, and not only shows it, asks for that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from ckptcore.errors import CatalogError, Finding, finding
from ckptcore.utils.text import short_repr

_MOST = 1 << 63
_NOUNS = {"RunSummary": "run", "Training": "training", "Measured": "metric", "Ranked": "metric"}
_NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)
Value = TypeVar("Value")


def parsed(text: Any) -> Any:
    """Return the value of a JSON column; the text itself if it is no JSON, which `sound` reports."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return text


def sound(cls: type[Value], **values: Any) -> Value:
    """Return a row's value of a class with a field ``trouble``.

    Args:
        cls: The dataclass of the row.
        values: Its fields, as the database has them.
    """
    make: Any = cls
    values, trouble = checked(make, values)
    built: Value = make(**values, trouble=trouble) if trouble else make(**values)
    return built


def read_row(cls: type[Value], row: Any, /, **values: Any) -> Value:
    """Return a row's value of a class as `sound`: each field is the column of its name, but those given."""
    make: Any = cls
    names, read = _columns_of(make, row._fields)
    return sound(cls, **dict(zip(names, read(row), strict=True)) | values)


@cache
def _columns_of(cls: Any, columns: tuple[str, ...]) -> tuple[tuple[str, ...], attrgetter[tuple[Any, ...]]]:
    """Return the fields of a class, two or more, that are columns; and what reads them from a row."""
    names = tuple(field.name for field in fields(cls) if field.name in columns)
    return names, attrgetter(*names)


def sound_finding(**values: Any) -> Finding:
    """Return the finding of a row; one about the row, if a value of it is odd. values: its fields."""
    right, trouble = checked(Finding, values)
    if trouble:
        return finding("catalog-row", "files", f"the catalog's row of a finding cannot be used: {trouble}")
    return Finding(**right)


def checked(cls: Any, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return values of fields of a dataclass, odd ones empty, and what is odd; "" for nothing."""
    right, troubles = dict(values), []
    for name, (check, noun, empty) in _checks(cls).items():
        if name in values and not check(values[name]):
            troubles.append(f"{name} holds {short_repr(values[name], 40)}, not {noun}")
            right[name] = empty()
    return right, "; ".join(troubles)


def row_findings(value: Any) -> Iterator[Finding]:
    """Yield a finding for each row with trouble in a value: a row, or what is made of rows."""
    yield from _findings_of(value, None)


def require_sound(value: Any) -> None:
    """Raise `CatalogError` if a row, or what is made of rows, has an odd value: nothing is decided by it."""
    for odd in row_findings(value):
        raise CatalogError(odd.message, hint=odd.hint)


def _findings_of(value: Any, key: str | None) -> Iterator[Finding]:
    """Yield findings about a value. key: its name, if that is not its first field."""
    if isinstance(value, Mapping):
        for name, member in value.items():
            yield from _findings_of(member, str(name))
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _findings_of(member, None)
    elif is_dataclass(value) and not isinstance(value, type) and not isinstance(value, Finding):
        parts = [getattr(value, field.name) for field in fields(value)]
        if trouble := getattr(value, "trouble", ""):
            name = key or ("" if is_dataclass(parts[0]) else str(parts[0]))
            subject = f"{_noun(type(value).__name__)} {name}".rstrip()
            message = f"the catalog's row of the {subject} cannot be used: {trouble}"
            yield finding("catalog-row", "files", message)
        for part in parts:
            if part and not isinstance(part, str | int | float):
                yield from _findings_of(part, None)


def _noun(name: str) -> str:
    """Return what a class of rows is called.

    >>> _noun("CheckpointRow"), _noun("InboxEvent"), _noun("RunSummary")
    ('checkpoint', 'inbox event', 'run')
    """
    return _NOUNS.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removesuffix("Row")).lower()


def as_integer(value: Any) -> Any:
    """Return a sum of integers as an integer: PostgreSQL has decimals. SQLite's is a float if one is odd."""
    return int(value) if isinstance(value, Decimal) and value == value.to_integral_value() else value


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer that a database can hold."""
    return type(value) is int and -_MOST <= value < _MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _maps(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is dict and all(map(check, value.values()))


def _rows(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _is_check(value: Any) -> bool:
    """Return whether a value is a check of an export, as `ckptcore.catalog.conversions` records it."""
    return _maps(_is_text)(value) and value.keys() >= {"verdict", "summary", "at"}


_is_form = _maps(lambda value: True)
# Annotation of a field -> (check, what it should be, the empty value).
_TYPES: dict[str, tuple[Callable[[Any], bool], str, Callable[[], Any]]] = {
    "str": (_is_text, "a text", str),
    "int": (is_integer, "an integer", int),
    "float": (_is_number, "a number", float),
    "bool": (lambda value: type(value) is bool, "true or false", bool),
    "bytes": (lambda value: type(value) is bytes, "bytes", bytes),
    "datetime": (lambda value: isinstance(value, datetime), "a time", lambda: _NO_TIME),
    "dict[str, Any]": (_is_form, "a JSON object", dict),
    "dict[str, str]": (_maps(_is_text), "a JSON object of texts", dict),
    "Mapping[str, Any]": (_is_form, "a JSON object", dict),
    "dict[str, float]": (_maps(_is_number), "a JSON object of numbers", dict),
    "dict[str, dict[str, str]]": (_maps(_is_check), "a JSON object of checks", dict),
    "tuple[Finding, ...]": (_rows(lambda value: isinstance(value, Finding)), "a list of findings", tuple),
    "tuple[int, ...]": (_rows(lambda value: is_integer(value) and value >= 0), "a list of sizes", tuple),
    "tuple[str, ...]": (_rows(_is_text), "a list of texts", tuple),
    "tuple[dict[str, Any], ...]": (_rows(_is_form), "a list of JSON objects", tuple),
}


# Annotations of fields whose values are built from rows of their own.
_MADE_OF_ROWS = ("CheckpointRow", "TrainingFacts", "Mapping[str, Measured]")


@cache
def _checks(cls: Any) -> dict[str, tuple[Callable[[Any], bool], str, Callable[[], Any]]]:
    """Return the check of every field of a row's class."""
    checks = {}
    for row_field in fields(cls):
        kind, _, optional = str(row_field.type).partition(" | ")
        if kind in _MADE_OF_ROWS:
            continue
        check, noun, empty = _TYPES[kind]
        if optional:
            checks[row_field.name] = (_or_none(check), noun, lambda: None)
        else:
            checks[row_field.name] = (check, noun, empty)
    return checks


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)
