"""Leave names out of a checkpoint in its own files: which files go, which are cut, which stay as they are.

Nothing is encoded anew: what stays of a file is ranges of its own bytes. A file of which everything goes is
removed, and one that holds both is cut only where its format says how. The caller reads the result, and
compares it with the source, before it takes the source's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ckptcore.core.manifest import Chunks, Manifest
from ckptcore.errors import UnsupportedFormat
from ckptcore.formats.base import FilePiece, Source, SourceRange, Thinned
from ckptcore.utils.text import some

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FileUse:
    """What the items of one file hold, of what stays and of what goes; row i is one item.

    Attributes:
        start: int64 [n], first byte, ascending.
        goes: bool [n], whether all of it goes: its tensors, or its objects where it has no tensor.
        mixed: bool [n], whether it holds a tensor that goes and something that stays.
    """

    start: npt.NDArray[np.int64]
    goes: Bools
    mixed: Bools

    def within(self, start: int = 0, stop: int = 1 << 62) -> tuple[bool, bool]:
        """Return whether anything in a range of the file stays, and whether anything goes."""
        first, last = np.searchsorted(self.start, [start, max(stop, start + 1)]).tolist()
        goes, mixed = self.goes[first:last], self.mixed[first:last]
        return bool((~goes).any()), bool((goes | mixed).any())


Ranges = Mapping[str, FileUse]  # file -> what is in it
# (the folder, its files) -> path -> pieces of each file that changes; () for one that goes.
Cut = Callable[[Source, Ranges], Mapping[str, tuple[FilePiece, ...]]]


def thin_files(
    source: Source, manifest: Manifest, drop: frozenset[str], cuts: Mapping[str, Cut] | None = None
) -> Thinned:
    """Leave names out of the files of a checkpoint.

    An object that is stored with others, such as the groups of an optimizer in a file with the arguments of
    the run, stays with them: it has no bytes of its own.

    Args:
        source: The checkpoint.
        manifest: Of it.
        drop: Names of tensors and objects.
        cuts: Name of the file that makes a folder loadable -> what cuts the files of such a folder.

    Returns:
        The files that change.

    Raises:
        UnsupportedFormat: A file holds a tensor that goes and something that stays, and cannot be cut.
    """
    by_folder: dict[str, dict[str, FileUse]] = {}
    for path, use in ranges_of(manifest, drop).items():
        folder, _, name = path.rpartition("/")
        by_folder.setdefault(folder, {})[name] = use
    files: dict[str, tuple[FilePiece, ...]] = {}
    for folder, ranges in by_folder.items():
        prefix = f"{folder}/" if folder else ""
        uses = {name: use.within() for name, use in ranges.items()}
        if not any(goes for _, goes in uses.values()):
            continue
        index = next((name for name in cuts or () if prefix + name in source.listing), None)
        if cuts and index is not None and any(stays for stays, _ in uses.values()):
            of_folder = source.below(folder) if folder else source
            cut = cuts[index](of_folder, ranges)
            unchanged = {name: (SourceRange(name, 0, of_folder.listing[name]),) for name in cut}
            if any(pieces != unchanged[name] for name, pieces in cut.items() if name != index):
                files |= {prefix + name: _below(prefix, pieces) for name, pieces in cut.items()}
            continue
        mixed_files = [prefix + name for name, (stays, goes) in uses.items() if stays and goes]
        if mixed_files:
            raise UnsupportedFormat(
                f"cannot thin {source.store.url}: {some(mixed_files)} holds what goes and what stays",
                hint="`ckptcore consolidate` or `reshard` with --exclude writes what stays to another place",
            )
        if index is not None:
            files[prefix + index] = ()
        files |= {prefix + name: () for name, (_, goes) in uses.items() if goes}
    return Thinned(files)


def _below(prefix: str, pieces: tuple[FilePiece, ...]) -> tuple[FilePiece, ...]:
    """Return pieces of the files of a folder by the paths that these have above it."""
    return tuple(
        replace(piece, path=prefix + piece.path) if isinstance(piece, SourceRange) else piece
        for piece in pieces
    )


def ranges_of(manifest: Manifest, drop: frozenset[str]) -> Ranges:
    """Return what the items of a checkpoint hold, of what stays and of what goes."""
    items = manifest.items
    stays, goes, objects_stay, objects_go = np.zeros((4, len(items)), np.bool_)
    for chunks, dropped in _tensors(manifest, drop):
        of_chunk = dropped[chunks.tensor]
        goes[chunks.item[of_chunk]] = True
        stays[chunks.item[~of_chunk]] = True
    for blob in manifest.blobs:
        if blob.item >= 0:
            (objects_go if blob.key in drop else objects_stay)[blob.item] = True
    all_gone = np.where(goes, ~stays & ~objects_stay, objects_go & ~objects_stay & ~stays)
    mixed = goes & (stays | objects_stay)
    used = stays | goes | objects_stay | objects_go
    rows = np.flatnonzero(used)
    rows = rows[np.lexsort((items.start[rows], items.file[rows]))]
    numbers, first = np.unique(items.file[rows], return_index=True)
    of_file = zip(numbers.tolist(), np.split(rows, first[1:]), strict=True) if len(rows) else ()
    return {
        manifest.files[number].path: FileUse(items.start[part], all_gone[part], mixed[part])
        for number, part in of_file
    }


def _tensors(manifest: Manifest, drop: frozenset[str]) -> Iterator[tuple[Chunks, Bools]]:
    """Yield chunks, and which of their tensors go; what a computed tensor is made of goes with it alone."""
    gone = np.array([t.fqn in drop for t in manifest.tensors], np.bool_)
    yield manifest.chunks, gone
    if manifest.inputs is not None:
        needed = {n for t, node in manifest.derived.items() if not gone[t] for n in node.inputs}
        yield (
            manifest.inputs.chunks,
            np.array([n not in needed for n in range(len(manifest.inputs.tensors))], np.bool_),
        )
