"""torch_checkpointing: every layout of a real save is joined, and nothing partial is taken for it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import FIXTURES
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import validate
from ckptcore.errors import MalformedCheckpoint, UnsafeContent, UnsupportedFormat

Tensors = dict[str, torch.Tensor]
SAMPLES = {"pt": "tc_default_2r", "safetensors": "tc_safetensors_2r"}
METADATA = "metadata.pkl"


@pytest.fixture(autouse=True)
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path}/catalog.db")


def sample(kind: str, folder: Path) -> Tensors:
    """Copy a sample into a folder, and return the tensors of its model."""
    root = FIXTURES / "torch_checkpointing" / SAMPLES[kind]
    shutil.copytree(root / "ckpt", folder)
    return load_file(root / "expected.safetensors")


def codes(folder: Path) -> set[str]:
    found = validate(ckptcore.open(str(folder)), "bytes").findings
    return {f.code for f in found if f.severity == "error"}


def joined(folder: Path, *options: str) -> Tensors | None:
    """Return what `consolidate` makes, None where it ends with another code than 0."""
    out = folder.parent / "out.safetensors"
    out.unlink(missing_ok=True)
    if run(["consolidate", str(folder), str(out), *options]) != 0:
        assert not out.exists()
        return None
    return load_file(out)


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change metadata.pkl."""
    tree = pickle.loads((folder / METADATA).read_bytes())
    change(tree)
    (folder / METADATA).write_bytes(pickle.dumps(tree))


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_save_of_two_ranks(kind: str, tmp_path: Path) -> None:
    expected = sample(kind, tmp_path / "run")
    manifest = ckptcore.open(str(tmp_path / "run"))
    assert manifest.format == "torch_checkpointing"
    assert (manifest.origin["world_size"], manifest.origin["parts"]) == (2, ["model", "train_state"])
    assert not codes(tmp_path / "run")
    assert {blob.key: blob.tree for blob in manifest.blobs}["train_state.step"] == 7
    assert equal(joined(tmp_path / "run") or {}, expected)


def test_metadata_beside_distributed_tensors(tmp_path: Path) -> None:
    """The default files and those of a resharder are the same; metadata.pkl is compared with them."""
    expected = sample("pt", tmp_path / "run")
    shutil.copy(FIXTURES / "torch_checkpointing/tc_safetensors_2r/ckpt" / METADATA, tmp_path / "run")
    edited(tmp_path / "run", _default_layout)
    assert equal(joined(tmp_path / "run") or {}, expected)
    edited(tmp_path / "run", lambda tree: _first(tree)["data"].update(global_shape=[12, 8]))
    assert codes(tmp_path / "run") == {"item-mismatch"}


def _default_layout(tree: dict[str, Any]) -> None:
    tree["metadata"]["model"]["rank_to_layout_info"] = {0: None, 1: None}


def _first(tree: dict[str, Any]) -> dict[str, Any]:
    groups = tree["metadata"]["model"]["nested_path_to_metadata"]['["emb.weight"]']
    return groups[0]["sharding_metadata"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_file_is_needed(kind: str, tmp_path: Path) -> None:
    sample(kind, tmp_path / "all")
    for path in sorted((tmp_path / "all").iterdir()):
        if path.name == METADATA:
            continue
        folder = tmp_path / f"without {path.name}"
        shutil.copytree(tmp_path / "all", folder)
        (folder / path.name).unlink()
        assert "missing-rank" in codes(folder), path.name
        assert joined(folder) is None, path.name


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_file_that_is_cut_or_another_rank_s(kind: str, tmp_path: Path) -> None:
    for name, damage in {"cut": _cut, "copy": _copied}.items():
        folder = tmp_path / name
        sample(kind, folder)
        damage(sorted(folder.glob("model_*")))
        assert run(["validate", str(folder)]) not in (0, 2)
        assert joined(folder) is None


def _cut(paths: list[Path]) -> None:
    os.truncate(paths[1], paths[1].stat().st_size * 2 // 3)


def _copied(paths: list[Path]) -> None:
    shutil.copy(paths[0], paths[1])


def test_local_tensors_without_metadata(tmp_path: Path) -> None:
    """Nothing says where they belong."""
    sample("safetensors", tmp_path / "run")
    (tmp_path / "run" / METADATA).unlink()
    with pytest.raises(UnsupportedFormat, match=METADATA):
        ckptcore.open(str(tmp_path / "run"))


def test_a_tensor_that_a_file_lacks(tmp_path: Path) -> None:
    sample("safetensors", tmp_path / "run")
    for rank in (0, 1):
        path = tmp_path / f"run/model_{rank}.safetensors"
        save_file({n: t for n, t in load_file(path).items() if n != "norm.weight"}, path)
    assert codes(tmp_path / "run") == {"hole"}
    assert joined(tmp_path / "run") is None


def test_a_save_that_did_not_finish(tmp_path: Path) -> None:
    expected = sample("pt", tmp_path / "tmp_step-7")
    assert codes(tmp_path / "tmp_step-7") == {"not-complete"}
    assert joined(tmp_path / "tmp_step-7") is None
    assert equal(joined(tmp_path / "tmp_step-7", "--allow-incomplete") or {}, expected)


def test_files_of_an_earlier_save_of_more_ranks(tmp_path: Path) -> None:
    sample("pt", tmp_path / "run")
    shutil.copy(tmp_path / "run/model_1.pt", tmp_path / "run/model_2.pt")
    assert codes(tmp_path / "run") & {"mixed-saves", "item-mismatch"}
    sample("safetensors", tmp_path / "listed")
    shutil.copy(tmp_path / "listed/model_1.safetensors", tmp_path / "listed/model_2.safetensors")
    assert "stray-file" in {f.code for f in ckptcore.open(str(tmp_path / "listed")).findings}


def test_metadata_of_version_1(tmp_path: Path) -> None:
    """It lists full paths, and the files of each rank (distributed_metadata.py, `_convert_v1_to_v2`)."""
    expected = sample("safetensors", tmp_path / "run")

    def older(tree: dict[str, Any]) -> None:
        model = tree["metadata"]["model"]
        rows = model["nested_path_to_metadata"].items()
        tree["metadata"] = {json.dumps(["model", *json.loads(path)]): groups for path, groups in rows}
        layout = model["rank_to_layout_info"]
        tree["rank_to_layout_info_mappings"] = {rank: {"model": layout[rank]} for rank in layout}
        tree["version"] = "1.0"

    edited(tmp_path / "run", older)
    assert equal(joined(tmp_path / "run") or {}, expected)


def test_tensors_that_list_their_boxes(tmp_path: Path) -> None:
    """A rank may hold several boxes of a tensor (default_metadata.py)."""
    folder = tmp_path / "run"
    folder.mkdir()
    full = torch.arange(48, dtype=torch.float32).reshape(8, 6)
    rows = {0: (0, 5), 1: (3, 1)}  # first rows of the two boxes of each rank
    groups = []
    for rank, (first, second) in rows.items():
        sizes = [[3, 6], [1, 6]] if rank == 0 else [[2, 6], [2, 6]]
        starts = [first, second] if rank == 0 else [3, 6]
        parts = [full[a : a + n] for a, (n, _) in zip(starts, sizes, strict=True)]
        save_file({"w": torch.cat(parts)}, folder / f"model_{rank}.safetensors")
        data = {
            "global_shape": [8, 6],
            "global_offsets": [[a, 0] for a in starts],
            "local_offsets": [[0, 0], [sizes[0][0], 0]],
            "local_sizes": sizes,
            "dtype": "torch.float32",
        }
        groups.append({"sharding_metadata": {"type": "default_tensor_v1", "data": data}, "ranks": (rank,)})
    layout = {rank: {"file_path": f"model_{rank}.safetensors", "serialization_format": {}} for rank in rows}
    item = {"nested_path_to_metadata": {'["w"]': groups}, "rank_to_layout_info": layout}
    tree = {"metadata": {"model": item}, "world_size": 2, "version": "2.0"}
    (folder / METADATA).write_bytes(pickle.dumps(tree))
    assert equal(joined(folder) or {}, {"model.w": full})
    groups[0]["sharding_metadata"]["data"]["local_sizes"][0] = [9, 6]
    (folder / METADATA).write_bytes(pickle.dumps(tree))
    with pytest.raises(MalformedCheckpoint):
        ckptcore.open(str(folder))


def test_meshes_that_differ_in_the_order_of_ranks(tmp_path: Path) -> None:
    """Each tensor is placed by its own mesh, also where one file has many of one shape."""
    orders = [(0, 1, 2, 3), (3, 2, 1, 0)]
    full = {f"w{n:02}": torch.arange(8) + 8 * n for n in range(40)}
    groups: dict[str, list[dict[str, Any]]] = {}
    states: list[dict[str, torch.Tensor]] = [{} for _ in range(4)]
    for n, (name, tensor) in enumerate(full.items()):
        order = orders[n % 2]
        for rank, state in enumerate(states):
            state[name] = tensor.chunk(2)[order.index(rank) % 2].clone()
        data = {
            "mesh_spec": {"mesh_shape": (2, 2), "mesh_data": order},
            "placements": [{"type": "Replicate"}, {"type": "Shard", "dim": 0}],
            "dtype": "torch.int64",
            "global_shape": [8],
        }
        sharding = {"type": "DTensorShardingMetadata", "data": data}
        groups[f'["{name}"]'] = [{"sharding_metadata": sharding, "ranks": (0, 1, 2, 3)}]
    layout = {}
    for rank, state in enumerate(states):
        save_file(state, tmp_path / f"model_{rank}.safetensors")
        layout[rank] = {"file_path": f"model_{rank}.safetensors", "serialization_format": {}}
    item = {"nested_path_to_metadata": groups, "rank_to_layout_info": layout}
    tree = {"metadata": {"model": item}, "world_size": 4, "version": "2.0"}
    (tmp_path / METADATA).write_bytes(pickle.dumps(tree))
    assert equal(joined(tmp_path) or {}, {f"model.{name}": tensor for name, tensor in full.items()})


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("executed",))


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(world_size=3),
        lambda tree: tree.update(world_size=-1),
        lambda tree: tree.update(version="9"),
        lambda tree: tree["metadata"]["model"].pop("rank_to_layout_info"),
        lambda tree: tree["metadata"]["model"]["rank_to_layout_info"][1].update(file_path="../model_1.pt"),
        lambda tree: tree["metadata"]["model"]["rank_to_layout_info"][1].update(
            file_path="model_0.safetensors"
        ),
        lambda tree: _first(tree)["data"].update(placements=[{"type": "Partial"}]),
        lambda tree: _first(tree)["data"].update(placements=[]),
        lambda tree: _first(tree)["data"]["mesh_spec"].update(mesh_data=(0, 0)),
        lambda tree: _first(tree).update(type="other"),
    ],
)
def test_metadata_that_is_none(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    sample("safetensors", tmp_path / "run")
    edited(tmp_path / "run", change)
    assert joined(tmp_path / "run") is None
    assert run(["validate", str(tmp_path / "run")]) not in (0, 2)


def test_nothing_of_a_pickle_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sample("safetensors", tmp_path / "run")
    edited(tmp_path / "run", lambda tree: tree.update(more=Hostile()))
    with pytest.raises(UnsafeContent):
        ckptcore.open(str(tmp_path / "run"))
    assert not (tmp_path / "executed").exists()
