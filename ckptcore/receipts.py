"""Receipts: which output files are finished, and how can that be trusted?

A receipt is a small JSON file written after its output file is durable. It names the plan's
digest and the file's BLAKE3 digest; a later run believes it only after hashing the file again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from blake3 import blake3

from ckptcore.frame import canonical_json
from ckptcore.store import Readable, Store

_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Receipt:
    """One finished output file.

    index, path, nbytes: as planned. digest: BLAKE3 hex, or None when digests were off.
    seconds: wall time it took. verified, unverified: source records whose CRC-32 was checked, and
    those that have none. reused: an earlier run had written it. pending: source records, by their
    numbers, that other files read the rest of: a run that ends well leaves none. sums: what the file adds
    to the fingerprint of each tensor of its plan (`ckptcore.fingerprint.pack`), or None when fingerprints
    were off.
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

    def as_dict(self) -> dict[str, Any]:
        """The JSON face; sums are for receipts only."""
        form = asdict(replace(self, sums=None))
        del form["sums"]
        return form

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Receipt:
        sums = form.get("sums")
        held = None if sums is None else bytes.fromhex(sums)
        return cls(**{**form, "pending": tuple(form.get("pending", ())), "sums": held})


def write_receipt(store: Store, plan_digest: str, receipt: Receipt) -> None:
    """Records a finished file."""
    form = {"plan": plan_digest, **receipt.as_dict()}
    if receipt.sums is not None:
        form["sums"] = receipt.sums.hex()
    store.put(receipt_name(receipt.index), canonical_json(form))


def read_receipt(store: Store, plan_digest: str, index: int) -> Receipt | None:
    """The receipt of a file under this very plan, or None."""
    size = store.size(receipt_name(index))
    if size is None:
        return None
    try:
        form = json.loads(store.read(receipt_name(index), 0, size))
        if form.pop("plan", None) != plan_digest:
            return None
        return Receipt.from_dict(form)
    except (ValueError, TypeError):  # cut off by a crash: the file is written again
        return None


def is_intact(files: Readable, receipt: Receipt) -> bool:
    """Whether the file is there and has the receipt's digest. Without a digest nothing is proven."""
    if receipt.digest is None or files.size(receipt.path) != receipt.nbytes:
        return False
    return digest_of(files, receipt.path, receipt.nbytes) == receipt.digest


def digest_of(files: Readable, path: str, nbytes: int) -> str:
    """BLAKE3 of a file, hex. Memory: one block."""
    whole, block = blake3(), bytearray(min(_BLOCK, max(nbytes, 1)))
    for at in range(0, nbytes, len(block)):
        view = memoryview(block)[: min(len(block), nbytes - at)]
        files.read_into(path, at, view)
        whole.update(view)
    return whole.hexdigest()


def receipt_name(index: int) -> str:
    """Name of a file's receipt."""
    return f"file-{index:05d}.json"
