"""OLMo checkpoints for tests: the samples, and small ones written here as the format's page says."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from samples import SAMPLES, Tensors, expected_tensors, value

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError


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
    listed = json.loads(path.read_text())
    made = change(listed)
    path.write_text(json.dumps(listed if made is None else made))


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
    listed: dict[str, Any] = {}
    for name, (tensor, shards) in spec.items():
        per_file = {}
        for rank, shard in shards.items():
            if isinstance(shard, list):
                flat = tensor.reshape(-1)
                part = torch.cat([flat[a:b] for a, b in shard])
                row = {"flattened_offsets": shard, "local_shape": None, "global_offset": None}
            else:
                offset, shape = shard
                part = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
                row = {"flattened_offsets": None, "local_shape": shape, "global_offset": offset}
            files[rank][name] = part.reshape(-1).contiguous().clone()
            per_file[f"rank_{rank}.safetensors"] = row
        listed[name] = {
            "shape": list(tensor.shape),
            "is_sharded": len(shards) > 1,
            "dtype": DTYPES[tensor.dtype],
            "shard_spec_per_file": per_file,
        }
    for rank, part in enumerate(files):
        save_file(part, folder / f"rank_{rank}.safetensors")
    (folder / "metadata.json").write_text(json.dumps({"tensors": listed}))


def pickled(value: Any, protocol: int = 4) -> torch.Tensor:
    """A value as 0.1's `serialize_to_tensor` stores it."""
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol)), dtype=torch.uint8).clone()


# --- OLMo's local checkpoints ---------------------------------------------------------------------

Info = namedtuple(
    "_ShardParamInfo",
    "in_shard offset_in_shard numel_in_shard intra_param_start_idx intra_param_end_idx",
    module="torch.distributed.fsdp.flat_param",
)
OUT = Info(False, None, None, None, None)


def write_local(step: Path, generation: str, *, padding: int = 0, names: bool = True) -> dict[str, Any]:
    """Two parameters in one flat parameter over three ranks; gives the tensors that it holds."""
    a, b = torch.randn(3, 4), torch.randn(5)
    flat = torch.cat([a.reshape(-1), b, torch.zeros(padding + (-17 - padding) % 3)])
    size = flat.numel() // 3
    for folder in ("model", "optim", "train"):
        (step / folder).mkdir(parents=True)
    where = [("w.a", 0, 12), ("w.b", 12, 17)]
    for rank in range(3):
        low, high = rank * size, (rank + 1) * size
        infos, offsets, part = [], [], {}
        for name, start, stop in where:
            lo, hi = max(low, start), min(high, stop)
            infos.append(Info(True, lo - low, hi - lo, lo - start, hi - start - 1) if lo < hi else OUT)
            if lo < hi:
                offsets.append((lo - start, hi - start - 1))
                part[name] = (lo, hi)
        first = next(i for i, info in enumerate(infos) if info.in_shard)
        handle = {
            "flat_param.data": flat[low:high].clone(),
            "flat_param._fqns": ["w.a", "w.b"],
            "flat_param._shapes": [torch.Size([3, 4]), torch.Size([5])],
            "flat_param._numels": [12, 5],
            "flat_param._shard_numel_padded": max(0, high - 17) if rank == 2 else 0,
        }
        if generation == "infos":
            handle["flat_param._shard_param_infos"] = tuple(infos)
        else:
            handle["flat_param._shard_indices"] = (first, first + len(offsets) - 1)
            handle["flat_param._shard_param_offsets"] = offsets
        modules = [{"name": "_fsdp_wrapped_module.top", "handles": [handle]}]
        save_with_infos({"modules": modules}, step / "model" / f"rank{rank}.pt")
        moments = {n: flat[lo:hi] + 1 for n, (lo, hi) in part.items()}
        state = {
            i: {"step": torch.tensor(2.0), "exp_avg": moments[n].clone()}
            for i, (n, _, _) in enumerate(where)
            if n in moments
        }
        group = {"lr": 0.1, "params": [0, 1]}
        if names:
            group["param_names"] = [f"_fsdp_wrapped_module.top._fsdp_wrapped_module.{n}" for n, _, _ in where]
        torch.save({"state": state, "param_groups": [group]}, step / "optim" / f"rank{rank}.pt")
        torch.save({"global_step": 1, "world_size": 3}, step / "train" / f"rank{rank}.pt")
    (step / "metadata.yaml").write_text("world_size: 3\n")
    (step / "config.yaml").write_text("run_name: x\n")
    part = {f"model.top.{n}": t for n, t in (("w.a", a), ("w.b", b))}
    if names:
        part |= {f"optim.state.top.{n}.exp_avg": t + 1 for n, t in (("w.a", a), ("w.b", b))}
        part |= {f"optim.state.top.{n}.step": torch.tensor(2.0) for n in ("w.a", "w.b")}
    return {k: value(v) for k, v in part.items()}


def save_with_infos(tree: Any, path: Path) -> None:
    """torch.save, with `_ShardParamInfo` pickled under torch 2.1's module name."""
    with _infos():
        torch.save(tree, path)


def change_local(path: Path, edit: Callable[[Any], object]) -> None:
    """Changes what a rank saved."""
    with _infos():
        tree = torch.load(path, weights_only=False)
        edit(tree)
        torch.save(tree, path)


@contextmanager
def _infos() -> Iterator[None]:
    module = ModuleType(Info.__module__)
    module._ShardParamInfo = Info  # type: ignore[attr-defined]
    before = sys.modules.get(Info.__module__)
    sys.modules[Info.__module__] = module
    try:
        yield
    finally:
        sys.modules.pop(Info.__module__)
        if before is not None:
            sys.modules[Info.__module__] = before
