"""Recorded deletions on object stores: how does one that was killed go on, and touch nothing else?

Nothing can be moved away there. Right before its row is marked as deleted, a record is put beside the source:

    .NAME.retiring-1a2b3c4d.ckptcore/record.json

It names every object that was approved, with its version. Whoever is killed leaves it; the next run removes
what is left of these objects as they were, and the record last.
"""

from __future__ import annotations

from contextlib import closing

from ckptcore.errors import SourceUnreadable, UsageError
from ckptcore.operations.set_aside import MOST_BYTES, RECORD, RemovalRecord, new_home, source_of
from ckptcore.store import join_url, open_store, split_url
from ckptcore.store.contents import Thing, contents, same
from ckptcore.store.listing import names_at


def put_record(record: RemovalRecord) -> str:
    """Records a deletion beside its source; gives the URL of the folder that the record lies in."""
    parent, name = split_url(record.uri)
    home = join_url(parent, new_home(name))
    with closing(open_store(home)) as store:
        store.put(RECORD, record.dump())
    return home


def drop_record(home: str) -> None:
    """Removes the record of a deletion that has ended."""
    with closing(open_store(home)) as store:
        store.remove(RECORD)


def records_at(parent: str) -> tuple[str, ...]:
    """The folders of records in a folder of an object store: of deletions that were killed, or go on."""
    return tuple(join_url(parent, name) for name in names_at(parent) if source_of(name) is not None)


def read_record(home: str) -> RemovalRecord | None:
    """What a folder of `records_at` records; None where it was removed meanwhile.

    Raises `UsageError` for what is no record, or one of another place.
    """
    parent, folder = split_url(home)
    with closing(open_store(home)) as store:
        size = store.size(RECORD)
        if size is None:
            return None
        if size > MOST_BYTES:
            raise UsageError(f"cannot go on with it: its record has {size} bytes")
        try:
            record = RemovalRecord.load(store.read(RECORD, 0, size))
        except ValueError as error:
            raise UsageError(f"cannot go on with it: {error}") from error
    place = join_url(parent, source_of(folder) or "")
    if record.uri.rstrip("/") != place:
        raise UsageError(f"cannot go on with it: its record is of {record.uri}, and lies beside {place}")
    return record


def left_of(record: RemovalRecord) -> dict[str, Thing]:
    """Everything that lies at a recorded place now; nothing where it is gone."""
    try:
        return contents(record.uri)
    except SourceUnreadable:  # there is no object of that name, nor below it
        return {}


def as_recorded(record: RemovalRecord, there: dict[str, Thing]) -> tuple[str, ...]:
    """The recorded names that still are what was approved, in the order of removing them."""
    return tuple(n for n, thing in record.things.items() if n in there and same(thing, there[n]))


def remove_rest(record: RemovalRecord) -> tuple[str, ...]:
    """Removes what is left of the recorded objects, as recorded; gives the names that are not, and stay.

    Every object is looked at right before it is removed.
    """
    parent, itself = split_url(record.uri)
    with closing(open_store(parent if "" in record.things else record.uri)) as store:
        stamps = {name: store.stamp(name or itself) for name in as_recorded(record, left_of(record))}
        there = left_of(record)  # what is as recorded now was it when its stamp was taken
        gone = set()
        for name in as_recorded(record, there):
            seen = stamps.get(name)
            if seen is not None and store.stamp(name or itself) == seen:
                store.remove(name or itself)
                gone.add(name)
    return tuple(name for name in there if name not in gone)
