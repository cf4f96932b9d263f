"""Publish an output on an S3 store: by conditional requests, and by completing its uploads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ckptcore.conversion.publication_record import Publication
from ckptcore.conversion.remote_publication import Destination, publish_remote
from ckptcore.conversion.staged_uploads import DestinationKeys
from ckptcore.conversion.staging import Staging
from ckptcore.errors import CkptError, Finding, finding
from ckptcore.reading.file_digests import has_digest
from ckptcore.store import Readable, objects
from ckptcore.store.file_status import NO_VERSION, FileStatus, same_object
from ckptcore.store.listing import Inventory
from ckptcore.store.objects import ObjectClient, ObjectSeen, of_object
from ckptcore.store.objects.pinned import MOST_PAGES, PinnedFiles
from ckptcore.store.objects.retry import Kind, kind_of
from ckptcore.store.objects.uploaded import Uploaded, require_checksum
from ckptcore.store.objects.uploads import AtKey, Uploads

_LOOKS = 8  # at keys, before what is uploaded to them is completed


class S3Destination(Destination):
    """A destination whose store has conditions: each request states what was found there."""

    def __init__(
        self,
        staging: Staging,
        publication: Publication,
        places: DestinationKeys,
        handles: Mapping[str, Uploaded] | None = None,
    ) -> None:
        super().__init__(staging, publication, handles)
        self.places, self.client = places, places.client

    def look(self, name: str) -> FileStatus | None:
        """Return the current object of a name, or None."""
        head = self.client.head(self.places.key_of(name))
        return None if head is None else of_object(head)

    def each(self, call: Callable[[str], Any], names: Collection[str]) -> Iterable[Any]:
        """Return what a call returns for each name, with several requests at once."""
        return self.client.each(call, names)

    def remove(self, name: str, old: FileStatus) -> None:
        """Remove one object, if it is still the recorded one."""
        key = self.places.key_of(name)
        try:
            self.client.delete(key, match=_etag(old))
        except CkptError as error:
            if kind_of(error) is Kind.CHANGED:
                if self.look(name) is None:  # the reply was lost
                    return
                raise self.written_meanwhile(name) from error
            if kind_of(error) is not Kind.UNSUPPORTED:
                raise
            self.client.delete(key)

    def write(self, name: str, old: FileStatus | None) -> None:
        """Write a staged file to its place, if the store still has there what was found."""
        if self.publication.puts[name][0] > objects.IN_ONE:  # the store copies what is larger
            self._copy(name, old)
            return
        data, key = self.staged(name), self.places.key_of(name)
        try:
            self.client.put(key, data, create=old is None, match=None if old is None else _etag(old))
        except CkptError as error:
            if kind_of(error) is not Kind.UNSUPPORTED:
                raise
            self.client.put(key, data)  # this store has no such condition

    def _copy(self, name: str, old: FileStatus | None) -> None:
        """Copy a staged file to its place inside the store: the version that is proven, and no other one."""
        client, staged = self.client, name or self.staging.name
        source, target = f"{self.places.staging}/files/{staged}", self.places.key_of(name)
        nbytes, digest = self.publication.puts[name]
        staged_object = client.head(source)
        is_proven = digest is None or has_digest(self.staging.files, staged, nbytes, (digest,))
        if staged_object is None or not is_proven:
            raise self.staged_changed(name)
        try:
            etag = _copied(client, source, target, staged_object.etag or None, old)
        except CkptError as error:
            if kind_of(error) not in (Kind.CHANGED, Kind.MISSING) or _is_now(
                client, source, staged_object.etag
            ):
                raise  # also where the name has another object by now
            raise self.staged_changed(name) from error
        if not _is_now(client, source, staged_object.etag):  # some stores take the condition, and ignore it
            _remove_copy(client, target, etag)
            raise self.staged_changed(name)


def complete_uploads(
    destination: UploadedDestination,
    commit: Collection[str],
    staged: Mapping[str, int],
    read: Callable[[Readable], object],
    inventory: Inventory | None,
) -> tuple[Finding, ...]:
    """Publish an output by completing its uploads, and copying the files that are staged as a whole.

    Args:
        destination: With the uploads to complete.
        commit: The files that make the folder loadable.
        staged: Path -> bytes of the files that are staged as a whole.
        read: Reads and checks the output, before the last files are written.
        inventory: The content of the destination a moment ago; None to look.

    Returns:
        A finding if the store keeps no checksums of what it received.
    """
    publish_remote(destination, commit, lambda: read(destination.as_published(staged)), inventory)
    completed = destination.completed
    without = [
        name
        for name, completed_object in completed.items()
        if not require_checksum(completed_object, destination.handles[name])
    ]
    if not without:
        return ()
    message = f"the store keeps no checksum of {len(without)} uploaded files"
    hint = "compare them with the source: ckptcore diff SRC DST, or ckptcore scrub"
    return (finding("unproven", "bytes", message, file=without[0] or None, hint=hint),)


class UploadedDestination(S3Destination):
    """A destination with uploads to complete.

    Args:
        staging: The staging prefix.
        publication: New, or as an earlier run recorded it.
        places: The keys of both.
        handles: Name below the destination -> upload.
        uploads: The uploads of the plan.
        list_leftovers: Called once nothing more is staged.

    Attributes:
        completed: Name -> object of the uploads that are completed.
    """

    def __init__(
        self,
        staging: Staging,
        publication: Publication,
        places: DestinationKeys,
        handles: Mapping[str, Uploaded],
        uploads: Uploads,
        list_leftovers: Callable[[], object],
    ) -> None:
        super().__init__(staging, publication, places, handles)
        self._uploads, self._list_leftovers = uploads, list_leftovers
        self._at_keys: dict[str, AtKey] = {}  # what keys had while the first step was recorded
        self.completed: dict[str, ObjectSeen] = {}

    def looks(self, names: Sequence[str]) -> list[Callable[[], object]]:
        """Return calls that look at the first few keys: a look gets old."""

        def look(name: str) -> None:
            self._at_keys[name] = AtKey(self.client.head(self.places.key_of(name)))

        return [partial(look, name) for name in names[:_LOOKS]]

    def ends(self, publication: Publication) -> list[Callable[[], object]]:
        """Return calls that forget the uploads, and list what is left to remove."""
        ended = {r.index: r.uploaded for r in publication.receipts if r.uploaded is not None}
        return [partial(self._uploads.forget, ended), self._list_leftovers]

    def together(self, calls: Sequence[Callable[[], object]]) -> None:
        """Make calls at once."""
        self.staging.together(calls)

    def put(self, name: str, beside: Callable[[], object] | None = None) -> None:
        """Complete an upload, if its name is free, or has the recorded object or the upload's own."""
        if name not in self.handles:
            super().put(name)
            return
        self.staging.require_lease()
        uploaded, old = self.handles[name], self.publication.replaces.inventory.get(name)
        now = self.look(name) if old is not None else None
        if now is not None and not same_object(now, old) and self._uploads.find(uploaded) is None:
            raise self.written_meanwhile(name)
        self.completed[name] = self._uploads.complete(
            uploaded,
            create=now is None,
            match=None if now is None else _etag(now),
            look=self._at_keys.pop(name, None),
            page=len(self.handles) <= MOST_PAGES,
            beside=beside,
        )

    def as_published(self, staged: Mapping[str, int]) -> Readable:
        """Return the output: completed objects, by their ETags, and the files that are still staged."""
        completed = {
            name or self.staging.name: completed_object for name, completed_object in self.completed.items()
        }
        return PinnedFiles(self.client, completed, self.staging.files, staged)


def _copied(client: ObjectClient, source: str, target: str, match: str | None, old: FileStatus | None) -> str:
    """Copy an object with the conditions that the store knows; return the copy's ETag."""
    replaces = None if old is None else _etag(old)
    for copy in (
        partial(client.copy, match=match, create=old is None, replaces=replaces),
        partial(client.copy, match=match),
    ):
        try:
            return copy(source, target)
        except CkptError as error:
            if kind_of(error) not in (Kind.UNSUPPORTED, Kind.INVALID):
                raise
    return client.copy(source, target)


def _is_now(client: ObjectClient, key: str, etag: str) -> bool:
    head = client.head(key)
    return head is not None and head.etag == etag


def _remove_copy(client: ObjectClient, key: str, etag: str) -> None:
    """Remove what was just copied to a key, and no object that another program has put there since."""
    try:
        client.delete(key, match=etag or None)
    except CkptError as error:
        if kind_of(error) is Kind.UNSUPPORTED:
            client.delete(key)
        elif kind_of(error) is not Kind.CHANGED:
            raise


def _etag(entry: FileStatus) -> str | None:
    """Return the ETag of an object for a condition, or None where the store has none."""
    return None if entry.version == NO_VERSION else entry.version
