"""Lightning checkpoints for tests: folders as Lightning's strategies save them, and its consolidation.

`official` is what lightning 2.6 does in ``fabric/utilities/load.py`` and
``pytorch/utilities/consolidate_checkpoint.py``, with the two things repaired that stop it: a model
under ``state_dict`` (ModelParallelStrategy), and a `meta.pt` that holds more than tensors.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

VERSION = {"pytorch-lightning_version": "2.6.6", "epoch": 3, "global_step": 12}


def lightning_python() -> str:
    """An interpreter with lightning; the test is skipped where there is none."""
    named = os.environ.get("CKPTCORE_LIGHTNING_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed; CKPTCORE_LIGHTNING_PYTHON may name an interpreter with it")
    return sys.executable


def module(prefix: str = "net.") -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        f"{prefix}embed.weight": torch.randn(11, 4),
        f"{prefix}layers.10.w": torch.randn(4, 4).t(),
        f"{prefix}layers.2.w": torch.randn(4, 4).to(torch.bfloat16),
        f"{prefix}steps": torch.tensor(7),
        f"{prefix}empty": torch.zeros(0, 3),
    }


def optimizer(names: list[str]) -> dict[str, Any]:
    """As `get_state_dict` has it: by name, two groups."""
    return {
        "state": {n: {"step": torch.tensor(2.0), "exp_avg": torch.randn(3)} for n in names},
        "param_groups": [
            {"params": names[:1], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None},
            {"params": names[1:], "lr": 0.2, "betas": (0.8, 0.95), "foreach": None},
        ],
    }


def metadata() -> dict[str, Any]:
    """Values of many classes, as modules and callbacks of users hold them."""
    return {
        **VERSION,
        "loops": {"fit_loop": {"state_dict": {}, "progress": {"ready": 2, "is_last": True}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'val.loss'}": {"kth_value": torch.tensor(float("inf"))}},
        "lr_schedulers": [OrderedDict(base_lrs=[0.1], last_epoch=1)],
        "hparams_name": "kwargs",
        "hyper_parameters": {
            "root": Path("/data/run.1"),
            "args": Namespace(a=1, b=[Namespace(c=None)]),
            "dtype": torch.bfloat16,
            "device": torch.device("cuda", 1),
            "size": torch.Size([2, 3]),
            "set": {1, 2},
            "frozen": frozenset({"x"}),
            "pair": (1, ("a", 2.5)),
            7: "an int key",
            "raw": b"\x00\xff",
            "z": 1 - 2j,
            "none": None,
            "rng": np.random.RandomState(1).get_state(),
            "array": np.arange(6, dtype=np.int16).reshape(2, 3),
            "big": 1 << 80,
            "nan": float("-inf"),
            "weights": (torch.ones(2), torch.zeros(3, dtype=torch.int8)),
        },
    }


def save(folder: Path, state: dict[str, Any], meta: dict[str, Any] | None) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    if meta is not None:
        torch.save(meta, folder / "meta.pt")
    return folder


def trainer(folder: Path, model_key: str, meta: dict[str, Any] | None = None) -> Path:
    """``model``: FSDPStrategy; ``state_dict``: ModelParallelStrategy."""
    model = module()
    state = {
        model_key: model,
        "optimizer_0": optimizer(list(model)[:2]),
        "optimizer_1": optimizer(list(model)[:3]),
    }
    return save(folder, state, metadata() if meta is None else meta)


def fabric(folder: Path) -> Path:
    """The user's own names, nested as the user nested them."""
    model = module("")
    state = {
        "net": model,
        "optim.sgd": optimizer(list(model)[:2]),
        "list": [{"w": torch.ones(2)}, {"w": torch.zeros(1)}],
    }
    return save(folder, state, {"iter": 7, "hparams": {"lr": 0.1, "root": Path("x")}})


def official(folder: Path) -> dict[str, Any]:
    """What Lightning's own consolidation makes of a folder."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    checkpoint: dict[str, Any] = {}
    reader = FileSystemReader(folder)
    _load_state_dict(checkpoint, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    extra = torch.load(folder / "meta.pt", weights_only=False)
    checkpoint.update(extra)
    if "pytorch-lightning_version" not in extra:
        return checkpoint
    checkpoint["state_dict"] = checkpoint.pop("model" if "model" in checkpoint else "state_dict")
    keys = [k for k in checkpoint if re.match("optimizer_[0-9]+", k)]
    if keys:
        checkpoint["optimizer_states"] = [checkpoint.pop(f"optimizer_{n}") for n in range(len(keys))]
    return checkpoint


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two trees differ: in class, keys, their order, values, or one bit of a tensor."""
    if type(a) is not type(b):
        return [f"{path}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, dict):
        found = [] if list(a) == list(b) else [f"{path}: keys {list(a)} and {list(b)}"]
        return found + [d for k in a if k in b for d in differences(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, (list, tuple)):
        found = [] if len(a) == len(b) else [f"{path}: {len(a)} and {len(b)} values"]
        return found + [
            d for n, (x, y) in enumerate(zip(a, b, strict=False)) for d in differences(x, y, f"{path}.{n}")
        ]
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and _raw(a) == _raw(b)
        return [] if same else [f"{path}: tensors differ"]
    if isinstance(a, np.ndarray):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return [] if same else [f"{path}: arrays differ"]
    if isinstance(a, Namespace):
        return differences(vars(a), vars(b), path)
    return [] if a == b else [f"{path}: {a!r:.60} and {b!r:.60}"]


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
