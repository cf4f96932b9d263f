"""Ranks' own files: what cannot be put together, or is of no kind that is known, is refused by name."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import old_pickles as old
import pytest
import torch

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.core.object_tree import decode
from ckptcore.errors import (
    AmbiguousModel,
    MalformedCheckpoint,
    NameMismatch,
    UnreadablePart,
    UnsupportedFormat,
)
from ckptcore.formats.torch_ranks.optimizer import numbers_for

SHARD = [("Shard", {"dim": 0})]


def ranks(folder: Path, states: list[Any], name: str = "model_rank{}.pt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, state in enumerate(states):
        torch.save(state, folder / name.format(rank))
    return folder


def shards(folder: Path, extra: list[dict[str, Any]], world: int | None = None, named: str = "w") -> Path:
    """Rank files with one sharded tensor, and something else in each."""
    folder.mkdir(parents=True, exist_ok=True)
    world = world or len(extra)
    for rank, more in enumerate(extra):
        value = old.dtensor("2.6", torch.ones(2), (2 * world,), torch.arange(world), [rank], SHARD)
        old.save({named: value, **more}, folder / f"model_rank_{rank}.pt")
    return folder


def read(folder: Path) -> Manifest:
    return ckptcore.open(str(folder))


def codes(folder: Path) -> list[str]:
    return [f.code for f in read(folder).findings]


def test_a_file_that_is_not_a_torch_zip(tmp_path: Path) -> None:
    folder = ranks(tmp_path / "a", [{"w": torch.ones(2)}] * 2)
    (folder / "model_rank1.pt").write_bytes(b"none")
    with pytest.raises(
        MalformedCheckpoint, match=r"model_rank1\.pt \(4 bytes\) is not a file of torch\.save"
    ):
        read(folder)


def test_ranks_without_a_dict(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=r"must contain a state dict \(got list\)"):
        read(ranks(tmp_path / "a", [[torch.ones(2)]] * 2))
    # One of several kinds has a name of its own to give.
    folder = ranks(tmp_path / "b", [{"w": torch.ones(2)}] * 2)
    ranks(folder, [[torch.tensor([r]), 5] for r in range(2)], "rng_rank{}.pt")
    found = read(folder)
    assert {t.fqn for t in found.tensors} == {"model.w", "rng.0.rank0", "rng.0.rank1"}
    assert {b.key: decode(b.tree) for b in found.blobs} == {"rng.1": 5}


def test_two_values_of_one_name(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    with pytest.raises(NameMismatch, match=r"two values have the name a\.b"):
        read(ranks(tmp_path / "a", [state] * 2))


def test_a_missing_storage(tmp_path: Path) -> None:
    folder = ranks(tmp_path / "a", [{"a": torch.ones(2), "b": torch.ones(3)}])
    with (
        zipfile.ZipFile(folder / "model_rank0.pt") as complete,
        zipfile.ZipFile(tmp_path / "less", "w") as new,
    ):
        for entry in complete.infolist():
            if not entry.filename.endswith("data/1"):
                new.writestr(entry, complete.read(entry))
    shutil.move(tmp_path / "less", folder / "model_rank0.pt")
    with pytest.raises(MalformedCheckpoint, match="no storage '1'"):
        read(folder)


def test_tensors_that_expand_far(tmp_path: Path) -> None:
    wide = torch.zeros(1).expand(300_000_000)
    with pytest.raises(MalformedCheckpoint, match="expand to tensors"):
        read(ranks(tmp_path / "a", [{"w": wide}] * 2))


def test_unreferenced_tensors(tmp_path: Path) -> None:
    """A value of a class outside the allow-list may contain them; without such a value they are an error."""
    folder = ranks(tmp_path / "a", [{"w": torch.ones(2), "x": torch.nn.Linear(2, 3)}] * 2)
    found = read(folder).findings
    assert {f.code for f in found} == {"refused-global", "refused-tensors"}
    assert any("72 bytes" in f.message for f in found)
    path = tmp_path / "b" / "model_rank0.pt"
    path.parent.mkdir()
    writer = torch._C.PyTorchFileWriter(str(path))
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as archive:
        pickled = next(archive.read(n) for n in archive.namelist() if n.endswith("data.pkl"))
    writer.write_record("data.pkl", pickled, len(pickled))
    for key in ("0", "7"):
        writer.write_record(f"data/{key}", b"\0" * 8, 8)
    writer.write_end_of_file()
    unused = [f for f in ckptcore.check(ckptcore.open(str(path.parent))).findings if f.code == "unused-bytes"]
    assert [f.message.partition(":")[2].partition(" at ")[0] for f in unused] == [" 8 bytes"]


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 0),
        torch.ones(4, 3).t(),
        torch.arange(12.0)[2:5],
        torch.ones(40_000)[1:],
        torch.tensor(3.5),
    ],
)
def test_replicas_of_every_layout(value: torch.Tensor, tmp_path: Path) -> None:
    """Empty, transposed, small and large views: equal ones are one tensor."""
    folder = ranks(tmp_path / "a", [{"w": value, "base": torch.ones(2)}] * 3)
    manifest = read(folder)
    assert torch.equal(ckptcore.read(manifest, "w"), value)
    assert manifest.findings == ()


def test_a_mesh_alone_is_refused(tmp_path: Path) -> None:
    mesh = old.Called(old.Global("torch.distributed.device_mesh.DeviceMesh"), (), {"mesh": None}, new=True)
    folder = shards(tmp_path / "a", [{"mesh": mesh}] * 2)
    assert [(f.code, f.fqn) for f in read(folder).findings] == [("refused-global", "mesh")]


def test_a_mesh_as_a_key(tmp_path: Path) -> None:
    mesh = old.Called(old.Global("torch.distributed.device_mesh.DeviceMesh"), (), None, new=True)
    with pytest.raises(MalformedCheckpoint, match="object odd"):
        read(shards(tmp_path / "a", [{"odd": {"a": 1, mesh: 2}}] * 2))


def test_a_mesh_without_a_list_of_ranks(tmp_path: Path) -> None:
    value = old.dtensor("2.6", torch.ones(2), (4,), torch.ones(2), [0], SHARD)
    (tmp_path / "a").mkdir()
    old.save({"w": value}, tmp_path / "a" / "model_rank_0.pt")
    with pytest.raises(MalformedCheckpoint, match="ranks"):
        read(tmp_path / "a")


def test_contradicting_ranks(tmp_path: Path) -> None:
    """On a tensor's shape, and on whether it is sharded."""
    folder = shards(tmp_path / "a", [{}, {}])
    value = old.dtensor("2.6", torch.ones(3), (6,), torch.arange(2), [1], SHARD)
    old.save({"w": value}, folder / "model_rank_1.pt")
    with pytest.raises(MalformedCheckpoint, match=r"w is float32 \[6\].*\[4\]"):
        read(folder)
    old.save({"w": torch.ones(4)}, folder / "model_rank_1.pt")
    with pytest.raises(MalformedCheckpoint, match="distributed on some ranks, but not on others"):
        read(folder)


def test_numbers_that_mean_other_parameters_elsewhere(tmp_path: Path) -> None:
    """Stages of a pipeline that number their own parameters, where nothing proves the names."""
    states = []
    for rank in range(2):
        model = {f"layers.{rank}.{n}": torch.ones(3) for n in "ab"}
        state = {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": torch.ones(3)}}
        groups = [{"params": [0]}, {"params": [1]}]
        states.append({"model": model, "optim": {"state": state, "param_groups": groups}})
    folder = ranks(tmp_path / "a", states, "rank{}.pt")
    confused = [f for f in read(folder).findings if "mean other parameters on other ranks" in f.message]
    names = {f"optim.state.{n}.exp_avg.rank{r}" for n in (0, 1) for r in (0, 1)}
    assert ({f.fqn for f in confused}, {f.code for f in confused}) == (names, {"unmerged-tensor"})
    with pytest.raises(UnreadablePart):
        ckptcore.convert(str(folder), str(tmp_path / "out"), allow_incomplete=True)
    ckptcore.convert(str(folder), str(tmp_path / "out"), exclude=["optim.*"], allow_incomplete=True)
    found = {t.fqn for t in ckptcore.open(str(tmp_path / "out")).tensors}
    assert found == {f"model.layers.{r}.{n}" for r in (0, 1) for n in "ab"}


def test_a_file_of_a_rank_outside_the_job(tmp_path: Path) -> None:
    """By the names of the files, or by the mesh inside."""
    folder = ranks(tmp_path / "a", [{"w": torch.ones(2)}] * 2, "model_world_size_2_rank_{}.pt")
    shutil.copy(folder / "model_world_size_2_rank_1.pt", folder / "model_world_size_2_rank_5.pt")
    assert "mixed-saves" in codes(folder)
    folder = shards(tmp_path / "b", [{}, {}])
    shutil.copy(folder / "model_rank_1.pt", folder / "model_rank_5.pt")
    assert "item-mismatch" in codes(folder)


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    folder = ranks(tmp_path / "a", [{"w": torch.ones(2)}] * 2)
    shutil.copy(folder / "model_rank1.pt", folder / "model_rank01.pt")
    with pytest.raises(AmbiguousModel, match="are both files of rank 1"):
        read(folder)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", ["malformed-metadata"]),
        ("[]", []),
        ('{"world_size": "2"}', []),
        ('{"world_size": 2}', []),
        ('{"world_size": 3}', ["mixed-saves"]),
    ],
)
def test_verls_config_file(text: str, code: list[str], tmp_path: Path) -> None:
    folder = ranks(tmp_path / "a", [{"w": torch.ones(2)}] * 2, "model_world_size_2_rank_{}.pt")
    (folder / "fsdp_config.json").write_text(text)
    assert codes(folder) == code


def test_files_named_by_rank_that_are_not_zips(tmp_path: Path) -> None:
    """Other tools number files, too."""
    for rank in range(2):
        (tmp_path / f"log_rank{rank}.bin").write_bytes(b"text of no interest")
    with pytest.raises(ckptcore.CkptError) as caught:
        read(tmp_path)
    assert caught.value.code == "unknown-format"


MODEL = (("a", (2,)), ("b", (2,)))


@pytest.mark.parametrize(
    "tree",
    [
        {"lr": 0.1},
        {"state": {}, "param_groups": {}},
        {"state": {}, "param_groups": [3]},
        {"state": {}, "param_groups": [{"params": [2.5]}]},
        {"state": {"c": {}}, "param_groups": [{"params": ["a"]}]},
        {"state": {}, "param_groups": [{"params": ["a", 1]}]},
    ],
)
def test_trees_without_a_named_optimizer_are_written_unchanged(tree: Any) -> None:
    assert numbers_for(tree, MODEL, lambda v: v) is tree


def test_numbers_for_names() -> None:
    """Names are recorded where the numbers alone prove nothing; numbers saved as text become numbers."""
    named = {"state": {"b": {"m": (2,)}, "a": {"m": (2,)}}, "param_groups": [{"params": ["a", "b"]}]}
    made = numbers_for(named, MODEL, lambda v: v)
    assert made == {"state": {0: {"m": (2,)}, 1: {"m": (2,)}}, "param_groups": [{"params": [0, 1]}]}
    other = {**named, "param_groups": [{"params": ["b"]}, {"params": ["a"]}]}
    groups = numbers_for(other, MODEL, lambda v: v)["param_groups"]
    assert groups == [{"params": [0], "param_names": ["b"]}, {"params": [1], "param_names": ["a"]}]
    text = {"state": {"0": {"m": (2,)}}, "param_groups": [{"params": [0]}]}
    assert numbers_for(text, MODEL, lambda v: v)["state"] == {0: {"m": (2,)}}
