"""The tables of the catalog.

Values are TEXT and states are plain strings, without a maximum length. JSON is stored as text, and only in
columns that nobody filters by. Every foreign key is indexed. The same tables serve SQLite and PostgreSQL.
A change here needs a migration in `alembic/versions`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ckptcore.catalog.times import UtcDateTime

# SQLite numbers rows itself only in a column declared INTEGER.
_Id = BigInteger().with_variant(Integer(), "sqlite")

# Names by which Alembic can drop a constraint.
NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


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


class TrainingRun(Base):
    """A training run that checkpoints come from."""

    __tablename__ = "training_run"

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]


class Checkpoint(Base):
    """One content at one URI. Other content at the same URI is another row.

    content_digest is '' while unknown, because NULLs would all count as different in the key.
    dtypes is a comma-separated list, the dtype with the most bytes first. origin is JSON.
    num_files counts the files with the data that the manifest names.
    """

    __tablename__ = "checkpoint"
    __table_args__ = (
        UniqueConstraint("uri", "manifest_digest", "content_digest"),
        Index(None, "run_id", "step"),
        # All that the page of runs sums up: it reads no row of the table.
        Index(None, "run_id", "state", "kind", "step", "total_bytes", "created_at"),
        Index(None, "state", "created_at"),
    )

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("training_run.id"))
    kind: Mapped[str]
    format: Mapped[str]
    uri: Mapped[str]
    state: Mapped[str]
    step: Mapped[int | None]
    total_bytes: Mapped[int]
    num_tensors: Mapped[int]
    num_files: Mapped[int]
    dtypes: Mapped[str]
    manifest_digest: Mapped[str] = mapped_column(index=True)
    content_digest: Mapped[str] = mapped_column(index=True)
    origin: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(index=True)
    verified_at: Mapped[datetime | None]
    verified_level: Mapped[str | None]
    replaced_at: Mapped[datetime | None]
    fingerprint: Mapped[str | None] = mapped_column(index=True)
    checked_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]


class CheckpointFile(Base):
    """A file of a checkpoint, relative to its URI. role: see `types.Role`."""

    __tablename__ = "checkpoint_file"

    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), primary_key=True)
    path: Mapped[str] = mapped_column(primary_key=True)
    nbytes: Mapped[int]
    digest: Mapped[str | None] = mapped_column(index=True)
    role: Mapped[str] = mapped_column(server_default="data")


class Tensor(Base):
    """A logical tensor of a checkpoint. shape is a JSON list of sizes in elements."""

    __tablename__ = "tensor"

    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), primary_key=True)
    fqn: Mapped[str] = mapped_column(primary_key=True, index=True)
    dtype: Mapped[str]
    shape: Mapped[str]
    nbytes: Mapped[int]
    fingerprint: Mapped[str | None] = mapped_column(index=True)


class Conversion(Base):
    """One run of a conversion, recorded when it begins. request and timings are JSON.

    source_stamp, source_ctime: digests over the stamps of the source's files when they were read, see
    `ckptcore.checking.source_stamps`. NULL if unknown; the latter also if the store has no such time.
    export_verdict: the last verdict of `verify-export`, NULL if it never ran. export_checks (JSON): its
    results by check, see `export_verdicts.py`.
    """

    __tablename__ = "conversion"
    __table_args__ = (Index(None, "state", "started_at"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    verb: Mapped[str]
    state: Mapped[str]
    source_uri: Mapped[str] = mapped_column(index=True)
    destination_uri: Mapped[str] = mapped_column(index=True)
    request: Mapped[str]
    plan_digest: Mapped[str | None]
    tool_version: Mapped[str]
    flow_run_id: Mapped[str | None] = mapped_column(index=True)
    started_at: Mapped[datetime] = mapped_column(index=True)
    ended_at: Mapped[datetime | None]
    bytes_in: Mapped[int | None]
    bytes_out: Mapped[int | None]
    peak_memory: Mapped[int | None]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
    timings: Mapped[str]
    map_digest: Mapped[str | None]
    fingerprint: Mapped[str | None] = mapped_column(index=True)
    source_stamp: Mapped[str | None]
    source_ctime: Mapped[str | None]
    export_verdict: Mapped[str | None]
    export_checks: Mapped[str | None]
    export_verified_at: Mapped[datetime | None]


class ConversionProcess(Base):
    """The process of a conversion that runs, and its last sign of life; see `heartbeats.py`.

    process: as in `ckptcore.utils.processes`, '' if unknown. renewed_at: by the database's clock.
    """

    __tablename__ = "conversion_process"

    conversion_id: Mapped[int] = mapped_column(ForeignKey("conversion.id"), primary_key=True)
    process: Mapped[str]
    renewed_at: Mapped[datetime | None]


class ConversionIO(Base):
    """A checkpoint that a conversion read (in) or wrote (out): an edge of lineage."""

    __tablename__ = "conversion_io"
    __table_args__ = (Index(None, "checkpoint_id", "direction"),)

    conversion_id: Mapped[int] = mapped_column(ForeignKey("conversion.id"), primary_key=True)
    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), primary_key=True)
    direction: Mapped[str] = mapped_column(primary_key=True)


class FindingRecord(Base):
    """A finding of a check. It stays open until a check at least as deep no longer reports it."""

    __tablename__ = "finding"
    __table_args__ = (
        Index(None, "checkpoint_id", "resolved_at"),
        # The views of a run's history: alarms are few, and other findings may be many.
        Index(None, "level", "resolved_at", "checkpoint_id"),
    )

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    checkpoint_id: Mapped[int | None] = mapped_column(ForeignKey("checkpoint.id"))
    conversion_id: Mapped[int | None] = mapped_column(ForeignKey("conversion.id"), index=True)
    code: Mapped[str] = mapped_column(index=True)
    level: Mapped[str]
    severity: Mapped[str]
    message: Mapped[str]
    fqn: Mapped[str | None]
    file: Mapped[str | None]
    hint: Mapped[str]
    found_at: Mapped[datetime]
    resolved_at: Mapped[datetime | None]


class Tag(Base):
    """A key and a value that a user or another tool sets on a checkpoint."""

    __tablename__ = "tag"
    __table_args__ = (Index(None, "key", "value"),)

    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
    updated_at: Mapped[datetime]


class WatchedRoot(Base):
    """A folder that is swept for new checkpoints. include (globs) and target are JSON."""

    __tablename__ = "watched_roots"

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    uri: Mapped[str] = mapped_column(index=True)
    include: Mapped[str]
    target: Mapped[str]
    enabled: Mapped[bool]
    created_at: Mapped[datetime]
    swept_at: Mapped[datetime | None]
    swept_note: Mapped[str | None]


class Sighting(Base):
    """What a sweep saw at a URI, and how it classified that. findings is JSON.

    stamp changes when a file there is rewritten. source_digest identifies the complete content.
    """

    __tablename__ = "sightings"
    __table_args__ = (Index(None, "root", "state"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    uri: Mapped[str] = mapped_column(unique=True)
    root: Mapped[str]
    step: Mapped[int | None]
    state: Mapped[str]
    stamp: Mapped[str]
    source_digest: Mapped[str | None]
    manifest_digest: Mapped[str | None]
    findings: Mapped[str]
    first_seen_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    changed_at: Mapped[datetime]


class Claim(Base):
    """A lease on making one output of one content, or the record that it was made; see `claims.py`."""

    __tablename__ = "claims"
    __table_args__ = (UniqueConstraint("source_digest", "destination_uri", "options_digest"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    source_digest: Mapped[str]
    destination_uri: Mapped[str] = mapped_column(index=True)
    options_digest: Mapped[str]
    source_uri: Mapped[str] = mapped_column(index=True)
    state: Mapped[str]
    owner: Mapped[str]
    attempts: Mapped[int]
    taken_at: Mapped[datetime]
    due_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]


class Inbox(Base):
    """An accepted event, processed until it is done or has failed; see `queues.py`.

    attempts_before: the number of attempts before the last retry by a user.
    """

    __tablename__ = "inbox"
    __table_args__ = (UniqueConstraint("source", "event_id"), Index(None, "state", "due_at"))

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    source: Mapped[str]
    event_id: Mapped[str]
    type: Mapped[str]
    uri: Mapped[str] = mapped_column(index=True)
    run: Mapped[str]
    step: Mapped[int | None]
    body: Mapped[str]
    state: Mapped[str]
    attempts: Mapped[int]
    due_at: Mapped[datetime]
    received_at: Mapped[datetime] = mapped_column(index=True)
    ended_at: Mapped[datetime | None]
    flow_run_id: Mapped[str | None] = mapped_column(index=True)
    error_message: Mapped[str | None]
    attempts_before: Mapped[int] = mapped_column(server_default="0")


class Outbox(Base):
    """A message to an endpoint. (endpoint, key) is unique. body is JSON.

    attempts_before: as in the inbox.
    """

    __tablename__ = "outbox"
    __table_args__ = (UniqueConstraint("endpoint", "key"), Index(None, "state", "due_at"))

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    endpoint: Mapped[str]
    key: Mapped[str]
    type: Mapped[str]
    body: Mapped[str]
    state: Mapped[str]
    attempts: Mapped[int]
    due_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(index=True)
    ended_at: Mapped[datetime | None]
    error_message: Mapped[str | None]
    attempts_before: Mapped[int] = mapped_column(server_default="0")


class Alias(Base):
    """A name for one checkpoint at a time. version counts how often it was set."""

    __tablename__ = "aliases"

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), index=True)
    version: Mapped[int]
    updated_at: Mapped[datetime]


class Hold(Base):
    """A reason why a checkpoint must not be deleted, until the hold is released or expires."""

    __tablename__ = "holds"
    __table_args__ = (Index(None, "checkpoint_id", "released_at"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"))
    reason: Mapped[str]
    owner: Mapped[str]
    placed_at: Mapped[datetime]
    until: Mapped[datetime | None]
    released_at: Mapped[datetime | None]


class RetirementRow(Base):
    """How a source that `retire` deleted was proven; see `retirements.py`.

    child: the public id of the checkpoint that proved it. proof: full or model part. fingerprint: of the
    child's tensors when it was read last, NULL if its digests proved it. freed: bytes of files, except those
    with other names.
    """

    __tablename__ = "retirement"

    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), primary_key=True)
    child: Mapped[str]
    proof: Mapped[str]
    fingerprint: Mapped[str | None]
    freed: Mapped[int]
    at: Mapped[datetime]


class GivenUpRow(Base):
    """A tensor, object or file that was deleted with its source without proof, because a user allowed it.

    kind: optimizer, scheduler, ..., cast, object, file. nbytes: NULL if unknown.
    """

    __tablename__ = "given_up"

    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    nbytes: Mapped[int | None]


class HoldingsRow(Base):
    """What a checkpoint holds (ids: packed, NULL until needed), and the identity of its files (stamp)."""

    __tablename__ = "holdings"

    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), primary_key=True)
    stamp: Mapped[str | None]
    ids: Mapped[bytes | None]


class StepStatistics(Base):
    """Statistics of the tensors of a checkpoint; see `history.py`.

    columns: of each tensor, packed. The others are sums for SQL: norm, absmax, zeros and change of the
    weights, nan and inf of all tensors; NULL if not finite, or not measured. against: public id of the step
    whose values change is measured from.
    """

    __tablename__ = "step_statistics"

    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), primary_key=True)
    columns: Mapped[bytes]
    tensors: Mapped[int]
    norm: Mapped[float | None]
    absmax: Mapped[float | None]
    nan: Mapped[int]
    inf: Mapped[int]
    zeros: Mapped[int]
    change: Mapped[float | None]
    against: Mapped[str | None]
    updated_at: Mapped[datetime]


class SetAsideRow(Base):
    """A checkpoint that was retired or replaced, and is not removed yet; see `set_aside.py`.

    record: path or URL of the folder with its record; digest: BLAKE3 of that. purging: removal is decided.
    folder: inode of the folder around it, on this machine.
    """

    __tablename__ = "set_aside"

    record: Mapped[str] = mapped_column(primary_key=True)
    checkpoint_id: Mapped[int | None] = mapped_column(ForeignKey("checkpoint.id"), index=True)
    uri: Mapped[str] = mapped_column(index=True)
    nbytes: Mapped[int]
    at: Mapped[datetime]
    due_at: Mapped[datetime] = mapped_column(index=True)
    digest: Mapped[str]
    purging: Mapped[bool]
    folder: Mapped[str] = mapped_column(server_default="")


class Obligation(Base):
    """Contents that must not go, since what held them was deleted in favour of a copy; see `obligations.py`.

    place: URI of that copy. specs, contents: packed. lost: contents that no recorded checkpoint held lately.
    """

    __tablename__ = "obligation"

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    checkpoint_id: Mapped[int | None] = mapped_column(ForeignKey("checkpoint.id"), index=True)
    source: Mapped[str] = mapped_column(index=True)
    place: Mapped[str] = mapped_column(index=True)
    specs: Mapped[bytes]
    contents: Mapped[bytes]
    created_at: Mapped[datetime]
    lost: Mapped[int] = mapped_column(server_default="0")


class TrainingFactsRow(Base):
    """What is known about the training that wrote a checkpoint; see `training.py`.

    config, extra and sources are JSON; sources names the origin of each column: user, announced, stored or
    inherited. live_verdict is of the comparison with the fingerprint live_compared, see
    `training.LiveVerdict`.
    """

    __tablename__ = "training_facts"

    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), primary_key=True)
    git_commit: Mapped[str | None] = mapped_column(index=True)
    user_name: Mapped[str | None]
    dataset: Mapped[str | None]
    job_url: Mapped[str | None]
    framework: Mapped[str | None]
    epoch: Mapped[float | None]
    samples: Mapped[int | None]
    tokens: Mapped[int | None]
    config: Mapped[str]
    extra: Mapped[str]
    sources: Mapped[str]
    updated_at: Mapped[datetime]
    live_fingerprint: Mapped[str | None] = mapped_column(index=True)
    live_model_fingerprint: Mapped[str | None] = mapped_column(index=True)
    live_verdict: Mapped[str | None]
    live_compared: Mapped[str | None]


class Metric(Base):
    """A metric of the training at a checkpoint. value is NULL if it was not finite: nonfinite says which.

    step: when it was measured, if not at the step of the checkpoint. source: as in training_facts.
    """

    __tablename__ = "metric"
    __table_args__ = (Index(None, "name", "value"),)

    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoint.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    nonfinite: Mapped[str | None]
    step: Mapped[int | None]
    source: Mapped[str]
    updated_at: Mapped[datetime]


class AuditRecord(Base):
    """Who changed what: an alias, a hold, a retry. subject: an id or a name. detail is JSON."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "subject", "at"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    at: Mapped[datetime] = mapped_column(index=True)
    actor: Mapped[str]
    via: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    detail: Mapped[str]
