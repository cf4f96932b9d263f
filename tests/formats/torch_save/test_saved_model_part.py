"""The model part of a dict is the same, whether torch.save or torch.distributed.checkpoint wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptcore
from ckptcore.cli.main import run

MODEL = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.ones(2), "bn.count": torch.tensor(3)}
EMA = {name: value + 1 for name, value in MODEL.items()}
SEQUENCE = {f"{n}.weight": torch.full((3, 3), float(n)) for n in range(3)}
ADAM = {
    "state": {n: {"exp_avg": torch.ones(2), "step": torch.tensor(1.0)} for n in range(2)},
    "param_groups": [{"lr": 0.1, "params": [0, 1]}],
}
# Form -> (saved dict, the model, or None where it is a question).
FORMS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor] | None]] = {
    "tutorial": ({"model_state_dict": MODEL, "optimizer_state_dict": ADAM, "loss": torch.tensor(0.4)}, MODEL),
    "model and optimizer": ({"model": MODEL, "optimizer": ADAM, "step": 7}, MODEL),
    "model": ({"model": MODEL}, MODEL),
    "state_dict": ({"state_dict": MODEL}, MODEL),
    "nnUNet": ({"network_weights": MODEL, "optimizer_state": ADAM, "current_epoch": 3}, MODEL),
    "torchvision": ({"model": MODEL, "optimizer": ADAM, "epoch": 1, "model_ema": EMA}, MODEL),
    "BasicSR": ({"params": MODEL, "params_ema": EMA}, None),
    "nanoGPT": ({"model": MODEL, "optimizer": ADAM, "best_val_loss": torch.tensor(1.2)}, MODEL),
    "GAN": ({"generator": MODEL, "discriminator": EMA, "optim_g": ADAM, "optim_d": ADAM}, None),
    "positions": ({"model": SEQUENCE, "optimizer": ADAM}, SEQUENCE),
    "flat positions": (SEQUENCE, SEQUENCE),
    "flat": (MODEL, MODEL),
    "net": ({"net": MODEL, "acc": 90.0}, MODEL),
    "model in model": (
        {"model": {f"model.{name}": value for name, value in MODEL.items()}, "optimizer": ADAM},
        {f"model.{name}": value for name, value in MODEL.items()},
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("writer", ["torch", "dcp"])
def test_one_rule(form: str, writer: str, tmp_path: Path) -> None:
    tree, model = FORMS[form]
    source = tmp_path / ("saved.pt" if writer == "torch" else "saved")
    if writer == "torch":
        torch.save(tree, source)
    else:
        dcp.save(tree, checkpoint_id=source, no_dist=True)
    code = run(["export", str(source), str(tmp_path / "out"), "--config", "none"])
    assert code == (12 if model is None else 0)
    if model is not None:
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert tensors.keys() == model.keys()
        assert all(torch.equal(tensors[name], model[name]) for name in model)


def test_a_named_part(tmp_path: Path) -> None:
    torch.save(FORMS["BasicSR"][0], tmp_path / "saved.pt")
    arguments = ["--config", "none", "--model-prefix", "params_ema"]
    assert run(["export", str(tmp_path / "saved.pt"), str(tmp_path / "out"), *arguments]) == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["fc.bias"], EMA["fc.bias"])


def test_a_flat_dict_records_no_paths(tmp_path: Path) -> None:
    torch.save(MODEL, tmp_path / "flat.pt")
    assert "paths" not in ckptcore.open(str(tmp_path / "flat.pt")).origin
