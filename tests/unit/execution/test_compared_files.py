"""A file that is compared instead of written: the first byte that differs is found in any block of 4 MiB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptcore.execution.reuse import CompareWriter
from ckptcore.store import open_store

MIB = 1 << 20
SIZE = 9 * MIB + 5


@pytest.mark.parametrize("wrong", [(), (0,), (4 * MIB - 1,), (4 * MIB, 5 * MIB), (8 * MIB + 1,), (SIZE - 1,)])
def test_the_first_byte_that_differs(tmp_path: Path, wrong: tuple[int, ...]) -> None:
    data = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    data[list(wrong)] ^= 1
    writer = CompareWriter(open_store(str(tmp_path)), "file")
    for begin, end in ((0, 7), (7, SIZE), (SIZE, SIZE)):
        writer.write(begin, memoryview(data[begin:end]))
    assert writer.differs is bool(wrong)
    if wrong:
        assert f"at byte {wrong[0]} " in writer.mismatch().message
