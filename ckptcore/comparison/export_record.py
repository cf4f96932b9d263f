"""Compare an export with what a catalog recorded when it was written, where its source is gone.

That proves that nothing changed since. It does not prove the export right: the record says whether a
verification did, and when.
"""

from __future__ import annotations

from contextlib import closing

from ckptcore.checking.export_proof import NOT_DONE, VALUES, Check, Problem, failed
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import placed
from ckptcore.planning.export_source import ExportRecord
from ckptcore.reading.file_digests import has_digest
from ckptcore.store import open_store
from ckptcore.utils.workers import Progress, ProgressMeter


def against_record(
    record: ExportRecord, export: Manifest, reason: str, progress: Progress | None = None
) -> Check:
    """Compare every file of tensors with its recorded digest.

    Args:
        record: Of the catalog.
        export: The export as it is stored.
        reason: Why there is no source to compare it with.
        progress: Called while files are read.

    Returns:
        The check of values: failed where a file is another one; else not done, with what is proven.
    """
    data = [name for name in placed(export) if name in record.files]
    lacking = sum(name not in record.files for name in placed(export))
    meter = ProgressMeter(progress, "compare", sum(record.files[name][0] for name in data))
    changed, beside = list[Problem](), list[str]()
    with closing(open_store(export.root)) as store:
        for name, (nbytes, digest) in sorted(record.files.items()):
            if store.size(name) == nbytes and has_digest(store, name, nbytes, (digest,)):
                pass
            elif name in data:
                changed.append(Problem(name, "is not the file that was written: its BLAKE3 is another one"))
            else:
                beside.append(name)
            if name in data:
                meter.add(nbytes)
    verified = "nobody verified it then"
    if record.verdict is not None:
        when = f" on {record.verified:%Y-%m-%d}" if record.verified is not None else ""
        verified = f"its last verification{when} gave {record.verdict}"
    values = (
        ("files_unchanged", len(data) - len(changed)),
        ("files_without_digest", lacking),
        ("changed_beside", beside),
        ("recorded_fingerprint", record.fingerprint),
        ("recorded_verdict", record.verdict),
        ("recorded_at", record.verified.isoformat() if record.verified is not None else None),
    )
    if changed:
        return failed(VALUES, changed, **dict(values))
    if lacking or not data:
        return Check(VALUES, NOT_DONE, f"{reason}; the catalog has no digest of its files", (), values)
    of = "1 file of tensors is" if len(data) == 1 else f"{len(data)} files of tensors are"
    when = f" on {record.written:%Y-%m-%d}" if record.written is not None else ""
    other = f"; changed since: {', '.join(beside)}" if beside else ""
    summary = (
        f"{reason}. Proven by the catalog: {of} what was written{when}{other}. "
        f"Not proven again: that it is what the source held ({verified})"
    )
    return Check(VALUES, NOT_DONE, summary, (), values)
