"""Record deletions on object stores, so that the next run resumes a killed one and removes nothing else.

Objects cannot be moved. Right before its row is marked as deleted, a record is written beside the source:

    .NAME.retiring-1a2b3c4d.ckptcore/record.json

It lists every approved object with its version. A killed run leaves it; the next run removes the remaining
objects that are unchanged, and the record last.
"""

from __future__ import annotations

from contextlib import closing

from ckptcore.errors import SourceUnreadable, UsageError
from ckptcore.operations.set_aside import MOST_BYTES, RECORD, RemovalRecord, new_home, source_of
from ckptcore.store import join_url, open_store, split_url
from ckptcore.store.contents import Thing, contents, same
from ckptcore.store.listing import names_at


def put_record(record: RemovalRecord) -> str:
    """Record a deletion beside its source; return the URL of the record's folder."""
    parent, name = split_url(record.uri)
    home = join_url(parent, new_home(name))
    with closing(open_store(home)) as store:
        store.put(RECORD, record.dump())
    return home


def drop_record(home: str) -> None:
    """Remove the record of a finished deletion."""
    with closing(open_store(home)) as store:
        store.remove(RECORD)


def records_at(parent: str) -> tuple[str, ...]:
    """Return the records' folders in a folder of an object store, of killed or running deletions."""
    return tuple(join_url(parent, name) for name in names_at(parent) if source_of(name) is not None)


def read_record(home: str) -> RemovalRecord | None:
    """Read the record in a folder of `records_at`; None if it was removed meanwhile.

    Raises `UsageError` if it is not a record, or one of another place.
    """
    parent, folder = split_url(home)
    with closing(open_store(home)) as store:
        size = store.size(RECORD)
        if size is None:
            return None
        if size > MOST_BYTES:
            raise UsageError(f"cannot resume it: its record has {size} bytes")
        try:
            record = RemovalRecord.load(store.read(RECORD, 0, size))
        except ValueError as error:
            raise UsageError(f"cannot resume it: {error}") from error
    place = join_url(parent, source_of(folder) or "")
    if record.uri.rstrip("/") != place:
        raise UsageError(f"cannot resume it: its record is of {record.uri}, but is beside {place}")
    return record


def left_of(record: RemovalRecord) -> dict[str, Thing]:
    """Return all objects at a recorded place now; nothing if it no longer exists."""
    try:
        return contents(record.uri)
    except SourceUnreadable:  # there is no object of that name, nor below it
        return {}


def as_recorded(record: RemovalRecord, there: dict[str, Thing]) -> tuple[str, ...]:
    """Return the recorded names whose objects are unchanged, in the order of their removal."""
    return tuple(n for n, thing in record.things.items() if n in there and same(thing, there[n]))


def remove_rest(record: RemovalRecord) -> tuple[str, ...]:
    """Remove the remaining recorded objects that are unchanged; return the names that stay.

    Every object is checked right before it is removed.
    """
    parent, itself = split_url(record.uri)
    with closing(open_store(parent if "" in record.things else record.uri)) as store:
        stamps = {name: store.stamp(name or itself) for name in as_recorded(record, left_of(record))}
        there = left_of(record)  # an object that is unchanged now was unchanged when its stamp was read
        gone = set()
        for name in as_recorded(record, there):
            seen = stamps.get(name)
            if seen is not None and store.stamp(name or itself) == seen:
                store.remove(name or itself)
                gone.add(name)
    return tuple(name for name in there if name not in gone)
