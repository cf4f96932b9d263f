"""Renames that apply to no tensor are reported, and patterns that are none are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptcore
from ckptcore.errors import UsageError


@pytest.fixture
def source(tmp_path: Path) -> str:
    names = ("module.model.a.w", "module.model.b.w", "optimizer.state.x")
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "source.pt")
    return str(tmp_path / "source.pt")


def unused(source: str, tmp_path: Path, **options: Any) -> list[str]:
    result = ckptcore.convert(source, str(tmp_path / "out"), **options)
    return [w.message for w in result.warnings if w.code == "unused-option"]


@pytest.mark.parametrize(
    ("verb", "rename", "expected"),
    [
        ("consolidate", [("module.modle.", "")], ["--rename module.modle.= matches no tensor"]),
        ("consolidate", [("module.", ""), ("model.a", "c")], []),
        ("consolidate", [("model.a", "c")], ["--rename model.a= matches no tensor"]),
        ("consolidate", [("*.w", "*.weight"), ("*.bias", "*.b")], ["--rename *.bias= matches no tensor"]),
        ("consolidate", [("optimizer.", "optimizer.")], []),  # it fits, and changes nothing
        ("export", [("model.a", "c")], []),  # behind the wrapper
        ("export", [("module.model.a", "c")], ["--rename module.model.a= matches no tensor"]),
    ],
)
def test_a_rename_without_effect_is_reported(
    verb: str, rename: list[tuple[str, str]], expected: list[str], source: str, tmp_path: Path
) -> None:
    assert unused(source, tmp_path, verb=verb, rename=rename) == expected


def test_a_rename_of_what_is_left_out_is_reported(source: str, tmp_path: Path) -> None:
    found = unused(source, tmp_path, rename=[("optimizer.", "o.")], exclude=["optimizer.*"])
    assert found == ["--rename optimizer.= matches no tensor"]


def test_a_pattern_of_two_stars_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"at most one \* \(got 2\)"):
        ckptcore.convert(source, str(tmp_path / "out"), rename=[("a*b*", "c")])
    assert not (tmp_path / "out").exists()
