"""Proving: is what the catalog knows still there, byte for byte?

Of what was written here every file has a BLAKE3, and is read once and compared. A source has what its format
stores: its manifest must be the registered one, and its bytes must match their checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum

from blake3 import blake3

from ckptcore.catalog import CheckpointDetail, CheckpointFacts
from ckptcore.catalog.values import FileRow
from ckptcore.convert import inspect, validate
from ckptcore.errors import CkptError, Finding, SourceUnreadable, finding
from ckptcore.manifest import Manifest
from ckptcore.register import facts
from ckptcore.store import Store, local_path, open_store, split_url

_BLOCK = 8 << 20


class Proof(StrEnum):
    """How it stands.

    proven: every byte is as it was. damaged: something is not. changed: another checkpoint stands there.
    gone: nothing does. unread: it could not be looked at. stopped: there was no time.
    """

    PROVEN = "proven"
    DAMAGED = "damaged"
    CHANGED = "changed"
    GONE = "gone"
    UNREAD = "unread"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Proven:
    """What a look gave. nbytes: read. now: what stands there, where that is another checkpoint."""

    proof: Proof
    findings: tuple[Finding, ...] = ()
    message: str = ""
    nbytes: int = 0
    now: CheckpointFacts | None = None


class _NoTime(Exception):
    """The caller's time is over."""


def prove(known: CheckpointDetail, in_time: Callable[[], bool] = lambda: True) -> Proven:
    """Reads a registered checkpoint as a whole. in_time: asked often; the look stops when it says no."""
    uri = known.checkpoint.uri
    try:
        if not _is_there(uri):
            return Proven(Proof.GONE, message=f"there is nothing at {uri}")
        if known.files and all(f.digest for f in known.files):
            return _by_digests(uri, known.files, in_time)
        return _by_checksums(known, in_time)
    except _NoTime:
        return Proven(Proof.STOPPED, message="the time was over")
    except CkptError as error:
        if error.exit_code in (1, 3):
            found = tuple(error.values.get("findings", ())) or (_told(error),)
            return Proven(Proof.DAMAGED, found, error.message)
        return Proven(Proof.UNREAD, message=f"{error.code}: {error.message}")


def _by_digests(uri: str, files: tuple[FileRow, ...], in_time: Callable[[], bool]) -> Proven:
    found: list[Finding] = []
    nbytes = 0
    with closing(open_store(_folder(uri, files))) as store:
        for file in files:
            size = store.size(file.path)
            if size is None:
                found.append(finding("missing-file", "files", f"{file.path} is not there", file=file.path))
            elif size != file.nbytes:
                code = "truncated-file" if size < file.nbytes else "oversized-file"
                told = f"{file.path} has {size} bytes, {file.nbytes} were written"
                found.append(finding(code, "files", told, file=file.path))
            else:
                digest = _digest(store, file, in_time)
                nbytes += size
                if digest != file.digest:
                    told = (
                        f"{file.path} hashes to {digest[:16]}..., {(file.digest or '')[:16]}... was written"
                    )
                    found.append(finding("digest-mismatch", "bytes", told, file=file.path))
    proof = Proof.DAMAGED if found else Proof.PROVEN
    return Proven(proof, tuple(found), found[0].message if found else "", nbytes)


def _digest(store: Store, file: FileRow, in_time: Callable[[], bool]) -> str:
    whole = blake3()
    for at in range(0, file.nbytes, _BLOCK):
        if not in_time():
            raise _NoTime
        whole.update(store.read(file.path, at, min(_BLOCK, file.nbytes - at)))
    return whole.hexdigest()


def _by_checksums(known: CheckpointDetail, in_time: Callable[[], bool]) -> Proven:
    def progress(_stage: str, _done: int, _total: int) -> None:
        if not in_time():
            raise _NoTime

    uri = known.checkpoint.uri
    manifest = _same(uri, known.checkpoint.manifest_digest)
    if manifest is None:
        now = inspect(uri)
        return Proven(Proof.CHANGED, message=f"another checkpoint stands at {uri} now", now=facts(now, uri))
    report = validate(manifest, "bytes", progress=progress)
    errors = [f for f in report.findings if f.severity == "error"]
    proof = Proof.PROVEN if report.ok else Proof.DAMAGED
    return Proven(proof, report.findings, errors[0].message if errors else "", report.nbytes)


def _same(uri: str, digest: str) -> Manifest | None:
    """The manifest as it was registered: it may have been read with other options."""
    for recover, keep in ((False, False), (False, True), (True, False)):
        try:
            found = inspect(uri, recover, keep)
        except CkptError:
            if not recover and not keep:
                raise
            continue
        if found.digest.rpartition(":")[2].lower() == digest:
            return found
    return None


def _folder(uri: str, files: tuple[FileRow, ...]) -> str:
    """The folder that the files' paths are relative to: a checkpoint may be one file."""
    parent, name = split_url(uri)
    path = local_path(uri)
    if path is not None:
        return parent if path.is_file() else uri
    return parent if [f.path for f in files] == [name] else uri


def _is_there(uri: str) -> bool:
    path = local_path(uri)
    if path is not None:
        return os.path.lexists(path)
    parent, name = split_url(uri)
    if open_store(parent).size(name) is not None:
        return True
    try:
        return bool(open_store(uri).list())
    except SourceUnreadable:
        return False


def _told(error: CkptError) -> Finding:
    return Finding(error.code, "files", error.message, hint=error.hint)
