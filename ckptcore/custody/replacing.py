"""Let a conversion replace a place: ask the gate, move obligations, and set aside what is under one.

Who writes to a place, and who counts on it, exclude each other. A conversion has a row in the catalog from
before it asks first until it has published, and it holds the lock of its staging folder from its last look
at the records beside its destination until it has published. Whoever begins to count on a place writes the
record beside it first, and then finds neither a row nor a lock (`counting_on`). A row alone would not do:
that of a process that was stopped for minutes counts as ended, and it may go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ckptcore.catalog import obligations
from ckptcore.catalog import set_aside as entries
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.heartbeats import RUNNING
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.retirements import GivenUp
from ckptcore.custody.gate import existing_catalog, judge, obligations_at, obligations_beside
from ckptcore.custody.judged import AtRest, Judged, Replacer, digest_of_files
from ckptcore.custody.obligation_records import Obligation, add_obligations, drop_obligations
from ckptcore.custody.place_ties import writer_of_place
from ckptcore.custody.set_aside import REPLACED, LocalSetAside, SetAsideRecord, begin, folder_of
from ckptcore.errors import Busy, SourceChanged, UsageError
from ckptcore.fingerprints.holdings import Holding
from ckptcore.planning.request import Settings
from ckptcore.store import local_path
from ckptcore.store.file_status import NameKind
from ckptcore.store.listing import contents, nothing_at
from ckptcore.store.place import Relation, identify, relation

GRACE = timedelta(days=7)  # until what was set aside may be purged


def may_replace(place: str, writer: Replacer, settings: Settings, at_rest: AtRest) -> Judged:
    """Decide when a conversion is planned whether it may replace what is at its destination; see `judge`."""
    with existing_catalog(writer.catalog) as catalog:
        return judge(catalog, place, settings, at_rest)


def purge_frees(catalog: str | bool | None, place: str) -> int:
    """Return the bytes of set-aside files on the disk of a local place; 0 without a catalog, or elsewhere.

    Args:
        catalog: Its URL; None for the default one, False for none.
        place: A path; nothing has to be there.
    """
    path = local_path(place)
    if path is None:
        return 0
    with existing_catalog(catalog) as opened:
        if opened is None:
            return 0
        with opened.reading() as conn:
            rows = entries.every(conn)
    device = _device_of(os.fspath(path))
    return sum(row.nbytes for row in rows if local_path(row.uri) and _device_of(row.record) == device)


def admit(place: str, writer: Replacer, settings: Settings, judged: Judged | None, at_rest: AtRest) -> str:
    """Let a conversion replace a place now.

    Args:
        place: Its destination; something is there.
        writer: The conversion.
        settings: Memory and threads for reading.
        judged: What was decided when it was planned; None to decide now.
        at_rest: Keeps writers away from a copy.

    Returns:
        The name of the folder beside the destination into which the old output is moved; "" if nothing of it
        is under an obligation, or on an object store.

    Raises:
        DestinationExists: It holds contents under an obligation that are proven nowhere else.
        Interrupted: The conversion lost its row.
        Busy: Another conversion has begun to write to a copy.
        SourceChanged: A copy was written while this ran.
    """
    require_row(writer)
    with existing_catalog(writer.catalog) as catalog:
        in_place = local_path(place) is None  # nothing of it can be set aside: copies are read once more
        if in_place and nothing_at(place):  # an interrupted run was admitted, and removed it
            return ""
        asked = catalog is not None and writer.conversion is not None
        # Another catalog may count on what is here since then: its records say so.
        if judged is not None and asked and not (judged.moves and in_place) and not obligations_beside(place):
            with suppress(Busy, SourceChanged):  # of a copy, since it was planned: another one may do
                return _admitted(catalog, place, judged, at_rest)
        return _admitted(catalog, place, judge(catalog, place, settings, at_rest), at_rest)


def _admitted(catalog: Catalog | None, place: str, judged: Judged, at_rest: AtRest) -> str:
    """Move obligations as judged; return the name of the folder for the old output, or ""."""
    if not judged.moves:
        return ""
    assert catalog is not None  # without one, no other place is known
    with moving_obligations(catalog, place, judged, at_rest):
        pass
    return "" if local_path(place) is None else set_aside(catalog, place)


def require_row(writer: Replacer) -> None:
    """Raise `Interrupted` if a conversion lost its row: others may count on its destination."""

    def renew(conversions: Collection[str]) -> Collection[str]:
        with existing_catalog(writer.catalog) as catalog:
            return () if catalog is None else catalog.renew(conversions)

    if writer.conversion is not None:
        RUNNING.require(renew, writer.conversion)


@contextmanager
def counting_on(
    catalog: Catalog,
    obligations_on: Mapping[str, Sequence[Obligation]],
    at_rest: AtRest,
    require_same: Callable[[str], object],
) -> Iterator[Any]:
    """Begin to count on copies, in the transaction of the block.

    A run that writes to a copy has a row in the catalog, or it holds the lock of the copy's staging folder,
    or it reads the record beside the copy, which is there before the last look: it cannot be missed.

    Args:
        catalog: The catalog.
        obligations_on: Place of a copy -> the obligations that count on it from now on, if any.
        at_rest: Keeps writers away from a copy.
        require_same: Raises an error if a copy is not what was read.

    Yields:
        The transaction.

    Raises:
        Busy: A conversion writes to a copy.
    """
    # A run that is killed behind this, or refused, leaves a record too many, and never none.
    with catalog.writing():  # records beside copies are changed by one process at a time
        for place, of_place in obligations_on.items():
            if of_place:
                add_obligations(place, of_place)
    with ExitStack() as locks:
        for place in obligations_on:
            locks.enter_context(at_rest(place))
            require_same(place)
        with catalog.writing() as conn:
            for place in obligations_on:
                if writer := writer_of_place(conn, place):
                    raise Busy(f"conversion {writer} writes to {place}")
            yield conn


@contextmanager
def moving_obligations(
    catalog: Catalog, place: str, judged: Judged, at_rest: AtRest, sought: Sequence[Obligation] = ()
) -> Iterator[Any]:
    """Let obligations count on other places, in the transaction of the block; each first gets its own record.

    An obligation on another place than the one that goes stays there, with its record: what goes may be a
    part of its contents, and the rest may be nowhere else. Nothing is left beside what goes.

    Args:
        catalog: The catalog.
        place: What is about to go.
        judged: What the gate has decided about it.
        at_rest: Keeps writers away from a copy.
        sought: What the gate was asked to find elsewhere, as obligations on the place that was to hold it.
            What another place holds instead is an obligation on that from now on.

    Yields:
        The transaction.

    Raises:
        Busy: A conversion writes to one of the other places.
        SourceChanged: One was written since it was read.
    """
    current = obligations_at(catalog, place, ()) if judged.moves else ()
    current_obligations = {obligation.row.id: obligation for obligation in current}
    # The others ended meanwhile.
    left = {key: places for key, places in judged.moves.items() if key in current_obligations}
    new = dict[str, Obligation]()
    for obligation in sought:
        places = tuple(
            w for w in judged.moves.get(obligation.row.id, ()) if _is_apart(w, obligation.row.place)
        )
        if places:
            new[obligation.row.id] = replace(obligation, row=replace(obligation.row, place=places[0]))
            left[obligation.row.id] = places
    # Also places that hold what they were to hold: they must be as they were read.
    counted = {
        where: [(current_obligations | new)[key] for key, places in left.items() if where in places]
        for where in judged.looks
    }

    def require_same(where: str) -> None:
        if digest_of_files(contents(where, follow=True)) != judged.looks.get(where):
            raise SourceChanged(
                f"{where} was written, moved or touched while this ran",
                hint="run again when no process writes there",
            )

    with counting_on(catalog, counted, at_rest, require_same) as conn:
        for obligation in new.values():
            obligations.put(conn, obligation.row, obligation.packed)
        for key, places in left.items():
            if key in new:
                continue
            before = current_obligations[key].row.place
            if _is_there(before) and _is_apart(before, place):
                continue
            obligations.move(conn, key, places[0])
            if before not in places:
                drop_obligations(before, [key])
        if left:  # also those that another act had put there, whose obligations count on other places
            drop_obligations(place, left)
        yield conn


def _is_apart(place: str, other_place: str) -> bool:
    return relation(identify(place), identify(other_place)) is Relation.APART


def _is_there(place: str) -> bool:
    """Return whether something is at a place; True where that cannot be said."""
    path = local_path(place)
    return path is None or os.path.lexists(path)


def _device_of(path: str) -> int | None:
    """Return the device of a path, or of the nearest folder above it that exists."""
    while path and not os.path.lexists(path):
        above = os.path.dirname(os.path.abspath(path))
        if above == path:
            return None
        path = above
    return os.stat(path).st_dev


def set_aside(
    catalog: Catalog,
    place: str,
    grace: timedelta = GRACE,
    expects: Collection[Holding] = (),
    given_up: tuple[GivenUp, ...] = (),
) -> str:
    """Make the folder into which a publication moves what is at a place.

    Args:
        catalog: The catalog.
        place: A path.
        grace: How long it can be restored.
        expects: What must be proven elsewhere before it is purged.
        given_up: What goes with it, as a user said.

    Returns:
        The name of the folder.

    Raises:
        UsageError: The folder cannot be made.
    """
    uri = normal_uri(place)
    things, now = contents(place), catalog.now()
    nbytes = sum(thing.nbytes for thing in things.values() if thing.kind is NameKind.FILE)
    old_output = catalog.at(place)
    checkpoint = old_output[0].id if old_output is not None else ""
    due = now + grace
    record = SetAsideRecord(REPLACED, checkpoint, uri, "", "", expects, given_up, now, due, things)
    try:
        above = os.open(os.path.dirname(uri), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"cannot set {place} aside: {error.strerror}") from error
    with closing(begin(record, above)) as aside:
        assert isinstance(aside, LocalSetAside)
        with catalog.writing() as conn:
            row = entries.SetAsideEntry(
                aside.home,
                checkpoint or None,
                uri,
                nbytes,
                now,
                due,
                record.digest,
                folder=folder_of(aside.home),
            )
            entries.put(conn, row)
        return os.path.basename(aside.home)
