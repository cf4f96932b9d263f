"""Compare the files of a source with the digests that the catalog recorded when it first saw it.

A source is what a training wrote: nothing else knows its bytes. So the first digest of a file stays, and a
later one that differs is damage, unless the checkpoint was saved once more at the same place. The inputs of
an average are looked at one by one: each is a checkpoint of the catalog, the average is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from ckptcore.catalog.normalize import hex_digest
from ckptcore.catalog.types import CheckpointRow, FileRow, Role, State
from ckptcore.checking.examine import inspect
from ckptcore.core.manifest import Manifest
from ckptcore.errors import DamagedCheckpoint, Finding, finding
from ckptcore.planning.request import Request
from ckptcore.store import local_path
from ckptcore.utils.average_url import folder_of_input, is_of_last, split_average
from ckptcore.utils.part_digest import is_crc, short_digest

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog


Recorded = tuple[CheckpointRow, tuple[FileRow, ...]]  # what the catalog has at a place
NOT_THERE = frozenset({State.REPLACED, State.RETIRED, State.DELETED})
RESTORE_HINT = (
    "copy it again from where it was written; if you changed it on purpose, record it with "
    "`ckptcore catalog rebuild --digests`"
)


def inspected(request: Request) -> Manifest:
    """Return the manifest of a request's source, as a conversion reads it."""
    return inspect(request.source, request.recover, request.keep_quantized, request.weights)


def differs(file: FileRow, digest: str) -> Finding | None:
    """Return the finding on a file that was read, if its digest is not the recorded one of that kind."""
    if file.digest is None or digest == file.digest or is_crc(digest) != is_crc(file.digest):
        return None
    message = f"{file.path} has {short_digest(digest)}, the catalog records {short_digest(file.digest)}"
    return finding("digest-mismatch", "bytes", message, file=file.path, hint=RESTORE_HINT)


def are_of_first_sight(files: Sequence[FileRow]) -> bool:
    """Report whether the digests of a checkpoint's tensors are of a reader, and of no writer or user."""
    return any(f.digest and is_crc(f.digest) for f in files if f.role == Role.DATA)


def is_resaved(
    folder: str, files: Sequence[FileRow], same: Collection[str], recorded: datetime | None
) -> bool:
    """Report whether a checkpoint was saved once more: all of its files with tensors differ, and are newer.

    A copy that was restored has most of them as they were, or with the times of the original. On an object
    store an object is replaced as a whole, never altered.

    Args:
        folder: Path or URL that the files' paths are relative to.
        files: Its files in the catalog that were compared.
        same: Those that are as they were; none where they read as another checkpoint, which may well have
            some files like the one before.
        recorded: When they were recorded; None if it is not known.
    """
    data = [f.path for f in files if f.role == Role.DATA and f.digest]
    if not data or any(path in same for path in data):
        return False
    place = local_path(folder)
    if place is None:
        return True
    if recorded is None:
        return False
    try:
        return all((place / file.path).stat().st_mtime > recorded.timestamp() for file in files)
    except OSError:  # one is missing
        return False


def require_as_recorded(manifest: Manifest, digests: Mapping[str, str], recorded: Recorded | None) -> None:
    """Require that a source's files are those that the catalog recorded, as far as it has digests.

    Args:
        manifest: The source.
        digests: Path -> digest of files that were read completely.
        recorded: What the catalog has at its place.

    Raises:
        DamagedCheckpoint: A file has other bytes, and the checkpoint was not saved again. Its value
            ``recorded`` says whether it still reads as the recorded checkpoint.
    """
    if recorded is None or recorded[0].state in NOT_THERE:
        return
    row, files = recorded
    is_another = hex_digest(manifest.digest) != row.manifest_digest
    sizes = {f.path: f.size for f in manifest.files}
    if is_another and any(sizes.get(f.path) != f.nbytes for f in files if f.role == Role.DATA):
        return  # else it may be damaged: headers with a flipped byte, or of exchanged files, read as others
    files = tuple(f for f in files if f.path in digests)
    # Only files that were read completely have a digest to compare; the others prove nothing either way.
    differing = [wrong for f in files if (wrong := differs(f, digests[f.path]))]
    same = {f.path for f in files if digests[f.path] == f.digest and not is_another}
    if not differing or is_resaved(manifest.root, files, same, row.created_at):
        return
    others_text = f" and {len(differing) - 1} more" if differing[1:] else ""
    raise DamagedCheckpoint(
        f"{manifest.root} is not what the catalog recorded on {row.created_at:%Y-%m-%d}: "
        f"{differing[0].message}{others_text}",
        hint=RESTORE_HINT,
        findings=tuple(differing),
        recorded=not is_another,
    )


@dataclass(frozen=True, slots=True)
class AverageInput:
    """One input of an average.

    Attributes:
        url: Its path or URL.
        weight: As it was given.
        manifest: The input as it is now.
        digests: Path -> digest of those of its files that were read completely.
    """

    url: str
    weight: float
    manifest: Manifest
    digests: Mapping[str, str]


def inputs_of(request: Request, digests: Mapping[str, str]) -> Iterator[AverageInput]:
    """Yield the inputs of the average that a request reads, in the order of the sum.

    Args:
        request: Its source is an average.
        digests: Path in the average -> digest of a file that was read completely.

    Raises:
        CkptError: An input cannot be read any more.
    """
    roots, weights = split_average(request.source)
    for place, (root, weight) in enumerate(zip(roots, weights, strict=True)):
        folder = folder_of_input(place, len(roots))
        input_digests = {
            path.removeprefix(folder): digest
            for path, digest in digests.items()
            if (path.startswith(folder) if folder else is_of_last(path))
        }
        yield AverageInput(root, weight, inspected(replace(request, source=root)), input_digests)


def require_inputs_as_recorded(request: Request, digests: Mapping[str, str], catalog: Catalog) -> None:
    """Require of every input what `require_as_recorded` requires of a source.

    Raises:
        DamagedCheckpoint: A file of an input has other bytes than the catalog recorded.
    """
    for averaged in inputs_of(request, digests):
        require_as_recorded(averaged.manifest, averaged.digests, catalog.at(averaged.url))
