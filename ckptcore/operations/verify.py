"""Verify that a registered checkpoint is unchanged, byte for byte.

Every file of an output has a recorded BLAKE3; it is read once and compared. A source has the checksums of its
format: its manifest must be the registered one, and its bytes must match the checksums. Files that neither
covers are listed, and the checkpoint is reported as unproven.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from enum import StrEnum

from ckptcore.catalog import CheckpointDetail, CheckpointFacts
from ckptcore.catalog.types import Role
from ckptcore.checking.check import unproven_finding
from ckptcore.checking.examine import inspect, validate
from ckptcore.conversion.registration import facts
from ckptcore.errors import CkptError, Finding, SourceUnreadable
from ckptcore.operations.registered_files import NoTime, compare, folder_of, same_manifest, with_digests
from ckptcore.store import local_path, open_store, split_url
from ckptcore.utils.dataclass import dataclass


class Proof(StrEnum):
    """The result of a verification.

    proven: every byte is unchanged. unproven: no error, but checksums and digests do not cover every byte.
    damaged: a file changed. changed: another checkpoint is there. gone: nothing is there. unread: it could
    not be read. stopped: the time was used up.
    """

    PROVEN = "proven"
    UNPROVEN = "unproven"
    DAMAGED = "damaged"
    CHANGED = "changed"
    GONE = "gone"
    UNREAD = "unread"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Proven:
    """The result of a verification, with details.

    Attributes:
        proof: The result.
        findings: Of the check.
        message: The reason in a line.
        nbytes: Bytes read.
        now: The checkpoint that is there now, if it is another one.
        unproven: Files whose bytes no checksum covers.
    """

    proof: Proof
    findings: tuple[Finding, ...] = ()
    message: str = ""
    nbytes: int = 0
    now: CheckpointFacts | None = None
    unproven: tuple[str, ...] = ()


def prove(known: CheckpointDetail, in_time: Callable[[], bool] = lambda: True) -> Proven:
    """Read all of a registered checkpoint. in_time: called often; reading stops when it returns False."""
    uri = known.checkpoint.uri
    try:
        if not _is_there(uri):
            return Proven(Proof.GONE, message=f"{uri} does not exist")
        data = [f for f in known.files if f.role == Role.DATA]
        if data and all(f.digest for f in data):
            return _by_digests(known, in_time)
        return _by_checksums(known, in_time)
    except NoTime:
        return Proven(Proof.STOPPED, message="the time budget was used up")
    except CkptError as error:
        if error.exit_code in (1, 3):
            found = tuple(error.values.get("findings", ())) or (_as_finding(error),)
            return Proven(Proof.DAMAGED, found, error.message)
        return Proven(Proof.UNREAD, message=f"{error.code}: {error.message}")


def _by_digests(known: CheckpointDetail, in_time: Callable[[], bool]) -> Proven:
    uri, files = known.checkpoint.uri, known.files
    compared = compare(uri, files, in_time, known.checkpoint.created_at)
    recorded = {f.path for f in files}
    folder = folder_of(uri, files)
    listed = [] if recorded == {split_url(uri)[1]} else _paths_in(folder)
    unproven = tuple(p for p in listed if p not in recorded) + tuple(
        f.path for f in files if f.digest is None
    )
    return _proven(compared.findings, unproven, compared.read)


def _by_checksums(known: CheckpointDetail, in_time: Callable[[], bool]) -> Proven:
    def progress(_stage: str, _done: int, _total: int) -> None:
        if not in_time():
            raise NoTime

    uri = known.checkpoint.uri
    manifest = same_manifest(uri, known.checkpoint.manifest_digest)
    if manifest is None:
        now = inspect(uri)
        return Proven(Proof.CHANGED, message=f"another checkpoint is at {uri} now", now=facts(now, uri))
    compared = compare(uri, known.files, in_time, known.checkpoint.created_at)
    report = with_digests(validate(manifest, "bytes", progress=progress), compared)
    findings = tuple(f for f in report.findings if f.code != "unproven")
    return _proven(findings, report.unproven, report.nbytes + compared.read)


def _proven(findings: tuple[Finding, ...], unproven: tuple[str, ...], nbytes: int) -> Proven:
    errors = [f for f in findings if f.severity == "error"]
    doubts = unproven_finding(unproven)
    if errors:
        return Proven(Proof.DAMAGED, (*findings, *doubts), errors[0].message, nbytes, unproven=unproven)
    proof = Proof.UNPROVEN if unproven else Proof.PROVEN
    message = doubts[0].message if doubts else ""
    return Proven(proof, (*findings, *doubts), message, nbytes, unproven=unproven)


def _paths_in(folder: str) -> list[str]:
    with closing(open_store(folder)) as store:
        return list(store.list())


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


def _as_finding(error: CkptError) -> Finding:
    return Finding(error.code, "files", error.message, hint=error.hint)
