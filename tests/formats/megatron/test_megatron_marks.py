"""Marks of Megatron-Core in large `.metadata` are found wherever a window ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptcore.formats.base import Source
from ckptcore.formats.megatron import config
from ckptcore.store import open_store


def source(folder: Path, data: bytes) -> Source:
    (folder / ".metadata").write_bytes(data)
    return Source(open_store(str(folder)), None, {".metadata": len(data)})


@pytest.mark.parametrize("before", [0, 285, 291, 292, 299, 300, 301, 595, 600])
def test_a_key_at_the_end_of_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    monkeypatch.setattr(config, "_WINDOW", 300)
    assert config.shard_keys(source(tmp_path, b"x" * before + b"rng/shard_0.1_2" + b"y" * 400))
    assert not config.shard_keys(source(tmp_path, b"x" * before + b"rng/shard_a" + b"y" * 400))
    assert config.marked(source(tmp_path, b"x" * before + b"all_local_plans" + b"y" * 400))
    assert not config.marked(source(tmp_path, b"x" * before + b"all_local_plan" + b"y" * 400))
