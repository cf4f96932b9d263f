"""Do what `olmo_core.distributed.checkpoint` does, one test a row of the table in `formats/olmo/core.py`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest
import torch
import warm
from driver import REPOSITORY
from olmo_samples import sample, tensors, truth
from paths import JOBS
from safetensors.torch import load_file
from samples import Tensors, differences, expected_tensors, read_safetensors, read_torch, tensors_of, value

import ckptcore
from ckptcore.store import open_store

if TYPE_CHECKING:
    from driver import Cli

LOAD_JOB = JOBS / "load_job.py"


@pytest.fixture
def root(request: pytest.FixtureRequest) -> Path:
    return sample(request, "v3_bf16params_ws2")


@pytest.fixture
def step(root: Path) -> Path:
    return root / "step3"


def unshard(cli: Cli, step: Path, to: Path, *more: object) -> Tensors:
    """`unshard_checkpoint`: the model under its own names."""
    done = cli("consolidate", step, to, "--include", "model.*", "--rename", "model.=", *more)
    assert done.code == 0, done
    return read_safetensors(to) if to.suffix != ".pt" else tensors_of(read_torch(to))


def test_metadata_only(cli: Cli, root: Path, step: Path, tmp_path: Path) -> None:
    """`get_checkpoint_metadata`: names, shapes and dtypes, without any data file."""
    wanted = {k: (d, s) for k, (d, s, _) in truth(root).items()}
    assert {t.fqn: (t.dtype, t.shape) for t in ckptcore.open(str(step)).tensors} == wanted
    bare = tmp_path / "step3" / "model_and_optim"
    bare.mkdir(parents=True)
    (bare / ".metadata").write_bytes((step / "model_and_optim" / ".metadata").read_bytes())
    answer = cli("inspect", bare.parent, "--output", "json")
    assert answer.code == 0, answer
    assert {t.fqn: (t.dtype, t.shape) for t in ckptcore.open(str(bare.parent)).tensors} == wanted


def test_full_model_state_in_one_file(cli: Cli, root: Path, step: Path, tmp_path: Path) -> None:
    """`unshard_checkpoint(strategy=one_file)`, as safetensors and as a torch file."""
    wanted = expected_tensors(root / "expected.safetensors")
    assert unshard(cli, step, tmp_path / "model.safetensors") == wanted
    assert unshard(cli, step, tmp_path / "model.pt") == wanted


def test_full_optimizer_state(cli: Cli, root: Path, step: Path, tmp_path: Path) -> None:
    """`unshard_checkpoint(optim=True)`, also as safetensors, with the groups' options."""
    wanted = {k: v for k, v in truth(root).items() if k.startswith("optim.")}
    for name in ("optim.pt", "optim.safetensors"):
        done = cli("consolidate", step, tmp_path / name, "--include", "optim.*")
        assert done.code == 0, done
    full = read_torch(tmp_path / "optim.pt")
    assert tensors_of(full) == wanted
    assert full["optim.param_groups.embeddings.weight.betas"] == (0.9, 0.999)
    assert read_safetensors(tmp_path / "optim.safetensors") == wanted


def test_one_file_per_tensor(cli: Cli, root: Path, step: Path, tmp_path: Path) -> None:
    """`one_file_per_tensor`."""
    wanted = expected_tensors(root / "expected.safetensors")
    assert unshard(cli, step, tmp_path / "o", "--max-file-size", "1B") == wanted
    assert len(list((tmp_path / "o").glob("*.safetensors"))) == len(wanted)


def test_chunks_of_a_size(cli: Cli, root: Path, step: Path, tmp_path: Path) -> None:
    """`chunks(n)`."""
    wanted = expected_tensors(root / "expected.safetensors")
    assert unshard(cli, step, tmp_path / "o", "--max-file-size", "60KB") == wanted
    sizes = [sum(t.nbytes for t in load_file(p).values()) for p in (tmp_path / "o").glob("*.safetensors")]
    assert 1 < len(sizes) < len(wanted)
    assert max(sizes) <= 60_000


def test_threads_change_nothing(cli: Cli, step: Path, tmp_path: Path) -> None:
    """`num_threads`: the same bytes for one and for four."""
    for workers in (1, 4):
        unshard(cli, step, tmp_path / f"{workers}.safetensors", "--workers", workers)
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "4.safetensors").read_bytes()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_device(device: str, root: Path, step: Path) -> None:
    """`device=`: the device of a tensor that is read."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    name = "model.lm_head.w_out.weight"
    found = ckptcore.read(ckptcore.open(str(step)), name, device=device)
    assert found.device.type == device
    assert value(found.cpu()) == truth(root)[name]


def test_keys(root: Path, step: Path) -> None:
    """`load_keys`: tensors and objects by name, without the rest."""
    manifest = ckptcore.open(str(step))
    name = "optim.state.embeddings.weight.exp_avg"
    assert value(ckptcore.read(manifest, name)) == truth(root)[name]
    found = {b.key: b.tree for b in manifest.blobs}
    assert found["optim.param_groups.embeddings.weight.initial_lr"] == 0.01


def test_prefix(root: Path, step: Path) -> None:
    """A model's state dict is filled by the prefix of its names in the checkpoint."""
    wanted = load_file(root / "expected.safetensors")
    state = {k: torch.zeros_like(v) for k, v in wanted.items()}
    before = {k: v.data_ptr() for k, v in state.items()}
    unused = ckptcore.load_into(ckptcore.open(str(step)), state, prefix="model.")
    assert all(torch.equal(state[k], v) for k, v in wanted.items())
    assert before == {k: v.data_ptr() for k, v in state.items()}
    assert all(not name.startswith("model.") for name in unused)


def test_model_and_optimizer_in_place(root: Path, step: Path) -> None:
    """`load_model_and_optim_state`: nested state dicts of a live model and optimizer."""
    wanted = truth(root)
    model = {k: torch.zeros_like(v) for k, v in load_file(root / "expected.safetensors").items()}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(root / "expected_optim.safetensors").items():
        fqn, _, key = name.partition("::")
        state.setdefault(fqn, {})[key] = torch.zeros_like(tensor)
    ckptcore.load_into(ckptcore.open(str(step)), {"model": model, "optim": {"state": state}})
    found = {f"model.{k}": value(t) for k, t in model.items()}
    found |= {f"optim.state.{n}.{k}": value(t) for n, keys in state.items() for k, t in keys.items()}
    assert found == wanted


@pytest.mark.parametrize("name", ["v3_bf16params_ws2", "v01_fsdp1_fp32_ws2", "olmo1_local_ws2"])
def test_another_topology(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """`load_state_dict` on three ranks, saved by two: each fills its own part, in place."""
    root = sample(request, name)
    truth = {f"model.{k}": v for k, v in load_file(root / "expected.safetensors").items()}
    moments = load_file(root / "expected_optim.safetensors")
    truth |= {f"optim.state.{k.replace('::', '.')}": v for k, v in moments.items()}
    torch.save(truth, tmp_path / "truth.pt")
    step = next(p for p in root.iterdir() if p.name.startswith("step"))
    done = subprocess.run(
        [*warm.python(), str(LOAD_JOB), "3", str(step), str(tmp_path / "truth.pt"), "--ranks", "3"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=dict(os.environ) | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_remote_source(root: Path, step: Path, tmp_path: Path) -> None:
    """A step at a URL is read by ranges, without a copy."""
    fs, path = fsspec.url_to_fs("memory://olmo/step3")
    for file in step.rglob("*"):
        if file.is_file():
            fs.pipe_file(f"{path}/{file.relative_to(step)}", file.read_bytes())
    try:
        manifest = ckptcore.open("memory://olmo/step3")
        assert manifest.format == "olmo_core"
        assert not differences(truth(root), tensors(manifest))
        ckptcore.convert("memory://olmo/step3", str(tmp_path / "model.safetensors"), include=("model.*",))
        found = read_safetensors(tmp_path / "model.safetensors")
        assert found == {k: v for k, v in truth(root).items() if k.startswith("model.")}
    finally:
        open_store("memory://olmo").remove_all()


def test_saved_as_dcp(cli: Cli, root: Path, step: Path, tmp_path: Path) -> None:
    """`save_model_and_optim_state`: a folder that plain torch loads, unlike OLMo-core's own."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    options = ("--include", "model.*", "--include", "optim.*", "--output", "json")
    done = cli("consolidate", step, tmp_path / "dcp", "--to", "dcp", *options)
    assert done.code == 0, done
    dcp_to_torch_save(str(tmp_path / "dcp"), str(tmp_path / "full.pt"))
    assert tensors_of(read_torch(tmp_path / "full.pt", trusted=True)) == truth(root)
    assert json.loads(done.stdout)
