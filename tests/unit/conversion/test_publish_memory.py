"""Test that finishing keeps only a few plans in memory, however many files there are."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.conversion import publish as finishing
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.plan import load_file_plan


@pytest.mark.parametrize("fingerprint", [True, False])
def test_plans_are_not_in_memory_all_at_once(fingerprint: bool, tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    save_file({f"layers.{n}.weight": torch.randn(24, 4) for n in range(10)}, source)
    seen: list[weakref.ref[Any]] = []
    alive = []

    def load(*given: Any) -> FilePlan:
        plan = load_file_plan(*given)
        seen.extend(
            map(weakref.ref, (plan, plan.columns.offset))
        )  # an array over its bytes keeps all of them
        alive.append(sum(ref() is not None for ref in seen))
        return plan

    with mock.patch.object(finishing, "load_file_plan", load):
        ckptcore.convert(
            str(source),
            str(tmp_path / "out"),
            verb="reshard",
            mesh="fsdp=8",
            to="dcp",
            settings=ckptcore.Settings(fingerprint=fingerprint),
        )
    assert len(alive) >= 8
    assert max(alive) <= 6  # of the one that is loaded, and of those that loops still have hold of
