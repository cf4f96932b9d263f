"""Fields of DeepSpeed's files that are not what they should be: an error by name, or a finding."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import each, model_states, partitions, save, shapes_of, tensors

import ckptcore
from ckptcore.errors import AmbiguousModel, CkptError, MalformedCheckpoint, NameMismatch, NotComplete

OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
GROUPS = [tensors({"a": (4, 3), "b": (3,)}), tensors({"c": (5,)}, 1)]


def files() -> dict[str, Any]:
    module = {n: v.to(torch.bfloat16) for g in GROUPS for n, v in g.items()}
    tree = model_states(2, module=module, param_shapes=[shapes_of(g) for g in GROUPS])
    tree["buffer_names"] = ["scale"]
    tree["module"]["scale"] = torch.tensor([2.0])
    return {MODEL: tree} | {OPTIM.format(r): s for r, s in enumerate(partitions(GROUPS, 2))}


def stage_3() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for r in range(2):
        made[f"zero_pp_rank_{r}_{MODEL}"] = model_states(
            2,
            module={n: torch.zeros(0) for g in GROUPS for n in g},
            param_shapes=[shapes_of(g) for g in GROUPS],
            frozen_param_shapes={"ice": torch.Size([3])},
            frozen_param_fragments={"ice": torch.ones(2)},
            ds_config={"zero_optimization": {"stage": 3}},
        )
        made[OPTIM.format(r)] = {
            "zero_stage": 3,
            "partition_count": 2,
            "optimizer_state_dict": {"state": {}, "param_groups": []},
            "fp32_flat_groups": [each(g, 2)[r] for g in GROUPS],
        }
    return made


def opened(folder: Path) -> Any:
    """Open, check and read; anything but an error of the product is a failure."""
    begin = time.monotonic()
    try:
        manifest = ckptcore.open(str(folder))
        report = ckptcore.check(manifest, "values")
        for spec in manifest.tensors if report.ok else ():
            ckptcore.read(manifest, spec.fqn)
    except CkptError as error:
        return error
    else:
        return report
    finally:
        assert time.monotonic() - begin < 120


ODD: list[Any] = [None, True, -1, 0, 7, 1 << 62, 1.5, float("nan"), "x", "a\nb/../c", b"x", (), (1, (2,))]
ODD += [[], [None], [[]], [[1]], {}, {1: 2}, {"a": {"b": []}}, {"state": [], "param_groups": 3}]
ODD += [torch.ones(3), torch.ones(()), [torch.ones(2)], {"a": torch.ones(2)}, [{"a": (2, 6)}, {"a": (5,)}]]
ODD += [{"zero_optimization": []}, {0: {"exp_avg": torch.ones(1)}}, [{"exp_avg": torch.ones(9)}]]


@pytest.mark.parametrize("make", [files, stage_3])
def test_no_field_ends_in_a_traceback(tmp_path: Path, make: Callable[[], dict[str, Any]]) -> None:
    names = make()
    number = 0
    for name in (next(iter(names)), OPTIM.format(0), OPTIM.format(1)):
        keys = [*names[name], "param_alignment_paddings", "checkpoint_parallel_dimensions", "num_experts"]
        for key in keys[:: 1 if make is files else 2]:
            value = ODD[number % len(ODD)], ODD[(number * 7 + 3) % len(ODD)]
            for odd in value:
                number += 1
                changed = make()
                changed[name][key] = odd
                opened(save(tmp_path / f"{number}", changed))


@pytest.mark.alike(7)
@pytest.mark.parametrize("number", range(len(ODD)))
def test_no_value_ends_in_a_traceback(tmp_path: Path, number: int) -> None:
    for n, (name, key) in enumerate(
        [
            (MODEL, "module"),
            (MODEL, "param_shapes"),
            (MODEL, "ds_config"),
            (OPTIM.format(0), "base_optimizer_state"),
            (OPTIM.format(0), "single_partition_of_fp32_groups"),
            (OPTIM.format(1), "partition_count"),
        ]
    ):
        changed = files()
        changed[name][key] = ODD[number]
        opened(save(tmp_path / f"{n}", changed))


@pytest.mark.parametrize("key", ["param_alignment_paddings", "partition_count"])
def test_ranks_that_lay_buffers_out_differently_are_refused(tmp_path: Path, key: str) -> None:
    changed = files()
    changed[OPTIM.format(1)][key] = [[1, 0], [0]] if key == "param_alignment_paddings" else [1, 2]
    assert isinstance(opened(save(tmp_path / "c", changed)), MalformedCheckpoint)


@pytest.mark.parametrize("paddings", [{}, {"a": 1}, [[0, 0]], [[0], [0]], 7, [[1 << 45, 0], [0]]])
def test_paddings_that_are_none_are_refused(tmp_path: Path, paddings: Any) -> None:
    changed = files()
    for r in (0, 1):
        changed[OPTIM.format(r)]["param_alignment_paddings"] = paddings
    assert isinstance(opened(save(tmp_path / "c", changed)), MalformedCheckpoint)


@pytest.mark.parametrize("twice", ["bf16_" + OPTIM.format(0), "mp_rank_0_model_states.pt"])
def test_two_files_of_one_rank_are_refused(tmp_path: Path, twice: str) -> None:
    changed = files()
    changed[twice] = changed[OPTIM.format(0) if "optim" in twice else MODEL]
    error = opened(save(tmp_path / "c", changed))
    assert isinstance(error, MalformedCheckpoint)
    assert twice in str(error)


def test_names_that_are_used_twice_are_refused(tmp_path: Path) -> None:
    changed = files()
    changed[MODEL]["param_shapes"][1]["a"] = torch.Size([12])
    assert isinstance(opened(save(tmp_path / "1", changed)), MalformedCheckpoint)
    changed = files()
    changed[MODEL]["module.a"] = torch.ones(4)  # client state
    assert isinstance(opened(save(tmp_path / "2", changed)), NameMismatch)
    changed = files()
    changed[MODEL]["module"] |= {1: torch.ones(2), "1": torch.zeros(2)}
    assert isinstance(opened(save(tmp_path / "3", changed)), NameMismatch)


def test_a_weight_of_another_shape_than_its_master(tmp_path: Path) -> None:
    changed = files()
    changed[MODEL]["module"]["a"] = torch.zeros(12)
    report = opened(save(tmp_path / "c", changed))
    assert "mixed-saves" in {f.code for f in report.findings}


def test_a_tie_with_a_tensor_of_another_shape_is_none(tmp_path: Path) -> None:
    changed = files()
    changed[MODEL]["shared_params"] = {"scale": "a", "x": "y", "y": "x"}
    folder = save(tmp_path / "c", changed)
    assert opened(folder).ok
    assert ckptcore.read(ckptcore.open(str(folder)), "module.scale").tolist() == [2.0]


def test_partitions_without_one_that_is_listed(tmp_path: Path) -> None:
    """No partition is there, and the configuration names no stage: the masters are missing all the same."""
    changed = {MODEL: files()[MODEL] | {"ds_config": None}}
    report = opened(save(tmp_path / "c", changed))
    assert "missing-rank" in {f.code for f in report.findings}


def test_sizes_of_jobs_that_no_file_proves(tmp_path: Path) -> None:
    for n, sizes in enumerate(({"dp_world_size": 1 << 20}, {"mp_world_size": 1 << 20}, {"dp_world_size": 1})):
        opened(save(tmp_path / f"{n}", {k: v | sizes if k == MODEL else v for k, v in files().items()}))
    changed = files()
    changed[MODEL] |= {"dp_world_size": 1 << 20, "mp_world_size": 1 << 20}
    for r in (0, 1):
        changed[OPTIM.format(r)]["partition_count"] = [1, 1 << 20]
    opened(save(tmp_path / "experts", changed))
    changed[MODEL]["checkpoint_parallel_dimensions"] = {"tp_degree": 1 << 20, "pp_degree": 1}
    changed["layer_00-model_00-model_states.pt"] = {"w": torch.ones(2)}
    changed[MODEL]["param_shapes"][0]["0.w"] = torch.Size([2])
    opened(save(tmp_path / "layers", changed))


@pytest.mark.soak
def test_many_groups(tmp_path: Path) -> None:
    count = 3000
    groups = [{f"p{n}": torch.ones(1)} for n in range(count)]
    changed = {MODEL: model_states(1, module={}, param_shapes=[shapes_of(g) for g in groups])}
    changed[OPTIM.format(0)] = partitions(groups, 1)[0]
    everything = list(range(count)) * 50
    changed[OPTIM.format(0)]["base_optimizer_state"]["param_groups"] = [{"params": everything}] * 50
    opened(save(tmp_path / "c", changed))


@pytest.mark.parametrize("text", ["", "\n", "../x", "/etc", "a/../global_step1", "x" * 5000, "\x00", "é"])
def test_strange_text_in_latest(tmp_path: Path, text: str) -> None:
    save(tmp_path / "global_step1", files())
    (tmp_path / "latest").write_text(text)
    assert isinstance(opened(tmp_path), NotComplete)


def test_latest_with_a_line_end_and_with_folders(tmp_path: Path) -> None:
    save(tmp_path / "run" / "global_step1", files())
    save(tmp_path / "run" / "global_step2", files())
    (tmp_path / "latest").write_text("run/global_step2\n")
    assert ckptcore.open(str(tmp_path)).root.endswith("run/global_step2")
    (tmp_path / "latest").unlink()
    (tmp_path / "run" / "latest").write_text("global_step1\n")
    assert ckptcore.open(str(tmp_path / "run")).root.endswith("run/global_step1")


def test_weights_beside_the_steps(tmp_path: Path) -> None:
    """Transformers' Trainer writes the model beside the folder of DeepSpeed."""
    from safetensors.torch import save_file

    save(tmp_path / "global_step1", files())
    (tmp_path / "latest").write_text("global_step1")
    save_file({"a": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    report = opened(tmp_path)
    assert report.ok
    assert "consolidated-differs" in {f.code for f in report.findings}  # it has other values
    assert opened(tmp_path / "global_step1").ok


def test_two_saves_and_nothing_that_names_one(tmp_path: Path) -> None:
    for n in (1, 2):
        save(tmp_path / f"global_step{n}", files())
    assert isinstance(opened(tmp_path), AmbiguousModel)


def test_masters_of_a_plain_optimizer_that_are_too_few(tmp_path: Path) -> None:
    weights = tensors({"a": (4, 3), "b": (3,)})
    optimizer = {
        "optimizer_state_dict": {
            "state": {0: {"exp_avg": torch.ones(4, 3)}, 1: {"exp_avg": torch.ones(3)}},
            "param_groups": [{"params": [0, 1], "lr": torch.tensor(0.1)}],
        },
        "fp32_groups": [[weights["a"]]],
    }
    tree = model_states(1, module=weights, optimizer=optimizer, ds_config={})
    report = opened(save(tmp_path / "c", {MODEL: tree}))
    assert "unnamed-states" in {f.code for f in report.findings}


RULES = [
    None,
    {"parameter_with_sub_params": 5},
    {"parameter_with_sub_params": [{"patterns": ["a"], "shape": None, "partition_dim": 0}]},
    {
        "parameter_with_sub_params": [
            {"patterns": ["a"], "shape": ((2, 6), 3), "sub_param_shard_widths": [[1, 1], [4, 2]]}
        ]
    },
    {"affine_map": {"version": 1, "params": {3: {}}}},
    {"affine_map": {"version": 1, "params": {"a": 5}}},
    {
        "affine_map": {
            "version": 1,
            "params": {"a": {"logical_shape": [8, 3], "ranks": {0: {"shard_shape": [4, 3], "pieces": 5}}}},
        }
    },
    {"vocabulary_parameter_patterns": [3]},
    {"original_vocab_size": -1, "vocabulary_parameter_patterns": ["a"]},
    {"original_vocab_size": 1 << 60, "vocabulary_parameter_patterns": ["a"]},
]


@pytest.mark.parametrize("number", range(len(RULES)))
def test_rules_of_tensor_parallel_ranks(tmp_path: Path, number: int) -> None:
    changed: dict[str, Any] = {}
    group = tensors({"a": (4, 3), "b": (3,)})
    for mp in (0, 1):
        tree = model_states(1, 2, module=dict(group), param_shapes=[shapes_of(group)])
        changed[f"mp_rank_{mp:02d}_model_states.pt"] = tree | {"universal_checkpoint_info": RULES[number]}
        changed[f"zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt"] = partitions([group], 1)[0]
    report = opened(save(tmp_path / "c", changed))
    if number == 0:  # nothing says how they are joined: each is named, and the rest is read
        assert {f.fqn for f in report.findings if f.code == "unmerged-tensor"} == {"module.a", "module.b"}


def test_layers_of_tensor_ranks_that_the_job_has_not(tmp_path: Path) -> None:
    changed = files()
    changed[MODEL]["checkpoint_parallel_dimensions"] = {"tp_degree": 1, "pp_degree": 1}
    changed["layer_00-model_01-model_states.pt"] = {"w": torch.ones(2)}
    report = opened(save(tmp_path / "c", changed))
    assert "mixed-saves" in {f.code for f in report.findings}


def test_a_frozen_part_of_another_size(tmp_path: Path) -> None:
    changed = stage_3()
    changed[f"zero_pp_rank_1_{MODEL}"]["frozen_param_fragments"]["ice"] = torch.ones(7)
    report = opened(save(tmp_path / "c", changed))
    assert "item-mismatch" in {f.code for f in report.findings}


def test_a_latest_that_is_huge_is_not_read(tmp_path: Path) -> None:
    save(tmp_path / "global_step1", files())
    with (tmp_path / "latest").open("wb") as out:
        out.truncate(1 << 40)
    assert isinstance(opened(tmp_path), NotComplete)


@pytest.mark.filterwarnings("ignore")
def test_an_alias_of_a_tensor_that_cannot_be_read(tmp_path: Path) -> None:
    changed = files()
    for r in (0, 1):
        masters = changed[OPTIM.format(r)]["single_partition_of_fp32_groups"]
        masters[1] = torch.quantize_per_tensor(masters[1], 1.0, 0, torch.quint8)
    changed[MODEL]["shared_params"] = {"d": "c"}
    changed[MODEL]["module"]["d"] = torch.zeros(5)
    manifest = ckptcore.open(str(save(tmp_path / "c", changed)))
    unread = {b.key for b in manifest.blobs if b.unread is not None}
    assert unread >= {"module.c", "module.d"}
    assert not {"module.c", "module.d"} & manifest.index.keys()


def test_one_strided_piece_for_many_parameters_is_bounded(tmp_path: Path) -> None:
    names = {f"p{n}": (60_000, 2) for n in range(20)}
    piece = {"shape": [30_000, 2], "source": [0, [4, 1]], "dest": [0, [2, 1]]}
    ranks = {r: {"shard_shape": [60_000, 2], "pieces": [piece]} for r in (0, 1)}
    info = {"affine_map": {"version": 1, "params": {"p": {"logical_shape": [60_000, 2], "ranks": ranks}}}}
    shapes = {n: torch.Size(s) for n, s in names.items()}
    tree = model_states(1, 2, module={}, param_shapes=[shapes], universal_checkpoint_info=info)
    changed = {f"mp_rank_{mp:02d}_model_states.pt": tree for mp in (0, 1)}
    assert isinstance(opened(save(tmp_path / "c", changed)), MalformedCheckpoint)


class Strange:
    """A class that no reader permits, with a tensor inside."""

    def __init__(self) -> None:
        self.weight = torch.ones(9)


@pytest.mark.parametrize("odd", [Strange(), [torch.ones(2), torch.ones(3)], "text"])
def test_an_odd_buffer_is_a_finding_on_its_parameters(tmp_path: Path, odd: Any) -> None:
    changed = files()
    changed[OPTIM.format(1)]["single_partition_of_fp32_groups"][1] = odd
    changed[MODEL]["of_a_user"] = Strange()
    manifest = ckptcore.open(str(save(tmp_path / "c", changed)))
    assert "module.c" not in manifest.index
    assert "module.c" in {b.key for b in manifest.blobs if b.unread is not None}
    assert torch.equal(ckptcore.read(manifest, "module.a"), GROUPS[0]["a"])
