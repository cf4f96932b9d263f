"""Transactions whose commit is asked about when its reply is lost.

A connection may break between a server's commit and its reply. What was done is then recorded, and the
error looks like that of a commit that failed. So each writing transaction has a mark that another connection
can look up afterwards. PostgreSQL tells the state of a transaction by its number. SQLite keeps a number in
the file's header that belongs to the transaction like every row.

https://www.postgresql.org/docs/current/functions-info.html (``txid_status``),
https://www.sqlite.org/pragma.html#pragma_user_version
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, exc

from ckptcore.catalog.database import BEGIN, READER_BEGIN
from ckptcore.errors import CatalogAway
from ckptcore.utils import host

WAIT_S = 60.0  # how long a server is asked: it may restart, or not have noticed the broken connection
_PAUSE_S = 0.5


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that is committed at the end of the block. Errors of the block roll it back.

    Raises:
        CatalogAway: It is unknown whether it was committed: the database did not answer for `WAIT_S`.
        sqlalchemy.exc.SQLAlchemyError: It was not committed.
    """
    mark: _Mark | None = None
    try:
        with engine.connect() as connection, connection.begin():
            yield connection
            mark = _MARKS[connection.dialect.name](connection)
    except exc.SQLAlchemyError as error:
        if mark is None or not _committed(engine, mark, error):
            raise


class _TransactionNumber:
    """The number of a transaction of PostgreSQL; 0 if nothing was written."""

    wait_s = WAIT_S

    def __init__(self, connection: Connection) -> None:
        self._number = connection.exec_driver_sql("SELECT txid_current_if_assigned()").scalar() or 0

    def ask(self, connection: Connection) -> bool | None:
        """Return whether it was committed; None while the server still works on it."""
        if not self._number:
            return True
        state = connection.exec_driver_sql("SELECT txid_status(%s)", (self._number,)).scalar()
        return {"committed": True, "aborted": False}.get(str(state))


class _HeaderNumber:
    """A number of SQLite's file header before and behind a transaction; equal if nothing was written."""

    wait_s = 0.0  # what is not known now will not be known later

    def __init__(self, connection: Connection) -> None:
        self._before = self._behind = connection.exec_driver_sql("PRAGMA user_version").scalar()
        driver: Any = connection.connection.dbapi_connection
        if driver.total_changes:  # of this connection, which is opened for each transaction
            self._behind = secrets.randbelow(2**31 - 1) + 1
            connection.exec_driver_sql(f"PRAGMA user_version={self._behind}")

    def ask(self, connection: Connection) -> bool | None:
        """Return whether it was committed; None if another writer committed since."""
        number = connection.exec_driver_sql("PRAGMA user_version").scalar()
        return {self._before: False, self._behind: True}.get(number)


_Mark = _TransactionNumber | _HeaderNumber
_MARKS: dict[str, type[_Mark]] = {"postgresql": _TransactionNumber, "sqlite": _HeaderNumber}


def _committed(engine: Engine, mark: _Mark, error: exc.SQLAlchemyError) -> bool:
    reader = engine.execution_options(**{BEGIN: READER_BEGIN})
    until = host.monotonic() + mark.wait_s
    while True:
        try:
            with reader.connect() as connection, connection.begin():
                answer = mark.ask(connection)
        except exc.DBAPIError:  # the server restarts, or there is no way to it
            answer = None
        if answer is not None:
            return answer
        if host.monotonic() >= until:
            raise CatalogAway(
                f"it is unknown whether the catalog has recorded this: {error}",
                hint="run the command again once the database answers: it continues from what is recorded",
            ) from error
        host.sleep(_PAUSE_S)
