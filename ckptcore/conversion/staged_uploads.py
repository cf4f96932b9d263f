"""Upload the files with tensors of an output to the keys where they are published, without completing them.

An object store with multipart uploads needs no staged copy of these files. The staging prefix has the plan,
the receipts, the small files, the journal of the uploads (``uploads/``), and the lease of the destination.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptcore.conversion.staging import LEASE, UPLOADS
from ckptcore.errors import DestinationUnwritable, SourceUnreadable
from ckptcore.execution.parts import FilePart, cut_upload
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.plan import Plan, PlannedFile
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget
from ckptcore.store.objects import ObjectClient
from ckptcore.store.objects.journal import UploadJournal
from ckptcore.store.objects.lease import Arbiter, Lease
from ckptcore.store.objects.part_plan import UploadBudget, plan_parts
from ckptcore.store.objects.shared_clients import client_of, key_of
from ckptcore.store.objects.uploads import Uploads

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

    client: ObjectClient
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
        budget = UploadBudget(0, 0) if settings is None else upload_budget(plan.files, settings)
        return Uploads(
            self.client,
            self.journal,
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


def cut_file(
    places: DestinationKeys, plan: Plan, file: FilePlan, nbytes: int, settings: Settings
) -> tuple[FilePart, ...]:
    """Cut a file into parts of its upload, for workers that write them at once, and begin the upload.

    Returns:
        The parts; empty if one worker must write the file.
    """
    if not file.tensors:
        return ()
    budget = Budget.of(beside_uploads(plan.files, settings))
    parts = cut_upload(file, nbytes, plan_parts(file.nbytes, file.path).part, budget)
    if len(parts) > 1:  # before any worker starts, so that all of them find the same upload
        places.uploads(plan).entry(file.index, file.path, file.nbytes)
    return parts
