"""Read OLMo-core 0.1 in every spelling of its metadata, report every damage, and write it."""

from __future__ import annotations

import json
import shutil
import struct
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_samples import codes, copied, edit, pickled, sample, tensors, truth, write_v01
from safetensors.torch import load_file, save_file
from samples import differences, value
from torch.distributed.tensor import Replicate, Shard

import ckptcore
from ckptcore.conversion.pipeline import convert
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import decode
from ckptcore.errors import NotComplete, UnsafeContent, UnsupportedDtype, UnsupportedFormat
from ckptcore.formats.base import Arrangement
from ckptcore.formats.olmo.v01 import arrange
from ckptcore.planning.request import Request
from ckptcore.topology.layout import Mesh, TensorLayout, Topology

NAME = "v01_fsdp1_fp32_ws2"


def entries(top: Any) -> Any:
    return top["tensors"].values()


def single_ranges(top: Any) -> None:
    """Write it like revisions before 2024-05-07."""
    for entry in entries(top):
        specs = entry.pop("shard_spec_per_file")
        entry["flattened_offsets_per_file"] = {f: s["flattened_offsets"][0] for f, s in specs.items()}


def listed_ranges(top: Any) -> None:
    """Write it like revisions before 2024-05-13."""
    for entry in entries(top):
        specs = entry.pop("shard_spec_per_file")
        entry["flattened_offsets_per_file"] = {f: s["flattened_offsets"] for f, s in specs.items()}


def first_revision(top: Any) -> None:
    single_ranges(top)
    for entry in entries(top):
        del entry["dtype"], entry["is_sharded"]


def test_an_empty_tensor_of_the_first_revision(tmp_path: Path) -> None:
    """Only the files have its dtype, and no file has an element of it."""
    empty = torch.zeros(0, 5, dtype=torch.uint8)
    write_v01(tmp_path / "a", 2, {"e": (empty, {0: [[0, 0]], 1: [[0, 0]]})})
    edit(tmp_path / "a" / "metadata.json", first_revision)
    spec = ckptcore.open(str(tmp_path / "a")).tensors[0]
    assert (spec.dtype, spec.shape) == ("uint8", (0, 5))


@pytest.mark.parametrize("spelling", [single_ranges, listed_ranges, first_revision])
def test_every_spelling_of_the_metadata(
    spelling: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Metadata of older revisions gives the same manifest for the same files."""
    step = copied(request, NAME, tmp_path)
    for part in ("model", "optim"):
        edit(step / part / "metadata.json", spelling)
    manifest = ckptcore.open(str(step))
    assert not differences(truth(sample(request, NAME)), tensors(manifest))
    assert {b.key for b in manifest.blobs if b.known} >= {"optim.param_groups.1", "optim.state_keys"}


def test_parameter_groups_equal_the_saved_ones(request: pytest.FixtureRequest) -> None:
    """Groups pickled inside U8 tensors become objects with equal values."""
    root = sample(request, NAME)
    manifest = ckptcore.open(str(root / "step3"))
    found = {b.key: decode(b.tree) for b in manifest.blobs}
    wanted = json.loads((root / "expected_param_groups.json").read_text())
    groups = [found[f"optim.param_groups.{i}"] for i in range(found["optim.num_param_groups"])]
    assert json.loads(json.dumps(groups)) == wanted
    assert found["train.global_step"] == 3


def test_optimizer_names_of_march_2024(tmp_path: Path) -> None:
    """``state.<key>.<fqn>`` is distinguished from ``state.<fqn>.__<key>`` by the stored state keys."""
    w = torch.arange(6.0).reshape(2, 3)
    write_v01(tmp_path / "s" / "model", 1, {"a.w": (w, {0: [[0, 6]]})})
    write_v01(
        tmp_path / "s" / "optim",
        1,
        {
            "num_param_groups": (torch.tensor(1), {0: [[0, 1]]}),
            "state.exp_avg.a.w": (w + 1, {0: [[0, 6]]}),
            "state.exp_avg_sq.a.w": (w + 2, {0: [[0, 6]]}),
            "state.step.a.w": (torch.tensor(3.0), {0: [[0, 1]]}),
            "state_keys": (k := pickled(["exp_avg_sq", "exp_avg", "step"], 3), {0: [[0, k.numel()]]}),
            "param_group0": (g := pickled({"lr": 0.1, "params": [0]}, 5), {0: [[0, g.numel()]]}),
        },
    )
    found = tensors(ckptcore.open(str(tmp_path / "s")))
    assert found == {
        "model.a.w": value(w),
        "optim.state.a.w.exp_avg": value(w + 1),
        "optim.state.a.w.exp_avg_sq": value(w + 2),
        "optim.state.a.w.step": value(torch.tensor(3.0)),
    }


def test_boxes_ranges_replicas_and_empty_shards(tmp_path: Path) -> None:
    """3-D boxes, several ranges in a file, copies, scalars, empty tensors and absent empty shards."""
    cube, flat = torch.arange(60).reshape(3, 4, 5), torch.randn(4, 7)
    spec = {
        "cube": (cube, {0: ([0, 0, 0], [3, 2, 5]), 1: ([0, 2, 0], [3, 2, 3]), 2: ([0, 2, 3], [3, 2, 2])}),
        "ranges": (flat, {0: [[0, 3], [10, 11]], 2: [[3, 10], [11, 28]]}),
        "copies": (flat.bfloat16(), {0: [[0, 28]], 1: [[0, 28]]}),
        "half": (flat[:2], {0: ([0, 0], [2, 7]), 1: ([2, 0], [0, 7])}),
        "scalar": (torch.tensor(True), {1: [[0, 1]]}),
        "nothing": (torch.zeros(0, 5), {0: [[0, 0]]}),
    }
    write_v01(tmp_path / "s", 3, spec)
    stored = load_file(tmp_path / "s" / "rank_1.safetensors")
    stored.pop("half")  # its shard there is empty: optimizers omit such keys
    save_file(stored, tmp_path / "s" / "rank_1.safetensors")
    manifest = ckptcore.open(str(tmp_path / "s"))
    assert ckptcore.check(manifest, "bytes").ok
    assert tensors(manifest) == {k: value(t) for k, (t, _) in spec.items()}


def lost_rank(step: Path) -> None:
    (step / "model" / "rank_1.safetensors").unlink()


def lost_key(step: Path) -> None:
    stored = load_file(step / "optim" / "rank_0.safetensors")
    stored.pop(next(k for k in stored if k.endswith("__exp_avg") and stored[k].numel()))
    save_file(stored, step / "optim" / "rank_0.safetensors")


def other_dtype(step: Path) -> None:
    stored = load_file(step / "model" / "rank_0.safetensors")
    save_file({k: v.bfloat16() for k, v in stored.items()}, step / "model" / "rank_0.safetensors")


def shorter(step: Path) -> None:
    stored = load_file(step / "model" / "rank_0.safetensors")
    save_file({k: v[:-1] for k, v in stored.items()}, step / "model" / "rank_0.safetensors")


def more_than_listed(step: Path) -> None:
    stored = load_file(step / "model" / "rank_0.safetensors")
    save_file({**stored, "extra": torch.ones(3)}, step / "model" / "rank_0.safetensors")


def cut_metadata(step: Path) -> None:
    path = step / "model" / "metadata.json"
    path.write_bytes(path.read_bytes()[:-40])


def cut_file(step: Path) -> None:
    path = step / "model" / "rank_0.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _first_range(step: Path, change: Any) -> None:
    def run(top: Any) -> None:
        entry = next(e for e in entries(top) if e["is_sharded"])
        change(entry["shard_spec_per_file"]["rank_0.safetensors"], entry)

    edit(step / "model" / "metadata.json", run)


def gap(step: Path) -> None:
    _first_range(step, lambda s, e: s.update(flattened_offsets=[[1, s["flattened_offsets"][0][1] + 1]]))


def outside(step: Path) -> None:
    _first_range(step, lambda s, e: s.update(flattened_offsets=[[0, 1 << 40]]))


def both_kinds(step: Path) -> None:
    _first_range(step, lambda s, e: s.update(local_shape=[1, 1], global_offset=[0, 0]))


def bigger(step: Path) -> None:
    _first_range(step, lambda s, e: e.update(shape=[e["shape"][0] + 1, *e["shape"][1:]]))


def other_step(step: Path) -> None:
    torch.save({"global_step": 4, "world_size": 2}, step / "train" / "rank1.pt")


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lost_rank, "missing-file"),
        (lost_key, "hole"),
        (other_dtype, "item-mismatch"),
        (shorter, "item-mismatch"),
        (more_than_listed, "unlisted-item"),
        (cut_metadata, "malformed"),
        (cut_file, "malformed"),
        (gap, "malformed"),
        (outside, "malformed"),
        (both_kinds, "malformed"),
        (bigger, "hole"),
        (other_step, "mixed-saves"),
    ],
)
def test_damage_is_reported(damage: Any, code: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Missing, cut, changed or contradictory files are errors with their codes."""
    step = copied(request, NAME, tmp_path)
    damage(step)
    assert code in codes(step)


def test_copies_that_differ(tmp_path: Path) -> None:
    """Equal parts of two ranks are compared."""
    write_v01(tmp_path / "s", 2, {"w": (torch.ones(8), {0: [[0, 8]], 1: [[0, 8]]})})
    save_file({"w": torch.zeros(8)}, tmp_path / "s" / "rank_1.safetensors")
    assert codes(tmp_path / "s") == {"replica-mismatch"}


def test_overlap_that_is_not_a_copy(tmp_path: Path) -> None:
    """Ranges that share elements without being equal are not replicas."""
    write_v01(tmp_path / "s", 2, {"w": (torch.ones(8), {0: [[0, 5]], 1: [[4, 8]]})})
    assert codes(tmp_path / "s") == {"overlap"}


def test_unfinished_saves(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Without `metadata.json`, and in the temporary folder of a save."""
    step = copied(request, NAME, tmp_path)
    working = step.rename(step.with_name("step3-tmp"))
    with pytest.raises(NotComplete):
        ckptcore.open(str(working))
    assert ckptcore.open(str(working), allow_incomplete=True).num_tensors == 80
    working = working.rename(step)
    (working / "optim" / "metadata.json").unlink()
    with pytest.raises(NotComplete):
        ckptcore.open(str(working))


def test_ranks_of_another_save(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A rank file that the metadata does not list is reported, unless it is empty."""
    step = copied(request, NAME, tmp_path)
    save_file({}, step / "model" / "rank_2.safetensors")
    assert not ckptcore.open(str(step)).findings
    save_file({"w": torch.ones(1)}, step / "model" / "rank_3.safetensors")
    assert [f.code for f in ckptcore.open(str(step)).findings] == ["stray-file"]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this must never be printed",)


def test_pickles_with_globals_are_kept_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter group with a global is refused by name, and nothing runs."""
    group = pickled({"lr": Evil(), "params": []})
    keys = pickled([])
    write_v01(tmp_path / "s" / "model", 1, {"w": (torch.ones(2), {0: [[0, 2]]})})
    write_v01(
        tmp_path / "s" / "optim",
        1,
        {
            "num_param_groups": (torch.tensor(1), {0: [[0, 1]]}),
            "param_group0": (group, {0: [[0, group.numel()]]}),
            "state_keys": (keys, {0: [[0, keys.numel()]]}),
        },
    )
    manifest = ckptcore.open(str(tmp_path / "s"))
    blob = next(b for b in manifest.blobs if b.key == "optim.param_groups.0")
    assert not blob.known
    assert blob.refused
    assert capsys.readouterr().out == ""


def test_a_bomb_of_shared_values_is_bounded(tmp_path: Path) -> None:
    """A pickle whose memo expands to endless values is an error, not a hang."""
    inner: Any = []
    for _ in range(60):
        inner = [inner, inner]
    group = pickled(inner)
    write_v01(
        tmp_path / "s",
        1,
        {
            "num_param_groups": (torch.tensor(1), {0: [[0, 1]]}),
            "param_group0": (group, {0: [[0, group.numel()]]}),
        },
    )
    assert codes(tmp_path / "s", "coverage") == {"malformed-item"}


def test_names_that_leave_the_folder(tmp_path: Path) -> None:
    """Metadata with a file outside the folder is refused."""
    write_v01(tmp_path / "s", 1, {"w": (torch.ones(2), {0: [[0, 2]]})})

    def away(top: Any) -> None:
        specs = top["tensors"]["w"]["shard_spec_per_file"]
        specs["../rank_0.safetensors"] = specs.pop("rank_0.safetensors")

    edit(tmp_path / "s" / "metadata.json", away)
    with pytest.raises(UnsafeContent):
        ckptcore.open(str(tmp_path / "s"))


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    "name", [NAME, "olmo1_local_ws2", "olmo1_unsharded_safetensors", "v3_bf16params_ws2"]
)
def test_written_back(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every generation becomes a 0.1 folder that reads as the same tensors, in files as small as asked."""
    root = sample(request, name)
    step = next(p for p in root.iterdir() if p.name.startswith("step"))
    ckptcore.convert(str(step), str(tmp_path / "out"), to="olmo_v01", max_file_size=50_000)
    manifest = ckptcore.open(str(tmp_path / "out"))
    assert not differences(truth(root), tensors(manifest))
    assert len(list((tmp_path / "out" / "optim").glob("rank_*.safetensors"))) > 3
    found = {b.key: decode(b.tree) for b in manifest.blobs}
    groups = [found[f"optim.param_groups.{i}"] for i in range(found["optim.num_param_groups"])]
    names = [n for g in groups for n in g["_param_names"]]
    assert sorted(names) == sorted(k.removeprefix("model.") for k in truth(root) if k.startswith("model."))
    assert [p for g in groups for p in g["params"]] == list(range(len(names)))
    state = torch.load(tmp_path / "out" / "train" / "rank0.pt", weights_only=True)
    assert state["world_size"] == 2


def test_written_files_are_the_formats_own(tmp_path: Path) -> None:
    """1-D tensors, scalars as one element, every field of the metadata, no foreign header block."""
    state = OrderedDict(a=torch.randn(2, 3), b=torch.tensor(7), c=torch.zeros(0, 4))
    save_file(dict(state), tmp_path / "in.safetensors")
    ckptcore.convert(str(tmp_path / "in.safetensors"), str(tmp_path / "out"), to="olmo_v01")
    raw = (tmp_path / "out" / "rank_0.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert {k: v["shape"] for k, v in header.items()} == {"a": [6], "b": [1], "c": [0]}
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())["tensors"]
    assert metadata["a"] == {
        "shape": [2, 3],
        "is_sharded": False,
        "dtype": "F32",
        "shard_spec_per_file": {
            "rank_0.safetensors": {"flattened_offsets": [[0, 6]], "local_shape": None, "global_offset": None}
        },
    }
    loaded = load_file(tmp_path / "out" / "rank_0.safetensors")
    assert all(torch.equal(loaded[k].reshape(t.shape), t) for k, t in state.items())


def test_unsupported_content(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Foreign dtypes, parts without a place and missing groups are refused before anything is written."""
    torch.save({"a": torch.ones(2, dtype=torch.uint16)}, tmp_path / "u16.pt")
    with pytest.raises(UnsupportedDtype):
        ckptcore.convert(str(tmp_path / "u16.pt"), str(tmp_path / "o"), to="olmo_v01")
    torch.save({"model": {"w": torch.ones(2)}, "optim": {}, "ema": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedFormat, match="ema"):
        ckptcore.convert(str(tmp_path / "a.pt"), str(tmp_path / "o"), to="olmo_v01")
    step = sample(request, NAME) / "step3"
    with pytest.raises(UnsupportedFormat, match="parameter groups"):
        ckptcore.convert(str(step), str(tmp_path / "o"), to="olmo_v01", exclude=("optim.param_groups.*",))
    assert not (tmp_path / "o").exists()
    ckptcore.convert(str(step), str(tmp_path / "o"), to="olmo_v01", exclude=("optim.*",))
    assert not (tmp_path / "o" / "optim").exists()


@pytest.mark.parametrize(
    "mesh", [(("fsdp", 3),), (("fsdp", 2), ("tp", 2)), (("dp_replicate", 2), ("fsdp", 2))]
)
def test_written_for_ranks(mesh: tuple[tuple[str, int], ...], tmp_path: Path) -> None:
    """Uneven and empty parts, columns of 2 and 3 dims, complete tensors: a file a rank, each element once."""
    state = {
        "rows": torch.randn(7, 5).bfloat16(),
        "columns": torch.randn(4, 7),
        "few": torch.randn(2, 3),
        "cube": torch.randn(3, 5, 4),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(7),
        "mask": torch.rand(9) > 0.5,
        "eight": torch.randn(6, 2).to(torch.float8_e5m2),
        "all": torch.randn(3),
    }
    axes = tuple(a for a, _ in mesh)
    last = Shard(1) if "tp" in axes else Shard(0)
    cut = TensorLayout(axes, (Replicate() if axes[0] == "dp_replicate" else Shard(0), last)[-len(axes) :])
    one = TensorLayout((axes[-1],), (Shard(0),))
    layouts = {n: cut if t.ndim > 1 else one for n, t in state.items() if t.ndim and n != "all"}
    torch.save(state, tmp_path / "in.pt")
    asked = Request(
        str(tmp_path / "in.pt"),
        str(tmp_path / "out"),
        verb="reshard",
        to="olmo_v01",
        mesh=",".join(f"{a}={n}" for a, n in mesh),
    )
    convert(asked, catalog_url=False, topology=Topology(Mesh(mesh), layouts))
    world = prod(n for _, n in mesh)
    files = [f"rank_{r}.safetensors" for r in range(world)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["metadata.json", *files]
    manifest = ckptcore.open(str(tmp_path / "out"))
    assert not ckptcore.check(manifest).findings
    assert not differences({k: value(t) for k, t in state.items()}, tensors(manifest))
    stored = sum(t.numel() for f in files for t in load_file(tmp_path / "out" / f).values())
    assert stored == sum(t.numel() for t in state.values())
    (tmp_path / "out" / files[-1]).unlink()
    assert "missing-file" in codes(tmp_path / "out")
    shutil.copy(tmp_path / "out" / files[0], tmp_path / "out" / files[-1])
    assert codes(tmp_path / "out")


def test_ranges_are_bounded() -> None:
    """Columns of many rows in 3 dims, which the loader supports only as ranges."""
    spec = TensorSpec("w", "float32", (1 << 10, 1 << 10, 4))
    topology = Topology(Mesh((("tp", 2),)), {"w": TensorLayout(("tp",), (Shard(2),))})
    with pytest.raises(UnsupportedFormat, match="1048576 ranges"):
        arrange(Arrangement([spec], topology=topology))
