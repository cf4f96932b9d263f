"""Distributed tensors whose pickles contradict themselves: refused with their values, never guessed at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import old_pickles as old
import pytest
import torch
from old_pickles import Called, Global

import ckptcore
from ckptcore.errors import MalformedCheckpoint, UnsafeContent, UnsupportedFormat

FULL = torch.arange(24.0).view(6, 4)
FRACTION = Called(Global("ast.Constant"), (1, 3))
SHARD_ORDER = "torch.distributed.tensor._dtensor_spec.ShardOrderEntry"


def opened(value: Any, folder: Path, *, ranks: int = 1) -> ckptcore.Manifest:
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        old.save({"w": value}, folder / f"model_rank_{rank}.pt")
    return ckptcore.open(str(folder))


class Parts:
    """A DTensor on a mesh of one axis, and the dicts of its pickle."""

    def __init__(
        self,
        release: str = "2.6",
        ranks: int = 1,
        how: tuple[str, dict[str, int]] | None = None,
        local: torch.Tensor = FULL,
    ) -> None:
        self.value = old.dtensor(
            release, local, (6, 4), torch.arange(ranks), [0], [how or ("Shard", {"dim": 0})]
        )
        self.state: dict[str, Any] = self.value.args[3][1]
        self.spec: dict[str, Any] = self.state["_spec"].state
        self.mesh: dict[str, Any] = self.spec["mesh"].state

    def called(self, **changes: Any) -> Called:
        """The outer call with other arguments: function, kind, args, state."""
        names = ("function", "kind", "args", "state")
        return Called(
            self.value.function, tuple(changes.get(n, v) for n, v in zip(names, self.value.args, strict=True))
        )


def sharded(**changes: Any) -> Called:
    """A ShardedTensor of one rank with one shard, as torch.save pickles it."""
    lead = "torch.distributed._shard."
    properties = Global(f"{lead}sharded_tensor.metadata.TensorProperties")
    metadata = {
        "size": (6, 4),
        "tensor_properties": Called(properties, (), {"dtype": torch.float32}, new=True),
    }
    metadata |= changes.pop("metadata", {})
    where = {"shard_offsets": [0, 0], "shard_sizes": [6, 4]} | changes.pop("where", {})
    placed = Called(Global(f"{lead}metadata.ShardMetadata"), (), where, new=True)
    local = {"tensor": changes.pop("tensor", FULL), "metadata": placed}
    shard = Called(Global(f"{lead}sharded_tensor.shard.Shard"), (), local, new=True)
    group = {"global_rank": 0, "global_world_size": 1} | changes.pop("group", {})
    nested = Called(
        Global("__builtin__.getattr"),
        (Global(f"{lead}sharded_tensor.api.ShardedTensor"), "ProcessGroupState"),
    )
    state = changes.pop("state", None) or (
        [shard],
        Called(Global(f"{lead}sharded_tensor.metadata.ShardedTensorMetadata"), (), metadata, new=True),
        Called(nested, (), group, new=True),
        {},
        False,  # type: ignore[arg-type]
    )
    kind = Global(f"{lead}sharded_tensor.api.ShardedTensor")
    assert not changes
    args = (kind, torch.float32, (6, 4), (4, 1), 0, None, None, False)
    return Called(
        Global("torch._tensor._rebuild_from_type_v2"),
        (Global("torch._utils._rebuild_wrapper_subclass"), kind, args, state),
    )


def read(manifest: ckptcore.Manifest) -> torch.Tensor:
    return ckptcore.read(manifest, "w")


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("release", old.MODULES)
def test_a_dtensor_of_one_rank(release: str, tmp_path: Path) -> None:
    assert torch.equal(read(opened(Parts(release).value, tmp_path / "x")), FULL)


def test_a_sharded_tensor_of_one_rank(tmp_path: Path) -> None:
    assert torch.equal(read(opened(sharded(), tmp_path / "x")), FULL)


def test_tensors_with_attributes(tmp_path: Path) -> None:
    """torch also writes `_rebuild_from_type_v2` for a plain tensor with attributes."""
    tensor, parameter = FULL.clone(), torch.nn.Parameter(FULL + 1)
    for value in (tensor, parameter):
        value.marked = True  # type: ignore[attr-defined]
    state = {"tensor": tensor, "parameter": parameter, "buffer": torch.nn.Buffer(FULL + 2)}
    torch.save(state, tmp_path / "model_rank_0.pt")
    assert b"_rebuild_from_type_v2" in (tmp_path / "model_rank_0.pt").read_bytes()
    manifest = ckptcore.open(str(tmp_path))
    for n, name in enumerate(state):
        assert torch.equal(ckptcore.read(manifest, name), FULL + n), name


def test_elements_narrowed_from_a_storage(tmp_path: Path) -> None:
    """A strided shard of 4 blocks over two ranks: a rank's memory has two runs of rows."""
    ranks, rows = torch.arange(4).view(2, 2), torch.arange(8.0).view(8, 1)
    both = [("_StridedShard", {"dim": 0, "split_factor": 2}), ("Shard", {"dim": 0})]
    folder = tmp_path / "x"
    folder.mkdir()
    for rank in range(4):
        at = [rank // 2, rank % 2]
        # Cut first over the inner axis, then over the outer one (FSDP over tensor ranks).
        local = rows.chunk(2)[at[1]].chunk(2)[at[0]]
        old.save({"w": old.dtensor("2.6", local, (8, 1), ranks, at, both)}, folder / f"model_rank_{rank}.pt")
    assert torch.equal(read(ckptcore.open(str(folder))), rows)


# --- what is refused ------------------------------------------------------------------------------


def _layout(parts: Parts, shape: Any) -> None:
    parts.mesh["_layout"].state["shape"] = shape


def _order(dim: Any, axes: Any) -> Called:
    return Called(Global(SHARD_ORDER), (dim, axes), new=True)


DTENSORS: dict[str, tuple[str, Callable[[Parts], object], str]] = {
    "local tensor of another dtype": (
        "2.6",
        lambda p: p.state.update(_local_tensor=FULL.long()),
        "a DTensor of float32 whose local",
    ),
    "no local tensor": ("2.6", lambda p: p.state.update(_local_tensor=5), "whose local tensor is 5"),
    "local tensor of another rank": (
        "2.6",
        lambda p: p.state.update(_local_tensor=FULL.view(-1)),
        "whose local tensor is",
    ),
    "no spec": ("2.6", lambda p: p.state.pop("_spec"), "expected a DTensorSpec"),
    "no mesh": ("2.6", lambda p: p.spec.update(mesh=None), "expected a DeviceMesh"),
    "placements of two axes": (
        "2.6",
        lambda p: p.spec.update(placements=p.spec["placements"] * 2),
        "on a mesh of 1 axes",
    ),
    "placements that are none": ("2.6", lambda p: p.spec.update(placements=7), "placements 7"),
    "a placement that is none": ("2.6", lambda p: p.spec.update(placements=(7,)), "expected a Shard"),
    "a dim that is not there": (
        "2.6",
        lambda p: p.spec["placements"][0].state.update(dim=2),
        "a shard of dim 2 of 2",
    ),
    "a mesh without ranks": (
        "2.6",
        lambda p: p.mesh.update(mesh=torch.zeros(0, dtype=torch.int64)),
        "a mesh of",
    ),
    "ranks that are none": (
        "2.6",
        lambda p: p.mesh.update(_flatten_mesh_list=(-1,)),
        r"a mesh of ranks \(-1,\)",
    ),
    "a coordinate outside": ("2.6", lambda p: p.mesh.update(_coordinate_on_dim=[1]), "coordinate"),
    "a coordinate of two axes": ("2.6", lambda p: p.mesh.update(_coordinate_on_dim=[0, 0]), "coordinate"),
    "no ranks anywhere": (
        "2.10",
        lambda p: [p.mesh.pop(k) for k in ("_flatten_rank_map", "_rank_map", "_flatten_mesh_list")],
        "a mesh without ranks",
    ),
    "ranks in two forms that differ": (
        "2.10",
        lambda p: p.mesh.update(_rank_map=torch.tensor([1])),
        r"lists its ranks as \(0,\), and as \(1,\)",
    ),
    "ranks in two forms that differ before 2.10": (
        "2.6",
        lambda p: p.mesh.update(mesh=torch.tensor([1])),
        r"lists its ranks as \(0,\), and as \(1,\)",
    ),
    "a layout that is none": ("2.10", lambda p: p.mesh.pop("_layout"), "expected a _MeshLayout"),
    "a layout without a shape": ("2.10", lambda p: _layout(p, "x"), "a mesh layout of 'x'"),
    "a layout of text": ("2.10", lambda p: _layout(p, ("x",)), "a mesh axis of 'x'"),
    "a layout of nothing": ("2.10", lambda p: _layout(p, (0,)), "a mesh of"),
    "an order that is none": ("2.10", lambda p: p.spec.update(shard_order=5), "a shard order of 5"),
    "an order of numbers": ("2.10", lambda p: p.spec.update(shard_order=(5,)), "a shard order with 5"),
    "an order of text": (
        "2.10",
        lambda p: p.spec.update(shard_order=(_order("0", (0,)),)),
        "a shard order of dim '0'",
    ),
}


@pytest.mark.parametrize("name", DTENSORS)
def test_dtensors_that_contradict_themselves(name: str, tmp_path: Path) -> None:
    release, change, message = DTENSORS[name]
    parts = Parts(release)
    change(parts)
    with pytest.raises(MalformedCheckpoint, match=message) as caught:
        opened(parts.value, tmp_path / "x")
    assert "model_rank_0.pt" in caught.value.message


BY_FIELDS = Called(Global(SHARD_ORDER), (), {"tensor_dim": 0, "mesh_dims": (0,)})


@pytest.mark.parametrize("entry", [_order(0, (0,)), BY_FIELDS], ids=["a tuple", "fields"])
def test_a_shard_order(entry: Called, tmp_path: Path) -> None:
    """torch >= 2.10 records in which order axes cut a dim."""
    parts = Parts("2.10")
    parts.spec["shard_order"] = (entry,)
    assert torch.equal(read(opened(parts.value, tmp_path / "x")), FULL)


@pytest.mark.parametrize("factor", [0, "2", 1 << 20])
def test_invalid_split_factors(factor: Any, tmp_path: Path) -> None:
    parts = Parts(how=("_StridedShard", {"dim": 0, "split_factor": factor}))
    with pytest.raises(MalformedCheckpoint, match="split factor"):
        opened(parts.value, tmp_path / "x")


OUTER: dict[str, tuple[dict[str, Any], str]] = {
    "a wrapper of a plain class": ({"kind": Global("torch.Tensor")}, "wrapper subclass of type Tensor"),
    "a wrapper with two arguments": ({"args": (1, 2)}, "wrapper subclass of type DTensor"),
    "arguments that are none": ({"args": 5}, "a tensor of"),
    "a function that is none": ({"function": 5}, "a tensor of"),
    "a class that is none": ({"kind": 5}, "a tensor of 5"),
    "a DTensor that a plain function makes": (
        {"function": Global("torch._utils._rebuild_tensor_v2")},
        "a DTensor that _rebuild_tensor_v2 makes",
    ),
    "a size that is none": (
        {"args": (Global("torch.Tensor"), torch.float32, 7, (4, 1), 0, None, None, False)},
        "size 7",
    ),
    "a dtype that is none": (
        {"args": (Global("torch.Tensor"), 7, (6, 4), (4, 1), 0, None, None, False)},
        "dtype 7",
    ),
}


@pytest.mark.parametrize("name", OUTER)
def test_wrappers_that_contradict_themselves(name: str, tmp_path: Path) -> None:
    changes, message = OUTER[name]
    with pytest.raises(MalformedCheckpoint, match=message):
        opened(Parts().called(**changes), tmp_path / "x")


def test_a_wrapper_by_itself(tmp_path: Path) -> None:
    value = Called(Global("torch._utils._rebuild_wrapper_subclass"), (1, 2, 3))
    with pytest.raises(MalformedCheckpoint, match="without its type"):
        opened(value, tmp_path / "x")


SHARDED: dict[str, tuple[dict[str, Any], str]] = {
    "no state": ({"state": {"a": 1}}, "a ShardedTensor with the state"),
    "no shards": ({"state": (1, 2, 3)}, "a ShardedTensor with the state"),
    "a rank outside": ({"group": {"global_rank": 1}}, "rank 1 of 1"),
    "no rank": ({"group": {"global_rank": None}}, "rank None of 1"),
    "a world that is none": ({"group": {"global_world_size": 1 << 40}}, "of 1099511627776"),
    "a shard of another size": ({"where": {"shard_sizes": [6, 3]}}, r"a shard of float32 \[6, 3\]"),
    "a shard of another dtype": ({"tensor": FULL.long()}, "a shard of float32"),
    "a shard of another rank": ({"where": {"shard_offsets": [0]}}, r"a shard at \[0\]"),
    "a shard that is none": ({"tensor": None}, "that contains None"),
    "a size that is none": ({"metadata": {"size": "x"}}, "size 'x'"),
    "properties that are none": ({"metadata": {"tensor_properties": 7}}, "dtype None"),
}


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_tensors_that_contradict_themselves(name: str, tmp_path: Path) -> None:
    changes, message = SHARDED[name]
    with pytest.raises(MalformedCheckpoint, match=message):
        opened(sharded(**changes), tmp_path / "x")


@pytest.mark.parametrize("where", ["a local tensor", "a shard", "a class"])
def test_tensors_of_a_refused_class(where: str, tmp_path: Path) -> None:
    """The place is known, but the values are not: the tensor is named, and cannot be read."""
    parts = Parts()
    parts.state["_local_tensor"] = FRACTION
    value = {
        "a local tensor": parts.value,
        "a shard": sharded(tensor=FRACTION),
        "a class": Parts().called(kind=Global("ast.Constant")),
    }[where]
    folder = tmp_path / "x"
    folder.mkdir()
    old.save({"w": value, "plain": FULL}, folder / "model_rank_0.pt")
    manifest = ckptcore.open(str(folder))
    assert torch.equal(ckptcore.read(manifest, "plain"), FULL)
    assert "w" not in manifest.index
    findings = [f for f in manifest.findings if "ast.Constant" in f.message]
    assert {f.code for f in findings} & {"refused-global", "refused-tensors"}


def test_attributes_of_other_classes_are_unsafe(tmp_path: Path) -> None:
    value = Called(Global("__builtin__.getattr"), (Global("torch.distributed.tensor.DTensor"), "__init__"))
    with pytest.raises(UnsafeContent, match="__init__"):
        opened(value, tmp_path / "x")


def test_a_member_of_an_unknown_enum_is_refused_alone(tmp_path: Path) -> None:
    """As Python 3.11.0 to 3.11.3 pickle it."""
    folder, member = tmp_path / "x", Called(Global("__builtin__.getattr"), (Global("ast.Constant"), "A"))
    folder.mkdir()
    old.save({"plain": FULL, "args": {"kind": member}}, folder / "model_rank_0.pt")
    manifest = ckptcore.open(str(folder))
    assert torch.equal(ckptcore.read(manifest, "plain"), FULL)
    (finding,) = [f for f in manifest.findings if f.code == "refused-global"]
    assert "ast.Constant" in finding.message
    assert "getattr" not in finding.message


def test_uneven_strided_shards_are_refused(tmp_path: Path) -> None:
    """Releases of torch cut them differently, and the pickle does not record the release."""
    ranks, uneven = torch.arange(4).view(2, 2), ("_StridedShard", {"dim": 0, "split_factor": 3})
    value = old.dtensor("2.6", torch.zeros(3, 1), (9, 1), ranks, [0, 0], [uneven, ("Shard", {"dim": 0})])
    with pytest.raises(UnsupportedFormat, match="uneven strided shard"):
        opened(value, tmp_path / "x", ranks=4)
