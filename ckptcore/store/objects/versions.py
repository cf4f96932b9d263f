"""Hide, show and remove the objects of a place in a bucket that keeps versions.

A plain delete there leaves a delete marker over the version: the object is gone for readers, and comes back
when the marker is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptcore.errors import CkptError
from ckptcore.store import is_s3
from ckptcore.store.file_status import FileStatus, same_content
from ckptcore.store.objects import ObjectSeen, of_object
from ckptcore.store.objects.client import S3Client, listed
from ckptcore.store.objects.retry import Kind, kind_of


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """One version of an object, in a bucket that keeps versions.

    Attributes:
        s3_object: The object; a delete marker has no bytes and no ETag.
        id: Its version id.
        latest: Whether it is the current one.
        marker: Whether it is a delete marker: the object is gone while that is the latest version.
    """

    s3_object: ObjectSeen
    id: str
    latest: bool
    marker: bool


@dataclass(frozen=True, slots=True)
class HiddenObject:
    """An object behind a delete marker.

    Attributes:
        status: Of the object, as `ckptcore.store.listing.contents` has it.
        version: Its version.
        marker: The delete marker.
    """

    status: FileStatus
    version: ObjectVersion
    marker: ObjectVersion


class VersionedPlace:
    """A place in a bucket that keeps versions. key: its key, without a slash at its end."""

    def __init__(self, client: S3Client, key: str) -> None:
        self._client, self._key = client, key

    def hidden(self) -> dict[str, HiddenObject]:
        """Return the objects behind delete markers by name; "" is the place itself."""
        newest: dict[str, ObjectVersion] = {}
        markers: dict[str, ObjectVersion] = {}
        for name, version in self._versions():
            if version.marker and version.latest:
                markers[name] = version
            elif not version.marker:
                before = newest.get(name)
                if before is None or (version.s3_object.modified or 0) > (before.s3_object.modified or 0):
                    newest[name] = version
        hidden = {name: (newest[name], marker) for name, marker in markers.items() if name in newest}
        return {name: HiddenObject(of_object(v.s3_object), v, marker) for name, (v, marker) in hidden.items()}

    def show(self) -> None:
        """Delete the delete markers."""
        for hidden in self.hidden().values():
            _delete_version(self._client, hidden.marker.s3_object.key, hidden.marker.id)

    def remove(self, things: Mapping[str, FileStatus]) -> None:
        """Delete the hidden versions of these things for good, and their markers."""
        for name, hidden in self.hidden().items():
            if name in things and same_content(things[name], hidden.status):
                _delete_version(self._client, hidden.version.s3_object.key, hidden.version.id)
                _delete_version(self._client, hidden.marker.s3_object.key, hidden.marker.id)

    def _versions(self) -> Iterator[tuple[str, ObjectVersion]]:
        for version in object_versions(self._client, self._key):
            if version.s3_object.key == self._key:
                yield "", version
            elif version.s3_object.key.startswith(f"{self._key}/"):
                yield version.s3_object.key[len(self._key) + 1 :], version


def bucket_with_versions(url: str) -> VersionedPlace | None:
    """Return a place in a bucket that keeps versions; None for any other place."""
    if not is_s3(url):
        return None
    from ckptcore.store.objects.shared_clients import client_of, key_of  # which imports the client

    client = client_of(url)
    return VersionedPlace(client, key_of(url)) if keeps_versions(client) else None


def keeps_versions(client: S3Client) -> bool:
    """Return whether the bucket keeps every version; False where the store does not say."""
    try:
        answer = client.ask("get_bucket_versioning", "")
    except CkptError as error:  # not every store has it, and not everybody may ask
        if error.transient:
            raise
        return False
    return bool(answer.get("Status") == "Enabled")


def object_versions(client: S3Client, prefix: str) -> Iterator[ObjectVersion]:
    """Yield every version and delete marker of the objects whose key starts with ``prefix``."""
    marks = {"KeyMarker": "NextKeyMarker", "VersionIdMarker": "NextVersionIdMarker"}
    for page in client.pages("list_object_versions", prefix, marks, Prefix=prefix):
        for kind, is_marker in (("Versions", False), ("DeleteMarkers", True)):
            for row in page.get(kind, ()):
                yield ObjectVersion(listed(row), row["VersionId"], bool(row["IsLatest"]), is_marker)


def _delete_version(client: S3Client, key: str, version: str) -> None:
    """Delete one version, or a delete marker, for good; a missing one is no error."""
    try:
        client.ask("delete_object", key, writing=True, Key=key, VersionId=version)
    except CkptError as error:
        if kind_of(error) is not Kind.MISSING:
            raise
