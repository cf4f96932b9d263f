"""The catalog as an object: one open database, and the verbs people use on it.

Writing verbs run in one transaction each, begun as a writer: they happen as a whole or not at
all, one after the other, whatever number of processes writes. Reading verbs never wait for them.
Every verb raises `CatalogError` when the database fails, and `UsageError` for an id that is not
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckptcore.catalog import checkpoints, conversions, export_verdicts, lineage, query
from ckptcore.catalog.database import BEGIN, QUEUE_BEGIN, READER_BEGIN, require_writable, translated
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.types import (
    CheckpointDetail,
    CheckpointFacts,
    CheckpointRow,
    ConversionDetail,
    ConversionFacts,
    ConversionRow,
    FileRow,
    Kind,
    Lineage,
    Origin,
)
from ckptcore.errors import LEVELS, Finding, UsageError, current_level

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine


class Catalog:
    """An open catalog; see `ckptcore.catalog.open_catalog`.

    May be used by several threads. After a fork or in another process, open it again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._readers = engine.execution_options(**{BEGIN: READER_BEGIN})
        self._queues = engine.execution_options(**{BEGIN: QUEUE_BEGIN})

    @property
    def url(self) -> str:
        """Where the catalog is, without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Give the database connections back."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is the only writer from its first statement on."""
        require_writable(self._engine)
        with translated(self.url), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one moment of the catalog and blocks nobody."""
        with translated(self.url), self._readers.begin() as connection:
            yield connection

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep one idle connection: SQLite folds its log into the file whenever the last one is closed."""
        with translated(self.url), self._engine.connect():
            yield

    @contextmanager
    def queueing(self) -> Iterator[Connection]:
        """A transaction on the inbox or the outbox: it waits for no other writer of other rows."""
        require_writable(self._engine)
        with translated(self.url), self._queues.begin() as connection:
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
        """Record that a conversion starts; its id."""
        with self.writing() as conn:
            return conversions.begin_conversion(
                conn,
                _now(),
                request,
                source_uri=source_uri,
                destination_uri=destination_uri,
                verb=verb,
                tool_version=tool_version,
                flow_run_id=flow_run_id,
            )

    def succeed(
        self,
        conversion_id: str,
        facts: ConversionFacts,
        *,
        source: CheckpointFacts,
        derived: CheckpointFacts,
        findings: Iterable[Finding] = (),
    ) -> str:
        """Record that it published `derived`, made from `source`; the id of the derived one.

        findings: what was found on the source on the way (warnings, notes). Called twice, the second time
        changes nothing.
        """
        with self.writing() as conn:
            return conversions.succeed(conn, _now(), conversion_id, facts, source, derived, findings)

    def fail(
        self,
        conversion_id: str,
        *,
        code: str,
        message: str,
        findings: Iterable[Finding] = (),
        source: CheckpointFacts | None = None,
    ) -> None:
        """Record that it failed. With `source`, its findings stand against that checkpoint."""
        with self.writing() as conn:
            conversions.fail(
                conn, _now(), conversion_id, code=code, message=message, findings=findings, source=source
            )

    def record_verdict(self, conversion_id: str, checks: Iterable[tuple[str, str, str]]) -> str:
        """Record what was proven of the export that a conversion wrote; the verdict, with what was known.

        checks: (check, ok or failed or not-done, summary). A check that was not done takes nothing back.
        """
        with self.writing() as conn:
            return export_verdicts.record(conn, _now(), conversion_id, checks)

    def record_validation(
        self,
        facts: CheckpointFacts,
        findings: Iterable[Finding] = (),
        *,
        level: str = "coverage",
        kind: Kind = Kind.SOURCE,
    ) -> str:
        """Record what a check of `level` found on a checkpoint; the checkpoint's id.

        Findings of earlier checks that were not deeper and are not repeated count as resolved. kind: what it
        is where nothing is known of it; what is known to be derived stays so.
        """
        level = current_level(level)
        if level not in LEVELS:
            raise UsageError(
                f"the check level must be one of {', '.join(LEVELS)} (got {level!r})",
                hint="choose one of them",
            )
        with self.writing() as conn:
            return conversions.record_validation(conn, _now(), facts, findings, level, kind)

    def tag(self, ref: str, key: str, value: str | None) -> None:
        """Put or change a tag of a checkpoint (id, unique prefix or URI); None removes it."""
        with self.writing() as conn:
            checkpoint = query.resolve_checkpoint(conn, ref)
            checkpoints.set_tag(conn, _now(), checkpoint, key, value)

    def list(
        self,
        limit: int | None = 50,
        *,
        kind: str | None = None,
        state: str | None = None,
        run: str | None = None,
    ) -> tuple[CheckpointRow, ...]:
        """Checkpoints, the newest first."""
        with self.reading() as conn:
            return query.list_checkpoints(conn, limit, kind, state, run)

    def conversions(self, limit: int | None = 50, *, state: str | None = None) -> tuple[ConversionRow, ...]:
        """Conversions, the newest first: failed and running ones too."""
        with self.reading() as conn:
            return query.list_conversions(conn, limit, state)

    def show(self, ref: str, *, tensors: bool = True) -> CheckpointDetail | ConversionDetail:
        """All about a checkpoint (id, unique prefix or URI) or a conversion (id or prefix).

        tensors: False leaves the list of tensors out, which can be long.
        """
        with self.reading() as conn:
            return query.show(conn, ref, tensors)

    def at(self, uri: str) -> tuple[CheckpointRow, tuple[FileRow, ...]] | None:
        """What stands at a place now, or was the last to, and its files; None where nothing was recorded."""
        with self.reading() as conn:
            return query.at(conn, normal_uri(uri))

    def lineage(self, ref: str, *, up: bool = True, down: bool = True) -> Lineage:
        """What a checkpoint was made from and what was made from it, to the ends."""
        with self.reading() as conn:
            return lineage.lineage(conn, ref, up=up, down=down)

    def which(self, what: str) -> tuple[Origin, ...]:
        """Where a file, a BLAKE3 digest (or a prefix of 8 digits and more) or a URI comes from.

        A local file that is in no recorded checkpoint is recognised by its bytes: they are read
        once. Several answers when the same bytes are in several places, the current ones first.
        """
        digest = None
        with self.reading() as conn:
            found = lineage.which(conn, what)
        if not found:
            digest = lineage.digest_of_file(what)
        if digest is not None:
            with self.reading() as conn:
                found = lineage.which(conn, digest)
        if not found:
            raise UsageError(
                f"the catalog does not know {what}",
                hint="`ckptcore catalog list` shows what it knows",
                digest=digest,
            )
        return tuple(found)

    def copies(self, fingerprint: str) -> tuple[Origin, ...]:
        """Every checkpoint that holds the numbers of a fingerprint, in whatever format and topology.

        fingerprint: of a checkpoint or of a tensor, or a prefix of 8 digits and more.
        """
        if not lineage.is_digest(fingerprint):
            raise UsageError(
                f"{fingerprint!r} is no fingerprint", hint="64 hex digits, or the first 8 and more"
            )
        with self.reading() as conn:
            found = lineage.with_fingerprint(conn, fingerprint)
        if not found:
            raise UsageError(
                f"the catalog knows no checkpoint or tensor with the fingerprint {fingerprint}",
                hint="`ckptcore fingerprint SRC` takes one",
            )
        return tuple(found)


def _now() -> datetime:
    return datetime.now(UTC)
