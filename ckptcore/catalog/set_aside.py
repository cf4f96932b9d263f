"""Record what `ckptcore retire` and ``--overwrite`` set aside, and when it may be purged.

The record beside the place lists its files (`ckptcore.custody.set_aside`); a row says that it is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import delete, insert, select, update

from ckptcore.catalog.models import Checkpoint, SetAsideRow, TrainingRun
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.row_values import read_row
from ckptcore.catalog.types import CheckpointRow, State

if TYPE_CHECKING:
    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class SetAsideEntry:
    """What is set aside.

    Attributes:
        record: Path or URL of the folder with its record.
        checkpoint: Public id of its checkpoint; None if this catalog does not know it.
        uri: Its place.
        nbytes: Bytes of files that a purge frees.
        at: When it was set aside.
        due_at: When it may be purged.
        digest: Of its record, which lists its files.
        purging: Whether its removal is decided, and may have begun.
        folder: Inode of the folder around it; "" on an object store.
        run: The training run of its checkpoint.
        trouble: What is odd in the row.
    """

    record: str
    checkpoint: str | None
    uri: str
    nbytes: int
    at: datetime
    due_at: datetime
    digest: str
    purging: bool = False
    folder: str = ""
    run: str | None = None
    trouble: str = ""


def put(conn: Connection, row: SetAsideEntry) -> None:
    """Record what is set aside."""
    drop(conn, row.record)
    checkpoint = conn.execute(select(Checkpoint.id).where(Checkpoint.uuid == row.checkpoint)).scalar()
    values = {"uri": normal_uri(row.uri), "nbytes": row.nbytes, "at": row.at, "due_at": row.due_at}
    values |= {"digest": row.digest, "purging": row.purging, "folder": row.folder}
    conn.execute(insert(SetAsideRow).values(record=row.record, checkpoint_id=checkpoint, **values))


def purging(conn: Connection, record: str) -> bool:
    """Record that the removal is decided. Return False if it is not set aside any more."""
    change = update(SetAsideRow).where(SetAsideRow.record == record).values(purging=True)
    return conn.execute(change).rowcount == 1


def get(conn: Connection, record: str) -> SetAsideEntry | None:
    """Return the entry with a record; None if there is none."""
    return next((entry for entry in every(conn) if entry.record == record), None)


def drop(conn: Connection, record: str) -> None:
    """Forget what was set aside: it is purged, or restored."""
    conn.execute(delete(SetAsideRow).where(SetAsideRow.record == record))


def every(conn: Connection) -> tuple[SetAsideEntry, ...]:
    """Return everything that is set aside, the earliest to purge first."""
    rows = (
        select(SetAsideRow, Checkpoint.uuid, TrainingRun.name.label("run"))
        .outerjoin(Checkpoint, Checkpoint.id == SetAsideRow.checkpoint_id)
        .outerjoin(TrainingRun, TrainingRun.id == Checkpoint.run_id)
        .order_by(SetAsideRow.due_at, SetAsideRow.record)
    )
    return tuple(read_row(SetAsideEntry, row, checkpoint=row.uuid) for row in conn.execute(rows))


def retired(conn: Connection, now: datetime, row: CheckpointRow) -> bool:
    """Mark a checkpoint as retired. Return False if its row has changed since it was read."""
    unchanged = (
        Checkpoint.uuid == row.id,
        Checkpoint.uri == row.uri,
        Checkpoint.kind == row.kind,
        Checkpoint.manifest_digest == row.manifest_digest,
        Checkpoint.state == State.PRESENT.value,
    )
    changes = {"state": State.RETIRED.value, "checked_at": now}
    return conn.execute(update(Checkpoint).where(*unchanged).values(changes)).rowcount == 1


def deleted(conn: Connection, now: datetime, public: str) -> None:
    """Mark a retired checkpoint as deleted. One that was recorded again at its place meanwhile stays."""
    still_retired = (Checkpoint.uuid == public, Checkpoint.state == State.RETIRED.value)
    conn.execute(update(Checkpoint).where(*still_retired).values(state=State.DELETED.value, deleted_at=now))


def restored(conn: Connection, public: str, uri: str | None = None) -> None:
    """Mark a retired or deleted checkpoint as present again: nothing of it is gone. uri: its new place."""
    retired_or_deleted = (
        Checkpoint.uuid == public,
        Checkpoint.state.in_([State.RETIRED.value, State.DELETED.value]),
    )
    changes: dict[str, object] = {"state": State.PRESENT.value, "deleted_at": None}
    if uri is not None:
        changes["uri"] = normal_uri(uri)
    conn.execute(update(Checkpoint).where(*retired_or_deleted).values(changes))
