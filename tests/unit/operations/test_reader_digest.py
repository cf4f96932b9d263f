"""The digest of readers and checks: of the code itself, not of a version number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptcore.operations import readiness
from ckptcore.operations.readiness import readers_digest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the rooms, with one module each."""
    for room in ("checking", "core", "encodings", "formats/dcp"):
        (tmp_path / room).mkdir(parents=True)
        (tmp_path / room / "module.py").write_text("A = 1\n")
    monkeypatch.setattr(readiness, "files", lambda name: tmp_path)
    readers_digest.cache_clear()
    yield tmp_path
    readers_digest.cache_clear()


def recomputed() -> str:
    readers_digest.cache_clear()
    return readers_digest()


def test_it_is_of_the_code(package: Path) -> None:
    first = recomputed()
    assert recomputed() == first
    (package / "formats" / "dcp" / "module.py").write_text("A = 2\n")
    second = recomputed()
    assert second != first
    (package / "formats" / "more.py").write_text("")
    third = recomputed()
    assert third not in (first, second)
    (package / "formats" / "module.pyc").write_text("cache")  # what Python writes is not code
    assert recomputed() == third


def test_it_is_of_the_packages(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = recomputed()
    monkeypatch.setattr(readiness, "_version", lambda name: "99")
    assert recomputed() != first


def test_of_this_build() -> None:
    assert len(readers_digest()) == 16
