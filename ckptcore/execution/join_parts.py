"""Join the parts of a file, after verifying each against its receipt.

The shared file is read once. Every part must hash to its receipt. On the way, the checksums that the format
stores behind the data are filled in, and the file's own digest is computed. Only then does it get its name.

Of an upload no byte is read back: the store lists its parts, and each was sent with its checksum. The file's
digest is that of its parts. The upload itself is completed when the output is published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from ckptcore.errors import InternalError, OutputMismatch, UsageError
from ckptcore.execution.receipts import (
    Receipt,
    joint_name,
    read_receipt,
    receipt_name,
    seen_as,
    write_receipt,
)
from ckptcore.fingerprints.statistics import joined_parts
from ckptcore.planning.file_plan import FilePlan
from ckptcore.store import Store
from ckptcore.utils.crc32 import Runs

if TYPE_CHECKING:
    from ckptcore.store.objects.uploaded import Uploaded
    from ckptcore.store.objects.uploads import Uploads

_BLOCK = 4 << 20


def join_parts(plan: FilePlan, plan_digest: str, files: Store, receipts: Store) -> Receipt:
    """Join the parts of one file, and return its receipt. A file that has a receipt is left alone.

    Memory: one block.

    Raises:
        UsageError: Parts are missing, or their sources are not verified.
        OutputMismatch: The bytes are not those that were written.
        Busy: A part is still being written.
    """
    earlier_receipt = read_receipt(receipts, plan_digest, plan.index)
    if earlier_receipt is not None and files.size(plan.path) == earlier_receipt.nbytes:
        return earlier_receipt
    parts = _part_receipts(plan, plan_digest, receipts)
    path = joint_name(plan.path)
    if files.size(path) != plan.nbytes:
        raise OutputMismatch(
            f"{path} must have {plan.nbytes} bytes (got {files.size(path)})", hint="write its parts again"
        )
    # Before the file is read: a worker presumed dead may still write its part.
    writer = files.joint(path, plan.nbytes, alone=True)
    assert writer is not None  # the store has joint files, as its parts were written
    try:
        patches = dict(_patches(plan, parts))
        digest = _joined_digest(files, path, parts, patches)
        for first_byte, data in patches.items():
            writer.write(first_byte, data)
    except BaseException:
        writer.abort()
        raise
    writer.name(plan.path)
    return _joined(plan, plan_digest, receipts, parts, digest, files=files)


def join_uploads(plan: FilePlan, plan_digest: str, uploads: Uploads, receipts: Store) -> Receipt:
    """Join the parts of an upload, and return the file's receipt. Nothing is read back.

    Raises:
        UsageError: Parts are missing, or their sources are not verified.
        OutputMismatch: The store does not have the parts that were sent.
    """
    from ckptcore.store.objects.uploaded import joined  # a late import: local files have no uploads

    earlier_receipt = read_receipt(receipts, plan_digest, plan.index)
    if (
        earlier_receipt is not None
        and earlier_receipt.uploaded is not None
        and uploads.holds(earlier_receipt.uploaded)
    ):
        return earlier_receipt
    parts = _part_receipts(plan, plan_digest, receipts)
    sent = [part.uploaded for part in parts if part.uploaded is not None]
    if len(sent) != len(parts) or len({upload.token for upload in sent}) != 1:
        raise OutputMismatch(
            f"the parts of {plan.path} belong to several uploads", hint="run the command again"
        )
    upload = joined(sent)
    if not uploads.holds(upload):
        raise OutputMismatch(
            f"the store does not have the parts of {plan.path} that were sent", hint="run the command again"
        )
    return _joined(plan, plan_digest, receipts, parts, upload.digest, uploaded=upload)


def _joined(
    plan: FilePlan,
    plan_digest: str,
    receipts: Store,
    parts: Sequence[Receipt],
    digest: str,
    *,
    files: Store | None = None,
    uploaded: Uploaded | None = None,
) -> Receipt:
    """Record a file in place of its parts. files: where it is, unless it was uploaded."""
    verified = _verified_records(parts)
    receipt = Receipt(
        plan.index,
        plan.path,
        plan.nbytes,
        digest,
        round(sum(p.seconds for p in parts), 6),
        verified,
        len(plan.number) - verified,
        sums=_joined_sums(parts),
        statistics=joined_parts([part.statistics for part in parts]),
        uploaded=uploaded,
    )
    if files is not None:
        receipt = replace(receipt, stamp=seen_as(files, receipt))
    write_receipt(receipts, plan_digest, receipt)
    # After the file's own receipt: with neither, all parts would be written again.
    for part in parts:
        assert part.begin is not None
        receipts.remove(receipt_name(plan.index, (part.begin, part.begin + part.nbytes)))
    return receipt


def _part_receipts(plan: FilePlan, plan_digest: str, receipts: Store) -> list[Receipt]:
    """Return the receipts that tile the file. The folder may have parts of another cut, too."""
    by_begin: dict[int, list[Receipt]] = {}
    for name in receipts.list():
        head, _, rest = name.partition(".")
        bounds = rest.removesuffix(".json").split("-")
        if head != f"file-{plan.index:05d}" or len(bounds) != 2:
            continue
        receipt = read_receipt(receipts, plan_digest, plan.index, (int(bounds[0]), int(bounds[1])))
        if receipt is not None:
            by_begin.setdefault(int(bounds[0]), []).append(receipt)
    return _tiling(plan, by_begin)


def _tiling(plan: FilePlan, by_begin: dict[int, list[Receipt]]) -> list[Receipt]:
    tiling: list[Receipt] = []
    begin = 0
    while begin < plan.nbytes:
        candidates = by_begin.get(begin)
        if not candidates:
            raise UsageError(
                f"cannot join {plan.path}: no part that begins at byte {begin} was written",
                hint="write every part, then join them",
            )
        # Several cuts may have a part that begins here.
        part = max(candidates, key=lambda p: p.nbytes)
        if part.pending:
            raise UsageError(
                f"cannot join {plan.path}: bytes {begin} to {begin + part.nbytes} have unverified source "
                f"records (got {len(part.pending)})",
                hint="write the part again; existing bytes are reused",
            )
        tiling.append(part)
        begin += part.nbytes
    return tiling


def _patches(plan: FilePlan, parts: Sequence[Receipt]) -> Iterator[tuple[int, bytes]]:
    """Yield (first byte, bytes) of every checksum in the file."""
    slots: dict[int, Runs] = {}
    for part in parts:
        for tensor, offset, nbytes, piece_crc in part.crcs:
            slots.setdefault(tensor, Runs()).add(offset, nbytes, piece_crc)
    for literal in plan.literals:
        for position, slot in literal.crc_at:
            nbytes = plan.tensors[slot].nbytes
            crc: int | None = slots.get(slot, Runs()).total(nbytes) if nbytes else 0
            if crc is None:
                raise InternalError(f"the parts of {plan.path} do not add up to {plan.tensors[slot].name}")
            yield literal.start + position, crc.to_bytes(4, "little")


def _joined_digest(files: Store, path: str, parts: Sequence[Receipt], patches: dict[int, bytes]) -> str:
    """Return the digest of the file with its checksums filled in; verify every part on the way."""
    total, block = blake3(), bytearray(_BLOCK)
    waiting = sorted(patches.items())
    for part in parts:
        assert part.begin is not None
        part_hash, end = blake3(), part.begin + part.nbytes
        for start, until in pairwise([*range(part.begin, end, _BLOCK), end]):
            view = memoryview(block)[: until - start]
            files.read_into(path, start, view)
            part_hash.update(view)
            while waiting and waiting[0][0] < until:
                first, data = waiting.pop(0)
                inside = data[: until - first]
                view[first - start : first - start + len(inside)] = inside
                if len(inside) < len(data):  # the rest is in the next block
                    waiting.insert(0, (until, data[len(inside) :]))
            total.update(view)
        if part_hash.hexdigest() != part.digest:
            raise OutputMismatch(
                f"bytes {part.begin} to {end} of {path} must have BLAKE3 {part.digest} "
                f"(got {part_hash.hexdigest()})",
                hint="run the command again; it rewrites the part",
            )
    return total.hexdigest()


def _joined_sums(parts: Sequence[Receipt]) -> bytes | None:
    """Return the sum of what the parts add to the fingerprints, mod 2^64 (`ckptcore.fingerprints.sums`)."""
    total = np.zeros(0, "<u8")
    for n, part in enumerate(parts):
        if part.sums is None:
            return None
        lanes = np.frombuffer(part.sums, "<u8")
        total = total + lanes if n else lanes
    return total.tobytes()


def _verified_records(parts: Sequence[Receipt]) -> int:
    """Count the source records that at least one part has verified."""
    bits = [np.frombuffer(bytes.fromhex(part.proven), np.uint8) for part in parts]
    return int(np.unpackbits(np.bitwise_or.reduce(bits)).sum())
