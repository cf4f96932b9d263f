"""Kinds of DeepSpeed checkpoints that no sample has, written here by a plain re-enactment of the cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed_files import (
    MOMENTS,
    deepspeed_classes,
    each,
    model_states,
    moment,
    partitions,
    save,
    shapes_of,
    tensors,
    together,
)

import ckptcore
from ckptcore.errors import UnsupportedFormat
from ckptcore.formats import open_source, read_manifest

OPTIM = "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
MODEL = "mp_rank_{:02d}_model_states.pt"


def require(folder: Path, truth, *, states=(), weights="auto"):
    """Compare every tensor of the model, and states of parameters; nothing may be wrong."""
    manifest = read_manifest(open_source(str(folder), weights=weights))
    assert not [f for f in manifest.findings if f.severity == "error"], manifest.findings
    report = ckptcore.check(manifest, "values")
    assert report.ok, report.findings
    for name, value in truth.items():
        found = ckptcore.read(manifest, f"module.{name}")
        assert found.dtype == value.dtype, name
        assert torch.equal(found, value), name
    for name in states:
        for key in MOMENTS:
            found = ckptcore.read(manifest, f"optimizer.state.{name}.{key}")
            assert torch.equal(found, moment(key, truth[name])), (name, key)
    return manifest


def low(values) -> dict:
    return {n: v.to(torch.bfloat16) for n, v in values.items()}


@pytest.mark.parametrize("elastic", [False, True])
def test_states_in_lists_without_padding(tmp_path: Path, elastic: bool) -> None:
    groups = [tensors({"a.weight": (7, 5), "b.weight": (3, 3)}), tensors({"a.bias": (7,), "c": ()}, 1)]
    truth = groups[0] | groups[1]
    files = {MODEL.format(0): model_states(3, module=low(truth), param_shapes=[shapes_of(g) for g in groups])}
    files |= {OPTIM.format(r, 0): s for r, s in enumerate(partitions(groups, 3, elastic=elastic))}
    require(save(tmp_path / "ckpt", files), truth, states=truth)


def experts(layer: int, numbers, seed: int) -> dict:
    moe = f"layers.{layer}.moe.deepspeed_moe.experts.deepspeed_experts"
    return tensors({f"{moe}.{n}.up": (3, 5) for n in numbers} | {f"{moe}.{n}.b": (3,) for n in numbers}, seed)


@pytest.mark.parametrize("blocks", [False, True], ids=["experts first", "data first"])
def test_experts_over_fewer_ranks_than_data(tmp_path: Path, blocks: bool) -> None:
    """Four ranks, two of them for each half of the experts; two layers, whose experts are in two groups."""
    dense = tensors({"emb": (9, 4)})
    full = {n: experts(n, range(4), 10 + n) for n in (0, 1)}
    local = {e: {} for e in (0, 1)}
    for layer, values in full.items():
        for n in range(4):
            for key in ("up", "b"):
                prefix = f"layers.{layer}.moe.deepspeed_moe.experts.deepspeed_experts."
                local[n // 2][f"{prefix}{n % 2}.{key}"] = values[f"{prefix}{n}.{key}"]
    # A group of experts that is too large is split: experts 0 in one, experts 1 in the other.
    split = {
        e: [{n: v for n, v in of.items() if f"experts.{i}." in n} for i in (0, 1)] for e, of in local.items()
    }
    config = {"zero_optimization": {"stage": 1}, "use_data_before_expert_parallelism": blocks}
    shapes = [shapes_of(dense), *map(shapes_of, split[0])]
    tree = model_states(4, module=low(dense), param_shapes=shapes, num_experts=[4, 4], ds_config=config)
    files = {MODEL.format(0): tree}
    for layer, values in full.items():
        for n in range(4):
            own = {k: v for k, v in low(values).items() if f"experts.{n}." in k}
            files[f"layer_{layer}_expert_{n}_mp_rank_00_model_states.pt"] = own
    for r in range(4):
        e, place = divmod(r, 2) if blocks else (r % 2, r // 2)
        mine, base = partitions([dense], 4)[r], partitions(split[e], 2)[place]
        mine["partition_count"] = [4, 2, 2]
        mine["single_partition_of_fp32_groups"] += base["single_partition_of_fp32_groups"]
        states = base["base_optimizer_state"]["state"]
        mine["base_optimizer_state"]["state"] |= {1: states[0], 2: states[1]}
        files[OPTIM.format(r, 0)] = mine
    truth = dense | full[0] | full[1]
    folder = save(tmp_path / "ckpt", files)
    require(folder, truth, states=truth)
    for path in folder.glob("layer_1_expert_*"):
        path.unlink()
    found = read_manifest(open_source(str(folder))).findings
    assert "missing-rank" in {f.code for f in found}, "the experts of a full layer"


def test_three_ranks_of_stage_3_with_tied_and_frozen_parameters(tmp_path: Path) -> None:
    groups = [tensors({"embed": (7, 5)}), tensors({"up": (4, 5), "one": (1,)}, 1)]
    frozen = {"ice": tensors({"ice": (3, 5)}, 2)["ice"].to(torch.bfloat16)}
    names = ["embed", "up", "one", "ice", "head", "ice_again"]
    module = {n: torch.zeros(0, dtype=torch.bfloat16) for n in names} | {"scale": torch.tensor([3.0])}
    files = {}
    for r in range(3):
        part = -(-15 // 3)
        files[f"zero_pp_rank_{r}_{MODEL.format(0)}"] = model_states(
            3,
            module=module,
            buffer_names=["scale"],
            param_shapes=[shapes_of(g) for g in groups],
            shared_params={"head": "embed", "ice_again": "ice"} if r == 0 else {},
            frozen_param_shapes=shapes_of(frozen),
            frozen_param_fragments={"ice": frozen["ice"].reshape(-1)[r * part : (r + 1) * part].clone()},
            ds_config={"zero_optimization": {"stage": 3}},
        )
        states = [
            {"step": torch.tensor(5.0)}
            | {k: each({n: moment(k, v) for n, v in g.items()}, 3)[r] for k in MOMENTS}
            for g in groups
        ]
        files[f"bf16_{OPTIM.format(r, 0)}"] = {
            "zero_stage": 3,
            "partition_count": 3,
            "optimizer_state_dict": {"state": dict(enumerate(states)), "param_groups": []},
            "fp32_flat_groups": [each(g, 3)[r] for g in groups],
        }
    trained = groups[0] | groups[1]
    truth = (
        trained | frozen | {"head": trained["embed"], "ice_again": frozen["ice"], "scale": module["scale"]}
    )
    require(save(tmp_path / "ckpt", files), truth, states=trained)


def test_pipeline_stages_of_two_tensor_ranks_with_a_tied_layer(tmp_path: Path) -> None:
    full = tensors({"tied_modules.embed.weight": (8, 3), "1.up.weight": (6, 3), "2.down.weight": (3, 6)})
    dims = {"tied_modules.embed.weight": 0, "1.up.weight": 0, "2.down.weight": 1}
    info = {
        "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
        "vocabulary_parameter_patterns": [r"tied_modules\.embed\.weight", r"0\.weight"],
        "original_vocab_size": 7,
    }
    stages = (["tied_modules.embed.weight", "1.up.weight"], ["2.down.weight", "tied_modules.embed.weight"])
    files = {}
    for mp in range(4):
        stage, tp = divmod(mp, 2)
        group = {n: full[n].chunk(2, dims[n])[tp].clone() for n in stages[stage]}
        files[MODEL.format(mp)] = model_states(
            2, 4, module=None, param_shapes=[shapes_of(group)], universal_checkpoint_info=info
        )
        files |= {f"bf16_{OPTIM.format(r, mp)}": s for r, s in enumerate(partitions([group], 2))}
        for name in stages[stage][: 2 - stage]:
            layer, _, rest = name.replace("tied_modules.embed", "0").partition(".")
            path = f"layer_{int(layer):02d}-model_{tp:02d}-model_states.pt"
            files[path] = low({rest: group[name]})
    folder = save(tmp_path / "ckpt", files)
    kept = full["tied_modules.embed.weight"][:7]
    truth = full | {"tied_modules.embed.weight": kept, "0.weight": kept}
    manifest = require(folder, truth, states=full)
    assert torch.equal(ckptcore.read(manifest, "lp/0.weight"), kept.to(torch.bfloat16))


def test_a_dynamic_loss_scaler_and_values_that_are_tensors(tmp_path: Path) -> None:
    group = tensors({"a": (4, 3)})
    tree = model_states(2, module={n: v.half() for n, v in group.items()}, param_shapes=[shapes_of(group)])
    with deepspeed_classes() as classes:
        scaler = classes.DynamicLossScaler()
        scaler.__dict__.update(cur_scale=65536.0, cur_iter=7, dtype=torch.float16, last_overflow_iter=-1)
        states = partitions([group], 2)
        for r, state in enumerate(states):
            state |= {"loss_scaler": scaler, "zero_stage": classes.ZeroStageEnum.gradients}
            state["global_norm"] = torch.tensor([float(r)])
            state["base_optimizer_state"]["param_groups"][0]["lr"] = torch.tensor(0.25)
        files = {OPTIM.format(r, 0): s for r, s in enumerate(states)} | {MODEL.format(0): tree}
        folder = save(tmp_path / "ckpt", files)
    manifest = require(folder, group, states=group)
    norms = [t.fqn for t in manifest.tensors if "global_norm" in t.fqn]
    assert [ckptcore.read(manifest, n).item() for n in sorted(norms)] == [0.0, 1.0]
    assert "optimizer.loss_scaler" in {b.key for b in manifest.blobs}


@pytest.mark.parametrize("named", [True, False])
def test_an_old_release(tmp_path: Path, named: bool) -> None:
    """Other names of files, one dict of shapes or none, no degrees."""
    group = tensors({"a": (5, 3), "b": (2,)})
    tree = model_states(2, module={n: v.half() for n, v in group.items()})
    tree["param_shapes"] = shapes_of(group)
    for key in ("frozen_param_shapes", "frozen_param_fragments", "shared_params", "ds_config"):
        del tree[key]
    if not named:
        del tree["param_shapes"]
    states = partitions([group], 2)
    for state in states:
        del state["partition_count"]
    files = {f"zero_pp_rank_{r}_mp_rank_00optim_states.pt": s for r, s in enumerate(states)}
    folder = tmp_path / "ckpt"
    folder.mkdir()
    for name, state in files.items():
        torch.save({"optimizer_state_dict": state}, folder / name)
    save(folder, {MODEL.format(0): tree})
    if named:
        require(folder, group, states=group)
        return
    # Nothing names the masters: the weights are read, and the buffers stay as they are.
    manifest = require(folder, {n: v.half() for n, v in group.items()})
    assert "unnamed-states" in {f.code for f in manifest.findings}
    assert sum("single_partition_of_fp32_groups" in t.fqn for t in manifest.tensors) == 2
    with pytest.raises(UnsupportedFormat):
        read_manifest(open_source(str(folder), weights="master"))


def test_weights_that_are_nested(tmp_path: Path) -> None:
    """Megatron-DeepSpeed nests its state dict."""
    truth = tensors({"language_model.embedding.weight": (4, 3)})
    module = {"language_model": {"embedding": {"weight": truth["language_model.embedding.weight"]}}}
    files = {MODEL.format(0): model_states(1, module=module, param_shapes=[shapes_of(truth)])}
    files |= {OPTIM.format(0, 0): partitions([truth], 1)[0]}
    require(save(tmp_path / "ckpt", files), truth, states=truth)


def test_states_that_are_no_partition_stay_as_they_are(tmp_path: Path) -> None:
    """Error buffers of 1-bit optimizers have a size of their own."""
    group = tensors({"a": (5, 3)})
    states = partitions([group], 2)
    for state in states:
        state["base_optimizer_state"]["state"][0]["worker_error"] = torch.arange(40.0)
    files = {OPTIM.format(r, 0): s for r, s in enumerate(states)}
    files[MODEL.format(0)] = model_states(2, module=low(group), param_shapes=[shapes_of(group)])
    manifest = require(save(tmp_path / "ckpt", files), group, states=group)
    raw = [t.fqn for t in manifest.tensors if "worker_error" in t.fqn]
    assert len(raw) == 2
    assert torch.equal(ckptcore.read(manifest, raw[0]), torch.arange(40.0))


def test_partitions_are_the_save_where_both_forms_are(tmp_path: Path) -> None:
    """``ds_to_universal`` into the folder of the save itself."""
    group = tensors({"a": (4, 3)})
    files = {OPTIM.format(0, 0): partitions([group], 1)[0]}
    files[MODEL.format(0)] = model_states(1, module=low(group), param_shapes=[shapes_of(group)])
    folder = save(tmp_path / "ckpt", files)
    save(folder / "zero" / "a", {"fp32.pt": {"param": torch.zeros(4, 3), "cat_dim": 0}})
    manifest = require(folder, group, states=group)
    assert "stray-file" in {f.code for f in manifest.findings}


def test_a_parameter_that_a_universal_folder_lacks(tmp_path: Path) -> None:
    values = tensors({"a": (4, 3), "b": (2,), "path/c": (3,)})
    tree = model_states(2, module=low(values), param_shapes=[shapes_of(values)])
    folder = save(tmp_path / "ckpt", {MODEL.format(0): tree})
    for name, value in values.items():
        (folder / "zero" / name).mkdir(parents=True)
        save(folder / "zero" / name, {f"{k}.pt": {"param": moment(k, value)} for k in MOMENTS})
        save(folder / "zero" / name, {"fp32.pt": {"param": value}, "step.pt": torch.tensor(5.0)})
    torch.save({"loss_scaler": None, "clip_grad": 1.5}, folder / "zero" / "optimizer_state.pt")
    manifest = require(folder, values, states=values)
    assert "optimizer.clip_grad" in {b.key for b in manifest.blobs}
    (folder / "zero" / "a" / "fp32.pt").unlink()
    (folder / "zero" / "b" / "exp_avg.pt").unlink()
    manifest = ckptcore.open(str(folder))
    missing = {f.fqn for f in manifest.findings if f.code == "missing-file"}
    assert missing == {"module.a", "optimizer.state.b.exp_avg"}
    assert "module.a" not in manifest.index


def test_partitions_are_re_enacted_as_documented() -> None:
    parts = together({"a": torch.arange(5.0)}, 2)
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3], [4, -77, -77, -77]]


def test_before_the_first_step_there_are_no_states(tmp_path: Path) -> None:
    group = tensors({"a": (5, 3)})
    states = partitions([group], 2)
    for state in states:
        state["base_optimizer_state"]["state"] = {}
    files = {OPTIM.format(r, 0): s for r, s in enumerate(states)}
    files[MODEL.format(0)] = model_states(2, module=low(group), param_shapes=[shapes_of(group)])
    require(save(tmp_path / "ckpt", files), group)
    # A rank that has none where others have theirs is no such save.
    files[OPTIM.format(0, 0)] = partitions([group], 2)[0]
    manifest = ckptcore.open(str(save(tmp_path / "mixed", files)))
    assert not ckptcore.check(manifest, "coverage").ok


def test_flat_masters_of_float16_are_kept(tmp_path: Path) -> None:
    """FP16_Optimizer without ZeRO: one flat buffer for each group, and nothing names what is in it."""
    group = tensors({"a": (5, 3), "b": (2,)})
    flat = torch.cat([v.reshape(-1) for v in group.values()])
    optimizer = {
        "dynamic_loss_scale": True,
        "optimizer_state_dict": {"state": {0: {"exp_avg": flat + 1}}, "param_groups": [{"params": [0]}]},
        "fp32_groups_flat": [flat],
    }
    module = {n: v.half() for n, v in group.items()}
    tree = model_states(2, module=module, optimizer=optimizer, ds_config={})
    manifest = require(save(tmp_path / "ckpt", {MODEL.format(0): tree}), module)
    assert torch.equal(ckptcore.read(manifest, "optimizer.fp32_groups_flat.0"), flat)
    assert "unnamed-states" in {f.code for f in manifest.findings}


def test_values_of_other_keys_are_kept(tmp_path: Path) -> None:
    """Client state with tensors, token dropping, extra states of an optimizer, and `_extra_state`."""
    group = tensors({"a": (5, 3)})
    states = partitions([group], 2)
    for key in ("max_exp_avg_sq", "momentum_buffer"):
        for r, state in enumerate(states):
            state["base_optimizer_state"]["state"][0][key] = together(group, 2)[r]
    module = low(group) | {"a._extra_state": torch.arange(4, dtype=torch.uint8), "b._extra_state": None}
    tree = model_states(2, module=module, param_shapes=[shapes_of(group)])
    tree |= {"random_ltd": {"seq": 4, "mask": torch.arange(6)}, "ema": {"a": torch.ones(2)}, "note": "x"}
    files = {OPTIM.format(r, 0): s for r, s in enumerate(states)} | {MODEL.format(0): tree}
    extra = {"a._extra_state": module["a._extra_state"]}
    manifest = require(save(tmp_path / "ckpt", files), group | extra, states=group)
    assert torch.equal(ckptcore.read(manifest, "random_ltd.mask"), torch.arange(6))
    assert torch.equal(ckptcore.read(manifest, "ema.a"), torch.ones(2))
    for key in ("max_exp_avg_sq", "momentum_buffer"):
        assert torch.equal(ckptcore.read(manifest, f"optimizer.state.a.{key}"), group["a"])
