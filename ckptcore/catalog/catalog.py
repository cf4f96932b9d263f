"""The catalog as an object: one open database and the operations on it.

Each writing method runs in one writer's transaction: it happens completely or not at all, and any number of
processes write one after the other. Reading methods never wait for writers. Every method raises
`CatalogError` if the database fails and `UsageError` for an unknown id.

A connection may break between a server's commit and its reply. What was done is then recorded, and the
error looks like that of a commit that failed. So each writing transaction has a mark that another connection
can look up afterwards. PostgreSQL tells the state of a transaction by its number. SQLite keeps a number in
the file's header that belongs to the transaction like every row.

https://www.postgresql.org/docs/current/functions-info.html (``txid_status``),
https://www.sqlite.org/pragma.html#pragma_user_version

A verdict on an export belongs to the conversion that wrote it. The newest result of each check counts. A
check that cannot be done later, for example because the source was deleted, does not revoke an earlier
result. A failed check counts until it is repeated.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Connection, Engine, exc

from ckptcore.catalog import checkpoints, claims, conversions, lineage, query, retirements, training_rows
from ckptcore.catalog.database import BEGIN, DURABLE, QUEUE_BEGIN, READER_BEGIN, clock, translated
from ckptcore.catalog.heartbeats import RUNNING
from ckptcore.catalog.retirements import RetirementRecord
from ckptcore.catalog.training import USER, Training, TrainingFacts
from ckptcore.catalog.training_rows import Ranked
from ckptcore.catalog.types import (
    Begun,
    CheckpointDetail,
    CheckpointFacts,
    CheckpointRow,
    ConversionDetail,
    ConversionFacts,
    ConversionRow,
    ConversionStart,
    FileRow,
    Kind,
    Lineage,
    Origin,
)
from ckptcore.errors import LEVELS, CatalogUnavailable, Finding, UsageError
from ckptcore.utils import host
from ckptcore.utils.processes import Identity, forget, this_process

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

WAIT_S = 60.0  # how long a server is asked: it may restart, or not have noticed the broken connection
_PAUSE_S = 0.5
_NO_CONNECTION: tuple[tuple[int, int], Connection | None] = ((0, 0), None)
_RUNNING: dict[str, Identity] = {}  # conversion -> this process, as the catalog has it


class Catalog:
    """An open catalog; see `ckptcore.catalog.open_catalog`.

    Several threads may share one. After a fork, or in another process, open it again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._readers = engine.execution_options(**{BEGIN: READER_BEGIN})
        self._queues = engine.execution_options(**{BEGIN: QUEUE_BEGIN})
        self._durable = engine.execution_options(**{DURABLE: True})
        self._kept = _NO_CONNECTION  # of `kept_open`, with the process and thread that may use it

    @property
    def url(self) -> str:
        """The URL of the catalog, without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Close the database connections."""
        if not self.rest():
            self._engine.dispose()

    def rest(self) -> bool:
        """Close the database connections that nobody uses; one is opened when the next is needed.

        What another thread uses now comes back to the same pool, and is closed by the next call, for example
        by a heartbeat's own. `Engine.dispose` would forget it there.

        Returns:
            Whether the pool is one that keeps connections, and opens new ones.
        """
        # A late import: a catalog is open by then, and has imported it.
        from sqlalchemy.pool import QueuePool

        if not isinstance(self._engine.pool, QueuePool):
            return False
        self._engine.pool.dispose()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def writing(self, *, durable: bool = False) -> Iterator[Connection]:
        """Open a transaction that excludes other writers from its first statement on.

        durable: flush it to disk at its end, also while another connection keeps SQLite's log open.
        """
        engine = self._durable if durable else self._engine
        with translated(self.url), transaction(engine) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction on one snapshot of the catalog. It blocks nobody."""
        owner, thread_connection = self._kept
        free = (
            thread_connection is not None
            and owner == _this_thread()
            and not thread_connection.in_transaction()
        )
        with translated(self.url):
            if thread_connection is not None and free:
                with thread_connection.begin():
                    yield thread_connection
            else:
                with self._readers.begin() as connection:
                    yield connection

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep a connection for the reading methods of this thread.

        SQLite opens a file for each connection, and merges its log into it when the last one closes.
        """
        # A server has few connections, and keeps its log.
        if self._engine.dialect.name != "sqlite" or self._kept != _NO_CONNECTION:
            yield
            return
        with translated(self.url), self._readers.connect() as connection:
            self._kept = _this_thread(), connection
            try:
                yield
            finally:
                self._kept = _NO_CONNECTION

    def now(self) -> datetime:
        """Return the time by which leases and dates are compared (see `ckptcore.catalog.database.clock`)."""
        with self.reading() as conn:
            return clock(conn)

    @contextmanager
    def queueing(self) -> Iterator[Connection]:
        """Open a transaction on the inbox or the outbox. It does not wait for writers of other rows."""
        with translated(self.url), transaction(self._queues) as connection:
            yield connection

    def begin(
        self,
        request: Mapping[str, Any],
        *,
        source_uri: str,
        destination_uri: str,
        verb: str,
        tool_version: str,
        flow_run_id: str | None = None,
    ) -> str:
        """Record that a conversion starts, and return its id. See `ConversionStart` for the arguments."""
        start = ConversionStart(request, source_uri, destination_uri, verb, tool_version, flow_run_id)
        return self.begin_each([start])[0].id

    def begin_each(self, starts: Iterable[ConversionStart]) -> tuple[Begun, ...]:
        """Record in one transaction that several conversions start; read what is known of their sources."""
        process, begun = this_process(), tuple[Begun, ...]()
        try:
            with self.writing() as conn:
                conversions.end_interrupted(conn, clock(conn), *conversions.of_machine(process))
                begun = tuple(conversions.begin(conn, clock(conn), start, process) for start in starts)
            conversion_ids = [conversion.id for conversion in begun]
            _RUNNING.update(dict.fromkeys(conversion_ids, process))
            RUNNING.add(self.renew, conversion_ids)
        finally:
            if process not in _RUNNING.values():  # nothing was recorded
                forget(process)
        return begun

    def renew(self, conversion_ids: Collection[str]) -> Collection[str]:
        """Renew the rows of running conversions, and return those that have ended."""
        try:
            with self.writing() as conn:
                return conversions.renew(conn, list(conversion_ids))
        finally:  # conversions take hours, and a server has few connections
            self.rest()

    def end_interrupted(self) -> tuple[str, ...]:
        """End the conversions whose process is known to have ended, and return their ids."""
        with self.reading() as conn:
            if not conversions.interrupted(conn):  # as a rule: no writer waits for this
                return ()
        with self.writing() as conn:
            return conversions.end_interrupted(conn, clock(conn))

    def succeed_each(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Record several published outputs in one transaction that is on disk when this returns.

        rows: id and arguments of `succeed` of each.
        """
        succeeded = []
        with self.writing(durable=True) as conn:
            for conversion, row in rows:
                conversions.succeed(conn, clock(conn), conversion, **row)
                succeeded.append(conversion)
        _forget_processes(succeeded)

    def succeed(
        self, conversion_id: str, facts: ConversionFacts, *, source: CheckpointFacts, derived: CheckpointFacts
    ) -> str:
        """Record that a conversion published `derived`, made from `source`.

        A second call for the same conversion changes nothing.

        Args:
            conversion_id: the id that `begin` returned.
            facts: the conversion's sizes, digests, times and findings.
            source: the checkpoint that was read.
            derived: the checkpoint that was written.

        Returns:
            The id of the derived checkpoint.
        """
        with self.writing() as conn:
            derived_id = conversions.succeed(conn, clock(conn), conversion_id, facts, source, derived)
        _forget_processes([conversion_id])
        return derived_id

    def thinned(
        self,
        conversion_id: str,
        before: CheckpointRow,
        facts: CheckpointFacts,
        findings: Iterable[Finding],
        record: RetirementRecord,
        digests: tuple[str, str],
    ) -> str:
        """Record that a conversion left a checkpoint at its place without a part of it.

        Args:
            conversion_id: the id that `begin` returned.
            before: the checkpoint until now.
            facts: what is there now.
            findings: the warnings about it.
            record: what was given up; its child is filled in.
            digests: of the content until now and from now on, as claims have them.

        Returns:
            The id of what is there now.
        """
        with self.writing(durable=True) as conn:
            now = clock(conn)
            public = conversions.thinned(conn, now, conversion_id, before, facts, findings)
            claims.follow(conn, before.uri, *digests)
            if public != before.id:
                retirements.note(conn, now, before.id, replace(record, child=public), "checkpoint.thin")
        _forget_processes([conversion_id])
        return public

    def pushed(
        self, conversion_id: str, checkpoint_id: str, commit: str, *, bytes_in: int, bytes_out: int
    ) -> None:
        """Record that a conversion sent a checkpoint to a repository of a hub.

        Args:
            conversion_id: the id that `begin` returned.
            checkpoint_id: the checkpoint.
            commit: the commit that holds all of it.
            bytes_in: bytes of its files.
            bytes_out: bytes of those that the repository did not have.
        """
        with self.writing() as conn:
            conversions.pushed(
                conn,
                clock(conn),
                conversion_id,
                checkpoint_id,
                commit,
                bytes_in=bytes_in,
                bytes_out=bytes_out,
            )
        _forget_processes([conversion_id])

    def fail(
        self,
        conversion_id: str,
        *,
        code: str,
        message: str,
        findings: Iterable[Finding] = (),
        source: CheckpointFacts | None = None,
    ) -> None:
        """Record that a conversion failed. If `source` is given, the findings are recorded against it."""
        with self.writing() as conn:
            conversions.fail(
                conn, clock(conn), conversion_id, code=code, message=message, findings=findings, source=source
            )
        _forget_processes([conversion_id])

    def withdraw(self, conversion_id: str) -> None:
        """Remove a conversion that runs, and whose request turned out to be none."""
        with self.writing() as conn:
            conversions.withdraw(conn, conversion_id)
        _forget_processes([conversion_id])

    def record_verdict(self, conversion_id: str, checks: Iterable[tuple[str, str, str]]) -> str:
        """Record the results of checks on the export that a conversion wrote.

        Args:
            conversion_id: the conversion that wrote the export.
            checks: (check, verdict, summary) each; the verdict is ``ok``, ``failed`` or ``not-done``. A check
                that was not done revokes no earlier result.

        Returns:
            The verdict on the export over all checks recorded so far.
        """
        with self.writing() as conn:
            return conversions.record_verdict(conn, clock(conn), conversion_id, checks)

    def record_validation(
        self,
        facts: CheckpointFacts,
        findings: Iterable[Finding] = (),
        *,
        level: str = "coverage",
        kind: Kind = Kind.SOURCE,
    ) -> str:
        """Record the findings of a check on a checkpoint, and return the checkpoint's id.

        Findings of earlier checks that were not deeper and are not repeated count as resolved.

        Args:
            facts: the checkpoint that was checked.
            findings: everything that the check found.
            level: the level of the check.
            kind: the kind to record for an unknown checkpoint. A known derived checkpoint stays derived.
        """
        if level not in LEVELS:
            raise UsageError(
                f"the check level must be one of {', '.join(LEVELS)} (got {level!r})",
                hint="choose one of them",
            )
        with self.writing() as conn:
            return conversions.record_validation(conn, clock(conn), facts, findings, level, kind)

    def tag(self, ref: str, key: str, value: str | None) -> None:
        """Set a tag of a checkpoint (id, unique prefix or URI). The value None removes the tag."""
        with self.writing() as conn:
            checkpoint = query.resolve_checkpoint(conn, ref)
            checkpoints.set_tag(conn, clock(conn), checkpoint, key, value)

    def describe(self, ref: str, facts: TrainingFacts, origin: str = USER) -> None:
        """Record facts about the training of a checkpoint, also for what was made from it.

        Args:
            ref: id, unique prefix, alias or URI.
            facts: the facts; they replace those of the same or a later origin.
            origin: one of `ckptcore.catalog.training.PRECEDENCE`.
        """
        with self.writing() as conn:
            training_rows.put(conn, clock(conn), query.resolve_checkpoint(conn, ref), facts, origin)

    def training(self, ref: str) -> Training | None:
        """Return the recorded facts about the training of a checkpoint (id, prefix or URI), or None."""
        with self.reading() as conn:
            return training_rows.read(conn, query.resolve_checkpoint(conn, ref))

    def best(
        self,
        metric: str,
        goal: str = "min",
        *,
        run: str | None = None,
        kind: str | None = None,
        limit: int = 10,
    ) -> tuple[Ranked, ...]:
        """Return the checkpoints with the best values of a metric; see `training_rows.best`."""
        with self.reading() as conn:
            return training_rows.best(conn, metric, goal, run=run, kind=kind, limit=limit)

    def list(
        self,
        limit: int | None = 50,
        *,
        kind: str | None = None,
        state: str | None = None,
        run: str | None = None,
    ) -> tuple[CheckpointRow, ...]:
        """Return checkpoints, newest first."""
        with self.reading() as conn:
            return query.list_checkpoints(conn, limit, kind, state, run)

    def conversions(self, limit: int | None = 50, *, state: str | None = None) -> tuple[ConversionRow, ...]:
        """Return conversions, newest first, including failed and running ones."""
        with self.reading() as conn:
            return query.list_conversions(conn, limit, state)

    def show(self, ref: str, *, tensors: bool = True) -> CheckpointDetail | ConversionDetail:
        """Return the details of a checkpoint (id, unique prefix or URI) or a conversion (id or prefix).

        Args:
            ref: the checkpoint or conversion.
            tensors: False omits the list of tensors, which can be long.
        """
        with self.reading() as conn:
            table, row_id = query.resolve(conn, ref)
            detail = query.detail_of(conn, table, row_id, tensors)
            if isinstance(detail, ConversionDetail):
                return detail
            return replace(detail, training=training_rows.read(conn, row_id))

    def place_of(self, name: str) -> str | None:
        """Return the URI of the checkpoint with an id, the beginning of one, or an alias; None without one.

        Raises `UsageError` for the beginning of several ids.
        """
        with self.reading() as conn:
            return query.place_of(conn, name)

    def at(self, uri: str) -> tuple[CheckpointRow, tuple[FileRow, ...]] | None:
        """Return the current or last checkpoint at a URI with its files, or None if none was recorded."""
        return self.at_each([uri])[0]

    def at_each(self, uris: Iterable[str]) -> tuple[tuple[CheckpointRow, tuple[FileRow, ...]] | None, ...]:
        """Return the same for several URIs, in one transaction."""
        with self.reading() as conn:
            return tuple(query.at(conn, uri) for uri in uris)

    def lineage(self, ref: str, *, up: bool = True, down: bool = True) -> Lineage:
        """Return all ancestors (`up`) and descendants (`down`) of a checkpoint."""
        with self.reading() as conn:
            return lineage.lineage(conn, ref, up=up, down=down)

    def which(self, what: str) -> tuple[Origin, ...]:
        """Find the origin of a file, a BLAKE3 digest (or its first 8 digits or more) or a URI.

        A local file outside all recorded checkpoints is recognised by its bytes, which are read once.

        Returns:
            One origin for each place with the same bytes, current ones first.

        Raises:
            UsageError: the catalog knows no such file, digest or URI.
        """
        with self.reading() as conn:
            origins = lineage.which(conn, what)
            kinds = [] if origins else lineage.kinds_of(conn, what)
        # Outside of both transactions: hashing a large file takes minutes.
        digests = lineage.digests_of_file(what, kinds)
        with self.reading() as conn:  # one place may have a digest of the file, another one of its parts
            origins = origins or [origin for digest in digests for origin in lineage.which(conn, digest)]
        if not origins:
            raise UsageError(
                f"cannot find {what} in the catalog",
                hint="`ckptcore catalog list` shows the recorded checkpoints",
                digest=digests[0] if digests else None,
            )
        return tuple(origins)

    def copies(self, fingerprint: str) -> tuple[Origin, ...]:
        """Find every checkpoint with the same tensor values, in any format and topology.

        Args:
            fingerprint: the fingerprint of a checkpoint or a tensor, or its first 8 digits or more.

        Raises:
            UsageError: it is not a fingerprint, or the catalog knows no checkpoint or tensor with it.
        """
        if not lineage.is_digest(fingerprint):
            raise UsageError(
                f"{fingerprint!r} is not a fingerprint", hint="use 64 hex digits, or the first 8 or more"
            )
        with self.reading() as conn:
            origins = lineage.with_fingerprint(conn, fingerprint)
        if not origins:
            raise UsageError(
                f"no checkpoint or tensor in the catalog has the fingerprint {fingerprint}",
                hint="`ckptcore fingerprint SRC` computes one",
            )
        return tuple(origins)


def _this_thread() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _forget_processes(ended: Iterable[str]) -> None:
    """Drop the marks of this process whose conversions have all ended, and the renewal of those."""
    ended = tuple(ended)
    RUNNING.drop(ended)
    gone = {_RUNNING.pop(conversion) for conversion in ended if conversion in _RUNNING}
    for process in gone - set(_RUNNING.values()):
        forget(process)


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that is committed at the end of the block. Errors of the block roll it back.

    Raises:
        CatalogUnavailable: It is unknown whether it was committed: the database did not answer for `WAIT_S`.
        sqlalchemy.exc.SQLAlchemyError: It was not committed.
    """
    mark: _Mark | None = None
    try:
        with engine.connect() as connection, connection.begin():
            yield connection
            mark = _MARKS[connection.dialect.name](connection)
    except exc.SQLAlchemyError as error:
        if mark is None or not _is_committed(engine, mark, error):
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


def _is_committed(engine: Engine, mark: _Mark, error: exc.SQLAlchemyError) -> bool:
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
            raise CatalogUnavailable(
                f"it is unknown whether the catalog has recorded this: {error}",
                hint="run the command again once the database answers: it continues from what is recorded",
            ) from error
        host.sleep(_PAUSE_S)
