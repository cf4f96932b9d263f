"""Save a plan in its staging folder, and load it to carry it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ckptcore.checking.source_stamps import packed as packed_stamps
from ckptcore.checking.source_stamps import require_same
from ckptcore.conversion.publication_record import Publication
from ckptcore.conversion.staging import Staging
from ckptcore.errors import MalformedCheckpoint, UsageError
from ckptcore.execution.plan_run import PlanRun
from ckptcore.execution.receipts import read_receipt, write_receipt
from ckptcore.planning.compose import Composed
from ckptcore.planning.plan import (
    Plan,
    file_name,
    load_file_plan,
    load_head,
    save_files,
    save_head,
    save_plan,
)
from ckptcore.planning.request import Request, Settings
from ckptcore.reading.file_digests import digest_of
from ckptcore.store import Store, fetch, put_each
from ckptcore.store.ahead import ReadsAhead
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parsing

REQUEST = "request.json"


def save(
    staging: Staging,
    composed: Composed,
    stamps: dict[str, str | None],
    ctimes: dict[str, int | None] | None = None,
    records: Sequence[tuple[str, bytes]] = (),
) -> None:
    """Save a plan, the stamps of its source, and the small files of its output in the staging folder.

    The head of the plan comes last, so that what has one is complete.

    Args:
        staging: The staging folder.
        composed: The plan.
        stamps: Of the source.
        ctimes: Of the source; None keeps those that were recorded when the first staged file was begun.
        records: (name, bytes) of records beside the plan.
    """
    put_extra(staging, composed)
    files = partial(save_files, staging.plan, composed.files, packed_stamps(stamps, ctimes))
    staging.together([partial(put_each, staging.root, records), files])
    save_head(staging.plan, composed.plan)


def staged_request(staging: Staging) -> Request:
    """Load the request of a staged plan; raise `UsageError`, `MalformedCheckpoint`."""
    store = staging.root
    data = fetch(store, REQUEST)
    if data is None:
        raise UsageError(f"{store.url} lacks {REQUEST}", hint="prepare the conversion again")
    try:
        with parsing("a request"):
            return Request.from_dict(load_json_object(data))
    except InvalidText as error:
        raise MalformedCheckpoint(
            f"cannot read {store.url}/{REQUEST}: {error}", hint="prepare the conversion again"
        ) from error


def planned_paths(plan: Plan) -> set[str]:
    """Return the paths of all files that are published."""
    return {f.path for f in plan.files} | {path for path, _ in plan.extra}


def restore(
    staging: Staging,
    composed: Composed,
    stamps: dict[str, str | None],
    publication: Publication,
    *,
    same: bool,
) -> None:
    """Restore the plan and the receipts of a finished publication, to verify the published files.

    A run was killed while it removed them. same: the staged plan is complete.
    """
    if not same:
        save_plan(staging.plan, composed.plan, composed.files, packed_stamps(stamps))
    for receipt in publication.receipts:
        if read_receipt(staging.receipts, publication.plan, receipt.index) is None:
            write_receipt(staging.receipts, publication.plan, receipt)


def plan_run(
    staging: Staging,
    plan: Plan,
    source: Store,
    noted: Mapping[str, str | None],
    settings: Settings | None = None,
) -> PlanRun:
    """Return the inputs for carrying out a staged plan.

    Args:
        staging: The staging folder.
        plan: The plan.
        source: The checkpoint's folder.
        noted: The stamps of the source's files.
        settings: Memory of a run that writes.
    """
    return PlanRun(
        digest=plan.digest,
        load=partial(load_file_plan, staging.plan),
        total=plan.bytes_out,
        source=source,
        items=plan.items,
        # Where every request is for the version that was noted, each read proves it.
        unchanged=_ignore
        if isinstance(source, ReadsAhead) and source.pins
        else partial(_require_same, noted, source),
        files=staging.files,
        receipts=staging.receipts,
        scratch=staging.scratch,
        uploads=staging.uploads_of(plan, settings),
    )


def _require_same(noted: Mapping[str, str | None], source: Store, paths: Sequence[str]) -> None:
    require_same(noted, source, paths)


def _ignore(paths: Sequence[str]) -> None:
    """Do nothing."""


def saved_digest(staging: Staging) -> str | None:
    """Return the digest of the staged plan, or None if there is none or it is incomplete."""
    if fetch(staging.plan, "head.json") is None:
        return None
    try:
        head = load_head(staging.plan)
    except MalformedCheckpoint:  # truncated by a crash: planned again
        return None
    names = staging.plan.list()  # a run that was killed while it cleaned up may leave only the head
    return head.digest if all(file_name(f.index) in names for f in head.files) else None


def put_extra(staging: Staging, composed: Composed) -> None:
    """Write the small files to the staging folder, unless they are there already."""
    for path, digest in composed.plan.extra:
        data = composed.extra[path]
        if staging.files.size(path) != len(data) or digest_of(staging.files, path, len(data)) != digest:
            staging.files.put(path, data)
