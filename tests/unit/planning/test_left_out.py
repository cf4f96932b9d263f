"""An export says what it leaves out, and asks about what the optimizer trains elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.errors import AmbiguousModel, Finding
from ckptcore.planning.compose import compose
from ckptcore.planning.request import Request

WEIGHTS = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(3)}
PROJ = {"proj.weight": torch.ones(4, 4)}


def adam(**parts: dict[str, torch.Tensor]) -> dict[str, Any]:
    named = {f"{part}.{n}" if part else n: t for part, tensors in parts.items() for n, t in tensors.items()}
    return {
        "state": {n: {"exp_avg": t, "exp_avg_sq": t} for n, t in named.items()},
        "param_groups": [{"lr": 0.1}],
    }


def save(tmp_path: Path, state: dict[str, Any]) -> str:
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    return str(tmp_path / "ckpt")


def findings(source: str, **options: Any) -> dict[str, Finding]:
    request = Request(source, f"{source}.out", "export", **options)
    found = compose(request, ckptcore.open(source)).warnings
    return {w.message.split(" (")[0]: w for w in found if w.code.startswith("left-out")}


@pytest.fixture
def trained(tmp_path: Path) -> str:
    """A model beside a module that is called as trainers call their scheduler."""
    state = {
        "model": WEIGHTS,
        "scheduler": {**PROJ, "last_epoch": 3},
        "optim": adam(**{"": WEIGHTS}, scheduler=PROJ),
    }
    return save(tmp_path, state)


def test_the_findings_name_what_is_left_out(tmp_path: Path) -> None:
    state = {
        "model": WEIGHTS,
        "optim": {**adam(**{"": WEIGHTS}), "ema": {"0": torch.ones(2, 3)}},
        "lr_scheduler": {"last_epoch": 3, "base_lrs": [0.1]},
        "sampler": PROJ,
        "args": {"lr": 0.1},
    }
    source = save(tmp_path, state)
    found = findings(source)
    state_of_training, average, unknown = found.values()
    assert (state_of_training.code, state_of_training.severity) == ("left-out", "info")
    assert state_of_training.message == (
        "left out of the export: optimizer (4 tensors, 72 B, 1 value); scheduler (2 values); other (1 value)"
    )
    assert (average.code, average.severity) == ("left-out-weights", "warning")
    assert average.message == "left out, an average of weights (1 tensor, 24 B): optim.ema.0"
    assert unknown.message == (
        "left out, outside of the model, and no training state (1 tensor, 64 B): sampler.proj.weight"
    )
    # What globs leave out, the user knows.
    assert [w.message for w in findings(source, exclude=("sampler.*", "optim.ema.*")).values()] == [
        state_of_training.message
    ]


def test_copies_and_small_tensors_are_no_warning(tmp_path: Path) -> None:
    state = {"model": WEIGHTS, **{f"lp/{n}": t.bfloat16() for n, t in WEIGHTS.items()}}
    state |= {"best": torch.ones(()), "ids": torch.arange(9), "odd": torch.ones(2, 2)}  # type: ignore[dict-item]
    request = Request(save(tmp_path, state), str(tmp_path / "out"), "export", model_prefix="model.")
    manifest = ckptcore.open(request.source)
    messages = [w.message for w in compose(request, manifest).warnings if w.code.startswith("left-out")]
    assert messages == [
        "left out of the export: copies of the model (2 tensors, 18 B); other (2 tensors, 76 B)",
        "left out, outside of the model, and no training state (1 tensor, 16 B): odd",
    ]


def test_a_model_alone_leaves_nothing_out(tmp_path: Path) -> None:
    assert findings(save(tmp_path, {"model": WEIGHTS})) == {}


def test_a_trained_tensor_outside_is_a_question(trained: str) -> None:
    with pytest.raises(AmbiguousModel) as caught:
        findings(trained)
    assert caught.value.message == (
        "the optimizer has state for 1 tensor outside of model.: scheduler.proj.weight"
    )
    assert "--exclude 'scheduler.proj.weight'" in caught.value.hint
    assert "--model-prefix ''" in caught.value.hint
    assert "--model-prefix model." in caught.value.hint


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--exclude", "scheduler.proj.weight"], [*WEIGHTS]),
        (["--include", "model.*"], [*WEIGHTS]),
        (["--model-prefix", "model."], [*WEIGHTS]),
        (["--model-prefix", "", "--rename", "model.="], [*WEIGHTS, "scheduler.proj.weight"]),
    ],
)
def test_each_answer_decides(trained: str, options: list[str], names: list[str], tmp_path: Path) -> None:
    common = ["export", trained, str(tmp_path / "out"), "--names", "stored", "--no-catalog"]
    assert run(common) == 12
    assert run([*common, *options]) == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert sorted(load_file(file)) == sorted(names)


def test_below_the_top_level_it_is_in_the_model(tmp_path: Path) -> None:
    source = save(
        tmp_path,
        {
            **WEIGHTS,
            "scheduler.proj.weight": PROJ["proj.weight"],
            "optim": adam(**{"": WEIGHTS}, scheduler=PROJ),
        },
    )
    ckptcore.convert(source, str(tmp_path / "out"), verb="export", names="stored")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert sorted(load_file(file)) == [*sorted(WEIGHTS), "scheduler.proj.weight"]
