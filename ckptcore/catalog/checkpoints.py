"""Record checkpoints: their rows, the rows that they replace, their findings and their tags.

Every function runs inside the given writer's transaction. Nobody else writes meanwhile, so reading a row and
then changing it is safe.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, delete, insert, select, update

from ckptcore.catalog import history, training_rows
from ckptcore.catalog.holdings import NOWHERE
from ckptcore.catalog.models import (
    Alias,
    Checkpoint,
    CheckpointFile,
    ConversionIO,
    FindingRecord,
    Hold,
    SetAsideRow,
    Tag,
    Tensor,
    TrainingRun,
)
from ckptcore.catalog.normalize import clean, clean_json, hex_digest, same_places, storable, storable_finding
from ckptcore.catalog.types import CheckpointFacts, Kind, Role, State
from ckptcore.errors import LEVELS, Finding, UsageError
from ckptcore.utils.part_digest import is_crc

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Row

_IDENTITY = ("code", "level", "message", "fqn", "file")  # of a finding


def put_checkpoint(conn: Connection, now: datetime, facts: CheckpointFacts, kind: Kind) -> tuple[int, str]:
    """Find or insert the row of the checkpoint at `facts.uri`, and mark other rows of the place as replaced.

    A row is one content at one place, under the scheme that it was recorded with. The same manifest with
    other file digests is other content. A digest that is recorded stays, and one that was not known is added.
    A BLAKE3 of a writer and a CRC-64 of a reader are not compared, and the BLAKE3 stays.

    Returns:
        (row id, public id).
    """
    places, manifest = same_places(facts.uri), hex_digest(facts.manifest_digest)
    uri = places[0]
    files = [(storable(path), nbytes, hex_digest(d) if d else None) for path, nbytes, d in facts.files]
    extra = [(storable(path), nbytes, hex_digest(d) if d else None) for path, nbytes, d in facts.extra]
    row = _same_content(conn, places, manifest, files)
    if row is not None:
        changes = _new_values(conn, now, row, facts)
        # A derived checkpoint that is read as a source stays a derived one.
        if kind is Kind.DERIVED:
            changes["kind"] = kind.value
        # A reader without digests adds none, and must not drop those that are there.
        if any(digest for _, _, digest in files):
            changes |= _add_digests(conn, row.id, files)
        _replace_extra(conn, row.id, extra)
        conn.execute(update(Checkpoint).where(Checkpoint.id == row.id).values(changes))
        checkpoint, public = row.id, row.uuid
        _note_fingerprints(conn, checkpoint, facts.fingerprints)
    else:
        public = str(uuid.uuid4())
        checkpoint = conn.execute(
            insert(Checkpoint)
            .values(
                uuid=public,
                run_id=_run(conn, now, facts.run),
                kind=kind.value,
                format=facts.format,
                uri=uri,
                state=State.PRESENT.value,
                step=facts.step,
                total_bytes=facts.nbytes,
                num_tensors=len(facts.tensors),
                num_files=len(files),
                dtypes=",".join(_dtypes(facts)),
                manifest_digest=manifest,
                content_digest=content_digest(files),
                origin=clean_json(facts.origin),
                created_at=now,
                fingerprint=facts.fingerprint,
            )
            .returning(Checkpoint.id)
        ).scalar_one()
        _put_files(conn, checkpoint, files, Role.DATA)
        _put_files(conn, checkpoint, extra, Role.EXTRA)
        _put_tensors(conn, checkpoint, facts)
    # Only places with several schemes can have rows of the same content under other names.
    if len(places) > 1:
        _keep_ties(conn, checkpoint, places)
    conn.execute(
        update(Checkpoint)
        .where(Checkpoint.uri.in_(places), Checkpoint.id != checkpoint, Checkpoint.state.not_in(NOWHERE))
        .values(state=State.REPLACED.value, replaced_at=now)
    )
    for origin, training in facts.training:
        training_rows.put(conn, now, checkpoint, training, origin)
    if facts.live is not None:
        training_rows.put_live(conn, now, checkpoint, facts.live)
    if facts.statistics is not None:
        history.put(conn, now, checkpoint, facts.statistics)
    return checkpoint, public


def _same_content(
    conn: Connection, places: Sequence[str], manifest: str, files: Sequence[tuple[str, int, str | None]]
) -> Row[Any] | None:
    """Return the row of a manifest at one of these places, unless its recorded digests are others."""
    content = content_digest(files)
    same_manifest = select(
        Checkpoint.id,
        Checkpoint.uuid,
        Checkpoint.content_digest,
        Checkpoint.state,
        Checkpoint.run_id,
        Checkpoint.step,
    ).where(Checkpoint.uri.in_(places), Checkpoint.manifest_digest == manifest)
    # Rows that are not replaced first, then those of this very spelling, then the newest.
    newest = (Checkpoint.replaced_at.is_not(None), Checkpoint.uri != places[0], Checkpoint.id.desc())
    same = conn.execute(same_manifest.order_by(*newest)).all()
    # Without digests the manifest is all that can be compared.
    digests = {path: digest for path, _, digest in files if digest}
    if digests:
        # Prefer the row of this content, else one whose known digests are not others.
        same = [row for row in same if content and row.content_digest == content] or [
            row for row in same if not _has_others(conn, row.id, digests)
        ]
    return same[0] if same else None


def _new_values(conn: Connection, now: datetime, row: Row[Any], facts: CheckpointFacts) -> dict[str, Any]:
    """Return the changes of a row whose content was seen again."""
    # The content is there now, whatever was recorded of its absence.
    changes: dict[str, Any] = {"replaced_at": None, "deleted_at": None}
    if row.state in (State.REPLACED, State.GONE, State.RETIRED, State.DELETED):
        changes["state"] = State.PRESENT.value
    # Objects are set aside where they are: seeing them there is no sign that they came back.
    if row.state == State.RETIRED and _stays_in_place(conn, row.id):
        changes["state"] = State.RETIRED.value
    # A run or a step that is recorded stays: those in `facts` may be a guess from the folder's name.
    if facts.run is not None and row.run_id is None:
        changes["run_id"] = _run(conn, now, facts.run)
    if facts.step is not None and row.step is None:
        changes["step"] = facts.step
    if facts.fingerprint is not None:
        changes["fingerprint"] = facts.fingerprint
    return changes


def _keep_ties(conn: Connection, checkpoint: int, places: Sequence[str]) -> None:
    """Move what keeps a checkpoint from the rows of the same content under other schemes to its row.

    A replaced row keeps nothing from deletion.
    """
    row = conn.execute(
        select(Checkpoint.uri, Checkpoint.manifest_digest, Checkpoint.content_digest).where(
            Checkpoint.id == checkpoint
        )
    ).one()
    twin_rows = select(Checkpoint.id).where(
        Checkpoint.uri.in_([place for place in places if place != row.uri]),
        Checkpoint.manifest_digest == row.manifest_digest,
        # Rows whose digests are known must be equal; an unknown one may be of the same content.
        *([Checkpoint.content_digest.in_([row.content_digest, ""])] if row.content_digest else []),
        Checkpoint.state.not_in(NOWHERE),
    )
    twins = list(conn.execute(twin_rows).scalars())
    if not twins:
        return
    for table in (Hold, Alias):
        conn.execute(update(table).where(table.checkpoint_id.in_(twins)).values(checkpoint_id=checkpoint))
    # Keyed by the checkpoint: what its row has already stays.
    keys: tuple[tuple[type[Tag | ConversionIO], str], ...] = ((Tag, "key"), (ConversionIO, "conversion_id"))
    for keyed, key in keys:
        mine = list(
            conn.execute(select(getattr(keyed, key)).where(keyed.checkpoint_id == checkpoint)).scalars()
        )
        for twin in twins:
            moved = (keyed.checkpoint_id == twin, getattr(keyed, key).not_in(mine))
            mine += conn.execute(select(getattr(keyed, key)).where(*moved)).scalars()
            conn.execute(update(keyed).where(*moved).values(checkpoint_id=checkpoint))


def note_findings(
    conn: Connection,
    now: datetime,
    findings: Iterable[Finding],
    *,
    checkpoint: int | None,
    conversion: int | None,
    level: str | None,
) -> None:
    """Insert findings, resolve those that a check of `level` no longer finds, and update the state.

    A finding that a later check repeats stays one row. A conversion always inserts rows of its own.

    Args:
        conn: a writer's transaction.
        now: the time to record.
        findings: the findings of the check.
        checkpoint: the row id of the checkpoint, if any.
        conversion: the row id of the conversion, if any.
        level: the deepest level that was checked in full. None resolves nothing.
    """
    new = {tuple(row[name] for name in _IDENTITY): row for row in map(storable_finding, findings)}
    open_findings: Sequence[Any] = () if checkpoint is None else _open_findings(conn, checkpoint)
    closed = []
    for row in open_findings:
        # A check repeats what an earlier one has found: one row, with its first date.
        same = tuple(getattr(row, name) for name in _IDENTITY)
        if same in new and conversion is None:
            del new[same]
        # A check closes what it could have seen: findings of deeper levels stay open.
        elif same in new or _depth(row.level) <= _depth(level):
            closed.append({"row": row.id})
    if closed:
        conn.execute(
            update(FindingRecord).where(FindingRecord.id == bindparam("row")).values(resolved_at=now), closed
        )
    ids = {"checkpoint_id": checkpoint, "conversion_id": conversion, "found_at": now}
    if new:
        conn.execute(insert(FindingRecord), [row | ids for row in new.values()])
    if checkpoint is not None:
        if closed or new:
            open_findings = _open_findings(conn, checkpoint)
        _settle(conn, now, checkpoint, level, open_findings)


def set_tag(conn: Connection, now: datetime, checkpoint: int, key: str, value: str | None) -> None:
    """Set a tag, or remove it if the value is None."""
    if not key or key != key.strip():
        raise UsageError(
            f"cannot set tag {key!r}: the key is empty or has blanks around it",
            hint="give a word without blanks",
        )
    conn.execute(delete(Tag).where(Tag.checkpoint_id == checkpoint, Tag.key == clean(key)))
    if value is not None:
        conn.execute(
            insert(Tag).values(checkpoint_id=checkpoint, key=clean(key), value=clean(value), updated_at=now)
        )


def content_digest(files: Sequence[tuple[str, int, str | None]]) -> str:
    """Return the BLAKE3 digest over sorted (path, size, digest); '' unless all digests are known."""
    # One unknown digest makes the content unknown.
    if not files or any(digest is None for _, _, digest in files):
        return ""
    import blake3

    listing = json.dumps(sorted(files), ensure_ascii=True, separators=(",", ":"))
    return blake3.blake3(listing.encode()).hexdigest()


def _files_in_role(checkpoint: int, role: Role) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return CheckpointFile.checkpoint_id == checkpoint, CheckpointFile.role == role.value


def _has_others(conn: Connection, checkpoint: int, digests: Mapping[str, str]) -> bool:
    """Report whether the recorded digest of a file says that it has other bytes."""
    recorded = _recorded_digests(conn, checkpoint)
    return any(
        # Digests of two kinds say nothing about each other.
        path in recorded and recorded[path] != digest and is_crc(recorded[path]) == is_crc(digest)
        for path, digest in digests.items()
    )


def _recorded_digests(conn: Connection, checkpoint: int) -> dict[str, str]:
    mine = CheckpointFile.checkpoint_id == checkpoint, CheckpointFile.digest.is_not(None)
    rows = conn.execute(select(CheckpointFile.path, CheckpointFile.digest).where(*mine))
    return {row.path: row.digest for row in rows}


def _kept_digest(recorded: str | None, digest: str | None) -> str | None:
    """Return the digest of a file to record: a reader's CRC-64 does not replace a writer's BLAKE3."""
    if digest is None or (recorded is not None and is_crc(digest) and not is_crc(recorded)):
        return recorded
    return digest


def _add_digests(
    conn: Connection, checkpoint: int, files: Sequence[tuple[str, int, str | None]]
) -> dict[str, Any]:
    """Add digests of the files with tensors to those that are recorded; return the changes of the row."""
    recorded = _recorded_digests(conn, checkpoint)
    merged_files = [
        (path, nbytes, _kept_digest(recorded.get(path), digest)) for path, nbytes, digest in files
    ]
    if all(recorded.get(path) == digest for path, _, digest in merged_files):
        return {}
    conn.execute(delete(CheckpointFile).where(*_files_in_role(checkpoint, Role.DATA)))
    _put_files(conn, checkpoint, merged_files, Role.DATA)
    return {"content_digest": content_digest(merged_files), "num_files": len(merged_files)}


def _replace_extra(conn: Connection, checkpoint: int, extra: Sequence[tuple[str, int, str | None]]) -> None:
    """Replace the files without tensors, unless the new ones were only read: those replace no digest."""
    if not extra:
        return
    published = any(digest and not is_crc(digest) for _, _, digest in extra)
    recorded = _recorded_digests(conn, checkpoint)
    extra = [(path, nbytes, _kept_digest(recorded.get(path), digest)) for path, nbytes, digest in extra]
    # Files with a digest were published. A reader who lists the folder has none, and must not drop theirs.
    old = delete(CheckpointFile).where(*_files_in_role(checkpoint, Role.EXTRA))
    if not published:
        old = old.where(CheckpointFile.digest.is_(None))
    conn.execute(old)
    stored = select(CheckpointFile.path).where(CheckpointFile.checkpoint_id == checkpoint)
    stored_paths = set(conn.execute(stored).scalars())
    _put_files(conn, checkpoint, [f for f in extra if f[0] not in stored_paths], Role.EXTRA)


def _put_files(
    conn: Connection, checkpoint: int, files: Sequence[tuple[str, int, str | None]], role: Role
) -> None:
    rows = [
        {"checkpoint_id": checkpoint, "path": path, "nbytes": nbytes, "digest": digest, "role": role.value}
        for path, nbytes, digest in files
    ]
    if rows:
        conn.execute(insert(CheckpointFile), rows)


def _note_fingerprints(conn: Connection, checkpoint: int, fingerprints: Mapping[str, str]) -> None:
    """Update the fingerprints of tensors that are recorded already."""
    if not fingerprints:
        return
    of_checkpoint = Tensor.checkpoint_id == checkpoint
    recorded = {
        row.fqn: row.fingerprint
        for row in conn.execute(select(Tensor.fqn, Tensor.fingerprint).where(of_checkpoint))
    }
    newest = {storable(fqn): fingerprint for fqn, fingerprint in fingerprints.items()}
    rows = [{"name": k, "found": v} for k, v in newest.items() if k in recorded and recorded[k] != v]
    if rows:
        named = Tensor.fqn == bindparam("name")
        change = update(Tensor).where(of_checkpoint, named).values(fingerprint=bindparam("found"))
        conn.execute(change, rows)


def _put_tensors(conn: Connection, checkpoint: int, facts: CheckpointFacts) -> None:
    rows = [
        {
            "checkpoint_id": checkpoint,
            "fqn": storable(fqn),
            "dtype": dtype,
            "shape": str([int(n) for n in shape]),
            "nbytes": nbytes,
            "fingerprint": facts.fingerprints.get(fqn),
        }
        for fqn, dtype, shape, nbytes in facts.tensors
    ]
    if rows:
        conn.execute(insert(Tensor), rows)


def _dtypes(facts: CheckpointFacts) -> list[str]:
    total: dict[str, int] = defaultdict(int)
    for _, dtype, _, nbytes in facts.tensors:
        total[dtype] += nbytes
    return sorted(total, key=lambda dtype: (-total[dtype], dtype))


def _run(conn: Connection, now: datetime, name: str | None) -> int | None:
    if name is None:
        return None
    run_id = conn.execute(select(TrainingRun.id).where(TrainingRun.name == storable(name))).scalar()
    if run_id is not None:
        return run_id
    return conn.execute(
        insert(TrainingRun).values(name=storable(name), created_at=now).returning(TrainingRun.id)
    ).scalar_one()


def _settle(
    conn: Connection, now: datetime, checkpoint: int, level: str | None, open_findings: Sequence[Any]
) -> None:
    """Derive the state and the verification of a checkpoint from its open findings."""
    codes = {row.code for row in open_findings if row.severity == "error"}
    current_state = select(Checkpoint.verified_level, Checkpoint.state).where(Checkpoint.id == checkpoint)
    before, changes = conn.execute(current_state).one(), dict[str, Any]()
    if codes:
        # A save that is still written is no damage.
        state = State.INCOMPLETE if "not-complete" in codes else State.DAMAGED
        changes = {"state": state.value, "verified_at": None, "verified_level": None}
    else:
        changes = {"state": State.PRESENT.value}
        # A shallow check does not revoke what a deeper one has proven.
        if level is not None and _depth(level) >= _depth(before.verified_level):
            changes |= {"verified_at": now, "verified_level": level}
    if before.state == State.RETIRED:  # it is set aside where it was (`put_checkpoint`)
        changes["state"] = before.state
    conn.execute(update(Checkpoint).where(Checkpoint.id == checkpoint).values(changes))


def _open_findings(conn: Connection, checkpoint: int) -> Sequence[Any]:
    return conn.execute(
        select(FindingRecord).where(
            FindingRecord.checkpoint_id == checkpoint, FindingRecord.resolved_at.is_(None)
        )
    ).all()


def _depth(level: str | None) -> int:
    if level is None:
        return -1
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


def _stays_in_place(conn: Connection, checkpoint: int) -> bool:
    """Return whether a retired checkpoint is set aside where it was: objects cannot be moved."""
    set_aside_object = (
        SetAsideRow.checkpoint_id == checkpoint,
        SetAsideRow.uri.contains("://", autoescape=True),
    )
    return conn.execute(select(SetAsideRow.record).where(*set_aside_object)).first() is not None
