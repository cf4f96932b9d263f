"""Find and remove what killed conversions left on an object store: open uploads and staging prefixes.

Only what a conversion recorded is removed: a staging prefix whose every object has a name that a conversion
writes, and the uploads in its journal. Other uploads below the place are listed, and stay. A prefix stays,
too, if its lease is held, if it changed lately, or if its output is partly published: the same conversion,
run again, completes that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ckptcore.conversion.staging.open_staging import open_staging
from ckptcore.conversion.staging.s3_staging import is_of_staging
from ckptcore.conversion.staging.staging import DONE, PUBLISHING, UPLOADS, Staging, noted
from ckptcore.errors import Busy, CkptError, UsageError
from ckptcore.store import is_s3, join_url
from ckptcore.store.objects import ObjectSeen, OpenUpload
from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.journal import UploadJournal
from ckptcore.store.objects.shared_clients import client_of
from ckptcore.utils import host
from ckptcore.utils.isolation import attempt

_STAGING = re.compile(r"((?:.*/)?\.([^/]+)\.ckptcore)/(.+)", re.DOTALL)


class LeftFate(StrEnum):
    """What happens to something that was left."""

    REMOVED = "removed"
    WOULD_REMOVE = "would-remove"
    IN_USE = "in-use"
    YOUNG = "young"
    PUBLISHING = "publishing"
    FOREIGN = "foreign"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class Left:
    """A staging prefix, or an open upload without one.

    Attributes:
        url: Its URL.
        kind: ``staging`` or ``upload``.
        fate: What happened to it.
        why: The reason, for people.
        nbytes: Bytes of its objects; parts of uploads are not counted.
        uploads: Open uploads of it.
        age_s: Seconds since it changed; None where the store does not say.
    """

    url: str
    kind: str
    fate: LeftFate
    why: str
    nbytes: int
    uploads: int
    age_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def collect(
    url: str,
    *,
    older_than_s: float,
    dry_run: bool = False,
    on_item: Callable[[Left], object] | None = None,
    catalog: str | bool | None = False,
) -> tuple[Left, ...]:
    """Remove what conversions left below a place.

    Args:
        url: A bucket, or a prefix in it.
        older_than_s: Keep what changed in that many seconds.
        dry_run: Remove nothing.
        on_item: Called with each thing.
        catalog: URL of the catalog whose claims decide on stores that ignore create-only requests; None for
            the default, False for none.

    Returns:
        Everything that was found.

    Raises:
        UsageError: It is no place on an S3 store.
    """
    if not is_s3(url):
        raise UsageError(
            f"cannot collect in {url!r}: it is not on an S3 store",
            hint="elsewhere the same conversion, run again, resumes or removes what a killed run left",
        )
    leftovers = []
    for leftover in _leftovers(client_of(url), url, older_than_s, dry_run, catalog):
        leftovers.append(leftover)
        if on_item is not None:
            on_item(leftover)
    return tuple(leftovers)


def _leftovers(
    client: S3Client, url: str, older_than_s: float, dry_run: bool, catalog: str | bool | None
) -> Iterator[Left]:
    """Remove the staging folders below a URL that nobody uses; yield what was found and what became of it."""
    _, _, key = url.partition("://")[2].strip("/").partition("/")
    prefix = f"{key}/" if key else ""
    folders: dict[str, dict[str, ObjectSeen]] = defaultdict(dict)
    for stored_object in client.list(prefix):
        inside = _STAGING.fullmatch(stored_object.key)
        if inside is not None:
            folders[inside[1]][inside[3]] = stored_object
    uploads = list(client.list_uploads(prefix))
    recorded_uploads: set[tuple[str, str]] = set()
    why = "no conversion recorded it; abort it by hand if it is yours"
    for folder, objects in sorted(folders.items()):
        folder_uploads = attempt(_uploads_of, client, folder, uploads)
        if isinstance(folder_uploads, CkptError):
            why = "whether a conversion recorded it is not known: a staging prefix cannot be read"
            leftover: Left | CkptError = folder_uploads
        else:
            recorded_uploads |= {(upload.key, upload.upload_id) for upload in folder_uploads}
            leftover = attempt(
                _staging, client, folder, objects, folder_uploads, older_than_s, dry_run, catalog
            )
        if isinstance(leftover, CkptError):
            nbytes = sum(stored_object.nbytes for stored_object in objects.values())
            reason = f"{leftover.code}: {leftover.message}"
            leftover = Left(f"{client.url}/{folder}", "staging", LeftFate.UNREAD, reason, nbytes, 0, None)
        yield leftover
    for upload in uploads:
        # An upload without a staging prefix may be another program's: it is listed, and never aborted.
        if (upload.key, upload.upload_id) not in recorded_uploads:
            age = _age(upload.started)
            yield Left(f"{client.url}/{upload.key}", "upload", LeftFate.FOREIGN, why, 0, 1, age)


def _uploads_of(client: S3Client, folder: str, uploads: list[OpenUpload]) -> list[OpenUpload]:
    """Return those of some open uploads that the journal of a staging prefix has."""
    journal = UploadJournal(client, f"{folder}/{UPLOADS}/")
    entries = journal.entries()
    ids = {(entry.key, entry.upload_id) for entry in entries}
    keys = {entry.key: entry.started for entry in entries if entry.may_have_strays}
    return [u for u in uploads if (u.key, u.upload_id) in ids or journal.is_stray(u, keys)]


def _staging(
    client: S3Client,
    folder: str,
    objects: Mapping[str, ObjectSeen],
    uploads: list[OpenUpload],
    older_than_s: float,
    dry_run: bool,
    catalog: str | bool | None,
) -> Left:
    times = [
        stored_object.modified for stored_object in objects.values() if stored_object.modified is not None
    ]
    times += [upload.started for upload in uploads if upload.started is not None]
    age = _age(max(times, default=None))
    nbytes = sum(stored_object.nbytes for stored_object in objects.values())

    def left(fate: LeftFate, why: str) -> Left:
        return Left(f"{client.url}/{folder}", "staging", fate, why, nbytes, len(uploads), age)

    untrusted_names = sorted(name for name in objects if not is_of_staging(name))
    if untrusted_names:
        return left(LeftFate.FOREIGN, f"it has objects that no conversion writes: {untrusted_names[0]!r}")
    if age is None or age < older_than_s:
        return left(LeftFate.YOUNG, "it changed lately")
    above, _, name = folder.rpartition("/")
    destination = join_url(f"{client.url}/{above}".rstrip("/"), name[1 : -len(".ckptcore")])
    staging = open_staging(destination, catalog)
    try:
        return _removed(staging, left, has_record=PUBLISHING in objects, dry_run=dry_run)
    except Busy as error:
        return left(LeftFate.IN_USE, error.message)


def _removed(
    staging: Staging, left: Callable[[LeftFate, str], Left], *, has_record: bool, dry_run: bool
) -> Left:
    partly = left(
        LeftFate.PUBLISHING, "its output is partly published; run the same command again to complete it"
    )
    publication = noted(staging) if has_record else None
    if publication is not None and publication.step != DONE:
        return partly
    origin = (
        "left by a run that published its output"
        if publication is not None
        else "left by a run that ended early"
    )
    if dry_run:
        with staging.lock(shared=True):
            return left(LeftFate.WOULD_REMOVE, origin)
    with staging.lock():
        publication = noted(staging)  # another run may have begun one since the list, and ended early
        if publication is not None and publication.step != DONE:
            return partly
        staging.remove()
    return left(LeftFate.REMOVED, origin)


def _age(when: float | None) -> float | None:
    return None if when is None else max(host.now() - when, 0.0)
