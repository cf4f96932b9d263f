"""Stage an output on an S3 store, upload its tensors under a lease, and publish it by completing the uploads.

Files with tensors are uploaded to the keys where they are published: until they are complete, nobody sees
them. The staging prefix has the plan, the receipts, the small files, the journal of the uploads, and the
lease. Requests that do not need each other are sent at once; those that publish are conditional.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptcore.conversion.staging.remote_publication import Destination, ObjectStaging, publish_remote
from ckptcore.conversion.staging.staging import (
    DRAFT,
    ITSELF,
    LEASE,
    PARTS,
    PUBLISHING,
    RECORDS,
    UPLOADS,
    Publication,
    Staging,
    UploadCompletion,
)
from ckptcore.errors import CkptError, DestinationUnwritable, Finding, SourceUnreadable, finding
from ckptcore.execution.join_parts import join_uploads
from ckptcore.execution.parts import FilePart, cut_upload
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.plan import Plan, PlannedFile
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget
from ckptcore.reading.file_digests import has_digest
from ckptcore.store import Readable, fetch, objects
from ckptcore.store.file_status import NO_VERSION, FileStatus, same_object
from ckptcore.store.listing import Inventory
from ckptcore.store.objects import ObjectSeen, of_object
from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.journal import UploadJournal
from ckptcore.store.objects.lease import Arbiter, Lease
from ckptcore.store.objects.part_plan import UploadBudget, plan_parts
from ckptcore.store.objects.pinned import MOST_PAGES, PinnedFiles
from ckptcore.store.objects.retry import Kind, kind_of
from ckptcore.store.objects.shared_clients import client_of, key_of
from ckptcore.store.objects.uploaded import Uploaded, require_checksum
from ckptcore.store.objects.uploads import AtKey, Uploads
from ckptcore.store.s3 import KeptRecords, S3Store
from ckptcore.utils.text import some
from ckptcore.utils.workers import finishing

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
            # A store without conditional deletes: it was looked at a
            # moment ago, which is the best that it allows.
            if kind_of(error) is not Kind.UNSUPPORTED:
                raise
            self.client.delete(key)

    def write(self, name: str, old: FileStatus | None) -> None:
        """Put a staged file under its key, if the object there is still ``old``; None: no object is."""
        nbytes, _ = self.publication.puts[name]
        # Larger objects are copied by the store itself: they need not pass through this machine.
        if nbytes > objects.MAX_REQUEST_BYTES:
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
        # Read and hashed once more: a staged file may have been replaced since its receipt.
        is_proven = digest is None or has_digest(self.staging.files, staged, nbytes, (digest,))
        if staged_object is None or not is_proven:
            raise self.staged_changed(name)
        try:
            etag = _copied(client, source, target, staged_object.etag or None, old)
        except CkptError as error:
            # The source of the copy is unchanged, so the refusal is about the target.
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
        # The store's own checksum of the object is compared with that of the bytes that were sent.
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

        # Only the first: of thousands of keys a look would be out of date when its upload is completed.
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
        # Only a name that had an object before is looked at: for a new one the condition says all.
        now = self.look(name) if old is not None else None
        # The object may be this very upload, completed by an earlier run whose reply was lost.
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


def _copied(client: S3Client, source: str, target: str, match: str | None, old: FileStatus | None) -> str:
    """Copy an object with the conditions that the store knows; return the copy's ETag."""
    replaces = None if old is None else _etag(old)
    # The full condition first; stores know none, one, or both of its halves.
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


def _is_now(client: S3Client, key: str, etag: str) -> bool:
    head = client.head(key)
    return head is not None and head.etag == etag


def _remove_copy(client: S3Client, key: str, etag: str) -> None:
    """Remove what was just copied to a key, and no object that another program has put there since."""
    # With the ETag of the copy, so that a newer object at the same key stays.
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


_LEAST = 256 << 10  # bytes of tiles of one worker (`ckptcore.planning.tiles`)


@dataclass(frozen=True, slots=True)
class DestinationKeys:
    """The keys of a destination and of its staging prefix on a store with upload handles.

    Attributes:
        client: The store.
        destination: URL of the destination, for messages.
        target: Key of the destination.
        staging: Key of the staging prefix.
    """

    client: S3Client
    destination: str
    target: str
    staging: str

    @property
    def journal(self) -> UploadJournal:
        """Return the journal of the uploads."""
        return UploadJournal(self.client, f"{self.staging}/{UPLOADS}/")

    def key_of(self, name: str) -> str:
        """Return the key of a name below the destination; "" is the destination itself."""
        return f"{self.target}/{name}" if name else self.target

    def staged_names(self) -> list[str]:
        """Return the names of all objects below the staging prefix; raises `DestinationUnwritable`."""
        prefix = f"{self.staging}/"
        try:
            return [staged_object.key[len(prefix) :] for staged_object in self.client.list(prefix)]
        except SourceUnreadable as error:
            raise DestinationUnwritable(error.message, hint=error.hint, **error.values) from error

    def remove_staged(self, names: Iterable[str]) -> None:
        """Remove objects below the staging prefix."""
        self.client.each(self.client.delete, [f"{self.staging}/{name}" for name in names])

    def lease(self, arbiter: Arbiter | None = None) -> Lease:
        """Return the lease of the destination; nobody has taken it yet."""
        return Lease(self.client, f"{self.staging}/{LEASE}", self.destination, arbiter)

    def uploads(self, plan: Plan, settings: Settings | None = None, *, none_begun: bool = False) -> Uploads:
        """Return the uploads of a plan; ``settings`` bound the memory of those who write.

        none_begun: see `Uploads`.
        """
        single = plan.target.single is not None
        # Without settings nothing is written, only completed or aborted.
        budget = UploadBudget(0, 0) if settings is None else upload_budget(plan.files, settings)
        return Uploads(
            self.client,
            self.journal,
            # One file is uploaded to the destination's own key.
            lambda path: self.key_of("" if single else path),
            plan.digest,
            buffers=budget.in_flight + 1,
            in_flight=budget.in_flight,
            none_begun=none_begun,
        )


def object_places(destination: str, staging: str) -> DestinationKeys:
    """Return the keys of a destination and of its staging prefix, by their URLs."""
    return DestinationKeys(client_of(destination), destination, key_of(destination), key_of(staging))


def is_uploaded(file: PlannedFile) -> bool:
    """Report whether a file is uploaded by handles. Files without tensors are small, and are staged."""
    return file.tensors > 0


def upload_budget(files: tuple[PlannedFile, ...], settings: Settings) -> UploadBudget:
    """Return what uploads take of the memory budget; raise `BudgetTooSmall` if a part does not fit."""
    sizes = (file.nbytes for file in files if is_uploaded(file))
    return UploadBudget.of(sizes, settings.memory, _LEAST * settings.threads)


def beside_uploads(files: tuple[PlannedFile, ...], settings: Settings) -> Settings:
    """Return the settings with the memory that uploads leave."""
    return settings.within(max(settings.memory - upload_budget(files, settings).nbytes, 1 << 20))


_OURS = re.compile(
    rf"(?:{'|'.join(map(re.escape, (*RECORDS, LEASE)))}|(?:{'|'.join((*PARTS, UPLOADS))})/.+)", re.DOTALL
)
_AHEAD = 4  # uploads that are begun before their files are written
_log = logging.getLogger("ckptcore")


def is_of_staging(name: str) -> bool:
    """Report whether a conversion writes an object of this name below its staging prefix."""
    return _OURS.fullmatch(name) is not None


class S3Staging(ObjectStaging):
    """The staging prefix of a destination on an S3 store.

    Args:
        destination: URL of the output.
        arbiter: Decides who may write it, on stores that ignore create-only requests.
    """

    root: S3Store
    plan: S3Store
    receipts: S3Store
    files: S3Store

    def __init__(self, destination: str, arbiter: Arbiter | None = None) -> None:
        super().__init__(destination)
        self.places = object_places(self.destination, self.url)
        self._arbiter = arbiter
        self._lease: Lease | None = None
        self._kept: KeptRecords | None = None  # under the lease
        self._leftovers: list[str] | None = None
        self._uploads: Uploads | None = None  # those of the plan that this process is about to carry out
        self._none_begun = False  # whether the journal of uploads was empty when the lease was taken

    def _store(self, *inside: str) -> S3Store:
        return S3Store("/".join([self.url, *inside]))

    def _at(self, publication: Publication) -> S3Destination:
        return S3Destination(self, publication, self.places)

    def together(self, calls: Sequence[Callable[[], object]]) -> Sequence[object]:
        """Make calls at once that do not need each other; return what they return."""
        return self.places.client.each(lambda call: call(), calls)

    @contextlib.contextmanager
    def lock(self, *, shared: bool = False, make: bool = False) -> Iterator[None]:
        """Hold the lease of the destination; if shared, check that no other process does.

        With ``make``, the lease is proven while the caller looks at the destination (`look_ahead`).
        """
        lease = self.places.lease(self._arbiter)
        if shared:
            # A worker needs no lease of its own: it checks that nobody else has one.
            lease.require_ended()
            yield
            return
        # With `make` the proof runs beside the first looks (`look_ahead`), which are repeated if it failed.
        lease.take(prove=not make)
        self._lease = lease
        try:
            with self._keeping():
                yield
        except BaseException:
            # Uploads that were begun ahead may still be in flight: they must end before the lease does.
            if self._uploads is not None:
                self._uploads.stop()
            lease.hurry()
            raise
        finally:
            with finishing():
                if self._uploads is not None:
                    # No request of this run may arrive after another run has the lease.
                    self._uploads.wait()
                self._lease = None
                lease.release()

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """Keep what this process writes and reads of the records, while nobody else writes them."""
        stores = (self.root, self.plan, self.receipts)
        self._kept = KeptRecords()
        # Records are kept in memory only while no other process can write them.
        for store in stores:
            store.records = self._kept
        try:
            yield
        finally:
            for store in stores:
                store.records = None

    def require_lease(self) -> None:
        """Raise `Busy` if another process took over or ended the lease, `Interrupted` without a row."""
        super().require_lease()
        if self._lease is not None:
            self._lease.require()

    def look_ahead(self, look: Callable[[], object]) -> Collection[str] | None:
        """Ask at once for what a conversion looks at before it plans; prove the lease meanwhile.

        The records are kept (`KeptRecords`). Returns None where these credentials
        may not list the staged objects.
        """
        lease, listed = self._lease, list[list[str]]()
        assert lease is not None  # a conversion looks under its lock

        def list_names() -> None:
            with contextlib.suppress(DestinationUnwritable):  # an error for those who need them
                listed.append(self.places.staged_names())

        looks: list[Callable[[], object]] = [
            partial(fetch, self.root, PUBLISHING),
            partial(fetch, self.plan, "head.json"),
            look,
            list_names,
        ]
        if self.together([lease.prove, *looks])[0]:  # what they saw may be another run's work
            if self._kept is not None:
                self._kept.clear()
            listed.clear()
            self.together(looks)
        if not listed:
            return None
        # An empty journal saves asking for the uploads of every file.
        self._none_begun = not any(name.startswith(f"{UPLOADS}/") for name in listed[0])
        return listed[0]

    def uploads_of(self, plan: Plan, settings: Settings | None = None) -> Uploads:
        """Return the uploads of a plan; ``settings`` bound the memory of those who write."""
        if self._uploads is not None:
            return self._uploads
        return self.places.uploads(plan, settings, none_begun=self._none_begun)

    def begin_uploads(self, plan: Plan, settings: Settings) -> Uploads:
        """Begin the uploads of the first files of a plan that this process carries out, while it is saved.

        Their entries are in the journal first: a run that is killed before it has a plan leaves nothing else.
        """
        self._uploads = self.places.uploads(plan, settings, none_begun=self._none_begun)
        first = [file for file in plan.files if is_uploaded(file)][:_AHEAD]
        self._uploads.begin_ahead((file.index, file.path, file.nbytes) for file in first)
        return self._uploads

    def beside_uploads(self, files: tuple[PlannedFile, ...], settings: Settings) -> Settings:
        """Return the settings with the memory that uploads of files leave; raise `BudgetTooSmall`."""
        return beside_uploads(files, settings)

    def completion(self, plan: Plan, receipts: Sequence[Receipt]) -> UploadCompletion | None:
        """Return what completes the uploads of an output; None if it is staged as a whole."""
        single = plan.target.single is not None
        handles = {ITSELF if single else r.path: r.uploaded for r in receipts if r.uploaded is not None}
        if not handles:
            return None
        uploads = self.places.uploads(plan)

        def publish(publication: Publication, *output: Any) -> tuple[Finding, ...]:
            ends = self.places, handles, uploads, self.list_leftovers
            return complete_uploads(UploadedDestination(self, publication, *ends), *output)

        return UploadCompletion(uploads, handles, publish)

    def cut(self, plan: Plan, file: FilePlan, nbytes: int, settings: Settings) -> tuple[FilePart, ...]:
        """Cut an output file into parts of its upload; empty if one worker must write it."""
        if not file.tensors:
            return ()
        budget = Budget.of(beside_uploads(plan.files, settings))
        parts = cut_upload(file, nbytes, plan_parts(file.nbytes, file.path).part, budget)
        # One part is the complete file: then its writer begins the upload.
        if len(parts) > 1:  # before any worker starts, so that all of them find the same upload
            self.places.uploads(plan).entry(file.index, file.path, file.nbytes)
        return parts

    def join(self, plan: Plan, file: FilePlan) -> Receipt:
        """Join the parts of an upload."""
        return join_uploads(file, plan.digest, self.places.uploads(plan), self.receipts)

    def put_record(self, data: bytes, *, over: bool) -> None:
        """Write the record of a publication. over: there is one, which stays if this arrives altered."""
        if over:
            self.root.put_over(PUBLISHING, data, DRAFT)
        else:
            self.root.put(PUBLISHING, data)

    def staged(self) -> dict[str, int]:
        """Return the files that are staged as a whole: path -> size. With uploads there may be none."""
        prefix = f"{self.places.staging}/files/"
        return {
            staged_object.key[len(prefix) :]: staged_object.nbytes
            for staged_object in self.places.client.list(prefix)
        }

    def clear(self, *, publication: bool = True, names: Collection[str] | None = None) -> None:
        """Remove everything but the lease from the prefix, and abort its uploads, as `ObjectStaging` does."""
        self._require_none_half_thinned()
        listed = self.places.staged_names() if names is None else names
        # Uploads are no objects: removing the journal's entries alone would leave them open, and paid for.
        if any(name.startswith(f"{UPLOADS}/") for name in listed):
            self.places.journal.abort_all()
        self.places.remove_staged(name for name in listed if name.partition("/")[0] in PARTS)
        # Names below the emptied folders are known to be missing, so they are not asked for.
        if self._kept is not None:
            self._kept.emptied(*(f"{self.places.staging}/{part}/" for part in PARTS))
        if publication and PUBLISHING in listed:
            self.root.remove(PUBLISHING)

    def list_leftovers(self) -> None:
        """List what `remove` will remove, if nothing more is staged under this lease."""
        with contextlib.suppress(DestinationUnwritable):  # `remove` asks again, and says so
            names = self.places.staged_names()
            # The journal removes its own at the same time; what it leaves is in the list at the end. The last
            # record is written at the same time, too: its draft may not be in this list yet.
            self._leftovers = [name for name in names if not name.startswith(f"{UPLOADS}/") and name != DRAFT]
            self._leftovers.append(DRAFT)

    def _remove(self) -> None:
        """Remove what a conversion writes below the staging prefix; what others put there is kept."""
        if self._lease is not None:
            self._lease.require()
        self._require_none_half_thinned()
        # While the first is there, the next run resumes; while the second is, no other run works here.
        last = (PUBLISHING, LEASE)

        def remove_record() -> list[str]:
            self.root.remove(PUBLISHING)
            return []

        places = self.places
        # The list of before is used once: a second call must look again.
        left = places.staged_names() if self._leftovers is None else self._leftovers
        self._leftovers = None
        for first in (True, False):
            foreign_names = [name for name in left if not is_of_staging(name)]
            if any(name.startswith(f"{UPLOADS}/") for name in left):
                places.journal.abort_all()
            # The journal removes its own entries: one that its list lacked has an upload that is still open.
            places.remove_staged(
                name
                for name in left
                if name not in (*last, *foreign_names) and not name.startswith(f"{UPLOADS}/")
            )
            if first:  # a list may lack names: there is another one, while the record is removed
                _, left = places.client.each(lambda call: call(), (remove_record, places.staged_names))
        if self._lease is not None:
            self._lease.release()
        if foreign_names:
            _log.warning("%s is kept: no conversion writes %s", self.url, some(foreign_names))
