"""Samples of every format lose their optimizer in their own files, or are refused by name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from samples import SAMPLES
from torch.distributed.checkpoint import FileSystemReader

from ckptcore import api
from ckptcore.conversion.staging.open_staging import open_staging
from ckptcore.errors import CkptError, OutputMismatch, UnsupportedFormat
from ckptcore.formats.dcp import thinning
from ckptcore.operations.retention.thin import stage
from ckptcore.operations.retention.thin_plan import plan_thin, prove_thin
from ckptcore.planning.request import Settings

MEANS = Settings(memory=32 << 20, workers=1)
# Sample -> share of its files that goes; what is beside the tensors takes much of so small ones.
THINNED = {
    "dcp_torchtitan_like_4r": 0.64,
    "dcp_fsdp2_bf16_4r": 0.65,
    "dcp_fsdp2_tied_4r": 0.59,
    "fsdp1_sharded_fs_4r": 0.65,
    "lightning_trainer_mp_sharded_2r": 0.75,
    "lightning_fabric_mp_sharded_2r": 0.65,
    "accelerate_fsdp2_2r": 0.65,
    "optim_llama_tp2dp2_fully_sharded_model_space_0.12.3": 0.76,
    "optim_llama_tp2dp2_dp_reshardable_0.19.2": 0.79,
    "api_torch_dist_0.9.0": 0.2,
    "v3_bf16params_ws2": 0.73,
    "olmo1_local_ws2": 0.66,
    "olmo1_unsharded_safetensors": 0.66,
}
REFUSED = {
    "z1_bf16_gadfp32_ws2": "may hold the weights themselves",
    "api_zarr_0.12.3": "reads the format no more",
    "v01_fsdp1_fp32_ws2": "its metadata lists every file",
    "api_torch_dist_0.19.2": "integrity.json has the digest of every file",
    "before_zip": "no loader of it is known to take a part",
}


def thinned(place, asked=("optimizer",)):
    """(plan, proof, the folder) of a place, which stays as it is."""
    plan = plan_thin(str(place), asked)
    assert plan is not None
    staging = open_staging(str(place))
    with staging.lock(make=True):
        written = stage(staging, plan.uri, plan.manifest.versions, plan.files)
        assert {path: nbytes for path, (nbytes, _) in written.items()} == staging.files.list()
        assert sum(nbytes for nbytes, _ in written.values()) == plan.after
        return plan, prove_thin(plan, staging.files.url, MEANS), staging.files.url


@pytest.fixture
def copied(pytestconfig, tmp_path):
    """Return a function that copies a sample by its name."""
    samples = {sample.name: sample for sample in pytestconfig.stash[SAMPLES]}

    def copy(name):
        (place,) = samples[name].checkpoints
        return shutil.copytree(place, tmp_path / "step-1")

    return copy


@pytest.mark.parametrize("name", THINNED)
def test_a_sample_loses_its_optimizer(copied, name):
    plan, proven, folder = thinned(copied(name))
    assert 1 - plan.after / plan.before >= THINNED[name]
    gone = {t.fqn for t in plan.manifest.tensors if t.fqn in proven.gone}
    assert gone
    assert all(plan.goes[each] == "optimizer" for each in proven.gone)
    assert len(proven.manifest.tensors) == len(plan.manifest.tensors) - len(gone)
    assert plan_thin(folder, ("optimizer",)) is None, "a thinned step has nothing more to lose"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["dcp_fsdp2_bf16_4r", "dcp_torchtitan_like_4r", "v3_bf16params_ws2"])
def test_torch_loads_the_model_of_a_thinned_sample(copied, name):
    """By `dcp.load` of its names, in the files of several ranks."""
    plan, proven, folder = thinned(copied(name))
    (index,) = (path for path in plan.files if path.endswith(".metadata"))
    place = index.removesuffix(".metadata")
    below = FileSystemReader(f"{folder}/{place}").read_metadata().state_dict_metadata
    wanted = {
        n: torch.zeros(m.size, dtype=m.properties.dtype) for n, m in below.items() if hasattr(m, "size")
    }
    dcp.load(wanted, checkpoint_id=f"{folder}/{place}", no_dist=True)
    of_source = api.open(plan.uri)
    assert len(wanted) >= len(proven.manifest.tensors) > 5
    for spec in proven.manifest.tensors:
        (loaded,) = (v for n, v in wanted.items() if n == spec.fqn or n.endswith(f".{spec.fqn}"))
        assert torch.equal(loaded, api.read(of_source, spec.fqn)), spec.fqn


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_thinned_is_refused_by_name(copied, name):
    with pytest.raises(UnsupportedFormat, match=REFUSED[name]):
        plan_thin(str(copied(name)), ("optimizer",))


def test_one_file_and_files_of_both_are_refused(tmp_path):
    state = {"w": torch.ones(4), "optimizer": {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": []}}
    torch.save(state, tmp_path / "step-1.pt")
    with pytest.raises(UnsupportedFormat, match="it is one file"):
        plan_thin(str(tmp_path / "step-1.pt"), ("optimizer",))
    folder = tmp_path / "step-2"
    folder.mkdir()
    for rank in (0, 1):
        torch.save(
            {"model": {"w": torch.full((4,), rank)}, "optim": {"state": {"w": {"exp_avg": torch.ones(4)}}}},
            folder / f"ckpt_rank_{rank}.pt",
        )
    with pytest.raises(CkptError, match="cannot thin"):
        plan_thin(str(folder), ("optimizer",))


def trainer_folder(folder):
    """A folder of the Trainer on one process, with an optimizer and a scheduler as torch saves them."""
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    torch.save({"python": 1, "cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    return model


def test_a_folder_of_the_trainer_loses_the_file_of_its_optimizer(tmp_path):
    trainer_folder(tmp_path / "checkpoint-1")
    plan, proven, folder = thinned(tmp_path / "checkpoint-1")
    assert set(plan.goes) == proven.gone == {"optimizer.pt"}
    assert set(plan.files) == {
        "config.json",
        "model.safetensors",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
    }
    assert plan_thin(folder, ("optimizer",)) is None


@pytest.mark.soak
def test_the_trainer_resumes_from_a_folder_without_its_optimizer(tmp_path):
    """The model and the step are those of the folder; the optimizer begins anew."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    def trainer():
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
        config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
        rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
        how = {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        arguments = TrainingArguments(str(tmp_path), max_steps=4, save_steps=2, **how)
        return Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)

    trainer().train()
    place = tmp_path / "checkpoint-2"
    _, _, folder = thinned(place)
    shutil.rmtree(place)
    shutil.move(folder, place)
    assert not (place / "optimizer.pt").exists()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(place))
    assert resumed.state.global_step == 4


def test_a_file_that_only_has_the_name_of_an_optimizer_stays(tmp_path):
    model = trainer_folder(tmp_path / "checkpoint-1")
    torch.save(model.state_dict(), tmp_path / "checkpoint-1" / "optimizer.pt")
    assert plan_thin(str(tmp_path / "checkpoint-1"), ("optimizer",)) is None


def one_less(tensors):
    return tensors[1:]


def swapped(tensors):
    """Two tensors that are cut alike have each other's items."""
    first, second = next(
        (a, b)
        for a, b in combinations(tensors, 2)
        if (a.shape, a.chunks, a.dtype) == (b.shape, b.chunks, b.dtype)
    )
    places = {first.fqn: second, second.fqn: first}
    return [
        replace(t, paths=places[t.fqn].paths, places=places[t.fqn].places) if t.fqn in places else t
        for t in tensors
    ]


@pytest.mark.parametrize("wrong", [one_less, swapped])
def test_a_cut_that_loses_or_confuses_something_is_found(copied, monkeypatch, wrong):
    real = thinning.metadata_pickle
    monkeypatch.setattr(thinning, "metadata_pickle", lambda tensors, *rest: real(wrong(tensors), *rest))
    with pytest.raises(OutputMismatch, match="the thinned"):
        thinned(copied("dcp_fsdp2_bf16_4r"))
