"""Store times with a zone, and leave times that are none for Python as text: they cost one row, not all.

SQLite has no type for times: any value may be in such a column. PostgreSQL has ``infinity``, and years that
Python has not. `ckptcore.catalog.row_values` reports the text.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import DateTime, Dialect, TypeDecorator
from sqlalchemy.types import TypeEngine


class UtcDateTime(TypeDecorator[datetime]):
    """A time with a zone. SQLite does not store the zone, so it is set to UTC when a row is read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the type of a dialect; values that are no times stay as they are."""
        return _sqlite_type(dialect) if dialect.name == "sqlite" else super().load_dialect_impl(dialect)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a time to UTC. Raises `ValueError` for one without a zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a time must have a zone (got {value!r})")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return a stored time with the zone UTC; what is no time, as it is."""
        if not isinstance(value, datetime):
            return value
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _sqlite_type(dialect: Dialect) -> TypeEngine[Any]:
    """Return SQLite's type of times, whose values may be others."""
    from sqlalchemy.dialects.sqlite import DATETIME

    class Lenient(DATETIME):
        def result_processor(self, dialect: Dialect, coltype: Any) -> Any:
            strict: Any = super().result_processor(dialect, coltype)

            def process(value: Any) -> Any:
                try:
                    return strict(value)
                except (ValueError, TypeError):
                    return value

            return process

    return dialect.type_descriptor(Lenient())  # type: ignore[no-untyped-call]
