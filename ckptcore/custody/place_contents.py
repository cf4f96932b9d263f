"""Find what a place holds, whatever is there: one checkpoint, several in folders, or files without a format.

Every folder and file that no checkpoint around it uses is tried as a checkpoint of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckptcore.catalog import holdings as recorded
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.normalize import hex_digest
from ckptcore.catalog.types import State
from ckptcore.checking.examine import inspect
from ckptcore.checking.source_stamps import published_stamp
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import used
from ckptcore.custody.holdings import file_holdings, inner_path, objects_of, tensor_ids_read
from ckptcore.errors import CkptError, UnknownFormat
from ckptcore.fingerprints.holdings import (
    FILE,
    ID_BYTES,
    TENSOR,
    Ids,
    file_spec,
    ids_of,
    in_one,
    numbered_ids,
    spec_digest,
)
from ckptcore.planning.request import Settings
from ckptcore.store import join_url
from ckptcore.store.file_status import FileStatus, NameKind


@dataclass(frozen=True, slots=True)
class PlaceContents:
    """What a place holds, as far as it was looked for.

    Attributes:
        ids: Content ids.
        readable: Whether everything that looks like a checkpoint could be read.
        manifests: Of its checkpoints.
    """

    ids: Ids = frozenset()
    readable: bool = True
    manifests: tuple[Manifest, ...] = ()


@dataclass(slots=True)
class _Walk:
    opened: list[tuple[str, Manifest]] = field(default_factory=list)  # place -> manifest
    readable: bool = True


def contents_at(
    url: str, things: Mapping[str, FileStatus], specs: Ids, settings: Settings, catalog: Catalog | None = None
) -> PlaceContents:
    """Find the contents of a place that have one of the specs.

    Tensors are read, unless the catalog has their sums, and their files are those that were published then.

    Args:
        url: The place.
        things: Everything there, links not followed.
        specs: Digests of specs (`ckptcore.fingerprints.holdings.pack_specs`).
        settings: Memory and threads for reading.
        catalog: The catalog with the sums; None to read everything.

    Raises:
        CkptError: Something cannot be read now, and a retry may help.
    """

    def is_wanted(spec: str) -> bool:
        return spec_digest(TENSOR, spec) in specs

    walk, parts = _walked(url, things), list[Ids]()
    for place, manifest in walk.opened:
        tensor_ids = _recorded_ids(catalog, place, manifest) if catalog is not None else None
        if tensor_ids is None:
            tensor_ids, is_complete = tensor_ids_read(manifest, settings, is_wanted)
            walk.readable &= is_complete
        parts += tensor_ids, ids_of(objects_of(manifest))
        walk.readable &= not manifest.unread
    sizes = {t.nbytes for t in things.values() if spec_digest(FILE, file_spec(t.nbytes)) in specs}
    if sizes:
        parts.append(ids_of(file_holdings(url, things, sizes)))
    return PlaceContents(in_one(parts), walk.readable, tuple(manifest for _, manifest in walk.opened))


def _walked(url: str, things: Mapping[str, FileStatus]) -> _Walk:
    walk = _Walk()
    if "" in things:
        _opened_at(walk, url)
        walk.readable &= bool(walk.opened)
        return walk
    files = {name for name, thing in things.items() if thing.kind in (NameKind.FILE, NameKind.LINK)}
    folders = ["", *(name for name, thing in things.items() if thing.kind is NameKind.FOLDER)]
    folders.sort(key=lambda name: name.count("/"))
    for folder in folders:
        if any(name.startswith(folder) for name in files):
            place = join_url(url, folder.rstrip("/")) if folder else url
            for manifest in _opened_at(walk, place):
                above = folder + inner_path(manifest, place)
                files -= {above + name for name in used(manifest).all}
    for name in sorted(files):
        if things[name].nbytes:
            _opened_at(walk, join_url(url, name))
    if not walk.opened and files:
        walk.readable = False  # nothing of it is understood
    return walk


def _opened_at(walk: _Walk, place: str) -> Iterator[Manifest] | tuple[Manifest, ...]:
    """Open a checkpoint, quantised values as stored ones, too; note what could not be read."""
    opened = []
    for keep_quantized in (False, True):
        try:
            opened.append(inspect(place, False, keep_quantized))
        except UnknownFormat:
            break
        except CkptError as error:
            if error.transient:
                raise
            walk.readable = False
            break
        if not opened[0].derived:
            break
    walk.opened += [(place, manifest) for manifest in opened]
    return tuple(opened)


def _recorded_ids(catalog: Catalog, place: str, manifest: Manifest) -> Ids | None:
    """Return the recorded ids of the tensors of a checkpoint whose files are those that were published."""
    recorded_row = catalog.at(place)
    if recorded_row is None or recorded_row[0].state != State.PRESENT.value:
        return None
    with catalog.reading() as conn:
        stamp = recorded.stamp_of(conn, recorded_row[0].id)
    if stamp is None or stamp != published_stamp(manifest):
        return None
    if recorded_row[0].manifest_digest != hex_digest(manifest.digest):
        return None
    with catalog.reading() as conn:
        packed_ids = recorded.tensor_ids_of(conn, recorded_row[0].id)
    if packed_ids is None or len(packed_ids) != ID_BYTES * len(manifest.tensors):
        return None
    return numbered_ids(packed_ids)
