"""Formats that are not read are refused by name, with the next step."""

from __future__ import annotations

import json
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.errors import CkptError, MalformedCheckpoint, UnsupportedFormat

# Format -> its files. Names alone: nothing of them is read.
FOLDERS = {
    "gguf": ("tiny-00001-of-00003.gguf", "tiny-00002-of-00003.gguf"),
    "orbax": ("_CHECKPOINT_METADATA", "d/abc", "manifest.ocdbt"),
    "orbax of zarr": ("_METADATA", "params.w/.zarray", "params.w/0.0"),
    "orbax with shardings": ("_sharding", "params.w/.zarray", "params.w/0.0"),
    "orbax of T5X": ("checkpoint", "target.w/.zarray", "target.w/0.0"),
    "tensorrt-engine": ("rank0.engine", "rank1.engine", "config.json"),
    "torchtune-epochs": ("hf_model_0001_0.pt", "hf_model_0002_0.pt", "hf_model_0001_1.pt", "config.json"),
    "torchtune-epochs of its own names": ("torchtune_model_0.pt", "torchtune_model_1.pt", "recipe_state.pt"),
    "torchtune-epochs of Meta's names": ("meta_model_0.pt", "meta_model_10.pt"),
    "torchtune-epochs of an adapter alone": ("adapter_2.pt", "adapter_10.pt", "recipe_state.pt"),
    "archive": ("ep0-ba1-rank0.pt.gz",),
    "archive of two steps": ("ep0-ba1-rank0.pt.zst", "ep0-ba2-rank0.pt.zst", "latest-rank0.pt.zst.symlink"),
    "archive of tars": ("ep0-ba1-rank0.tar.lzma", "ep0-ba2-rank0.tgz"),
    "torchsnapshot": (".snapshot_metadata", "0/obj", "batched/5bdd"),
    "nanotron-part": ("lm_head/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors",),
    "torch-xla": ("rank0-of-2-pytorch_model.bin", "rank1-of-2-pytorch_model.bin"),
    "torch-xla by its suffix": ("ckpt_rank-00000000-of-00000002.pth", "ckpt_rank-00000001-of-00000002.pth"),
    "metaseq": ("reshard-model_part-0.pt", "reshard-model_part-1.pt", "dict.txt"),
    "vllm-sharded-state": ("model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"),
    "vllm-sharded-state of rank 0": ("model-rank-0-part-0.safetensors", "model-rank-0-part-1.safetensors"),
}


def refused(url: Path) -> UnsupportedFormat:
    with pytest.raises(UnsupportedFormat) as caught:
        ckptcore.open(str(url))
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", FOLDERS)
def test_by_its_files(name: str, tmp_path: Path) -> None:
    for path in FOLDERS[name]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"{}")
    assert refused(tmp_path).values["format"] == name.partition(" ")[0]


@pytest.mark.parametrize(
    ("names", "because"),
    [
        (("adapter_2.pt", "adapter_10.pt"), "epochs 2, 10 are in it; of the newest is adapter_10.pt"),
        (
            [f"{name}_{epoch}.pt" for epoch in (0, 9, 10) for name in ("adapter", "hf_model_0001")],
            "epochs 0, 9, 10 are in it; of the newest are adapter_10.pt, hf_model_0001_10.pt",
        ),
        ([f"meta_model_{epoch}.pt" for epoch in range(9)], "epochs 0, 1, 2, 3, 4 and 4 more are in it; "),
    ],
)
def test_the_newest_epoch_of_torchtune_is_named(names: Sequence[str], because: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    assert because in refused(tmp_path).message


@pytest.mark.parametrize("model", ["model.safetensors", "model.pt"])
def test_epochs_of_an_adapter_beside_a_model(model: str, tmp_path: Path) -> None:
    """Other programs number adapters, too: beside other weights they are nobody's epochs."""
    for name in (model, "adapter_0.safetensors", "adapter_1.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CkptError) as caught:
        ckptcore.open(str(tmp_path))
    assert "torchtune" not in caught.value.message


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensorrt_by_its_config(ranks: int, tmp_path: Path) -> None:
    """Its config is none of the hub's, and its fused rows are those of a rank: also of one file."""
    (tmp_path / "config.json").write_text('{"architecture": "LlamaForCausalLM", "mapping": {"tp_size": 1}}')
    for rank in range(ranks):
        save_file({"transformer.ln_f.weight": torch.ones(2)}, tmp_path / f"rank{rank}.safetensors")
    assert refused(tmp_path).values["format"] == "tensorrt-llm"
    assert refused(tmp_path / "rank0.safetensors").values["format"] == "tensorrt-llm"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert ckptcore.open(str(tmp_path / "rank0.safetensors")).format == "safetensors"


@pytest.mark.parametrize("names", [("model.pth",), ("rank_0.pt",), ("final_a.pth", "final_b.pth")])
def test_shards_of_torch_xla_by_their_content(names: tuple[str, ...], tmp_path: Path) -> None:
    """Users choose the names, and one rank is never the model."""
    for rank, name in enumerate(names):
        state = {"_fsdp_shard.l_fsdp_dot_weight": torch.ones(10)}
        info = {"": {"_fsdp_shard.l_fsdp_dot_weight": {"_orig_size": (5, 4), "_orig_name": "l.weight"}}}
        about = {"shard_info": info, "flatten_info": {}, "buffer_info": {}, "world_size": 2, "rank": rank}
        torch.save({"model": state, "shard_metadata": about}, tmp_path / name)
    assert refused(tmp_path / names[0]).values["format"] == "torch-xla"
    with pytest.raises(CkptError, match="the shards of torch_xla FSDP") as caught:
        ckptcore.open(str(tmp_path))
    assert "consolidate_sharded_ckpts" in (caught.value.hint or "")


def test_shards_of_fairscale_are_none_of_torch_xla(tmp_path: Path) -> None:
    """Its metadata has the same name, and no ranks (fairscale/nn/data_parallel, local_metadata_dict)."""
    for name in "ab":
        about = {"param_metadata": [], "buffer_names": []}
        torch.save(
            {"model": {"flat_param_0": torch.ones(4)}, "shard_metadata": about}, tmp_path / f"{name}.pth"
        )
    assert ckptcore.open(str(tmp_path / "a.pth")).tensors
    with pytest.raises(CkptError, match="can be read alone"):
        ckptcore.open(str(tmp_path))


def test_a_compressed_file_beside_what_an_installed_format_may_read(tmp_path: Path) -> None:
    for name in ("w.npy", "code.tar.gz"):
        (tmp_path / name).write_bytes(b"x" * 600)
    with pytest.raises(CkptError) as caught:
        ckptcore.open(str(tmp_path))
    assert caught.value.code == "unknown-format"


def test_a_compressed_file_beside_a_model(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "ep0-ba1-rank0.pt.gz").write_bytes(b"x" * 600)
    assert ckptcore.open(str(tmp_path)).format == "safetensors"


def test_by_a_name(tmp_path: Path) -> None:
    for suffix, name in (
        (".nemo", "nemo-archive"),
        (".gguf", "gguf"),
        (".engine", "tensorrt-engine"),
        (".tar.lzma", "archive"),
    ):
        (tmp_path / f"model{suffix}").write_bytes(b"x" * 32)
        assert refused(tmp_path / f"model{suffix}").values["format"] == name


def test_beside_a_model_they_do_not_count(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    assert ckptcore.open(str(tmp_path)).format == "safetensors"


def test_an_item_of_one_rank(tmp_path: Path) -> None:
    """Its shards look like complete tensors, and nothing in the file has their places."""
    for name in ("model_0.safetensors", "model_1.safetensors"):
        save_file({"w": torch.ones(2)}, tmp_path / name)
    assert ckptcore.open(str(tmp_path / "model_0.safetensors")).tensors
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"world_size": 2}))
    assert refused(tmp_path / "model_0.safetensors").values["format"] == "rank-alone"
    with pytest.raises(MalformedCheckpoint):
        ckptcore.open(str(tmp_path))


@pytest.mark.parametrize("folder", ["mp_rank_01", "tp_rank_00_pp_rank_001"])
def test_a_rank_of_nemo_is_not_the_model(folder: str, tmp_path: Path) -> None:
    """NeMo 1 unpacked: a model of one rank has its weights in no folder of ranks."""
    part = tmp_path / folder / "model_weights.ckpt"
    part.parent.mkdir()
    torch.save({"model.w": torch.ones(2, 2)}, part)
    for place in (part, part.parent):
        assert refused(place).values["format"] == "rank-alone"
    moved = part.rename(tmp_path / part.name)
    config = tmp_path / "model_config.yaml"
    for sizes, opens in (("", True), ("1", True), ("2", False)):
        if sizes:
            config.write_text(f"tensor_model_parallel_size: {sizes}\npipeline_model_parallel_size: 1\n")
        for place in (moved, tmp_path):
            if opens:
                assert ckptcore.open(str(place)).tensors
            else:
                assert refused(place).values["format"] == "rank-alone"


def test_a_model_beside_its_optimizer_is_of_one_rank(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model_0.pt")
    torch.save({"state": {}}, tmp_path / "optimizer_0.pt")
    assert ckptcore.open(str(tmp_path)).format == "torch_save"


def test_a_pickled_module(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    error = refused(tmp_path)
    assert "torch.nn.modules.linear.Linear" in error.message
    assert "state_dict()" in error.hint


@pytest.mark.parametrize("name", ["model-rank-0-part-0.safetensors", "."])
def test_one_rank_of_vllm_has_fused_tensors(name: str, tmp_path: Path) -> None:
    """Nothing states that it is the only rank; beside it is the index of what it was made from."""
    path = tmp_path / "model-rank-0-part-0.safetensors"
    save_file({"model.layers.0.self_attn.qkv_proj.weight": torch.ones(6, 2)}, path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model.safetensors"}})
    )
    assert refused(tmp_path / name).values["format"] == "vllm-sharded-state"


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_archives_are_unpacked_first(suffix: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    with tarfile.open(tmp_path / f"model.tar.{suffix}", f"w:{suffix}") as archive:
        archive.add(tmp_path / "model.pt", "model.pt")
    assert refused(tmp_path / f"model.tar.{suffix}").values["format"] == "archive"
    with tarfile.open(tmp_path / "two.tar", "w") as archive:
        archive.add(tmp_path / "model.pt", "model.pt")
    assert refused(tmp_path / "two.tar").values["format"] == "archive"


def test_a_folder_with_an_archive_of_nemo(tmp_path: Path) -> None:
    (tmp_path / "llama.nemo").write_bytes(b"x" * 32)
    assert refused(tmp_path).values["format"] == "nemo-archive"
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert ckptcore.open(str(tmp_path)).format == "safetensors"
