"""The tables of the catalog.

Values are TEXT and states are plain strings, without a maximum length. JSON is stored as text, and only in
columns that nobody filters by. Every foreign key is indexed. The same tables serve SQLite and PostgreSQL.
A change here needs a migration in `alembic/versions`.
"""

from __future__ import annotations

import re
from datetime import datetime
from threading import RLock
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.schema import SchemaItem

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


# Annotation of a column -> its type in the database.
_TYPES: dict[str, Any] = {"str": Text(), "int": BigInteger(), "float": Double(), "bool": Boolean()}
_TYPES |= {"bytes": LargeBinary(), "datetime": UtcDateTime()}
_DECLARED = re.compile(r"Column\[(\w+)( \| None)?\]")


def column(*items: Any, **settings: Any) -> Any:
    """Return what a column has beside its annotation: another type or a foreign key, and its settings."""
    return items, settings


class _Declared(type):
    """A table's class: the `Table` is made when it, or one of its columns, is first asked for.

    A conversion uses half of the tables, and a declaration is a tenth of the work of a table.
    """

    _of: ClassVar[dict[str, _Declared]] = {}  # all of them, by the table's name
    _making: ClassVar[RLock] = RLock()
    _metadata: ClassVar[MetaData] = MetaData(naming_convention=NAMING)

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> _Declared:
        """Keep what the columns are declared as; they are no attributes until the table is made."""
        body["__declared__"] = {
            column: (kind, body.pop(column, ((), {})))
            for column, kind in body.get("__annotations__", {}).items()
            if not column.startswith("__")
        }
        cls = super().__new__(mcs, name, bases, body)
        if bases:
            mcs._of[body["__tablename__"]] = cls
        return cls

    @property
    def metadata(cls) -> MetaData:
        """All tables."""
        for declared in _Declared._of.values():
            declared.__table__  # noqa: B018
        return _Declared._metadata

    def __getattr__(cls, name: str) -> Any:
        """Make the table, and return one of its attributes."""
        if name != "__table__" and name not in vars(cls)["__declared__"]:
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        with _Declared._making:
            if "__table__" not in vars(cls):  # no other thread has made it meanwhile
                _make(cls)
        return vars(cls)[name]


def _make(cls: Any) -> None:
    """Make the table of a class, and its columns the attributes of the class."""
    columns = []
    for name, (annotation, (items, settings)) in vars(cls)["__declared__"].items():
        kind = _DECLARED.fullmatch(annotation)
        assert kind is not None, f"{cls.__name__}.{name} must be a Column (got {annotation})"
        for item in items:
            if isinstance(item, ForeignKey):  # the column gets the type of the other one
                _Declared._of[item.target_fullname.partition(".")[0]].__table__  # noqa: B018
        table_column: Column[Any] = Column(
            name, *(items or (_TYPES[kind[1]],)), nullable=kind[2] is not None, **settings
        )
        columns.append(table_column)
    table = Table(cls.__tablename__, _Declared._metadata, *columns, *cls.__table_args__)
    for table_column in columns:
        setattr(cls, table_column.name, table_column)
    cls.__table__ = table  # last: other threads may look for it


class Base(metaclass=_Declared):
    """The base of tables: each subclass declares a `Table`, whose columns are the attributes of the class.

    They are declared as SQLAlchemy's ORM declares them, which the catalog does not use otherwise: the ORM
    takes 0.15 s to import and to map these classes.
    """

    __tablename__: ClassVar[str]
    __table_args__: ClassVar[tuple[SchemaItem, ...]] = ()
    __table__: ClassVar[Table]

    @classmethod
    def __clause_element__(cls) -> Table:
        """Return the table, where a statement names the class."""
        return cls.__table__


class TrainingRun(Base):
    """A training run that checkpoints come from."""

    __tablename__ = "training_run"

    id: Column[int] = column(_Id, primary_key=True)
    name: Column[str] = column(unique=True)
    created_at: Column[datetime]


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

    id: Column[int] = column(_Id, primary_key=True)
    uuid: Column[str] = column(unique=True)
    run_id: Column[int | None] = column(ForeignKey("training_run.id"))
    kind: Column[str]
    format: Column[str]
    uri: Column[str]
    state: Column[str]
    step: Column[int | None]
    total_bytes: Column[int]
    num_tensors: Column[int]
    num_files: Column[int]
    dtypes: Column[str]
    manifest_digest: Column[str] = column(index=True)
    content_digest: Column[str] = column(index=True)
    origin: Column[str]
    created_at: Column[datetime] = column(index=True)
    verified_at: Column[datetime | None]
    verified_level: Column[str | None]
    replaced_at: Column[datetime | None]
    fingerprint: Column[str | None] = column(index=True)
    checked_at: Column[datetime | None]
    deleted_at: Column[datetime | None]


class CheckpointFile(Base):
    """A file of a checkpoint, relative to its URI. role: see `types.Role`."""

    __tablename__ = "checkpoint_file"

    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"), primary_key=True)
    path: Column[str] = column(primary_key=True)
    nbytes: Column[int]
    digest: Column[str | None] = column(index=True)
    role: Column[str] = column(server_default="data")


class Tensor(Base):
    """A logical tensor of a checkpoint. shape is a JSON list of sizes in elements."""

    __tablename__ = "tensor"

    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"), primary_key=True)
    fqn: Column[str] = column(primary_key=True, index=True)
    dtype: Column[str]
    shape: Column[str]
    nbytes: Column[int]
    fingerprint: Column[str | None] = column(index=True)


class Conversion(Base):
    """One run of a conversion, recorded when it begins. request and timings are JSON.

    source_stamp, source_ctime: digests over the stamps of the source's files when they were read, see
    `ckptcore.checking.source_stamps`. NULL if unknown; the latter also if the store has no such time.
    export_verdict: the last verdict of `verify-export`, NULL if it never ran. export_checks (JSON): its
    results by check, see `export_verdicts.py`.
    """

    __tablename__ = "conversion"
    __table_args__ = (Index(None, "state", "started_at"),)

    id: Column[int] = column(_Id, primary_key=True)
    uuid: Column[str] = column(unique=True)
    verb: Column[str]
    state: Column[str]
    source_uri: Column[str] = column(index=True)
    destination_uri: Column[str] = column(index=True)
    request: Column[str]
    plan_digest: Column[str | None]
    tool_version: Column[str]
    flow_run_id: Column[str | None] = column(index=True)
    started_at: Column[datetime] = column(index=True)
    ended_at: Column[datetime | None]
    bytes_in: Column[int | None]
    bytes_out: Column[int | None]
    peak_memory: Column[int | None]
    error_code: Column[str | None]
    error_message: Column[str | None]
    timings: Column[str]
    map_digest: Column[str | None]
    fingerprint: Column[str | None] = column(index=True)
    source_stamp: Column[str | None]
    source_ctime: Column[str | None]
    export_verdict: Column[str | None]
    export_checks: Column[str | None]
    export_verified_at: Column[datetime | None]


class ConversionProcess(Base):
    """The process of a conversion that runs, and its last sign of life; see `heartbeats.py`.

    process: as in `ckptcore.utils.processes`, '' if unknown. renewed_at: by the database's clock.
    """

    __tablename__ = "conversion_process"

    conversion_id: Column[int] = column(ForeignKey("conversion.id"), primary_key=True)
    process: Column[str]
    renewed_at: Column[datetime | None]


class ConversionIO(Base):
    """A checkpoint that a conversion read (in) or wrote (out): an edge of lineage."""

    __tablename__ = "conversion_io"
    __table_args__ = (Index(None, "checkpoint_id", "direction"),)

    conversion_id: Column[int] = column(ForeignKey("conversion.id"), primary_key=True)
    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"), primary_key=True)
    direction: Column[str] = column(primary_key=True)


class FindingRecord(Base):
    """A finding of a check. It stays open until a check at least as deep no longer reports it."""

    __tablename__ = "finding"
    __table_args__ = (Index(None, "checkpoint_id", "resolved_at"),)

    id: Column[int] = column(_Id, primary_key=True)
    checkpoint_id: Column[int | None] = column(ForeignKey("checkpoint.id"))
    conversion_id: Column[int | None] = column(ForeignKey("conversion.id"), index=True)
    code: Column[str] = column(index=True)
    level: Column[str]
    severity: Column[str]
    message: Column[str]
    fqn: Column[str | None]
    file: Column[str | None]
    hint: Column[str]
    found_at: Column[datetime]
    resolved_at: Column[datetime | None]


class Tag(Base):
    """A key and a value that a user or another tool sets on a checkpoint."""

    __tablename__ = "tag"
    __table_args__ = (Index(None, "key", "value"),)

    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"), primary_key=True)
    key: Column[str] = column(primary_key=True)
    value: Column[str]
    updated_at: Column[datetime]


class WatchedRoot(Base):
    """A folder that is swept for new checkpoints. include (globs) and target are JSON."""

    __tablename__ = "watched_roots"

    id: Column[int] = column(_Id, primary_key=True)
    name: Column[str] = column(unique=True)
    uri: Column[str] = column(index=True)
    include: Column[str]
    target: Column[str]
    enabled: Column[bool]
    created_at: Column[datetime]
    swept_at: Column[datetime | None]
    swept_note: Column[str | None]


class Sighting(Base):
    """What a sweep saw at a URI, and how it classified that. findings is JSON.

    stamp changes when a file there is rewritten. source_digest identifies the complete content.
    """

    __tablename__ = "sightings"
    __table_args__ = (Index(None, "root", "state"),)

    id: Column[int] = column(_Id, primary_key=True)
    uri: Column[str] = column(unique=True)
    root: Column[str]
    step: Column[int | None]
    state: Column[str]
    stamp: Column[str]
    source_digest: Column[str | None]
    manifest_digest: Column[str | None]
    findings: Column[str]
    first_seen_at: Column[datetime]
    last_seen_at: Column[datetime]
    changed_at: Column[datetime]


class Claim(Base):
    """A lease on making one output of one content, or the record that it was made; see `claims.py`."""

    __tablename__ = "claims"
    __table_args__ = (UniqueConstraint("source_digest", "destination_uri", "options_digest"),)

    id: Column[int] = column(_Id, primary_key=True)
    source_digest: Column[str]
    destination_uri: Column[str] = column(index=True)
    options_digest: Column[str]
    source_uri: Column[str] = column(index=True)
    state: Column[str]
    owner: Column[str]
    attempts: Column[int]
    taken_at: Column[datetime]
    due_at: Column[datetime]
    ended_at: Column[datetime | None]
    error_code: Column[str | None]
    error_message: Column[str | None]


class Inbox(Base):
    """An accepted event, processed until it is done or has failed; see `queues.py`.

    attempts_before: the number of attempts before the last retry by a user.
    """

    __tablename__ = "inbox"
    __table_args__ = (UniqueConstraint("source", "event_id"), Index(None, "state", "due_at"))

    id: Column[int] = column(_Id, primary_key=True)
    uuid: Column[str] = column(unique=True)
    source: Column[str]
    event_id: Column[str]
    type: Column[str]
    uri: Column[str] = column(index=True)
    run: Column[str]
    step: Column[int | None]
    body: Column[str]
    state: Column[str]
    attempts: Column[int]
    due_at: Column[datetime]
    received_at: Column[datetime] = column(index=True)
    ended_at: Column[datetime | None]
    flow_run_id: Column[str | None] = column(index=True)
    error_message: Column[str | None]
    attempts_before: Column[int] = column(server_default="0")


class Outbox(Base):
    """A message to an endpoint. (endpoint, key) is unique. body is JSON.

    attempts_before: as in the inbox.
    """

    __tablename__ = "outbox"
    __table_args__ = (UniqueConstraint("endpoint", "key"), Index(None, "state", "due_at"))

    id: Column[int] = column(_Id, primary_key=True)
    uuid: Column[str] = column(unique=True)
    endpoint: Column[str]
    key: Column[str]
    type: Column[str]
    body: Column[str]
    state: Column[str]
    attempts: Column[int]
    due_at: Column[datetime]
    created_at: Column[datetime] = column(index=True)
    ended_at: Column[datetime | None]
    error_message: Column[str | None]
    attempts_before: Column[int] = column(server_default="0")


class Alias(Base):
    """A name for one checkpoint at a time. version counts how often it was set."""

    __tablename__ = "aliases"

    id: Column[int] = column(_Id, primary_key=True)
    name: Column[str] = column(unique=True)
    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"), index=True)
    version: Column[int]
    updated_at: Column[datetime]


class Hold(Base):
    """A reason why a checkpoint must not be deleted, until the hold is released or expires."""

    __tablename__ = "holds"
    __table_args__ = (Index(None, "checkpoint_id", "released_at"),)

    id: Column[int] = column(_Id, primary_key=True)
    uuid: Column[str] = column(unique=True)
    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"))
    reason: Column[str]
    owner: Column[str]
    placed_at: Column[datetime]
    until: Column[datetime | None]
    released_at: Column[datetime | None]


class RetirementRow(Base):
    """How a source that `retire` deleted was proven; see `retirements.py`.

    child: the public id of the checkpoint that proved it. proof: full or model part. fingerprint: of the
    child's tensors when it was read last, NULL if its digests proved it. freed: bytes of files, except those
    with other names.
    """

    __tablename__ = "retirement"

    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"), primary_key=True)
    child: Column[str]
    proof: Column[str]
    fingerprint: Column[str | None]
    freed: Column[int]
    at: Column[datetime]


class GivenUpRow(Base):
    """A tensor, object or file that was deleted with its source without proof, because a user allowed it.

    kind: optimizer, scheduler, ..., cast, object, file. nbytes: NULL if unknown.
    """

    __tablename__ = "given_up"

    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"), primary_key=True)
    name: Column[str] = column(primary_key=True)
    kind: Column[str] = column(primary_key=True)
    nbytes: Column[int | None]


class HoldingsRow(Base):
    """What a checkpoint holds (ids: packed, NULL until needed), and the identity of its files (stamp)."""

    __tablename__ = "holdings"

    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"), primary_key=True)
    stamp: Column[str | None]
    ids: Column[bytes | None]


class SetAsideRow(Base):
    """A checkpoint that was retired or replaced, and is not removed yet; see `set_aside.py`.

    record: path or URL of the folder with its record; digest: BLAKE3 of that. purging: removal is decided.
    folder: inode of the folder around it, on this machine.
    """

    __tablename__ = "set_aside"

    record: Column[str] = column(primary_key=True)
    checkpoint_id: Column[int | None] = column(ForeignKey("checkpoint.id"), index=True)
    uri: Column[str] = column(index=True)
    nbytes: Column[int]
    at: Column[datetime]
    due_at: Column[datetime] = column(index=True)
    digest: Column[str]
    purging: Column[bool]
    folder: Column[str] = column(server_default="")


class Obligation(Base):
    """Contents that must not go, since what held them was deleted in favour of a copy; see `obligations.py`.

    place: URI of that copy. specs, contents: packed. lost: contents that no recorded checkpoint held lately.
    """

    __tablename__ = "obligation"

    id: Column[int] = column(_Id, primary_key=True)
    uuid: Column[str] = column(unique=True)
    checkpoint_id: Column[int | None] = column(ForeignKey("checkpoint.id"), index=True)
    source: Column[str] = column(index=True)
    place: Column[str] = column(index=True)
    specs: Column[bytes]
    contents: Column[bytes]
    created_at: Column[datetime]
    lost: Column[int] = column(server_default="0")


class TrainingFactsRow(Base):
    """What is known about the training that wrote a checkpoint; see `training.py`.

    config, extra and sources are JSON; sources names the origin of each column: user, announced, stored or
    inherited.
    """

    __tablename__ = "training_facts"

    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"), primary_key=True)
    git_commit: Column[str | None] = column(index=True)
    user_name: Column[str | None]
    dataset: Column[str | None]
    job_url: Column[str | None]
    framework: Column[str | None]
    epoch: Column[float | None]
    samples: Column[int | None]
    tokens: Column[int | None]
    config: Column[str]
    extra: Column[str]
    sources: Column[str]
    updated_at: Column[datetime]


class Metric(Base):
    """A metric of the training at a checkpoint. value is NULL if it was not finite: nonfinite says which.

    step: when it was measured, if not at the step of the checkpoint. source: as in training_facts.
    """

    __tablename__ = "metric"
    __table_args__ = (Index(None, "name", "value"),)

    checkpoint_id: Column[int] = column(ForeignKey("checkpoint.id"), primary_key=True)
    name: Column[str] = column(primary_key=True)
    value: Column[float | None]
    nonfinite: Column[str | None]
    step: Column[int | None]
    source: Column[str]
    updated_at: Column[datetime]


class AuditRecord(Base):
    """Who changed what: an alias, a hold, a retry. subject: an id or a name. detail is JSON."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "subject", "at"),)

    id: Column[int] = column(_Id, primary_key=True)
    at: Column[datetime] = column(index=True)
    actor: Column[str]
    via: Column[str]
    action: Column[str]
    subject: Column[str]
    detail: Column[str]
