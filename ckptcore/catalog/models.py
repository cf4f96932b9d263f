"""The tables of the catalog.

Values are TEXT and states are plain strings, without a maximum length. JSON is stored as text, and only in
columns that nobody filters by. Every foreign key is indexed. The same tables serve SQLite and PostgreSQL.
A change here needs a migration in `alembic/versions`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeEngine

# SQLite numbers rows itself only in a column declared INTEGER.
_Id = BigInteger().with_variant(Integer(), "sqlite")
_RowId = Annotated[int, mapped_column(_Id, primary_key=True, comment="Row id.")]
_PublicId = Annotated[str, mapped_column(unique=True, comment="Public id.")]
_CheckpointKey = Annotated[
    int, mapped_column(ForeignKey("checkpoint.id"), primary_key=True, comment="Checkpoint.")
]
_ConversionKey = Annotated[
    int, mapped_column(ForeignKey("conversion.id"), primary_key=True, comment="Conversion.")
]

# Names by which Alembic can drop a constraint.
NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """A time with a zone. SQLite does not store the zone, so it is set to UTC when a row is read.

    What is no time for Python is left as text: it costs one row, not all. SQLite has no type for times: any
    value may be in such a column. PostgreSQL has ``infinity``, and years that Python has not.
    `ckptcore.catalog.row_values` reports the text.
    """

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


class Base(DeclarativeBase):
    """The base of tables. The catalog selects their columns in statements of SQLAlchemy's core."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        int: BigInteger(),
        float: Double(),
        bool: Boolean(),
        bytes: LargeBinary(),
        datetime: UtcDateTime(),
    }

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.metadata.tables[cls.__tablename__].comment = (cls.__doc__ or "").partition("\n")[0]


class TrainingRun(Base):
    """A training run that checkpoints come from."""

    __tablename__ = "training_run"

    id: Mapped[_RowId]
    name: Mapped[str] = mapped_column(unique=True, comment="Name of the run: its folder, or as announced.")
    created_at: Mapped[datetime] = mapped_column(comment="When the run was first recorded.")


class Checkpoint(Base):
    """One content at one URI. Other content at the same URI is another row.

    content_digest is '' while unknown, because NULLs would all count as different in the key.
    """

    __tablename__ = "checkpoint"
    __table_args__ = (
        UniqueConstraint("uri", "manifest_digest", "content_digest"),
        Index(None, "run_id", "step"),
        # All that the page of runs sums up: it reads no row of the table.
        Index(None, "run_id", "state", "kind", "step", "total_bytes", "created_at"),
        Index(None, "state", "created_at"),
    )

    id: Mapped[_RowId]
    uuid: Mapped[_PublicId]
    run_id: Mapped[int | None] = mapped_column(
        ForeignKey("training_run.id"), comment="Training run, if known."
    )
    kind: Mapped[str] = mapped_column(
        comment="source (a trainer wrote it) or derived (a conversion wrote it)."
    )
    format: Mapped[str] = mapped_column(comment="On-disk format.")
    uri: Mapped[str] = mapped_column(comment="Folder or file, in one spelling and without credentials.")
    state: Mapped[str] = mapped_column(
        comment="present, damaged, incomplete, replaced, gone, retired or deleted."
    )
    step: Mapped[int | None] = mapped_column(comment="Training step, if known.")
    total_bytes: Mapped[int] = mapped_column(comment="Bytes of all tensors.")
    num_tensors: Mapped[int] = mapped_column(comment="Number of tensors.")
    num_files: Mapped[int] = mapped_column(comment="Number of files with data that the manifest names.")
    dtypes: Mapped[str] = mapped_column(comment="Comma-separated dtypes, the one with the most bytes first.")
    manifest_digest: Mapped[str] = mapped_column(
        index=True, comment="Digest of the manifest: names, shapes and places of all tensors."
    )
    content_digest: Mapped[str] = mapped_column(
        index=True, comment="Digest over the digests of all files; empty while unknown."
    )
    origin: Mapped[str] = mapped_column(comment="JSON: what the checkpoint records about its writer.")
    created_at: Mapped[datetime] = mapped_column(index=True, comment="When the row was recorded.")
    verified_at: Mapped[datetime | None] = mapped_column(comment="When it was last proven.")
    verified_level: Mapped[str | None] = mapped_column(
        comment="Check level of that proof: files, coverage, bytes or values."
    )
    replaced_at: Mapped[datetime | None] = mapped_column(comment="When other content was found at the URI.")
    fingerprint: Mapped[str | None] = mapped_column(
        index=True, comment="Digest of all tensor values in any format and topology, if computed."
    )
    checked_at: Mapped[datetime | None] = mapped_column(comment="When scrub last looked at it.")
    deleted_at: Mapped[datetime | None] = mapped_column(comment="When it was purged after retire.")


class CheckpointFile(Base):
    """A file of a checkpoint."""

    __tablename__ = "checkpoint_file"

    checkpoint_id: Mapped[_CheckpointKey]
    path: Mapped[str] = mapped_column(primary_key=True, comment="Path below the checkpoint's URI.")
    nbytes: Mapped[int] = mapped_column(comment="Size in bytes.")
    digest: Mapped[str | None] = mapped_column(
        index=True, comment="BLAKE3 in hex, or crc64nvme:HEX of a source's file, if known."
    )
    role: Mapped[str] = mapped_column(
        server_default="data", comment="data (tensors and objects) or extra (config, tokenizer, index, card)."
    )


class Tensor(Base):
    """A logical tensor of a checkpoint."""

    __tablename__ = "tensor"

    checkpoint_id: Mapped[_CheckpointKey]
    fqn: Mapped[str] = mapped_column(primary_key=True, index=True, comment="Fully qualified name.")
    dtype: Mapped[str] = mapped_column(comment="Stored dtype.")
    shape: Mapped[str] = mapped_column(comment="JSON list of sizes, in elements.")
    nbytes: Mapped[int] = mapped_column(comment="Bytes of its elements.")
    fingerprint: Mapped[str | None] = mapped_column(index=True, comment="Digest of its values, if computed.")


class Conversion(Base):
    """One run of consolidate, export or reshard, also a failed one.

    source_stamp, source_ctime: see `ckptcore.checking.source_stamps`; NULL if unknown, the latter also if the
    store has no such time.
    """

    __tablename__ = "conversion"
    __table_args__ = (Index(None, "state", "started_at"),)

    id: Mapped[_RowId]
    uuid: Mapped[_PublicId]
    verb: Mapped[str] = mapped_column(comment="Command: consolidate, export, reshard, thin, push or rebuilt.")
    state: Mapped[str] = mapped_column(comment="running, succeeded or failed.")
    source_uri: Mapped[str] = mapped_column(index=True, comment="What was read.")
    destination_uri: Mapped[str] = mapped_column(index=True, comment="What was, or would be, written.")
    request: Mapped[str] = mapped_column(
        comment="JSON: the options; of a push that succeeded also its commit."
    )
    plan_digest: Mapped[str | None] = mapped_column(comment="Digest of the executed plan.")
    tool_version: Mapped[str] = mapped_column(comment="Version of ckptcore.")
    flow_run_id: Mapped[str | None] = mapped_column(index=True, comment="Prefect flow run, if any.")
    started_at: Mapped[datetime] = mapped_column(index=True, comment="Start.")
    ended_at: Mapped[datetime | None] = mapped_column(comment="End; null while it runs.")
    bytes_in: Mapped[int | None] = mapped_column(comment="Bytes read.")
    bytes_out: Mapped[int | None] = mapped_column(comment="Bytes written.")
    peak_memory: Mapped[int | None] = mapped_column(comment="Peak resident memory in bytes.")
    error_code: Mapped[str | None] = mapped_column(comment="Code of the error, if it failed.")
    error_message: Mapped[str | None] = mapped_column(comment="Message of the error, if it failed.")
    timings: Mapped[str] = mapped_column(comment="JSON: stage to seconds.")
    map_digest: Mapped[str | None] = mapped_column(
        comment="Digest of the renaming, if a fingerprint was computed."
    )
    fingerprint: Mapped[str | None] = mapped_column(
        index=True, comment="Digest of the converted tensors before any cast, if computed."
    )
    source_stamp: Mapped[str | None] = mapped_column(
        comment="Digest over sizes, times and identities of the source's files."
    )
    source_ctime: Mapped[str | None] = mapped_column(comment="The same over status times.")
    export_verdict: Mapped[str | None] = mapped_column(
        comment="Verdict of verify-export: ok, failed or unproven; null if it never ran."
    )
    export_checks: Mapped[str | None] = mapped_column(comment="JSON: check to verdict, summary and time.")
    export_verified_at: Mapped[datetime | None] = mapped_column(comment="Time of the last check.")


class ConversionProcess(Base):
    """The process of a conversion that runs, where it is known: one that has ended runs nothing.

    process: as in `ckptcore.utils.processes`, '' if unknown; see `heartbeats.py`.
    """

    __tablename__ = "conversion_process"

    conversion_id: Mapped[_ConversionKey]
    process: Mapped[str] = mapped_column(
        comment="Pid, start time, namespaces, and boot id with a mark, separated by spaces."
    )
    renewed_at: Mapped[datetime | None] = mapped_column(
        comment="When it last showed a sign of life, by the clock of the database."
    )


class ConversionIO(Base):
    """An edge of lineage: a checkpoint that a conversion read or wrote."""

    __tablename__ = "conversion_io"
    __table_args__ = (Index(None, "checkpoint_id", "direction"),)

    conversion_id: Mapped[_ConversionKey]
    checkpoint_id: Mapped[_CheckpointKey]
    direction: Mapped[str] = mapped_column(primary_key=True, comment="in or out.")


class FindingRecord(Base):
    """A finding of a check. It is open until a check at least as deep no longer reports it."""

    __tablename__ = "finding"
    __table_args__ = (
        Index(None, "checkpoint_id", "resolved_at"),
        # The views of a run's history: alarms are few, and other findings may be many.
        Index(None, "level", "resolved_at", "checkpoint_id"),
    )

    id: Mapped[_RowId]
    checkpoint_id: Mapped[int | None] = mapped_column(
        ForeignKey("checkpoint.id"), comment="Checkpoint, if any."
    )
    conversion_id: Mapped[int | None] = mapped_column(
        ForeignKey("conversion.id"), index=True, comment="Conversion that found it, if any."
    )
    code: Mapped[str] = mapped_column(index=True, comment="Stable code of the finding.")
    level: Mapped[str] = mapped_column(comment="Check level that finds it.")
    severity: Mapped[str] = mapped_column(comment="error, warning or info.")
    message: Mapped[str] = mapped_column(comment="Message for people.")
    fqn: Mapped[str | None] = mapped_column(comment="Tensor, if it is about one.")
    file: Mapped[str | None] = mapped_column(comment="File, if it is about one.")
    hint: Mapped[str] = mapped_column(comment="Next step.")
    found_at: Mapped[datetime] = mapped_column(comment="When it was found.")
    resolved_at: Mapped[datetime | None] = mapped_column(
        comment="When it was no longer found; null while open."
    )


class Tag(Base):
    """A key and a value that a user sets on a checkpoint."""

    __tablename__ = "tag"
    __table_args__ = (Index(None, "key", "value"),)

    checkpoint_id: Mapped[_CheckpointKey]
    key: Mapped[str] = mapped_column(primary_key=True, comment="Key.")
    value: Mapped[str] = mapped_column(comment="Value.")
    updated_at: Mapped[datetime] = mapped_column(comment="When it was set.")


class WatchedRoot(Base):
    """A folder that is swept for new checkpoints."""

    __tablename__ = "watched_roots"

    id: Mapped[_RowId]
    name: Mapped[str] = mapped_column(unique=True, comment="Name.")
    uri: Mapped[str] = mapped_column(index=True, comment="Folder.")
    include: Mapped[str] = mapped_column(comment="JSON list of globs; empty for all.")
    target: Mapped[str] = mapped_column(comment="JSON: what is made of what is found.")
    enabled: Mapped[bool] = mapped_column(comment="False while paused.")
    created_at: Mapped[datetime] = mapped_column(comment="When it was added.")
    swept_at: Mapped[datetime | None] = mapped_column(comment="Last sweep.")
    swept_note: Mapped[str | None] = mapped_column(comment="Result of the last sweep.")


class Sighting(Base):
    """What a sweep saw at a URI."""

    __tablename__ = "sightings"
    __table_args__ = (Index(None, "root", "state"),)

    id: Mapped[_RowId]
    uri: Mapped[str] = mapped_column(unique=True, comment="Place of the checkpoint.")
    root: Mapped[str] = mapped_column(comment="Watched root.")
    step: Mapped[int | None] = mapped_column(comment="Step in its name.")
    state: Mapped[str] = mapped_column(comment="complete, writing, broken or unread.")
    stamp: Mapped[str] = mapped_column(comment="Changes when a file there is written again.")
    source_digest: Mapped[str | None] = mapped_column(comment="Identity of the complete content.")
    manifest_digest: Mapped[str | None] = mapped_column(comment="Digest of its manifest.")
    findings: Mapped[str] = mapped_column(comment="JSON: findings of the look.")
    first_seen_at: Mapped[datetime] = mapped_column(comment="First sweep that saw it.")
    last_seen_at: Mapped[datetime] = mapped_column(comment="Last sweep that saw it.")
    changed_at: Mapped[datetime] = mapped_column(comment="When a file there last changed.")


class Claim(Base):
    """A lease on making one output of one content, or the record that it was made."""

    __tablename__ = "claims"
    __table_args__ = (UniqueConstraint("source_digest", "destination_uri", "options_digest"),)

    id: Mapped[_RowId]
    source_digest: Mapped[str] = mapped_column(comment="Identity of the source's content.")
    destination_uri: Mapped[str] = mapped_column(index=True, comment="Destination.")
    options_digest: Mapped[str] = mapped_column(comment="Digest of the options that change the output.")
    source_uri: Mapped[str] = mapped_column(index=True, comment="Source.")
    state: Mapped[str] = mapped_column(comment="taken, done or failed.")
    owner: Mapped[str] = mapped_column(comment="Process that has the claim.")
    attempts: Mapped[int] = mapped_column(comment="How often it was taken.")
    taken_at: Mapped[datetime] = mapped_column(comment="When it was last taken.")
    due_at: Mapped[datetime] = mapped_column(comment="When the lease ends.")
    ended_at: Mapped[datetime | None] = mapped_column(comment="When it was done or failed.")
    error_code: Mapped[str | None] = mapped_column(comment="Code of the last error.")
    error_message: Mapped[str | None] = mapped_column(comment="Message of the last error.")


class Inbox(Base):
    """An accepted event, processed until it is done or has failed."""

    __tablename__ = "inbox"
    __table_args__ = (UniqueConstraint("source", "event_id"), Index(None, "state", "due_at"))

    id: Mapped[_RowId]
    uuid: Mapped[_PublicId]
    source: Mapped[str] = mapped_column(comment="Configured source of the receiver.")
    event_id: Mapped[str] = mapped_column(comment="Id of the event, unique in its source.")
    type: Mapped[str] = mapped_column(comment="What happened.")
    uri: Mapped[str] = mapped_column(index=True, comment="Announced checkpoint.")
    run: Mapped[str] = mapped_column(comment="Announced run, or empty.")
    step: Mapped[int | None] = mapped_column(comment="Announced step.")
    body: Mapped[str] = mapped_column(comment="Body as received.")
    state: Mapped[str] = mapped_column(comment="waiting, taken, done or failed.")
    attempts: Mapped[int] = mapped_column(comment="How often it was taken.")
    due_at: Mapped[datetime] = mapped_column(comment="When it is taken next, or its lease ends.")
    received_at: Mapped[datetime] = mapped_column(index=True, comment="When it was accepted.")
    ended_at: Mapped[datetime | None] = mapped_column(comment="When it was done or failed.")
    flow_run_id: Mapped[str | None] = mapped_column(index=True, comment="Prefect flow run.")
    error_message: Mapped[str | None] = mapped_column(comment="Last error.")
    attempts_before: Mapped[int] = mapped_column(
        server_default="0", comment="Attempts before the last retry by a user."
    )


class Outbox(Base):
    """A message to an endpoint."""

    __tablename__ = "outbox"
    __table_args__ = (UniqueConstraint("endpoint", "key"), Index(None, "state", "due_at"))

    id: Mapped[_RowId]
    uuid: Mapped[_PublicId]
    endpoint: Mapped[str] = mapped_column(comment="Configured target.")
    key: Mapped[str] = mapped_column(comment="Key, unique for its endpoint.")
    type: Mapped[str] = mapped_column(comment="Kind of message.")
    body: Mapped[str] = mapped_column(comment="JSON body.")
    state: Mapped[str] = mapped_column(comment="waiting, taken, done or failed.")
    attempts: Mapped[int] = mapped_column(comment="How often it was taken.")
    due_at: Mapped[datetime] = mapped_column(comment="When it is taken next, or its lease ends.")
    created_at: Mapped[datetime] = mapped_column(index=True, comment="When it was put here.")
    ended_at: Mapped[datetime | None] = mapped_column(comment="When it was delivered or failed.")
    error_message: Mapped[str | None] = mapped_column(comment="Last error.")
    attempts_before: Mapped[int] = mapped_column(
        server_default="0", comment="Attempts before the last retry by a user."
    )


class Alias(Base):
    """A name for one checkpoint at a time."""

    __tablename__ = "aliases"

    id: Mapped[_RowId]
    name: Mapped[str] = mapped_column(unique=True, comment="Name.")
    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), index=True, comment="Checkpoint.")
    version: Mapped[int] = mapped_column(comment="How often the name was set.")
    updated_at: Mapped[datetime] = mapped_column(comment="When it was last set.")


class Hold(Base):
    """A reason why a checkpoint must not be deleted."""

    __tablename__ = "holds"
    __table_args__ = (Index(None, "checkpoint_id", "released_at"),)

    id: Mapped[_RowId]
    uuid: Mapped[_PublicId]
    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), comment="Checkpoint.")
    reason: Mapped[str] = mapped_column(comment="Reason.")
    owner: Mapped[str] = mapped_column(comment="Who asked for it.")
    placed_at: Mapped[datetime] = mapped_column(comment="When it was placed.")
    until: Mapped[datetime | None] = mapped_column(comment="When it expires; null for never.")
    released_at: Mapped[datetime | None] = mapped_column(comment="When it was released; null while in force.")


class RetirementRow(Base):
    """How a source that retire deleted was proven."""

    __tablename__ = "retirement"

    checkpoint_id: Mapped[_CheckpointKey] = mapped_column(comment="The deleted source.")
    child: Mapped[str] = mapped_column(comment="Public id of the checkpoint that proved it.")
    proof: Mapped[str] = mapped_column(
        comment="full, model part or thinned: of these, given_up lists the rest."
    )
    fingerprint: Mapped[str | None] = mapped_column(
        comment="Of the child's tensors when it was last read; NULL if its digests proved it."
    )
    freed: Mapped[int] = mapped_column(comment="Bytes of files, except those with other names.")
    at: Mapped[datetime] = mapped_column(comment="When it was deleted.")


class GivenUpRow(Base):
    """What was deleted with a source without proof, because a user allowed it by name."""

    __tablename__ = "given_up"

    checkpoint_id: Mapped[_CheckpointKey] = mapped_column(comment="The deleted source.")
    name: Mapped[str] = mapped_column(primary_key=True, comment="Tensor, object, file or folder.")
    kind: Mapped[str] = mapped_column(
        primary_key=True,
        comment="optimizer, scheduler, random state, progress, cast, object, file, or a finding's code.",
    )
    nbytes: Mapped[int | None] = mapped_column(
        comment="Bytes; of a cast, those that the copy lacks. NULL if unknown."
    )


class HoldingsRow(Base):
    """The content ids that a checkpoint holds, as far as they are known."""

    __tablename__ = "holdings"

    checkpoint_id: Mapped[_CheckpointKey]
    stamp: Mapped[str | None] = mapped_column(
        comment="Digest over the identity of its files when it was published; null if unknown."
    )
    ids: Mapped[bytes | None] = mapped_column(
        comment="Content ids of 16 bytes each, sorted; null until something needs them."
    )


class StepStatistics(Base):
    """Statistics of the tensors of a checkpoint, where they were computed."""

    __tablename__ = "step_statistics"

    checkpoint_id: Mapped[_CheckpointKey]
    columns: Mapped[bytes] = mapped_column(
        comment="Packed: name, norm, mean, largest value and counts of each tensor."
    )
    tensors: Mapped[int] = mapped_column(comment="Number of tensors.")
    norm: Mapped[float | None] = mapped_column(comment="Norm of all weights; null if it is not finite.")
    absmax: Mapped[float | None] = mapped_column(
        comment="Largest absolute value of a weight; null if it is not finite."
    )
    nan: Mapped[int] = mapped_column(comment="NaN in all tensors.")
    inf: Mapped[int] = mapped_column(comment="Inf in all tensors.")
    zeros: Mapped[int] = mapped_column(comment="Zeros in weights.")
    change: Mapped[float | None] = mapped_column(
        comment="Norm of the change of all weights, relative to theirs before; null if not measured."
    )
    against: Mapped[str | None] = mapped_column(comment="Public id of the checkpoint before.")
    updated_at: Mapped[datetime] = mapped_column(comment="When they were recorded.")


class SetAsideRow(Base):
    """A checkpoint that was retired or replaced, and is not removed yet."""

    __tablename__ = "set_aside"

    record: Mapped[str] = mapped_column(
        primary_key=True, comment="Path or URL of the folder with its record."
    )
    checkpoint_id: Mapped[int | None] = mapped_column(
        ForeignKey("checkpoint.id"), index=True, comment="Checkpoint, if it is known."
    )
    uri: Mapped[str] = mapped_column(index=True, comment="Its place.")
    nbytes: Mapped[int] = mapped_column(comment="Bytes of files that a purge frees.")
    at: Mapped[datetime] = mapped_column(comment="When it was set aside.")
    due_at: Mapped[datetime] = mapped_column(index=True, comment="When it may be purged.")
    digest: Mapped[str] = mapped_column(comment="BLAKE3 of its record, which lists its files.")
    purging: Mapped[bool] = mapped_column(comment="Whether its removal is decided, and may have begun.")
    folder: Mapped[str] = mapped_column(
        server_default="", comment="Inode of the folder around it, on the machine that set it aside."
    )


class Obligation(Base):
    """Contents that must not go, because what held them was deleted in favour of a copy."""

    __tablename__ = "obligation"

    id: Mapped[_RowId]
    uuid: Mapped[_PublicId]
    checkpoint_id: Mapped[int | None] = mapped_column(
        ForeignKey("checkpoint.id"), index=True, comment="What was deleted, if it is known."
    )
    source: Mapped[str] = mapped_column(index=True, comment="URI of what was deleted.")
    place: Mapped[str] = mapped_column(index=True, comment="URI of the copy that it counts on.")
    specs: Mapped[bytes] = mapped_column(comment="Short digests of dtypes and shapes, 8 bytes each.")
    contents: Mapped[bytes] = mapped_column(comment="Content ids, names and dtypes with shapes, packed.")
    created_at: Mapped[datetime] = mapped_column(comment="When the deletion was.")
    lost: Mapped[int] = mapped_column(
        server_default="0",
        comment="How many contents no recorded checkpoint held when that was last looked at.",
    )


class TrainingFactsRow(Base):
    """What is known about the training that wrote a checkpoint."""

    __tablename__ = "training_facts"

    checkpoint_id: Mapped[_CheckpointKey]
    git_commit: Mapped[str | None] = mapped_column(index=True, comment="Commit of the training code.")
    user_name: Mapped[str | None] = mapped_column(comment="Who trained.")
    dataset: Mapped[str | None] = mapped_column(comment="Dataset.")
    job_url: Mapped[str | None] = mapped_column(comment="Page about the job.")
    framework: Mapped[str | None] = mapped_column(comment="Trainer.")
    epoch: Mapped[float | None] = mapped_column(comment="Epochs so far.")
    samples: Mapped[int | None] = mapped_column(comment="Training samples so far.")
    tokens: Mapped[int | None] = mapped_column(comment="Training tokens so far.")
    config: Mapped[str] = mapped_column(comment="JSON: config or hyperparameters, without secrets.")
    extra: Mapped[str] = mapped_column(comment="JSON: other facts.")
    sources: Mapped[str] = mapped_column(
        comment="JSON: column to its origin (user, announced, stored, inherited)."
    )
    updated_at: Mapped[datetime] = mapped_column(comment="When it was last changed.")
    live_fingerprint: Mapped[str | None] = mapped_column(
        index=True, comment="Fingerprint of everything that the job saved, taken in its memory."
    )
    live_model_fingerprint: Mapped[str | None] = mapped_column(
        index=True, comment="Fingerprint of the model in memory, under the names of its module."
    )
    live_verdict: Mapped[str | None] = mapped_column(
        comment="equal or different: whether the checkpoint has what the job had."
    )
    live_compared: Mapped[str | None] = mapped_column(comment="The fingerprint that the verdict is about.")


class Metric(Base):
    """A metric of the training at a checkpoint."""

    __tablename__ = "metric"
    __table_args__ = (Index(None, "name", "value"),)

    checkpoint_id: Mapped[_CheckpointKey]
    name: Mapped[str] = mapped_column(primary_key=True, comment="Name of the metric.")
    value: Mapped[float | None] = mapped_column(comment="Value; null if it is not finite.")
    nonfinite: Mapped[str | None] = mapped_column(comment="nan, inf or -inf; null for a finite value.")
    step: Mapped[int | None] = mapped_column(
        comment="Step of the measurement, if not that of the checkpoint."
    )
    source: Mapped[str] = mapped_column(comment="Origin: user, announced, stored or inherited.")
    updated_at: Mapped[datetime] = mapped_column(comment="When it was last changed.")


class AuditRecord(Base):
    """Who changed what, and when."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "subject", "at"),)

    id: Mapped[_RowId]
    at: Mapped[datetime] = mapped_column(index=True, comment="When.")
    actor: Mapped[str] = mapped_column(comment="Who: a user of the page, or of the operating system.")
    via: Mapped[str] = mapped_column(comment="page or cli.")
    action: Mapped[str] = mapped_column(comment="What was done, as in alias.set.")
    subject: Mapped[str] = mapped_column(comment="Id or name of what was changed.")
    detail: Mapped[str] = mapped_column(comment="JSON: values before and after.")
