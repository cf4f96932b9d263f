"""Damage one part of a checkpoint so that it contradicts the others: each format reports it."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from legacy_ranks import Case
from legacy_ranks import save as save_ranks
from safetensors.torch import save_file
from samples import SAMPLES

import ckptcore
from ckptcore.errors import AmbiguousModel, CkptError, Finding

Copy = Callable[[str], Path]
DCP = "dcp_nested_2r"


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Copy:
    """Return a sample to change: its folder, with the truth beside the checkpoint."""
    found = {s.name: s for s in request.config.stash[SAMPLES]}
    return lambda name: Path(shutil.copytree(found[name].root, tmp_path / name))


def findings(path: Path) -> list[Finding]:
    """Return the findings of level coverage above severity info."""
    return [f for f in ckptcore.check(ckptcore.open(str(path))).findings if f.severity != "info"]


def reported(path: Path) -> set[tuple[str, str | None]]:
    """Return (code, file) of the findings."""
    return {(f.code, f.file) for f in findings(path)}


def torch_file(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def swap(one: Path, other: Path) -> None:
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)


# ------------------------------------------------------------------------------------------ OLMo


def test_unsharded_parts_under_each_others_name(copy: Copy) -> None:
    step = copy("olmo1_unsharded_safetensors") / "step2-unsharded"
    swap(step / "model.safetensors", step / "optim.safetensors")
    with pytest.raises(CkptError, match=r"model's state dict \(got an optimizer's\)"):
        ckptcore.open(str(step))


LOST = {"optim.safetensors": "missing-part", "train.pt": "missing-part", "model.safetensors": "missing-file"}


@pytest.mark.parametrize(("part", "code"), LOST.items())
def test_unsharded_part_lost(part: str, code: str, copy: Copy) -> None:
    step = copy("olmo1_unsharded_safetensors") / "step2-unsharded"
    assert not reported(step)
    (step / part).unlink()
    assert reported(step) == {(code, part.split(".")[0])}


@pytest.mark.parametrize("beside", [None, {}, {"version": "9", "new": 1}, {"model": {}}])
def test_another_file_in_the_place_of_the_marker(beside: dict[str, Any] | None, copy: Copy) -> None:
    """A config has none of the keys that a trainer writes; a later release may have more of them."""
    step = copy("v3_bf16params_ws2") / "step3"
    if beside is None:
        shutil.copyfile(step / "config.json", step / ".metadata.json")
    else:
        (step / ".metadata.json").write_text(json.dumps(beside))
    is_other = beside is None or "model" in beside
    assert (("malformed-metadata", ".metadata.json") in reported(step)) is is_other


def test_trainer_states_of_missing_ranks(copy: Copy) -> None:
    """Without a recorded world size, the highest rank gives the number of ranks."""
    folder = copy(DCP) / "ckpt"
    torch_file(folder / "train" / "rank2.pt", {"seed": 1})
    assert ("missing-part", "train/rank0.pt") in reported(folder)
    torch_file(folder / "train" / "rank0.pt", {"seed": 1, "world_size": 2})
    torch_file(folder / "train" / "rank2.pt", {"seed": 1, "world_size": 2})
    assert ("mixed-saves", "train/rank2.pt") in reported(folder)


# --------------------------------------------------------------------------- two checkpoints


def test_a_tracker_beside_another_checkpoint(copy: Copy) -> None:
    """A root of steps that is a checkpoint itself; single files beside the steps belong to neither."""
    root = copy("root_torch_dist_llama_0.19.2")
    assert (root / "expected.safetensors").exists()
    assert ckptcore.open(str(root)).format == "torch_dist"
    shutil.copytree(copy(DCP) / "ckpt", root, dirs_exist_ok=True)
    with pytest.raises(AmbiguousModel, match="iter_0000100"):
        ckptcore.open(str(root))
    assert ckptcore.open(str(root / "iter_0000100")).format == "torch_dist"


def test_all_of_metas_ranks_are_no_part(copy: Copy) -> None:
    """Each has columns of a rank: with the others beside it, nothing is missing."""
    assert not reported(copy("meta_llama3_tp2") / "ckpt")


def test_shards_beside_the_items_of_ranks(copy: Copy) -> None:
    """torch's writer of shards and torch_checkpointing saved into one folder: neither is the other's."""
    folder = next(copy("tc_default_2r").rglob("model_0.pt")).parent
    assert ckptcore.open(str(folder)).format == "torch_checkpointing"
    for path in (copy("hf_sharded_4r") / "ckpt").iterdir():
        shutil.copy(path, folder)
    with pytest.raises(AmbiguousModel, match="hf_shards"):
        ckptcore.open(str(folder))


def test_rank_files_beside_the_files_that_are_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert not reported(tmp_path)
    for rank in range(2):
        torch_file(tmp_path / f"model_rank_{rank}.pt", {"w": torch.zeros(2)})
    assert reported(tmp_path) == {("stray-file", "model_rank_0.pt")}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "best.ckpt"])
@pytest.mark.parametrize(
    "place",
    ["dcp_zstd_2r/ckpt", "hf_sharded_4r/ckpt", "v01_dtensor_ws4/ckpt", "root_torch_dist_llama_0.19.2"],
)
@pytest.mark.grid
def test_a_torch_file_beside_another_format(place: str, name: str, zipped: bool, copy: Copy) -> None:
    """Its values are in no output: nothing about a file depends on which format is beside it."""
    root = copy(place.partition("/")[0])
    (root / "expected.safetensors").unlink()
    folder = root / place.partition("/")[2]
    assert "stray-file" not in {code for code, _ in reported(folder)}
    torch.save({"own.weight": torch.ones(2)}, folder / name, _use_new_zipfile_serialization=zipped)
    torch.save({"step": 5}, folder / "latest_train_state.pt")  # of Megatron-Bridge, without a weight
    messages = [f.message for f in ckptcore.open(str(folder)).findings if f.code == "stray-file"]
    assert messages == [f"{name} beside the checkpoint is not read"]


def test_a_link_to_what_is_read_is_no_file_beside_it(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for path in ("newest.pt", "newest.safetensors"):
        (tmp_path / path).symlink_to("model.safetensors")
    assert not reported(tmp_path)
    rows = {"weight_map": {"w": "part.safetensors"}}
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(rows))
    for path in ("newest.pt", "newest.safetensors"):
        (tmp_path / path).unlink()
        (tmp_path / path).hardlink_to(tmp_path / "part.safetensors")
    assert not reported(tmp_path)


@pytest.mark.parametrize(("says", "code"), [(False, "stray-file"), (True, "mixed-saves")])
def test_common_state_in_a_file_and_inside(says: bool, code: str, copy: Copy) -> None:
    """0.19 keeps the common state inside, and does not open the file of an earlier release."""
    folder = copy("root_torch_dist_llama_0.19.2") / "iter_0000100"
    objects = {b.key: b.tree for b in ckptcore.open(str(folder)).blobs}
    torch_file(folder / "common.pt", {"args": Namespace(num_layers=99), "iteration": 5})
    if says:
        config = json.loads((folder / "metadata.json").read_text())
        (folder / "metadata.json").write_text(json.dumps(config | {"common_backend": "torch"}))
    assert (code, "common.pt") in reported(folder)
    assert {b.key: b.tree for b in ckptcore.open(str(folder)).blobs} == objects


# --------------------------------------------------------------------- parts that are not there


def test_random_states_of_fewer_or_more_ranks(copy: Copy) -> None:
    folder = copy("accelerate_fsdp2_2r") / "ckpt"
    assert not reported(folder)
    shutil.copyfile(folder / "random_states_1.pkl", folder / "random_states_2.pkl")
    assert reported(folder) == {("missing-part", "random_states_2.pkl")}
    (folder / "random_states_2.pkl").unlink()
    (folder / "random_states_1.pkl").unlink()
    assert reported(folder) == {("missing-part", "random_states_1.pkl")}


def test_a_lightning_trainers_folder_without_its_last_file(copy: Copy) -> None:
    root = copy("lightning_trainer_fsdp_sharded_2r")
    folder = next(p for p in root.iterdir() if p.is_dir())
    assert not reported(folder)
    (folder / "meta.pt").unlink()
    assert reported(folder) == {("missing-part", "meta.pt")}


def test_an_index_with_another_total(tmp_path: Path) -> None:
    name = "model-00001-of-00001.safetensors"
    index = {"metadata": {"total_size": 24}, "weight_map": {"w": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"w": torch.ones(2, 3)}, tmp_path / name)
    assert not reported(tmp_path)
    save_file({"w": torch.ones(1, 3)}, tmp_path / name)
    assert reported(tmp_path) == {("total-mismatch", "model.safetensors.index.json")}


# -------------------------------------------------------------------------------- Megatron ranks


def ranked(case: Case, base: Path, rank_of: Callable[[tuple[int, int, int]], int]) -> Path:
    """Rank folders whose arguments record each rank."""

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["args"] = Namespace(**vars(tree["args"]), rank=rank_of(rank))

    return save_ranks(case, base, edit)


def test_a_rank_that_is_a_copy_of_another(tmp_path: Path) -> None:
    base = ranked(Case(tp=2, pp=2), tmp_path, lambda rank: 0)
    assert not reported(tmp_path)
    shutil.copytree(base / "mp_rank_00_001", base / "mp_rank_01_001", dirs_exist_ok=True)
    assert [f.code for f in findings(tmp_path)] == ["item-mismatch"]


@pytest.mark.parametrize("stage", [0, 1])
def test_expert_ranks_in_each_others_place(stage: int, tmp_path: Path) -> None:
    """Expert ranks change more slowly than tensor ranks, and faster than stages."""
    case = Case(pp=2, ep=2, experts="sequential")
    base = ranked(case, tmp_path, lambda r: r[0] + r[2] + 2 * r[1])
    assert not reported(tmp_path)
    swap(*(base / f"mp_rank_00_00{stage}_00{ep}" / "model_optim_rng.pt" for ep in range(2)))
    assert "item-mismatch" in {f.code for f in findings(tmp_path)}


def test_a_name_of_only_one_rank(tmp_path: Path) -> None:
    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        if rank[0] == 1:
            tree["model"]["decoder.extra.weight"] = torch.ones(4)

    save_ranks(Case(tp=2), tmp_path, edit)
    assert ("hole", "mp_rank_00/model_optim_rng.pt") in reported(tmp_path)


# ------------------------------------------------------------------------------------------ zarr


@pytest.mark.parametrize("change", [{"order": "F"}, {"shape": [3, 4]}], ids=str)
def test_an_array_that_megatron_would_not_write(change: dict[str, Any], copy: Copy) -> None:
    folder = copy("api_zarr_0.12.3") / "ckpt"
    assert not reported(folder)
    array = folder / "misc.grid_int64" / ".zarray"
    form = json.loads(array.read_text())
    if "shape" in change:
        change = {"shape": [form["shape"][0] - 1, *form["shape"][1:]]}
        assert form["chunks"][0] > 1
    array.write_text(json.dumps(form | change))
    assert reported(folder) == {("unusual-layout", "misc.grid_int64/.zarray")}


@pytest.mark.parametrize("name", ["metadata.json", "integrity.json"])
def test_duplicate_names_are_refused(name: str, copy: Copy) -> None:
    """JSON readers use the first or the last value: neither is the truth."""
    folder = copy("api_torch_dist_0.19.2") / "ckpt"
    text = (folder / name).read_text()
    first = next(iter(json.loads(text).items()))
    (folder / name).write_text(text.rstrip()[:-1] + ", " + json.dumps(dict([first]))[1:])
    with pytest.raises(CkptError, match="has a name twice"):
        ckptcore.open(str(folder))
