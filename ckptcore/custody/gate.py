"""Decide whether a place may be replaced, by the contents that it holds.

1. The obligations are those of the catalog, and those in records beside the place, in it and around it.
2. The place is looked through: every checkpoint that opens there, and its contents. What cannot be read
   counts as everything that an obligation counts on there, that was recorded there, and that its sources had;
   and as each copy under an obligation that is not where it was: a user may have moved it here.
3. Contents under an obligation must be proven elsewhere: read now, in files that are not those of the place,
   where no conversion writes. Everything else is named by ``--overwrite``.

It is asked when a conversion is planned, at each resume, and before it publishes; what was read then is
counted on in one transaction (`ckptcore.custody.replacing.counting_on`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckptcore.catalog import holdings, obligations
from ckptcore.catalog.holdings import NOWHERE
from ckptcore.catalog.normalize import hex_digest
from ckptcore.catalog.types import CheckpointRow
from ckptcore.checking.examine import inspect
from ckptcore.core.manifest import Manifest
from ckptcore.custody.distinct import require_apart
from ckptcore.custody.judged import AtRest, Judged, digest_of_files
from ckptcore.custody.obligation_records import (
    Obligation,
    place_of,
    places_with_records,
    read_obligations,
    recorded_obligation,
)
from ckptcore.custody.place_contents import contents_at
from ckptcore.custody.place_ties import inside_of_place, writer_of_place
from ckptcore.custody.upkeep import recorded_ids
from ckptcore.errors import CatalogError, CkptError, DestinationExists, SourceUnreadable
from ckptcore.fingerprints.holdings import Ids, common, ids_of, in_one, unpack_specs
from ckptcore.planning.request import Settings
from ckptcore.store import forget_small_reads, join_url, local_path, split_url
from ckptcore.store.file_status import FileStatus
from ckptcore.store.listing import contents
from ckptcore.store.objects.retry import Kind, kind_of
from ckptcore.store.place import Relation, identify, relation
from ckptcore.utils.isolation import attempt
from ckptcore.utils.text import some

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_log = logging.getLogger("ckptcore")
_HINT = (
    "choose another destination. A copy counts once the catalog knows what it holds: `ckptcore fingerprint "
    "COPY`. To give these contents up by name: `ckptcore catalog obligation release {} --accept-loss GLOB`"
)


@contextmanager
def existing_catalog(catalog: str | bool | None) -> Iterator[Catalog | None]:
    """Open a catalog that exists; None where there is none, or none is to be used.

    Args:
        catalog: Its URL; None for the default one, False for none.
    """
    from ckptcore.catalog import open_catalog

    opened = None
    if catalog is not False:
        try:
            opened = open_catalog(catalog if isinstance(catalog, str) else None, create=False)
        except CatalogError as error:
            if not error.values.get("missing"):
                raise
    if opened is None:
        yield None
        return
    with opened:
        yield opened


def obligations_at(catalog: Catalog | None, place: str, names: Collection[str]) -> tuple[Obligation, ...]:
    """Return the obligations to consider before a place is replaced.

    Those of the catalog may count on any place: what is there may have been moved there. names: everything at
    the place; records of obligations may be among it.
    """
    inside = {place_of(join_url(place, name.rstrip("/"))) for name in names if name.endswith("/")}
    inside |= {place_of(join_url(place, name.rpartition("/")[0])) for name in names if "/" in name}
    read = [obligations_beside(place), *(read_obligations(folder) for folder in sorted(filter(None, inside)))]
    obligation_of = {obligation.row.id: obligation for recorded in read for obligation in recorded}
    if catalog is not None:
        with catalog.reading() as conn:
            from_catalog = {
                row.id: attempt(recorded_obligation, conn, row, obligation_of.get(row.id))
                for row in obligations.every(conn)
            }
        listed = dict[str, Obligation]()
        for key, obligation in from_catalog.items():
            # A broken row counts as the record beside the copy has it; without that, nothing may be replaced.
            if isinstance(obligation, CkptError) and key not in obligation_of:  # not even beside the copy
                raise obligation
            listed[key] = obligation_of[key] if isinstance(obligation, CkptError) else obligation
        forgotten = [obligation_of[key] for key in obligation_of.keys() - listed.keys()]
        if forgotten:  # the catalog was lost, or restored
            with catalog.writing() as conn:
                for obligation in forgotten:
                    obligations.put(conn, obligation.row, obligation.packed)
        obligation_of |= listed
    return tuple(obligation_of.values())


def obligations_beside(place: str) -> tuple[Obligation, ...]:
    """Return the obligations in records beside a place, beside folders around it, and of moved neighbours."""
    around = (obligation for folder in _around(place) for obligation in _read_around(folder))
    return (*read_obligations(place), *around, *_of_moved_neighbours(place))


def _of_moved_neighbours(place: str) -> Iterator[Obligation]:
    """Yield the obligations on copies that are gone from the same folder: a user may have renamed one.

    Of a local disk: an object store has no renames, and a listing for each overwrite would cost a request.
    """
    path = local_path(place)
    if path is None:
        return
    folder = os.path.dirname(os.path.realpath(path))
    if not os.access(folder, os.R_OK, effective_ids=True):
        _log.info("not allowed to look for records of moved copies in %s", folder)
        return
    for neighbour in places_with_records(folder):
        if not os.path.lexists(neighbour):
            yield from read_obligations(neighbour)


def judge(
    catalog: Catalog | None,
    place: str,
    settings: Settings,
    at_rest: AtRest,
    called: str = "",
    *,
    staying: Ids = frozenset(),
    counted: Sequence[Obligation] = (),
) -> Judged:
    """Decide whether a place may go.

    Args:
        catalog: The catalog, or None.
        place: Path or URL; something is there.
        settings: Memory and threads for reading.
        at_rest: Keeps writers away from a copy.
        called: Its name in messages, if that is another one.
        staying: Content ids that what takes its place holds, as it was read.
        counted: What must be proven elsewhere, as if obligations were on it.

    Returns:
        Where contents under an obligation were read.

    Raises:
        DestinationExists: It holds contents under an obligation that are proven nowhere else.
        SourceUnreadable: The place, or a record of obligations, cannot be read.
    """
    things = contents(place)
    all_obligations = (*obligations_at(catalog, place, things), *counted)
    if not all_obligations:
        return Judged()
    specs = frozenset[bytes]().union(*(unpack_specs(obligation.row.specs) for obligation in all_obligations))
    read_contents = contents_at(place, things, specs, settings, catalog)
    unread = None if read_contents.readable else _unread_at(catalog, place)
    matched = {
        obligation.row.id: _matched(catalog, obligation, read_contents.ids, place, unread)
        for obligation in all_obligations
    }
    if staying:
        matched = {key: ids - staying for key, ids in matched.items()}
    missing = in_one(matched.values())
    proven, looks = dict[str, Ids](), dict[str, str]()
    if catalog is not None and missing:
        read_apart = partial(_read_apart, catalog, place, things, specs, settings, at_rest)
        proven, looks, missing = _elsewhere(catalog, missing, read_contents.manifests, read_apart)
    if missing:
        raise _only_copy(
            called or place,
            missing,
            [obligation for obligation in all_obligations if matched[obligation.row.id]],
        )
    moves = {
        obligation_id: tuple(where for where, ids in proven.items() if not ids.isdisjoint(protected_ids))
        for obligation_id, protected_ids in matched.items()
        if protected_ids
    }
    return Judged(moves, looks)


def _elsewhere(
    catalog: Catalog,
    left: Ids,
    manifests: Collection[Manifest],
    read_apart: Callable[[CheckpointRow], tuple[Ids, str]],
) -> tuple[dict[str, Ids], dict[str, str], Ids]:
    """Return the places that hold contents, with what was read there now, how files looked, and the rest.

    manifests: of the checkpoints at the place that may go: copies have the same.
    """
    proven, looks = dict[str, Ids](), dict[str, str]()
    tried = set[str]()
    for copies in (False, True):  # who is known to hold them; then copies of all that is there
        digests = [hex_digest(manifest.digest) for manifest in manifests] if copies and left else []
        with catalog.reading() as conn:
            candidates = holdings.may_hold(conn, left, digests) if left else ()
        for row in candidates:
            if not left or row.id in tried:
                continue
            tried.add(row.id)
            copy = attempt(read_apart, row)
            if isinstance(copy, CkptError):  # it is away, or being written
                continue
            if proven_ids := common(left, copy[0]):  # else it is another name of the place
                proven[row.uri], looks[row.uri] = proven_ids, copy[1]
                left = left - proven_ids
    return proven, looks, left


def _read_apart(
    catalog: Catalog,
    place: str,
    things: Mapping[str, FileStatus],
    specs: Ids,
    settings: Settings,
    at_rest: AtRest,
    row: CheckpointRow,
) -> tuple[Ids, str]:
    """Return what a checkpoint holds, if it is apart from a place, and nothing writes there.

    specs: what has none of their digests is not read.

    Returns:
        Content ids, and the digest of its files before they were read.
    """
    if relation(identify(place), identify(row.uri)) is not Relation.APART:
        return frozenset(), ""
    with catalog.reading() as conn:
        if writer_of_place(conn, row.uri) is not None:
            return frozenset(), ""
    files = contents(row.uri, follow=True)
    require_apart(place, things, row.uri, files)
    with at_rest(row.uri):  # not while it is read: that may take hours
        pass
    forget_small_reads()
    return contents_at(row.uri, files, specs, settings).ids, digest_of_files(files)


@dataclass(frozen=True, slots=True)
class _Unread:
    """What may be at a place that cannot be read completely, by the catalog.

    Attributes:
        ids: Content ids that were recorded of it.
        sources: Public ids of the checkpoints there, and of all that they were made from.
    """

    ids: Ids = frozenset()
    sources: frozenset[str | None] = frozenset()


def _unread_at(catalog: Catalog | None, place: str) -> _Unread:
    """Return what may be at a place, in it, or in the folder that it is a file of."""
    if catalog is None:
        return _Unread()
    with catalog.reading() as conn:
        uris = dict.fromkeys((place, *_around(place), *inside_of_place(conn, place)))
    ids_of_rows, sources = list[Ids](), set[str | None]()
    for recorded in filter(None, catalog.at_each(uris)):
        public = recorded[0].id
        if recorded[0].state in NOWHERE:
            continue
        with catalog.reading() as conn:
            ids_of_rows.append(recorded_ids(conn, recorded[0]))
        ancestors = catalog.lineage(public, down=False).ancestors
        sources |= {public, *(step.source.id for step in ancestors)}
    return _Unread(in_one(ids_of_rows), frozenset(sources))


def _matched(
    catalog: Catalog | None, obligation: Obligation, read_ids: Ids, place: str, unread: _Unread | None
) -> Ids:
    """Return the contents of an obligation that a place holds, or may hold where it cannot be read.

    unread: what else may be there; None if everything was read.
    """
    protected_ids = ids_of(obligation.contents)
    if unread is None:
        return common(protected_ids, read_ids)
    # What cannot be read may be the very copy that the obligation counts on, or another of the same source.
    is_on_it = relation(identify(obligation.row.place), identify(place)) is not Relation.APART
    if (
        is_on_it
        or obligation.row.checkpoint in unread.sources
        or not _is_where_it_was(catalog, obligation.row.place)
    ):
        return protected_ids
    return common(protected_ids, in_one([read_ids, unread.ids]))


def _is_where_it_was(catalog: Catalog | None, place: str) -> bool:
    """Return whether a checkpoint opens at a place that is the recorded one there, if one is recorded."""
    opened = attempt(inspect, place)
    if isinstance(opened, CkptError):
        return False
    recorded_row = catalog.at(place) if catalog is not None else None
    return recorded_row is None or recorded_row[0].manifest_digest == hex_digest(opened.digest)


def _around(place: str) -> Iterator[str]:
    """Yield the folders around a place."""
    parent, name = split_url(place)
    while name and parent not in ("", "/", place):
        yield parent
        place = parent
        parent, name = split_url(parent)


def _read_around(folder: str) -> tuple[Obligation, ...]:
    """Read the record beside a folder around the place, if the user may look there at all."""
    try:
        return read_obligations(folder)
    except SourceUnreadable as error:
        if kind_of(error) is not Kind.DENIED:
            raise
        _log.info("not allowed to look for obligations beside %s", folder)
        return ()


def _only_copy(place: str, missing: Ids, unmet_obligations: list[Obligation]) -> DestinationExists:
    rows = (row for obligation in unmet_obligations for row in obligation.contents if row.id in missing)
    names = [row.name for row in {row.id: row for row in rows}.values()]
    sources = list(dict.fromkeys(obligation.row.source for obligation in unmet_obligations))
    others_text = f" and {len(sources) - 1} more" if sources[1:] else ""
    return DestinationExists(
        f"cannot replace {place}: it holds the only proven copy of {len(missing)} contents of "
        f"{sources[0]}{others_text}, deleted because this copy exists: {some(names)}",
        hint=_HINT.format(unmet_obligations[0].row.id),
        sources=sources[:100],
        contents=names[:100],
        obligations=[obligation.row.id for obligation in unmet_obligations[:100]],
    )
