"""Decide which files of an earlier run are reused.

A receipt proves its file when the file is the very one it was written for (size, times, inode; on object
stores the version) and still has its digest. A file with only the right digest may have been put there
together with a receipt, or restored from a copy, or finished by a version that took no stamps. Then the
source decides: the file is computed once more, and compared byte by byte (`CompareWriter`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ckptcore.errors import OutputMismatch
from ckptcore.execution.parts import FilePart
from ckptcore.execution.plan_run import PlanRun
from ckptcore.execution.receipts import Receipt, is_intact, read_receipt, seen_as
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.request import Settings
from ckptcore.store import Buffer, FileWriter, Readable
from ckptcore.utils.part_digest import PartHasher

_BLOCK = 4 << 20


def earlier(
    run: PlanRun, indices: Sequence[int], settings: Settings, part: FilePart | None = None
) -> tuple[dict[int, Receipt], dict[int, Receipt]]:
    """Find and hash the existing files of a plan.

    Args:
        run: The plan.
        indices: Indices of the files.
        settings: What receipts must have.
        part: Look only for this part of the one file. A doubtful part is not listed: it is written again, at
            its place.

    Returns:
        By index: the receipts of proven files, and those of files with their receipt's digest that may have
        been put there; these have the files' current stamps.
    """
    proven, doubted = dict[int, Receipt](), dict[int, Receipt]()
    bounds = (part.begin, part.end) if part is not None else None
    for index in indices:
        # Of this very plan: a receipt of another one says nothing about these bytes.
        receipt = read_receipt(run.receipts, run.digest, index, bounds)
        # A file without sums is written again if fingerprints are on: only its elements give its sums. So it
        # is with statistics.
        if receipt is None or (receipt.sums is None and settings.fingerprint):
            continue
        if receipt.statistics is None and settings.stats:
            continue
        if receipt.uploaded is not None:  # the store lists the parts that it has; nothing is read back
            if run.uploads is not None and run.uploads.holds(receipt.uploaded):
                proven[index] = replace(receipt, reused=True)
            continue
        if run.uploads is not None and run.load(index).tensors:
            continue  # it was staged, not uploaded
        current_stamp = seen_as(run.files, receipt)  # before it is read, so that a later change is detected
        if not is_intact(run.files, receipt):
            continue
        if receipt.stamp is not None and receipt.stamp == current_stamp:
            proven[index] = replace(receipt, reused=True)
        # The right bytes, and not the very file: another program may have put it there, so the source
        # decides.
        elif part is None and settings.digest:
            doubted[index] = replace(receipt, stamp=current_stamp)
    return proven, doubted


def compare_writer(run: PlanRun, plan: FilePlan) -> CompareWriter | DigestWriter:
    """Return the writer that compares a file's bytes with the existing file, or with its upload."""
    if run.uploads is not None and len(plan.columns):
        receipt = read_receipt(run.receipts, run.digest, plan.index)
        if receipt is not None and receipt.uploaded is not None:
            return DigestWriter(receipt)
    return CompareWriter(run.files, plan.path)


class CompareWriter(FileWriter):
    """A writer that compares bytes with the existing file instead of writing them.

    Args:
        files: The store of the file.
        path: The file.
    """

    sequential = True  # late bytes, such as checksums behind the data, are filled in before `write`

    def __init__(self, files: Readable, path: str) -> None:
        self._files, self._path = files, path
        # One block, used again: a comparison needs no memory in the size of the file.
        self._block = memoryview(bytearray(_BLOCK))
        self._first: int | None = None

    @property
    def differs(self) -> bool:
        """Report whether a byte differed from the file."""
        return self._first is not None

    def mismatch(self) -> OutputMismatch:
        """Return the error of a file that differs."""
        return OutputMismatch(f"{self._path} differs at byte {self._first} from what the source gives now")

    def write(self, offset: int, data: Buffer | bytes) -> None:
        """Compare bytes with those at byte ``offset`` of the file, until one differs."""
        content = np.frombuffer(data, np.uint8)
        for begin in range(0, len(content), _BLOCK):
            # One difference is enough to say that the file is another one.
            if self._first is not None:
                return
            part = content[begin : begin + _BLOCK]
            existing = self._block[: len(part)]
            self._files.read_into(self._path, offset + begin, existing)
            same = np.equal(part, np.frombuffer(existing, np.uint8))
            if not same.all():
                self._first = offset + begin + int(np.argmin(same))

    def commit(self) -> None:
        """Do nothing: nothing was written."""

    def abort(self) -> None:
        """Do nothing: nothing was written."""


class DigestWriter(FileWriter):
    """A writer that compares the digest of bytes with that of an upload, which cannot be read back yet.

    Args:
        receipt: Of the upload.
    """

    def __init__(self, receipt: Receipt) -> None:
        assert receipt.uploaded is not None  # the caller has looked
        self._receipt = receipt
        self._digest = PartHasher(receipt.uploaded.part)
        self._same = False

    @property
    def differs(self) -> bool:
        """Report whether the bytes are others than those of the upload."""
        return not self._same

    def mismatch(self) -> OutputMismatch:
        """Return the error of a file that differs."""
        return OutputMismatch(f"{self._receipt.path} differs from what the source gives now")

    def write(self, offset: int, data: Buffer | bytes) -> None:
        """Add bytes in file order."""
        self._digest.update(data)

    def commit(self) -> None:
        """Compare the digests."""
        self._same = self._digest.hexdigest() == self._receipt.digest

    def abort(self) -> None:
        """Do nothing: nothing was written."""
