"""Join the parts of an upload that several workers sent, after comparing them with what the store has.

No byte is read back: the store lists its parts, and each was sent with its checksum. The file's digest is
that of its parts. The upload itself is completed when the output is published.
"""

from __future__ import annotations

from ckptcore.errors import OutputMismatch
from ckptcore.execution.join_parts import joined_sums, part_receipts, verified_records
from ckptcore.execution.receipts import Receipt, read_receipt, receipt_name, write_receipt
from ckptcore.fingerprints.statistics import joined_parts
from ckptcore.planning.file_plan import FilePlan
from ckptcore.store import Store
from ckptcore.store.objects.uploaded import joined
from ckptcore.store.objects.uploads import Uploads


def join_uploads(plan: FilePlan, plan_digest: str, uploads: Uploads, receipts: Store) -> Receipt:
    """Join the parts of an upload, and return the file's receipt. Nothing is read back.

    Raises:
        UsageError: Parts are missing, or their sources are not verified.
        OutputMismatch: The store does not have the parts that were sent.
    """
    earlier_receipt = read_receipt(receipts, plan_digest, plan.index)
    if (
        earlier_receipt is not None
        and earlier_receipt.uploaded is not None
        and uploads.holds(earlier_receipt.uploaded)
    ):
        return earlier_receipt
    parts = part_receipts(plan, plan_digest, receipts)
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
    verified = verified_records(parts)
    receipt = Receipt(
        plan.index,
        plan.path,
        plan.nbytes,
        upload.digest,
        round(sum(p.seconds for p in parts), 6),
        verified,
        len(plan.number) - verified,
        sums=joined_sums(parts),
        statistics=joined_parts([part.statistics for part in parts]),
        uploaded=upload,
    )
    write_receipt(receipts, plan_digest, receipt)
    # After the file's own receipt: with neither, all parts would be written again.
    for part in parts:
        assert part.begin is not None
        receipts.remove(receipt_name(plan.index, (part.begin, part.begin + part.nbytes)))
    return receipt
