"""Names of files and folders that trainers give a step, and names with a number that is none."""

from __future__ import annotations

import pytest

from ckptcore.utils.step_names import step_of

STEPS = {
    "step-300": 300,
    "step300-unsharded": 300,
    "iter_0000300": 300,
    "global_step_300": 300,
    "checkpoint-300": 300,
    "300": 300,
    "00300": 300,
    "300.pt": 300,
    "300-bf16": 300,
    "300.consolidated": 300,
    "epoch=1-step=300.ckpt": 300,
    "epoch_1": 1,
    "epoch_1_last": 1,
    "ep0-ba300-rank0.pt": 300,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step(name: str) -> None:
    assert step_of(name) == STEPS[name]


@pytest.mark.parametrize(
    "name", ["1_Pooling", "24_legacy_x", "7_b", "2026_11_30", "7b", "300x", "model", f"{10**19}", ""]
)
def test_a_number_that_is_no_step(name: str) -> None:
    assert step_of(name) is None
