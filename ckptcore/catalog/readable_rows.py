"""Read the rows of a list, each on its own where one of them cannot be read.

A database that was edited, restored in parts or written by another version may have a row that no value of
ours can hold: text where a number belongs, broken JSON, a time beyond the calendar. It is one row: the others
are read, and it is reported with its error.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from sqlalchemy import exc

from ckptcore.errors import CatalogError
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.isolation import attempt
from ckptcore.utils.text import short_repr

if TYPE_CHECKING:
    from sqlalchemy import Column, Connection, Select

MOST_BROKEN = 50  # broken rows of one list that are named
_HINT = "restore a backup, or record its checkpoints again with `ckptcore catalog rebuild`"
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A row that cannot be read. table, row: where it is. code, message, hint: of the error."""

    table: str
    row: str
    code: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class ReadRows(Generic[_Value]):
    """The rows of a list: (key, value) of each that can be read, in order, and those that cannot."""

    rows: tuple[tuple[Any, _Value], ...]
    broken: tuple[BrokenRow, ...] = ()

    @property
    def values(self) -> tuple[_Value, ...]:
        """The values alone."""
        return tuple(value for _, value in self.rows)


def read_rows(
    conn: Connection,
    wanted: Select[Any],
    key: Column[Any],
    read: Callable[[Any], _Value],
    limit: int | None = None,
) -> ReadRows[_Value]:
    """Return up to `limit` rows that can be read, and the broken ones before them.

    Args:
        conn: a transaction.
        wanted: the rows, in order, without a limit. They have the column `key`.
        key: the column of their table that names a row of the list.
        read: makes a value of a row; what it raises is the row's error, as are values of other types than a
            dataclass declares.
        limit: the most rows; None for all.
    """

    def value_of(row: Any) -> tuple[Any, _Value]:
        value = read(row)
        require_types(value)
        return getattr(row, key.name), value

    together = attempt(lambda: tuple(value_of(row) for row in conn.execute(wanted.limit(limit))))
    if isinstance(together, tuple):
        return ReadRows(together)
    rows: list[tuple[Any, _Value]] = []
    broken: list[BrokenRow] = []

    def read_one(name: Any) -> tuple[Any, _Value]:
        return value_of(conn.execute(wanted.where(key == name).limit(1)).one())

    for name in conn.execute(wanted.with_only_columns(key)).scalars().all():
        if len(rows) == limit:
            break
        value = attempt(read_one, name)
        if isinstance(value, tuple):
            rows.append(value)
            continue
        if isinstance(value.__cause__, exc.DBAPIError) and not isinstance(value.__cause__, exc.DataError):
            raise value.__cause__  # the database, and not this row
        if len(broken) < MOST_BROKEN:
            table, row = key.table.name, str(name)
            text = f"row {row} of the table {table} cannot be read: {value.message}"
            broken.append(BrokenRow(table, row, CatalogError.code, text, _HINT))
    return ReadRows(tuple(rows), tuple(broken))


def require_types(value: Any) -> None:
    """Raise `ValueError` if a field of a dataclass has a value of another type than it declares.

    SQLite stores any value in any column, and JSON texts may hold anything.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return
    for name, kind in _declared(type(value)):
        stored = getattr(value, name)
        if not _fits(stored, kind):
            raise ValueError(f"{name} must be {_name_of(kind)} (got {short_repr(stored)})")
        require_types(stored)


@cache
def _declared(cls: type) -> tuple[tuple[str, Any], ...]:
    """Return (name, type) of the fields of a dataclass."""
    hints = get_type_hints(cls)
    return tuple((field.name, hints[field.name]) for field in fields(cls))


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has a declared type.

    >>> [_fits(value, tuple[int, ...]) for value in ((1, 2), (1e999,), 5)], _fits(None, int | None)
    ([True, False, False], True)
    """
    origin = get_origin(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if origin is None:
        # A whole number is a float, too; a truth value is no number.
        allowed: Any = (int, float) if kind is float else kind
        return isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
    if not isinstance(value, origin):
        return False
    if isinstance(value, tuple) and get_args(kind)[1:] == (...,):
        return all(_fits(each, get_args(kind)[0]) for each in value)
    return True


def _name_of(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)
