"""Room for the output: XFS counts removed files as free only a moment later."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptcore.conversion.staging import local_staging as module
from ckptcore.conversion.staging.open_staging import open_staging
from ckptcore.conversion.staging.staging import Staging
from ckptcore.errors import DiskFull


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Staging, list[int]]:
    monkeypatch.setattr(module, "_FREED_WITHIN", (0.0, 0.0))
    staging, free = open_staging(str(tmp_path / "out")), [10, 10, 10]
    monkeypatch.setattr(type(staging.root), "free_bytes", lambda _: free.pop(0))
    return staging, free


def test_what_was_removed_may_be_free_a_moment_later(looks: tuple[Staging, list[int]]) -> None:
    staging, free = looks
    free[1] = 100
    staging.require_room(100)
    assert len(free) == 1


def test_a_full_disk_is_refused_with_both_numbers(looks: tuple[Staging, list[int]]) -> None:
    staging, free = looks
    with pytest.raises(DiskFull) as caught:
        staging.require_room(11)
    assert (caught.value.values["needed"], caught.value.values["free"]) == (11, 10)
    assert free == []
