"""Stage an output on an object store, below a prefix beside its destination, and copy it into place.

Any file system that fsspec reaches will do. Such a store has no conditions: equal runs write equal bytes.
`ckptcore.conversion.staging.s3_staging` is for stores that have them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence

from ckptcore.conversion.staging.remote_publication import Destination, is_published, publish_remote
from ckptcore.conversion.staging.staged_plan import put_extra
from ckptcore.conversion.staging.staging import (
    DONE,
    PUTTING,
    RECORDS,
    REMOVING,
    THINNING,
    Publication,
    Staging,
    noted,
)
from ckptcore.errors import Busy, Conflict, DestinationUnwritable
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.compose import Composed
from ckptcore.store import Readable, Store, open_store

_log = logging.getLogger("ckptcore")


class ObjectStaging(Staging):
    """The staging prefix of a destination on an object store."""

    def _store(self, *inside: str) -> Store:
        return open_store("/".join([self.url, *inside]))

    def _at(self, publication: Publication) -> Destination:
        """Return the destination, for one publication."""
        return Destination(self, publication)

    @contextlib.contextmanager
    def lock(self, *, shared: bool = False, make: bool = False) -> Iterator[None]:
        """Do nothing: this store cannot decide who may write."""
        yield

    def require_lease(self) -> None:
        """Raise `Interrupted` if this run lost its row in the catalog: there is no lease."""
        self.require_row()

    def finish_interrupted_publish(self) -> None:
        """Do nothing: what was begun is in the record, and `publish` goes on with it."""

    def sweep_gone(self) -> None:
        """Do nothing: a prefix is removed where it is."""

    def sweep_parts(self, *, joints: bool = False) -> None:
        """Do nothing: an object appears when it is complete."""

    def require_room(self, nbytes: int) -> None:
        """Do nothing: an object store has room."""

    def published_plan(self, record: Publication | None) -> str | None:
        """Return the digest of the plan whose output is at the destination, or None."""
        return record.plan if record is not None and record.step == DONE else None

    def publishing_plan(self, record: Publication | None) -> str | None:
        """Return the digest of the plan that an earlier run began to copy to the destination, or None."""
        return record.plan if record is not None and record.step != DONE else None

    def publish(self, publication: Publication, commit: Collection[str], *, single: bool) -> None:
        """Copy the staged files to the destination, and remove those that they replace."""
        publish_remote(self._at(publication), commit)

    def is_unchanged(self, record: Publication | None, receipts: Sequence[Receipt], output: Readable) -> bool:
        """Report whether all published objects are what was written, as it is recorded."""
        return record is not None and is_published(self._at(record))

    def staged(self) -> dict[str, int]:
        """Return the files that are staged as a whole: path -> size. With uploads there may be none."""
        return self.files.list()

    def require_planned(self, planned: Collection[str]) -> dict[str, int]:
        """Raise `OutputMismatch` for staged files that are not in the plan; return path -> bytes of all."""
        # Listed once: both what is not in the plan and the sizes come from it.
        sizes = self.staged()
        if names := sorted(set(sizes) - set(planned)):
            raise self._unplanned(names)
        return sizes

    def check_staged_plan(self, composed: Composed, stamps: dict[str, str | None]) -> None:
        """Write the small files anew that an earlier run's staging prefix lacks."""
        put_extra(self, composed.plan.extra, composed.extra)

    def clear(self, *, publication: bool = True, names: Collection[str] | None = None) -> None:
        """Remove everything from the prefix, unless a step is half thinned."""
        self._require_none_half_thinned()
        super().clear(publication=publication, names=names)

    def remove(self) -> None:
        """Remove the staging prefix, if these credentials may: its output does not need it any more.

        It stays where another run has taken over the destination by now. Raises `Conflict` as `clear` does.
        """
        try:
            self._remove()
        except (Busy, DestinationUnwritable) as error:
            _log.warning("%s is kept: %s", self.url, error.message)

    def _require_none_half_thinned(self) -> None:
        """Raise `Conflict` if the place is complete only with what is staged: it was being thinned."""
        record = noted(self)
        if record is not None and record.plan.startswith(THINNING) and record.step in (REMOVING, PUTTING):
            raise Conflict(
                f"{self.destination} is half thinned, by a run that ended early",
                hint=f"run it again, and it ends that: ckptcore thin {self.destination}",
            )

    def _remove(self) -> None:
        self._require_none_half_thinned()
        for part in (self.files, self.plan, self.receipts):
            part.remove_all()
        for name in RECORDS:  # the record of the publication last: while it exists, the next run resumes
            self.root.remove(name)
