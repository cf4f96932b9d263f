"""Receipts of any number of files, and digests of files of any number of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from ckptcore.execution import receipts
from ckptcore.execution.receipts import Receipt, is_intact, read_receipt, read_receipts, write_receipt
from ckptcore.reading import file_digests
from ckptcore.store import open_store

REAL_BLOCK, REAL_COUNT = file_digests.BLOCK, receipts._AT_ONCE


@pytest.mark.parametrize("count", [0, 1, REAL_COUNT - 1, REAL_COUNT, REAL_COUNT + 1, 3 * REAL_COUNT + 2])
def test_receipts_asked_for_together_are_those_of_one_by_one(tmp_path: Path, count: int) -> None:
    store = open_store(str(tmp_path))
    indices = [7 * n % (count + 1) for n in range(count)]  # any order, and none twice for these counts
    for n in indices[::2]:
        write_receipt(store, "plan", Receipt(n, f"f-{n}", n, f"{n:064x}", 0.0))
    found = list(read_receipts(store, "plan", indices))
    assert found == [read_receipt(store, "plan", n) for n in indices]
    assert [n for n, receipt in zip(indices, found, strict=True) if receipt is not None] == indices[::2]
    assert list(read_receipts(store, "another plan", indices)) == [None] * count


@pytest.mark.parametrize("block", [10, REAL_BLOCK])
@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_digest_is_of_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, blocks: int, extra: int
) -> None:
    monkeypatch.setattr(file_digests, "BLOCK", block)
    nbytes = blocks * block + extra
    data = bytearray((b"abcdefg" * (nbytes // 7 + 1))[:nbytes])
    file = tmp_path / "file"
    file.write_bytes(data)
    receipt = Receipt(0, "file", nbytes, blake3(data).hexdigest(), 0.0)
    store = open_store(str(tmp_path))
    assert is_intact(store, receipt)
    data[-1] ^= 1
    file.write_bytes(data)
    assert not is_intact(store, receipt)
