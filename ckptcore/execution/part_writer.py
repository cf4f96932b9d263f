"""One part of an output file in the making: like a file, at its place in a file that others write too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ckptcore.errors import UsageError
from ckptcore.execution.file_writer import Bytes, FileWork
from ckptcore.execution.parts import Part
from ckptcore.execution.receipts import Receipt, joint_name
from ckptcore.execution.tiles import Job
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.request import Settings
from ckptcore.reading.checksums import Records
from ckptcore.store import Joint, Store


class PartWork(FileWork):
    """The state of one part while it is written. Checksums that stand in the file are filled in when its
    parts are joined."""

    def __init__(
        self,
        plan: FilePlan,
        source: Store,
        files: Store,
        settings: Settings,
        records: Records,
        scratch: str | None,
        part: Part,
    ) -> None:
        self._part = part
        # What lies in the shared file is proven by digests, also where nobody wants that of the whole.
        super().__init__(plan, source, files, replace(settings, digest=True), records, scratch)

    def _open(self, files: Store) -> Joint:
        found = files.joint(joint_name(self.plan.path), self.plan.nbytes)
        if found is None:
            raise UsageError(
                f"{files.url} does not let several processes write {self.plan.path}",
                hint="write the file as a whole",
            )
        return found

    def _patch_all(self, job: Job, buffer: Bytes) -> None:
        """Nothing: see `ckptcore.execution.join_parts`."""

    def complete(self) -> Receipt | None:
        """Makes the part durable; its receipt, once."""
        found = super().complete()
        if found is None:
            return None
        crcs = [(tensor, *piece) for tensor, runs in self._slots.items() for piece in runs]
        return replace(
            found,
            begin=self._part.begin,
            nbytes=self._part.nbytes,
            crcs=tuple(sorted(crcs)),
            proven=proven(self.plan, self._records),
        )

    def told(self, receipt: Receipt) -> str:
        """Which part of the file was written, for people."""
        part = self._part
        return (
            f"wrote part {part.number} of {part.of} of {receipt.path}: bytes {part.begin} to {part.end} "
            f"of {self.plan.nbytes}, {receipt.seconds:.2f} s, BLAKE3 {receipt.digest}"
        )


def proven(plan: FilePlan, records: Records) -> str:
    """Which source records of a file's plan have been proven: a bit each, hex."""
    bits = np.packbits([records.verified(number) for number in plan.number.tolist()])
    return bits.tobytes().hex()
