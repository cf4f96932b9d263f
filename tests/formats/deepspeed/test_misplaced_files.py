"""Files of DeepSpeed in the place of others: of another expert, layer, rank, version or batch size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from deepspeed_files import each, model_states, partitions, save, shapes_of, tensors

import ckptcore
from ckptcore.errors import CkptError, DamagedCheckpoint, MalformedCheckpoint, UnsupportedFormat

ARCHIVE = samples.FIXTURES / "deepspeed.tar.zst"
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path):
    def make(name: str) -> Path:
        corpus = samples.unpack(request.config.rootpath / ".pytest_cache" / "samples", ARCHIVE)
        return Path(shutil.copytree(corpus / name / "ckpt", tmp_path / name))

    return make


def exchange(folder: Path, one: str, other: str) -> None:
    raw = (folder / one).read_bytes()
    shutil.copyfile(folder / other, folder / one)
    (folder / other).write_bytes(raw)


def mixed(folder: Path) -> set[str | None]:
    """Return the files of the findings `mixed-saves`, with which no conversion begins."""
    found = {f.file for f in ckptcore.open(str(folder)).findings if f.code == "mixed-saves"}
    with pytest.raises(DamagedCheckpoint) as error:
        ckptcore.convert(str(folder), str(folder.parent / "out.safetensors"))
    assert found <= {f.file for f in error.value.findings}
    assert error.value.hint
    return found


def zero3(ranks: int = 4, **fields: Any) -> dict[str, Any]:
    """Return files of ZeRO-3 with a frozen parameter and a tie, which the first rank lists."""
    group, frozen = tensors({"a": (16, 12), "b": (12,)}), tensors({"ice": (40, 4)}, 3)
    made: dict[str, Any] = {}
    for r in range(ranks):
        made[MODEL.format(r)] = model_states(
            ranks,
            module={n: torch.zeros(0) for n in (*group, *frozen, "again")},
            param_shapes=[shapes_of(group)],
            shared_params={"again": "a"} if r == 0 else {},
            frozen_param_shapes=shapes_of(frozen),
            frozen_param_fragments={"ice": each(frozen, ranks)[r]},
            **{"ds_config": {"zero_optimization": {"stage": 3}}, **fields},
        )
        made[OPTIM.format(r)] = {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": {}, "param_groups": []},
            "fp32_flat_groups": [each(group, ranks)[r]],
        }
    return made


@pytest.mark.parametrize(
    ("name", "path", "source"),
    [
        ("moe_ep2_z2_ws2", EXPERT.format(0, 1), EXPERT.format(0, 0)),
        ("z3_bf16_ws4", f"bf16_{OPTIM.format(2)}", f"bf16_{OPTIM.format(1)}"),
        ("z2_bf16_ws4", f"bf16_{OPTIM.format(3)}", f"bf16_{OPTIM.format(0)}"),
        ("z1_bf16_gadfp32_ws2", f"bf16_{OPTIM.format(1)}", f"bf16_{OPTIM.format(0)}"),
        ("autotp2_z1_fp32", "mp_rank_01_model_states.pt", "mp_rank_00_model_states.pt"),
        ("pipe2_z1_ws2", "layer_02-model_states.pt", "layer_01-model_states.pt"),
    ],
)
def test_a_copy_in_the_place_of_another_file_is_named(copied, name: str, path: str, source: str) -> None:
    folder = copied(name)
    assert ckptcore.check(ckptcore.open(str(folder)), "coverage").ok
    assert (folder / path).exists()
    shutil.copyfile(folder / source, folder / path)
    assert path in mixed(folder)


def test_exchanged_experts_are_named(copied) -> None:
    folder = copied("moe_ep2_z2_ws2")
    files = [EXPERT.format(0, n) for n in (1, 3)]
    exchange(folder, *files)
    assert mixed(folder) == set(files)


def test_experts_of_another_layer_are_named(tmp_path: Path) -> None:
    prefix = "layers.{}.deepspeed_moe.experts.deepspeed_experts.{}.w"
    files: dict[str, Any] = {"mp_rank_00_model_states.pt": model_states(1, num_experts=[3, 3], ds_config={})}
    for layer in (0, 1):
        for n in range(3):
            files[EXPERT.format(layer, n)] = tensors({prefix.format(layer, n): (9, 4)}, 7 * layer + n)
    folder = save(tmp_path / "ckpt", files)
    assert ckptcore.check(ckptcore.open(str(folder)), "bytes").ok
    exchange(folder, EXPERT.format(0, 2), EXPERT.format(1, 2))
    assert mixed(folder) == {EXPERT.format(0, 2), EXPERT.format(1, 2)}
    for n in range(3):  # a layer that is there twice
        shutil.copyfile(save(tmp_path / "x", files) / EXPERT.format(0, n), folder / EXPERT.format(1, n))
    assert mixed(folder)


def test_frozen_parts_of_one_rank_twice_are_named(tmp_path: Path) -> None:
    files = zero3()
    assert ckptcore.check(ckptcore.open(str(save(tmp_path / "good", files))), "bytes").ok
    files[MODEL.format(3)] = {**files[MODEL.format(2)], "note": "x"}
    assert mixed(save(tmp_path / "c", files)) == {MODEL.format(3)}


def test_the_first_rank_s_file_elsewhere_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", zero3())
    exchange(folder, MODEL.format(0), MODEL.format(2))
    assert mixed(folder) == {MODEL.format(2)}


@pytest.mark.parametrize("exchanged", [False, True])
def test_the_first_model_parallel_rank_s_file_elsewhere_is_named(exchanged: bool, tmp_path: Path) -> None:
    """Tensor ranks have files of like shapes; the first one alone lists tied parameters."""
    files: dict[str, Any] = {}
    for mp in (0, 1):
        group = tensors({"embed": (8, 6), "up": (4, 6)}, mp)
        ties = {"shared_params": {} if mp else {"head": "embed"}}
        path = f"mp_rank_{mp ^ exchanged:02d}_model_states.pt"
        module = {**group, "head": group["embed"]}
        files[path] = model_states(1, 2, module=module, param_shapes=[shapes_of(group)], **ties)
        files[f"zero_pp_rank_0_mp_rank_{mp ^ exchanged:02d}_optim_states.pt"] = partitions([group], 1)[0]
    found = [f for f in ckptcore.open(str(save(tmp_path / "c", files))).findings if f.code == "mixed-saves"]
    assert [f.file for f in found] == (["mp_rank_01_model_states.pt"] if exchanged else [])


@pytest.mark.parametrize("known", ["rank", "seed", "none"])
@pytest.mark.parametrize(("one", "two"), [(0, 1), (0, 2), (1, 3)])
def test_ranks_of_megatron_deepspeed(known: str, one: int, two: int, tmp_path: Path) -> None:
    """Two tensor ranks and two stages whose parameters have like shapes; the trainer's state is inside."""
    files: dict[str, Any] = {}
    for mp in range(4):
        stage, tensor = divmod(mp, 2)
        group = tensors({"up": (4, 6)}, mp)
        seed = 1234 + 100 * stage
        device = torch.tensor([seed + 2718 + tensor, 0], dtype=torch.int64).view(torch.uint8)
        rank = 2 * stage * 2 + tensor if known == "rank" else 0
        rng = {
            "torch_rng_state": torch.Generator().manual_seed(seed).get_state(),
            "rng_tracker_states": {"model-parallel-rng": device},
        }
        tree = model_states(
            2, 4, module=group, param_shapes=[shapes_of(group)], args={"rank": rank, "seed": 1234}
        )
        tree["checkpoint_parallel_dimensions"] = {"tp_degree": 2, "pp_degree": 2}
        name = {one: two, two: one}.get(mp, mp)
        files[f"mp_rank_{name:02d}_model_states.pt"] = tree | (rng if known == "seed" else {})
        for r, state in enumerate(partitions([group], 2)):
            files[f"zero_pp_rank_{r}_mp_rank_{name:02d}_optim_states.pt"] = state
    found = ckptcore.open(str(save(tmp_path / "c", files))).findings
    wrong = {f"mp_rank_{mp:02d}_model_states.pt" for mp in (one, two)}
    assert {f.file for f in found if f.code == "mixed-saves"} == (wrong if known != "none" else set())


def test_parts_that_are_constant_may_be_equal(tmp_path: Path) -> None:
    """Of a model that was not trained yet, or parts that are padding."""
    files = zero3()
    for r in range(4):
        files[OPTIM.format(r)]["fp32_flat_groups"][0].fill_(1)
        files[MODEL.format(r)]["frozen_param_fragments"]["ice"].fill_(0)
    assert ckptcore.check(ckptcore.open(str(save(tmp_path / "c", files))), "bytes").ok


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ds_version", "0.18.0"),
        ("ds_config", {"train_batch_size": 8, "zero_optimization": {"stage": 2}}),
        ("ds_config", {"train_batch_size": 4, "zero_optimization": {"stage": 1}}),
    ],
)
def test_an_optimizer_of_another_job_is_named(tmp_path: Path, key: str, value: Any) -> None:
    group = tensors({"a": (16, 12)})
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 2}}
    files: dict[str, Any] = {
        "mp_rank_00_model_states.pt": model_states(2, param_shapes=[shapes_of(group)], ds_config=config)
    }
    folder = save(tmp_path / "c", files)
    for r, state in enumerate(partitions([group], 2)):
        tree = {"optimizer_state_dict": state, "ds_config": config, "ds_version": "0.19.8"}
        torch.save(tree, folder / OPTIM.format(r))
        last = {**tree, key: value}
    assert ckptcore.check(ckptcore.open(str(folder)), "coverage").ok
    torch.save(last, folder / OPTIM.format(1))
    assert mixed(folder) == {OPTIM.format(1)}


def test_an_optimizer_of_another_stage_is_named(tmp_path: Path) -> None:
    group = tensors({"a": (16, 12)})
    states = partitions([group], 2)
    states[1]["zero_stage"] = 1
    files: dict[str, Any] = {OPTIM.format(r): s for r, s in enumerate(states)}
    files["mp_rank_00_model_states.pt"] = model_states(2, param_shapes=[shapes_of(group)])
    assert mixed(save(tmp_path / "c", files)) == {OPTIM.format(1)}


def test_parts_for_fewer_ranks_are_refused(tmp_path: Path) -> None:
    """MiCS cuts parameters over groups of ranks; without it the files are of another world size."""
    config = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    files = zero3(4, ds_config=config)
    with pytest.raises(UnsupportedFormat, match="MiCS") as error:
        ckptcore.open(str(save(tmp_path / "mics", files)))
    assert "zero_to_fp32.py" in error.value.hint
    # The secondary partitions of ZeRO++ are no part of a save.
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    assert ckptcore.check(ckptcore.open(str(save(tmp_path / "hpz", zero3(4, ds_config=config)))), "bytes").ok
    files = zero3(4)
    for r in range(4):
        files[OPTIM.format(r)] = zero3(2)[OPTIM.format(r % 2)]
    with pytest.raises(MalformedCheckpoint, match="2 ranks"):
        ckptcore.open(str(save(tmp_path / "c", files)))


def test_an_optimizer_on_nvme_is_refused(tmp_path: Path) -> None:
    files = zero3(2, ds_config={"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}})
    for r in range(2):
        files[OPTIM.format(r)]["fp32_flat_groups"] = [torch.zeros(0)]
    with pytest.raises(UnsupportedFormat, match="NVMe") as error:
        ckptcore.open(str(save(tmp_path / "c", files)))
    assert "save_16bit_model" in error.value.hint


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "state.pt"])
def test_placeholders_are_no_model(tmp_path: Path, name: str) -> None:
    """What a Trainer saves from ZeRO-3 without gathering: small parameters are there, the others empty."""
    state = {
        "model.embed_tokens.weight": torch.zeros(0),
        "model.layers.0.mlp.bias": torch.zeros(0, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(4),
        "model.ids": torch.zeros(0, dtype=torch.int64),
    }
    folder = tmp_path / "ckpt"
    folder.mkdir()
    if name.endswith("safetensors"):
        from safetensors.torch import save_file

        save_file(state, folder / name, {"format": "pt"})
    else:
        torch.save(state, folder / name)
    source = folder / name if name == "state.pt" else folder
    report = ckptcore.check(ckptcore.open(str(source)), "coverage")
    lost = {f.fqn for f in report.findings if f.code == "lost-at-save"}
    assert lost == {"model.embed_tokens.weight", "model.layers.0.mlp.bias"}
    for verb in ("export", "consolidate"):
        with pytest.raises(CkptError) as error:
            ckptcore.convert(str(source), str(tmp_path / verb), verb=verb)
        assert "stage3_gather_16bit_weights_on_model_save" in str(error.value.hint)


@pytest.mark.parametrize(
    ("path", "source", "code"),
    [
        ("zero/ln_f.weight/step.pt", "zero/ln_f.weight/fp32.pt", "item-mismatch"),
        ("zero/embed.weight/fp32.pt", "zero/ln_f.weight/fp32.pt", "item-mismatch"),
        ("zero/optimizer_state.pt", "zero/ln_f.weight/exp_avg.pt", "malformed"),
        ("zero/optimizer_state.pt", "mp_rank_00_model_states.pt", "malformed"),
    ],
)
def test_files_of_a_universal_folder_in_the_place_of_others(
    copied, path: str, source: str, code: str
) -> None:
    folder = copied("z1_bf16_gadfp32_ws2_universal")
    shutil.copyfile(folder / source, folder / path)
    with pytest.raises(CkptError) as error:
        ckptcore.convert(str(folder), str(folder.parent / "out.safetensors"))
    assert code in {error.value.code, *(f.code for f in getattr(error.value, "findings", ()))}
    assert path in str(error.value)


def test_a_universal_folder_without_the_optimizer_s_options_says_so(copied) -> None:
    folder = copied("z1_bf16_gadfp32_ws2_universal")
    (folder / "zero" / "optimizer_state.pt").unlink()
    found = ckptcore.open(str(folder)).findings
    assert [f.file for f in found if f.code == "missing-part"] == ["zero/optimizer_state.pt"]
