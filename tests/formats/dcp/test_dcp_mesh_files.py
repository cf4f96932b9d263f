"""Check each file of DCP folders for a mesh: which rank wrote what, and what torch and safetensors read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from paths import JOBS
from safetensors import deserialize
from samples import FIXTURES, Tensors, differences, read_torch, tensors_of, value
from torch.distributed.checkpoint import FileSystemReader

import ckptcore
from ckptcore.conversion.pipeline import convert, validate
from ckptcore.errors import UnsupportedDtype, UsageError
from ckptcore.planning.request import Request
from ckptcore.topology.layout import Mesh, TensorLayout, Topology

NESTED = FIXTURES / "torch" / "dcp_nested_2r" / "ckpt"
DIMS = FIXTURES / "torch" / "dcp_dims_4r" / "ckpt"
ODD = FIXTURES / "torch" / "dcp_odd_dtypes_2r" / "ckpt"


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def contents(folder: Path) -> Tensors:
    manifest = ckptcore.open(str(folder))
    assert validate(manifest, "bytes").ok
    return {t.fqn: value(ckptcore.read(manifest, t.fqn)) for t in manifest.tensors}


def reshard(source: Path, target: Path, mesh: str, **options: Any) -> Path:
    ckptcore.convert(str(source), str(target), verb="reshard", to="dcp", mesh=mesh, **options)
    return target


def saved(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    torch.save(tensors, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def places(folder: Path) -> dict[str, list[str]]:
    """Name -> the files of its chunks, as torch lists them."""
    metadata = FileSystemReader(folder).read_metadata()
    found: dict[str, list[str]] = {}
    for index, place in (metadata.storage_data or {}).items():
        assert index.index == len(found.get(index.fqn, [])) or index.index is None
        found.setdefault(index.fqn, []).append(place.relative_path)
    return found


@pytest.mark.alike(1)
@pytest.mark.parametrize("source", [NESTED, DIMS, ODD], ids=lambda p: p.parent.name)
@pytest.mark.parametrize("mesh", ["fsdp=1", "fsdp=3"])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_equal_input_gives_equal_bytes(source: Path, mesh: str, tmp_path: Path) -> None:
    """Neither the mesh of the source nor a repetition changes a byte."""
    first = reshard(source, tmp_path / "first", mesh)
    assert files(first) == files(reshard(first, tmp_path / "second", mesh))
    bound = ("rng*",) if source == NESTED else ()  # random states do not go to other ranks
    ckptcore.convert(str(source), str(tmp_path / "one"), to="dcp", exclude=bound)
    assert files(first) == files(reshard(tmp_path / "one", tmp_path / "third", mesh))
    if mesh == "fsdp=1":
        assert files(first) == files(tmp_path / "one")
    assert not differences(contents(tmp_path / "one"), contents(first))


@pytest.mark.soak
def test_ranks_without_tensors_write_empty_files(tmp_path: Path) -> None:
    """As torch's ranks do. Chunks come in the order of the ranks, and empty ones are not written."""
    tensors = {"a": torch.arange(6.0).reshape(3, 2), "none": torch.zeros(0, 4)}
    out = reshard(saved(tmp_path, tensors), tmp_path / "out", "fsdp=6")
    assert {n for n, b in files(out).items() if not b} == {"__4_0.distcp", "__5_0.distcp"}
    assert places(out) == {"a": [f"__{r}_0.distcp" for r in range(3)], "none": ["__3_0.distcp"]}
    found = ckptcore.open(str(out))
    assert {f.code for f in found.findings} <= {"empty-file"}
    assert not differences({k: value(v) for k, v in tensors.items()}, contents(out))
    subprocess.run(
        [*warm.python(), str(JOBS / "torch_save_job.py"), str(out), str(tmp_path / "whole.pt")],
        check=True,
        timeout=180,
    )
    full = tensors_of(read_torch(tmp_path / "whole.pt"))
    assert not differences({k: value(v) for k, v in tensors.items()}, full)


def test_replicas_are_spread_over_the_ranks(tmp_path: Path) -> None:
    """Each is written once, by the rank with the fewest bytes so far; rank 0 has the objects."""
    tensors = {"a": torch.zeros(8), "b": torch.zeros(4), "c": torch.zeros(2), "d": torch.zeros(2)}
    source = saved(tmp_path, {**tensors, "lr": 0.5})  # type: ignore[dict-item]
    out = reshard(source, tmp_path / "out", "dp_replicate=3")
    assert {k: v[0][2] for k, v in places(out).items()} == {"a": "0", "b": "1", "c": "2", "d": "2", "lr": "0"}


def test_the_size_limit_of_a_ranks_files(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.full((4, 4), float(n)) for n in range(5)}
    out = reshard(saved(tmp_path, tensors), tmp_path / "out", "fsdp=2", max_file_size=64)
    assert {n for n in files(out) if n != ".metadata"} == {
        f"__{r}_{n}.distcp" for r in (0, 1) for n in range(3)
    }
    assert places(out)["t4"] == ["__0_2.distcp", "__1_2.distcp"]
    assert not differences({k: value(v) for k, v in tensors.items()}, contents(out))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("source", [NESTED, DIMS, ODD], ids=lambda p: p.parent.name)
def test_items_of_safetensors(source: Path, tmp_path: Path) -> None:
    """A file is its objects and one blob, which the library reads; `.metadata` equals torch's."""
    odd = tuple(t.fqn for t in ckptcore.open(str(source)).tensors if t.dtype in ("complex32", "complex128"))
    out = reshard(source, tmp_path / "out", "fsdp=3", serialization="safetensors", exclude=odd)
    there, here = contents(source), contents(out)
    assert not differences({k: v for k, v in there.items() if k not in (*odd, "rng")}, here)
    metadata = FileSystemReader(out).read_metadata()
    assert metadata.storage_data is not None
    for path in out.glob("*.distcp"):
        items = {i: s for i, s in metadata.storage_data.items() if s.relative_path == path.name}
        inside = {i: s for i, s in items.items() if i.offset is not None}
        if not inside:
            assert sum(s.length for s in items.values()) == path.stat().st_size
            continue
        (start,) = {s.offset for s in inside.values()}
        assert start == sum(s.length for i, s in items.items() if i.offset is None)
        blob = path.read_bytes()[start:]
        tensors = {name: row["data"] for name, row in deserialize(blob)}
        assert sorted(tensors) == sorted(i.fqn for i in inside)
        head = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
        offsets = json.loads(head["DCP_SHARDING_INFO"])
        assert (head["format"], head["DCP_VERSION"]) == ("pt", "1.0")
        for index, place in inside.items():
            assert place.length == len(tensors[index.fqn])
            assert offsets[index.fqn] == {"saved_offsets": list(index.offset or ())}
    if odd:
        with pytest.raises(UnsupportedDtype):
            reshard(source, tmp_path / "all", "fsdp=3", serialization="safetensors")
        assert not (tmp_path / "all").exists()


def test_a_cut_blob_is_found(tmp_path: Path) -> None:
    out = reshard(DIMS, tmp_path / "out", "fsdp=2", serialization="safetensors")
    path = out / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert not validate(ckptcore.open(str(out)), "bytes").ok


def test_a_single_file_has_no_mesh(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        reshard(DIMS, tmp_path / "out.pt", "fsdp=2")


def test_a_tensor_that_no_rank_has_is_refused(tmp_path: Path) -> None:
    """A missing stage would lose it."""
    nowhere = Topology(Mesh((("pp", 2),)), {"b": TensorLayout(coordinates=(("pp", (2,)),))})
    source = saved(tmp_path, {"a": torch.zeros(2), "b": torch.zeros(3)})
    asked = Request(str(source), str(tmp_path / "out"), verb="reshard", to="dcp", mesh="pp=2")
    with pytest.raises(UsageError) as caught:
        convert(asked, catalog_url=False, topology=nowhere)
    assert "all 3 elements of b (got 0)" in caught.value.message
    assert not (tmp_path / "out").exists()


def test_more_ranks_than_layouts_that_are_kept(tmp_path: Path) -> None:
    """Each of the first ranks has other tensors than all others, and a tensor has a chunk of every rank."""
    tensors = {f"w.{n}": torch.arange(n + 2.0) for n in range(50)}
    tensors["rows"] = torch.arange(300.0).reshape(100, 3)
    written = reshard(saved(tmp_path, tensors), tmp_path / "out", "fsdp=100")
    stored = FileSystemReader(written).read_metadata().state_dict_metadata
    assert [c.offsets[0] for c in stored["rows"].chunks] == list(range(100))
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(state, checkpoint_id=written, no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
