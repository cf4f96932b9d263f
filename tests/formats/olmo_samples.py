"""OLMo checkpoints for tests: the samples, and small ones written here as the format's page says."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from samples import SAMPLES, Tensors, expected_tensors, value

import ckptcore
from ckptcore.errors import CkptError
from ckptcore.manifest import Manifest


def sample(request: pytest.FixtureRequest, name: str) -> Path:
    """A sample's folder."""
    return next(s.root for s in request.config.stash[SAMPLES] if s.name == name)


def copied(request: pytest.FixtureRequest, name: str, to: Path) -> Path:
    """A copy of a sample's step folder, to be changed."""
    root = sample(request, name)
    step = next(p for p in root.iterdir() if p.is_dir() and p.name.startswith(("step", "ckpt")))
    return Path(shutil.copytree(step, to / step.name))


def truth(root: Path) -> Tensors:
    """What a step folder of the sample holds, under the names it has here."""
    model = expected_tensors(root / "expected.safetensors")
    optim = expected_tensors(root / "expected_optim.safetensors")
    return {f"model.{k}": v for k, v in model.items()} | {f"optim.{k}": v for k, v in optim.items()}


def tensors(manifest: Manifest) -> Tensors:
    """Every tensor of a checkpoint, as it reads."""
    return {t.fqn: value(ckptcore.read(manifest, t.fqn)) for t in manifest.tensors}


def codes(path: Path, level: str = "bytes") -> set[str]:
    """Codes of the errors that opening or checking tells."""
    try:
        report = ckptcore.check(ckptcore.open(str(path)), level)
    except CkptError as error:
        return {error.code, *(f.code for f in error.values.get("findings", ()))}
    return {f.code for f in report.findings if f.severity == "error"}


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes a JSON file; what ``change`` gives replaces it, None keeps the changed value."""
    told = json.loads(path.read_text())
    made = change(told)
    path.write_text(json.dumps(told if made is None else made))


DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_v01(folder: Path, ranks: int, spec: Mapping[str, tuple[torch.Tensor, Mapping[int, Any]]]) -> None:
    """A 0.1 state dict: name -> (tensor, {rank: flat ranges, or (offset, shape)})."""
    folder.mkdir(parents=True)
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    told: dict[str, Any] = {}
    for name, (tensor, shards) in spec.items():
        per_file = {}
        for rank, shard in shards.items():
            if isinstance(shard, list):
                flat = tensor.reshape(-1)
                held = torch.cat([flat[a:b] for a, b in shard])
                row = {"flattened_offsets": shard, "local_shape": None, "global_offset": None}
            else:
                offset, shape = shard
                held = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
                row = {"flattened_offsets": None, "local_shape": shape, "global_offset": offset}
            files[rank][name] = held.reshape(-1).contiguous().clone()
            per_file[f"rank_{rank}.safetensors"] = row
        told[name] = {"shape": list(tensor.shape), "is_sharded": len(shards) > 1,
                      "dtype": DTYPES[tensor.dtype], "shard_spec_per_file": per_file}  # fmt: skip
    for rank, held in enumerate(files):
        save_file(held, folder / f"rank_{rank}.safetensors")
    (folder / "metadata.json").write_text(json.dumps({"tensors": told}))


def pickled(value: Any, protocol: int = 4) -> torch.Tensor:
    """A value as 0.1's `serialize_to_tensor` stores it."""
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol)), dtype=torch.uint8).clone()
