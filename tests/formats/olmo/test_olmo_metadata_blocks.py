"""The storage class in `.metadata` is found wherever it is, also between two blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptcore.formats.base import Source
from ckptcore.formats.olmo import core
from ckptcore.store import open_store


def found(folder: Path, data: bytes) -> bool:
    (folder / "__0_0.distcp").touch()
    (folder / ".metadata").write_bytes(data)
    store = open_store(str(folder))
    return core._written_by_olmo_core(Source(store, None, store.list()))


@pytest.mark.parametrize("block", [50, core._BLOCK])
@pytest.mark.parametrize("name", [core._OURS, core._TORCHS, core._OURS[1:]])
def test_a_name_in_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, name: bytes
) -> None:
    monkeypatch.setattr(core, "_BLOCK", block)
    for before in [0, 1, block - len(name), *range(block - 40, block + 2, 13), 2 * block - 9]:
        data = b"." * before + name + b"." * 60
        assert found(tmp_path, data) == (core._OURS in data), before
        assert found(tmp_path, data + core._TORCHS) == (core._OURS in data), before
