"""Find the ancestors and descendants of checkpoints and the origin of files, digests and fingerprints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sqlalchemy import select

from ckptcore.catalog.models import Checkpoint, CheckpointFile, Conversion, Tensor
from ckptcore.catalog.normalize import hex_digest, parents, same_places
from ckptcore.catalog.query import (
    Edge,
    begins,
    checkpoint_row,
    checkpoint_rows,
    checkpoints_of,
    conversion_row,
    conversions_of,
    current_first,
    edges_of,
    file_row,
    in_parts,
    resolve_checkpoint,
)
from ckptcore.catalog.types import Direction, FileRow, Lineage, LineageStep, Origin, State
from ckptcore.errors import SourceUnreadable
from ckptcore.utils.part_digest import hasher_like

if TYPE_CHECKING:
    from sqlalchemy import Connection

_DIGEST = re.compile(r"(?:blake3(?:-parts-[0-9]+)?:)?[0-9a-f]{8,64}")
_DIGEST_LENGTH = 64
_READ = 1 << 20  # bytes per read; larger fresh buffers are slower


def lineage(conn: Connection, ref: str, *, up: bool, down: bool) -> Lineage:
    """Return everything upstream and downstream of the checkpoint that `ref` names, nearest first."""
    row_id = resolve_checkpoint(conn, ref)
    row = conn.execute(checkpoint_rows().where(Checkpoint.id == row_id)).one()
    return Lineage(
        checkpoint=checkpoint_row(row),
        ancestors=_steps(conn, row_id, Direction.OUT, Direction.IN) if up else (),
        descendants=_steps(conn, row_id, Direction.IN, Direction.OUT) if down else (),
    )


def which(conn: Connection, place_or_digest: str) -> list[Origin]:
    """Find origins by digest if the text looks like a known one, else by URI, else by the containing URI."""
    origins: list[Origin] = []
    if is_digest(place_or_digest):
        # Digits may be a folder's name, too: the place is asked if no file has the digest.
        origins = _by_digest(conn, hex_digest(place_or_digest))
    return origins or _by_place(conn, same_places(place_or_digest))


def with_fingerprint(conn: Connection, fingerprint: str) -> list[Origin]:
    """Find the checkpoints with this fingerprint or, if there are none, those with such a tensor."""
    digits = hex_digest(fingerprint)
    for column, rows in (
        (Checkpoint.fingerprint, select(Checkpoint.id)),
        (Tensor.fingerprint, select(Checkpoint.id).join(Tensor, Tensor.checkpoint_id == Checkpoint.id)),
    ):
        # A part of a digest is a prefix, which an index serves; a complete one is compared.
        complete = len(digits) == _DIGEST_LENGTH
        same = column == digits if complete else begins(column, digits)
        row_ids = dict.fromkeys(conn.execute(rows.where(same).order_by(*current_first())).scalars())
        if row_ids:
            return [_origin_of(conn, row, None) for row in row_ids]
    return []


def is_digest(text: str) -> bool:
    """Return whether a text looks like a digest or the beginning of one."""
    return _DIGEST.fullmatch(text.lower()) is not None


def kinds_of(conn: Connection, path: str) -> list[str]:
    """Return one digest of each kind that the catalog has of files with the size of a local file.

    Empty if there is no such file. A file that was uploaded in parts has a digest of its parts.
    """
    if not os.path.isfile(path):
        return []
    # Only of files of this size: other kinds of digests need not be computed.
    rows = select(CheckpointFile.digest).where(CheckpointFile.nbytes == os.path.getsize(path)).distinct()
    kinds = {digest.rpartition(":")[0]: digest for (digest,) in conn.execute(rows) if digest}
    return list(({"": ""} | kinds).values())


def digests_of_file(path: str, kinds: Iterable[str]) -> list[str]:
    """Return the digests of a local file, of the kinds of these digests. The file is read once."""
    hashers, buffer = [hasher_like(digest) for digest in kinds], bytearray(_READ)
    if not hashers:
        return []
    try:
        # Unbuffered: the buffer is this function's own.
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                for hasher in hashers:
                    hasher.update(memoryview(buffer)[:count])
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path}: {error.strerror}", path=path) from error
    return [hasher.hexdigest() for hasher in hashers]


def _by_digest(conn: Connection, digest: str) -> list[Origin]:
    same = (
        CheckpointFile.digest == digest
        if len(digest.rpartition(":")[2]) == _DIGEST_LENGTH
        else begins(CheckpointFile.digest, digest)
    )
    query = (
        select(
            Checkpoint.id,
            CheckpointFile.path,
            CheckpointFile.nbytes,
            CheckpointFile.digest,
            CheckpointFile.role,
        )
        .join(Checkpoint, Checkpoint.id == CheckpointFile.checkpoint_id)
        .where(same)
        .order_by(*current_first(), CheckpointFile.path)
    )
    return [_origin_of(conn, row.id, file_row(row)) for row in conn.execute(query).all()]


def _by_place(conn: Connection, uris: Sequence[str]) -> list[Origin]:
    query = select(Checkpoint.id, Checkpoint.uri, Checkpoint.state).order_by(*current_first())
    exact = conn.execute(query.where(Checkpoint.uri.in_(uris))).first()
    if exact is not None:
        return [_origin_of(conn, exact.id, _only_file(conn, exact.id, exact.uri))]
    # Every folder above may be a checkpoint, with the file's path inside of it.
    path = {above: uri[len(above) :].lstrip("/") for uri in uris for above in parents(uri)}
    enclosing = conn.execute(query.where(Checkpoint.uri.in_(path))).all()
    # The innermost folder first; within it, the current checkpoint before replaced ones.
    for row in sorted(enclosing, key=lambda row: (len(path[row.uri]), row.state == State.REPLACED)):
        inside = path[row.uri]
        file = conn.execute(
            select(CheckpointFile).where(
                CheckpointFile.checkpoint_id == row.id, CheckpointFile.path == inside
            )
        ).first()
        if file is not None:
            return [_origin_of(conn, row.id, file_row(file))]
    return []


def _only_file(conn: Connection, checkpoint: int, uri: str) -> FileRow | None:
    """Return the file of a checkpoint that is a single file itself."""
    files = conn.execute(
        select(CheckpointFile).where(CheckpointFile.checkpoint_id == checkpoint).limit(2)
    ).all()
    # One file whose name is the checkpoint's: else the file is one of several.
    if len(files) != 1 or files[0].path != uri.rpartition("/")[2]:
        return None
    return file_row(files[0])


def _origin_of(conn: Connection, checkpoint: int, file: FileRow | None) -> Origin:
    row = conn.execute(checkpoint_rows().where(Checkpoint.id == checkpoint)).one()
    conversion = next(iter(conversions_of(conn, checkpoint, Direction.OUT)), None)
    return Origin(
        checkpoint=checkpoint_row(row),
        file=file,
        conversion=conversion,
        sources=checkpoints_of(conn, conversion.id, Direction.IN) if conversion else (),
    )


def _steps(conn: Connection, start: int, near: Direction, far: Direction) -> tuple[LineageStep, ...]:
    """Return the conversions reached by going from the `near` end of each to its `far` end."""
    edges: list[tuple[int, Edge]] = []  # with how many conversions away from the start
    reached, level, depth = {start}, {start}, 0
    while level:  # each checkpoint is in one level: one that was converted onto itself does not loop forever
        depth += 1
        of_level = edges_of(conn, level, near, far)
        edges += [(depth, edge) for edge in of_level]
        level = {edge.far for edge in of_level} - reached
        reached |= level
    rows = {
        row.id: checkpoint_row(row)
        for part in in_parts(sorted({row for _, edge in edges for row in (edge.near, edge.far)}))
        for row in conn.execute(checkpoint_rows().where(Checkpoint.id.in_(part)))
    }
    conversions = {
        row.id: conversion_row(row)
        for part in in_parts(sorted({edge.conversion for _, edge in edges}))
        for row in conn.execute(select(Conversion).where(Conversion.id.in_(part)))
    }
    steps = []
    for depth, edge in edges:
        ends = rows[edge.near], rows[edge.far]
        # Which end is nearer depends on the direction; a step always goes from source to output.
        derived, source = ends if near is Direction.OUT else ends[::-1]
        steps.append(LineageStep(depth, source, conversions[edge.conversion], derived))
    return tuple(sorted(steps, key=lambda step: (step.depth, step.conversion.started_at)))
