"""Reuse: which files of an earlier run are kept, and what proves them?

A receipt proves its file when the file is the very one that it was written for (size, times, inode; on object
stores the version) and still has its digest. A file with the right digest alone may have been put there
together with a receipt, or restored from a copy, or finished by a version that took no stamps: what the
source gives decides then. The file is made once more without being written, and its digest compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckptcore.execution.file_writer import FileWork
from ckptcore.execution.receipts import Receipt, is_intact, read_receipt, seen_as
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.request import Settings
from ckptcore.reading.checksums import Records
from ckptcore.store import Buffer, Store, Writer


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run has left of the files that are wanted.

    kept: those that are proven, by index. doubted: those that have their receipt's digest, and may have been
    put there; their receipts are stamped as the files are now.
    """

    kept: dict[int, Receipt] = field(default_factory=dict)
    doubted: dict[int, Receipt] = field(default_factory=dict)


def earlier(
    indices: Sequence[int],
    plan_digest: str,
    files: Store,
    receipts: Store,
    settings: Settings,
    bounds: tuple[int, int] | None,
) -> Earlier:
    """Looks at what there is, and hashes it. bounds: of the part of the one file that is wanted, or None.

    A part in doubt is not listed at all: it is written again, at its place.
    """
    found = Earlier()
    for index in indices:
        receipt = read_receipt(receipts, plan_digest, index, bounds)
        # A file from before fingerprints were wanted is written again: only its elements give its sums.
        if receipt is None or (receipt.sums is None and settings.fingerprint):
            continue
        seen = seen_as(files, receipt)  # before it is read: what is changed behind that is noticed later
        if not is_intact(files, receipt):
            continue
        if receipt.stamp is not None and receipt.stamp == seen:
            found.kept[index] = replace(receipt, reused=True)
        elif bounds is None and settings.digest:
            found.doubted[index] = replace(receipt, stamp=seen)
    return found


def confirmed(doubted: Receipt, made: Receipt) -> Receipt | None:
    """The receipt of a file in doubt, by what the source gave; None when it gave other bytes."""
    if (doubted.path, doubted.nbytes, doubted.digest) != (made.path, made.nbytes, made.digest):
        return None
    return replace(made, reused=True, stamp=doubted.stamp)


class DryWork(FileWork):
    """A file that is made, summed and digested as any other, and written nowhere."""

    def __init__(
        self,
        plan: FilePlan,
        source: Store,
        files: Store,
        settings: Settings,
        records: Records,
        scratch: str | None,
    ) -> None:
        super().__init__(plan, source, files, replace(settings, digest=True), records, scratch)

    def _open(self, files: Store) -> Writer:
        return _Nowhere()


class _Nowhere:
    """A writer that keeps nothing."""

    sequential = False

    def write(self, at: int, data: Buffer | bytes) -> None:
        pass

    def copy(self, source: Store, path: str, start: int, length: int, at: int) -> bool:
        return False

    def commit(self) -> None:
        pass

    def abort(self) -> None:
        pass
