"""What is kept once for all ranks of a job: trees, step counts, cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed_files import MOMENTS, each, model_states, moment, partitions, save, shapes_of, tensors

import ckptcore
from ckptcore.encodings.torchzip.reader import read_objects
from ckptcore.errors import DamagedCheckpoint
from ckptcore.formats.deepspeed import rank_files
from ckptcore.store.local import LocalStore
from ckptcore.store.subfolder import FileRange

MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
SHAPES = {"a.up": (7, 5), "b.up": (7, 5), "norm": (5,), "one": ()}


def zero3(folder: Path, ranks: int, steps=None, tail=None) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a save of ZeRO-3; ``steps``: of each rank; ``tail``: (rank, value) more in its client state."""
    group = tensors(SHAPES)
    files = {}
    for r in range(ranks):
        more = {"note": tail[1]} if tail is not None and tail[0] == r else {"note": "x"}
        files[MODEL.format(r)] = model_states(
            ranks,
            module={n: torch.zeros(0) for n in group},
            param_shapes=[shapes_of(group)],
            ds_config={"zero_optimization": {"stage": 3}},
            **more,
        )
        step = torch.tensor(float(steps[r] if steps else 5))
        state = {"step": step} | {
            k: each({n: moment(k, v) for n, v in group.items()}, ranks)[r] for k in MOMENTS
        }
        files[OPTIM.format(r)] = {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": []},
            "fp32_flat_groups": [each(group, ranks)[r]],
        }
    return save(folder, files), group


def test_equal_trees_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, truth = zero3(tmp_path / "ckpt", 6)
    parsed = []
    real = read_objects

    def counted(*args, **options):
        found = real(*args, **options)
        parsed.append(found)
        return found

    monkeypatch.setattr(rank_files, "read_objects", counted)
    manifest = ckptcore.open(str(folder))
    assert len(parsed) == 12
    assert len({id(found.tree) for found in parsed}) == 2
    # Storages are a file's own: ranks differ in values.
    assert len({tuple(found.storages.items()) for found in parsed}) == 7
    assert ckptcore.check(manifest, "bytes").ok
    for name, value in truth.items():
        assert torch.equal(ckptcore.read(manifest, f"module.{name}"), value)
        for key in MOMENTS:
            assert torch.equal(ckptcore.read(manifest, f"optimizer.state.{name}.{key}"), moment(key, value))


def test_a_rank_with_another_tree_is_still_noticed(tmp_path: Path) -> None:
    folder, _ = zero3(tmp_path / "ckpt", 3, tail=(2, "y"))
    found = [f for f in ckptcore.open(str(folder)).findings if f.code == "rank-object"]
    assert [(f.fqn, f.file) for f in found] == [("note", MODEL.format(2))]


def test_equal_step_counts_are_compared_once_and_others_for_every_parameter(tmp_path: Path) -> None:
    folder, _ = zero3(tmp_path / "equal", 4)
    manifest = ckptcore.open(str(folder))
    ends = manifest.chunks.first
    count = {n: int(ends[at + 1] - ends[at]) for n, at in manifest.index.items() if n.endswith(".step")}
    assert sorted(count.values()) == [1, 1, 1, 4]
    assert ckptcore.read(manifest, "optimizer.state.b.up.step").item() == 5
    folder, _ = zero3(tmp_path / "unlike", 4, steps=[5, 5, 5, 6])
    with pytest.raises(DamagedCheckpoint) as error:
        ckptcore.convert(str(folder), str(tmp_path / "out.safetensors"))
    assert {f.code for f in error.value.findings} == {"replica-mismatch"}


def test_a_step_count_whose_bits_are_damaged_is_found(tmp_path: Path) -> None:
    """Also on a rank whose copy all parameters but one leave out."""
    folder, _ = zero3(tmp_path / "ckpt", 3)
    path = folder / OPTIM.format(2)
    found = read_objects(FileRange(LocalStore(folder), path.name, 0, path.stat().st_size), "x")
    step = found.tree["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["step"]
    raw = bytearray(path.read_bytes())
    raw[found.storages[step.key][0]] ^= 1
    path.write_bytes(raw)
    report = ckptcore.check(ckptcore.open(str(folder)), "bytes")
    assert not report.ok
    assert {f.file for f in report.findings if f.severity == "error"} == {path.name}


def test_a_group_before_a_tensor_of_another_size_is_not_taken_for_it(tmp_path: Path) -> None:
    """Layers of one shape share their cut, and not their place."""
    group = tensors({"a": (3, 4), "b": (3, 4), "c": (4, 3), "d": (12,)})
    files = {"mp_rank_00_model_states.pt": model_states(3, param_shapes=[shapes_of(group)])}
    files |= {OPTIM.format(r): s for r, s in enumerate(partitions([group], 3))}
    manifest = ckptcore.open(str(save(tmp_path / "ckpt", files)))
    for name, value in group.items():
        assert torch.equal(ckptcore.read(manifest, f"module.{name}"), value), name
