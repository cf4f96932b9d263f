"""DeepSpeed checkpoints: which folder is meant, which weights, and files that do not belong together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import samples
import torch

import ckptcore
from ckptcore.errors import (
    AmbiguousModel,
    CkptError,
    DamagedCheckpoint,
    MalformedCheckpoint,
    NotComplete,
    UnsupportedFormat,
)
from ckptcore.formats import open_source, read_manifest

ARCHIVE = samples.FIXTURES / "deepspeed.tar.zst"


@pytest.fixture(scope="module")
def corpus(request: pytest.FixtureRequest) -> Path:
    return samples.unpack(request.config.rootpath / ".pytest_cache" / "samples", ARCHIVE)


@pytest.fixture
def copy(corpus: Path, tmp_path: Path):
    def make(name: str, at: str = "ckpt") -> Path:
        return Path(shutil.copytree(corpus / name / "ckpt", tmp_path / at))

    return make


def codes(folder: Path) -> set[str]:
    manifest = ckptcore.open(str(folder))
    return {f.code for f in ckptcore.check(manifest, "bytes").findings}


@pytest.mark.parametrize(
    "name", ["z1_bf16_gadfp32_ws2", "z2_fp32_rr_ws4", "z2_bf16_align_ws2", "z3_bf16_ws4", "z3_fp32_ws2"]
)
def test_moments_are_those_of_their_parameters(corpus: Path, name: str) -> None:
    manifest = ckptcore.open(str(corpus / name / "ckpt"))
    truth = samples.read_safetensors(corpus / name / "expected_optim.safetensors")
    assert truth
    for key, value in truth.items():
        found = ckptcore.read(manifest, "optimizer.state." + key.replace("::", "."))
        assert samples.value(found) == value, key


@pytest.mark.parametrize("marker", ["latest", "latest_universal"])
def test_the_folder_that_latest_names_is_read(copy, tmp_path: Path, marker: str) -> None:
    copy("z1_fp32_ws2", "root/global_step3")
    copy("z1_fp32_ws2", "root/global_step10")
    with pytest.raises(AmbiguousModel):
        ckptcore.open(str(tmp_path / "root"))
    (tmp_path / "root" / marker).write_text("global_step3")
    assert ckptcore.open(str(tmp_path / "root")).root.endswith("global_step3")
    (tmp_path / "root" / marker).write_text("global_step20")
    with pytest.raises(NotComplete) as error:
        ckptcore.open(str(tmp_path / "root"))
    assert "global_step10" in str(error.value)


@pytest.mark.parametrize("tag", ["checkpoint", "pytorch_model"])  # Lightning's, and Accelerate's
def test_tags_of_other_trainers(copy, tmp_path: Path, tag: str) -> None:
    copy("z2_bf16_ws4", f"root/{tag}")
    (tmp_path / "root" / "latest").write_text(tag)
    (tmp_path / "root" / "zero_to_fp32.py").write_text("")
    assert ckptcore.open(str(tmp_path / "root")).format == "deepspeed"


def test_weights_are_masters_or_what_is_stored(corpus: Path) -> None:
    folder = str(corpus / "z2_bf16_ws4" / "ckpt")
    master, module = (read_manifest(open_source(folder, weights=w)) for w in ("master", "module"))
    name = "module.blocks.0.up.weight"
    assert master.tensors[master.index[name]].dtype == "float32"
    assert module.tensors[module.index[name]].dtype == "bfloat16"
    fp32 = ckptcore.read(module, "optimizer.state.blocks.0.up.weight.fp32")
    assert torch.equal(ckptcore.read(master, name), fp32)
    assert torch.equal(ckptcore.read(module, name), fp32.to(torch.bfloat16))
    assert torch.equal(ckptcore.read(master, "lp/blocks.0.up.weight"), ckptcore.read(module, name))
    with pytest.raises(UnsupportedFormat):
        read_manifest(open_source(str(corpus / "z3_bf16_ws4" / "ckpt"), weights="module"))


def test_masters_without_zero_are_named_where_values_prove_them(corpus: Path) -> None:
    manifest = ckptcore.open(str(corpus / "z0_bf16_ws2" / "ckpt"))
    for name in ("blocks.1.norm.weight", "blocks.1.norm.bias", "ln_f.bias", "embed.weight"):
        low, fp32 = (ckptcore.read(manifest, n) for n in (f"module.{name}", f"optimizer.state.{name}.fp32"))
        assert torch.equal(low, fp32.to(torch.bfloat16))
        assert not torch.equal(low.float(), fp32)


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    "name", ["z1_fp32_ws2", "z2_bf16_ws4", "z3_bf16_ws4", "autotp2_z1_fp32", "pipe2_z1_ws2"]
)
def test_every_file_that_is_missing_is_named(copy, name: str) -> None:
    folder = copy(name)
    for path in sorted(p for p in folder.iterdir() if p.suffix == ".pt"):
        raw = path.read_bytes()
        path.unlink()
        try:
            with pytest.raises(CkptError) as error:
                ckptcore.convert(str(folder), str(folder.parent / "out.safetensors"))
            messages = [str(error.value), *(f.message for f in getattr(error.value, "findings", ()))]
            assert any(path.name in m or "model_states" in m or "missing" in m for m in messages), messages
        finally:
            path.write_bytes(raw)


def test_files_of_another_step_are_mixed_saves(copy) -> None:
    folder = copy("z3_bf16_ws4")
    path = folder / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    edited(path, lambda tree: tree.update(global_steps=4))
    assert "mixed-saves" in codes(folder)


def test_step_counts_of_partitions_are_compared(copy) -> None:
    folder = copy("z2_bf16_ws4")
    path = next(folder.glob("*zero_pp_rank_1_*optim_states.pt"))

    def later(tree: dict) -> None:
        for state in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] += 1

    edited(path, later)
    with pytest.raises(DamagedCheckpoint) as error:
        ckptcore.convert(str(folder), str(folder.parent / "out.safetensors"))
    assert error.value.findings[0].code == "replica-mismatch"


def test_partitions_that_changed_places_are_found_where_weights_are_stored_exactly(copy) -> None:
    folder = copy("z2_fp32_rr_ws4")
    one, two = (folder / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))
    one.rename(folder / "x"), two.rename(one), (folder / "x").rename(two)
    with pytest.raises(DamagedCheckpoint) as error:
        ckptcore.convert(str(folder), str(folder.parent / "out.safetensors"))
    assert error.value.findings[0].code == "replica-mismatch"


@pytest.mark.parametrize("name", ["z1_bf16_gadfp32_ws2", "z2_bf16_ws4"])
def test_partitions_that_changed_places_are_found_by_the_slices_that_they_list(copy, name: str) -> None:
    folder = copy(name)
    one, two = (next(folder.glob(f"*zero_pp_rank_{r}_*optim_states.pt")) for r in (0, 1))
    one.rename(folder / "x"), two.rename(one), (folder / "x").rename(two)
    with pytest.raises(DamagedCheckpoint) as error:
        ckptcore.convert(str(folder), str(folder.parent / "out.safetensors"))
    assert {f.file for f in error.value.findings if f.code == "mixed-saves"} == {one.name, two.name}


def test_partitions_of_another_size_are_refused(copy) -> None:
    folder = copy("z2_bf16_ws4")
    path = next(folder.glob("*zero_pp_rank_1_*optim_states.pt"))

    def shorter(tree: dict) -> None:
        groups = tree["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[0] = groups[0][:-100].clone()

    edited(path, shorter)
    with pytest.raises(MalformedCheckpoint) as error:
        ckptcore.open(str(folder))
    assert path.name in str(error.value) or "rank 1" in str(error.value)


def test_padding_is_not_part_of_any_tensor(copy) -> None:
    folder = copy("z3_bf16_ws4")
    path = folder / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"

    def poisoned(tree: dict) -> None:
        # The embedding has 1515 elements in parts of 379: the last of rank 3 is padding.
        with torch.no_grad():
            tree["optimizer_state_dict"]["fp32_flat_groups"][0][378] = float("nan")

    edited(path, poisoned)
    report = ckptcore.check(ckptcore.open(str(folder)), "values")
    assert report.ok
    assert not [f for f in report.findings if f.code == "not-finite"]


def test_a_wrong_universal_folder_is_recognised(corpus: Path, copy) -> None:
    folder, target = (
        corpus / "z2_fp32_rr_ws4_universal" / "ckpt",
        copy("z1_fp32_ws2").parent / "out.safetensors",
    )
    with pytest.raises(DamagedCheckpoint) as error:
        ckptcore.convert(str(folder), str(target))
    assert error.value.findings[0].code == "replica-mismatch"
    # In lower precision the weights cannot prove it; the configuration says that it is one of those.
    low = copy("z2_bf16_ws4_universal", "low")

    def robin(tree: dict) -> None:
        tree["ds_config"]["zero_optimization"]["round_robin_gradients"] = True

    edited(low / "mp_rank_00_model_states.pt", robin)
    assert "lost-at-save" in codes(low)


def edited(path: Path, change) -> None:
    """Save a file again, as torch does, with a change to its tree."""
    with torch.serialization.safe_globals(stubs()):
        tree = torch.load(path, weights_only=True)
    change(tree)
    torch.save(tree, path)


def stubs() -> list:
    """Return classes in place of DeepSpeed's own."""

    class Plain:
        def __reduce__(self):
            return dict, ()

    names = [
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    ]
    return [*((Plain, n) for n in names), (int, "deepspeed.runtime.zero.config.ZeroStageEnum")]
