"""Read checkpoints and conversions from the catalog, and resolve ids, aliases and URIs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from sqlalchemy import Float, Select, and_, case, func, select
from sqlalchemy import cast as sql_cast

from ckptcore.catalog.models import (
    Alias,
    Checkpoint,
    CheckpointFile,
    Conversion,
    ConversionIO,
    FindingRecord,
    Obligation,
    SetAsideRow,
    Tag,
    Tensor,
    TrainingRun,
)
from ckptcore.catalog.normalize import same_places
from ckptcore.catalog.row_values import as_integer, checked, parsed, read_row, row_findings, sound_finding
from ckptcore.catalog.types import (
    CheckpointDetail,
    CheckpointRow,
    ConversionDetail,
    ConversionRow,
    Direction,
    FileRow,
    Kind,
    Outcome,
    State,
    TensorRow,
)
from ckptcore.errors import Conflict, Finding, UsageError
from ckptcore.utils.near_names import did_you_mean

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

_Value = TypeVar("_Value")
_AT_ONCE = 10_000  # values in one statement: SQLite's limit is 32,766, PostgreSQL's 65,535
_LOADABLE = {"ok": "yes", "failed": "no"}  # by the verdict of verify-export
LARGEST_SUMMED = 2**50  # bytes that one row may have for an exact sum: 8191 such rows have 63 bits
OPENED_BY = frozenset({"config.json", "adapter_config.json"})  # transformers and PEFT open a model by these
PREFIX = re.compile(r"[0-9a-f][0-9a-f-]{3,35}")
_ID = re.compile(r"[0-9a-f-]{36}")  # a complete one: most callers have it, and its table is asked alone


def list_checkpoints(
    conn: Connection, limit: int | None, kind: str | None, state: str | None, run: str | None
) -> tuple[CheckpointRow, ...]:
    """Return checkpoints, newest first."""
    rows = newest_checkpoints(kind, state).limit(limit)
    if run is not None:
        rows = rows.where(TrainingRun.name == run)
    return with_custody(conn, tuple(checkpoint_row(row) for row in conn.execute(rows)))


def newest_checkpoints(kind: str | None, state: str | None) -> Select[Any]:
    """Return the query of checkpoints of a kind and state, newest first; None for any."""
    rows = checkpoint_rows().order_by(Checkpoint.created_at.desc(), Checkpoint.id.desc())
    if kind is not None:
        rows = rows.where(Checkpoint.kind == member_value(Kind, kind))
    return rows if state is None else rows.where(Checkpoint.state == member_value(State, state))


def part_of(conn: Connection, column: Any, text: str) -> ColumnElement[bool]:
    """Return the condition that a text is a part of a column, in any case of ASCII letters."""
    if conn.dialect.name == "sqlite":  # its LIKE ignores case; lower() of both sides takes twice as long
        return cast("ColumnElement[bool]", column.contains(text, autoescape=True))
    return cast("ColumnElement[bool]", column.icontains(text, autoescape=True))


def sum_of(conn: Connection, column: Any) -> ColumnElement[Any]:
    """Return the sum of a column of integers; a float on SQLite if one of them is odd or very large.

    SQLite's own sum above 63 bits is an error, which one odd row would be for all the others.
    """
    if conn.dialect.name != "sqlite":
        return func.sum(column)
    return func.sum(
        case((column.between(-LARGEST_SUMMED, LARGEST_SUMMED), column), else_=sql_cast(column, Float))
    )


def with_custody(conn: Connection, rows: tuple[CheckpointRow, ...]) -> tuple[CheckpointRow, ...]:
    """Add to retired checkpoints when they may be purged, and to deleted ones what is lost of them."""
    gone = {row.id for row in rows if row.state in (State.RETIRED, State.DELETED)}
    if not gone:
        return rows
    due = select(Checkpoint.uuid, func.min(SetAsideRow.due_at)).join(
        SetAsideRow, SetAsideRow.checkpoint_id == Checkpoint.id
    )
    lost = select(Checkpoint.uuid, sum_of(conn, Obligation.lost)).join(
        Obligation, Obligation.checkpoint_id == Checkpoint.id
    )
    dates = dict(conn.execute(due.group_by(Checkpoint.uuid)).tuples().all())
    counts = dict(conn.execute(lost.where(Obligation.lost > 0).group_by(Checkpoint.uuid)).tuples().all())
    return tuple(
        _with_custody(row, dates.get(row.id), counts.get(row.id, 0)) if row.id in gone else row
        for row in rows
    )


def _with_custody(row: CheckpointRow, due_at: Any, lost: Any) -> CheckpointRow:
    right, trouble = checked(CheckpointRow, {"due_at": due_at, "lost": as_integer(lost)})
    return replace(row, **right, trouble="; ".join(filter(None, (row.trouble, trouble))))


def list_conversions(conn: Connection, limit: int | None, state: str | None) -> tuple[ConversionRow, ...]:
    """Return conversions, newest first."""
    return tuple(conversion_row(row) for row in conn.execute(newest_conversions(state).limit(limit)))


def newest_conversions(state: str | None) -> Select[Any]:
    """Return the query of conversions in a state, newest first; None for any."""
    rows = select(Conversion).order_by(Conversion.started_at.desc(), Conversion.id.desc())
    return rows if state is None else rows.where(Conversion.state == member_value(Outcome, state))


def show(conn: Connection, ref: str, tensors: bool) -> CheckpointDetail | ConversionDetail:
    """Return the details of the checkpoint or conversion that `ref` names."""
    return detail_of(conn, *resolve(conn, ref), tensors)


def detail_of(
    conn: Connection, table: type[Checkpoint | Conversion], row_id: int, tensors: bool
) -> CheckpointDetail | ConversionDetail:
    """Return the details of what `resolve` has found."""
    if table is Conversion:
        return _conversion_detail(conn, row_id)
    return _checkpoint_detail(conn, row_id, tensors)


def at(conn: Connection, uri: str) -> tuple[CheckpointRow, tuple[FileRow, ...]] | None:
    """Return the current or last checkpoint at a URI with its files, or None."""
    rows = checkpoint_rows().where(Checkpoint.uri.in_(same_places(uri))).order_by(*current_first())
    row = conn.execute(rows).first()
    return None if row is None else (checkpoint_row(row), _files_of(conn, row.id))


def files_at(conn: Connection, uri: str) -> tuple[FileRow, ...]:
    """Return the files of every checkpoint that is, or was, recorded at a URI."""
    rows = select(CheckpointFile).join(Checkpoint, Checkpoint.id == CheckpointFile.checkpoint_id)
    at_uri = rows.where(Checkpoint.uri.in_(same_places(uri)))
    return tuple(file_row(r) for r in conn.execute(at_uri))


def resolve_checkpoint(conn: Connection, ref: str) -> int:
    """Return the row id of the checkpoint that `ref` names. Raises `UsageError`."""
    table, row_id = resolve(conn, ref)
    if table is Conversion:
        raise UsageError(
            f"{ref} is a conversion, not a checkpoint",
            hint=f"`ckptcore catalog show {ref}` shows its checkpoints",
        )
    return row_id


def require_kept(conn: Connection, ref: str) -> int:
    """Return the row id of a checkpoint that was not deleted by `retire`. Raises `UsageError`, `Conflict`."""
    row = resolve_checkpoint(conn, ref)
    deleted_at = conn.execute(select(Checkpoint.deleted_at).where(Checkpoint.id == row)).scalar()
    if deleted_at is not None:
        raise Conflict(
            f"{ref} was deleted on {deleted_at:%Y-%m-%d %H:%M} UTC", hint="name another checkpoint"
        )
    return row


def place_of(conn: Connection, name: str) -> str | None:
    """Return the URI of the checkpoint with an id, a unique prefix of an id or an alias; None without one."""
    try:
        row = resolve_checkpoint(conn, name)
    except UsageError as error:
        if error.values.get("ids"):
            raise
        return None
    return conn.execute(select(Checkpoint.uri).where(Checkpoint.id == row)).scalar_one()


def resolve(conn: Connection, ref: str) -> tuple[type[Checkpoint | Conversion], int]:
    """Find the row of an id, a unique prefix of an id (4 digits or more), an alias or a URI.

    A URI names its current checkpoint, or the newest of the replaced ones. Raises `UsageError`.
    """
    tables: tuple[type[Checkpoint | Conversion], ...] = (Checkpoint, Conversion)
    for table in tables if _ID.fullmatch(ref) else ():
        row_id = conn.execute(select(table.id).where(table.uuid == ref)).scalar()
        if row_id is not None:
            return table, row_id
    if PREFIX.fullmatch(ref.lower()):
        matches = [
            (table, row.id, row.uuid)
            for table in tables
            for row in conn.execute(
                select(table.id, table.uuid).where(begins(table.uuid, ref.lower())).limit(6)
            )
        ]
        if len(matches) == 1:
            return matches[0][:2]
        if matches:
            raise UsageError(
                f"{ref} is a prefix of several ids: "
                + ", ".join(sorted(public for _, _, public in matches)[:5]),
                hint="give more of the id",
                ids=sorted(public for _, _, public in matches),
            )
    named = conn.execute(select(Alias.checkpoint_id).where(Alias.name == ref)).scalar()
    if named is not None:
        return Checkpoint, named
    row = conn.execute(
        select(Checkpoint.id).where(Checkpoint.uri.in_(same_places(ref))).order_by(*current_first())
    ).first()
    if row is None:
        raise UsageError(
            f"the catalog has no checkpoint or conversion {ref}",
            hint=did_you_mean(
                ref, conn.execute(select(Alias.name)).scalars(), "`ckptcore catalog list` shows ids and URIs"
            ),
        )
    return Checkpoint, row.id


def in_parts(values: Iterable[_Value]) -> Iterator[list[_Value]]:
    """Yield values in lists that fit into one statement of either database."""
    ordered = list(values)
    for first in range(0, len(ordered), _AT_ONCE):
        yield ordered[first : first + _AT_ONCE]


class Edge(NamedTuple):
    """A conversion between two checkpoints, by row ids."""

    near: int
    conversion: int
    far: int


def edges_of(conn: Connection, rows: Iterable[int], near: Direction, far: Direction) -> list[Edge]:
    """Return the conversions that checkpoints are on the `near` side of, each with its `far` end.

    One level of a lineage: for one recursive query, SQLite scans all edges, at 100,000 checkpoints for 40 ms
    (it builds a Bloom filter over them), where a level takes 0.1 ms.
    """
    near_ends, far_ends = ConversionIO.__table__.alias(), ConversionIO.__table__.alias()
    near_io, far_io = near_ends.c, far_ends.c
    query = (
        select(near_io.checkpoint_id, near_io.conversion_id, far_io.checkpoint_id.label("other"))
        .join(far_ends, far_io.conversion_id == near_io.conversion_id)
        .where(near_io.direction == near.value, far_io.direction == far.value)
        .order_by(near_io.conversion_id)
    )
    parts = in_parts(sorted(rows))
    return [
        Edge(*row) for part in parts for row in conn.execute(query.where(near_io.checkpoint_id.in_(part)))
    ]


def begins(column: Any, digits: str) -> ColumnElement[bool]:
    """Return the condition that hex text begins with `digits`.

    An index serves the range. Neither database uses one for LIKE alone.
    """
    return and_(column >= digits, column < digits + "g", column.startswith(digits, autoescape=True))


def current_first() -> tuple[ColumnElement[Any], ...]:
    """Return the order of checkpoints at one URI: the current one first, then the newest."""
    return Checkpoint.replaced_at.is_not(None), Checkpoint.id.desc()


def checkpoint_rows() -> Select[Any]:
    """Return the query whose rows `checkpoint_row` reads."""
    return select(Checkpoint, TrainingRun.name.label("run_name")).outerjoin(
        TrainingRun, TrainingRun.id == Checkpoint.run_id
    )


def checkpoint_row(row: Any) -> CheckpointRow:
    """Convert a row of `checkpoint_rows`."""
    dtypes = row.dtypes
    return read_row(
        CheckpointRow,
        row,
        id=row.uuid,
        run=row.run_name,
        nbytes=row.total_bytes,
        # Another value than a text stays itself, and is reported as odd.
        dtypes=tuple(filter(None, dtypes.split(","))) if isinstance(dtypes, str) else dtypes,
        content_digest=row.content_digest or None,
        origin=parsed(row.origin),
    )


def file_row(row: Any) -> FileRow:
    """Convert a row of ``select(CheckpointFile)``."""
    return read_row(FileRow, row)


def tensor_row(row: Any) -> TensorRow:
    """Convert a row of ``select(Tensor)``."""
    form = parsed(row.shape)
    return read_row(TensorRow, row, shape=tuple(form) if isinstance(form, list) else form)


def conversion_row(row: Any) -> ConversionRow:
    """Convert a row of ``select(Conversion)``."""
    return read_row(
        ConversionRow,
        row,
        id=row.uuid,
        request=parsed(row.request),
        timings=parsed(row.timings),
        export_checks=parsed(row.export_checks or "{}"),
    )


def conversions_of(conn: Connection, checkpoint: int, direction: Direction) -> tuple[ConversionRow, ...]:
    """Return the conversions that wrote (out) or read (in) a checkpoint, newest first."""
    rows = (
        select(Conversion)
        .join(ConversionIO, ConversionIO.conversion_id == Conversion.id)
        .where(ConversionIO.checkpoint_id == checkpoint, ConversionIO.direction == direction.value)
        .order_by(Conversion.id.desc())
    )
    return tuple(conversion_row(row) for row in conn.execute(rows))


def checkpoints_of(conn: Connection, conversion: str, direction: Direction) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints that a conversion (public id) read (in) or wrote (out)."""
    return tuple(checkpoint_row(row) for row in conn.execute(rows_of(conversion, direction)))


def rows_of(conversion: str, direction: Direction) -> Select[Any]:
    """Return the query of `checkpoints_of`."""
    rows = checkpoint_rows().join(ConversionIO, ConversionIO.checkpoint_id == Checkpoint.id)
    rows = rows.join(Conversion, Conversion.id == ConversionIO.conversion_id)
    of_conversion = Conversion.uuid == conversion, ConversionIO.direction == direction.value
    return rows.where(*of_conversion).order_by(Checkpoint.id)


def _checkpoint_detail(conn: Connection, row_id: int, tensors: bool) -> CheckpointDetail:
    row = conn.execute(checkpoint_rows().where(Checkpoint.id == row_id)).one()
    named = select(Tensor).where(Tensor.checkpoint_id == row_id)
    tags = select(Tag.key, Tag.value).where(Tag.checkpoint_id == row_id).order_by(Tag.key)
    open_findings = select(FindingRecord).where(
        FindingRecord.checkpoint_id == row_id, FindingRecord.resolved_at.is_(None)
    )
    files = _files_of(conn, row_id)
    written_by = conversions_of(conn, row_id, Direction.OUT)
    checkpoint = with_custody(conn, (checkpoint_row(row),))[0]
    listed = sorted(map(tensor_row, conn.execute(named) if tensors else ()), key=lambda t: _natural(t.fqn))
    return CheckpointDetail(
        checkpoint=checkpoint,
        files=files,
        tensors=tuple(listed),
        findings=(*row_findings([checkpoint, files, listed, written_by]), *_findings(conn, open_findings)),
        tags={r.key: r.value for r in conn.execute(tags)},
        written_by=written_by,
        used_by=conversions_of(conn, row_id, Direction.IN),
        loadable=loadable(conn, (row_id,)).get(row_id),
    )


def loadable(conn: Connection, ids: Sequence[int]) -> dict[int, str]:
    """Return checkpoint -> ``yes``, ``no`` or ``unproven``, of the exports among checkpoints.

    ``no``: it lacks the file by which an engine opens a model, or `verify-export` failed. ``yes``:
    `verify-export` proved it. Exported folders have a card; without one, the files are not recorded.
    """
    if not ids:
        return {}
    written = (
        select(ConversionIO.checkpoint_id, Conversion.export_verdict)
        .join(Conversion, Conversion.id == ConversionIO.conversion_id)
        .where(
            ConversionIO.checkpoint_id.in_(ids),
            ConversionIO.direction == Direction.OUT.value,
            Conversion.verb == "export",
            Conversion.state == Outcome.SUCCEEDED.value,
        )
        .order_by(Conversion.id)
    )
    verdicts = {row.checkpoint_id: row.export_verdict for row in conn.execute(written)}
    lacking = _without_config(conn, verdicts)
    return {
        id: "no" if id in lacking else _LOADABLE.get(verdict, "unproven") for id, verdict in verdicts.items()
    }


def _without_config(conn: Connection, exported: Collection[int]) -> set[int]:
    """Return the exported folders without the file by which an engine opens a model."""
    if not exported:
        return set()
    config_files: dict[int, set[str]] = {}
    for row in conn.execute(
        select(CheckpointFile.checkpoint_id, CheckpointFile.path).where(
            CheckpointFile.checkpoint_id.in_(exported), CheckpointFile.path.in_(("README.md", *OPENED_BY))
        )
    ):
        config_files.setdefault(row.checkpoint_id, set()).add(row.path)
    return {i for i, names in config_files.items() if "README.md" in names and not names & OPENED_BY}


def _files_of(conn: Connection, row_id: int) -> tuple[FileRow, ...]:
    files = conn.execute(select(CheckpointFile).where(CheckpointFile.checkpoint_id == row_id))
    return tuple(sorted(map(file_row, files), key=lambda file: _natural(file.path)))


def _conversion_detail(conn: Connection, row_id: int) -> ConversionDetail:
    row = conn.execute(select(Conversion).where(Conversion.id == row_id)).one()
    conversion = conversion_row(row)
    sources, derived = (checkpoints_of(conn, row.uuid, way) for way in (Direction.IN, Direction.OUT))
    recorded = _findings(conn, select(FindingRecord).where(FindingRecord.conversion_id == row_id))
    return ConversionDetail(
        conversion=conversion,
        sources=sources,
        derived=derived,
        findings=(*row_findings([conversion, sources, derived]), *recorded),
    )


def _findings(conn: Connection, records: Select[Any]) -> tuple[Finding, ...]:
    return tuple(
        sound_finding(**{field.name: getattr(r, field.name) for field in fields(Finding)})
        for r in conn.execute(records.order_by(FindingRecord.id))
    )


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return the key of natural order: layers.2 before layers.10."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name))


def member_value(kind: type[Kind | State | Outcome], value: str) -> str:
    """Return a value that the user named; raise `UsageError` if it is none of its kind."""
    names = [member.value for member in kind]
    if value not in names:
        raise UsageError(
            f"{kind.__name__.lower()} must be one of {', '.join(names)} (got {value!r})",
            hint=did_you_mean(value, names, "choose one of them"),
        )
    return value
