"""Record finished output files, so that a later run can reuse them.

A receipt is a small JSON file written after its output file is durable. It holds the plan's
digest and the file's BLAKE3 digest. A later run trusts it only after hashing the file again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import UsageError
from ckptcore.reading.file_digests import digest_of, has_digest
from ckptcore.store import Readable, Store, fetch, fetch_each
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parsing

if TYPE_CHECKING:
    from ckptcore.planning.plan import PlannedFile
    from ckptcore.store.objects.uploaded import Uploaded

_PACKED = ("sums", "statistics")  # bytes, hex in JSON
_AT_ONCE = 16  # receipts that are asked for together


@dataclass(frozen=True, slots=True)
class Receipt:
    """One finished output file.

    Attributes:
        index: As planned.
        path: As planned.
        nbytes: As planned; bytes of the part for a part.
        digest: BLAKE3 in hex, of the part for a part; None when digests were off.
        seconds: Wall time it took.
        verified: Source records whose CRC-32 was checked.
        unverified: Source records without a checksum.
        reused: Whether an earlier run wrote it.
        pending: Source records, by number, that other files read the rest of. A run that ends well leaves
            none.
        sums: What the file adds to the fingerprint of each tensor of its plan
            (`ckptcore.fingerprints.sums.pack`), or None when fingerprints were off.
        statistics: Of the box of each tensor in the file (`ckptcore.fingerprints.statistics.FileStatistics`),
            or None when they were off.
        begin: First byte of a part of a file (`ckptcore.execution.parts`); None for a complete file.
        crcs: (tensor, first byte in it, bytes, CRC-32) of a part's bytes of tensors whose checksums are in
            the file.
        proven: A bit for each source record of the file's plan, hex: those that the writer of a part has
            verified.
        stamp: Stamp of the written file (`seen_as`); None in receipts of versions that took none.
        uploaded: The upload of the file, or of its part; None for a file in the staging folder.
    """

    index: int
    path: str
    nbytes: int
    digest: str | None
    seconds: float
    verified: int = 0
    unverified: int = 0
    reused: bool = False
    pending: tuple[int, ...] = ()
    sums: bytes | None = None
    statistics: bytes | None = None
    begin: int | None = None
    crcs: tuple[tuple[int, int, int, int], ...] = ()
    proven: str = ""
    stamp: str | None = field(default=None, compare=False)
    uploaded: Uploaded | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; sums, statistics, parts and stamps are for receipts only."""
        form = asdict(replace(self, sums=None, statistics=None, uploaded=None))
        for name in (*_PACKED, "begin", "crcs", "proven", "stamp", "uploaded"):
            del form[name]
        return form

    def packed(self) -> dict[str, str]:
        """Return the sums and statistics that there are, in hex, for receipts."""
        return {name: value.hex() for name in _PACKED if (value := getattr(self, name)) is not None}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Receipt:
        """Return the receipt of a receipt file's JSON."""
        raw = {name: None if (text := form.get(name)) is None else bytes.fromhex(text) for name in _PACKED}
        crcs = tuple((t, o, n, c) for t, o, n, c in form.get("crcs", ()))
        parsed: dict[str, Any] = {"pending": tuple(form.get("pending", ())), **raw, "crcs": crcs}
        if form.get("uploaded") is not None:
            # A late import: local files have no uploads.
            from ckptcore.store.objects.uploaded import Uploaded

            parsed["uploaded"] = Uploaded.from_dict(form["uploaded"])
        return cls(**{**form, **parsed})


def write_receipt(store: Store, plan_digest: str, receipt: Receipt) -> None:
    """Record a finished file, or a finished part of one."""
    form = {"plan": plan_digest, **receipt.as_dict()}
    if receipt.stamp is not None:
        form["stamp"] = receipt.stamp
    if receipt.uploaded is not None:
        form["uploaded"] = receipt.uploaded.as_dict()
    form |= receipt.packed()
    part = None
    if receipt.begin is not None:
        part = (receipt.begin, receipt.begin + receipt.nbytes)
        form |= {"begin": receipt.begin, "crcs": receipt.crcs, "proven": receipt.proven}
    store.put(receipt_name(receipt.index, part), canonical_json(form))


def read_receipt(
    store: Store, plan_digest: str, index: int, part: tuple[int, int] | None = None
) -> Receipt | None:
    """Return a file's receipt under this plan, or None; ``part`` is bytes [begin, end) of it."""
    name = receipt_name(index, part)
    data = fetch(store, name)
    if data is None:
        return None
    return _parsed(data, plan_digest, index, part)


def read_receipts(store: Store, plan_digest: str, indices: Sequence[int]) -> Iterator[Receipt | None]:
    """Yield what `read_receipt` returns for each file, in order; on S3 several are asked for at once."""
    for start in range(0, len(indices), _AT_ONCE):
        batch = indices[start : start + _AT_ONCE]
        for index, data in zip(batch, fetch_each(store, list(map(receipt_name, batch))), strict=True):
            yield None if data is None else _parsed(data, plan_digest, index)


def _parsed(data: bytes, plan_digest: str, index: int, part: tuple[int, int] | None = None) -> Receipt | None:
    try:
        with parsing("a receipt"):
            form = load_json_object(data)
            if form.pop("plan", None) != plan_digest:
                return None
            receipt = Receipt.from_dict(form)
    except InvalidText:  # truncated by a crash: the file is written again
        return None
    return (
        receipt if (receipt.index, receipt.begin) == (index, part[0] if part is not None else None) else None
    )


def every_receipt(store: Store, plan_digest: str, files: Iterable[PlannedFile]) -> tuple[Receipt, ...]:
    """Return the receipts of these files of a plan; raises `UsageError` for a file that is not written."""
    written, planned = [], list(files)
    receipts = read_receipts(store, plan_digest, [file.index for file in planned])
    for file, receipt in zip(planned, receipts, strict=True):
        if receipt is None:
            raise UsageError(f"{file.path} has not been written yet", hint="run execute for every file first")
        written.append(receipt)
    return tuple(written)


def seen_as(files: Readable, receipt: Receipt) -> str | None:
    """Return a stamp of a receipt's very file, which differs even for equal bytes; None if missing."""
    if receipt.begin is None:
        return files.stamp(receipt.path)
    # For a file of parts only the inode: size and times change while others write.
    return (files.stamp(joint_name(receipt.path)) or "").rpartition(", ")[2] or None


def is_intact(files: Readable, receipt: Receipt) -> bool:
    """Report whether the file, or the part, exists and has the receipt's digest. Without one it is False."""
    if receipt.digest is None:
        return False
    if receipt.begin is not None:
        path, end = joint_name(receipt.path), receipt.begin + receipt.nbytes
        reaches_end = (files.size(path) or 0) >= end
        return reaches_end and digest_of(files, path, receipt.nbytes, receipt.begin) == receipt.digest
    if files.size(receipt.path) != receipt.nbytes:
        return False
    return has_digest(files, receipt.path, receipt.nbytes, (receipt.digest,))


def receipt_name(index: int, part: tuple[int, int] | None = None) -> str:
    """Return the name of the receipt of a file, or of a part [begin, end) of it."""
    return (
        f"file-{index:05d}.json" if part is None else f"file-{index:05d}.{part[0]:015d}-{part[1]:015d}.json"
    )


def joint_name(path: str) -> str:
    """Return the name of a file while its parts are written."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}.joint" if folder else f".{name}.joint"
