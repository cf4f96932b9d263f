"""Stage an output on an S3 store: its tensors are uploaded to the destination, under a lease.

The staging prefix has the plan, the receipts, the small files, the journal of the uploads, and the lease
(`ckptcore.conversion.staged_uploads`). Requests that do not need each other are sent at once.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from ckptcore.conversion.object_staging import ObjectStaging
from ckptcore.conversion.publication_record import ITSELF, Publication
from ckptcore.conversion.s3_publication import S3Destination, UploadedDestination, complete_uploads
from ckptcore.conversion.staged_uploads import beside_uploads, cut_file, is_uploaded, object_places
from ckptcore.conversion.staging import DRAFT, LEASE, PARTS, PUBLISHING, RECORDS, UPLOADS, UploadCompletion
from ckptcore.errors import DestinationUnwritable, Finding
from ckptcore.execution.join_uploads import join_uploads
from ckptcore.execution.parts import FilePart
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.plan import Plan
from ckptcore.planning.request import Settings
from ckptcore.store import fetch
from ckptcore.store.objects.kept_records import KeptRecords
from ckptcore.store.objects.lease import Arbiter, Lease
from ckptcore.store.objects.uploads import Uploads
from ckptcore.store.s3 import S3Store
from ckptcore.utils.text import some
from ckptcore.utils.workers import finishing

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
            lease.require_ended()
            yield
            return
        lease.take(prove=not make)
        self._lease = lease
        try:
            with self._keeping():
                yield
        except BaseException:
            if self._uploads is not None:
                self._uploads.stop()
            lease.hurry()
            raise
        finally:
            with finishing():
                if self._uploads is not None:
                    self._uploads.wait()
                self._lease = None
                lease.release()

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """Keep what this process writes and reads of the records, while nobody else writes them."""
        stores = (self.root, self.plan, self.receipts)
        self._kept = KeptRecords()
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

        The records are kept (`ckptcore.store.objects.kept_records`). Returns None where these credentials
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
        self._none_begun = not any(name.startswith(f"{UPLOADS}/") for name in listed[0])
        return listed[0]

    def uploads_of(self, plan: Plan, settings: Settings | None = None) -> Uploads:
        """Return the uploads of a plan; ``settings`` bound the memory of those who write."""
        if self._uploads is not None:
            return self._uploads
        return self.places.uploads(plan, settings, none_begun=self._none_begun)

    def begin_uploads(self, plan: Plan, settings: Settings) -> None:
        """Begin the uploads of the first files of a plan that this process carries out, while it is saved.

        Their entries are in the journal first: a run that is killed before it has a plan leaves nothing else.
        """
        self._uploads = self.places.uploads(plan, settings, none_begun=self._none_begun)
        first = [file for file in plan.files if is_uploaded(file)][:_AHEAD]
        self._uploads.begin_ahead((file.index, file.path, file.nbytes) for file in first)

    def beside_uploads(self, plan: Plan, settings: Settings) -> Settings:
        """Return the settings with the memory that uploads leave; raise `BudgetTooSmall`."""
        return beside_uploads(plan.files, settings)

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
        return cut_file(self.places, plan, file, nbytes, settings)

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
        """Remove everything but the lease from the prefix, and abort its uploads."""
        listed = self.places.staged_names() if names is None else names
        if any(name.startswith(f"{UPLOADS}/") for name in listed):
            self.places.journal.abort_all()
        self.places.remove_staged(name for name in listed if name.partition("/")[0] in PARTS)
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
        # While the first is there, the next run resumes; while the second is, no other run works here.
        last = (PUBLISHING, LEASE)

        def remove_record() -> list[str]:
            self.root.remove(PUBLISHING)
            return []

        places = self.places
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
