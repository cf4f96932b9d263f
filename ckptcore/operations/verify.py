"""Verify that a registered checkpoint is unchanged, byte for byte.

Every file of an output has a recorded BLAKE3, and every file of a source the digest that it had when all of
it was first read; it is read once and compared. Other sources have the checksums of their format: the
manifest must be the registered one, and the bytes must match the checksums. That proves the tensors, and not
the bytes around them, nor that two files were not exchanged. Files that neither covers are listed, and the
checkpoint is reported as unproven.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum

from ckptcore.catalog import CheckpointDetail, CheckpointFacts
from ckptcore.catalog.types import Kind, Role
from ckptcore.checking.check import unproven_finding
from ckptcore.checking.examine import inspect, validate
from ckptcore.conversion.registration import facts
from ckptcore.conversion.source_digests import are_of_first_sight, is_resaved
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, Finding, SourceUnreadable, findings_of
from ckptcore.operations.registered_files import (
    Compared,
    NoTime,
    compare,
    digests_read,
    folder_of,
    is_alike,
    same_manifest,
    with_digests,
)
from ckptcore.store import forget_small_reads, local_path, open_store, split_url
from ckptcore.utils.text import count


class Proof(StrEnum):
    """The result of a verification.

    proven: every byte of every file is unchanged. tensors proven: what the files hold is, but nothing records
    the bytes of all files. unproven: no error, but checksums and digests do not cover every tensor or file.
    damaged: a file changed. changed: another checkpoint is there. gone: nothing is there. unread: it could
    not be read. stopped: the time was used up.
    """

    PROVEN = "proven"
    TENSORS = "tensors proven"
    UNPROVEN = "unproven"
    DAMAGED = "damaged"
    CHANGED = "changed"
    GONE = "gone"
    UNREAD = "unread"
    STOPPED = "stopped"


FINE = (Proof.PROVEN, Proof.TENSORS, Proof.UNPROVEN, Proof.STOPPED)  # nothing that a user must look at


@dataclass(frozen=True)
class Proven:
    """The result of a verification, with details.

    Attributes:
        proof: The result.
        findings: Of the check.
        message: The reason in a line.
        nbytes: Bytes read.
        now: The checkpoint that is there now, if it is another one, or is to be recorded with digests that
            were not known.
        unproven: Files whose bytes no checksum covers.
    """

    proof: Proof
    findings: tuple[Finding, ...] = ()
    message: str = ""
    nbytes: int = 0
    now: CheckpointFacts | None = None
    unproven: tuple[str, ...] = ()


def prove(registered: CheckpointDetail, in_time: Callable[[], bool] = lambda: True) -> Proven:
    """Read all of a registered checkpoint. in_time: called often; reading stops when it returns False."""
    uri = registered.checkpoint.uri
    forget_small_reads()
    try:
        if not _is_there(uri):
            return Proven(Proof.GONE, message=f"{uri} does not exist")
        data = [f for f in registered.files if f.role == Role.DATA]
        if registered.checkpoint.kind == Kind.DERIVED and data and all(f.digest for f in data):
            return _by_digests(registered, in_time)
        return _of_source(registered, in_time)
    except NoTime:
        return Proven(Proof.STOPPED, message="the time budget was used up")
    except CkptError as error:
        if error.exit_code in (1, 3):
            return Proven(Proof.DAMAGED, findings_of(error), error.message)
        return Proven(Proof.UNREAD, message=f"{error.code}: {error.message}")


def _by_digests(registered: CheckpointDetail, in_time: Callable[[], bool]) -> Proven:
    uri, files = registered.checkpoint.uri, registered.files
    folder = folder_of(uri, files)
    compared = compare(folder, files, in_time, registered.checkpoint.created_at)
    recorded = {f.path for f in files}
    listed = [] if recorded == {split_url(uri)[1]} else _paths_in(folder)
    unproven = tuple(p for p in listed if p not in recorded) + tuple(
        f.path for f in files if f.digest is None
    )
    return _proven(compared.findings, unproven, compared.read)


def _of_source(registered: CheckpointDetail, in_time: Callable[[], bool]) -> Proven:
    row, files = registered.checkpoint, registered.files
    manifest = same_manifest(row.uri, row.manifest_digest, observe=True)
    if manifest is None:
        now = inspect(row.uri)
        digests = any(f.digest for f in files) and is_alike(now.root, files)  # else it is another checkpoint
        compared = compare(now.root, files, in_time, row.created_at) if digests else None
        resaved = is_resaved(now.root, files, (), row.created_at)
        if compared is not None and compared.findings and not resaved:
            return _proven(compared.findings, (), compared.read)
        return Proven(
            Proof.CHANGED, message=f"another checkpoint is at {row.uri} now", now=facts(now, row.uri)
        )
    compared = None
    if files and all(f.digest for f in files):
        compared = compare(manifest.root, files, in_time, row.created_at)
        if not compared.findings:
            recorded = {f.path for f in files}
            beside = tuple(f.path for f in manifest.beside if f.path not in recorded)
            return _proven((), beside, compared.read)
    return _by_checksums(registered, manifest, compared, in_time)


def _by_checksums(
    registered: CheckpointDetail, manifest: Manifest, compared: Compared | None, in_time: Callable[[], bool]
) -> Proven:
    """Verify the checksums of a format. compared: its files with their digests, if all have one."""

    def progress(_stage: str, _done: int, _total: int) -> None:
        if not in_time():
            raise NoTime

    row, files = registered.checkpoint, registered.files
    checked = validate(manifest, "bytes", progress=progress)
    digests = digests_read(manifest)
    if compared is None:
        compared = compare(manifest.root, files, in_time, row.created_at, digests)
    nbytes = checked.nbytes + compared.read
    now = facts(manifest, row.uri, digests, verified="bytes") if checked.ok else None
    if compared.resaved and are_of_first_sight(files) and checked.ok:
        message = f"the checkpoint at {row.uri} was saved once more since {row.created_at:%Y-%m-%d}"
        return Proven(Proof.CHANGED, message=message, nbytes=nbytes, now=now)
    report = with_digests(checked, compared)
    findings = tuple(f for f in report.findings if f.code != "unproven")
    unknown = [f.path for f in files if f.path not in compared.proven]
    proof = _proven(findings, report.unproven, nbytes, Proof.TENSORS if unknown else Proof.PROVEN)
    if proof.proof is Proof.TENSORS:
        message = f"the catalog had no digest of {len(unknown)} of its {count(len(files), 'file')}"
        proof = replace(proof, message=message)
    return proof if proof.proof is Proof.DAMAGED else replace(proof, now=now)


def _proven(
    findings: tuple[Finding, ...], unproven: tuple[str, ...], nbytes: int, best: Proof = Proof.PROVEN
) -> Proven:
    errors = [f for f in findings if f.severity == "error"]
    doubts = unproven_finding(unproven)
    if errors:
        return Proven(Proof.DAMAGED, (*findings, *doubts), errors[0].message, nbytes, unproven=unproven)
    proof = Proof.UNPROVEN if unproven else best
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
