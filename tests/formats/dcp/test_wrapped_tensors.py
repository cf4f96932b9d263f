"""Tensors of a class, such as those of torchao, in a DCP folder: unreadable parts beside a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.utils._pytree import tree_map

import ckptcore
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import validate


class Codes(torch.Tensor):
    """An 8-bit tensor that shows itself as float32, as torchao's optimizer states do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (
            torch.ops.aten.detach.default,
            torch.ops.aten.clone.default,
            torch.ops.aten._to_copy.default,
        ):
            return cls(args[0].codes, args[0].scale)
        plain = tree_map(lambda v: v.codes.float() if isinstance(v, cls) else v, args)
        return func(*plain, **(kwargs or {}))


MODEL = {"fc.weight": torch.arange(4096.0).reshape(64, 64), "fc.bias": torch.ones(64)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    moment = Codes(torch.ones(64, 64, dtype=torch.uint8), torch.ones(64))
    state = {"fc.weight": {"exp_avg": moment, "step": torch.tensor(1.0)}}
    tree = {"model": dict(MODEL), "optim": {"state": state, "param_groups": []}}
    dcp.save(tree, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def codes(folder: Path) -> set[tuple[str, str | None]]:
    found = validate(ckptcore.open(str(folder)), "bytes").findings
    return {(f.code, f.fqn) for f in found if f.severity == "error"}


def test_the_model_beside_them(folder: Path, tmp_path: Path) -> None:
    assert codes(folder) == {("unreadable-part", "optim.state.fc.weight.exp_avg")}
    assert run(["consolidate", str(folder), str(tmp_path / "all.safetensors")]) == 27
    for more in ([], ["--exclude", "optim.*"], ["--model-prefix", "model."]):
        out = tmp_path / f"out{len(more)}{more[:1]}"
        assert run(["export", str(folder), str(out), "--config", "none", *more]) == 0
        tensors = load_file(out / "model.safetensors")
        assert tensors.keys() == MODEL.keys()
        assert all(torch.equal(tensors[name], MODEL[name]) for name in MODEL)


def test_damage_stays_damage(folder: Path) -> None:
    """A short item that is no such tensor is not called unreadable."""
    (path,) = folder.glob("*.distcp")
    os.truncate(path, path.stat().st_size - 4000)
    assert "truncated-file" in {code for code, _ in codes(folder)}
