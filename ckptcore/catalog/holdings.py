"""Record which content ids checkpoints hold (`ckptcore.fingerprints.holdings`), and find who may hold some.

Ids are kept when something first needs them, in one blob for each checkpoint. What is recorded says where to
look, and proves nothing: a place is read before anything goes because of it.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Set
from heapq import nsmallest
from itertools import chain
from struct import iter_unpack
from typing import TYPE_CHECKING

from sqlalchemy import delete, func, insert, or_, select, union, update

from ckptcore.catalog.models import Checkpoint, HoldingsRow, Tensor
from ckptcore.catalog.query import checkpoint_row, checkpoint_rows, resolve_checkpoint
from ckptcore.catalog.types import CheckpointRow, State

if TYPE_CHECKING:
    from sqlalchemy import Connection

NOWHERE = (State.REPLACED.value, State.RETIRED.value, State.DELETED.value)  # nothing of it is at its place
_SAMPLE = 64  # tensors by which copies are looked for
_HEX = re.compile("[0-9a-f]*")
_ID_BYTES = 16  # as `ckptcore.fingerprints.holdings`, which the catalog does not import


def put_stamp(conn: Connection, checkpoint: int, stamp: str | None) -> None:
    """Record the identity of a checkpoint's files as they were published. checkpoint: its row id."""
    conn.execute(delete(HoldingsRow).where(HoldingsRow.checkpoint_id == checkpoint))
    if stamp is not None:
        conn.execute(insert(HoldingsRow).values(checkpoint_id=checkpoint, stamp=stamp))


def stamp_of(conn: Connection, public: str) -> str | None:
    """Return the identity of a checkpoint's files as they were published; None if it is unknown."""
    row = resolve_checkpoint(conn, public)
    return conn.execute(select(HoldingsRow.stamp).where(HoldingsRow.checkpoint_id == row)).scalar()


def keep(conn: Connection, public: str, ids: bytes, stamp: str | None = None) -> None:
    """Record the content ids that a checkpoint was found to hold.

    Args:
        conn: The transaction.
        public: The checkpoint.
        ids: Packed.
        stamp: The identity of the files that were read, if they have the recorded fingerprints.
    """
    row = resolve_checkpoint(conn, public)
    mine = HoldingsRow.checkpoint_id == row
    values = {"ids": ids} | ({} if stamp is None else {"stamp": stamp})
    if not conn.execute(update(HoldingsRow).where(mine).values(values)).rowcount:
        conn.execute(insert(HoldingsRow).values(checkpoint_id=row, **values))


def ids_of_row(conn: Connection, public: str) -> bytes | None:
    """Return the packed content ids that a checkpoint was found to hold; None if nothing needed them yet."""
    row = resolve_checkpoint(conn, public)
    return conn.execute(select(HoldingsRow.ids).where(HoldingsRow.checkpoint_id == row)).scalar()


def fingerprints_of(conn: Connection, public: str) -> dict[str, str]:
    """Return FQN -> fingerprint of the tensors of a checkpoint whose fingerprint is known."""
    row, has_sum = resolve_checkpoint(conn, public), Tensor.fingerprint.is_not(None)
    rows = select(Tensor.fqn, Tensor.fingerprint).where(Tensor.checkpoint_id == row, has_sum)
    return {tensor.fqn: tensor.fingerprint or "" for tensor in conn.execute(rows)}


def tensor_ids_of(conn: Connection, public: str) -> bytes | None:
    """Return the content ids of all tensors of a checkpoint, packed, before equal ones are numbered.

    One value of the database, whatever the number of tensors. None if the sum of one is unknown, or odd.
    """
    row, digits = resolve_checkpoint(conn, public), 2 * _ID_BYTES
    complete = func.length(Tensor.fingerprint) == 2 * digits
    ids = func.aggregate_strings(func.substr(Tensor.fingerprint, 1, digits), "")
    of_row = select(func.count(), func.count().filter(complete), ids).where(Tensor.checkpoint_id == row)
    count, complete_count, text = conn.execute(of_row).one()
    is_odd = count != complete_count or (text is not None and _HEX.fullmatch(text) is None)
    return None if is_odd else bytes.fromhex(text or "")


def may_hold(conn: Connection, ids: Set[bytes], manifests: Collection[str] = ()) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints that may hold some of these ids, by their records or as copies of a holder.

    Args:
        conn: The transaction.
        ids: Content ids.
        manifests: Manifest digests of holders: copies of them have the same.
    """
    not_deleted = Checkpoint.state.not_in(NOWHERE)
    prefixes = [content_id.hex() for content_id in nsmallest(_SAMPLE, ids)]
    # Each by the index of fingerprints: for one statement with all of them SQLite reads the table.
    same = (
        # "g" is behind every hexadecimal digit: a range is found by the index, where LIKE may not use it.
        select(Tensor.checkpoint_id).where(Tensor.fingerprint >= p, Tensor.fingerprint < p + "g")
        for p in prefixes
    )
    rows = set(conn.execute(union(*same)).scalars()) if prefixes else set()
    packed_ids = select(HoldingsRow.checkpoint_id, HoldingsRow.ids).where(HoldingsRow.ids.is_not(None))
    rows |= {row for row, blob in conn.execute(packed_ids) if _holds_some(blob, ids)}
    holder_or_copy = or_(Checkpoint.id.in_(rows), Checkpoint.manifest_digest.in_(list(manifests)))
    holders = conn.execute(checkpoint_rows().where(not_deleted, holder_or_copy).order_by(Checkpoint.id))
    return tuple(checkpoint_row(row) for row in holders)


def _holds_some(blob: bytes, ids: Set[bytes]) -> bool:
    complete = memoryview(blob)[: len(blob) // _ID_BYTES * _ID_BYTES]
    return not ids.isdisjoint(chain.from_iterable(iter_unpack(f"{_ID_BYTES}s", complete)))
