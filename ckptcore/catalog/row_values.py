"""Build the values of rows, whatever somebody wrote into the database: an odd value makes one row odd.

SQLite keeps any value in any column, and JSON columns are text on both databases. A row whose value is not of
its column's type has an empty value there, and says so in its field ``trouble``; other rows are not affected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar

from ckptcore.errors import Finding, finding
from ckptcore.utils.text import short_repr

_MOST = 1 << 63
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
    troubles = []
    make: Any = cls
    for name, (check, noun, empty) in _checks(make).items():
        if name in values and not check(values[name]):
            troubles.append(f"{name} holds {short_repr(values[name], 40)}, not {noun}")
            values[name] = empty()
    built: Value = make(**values, trouble="; ".join(troubles)) if troubles else make(**values)
    return built


def row_finding(id: str, trouble: str) -> Finding:
    """Return the finding about a row that has trouble."""
    return finding("catalog-row", "files", f"the row {id} of the catalog cannot be used: {trouble}")


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer that a database can hold."""
    return type(value) is int and -_MOST <= value < _MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _maps(each: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is dict and all(map(each, value.values()))


def _rows(each: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(each, value))


def _is_anything(value: Any) -> bool:
    return True


_is_form = _maps(_is_anything)
# Annotation of a field -> (check, what it should be, the empty value).
_TYPES: dict[str, tuple[Callable[[Any], bool], str, Callable[[], Any]]] = {
    "str": (_is_text, "a text", str),
    "int": (is_integer, "an integer", int),
    "bool": (lambda value: type(value) is bool, "true or false", bool),
    "datetime": (lambda value: isinstance(value, datetime), "a time", lambda: _NO_TIME),
    "dict[str, Any]": (_is_form, "a JSON object", dict),
    "dict[str, float]": (_maps(_is_number), "a JSON object of numbers", dict),
    "dict[str, dict[str, str]]": (_maps(_maps(_is_text)), "a JSON object of objects", dict),
    "tuple[Finding, ...]": (_rows(lambda value: isinstance(value, Finding)), "a list of findings", tuple),
    "tuple[int, ...]": (_rows(lambda value: is_integer(value) and value >= 0), "a list of sizes", tuple),
    "tuple[str, ...]": (_rows(_is_text), "a list of texts", tuple),
    "tuple[dict[str, Any], ...]": (_rows(_is_form), "a list of JSON objects", tuple),
}


@cache
def _checks(cls: Any) -> dict[str, tuple[Callable[[Any], bool], str, Callable[[], Any]]]:
    """Return the check of every field of a row's class."""
    checks = {}
    for each in fields(cls):
        kind, _, optional = str(each.type).partition(" | ")
        check, noun, empty = _TYPES[kind]
        if optional:
            checks[each.name] = (_or_none(check), noun, lambda: None)
        else:
            checks[each.name] = (check, noun, empty)
    return checks


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)
