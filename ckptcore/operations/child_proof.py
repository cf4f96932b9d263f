"""Verify that a child still proves its source, byte for byte and in its own place.

This is done twice for every source that is deleted: before anything changes, and while the source is set
aside.
"""

from __future__ import annotations

from ckptcore.catalog import CheckpointDetail
from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.core.used_files import used
from ckptcore.errors import SourceChanged, UsageError
from ckptcore.operations.distinct import files_of
from ckptcore.operations.registered_files import compare, same_manifest
from ckptcore.operations.replacement import Replacement
from ckptcore.operations.verify import Proof, Proven, prove
from ckptcore.planning.request import Settings
from ckptcore.store import join_url
from ckptcore.store.contents import Thing, difference


def require_proven(uri: str, proven: Proven, *, digests: bool = True) -> None:
    """Raise `UsageError` unless every file of a child is, byte for byte, the one that was written.

    digests: require digests, because there is no other proof.
    """
    if digests and any(f.code == "no-checksum" for f in proven.findings):
        raise UsageError(f"{uri} has no digests: --fingerprint reads both")
    # With digests, only files without tensors that are not recorded are unproven: they are no evidence.
    if proven.proof not in (Proof.PROVEN, Proof.UNPROVEN):
        raise UsageError(f"{uri}: {proven.message}")


def require_holding(detail: CheckpointDetail, wanted: str | None, means: Settings) -> None:
    """Read a child in its own place, and raise `UsageError` unless it has the wanted tensors.

    Args:
        detail: The child.
        wanted: The fingerprint of its tensors; None for a cast child, which its digests must prove.
        means: Memory and threads for reading.
    """
    uri = detail.checkpoint.uri
    if wanted is None:
        require_proven(uri, prove(detail))
        return
    manifest = same_manifest(uri, detail.checkpoint.manifest_digest)
    if manifest is None or fingerprint(manifest, means).fingerprint != wanted:
        raise UsageError(f"{uri} has other tensors now")
    data = used(manifest).data
    others = tuple(file for file in detail.files if file.digest and file.path not in data)
    if others:  # the files of tensors were read for their fingerprint
        for wrong in compare(uri, others).findings:
            raise UsageError(f"{uri}: {wrong.message}")


def files_now(detail: CheckpointDetail) -> dict[str, Thing]:
    """Return the child's current files, each with its identity."""
    child = detail.checkpoint
    manifest = same_manifest(child.uri, child.manifest_digest)
    if manifest is None:
        raise UsageError(f"another checkpoint is at {child.uri} now")
    known = {file.path for file in detail.files if file.digest}
    name = manifest.origin.get("file")
    missing = sorted(used(manifest).data - known - {name}) if known else []
    if missing:
        raise UsageError(f"{child.uri}: the catalog has no digest of {missing[0]}")
    return files_of(child.uri, manifest, [file.path for file in detail.files])


def require_at_rest(replacement: Replacement, detail: CheckpointDetail) -> None:
    """Raise `SourceChanged` unless a child's files are unchanged since before they were read."""
    uri = detail.checkpoint.uri
    name = difference(replacement.files, files_now(detail))
    if name is not None:
        raise changed(uri, name)


def changed(uri: str, name: str) -> SourceChanged:
    """Return the error for a file that changed while a run used it."""
    return SourceChanged(
        f"{join_url(uri, name) if name else uri} was written, moved or touched while this ran",
        hint="run again when no process writes there",
    )
