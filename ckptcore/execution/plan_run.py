"""Define what every step of writing a plan's files shares.

A file of its own: `execute`, and conversions that build the value, import it and not each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptcore.planning.file_plan import FilePlan
from ckptcore.store import Store

if TYPE_CHECKING:
    from ckptcore.execution.receipts import Receipt
    from ckptcore.reading.checksums import Records
    from ckptcore.store.objects.uploads import Uploads
    from ckptcore.utils.workers import ProgressMeter


Elsewhere = Callable[[Sequence[int], "Records", "ProgressMeter"], "dict[int, Receipt]"]
"""Called with the indices of files, the source's records, and a meter; returns the receipts of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRun:
    """A plan, where its tensors come from, and where its files go.

    Attributes:
        digest: Digest of the plan; receipts of another plan are ignored.
        load: Returns the plan of one output file by its index.
        total: Bytes of all output files, for progress.
        source: The checkpoint's folder.
        items: How many items the source's manifest has.
        unchanged: Raises `SourceChanged` when one of these source files differs from the plan.
        files: Where output files are staged.
        receipts: Where finished files are recorded.
        scratch: Folder for decoded items, None for the default.
        uploads: Where files with tensors are uploaded by handles instead; None on other stores.
        elsewhere: Writes some of the files in other processes, if that is faster; None where it is not. What
            those have read of the source's records is joined with this process's.
    """

    digest: str
    load: Callable[[int], FilePlan]
    total: int
    source: Store
    items: int
    unchanged: Callable[[Sequence[str]], None]
    files: Store
    receipts: Store
    scratch: str | None = None
    uploads: Uploads | None = None
    elsewhere: Elsewhere | None = None

    def require_unchanged(self, plan: FilePlan) -> None:
        """Raise `SourceChanged` unless the source files of an output file are unchanged since the plan."""
        self.unchanged([file.path for file in plan.files])
