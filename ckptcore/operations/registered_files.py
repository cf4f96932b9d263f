"""Compare the files at a place with the digests in the catalog.

Every file with a recorded digest is read once and compared: files with tensors, and the config, tokenizer,
index and card beside them. Files without a digest are reported as unproven, not as correct.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckptcore.catalog import open_catalog
from ckptcore.catalog.normalize import hex_digest
from ckptcore.catalog.training import LiveVerdict
from ckptcore.catalog.types import FileRow, Role
from ckptcore.checking.check import Report, unproven_finding
from ckptcore.checking.examine import inspect
from ckptcore.checking.source_stamps import settled_ctimes, stamps_now, take_ctimes, untouched
from ckptcore.conversion.registration import facts
from ckptcore.conversion.source_digests import NOT_THERE, Recorded, are_of_first_sight, differs, is_resaved
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, DamagedCheckpoint, Finding, SourceChanged, finding
from ckptcore.reading.file_digests import digests_like, file_digests
from ckptcore.store import Store, local_path, open_source_store, open_store, split_url
from ckptcore.store.file_status import NameKind
from ckptcore.store.listing import contents
from ckptcore.utils.part_digest import is_crc
from ckptcore.utils.text import listed

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

NONE_READ: Mapping[str, str] = MappingProxyType({})
_REPLACED = (
    "every file with tensors was written after {:%Y-%m-%d %H:%M} UTC, when they were recorded: if it was "
    "copied here, copy it again from where it was written; if it was saved here a second time, record that "
    "with `ckptcore catalog rebuild --digests`"
)
_OTHER_BYTES = frozenset({"digest-mismatch", "truncated-file", "oversized-file"})


class UnchangedFiles:
    """The identity of files before they are read: a later write, also of equal bytes, is noticed."""

    def __init__(self, store: Store, names: Sequence[str]) -> None:
        self._store, self._names = store, names
        self._ctimes, self._stamps = settled_ctimes(names, store), stamps_now(names, store)

    def require(self) -> None:
        """Raise `SourceChanged` if a file was written, replaced or touched since."""
        ctimes, stamps = take_ctimes(self._names, self._store), stamps_now(self._names, self._store)
        if stamps != self._stamps or not untouched(self._ctimes, ctimes):
            changed = [n for n in self._names if (ctimes[n], stamps[n]) != (self._ctimes[n], self._stamps[n])]
            raise SourceChanged(
                f"{listed(changed)} of {self._store.url} changed while it was read or sent",
                hint="run the command again when nothing writes there",
            )


class NoTime(Exception):
    """The caller's time budget is used up."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The result for files with digests.

    Attributes:
        findings: On files that are other ones.
        read: Bytes that were read for it.
        proven: The paths of files that match.
        resaved: Whether all files with tensors are other and newer ones: a training saved the step once more.
    """

    findings: tuple[Finding, ...]
    read: int
    proven: frozenset[str]
    resaved: bool = False


def compare(
    folder: str,
    files: Sequence[FileRow],
    in_time: Callable[[], bool] = lambda: True,
    recorded: datetime | None = None,
    digests: Mapping[str, str] = NONE_READ,
) -> Compared:
    """Read the files that have a digest, and compare them.

    Args:
        folder: Path or URL that the files' paths are relative to.
        files: The files of a checkpoint in the catalog.
        in_time: Called often; `NoTime` is raised as soon as it returns False.
        recorded: When the files were recorded, if it is known: the hint of those that differ says more then.
        digests: Path -> digest of files that were read just now; they are not read again.
    """

    def step(_nbytes: int) -> None:
        if not in_time():
            raise NoTime

    findings: list[Finding] = []
    proven = set()
    digested = [(file, file.digest) for file in files if file.digest is not None]
    with closing(open_store(folder)) as store:
        sizes = {file.path: _size_difference(file, store.size(file.path)) for file, _ in digested}
        unread = {
            file.path: (file.nbytes, digest)
            for file, digest in digested
            if sizes[file.path] is None
            and (file.path not in digests or is_crc(digests[file.path]) != is_crc(digest))
        }
        current = {**digests, **digests_like(store, unread, step)}
    for file, digest in digested:
        wrong = sizes[file.path]
        if wrong is None:
            if current[file.path] == digest:
                proven.add(file.path)
                continue
            wrong = differs(file, current[file.path])
        if wrong is not None:
            findings.append(wrong)
    resaved = is_resaved(folder, files, proven, recorded)
    if resaved and recorded is not None and local_path(folder) is not None:
        hint = _REPLACED.format(recorded)
        findings = [replace(f, hint=hint) if f.code in _OTHER_BYTES else f for f in findings]
    nbytes = sum(size for size, _ in unread.values())
    return Compared(tuple(findings), nbytes, frozenset(proven), resaved)


def against_catalog(manifest: Manifest, report: Report, uri: str, catalog_url: str | None) -> Report:
    """Add to a report of a deep check what the catalog's digests prove or refute.

    If another checkpoint is there than in the catalog, that is a finding of its own, and not damage: a place
    may be rewritten, and a training may save a step again. It is the same checkpoint if all files with
    tensors match, whatever happened to the index, or if they have their names and sizes: a header with a
    flipped byte reads as another checkpoint.

    Args:
        manifest: The checkpoint.
        report: The report of its check.
        uri: Its path or URL.
        catalog_url: URL of the catalog, or None for the default one.

    Returns:
        The report; unchanged if there is no catalog or the place is not in it.
    """
    registered = _known(uri, catalog_url)
    if registered is None or not any(f.digest for f in registered[1]):
        return report
    row, files = registered
    compared = compare(manifest.root, files, recorded=row.created_at, digests=digests_read(manifest))
    same = same_manifest(uri, row.manifest_digest, manifest) is not None
    data = {f.path for f in files if f.role == Role.DATA}
    if report.ok and compared.findings and _is_resaved(manifest, registered, compared.proven if same else ()):
        message = (
            f"the catalog has this checkpoint as it was saved before {row.created_at:%Y-%m-%d}; all of its "
            "files were written again, and are not compared with those digests"
        )
        return replace(report, findings=(*report.findings, finding("not-registered", "bytes", message)))
    if same or data <= compared.proven or is_alike(manifest.root, files):
        return with_digests(report, compared)
    message = (
        f"the catalog has {row.format} with manifest {row.manifest_digest[:16]}... at this place, "
        f"recorded on {row.created_at:%Y-%m-%d}; now there is {manifest.format} with "
        f"{manifest.digest[:16]}..., which is not compared with those digests"
    )
    return replace(report, findings=(*report.findings, finding("not-registered", "bytes", message)))


def with_digests(report: Report, compared: Compared) -> Report:
    """Add to a report what digests prove and refute. A refuted or missing file is damaged, not unproven."""
    decided = compared.proven | {f.file for f in compared.findings}
    unproven = tuple(path for path in report.unproven if path not in decided)
    findings = [f for f in report.findings if f.code != "unproven"]
    if not unproven:
        findings = [f for f in findings if f.code != "no-checksum"]  # digests of entire files prove more
    reported = {(f.code, f.file) for f in findings}
    findings += [f for f in compared.findings if (f.code, f.file) not in reported]
    return replace(report, findings=(*findings, *unproven_finding(unproven)), unproven=unproven)


def digests_read(manifest: Manifest) -> dict[str, str]:
    """Return the digests of a checkpoint's files that were read completely since its manifest was."""
    if manifest.sums is None:
        return {}
    with closing(open_source_store(manifest.root, manifest.versions)) as store:
        return file_digests(manifest, store)


def same_manifest(
    uri: str, digest: str, read: Manifest | None = None, *, observe: bool = False
) -> Manifest | None:
    """Read the manifest at a place, if it is the recorded one, with the options of the record.

    Args:
        uri: Path or URL.
        digest: The recorded manifest digest.
        read: The manifest, if it was read before.
        observe: See `ckptcore.checking.examine.inspect`.

    Returns:
        The manifest; None if another checkpoint is there.

    Raises:
        CkptError: The place cannot be read.
    """
    if read is not None and hex_digest(read.digest) == digest:
        return read
    # The digest depends on how the manifest was read, and the row does not say how: the usual way first.
    for recover, keep in ((False, False), (False, True), (True, False)):
        try:
            manifest = inspect(uri, recover, keep, observe=observe)
        except CkptError:
            if not recover and not keep:
                raise
            continue
        if hex_digest(manifest.digest) == digest:
            return manifest
    return None


def folder_of(uri: str, files: Sequence[FileRow]) -> str:
    """Return the folder to which the files' paths are relative: a checkpoint may be one file."""
    parent, name = split_url(uri)
    path = local_path(uri)
    if path is not None:
        return parent if path.is_file() else uri
    return parent if [f.path for f in files] == [name] else uri


def record_report(
    manifest: Manifest, uri: str, report: Report, catalog_url: str | None, live: LiveVerdict | None = None
) -> bool:
    """Record the result of a check; return whether it was recorded.

    It is not if files with the names and sizes in the catalog read as another checkpoint: they are damaged,
    and the damage must not replace the digests that prove it. The digests of a correct checkpoint's files are
    recorded as far as the check has read them. live: whether it is what its job had in memory.
    """
    with open_catalog(catalog_url) as catalog:
        registered = _registered_at(catalog, uri)
        if registered is not None and any(f.digest for f in registered[1] if f.role == Role.DATA):
            row, files = registered
            is_another = hex_digest(manifest.digest) != row.manifest_digest
            if is_another and is_alike(manifest.root, files) and not _is_resaved(manifest, registered):
                return False
        verified = report.level if report.ok else None
        digests = digests_read(manifest) if report.ok else NONE_READ
        checked = replace(facts(manifest, uri, digests, verified=verified), live=live)
        catalog.record_validation(checked, report.findings, level=report.level)
    return True


def _is_resaved(manifest: Manifest, registered: Recorded, same: Collection[str] = ()) -> bool:
    """Report whether a training has saved a source again at its place; see `is_resaved`."""
    row, files = registered
    return are_of_first_sight(files) and is_resaved(manifest.root, files, same, row.created_at)


def is_alike(folder: str, files: Sequence[FileRow]) -> bool:
    """Report whether a folder has files with tensors of the recorded names and sizes."""
    with closing(open_store(folder)) as store:
        return all(store.size(f.path) == f.nbytes for f in files if f.role == Role.DATA)


def _known(uri: str, catalog_url: str | None) -> Recorded | None:
    """Return the catalog's entry for a place, or None. An unreadable catalog fails later, on writing."""
    try:
        with open_catalog(catalog_url, create=False) as catalog:
            return _registered_at(catalog, uri)
    except CkptError:
        return None


def _registered_at(catalog: Catalog, uri: str) -> Recorded | None:
    registered = catalog.at(uri)
    return None if registered is None or registered[0].state in NOT_THERE else registered


def listing_findings(
    uri: str, files: Sequence[FileRow], other_size: Collection[str] = (), ignored: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Compare what is in a folder with its recorded files, by name and size; nothing is read.

    Args:
        uri: The folder.
        files: Its recorded files.
        other_size: Names whose sizes may differ.
        ignored: Names that may be there.
    """
    present = {name: s for name, s in contents(uri).items() if s.kind is not NameKind.FOLDER}
    recorded = {file.path: file for file in files}
    findings = [
        finding("added-file", "files", f"{name} ({status.kind}) was not recorded", file=name)
        for name, status in present.items()
        if name not in ignored and (name not in recorded or status.kind is not NameKind.FILE)
    ]
    for name, file in recorded.items():
        size = present[name].nbytes if name in present else None
        wrong = None if name in other_size and size is not None else _size_difference(file, size)
        findings += [] if wrong is None else [wrong]
    return tuple(findings)


def require_recorded(uri: str, findings: Sequence[Finding], consequence: str) -> None:
    """Raise `DamagedCheckpoint` if files of a folder are not the recorded ones.

    Args:
        uri: The folder.
        findings: Why they are not; empty if they are.
        consequence: What was not done, for the hint.
    """
    if findings:
        rest = f" and {len(findings) - 1} more" if findings[1:] else ""
        raise DamagedCheckpoint(
            f"{uri} is not what the catalog recorded: {findings[0].message}{rest}",
            hint=f"{consequence}; {findings[0].hint}",
            findings=tuple(findings),
        )


def _size_difference(file: FileRow, size: int | None) -> Finding | None:
    if size is None:
        return finding("missing-file", "files", f"{file.path} is missing", file=file.path)
    if size == file.nbytes:
        return None
    code = "truncated-file" if size < file.nbytes else "oversized-file"
    message = f"{file.path} has {size} bytes, the catalog records {file.nbytes}"
    return finding(code, "files", message, file=file.path)
