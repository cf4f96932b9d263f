"""Registered: are the files at a place, byte for byte, those that the catalog knows?

Every file whose BLAKE3 is recorded is read once and compared: those that hold tensors, and config, tokenizer,
index and card beside them. What no digest covers is called unproven, not right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blake3 import blake3

from ckptcore.catalog import open_catalog
from ckptcore.catalog.normalize import hex_digest
from ckptcore.catalog.types import CheckpointRow, FileRow, Role, State
from ckptcore.checking.check import Report, unproven_finding
from ckptcore.checking.examine import inspect
from ckptcore.conversion.registration import facts
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, Finding, finding
from ckptcore.store import Store, local_path, open_store, split_url

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_BLOCK = 8 << 20
_HINT = (
    "copy it again from where it was written; what was changed on purpose is recorded by "
    "`ckptcore catalog rebuild --digests`"
)


class NoTime(Exception):
    """The caller's time is over."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of files with digests. read: bytes. proven: the paths that are as they were recorded."""

    findings: tuple[Finding, ...]
    read: int
    proven: frozenset[str]


def compare(uri: str, files: Sequence[FileRow], in_time: Callable[[], bool] = lambda: True) -> Compared:
    """Reads the files that have a digest. in_time: asked often; raises `NoTime` when it says no."""
    found: list[Finding] = []
    nbytes, proven = 0, set()
    with closing(open_store(folder_of(uri, files))) as store:
        for file in files:
            if file.digest is None:
                continue
            wrong = _size_finding(store, file)
            if wrong is None:
                digest = _file_digest(store, file, in_time)
                nbytes += file.nbytes
                if digest == file.digest:
                    proven.add(file.path)
                    continue
                told = f"{file.path} hashes to {digest[:16]}..., {file.digest[:16]}... was recorded"
                wrong = finding("digest-mismatch", "bytes", told, file=file.path, hint=_HINT)
            found.append(wrong)
    return Compared(tuple(found), nbytes, frozenset(proven))


def against_catalog(manifest: Manifest, report: Report, uri: str, catalog_url: str | None) -> Report:
    """A report of a deep check, with what the catalog's digests prove or refute; as it is where no catalog is
    there, or it does not know the place.

    Where another checkpoint is there than the catalog knows, it says so and calls nothing damaged: a place
    may be written again. It is the same one when all its tensors' files are, whatever became of the index,
    and when they have their names and sizes: a header with a flipped byte reads as another checkpoint.
    """
    known = _known(uri, catalog_url)
    if known is None or not any(f.digest for f in known[1]):
        return report
    row, files = known
    compared = compare(uri, files)
    same = same_manifest(uri, row.manifest_digest, manifest) is not None
    data = {f.path for f in files if f.role == Role.DATA}
    if same or data <= compared.proven or _is_alike(uri, files):
        return with_digests(report, compared)
    told = (
        f"the catalog knows {row.format} with the manifest {row.manifest_digest[:16]}... at this place, "
        f"recorded on {row.created_at:%Y-%m-%d}; {manifest.format} with {manifest.digest[:16]}... is there, "
        "and is not compared with its digests"
    )
    return replace(report, findings=(*report.findings, finding("not-registered", "bytes", told)))


def with_digests(report: Report, compared: Compared) -> Report:
    """A report with what digests prove and refute. A refuted or missing file is damaged, not unproven."""
    settled = compared.proven | {f.file for f in compared.findings}
    unproven = tuple(path for path in report.unproven if path not in settled)
    told = [f for f in report.findings if f.code != "unproven"]
    if not unproven:
        told = [f for f in told if f.code != "no-checksum"]  # digests of whole files prove more
    known = {(f.code, f.file) for f in told}
    told += [f for f in compared.findings if (f.code, f.file) not in known]
    return replace(report, findings=(*told, *unproven_finding(unproven)), unproven=unproven)


def same_manifest(uri: str, digest: str, read: Manifest | None = None) -> Manifest | None:
    """The manifest as it was recorded, which may have been with other options; None where it is another.

    read: as it was read already. Raises what reading raises.
    """
    if read is not None and hex_digest(read.digest) == digest:
        return read
    for recover, keep in ((False, False), (False, True), (True, False)):
        try:
            found = inspect(uri, recover, keep)
        except CkptError:
            if not recover and not keep:
                raise
            continue
        if hex_digest(found.digest) == digest:
            return found
    return None


def folder_of(uri: str, files: Sequence[FileRow]) -> str:
    """The folder that the files' paths are relative to: a checkpoint may be one file."""
    parent, name = split_url(uri)
    path = local_path(uri)
    if path is not None:
        return parent if path.is_file() else uri
    return parent if [f.path for f in files] == [name] else uri


def record_report(manifest: Manifest, uri: str, report: Report, catalog_url: str | None) -> bool:
    """Records what a check found, and gives whether it did.

    Nothing is recorded where files of the names and sizes that the catalog has digests of read as another
    checkpoint: damage must not take the place of what proves it.
    """
    with open_catalog(catalog_url) as catalog:
        known = _registered_at(catalog, uri)
        if known is not None and any(f.digest for f in known[1] if f.role == Role.DATA):
            row, files = known
            if hex_digest(manifest.digest) != row.manifest_digest and _is_alike(uri, files):
                return False
        verified = report.level if report.ok else None
        checked = facts(manifest, uri, verified=verified)
        catalog.record_validation(checked, report.findings, level=report.level)
    return True


def _is_alike(uri: str, files: Sequence[FileRow]) -> bool:
    with closing(open_store(folder_of(uri, files))) as store:
        return all(store.size(f.path) == f.nbytes for f in files if f.role == Role.DATA)


def _known(uri: str, catalog_url: str | None) -> tuple[CheckpointRow, tuple[FileRow, ...]] | None:
    """What the catalog says is at a place, or None. One that cannot be read fails when it is written to."""
    try:
        with open_catalog(catalog_url, create=False) as catalog:
            return _registered_at(catalog, uri)
    except CkptError:
        return None


def _registered_at(catalog: Catalog, uri: str) -> tuple[CheckpointRow, tuple[FileRow, ...]] | None:
    found = catalog.at(uri)
    return None if found is None or found[0].state in (State.REPLACED, State.DELETED) else found


def _size_finding(store: Store, file: FileRow) -> Finding | None:
    size = store.size(file.path)
    if size is None:
        return finding("missing-file", "files", f"{file.path} is not there", file=file.path)
    if size == file.nbytes:
        return None
    code = "truncated-file" if size < file.nbytes else "oversized-file"
    told = f"{file.path} has {size} bytes, {file.nbytes} were recorded"
    return finding(code, "files", told, file=file.path)


def _file_digest(store: Store, file: FileRow, in_time: Callable[[], bool]) -> str:
    whole = blake3()
    for at in range(0, file.nbytes, _BLOCK):
        if not in_time():
            raise NoTime
        whole.update(store.read(file.path, at, min(_BLOCK, file.nbytes - at)))
    return whole.hexdigest()
