"""Decide which files of an earlier run are kept, and what proves them.

A receipt proves its file when the file is the very one that it was written for (size, times, inode; on object
stores the version) and still has its digest. A file with the right digest alone may have been put there
together with a receipt, or restored from a copy, or finished by a version that took no stamps: what the
source gives decides then. The file is computed once more, and compared byte by byte (`CompareWriter`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckptcore.errors import OutputMismatch
from ckptcore.execution.parts import FilePart
from ckptcore.execution.plan_run import PlanRun
from ckptcore.execution.receipts import Receipt, is_intact, read_receipt, seen_as
from ckptcore.planning.request import Settings
from ckptcore.store import Buffer, Readable, Store

_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run has left of the files that are wanted.

    kept: those that are proven, by index. doubted: those that have their receipt's digest, and may have been
    put there; their receipts are stamped as the files are now.
    """

    kept: dict[int, Receipt] = field(default_factory=dict)
    doubted: dict[int, Receipt] = field(default_factory=dict)


def earlier(
    run: PlanRun, indices: Sequence[int], settings: Settings, part: FilePart | None = None
) -> Earlier:
    """Look at what there is of the files of a plan, and hash it.

    Args:
        run: The plan.
        indices: Which files.
        settings: What receipts must have.
        part: Of the one file, where only that is wanted. In doubt it is not listed at all: it is written
            again, at its place.
    """
    found = Earlier()
    bounds = (part.begin, part.end) if part is not None else None
    for index in indices:
        receipt = read_receipt(run.receipts, run.digest, index, bounds)
        # A file from before fingerprints were wanted is written again: only its elements give its sums.
        if receipt is None or (receipt.sums is None and settings.fingerprint):
            continue
        seen = seen_as(run.files, receipt)  # before it is read: what is changed behind that is noticed later
        if not is_intact(run.files, receipt):
            continue
        if receipt.stamp is not None and receipt.stamp == seen:
            found.kept[index] = replace(receipt, reused=True)
        elif part is None and settings.digest:
            found.doubted[index] = replace(receipt, stamp=seen)
    return found


def confirmed(doubted: Receipt, made: Receipt) -> Receipt:
    """The receipt of a file in doubt that holds what the source gives."""
    return replace(made, reused=True, stamp=doubted.stamp)


class CompareWriter:
    """A writer that writes nothing, and compares what it is given with the file that is there.

    Args:
        files: The store of the file.
        path: The file.
    """

    sequential = True  # what is filled in late, checksums behind the data, is there before it is passed on

    def __init__(self, files: Readable, path: str) -> None:
        self._files, self._path = files, path
        self._block = memoryview(bytearray(_BLOCK))
        self._first: int | None = None

    @property
    def differs(self) -> bool:
        """Whether a byte was given that the file does not hold."""
        return self._first is not None

    def mismatch(self) -> OutputMismatch:
        """The error of a file that differs."""
        return OutputMismatch(f"{self._path} holds another byte {self._first} than the source gives now")

    def write(self, at: int, data: Buffer | bytes) -> None:
        """Compare bytes with those at byte ``at`` of the file, as long as none has differed."""
        given = np.frombuffer(data, np.uint8)
        for begin in range(0, len(given), _BLOCK):
            if self._first is not None:
                return
            part = given[begin : begin + _BLOCK]
            there = self._block[: len(part)]
            self._files.read_into(self._path, at + begin, there)
            same = np.equal(part, np.frombuffer(there, np.uint8))
            if not same.all():
                self._first = at + begin + int(np.argmin(same))

    def copy(self, source: Store, path: str, start: int, length: int, at: int) -> bool:
        """Nothing is compared in the kernel."""
        return False

    def commit(self) -> None:
        """Nothing was written."""

    def abort(self) -> None:
        """Nothing was written."""
