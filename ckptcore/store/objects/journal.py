"""Record uploads under the staging prefix, so that another process can resume, complete or abort them.

An upload that was begun and lost costs storage for ever, and no reader sees it. So an entry is written before
its upload is begun, and once more with the upload's id. An entry without an id means: an upload of this key
may be open. So does one whose request was sent more than once. Only then uploads without an entry are looked
for. Entries hold keys, ids and sizes, never a credential.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from operator import attrgetter

from ckptcore.errors import AlteredInTransit, CkptError, StorageTrouble
from ckptcore.store.objects import RECORD, OpenUpload
from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.retry import Kind, kind_of, never
from ckptcore.utils import host
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parsing

TOKEN = "ckptcore-upload"  # name of the metadata of an uploaded object that holds its entry's token
_ALGORITHM = "CRC32"  # of uploads
_TRIES = 5
_SKEW_S = 300.0  # that clocks of machines and stores may differ by
_BYTES = attrgetter("index", "key", "nbytes", "part", "plan")
_log = logging.getLogger("ckptcore")


@dataclass(frozen=True, slots=True)
class UploadEntry:
    """One upload.

    Attributes:
        index: Index of the file in the plan.
        key: Key of the object.
        token: Stored beside the object: it tells this upload's object from any other.
        nbytes: Size of the object.
        part: Bytes of a part.
        plan: Digest of the plan.
        upload_id: Id of the upload; "" before it is known.
        started: When the entry was written, seconds since 1970; or the one before it, if what that one began
            could not be looked for.
        reply_lost: Whether more than one request to begin it was sent. True if the entry does not say.
    """

    index: int
    key: str
    token: str
    nbytes: int
    part: int
    plan: str
    upload_id: str = ""
    started: float = 0.0
    reply_lost: bool = False

    @property
    def may_have_strays(self) -> bool:
        """Return whether an upload of ours may be open whose id nobody has."""
        return self.reply_lost or not self.upload_id

    def fits(self, candidate: UploadEntry) -> bool:
        """Report whether another entry is for the same bytes in the same parts at the same key."""
        return _BYTES(self) == _BYTES(candidate)


class UploadJournal:
    """The entries of one destination.

    Args:
        client: The store.
        prefix: Prefix of the entries' keys, with a slash at its end.
    """

    def __init__(self, client: S3Client, prefix: str) -> None:
        self.client, self.prefix = client, prefix

    def find(self, index: int) -> UploadEntry | None:
        """Return the entry of a file, or None."""
        return self._read(self._key(index))

    def entries(self) -> list[UploadEntry]:
        """Return all entries."""
        upload_entries = (self._read(s3_object.key) for s3_object in list(self.client.list(self.prefix)))
        return [entry for entry in upload_entries if entry is not None]

    def begin(self, upload: UploadEntry, after: UploadEntry | None = None) -> UploadEntry:
        """Begin an upload, and return its entry.

        Several workers may begin one file at once: the first entry wins, where the store knows create-only
        requests, and the others adopt it.

        Args:
            upload: What is to be uploaded.
            after: The entry before, if uploads that it began may still be open.
        """
        return self.create(upload, after) or self._adopted(upload)

    def create(
        self, upload: UploadEntry, after: UploadEntry | None = None, given_up: Callable[[], bool] = never
    ) -> UploadEntry | None:
        """Begin an upload as `begin` does; return None if there is an entry.

        Args:
            upload: What is to be uploaded.
            after: The entry before, if uploads that it began may still be open.
            given_up: Whether nobody waits for it any more. Then no request is repeated and no upload is
                begun, and None is returned: what was begun before has an entry.
        """
        if given_up():
            return None
        journal = UploadJournal(self.client.unless(given_up), self.prefix)
        entry = replace(
            upload,
            token=uuid.uuid4().hex,
            upload_id="",
            started=host.now() if after is None else after.started,
            reply_lost=after is not None,
        )
        try:
            journal._put(entry, create=True)
        except CkptError as error:
            if kind_of(error) is not Kind.EXISTS:
                raise
            return None
        if given_up():
            return None
        repeats: list[bool] = []
        upload_id = journal.client.begin(
            entry.key, {TOKEN: entry.token}, algorithm=_ALGORITHM, on_repeat=lambda: repeats.append(True)
        )
        entry = replace(entry, upload_id=upload_id, reply_lost=entry.reply_lost or bool(repeats))
        try:
            journal._put(entry)
        except AlteredInTransit:  # the entry is gone, and nobody else has the id
            self.client.abort(entry.key, upload_id)
            raise
        return entry

    def forget(self, index: int) -> None:
        """Remove the entry of a file whose upload has ended, if these credentials may."""
        try:
            self.client.delete(self._key(index))
        except CkptError as error:
            if kind_of(error) is not Kind.DENIED:
                raise
            _log.info("the record of an upload that has ended is kept: %s", error.message)

    def abort(self, entry: UploadEntry) -> UploadEntry | None:
        """Abort the upload of an entry, whether its id is known or not, and remove the entry.

        Returns:
            The entry, if uploads that it began may still be open.
        """
        if entry.upload_id:
            self.client.abort(entry.key, entry.upload_id)
        gone = not entry.may_have_strays or self.abort_strays({entry.key: entry.started})
        self.forget(entry.index)
        return None if gone else entry

    def abort_all(self) -> int:
        """Abort every upload in the journal; return how many there were."""
        upload_entries = self.entries()
        for entry in upload_entries:
            if entry.upload_id:
                self.client.abort(entry.key, entry.upload_id)
        if upload_entries:
            self.abort_strays({entry.key: entry.started for entry in upload_entries if entry.may_have_strays})
            _log.info("aborted %d uploads of %s", len(upload_entries), self.prefix)
        for entry in upload_entries:
            self.forget(entry.index)
        return len(upload_entries)

    def abort_strays(self, keys: Mapping[str, float]) -> bool:
        """Abort the uploads of our keys whose ids were lost with a reply; see `is_stray`.

        Args:
            keys: Key -> when its entry was written, of entries that may have strays.

        Returns:
            Whether the store let us look.
        """
        if not keys:
            return True
        prefix = os.path.commonprefix(list(keys))  # noqa: RUF071 - keys are no paths
        try:
            open_uploads = list(self.client.list_uploads(prefix))
        except CkptError as error:
            if kind_of(error) not in (Kind.DENIED, Kind.UNSUPPORTED):
                raise
            _log.info("cannot look for uploads without an owner: %s", error.message)
            return False
        for upload in open_uploads:
            if self.is_stray(upload, keys):
                self.client.abort(upload.key, upload.upload_id)
        return True

    def is_stray(self, upload: OpenUpload, keys: Mapping[str, float]) -> bool:
        """Report whether an open upload may be one of ours whose id was lost with the reply.

        Parts are sent only to uploads whose id is recorded. So an upload with a part is another program's,
        and so is one that is older than the entry of its key, or was begun with another checksum.

        Args:
            upload: An open upload whose id is in no entry.
            keys: Key -> when its entry was written, of entries that may have strays.
        """
        if upload.algorithm not in (None, _ALGORITHM):
            return False
        since = keys.get(upload.key)
        if since is None or (upload.started is not None and upload.started < since - _SKEW_S):
            return False
        try:
            return not list(self.client.list_parts(upload.key, upload.upload_id))
        except CkptError as error:
            if kind_of(error) is not Kind.NO_UPLOAD:
                raise
            return False  # it has ended meanwhile

    def _adopted(self, upload: UploadEntry) -> UploadEntry:
        """Return the entry that another worker wrote, once it has its upload's id."""
        for n in range(_TRIES):
            if n:
                host.sleep(0.2 * 2**n)
            upload_entry = self.find(upload.index)
            if upload_entry is not None and upload_entry.upload_id:
                return upload_entry
        raise StorageTrouble(
            f"cannot upload {upload.key}: another process began the same upload and has not recorded it",
            hint="run the command again when that process has ended",
        )

    def _put(self, entry: UploadEntry, *, create: bool = False) -> None:
        data = json.dumps(asdict(entry), sort_keys=True).encode()
        try:
            self.client.put(self._key(entry.index), data, create=create)
        except CkptError as error:
            # A lost reply: what is there may be this very entry.
            stored_entry = self._read(self._key(entry.index)) if kind_of(error) is Kind.EXISTS else None
            if stored_entry is None or stored_entry.token != entry.token:
                raise

    def _read(self, key: str) -> UploadEntry | None:
        data = self.client.fetch(key, RECORD)
        if data is None:
            return None
        with suppress(InvalidText), parsing("an entry"):
            form = load_json_object(data)
            return UploadEntry(
                int(form["index"]),
                str(form["key"]),
                str(form["token"]),
                int(form["nbytes"]),
                int(form["part"]),
                str(form["plan"]),
                str(form["upload_id"]),
                float(form["started"]),
                bool(form.get("reply_lost", True)),
            )
        raise StorageTrouble(
            f"cannot read the record of an upload in {self.client.url}: {key} is not an entry",
            hint=f"abort the uploads below {self.prefix} by hand, then remove {key}",
        )

    def _key(self, index: int) -> str:
        return f"{self.prefix}file-{index:05d}.json"
