"""Write the files of a checkpoint from which names are left out into its staging folder.

Nothing is encoded: every file is pieces of the source's files, copied by the kernel where both are local, and
as extents that they share where the file system can do that (copy_file_range(2)).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

from blake3 import blake3

from ckptcore.conversion.staging.local_staging import LocalStaging
from ckptcore.conversion.staging.staging import Staging
from ckptcore.formats import FilePiece, SourceRange
from ckptcore.store import FileWriter, Store, open_source_store

_BLOCK = 8 << 20
Written = tuple[int, str | None]  # bytes, and the BLAKE3 of a file whose bytes passed through this process


def size_of(pieces: Iterable[FilePiece]) -> int:
    """Return the bytes of a file that consists of these pieces."""
    return sum(piece.nbytes if isinstance(piece, SourceRange) else len(piece) for piece in pieces)


def stage(
    staging: Staging, root: str, versions: Mapping[str, str | None], files: Mapping[str, Sequence[FilePiece]]
) -> dict[str, Written]:
    """Write files into a staging folder, durably.

    Args:
        staging: The staging folder of the checkpoint's place, locked and without files.
        root: Path or URL of the checkpoint.
        versions: Path -> version of its files, which must still be there.
        files: Path -> pieces of each file.

    Returns:
        Path -> bytes and digest of each.

    Raises:
        DiskFull: There is no room for them.
        SourceChanged: A file of the source was rewritten.
    """
    staging.require_room(sum(map(size_of, files.values())))
    written: dict[str, Written] = {}
    with closing(open_source_store(root, versions)) as source, closing(staging.files):
        for path, pieces in files.items():
            staging.require_lease()
            written[path] = _write(source, staging.files, path, pieces)
    if isinstance(staging, LocalStaging):
        staging.take_times(root)
    return written


def _write(source: Store, target: Store, path: str, pieces: Sequence[FilePiece]) -> Written:
    nbytes, offset = size_of(pieces), 0
    hasher = blake3()
    writer = target.writer(path, nbytes)
    try:
        for piece in pieces:
            if isinstance(piece, SourceRange):
                offset += _copy(source, writer, piece, offset, hasher)
            else:
                writer.write(offset, piece)
                hasher.update(piece)
                offset += len(piece)
    except BaseException:
        writer.abort()
        raise
    writer.commit()
    return nbytes, hasher.hexdigest() if writer.sequential else None


def _copy(source: Store, writer: FileWriter, piece: SourceRange, offset: int, hasher: blake3) -> int:
    if not piece.nbytes or writer.copy(source, piece.path, piece.start, piece.nbytes, offset):
        return piece.nbytes
    for first in range(0, piece.nbytes, _BLOCK):
        data = source.read(piece.path, piece.start + first, min(_BLOCK, piece.nbytes - first))
        writer.write(offset + first, data)
        hasher.update(data)
    return piece.nbytes
