"""Share layouts between rank files: each file has the same bytes as one laid out alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from ckptcore.core.manifest import TensorSpec
from ckptcore.formats.base import Arrangement, FileLayout
from ckptcore.formats.common import torch_file as _torchfile
from ckptcore.formats.torch_ranks import writer as _rankwrite
from ckptcore.formats.torch_ranks.writer import arrange
from ckptcore.topology.layout import Replicate, Shard, TensorLayout, Topology, _StridedShard
from ckptcore.topology.mesh_spec import parse_mesh

# What every rank's file was when each was built by itself.
KNOWN = {
    "fsdp=1": "a58a9af2e8a85b30",
    "fsdp=3": "fa1f344d45ff5e56",
    "fsdp=4,tp=2": "43c5b36ded36db2d",
    "dp_replicate=2,fsdp=2": "e607edfafd30b330",
    "pp=2,fsdp=3": "0dc751610d6783fe",
    "cuda:fsdp=300": "bb272280895e8cf3",
}


ROWS = (
    ("w", "bfloat16", (24, 5)),
    ("odd", "float32", (7, 3)),
    ("up", "float32", (16, 2)),
    ("buffer", "int64", (3,)),
    ("f8", "float8_e8m0fnu", (8,)),
)


def request(mesh: str) -> Arrangement:
    """A model and its states: even and uneven tensors, plain ones, objects, and stages on some meshes."""
    full_mesh = parse_mesh(mesh)
    axes = tuple(a for a, n in full_mesh.axes if a != "pp")
    cut = {"dp_replicate": Replicate(), "fsdp": Shard(0), "tp": Shard(0)}
    tp = dict(full_mesh.axes).get("tp", 1)
    strided = cut | {"fsdp": _StridedShard(0, split_factor=tp)} if tp > 1 else cut
    tensors: list[TensorSpec] = []
    layouts: dict[str, TensorLayout] = {}
    for n in range(4):
        at = (("pp", (n // 2,)),) if "pp" in dict(full_mesh.axes) else ()
        for name, dtype, shape in ROWS:
            for fqn in (f"model.layers.{n}.{name}", f"optim.state.layers.{n}.{name}.exp_avg"):
                tensors.append(TensorSpec(fqn, dtype, shape))
                places = strided if name == "up" else cut | {"tp": Replicate()}
                layout = TensorLayout(axes, tuple(places[a] for a in axes), at)
                layouts[fqn] = TensorLayout((), (), at) if name == "buffer" else layout
    objects: dict[str, Any] = {
        "optim.param_groups": [{"lr": 0.1, "betas": [0.9, 0.95]}],
        "extra_state": {"step": 7},
    }
    return Arrangement(tensors, objects, topology=Topology(full_mesh, layouts))


def digest(layouts: Iterator[FileLayout]) -> str:
    rows = [
        (
            x.path,
            x.nbytes,
            x.tensors,
            [(s.tensor, s.start) for s in x.slots],
            [(y.start, y.data, y.crc_at) for y in x.literals],
            x.commit,
            [(b.offset, b.shape) for b in x.boxes],
        )
        for x in layouts
    ]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


@pytest.mark.parametrize("mesh", KNOWN)
def test_bytes_around_tensors_do_not_change(mesh: str) -> None:
    assert digest(arrange(request(mesh))) == KNOWN[mesh]


@pytest.mark.parametrize("kept", [1, 2])
def test_forgotten_layouts_are_rebuilt(kept: int) -> None:
    with mock.patch.object(_rankwrite, "_MAX_TEMPLATES", kept), mock.patch.object(_torchfile, "_KEPT", kept):
        assert digest(arrange(request("pp=2,fsdp=3"))) == KNOWN["pp=2,fsdp=3"]


def test_similar_ranks_are_built_once() -> None:
    made = mock.Mock(wraps=_rankwrite.RankPickled)
    tail = mock.Mock(wraps=_torchfile._tail)
    with mock.patch.object(_rankwrite, "RankPickled", made), mock.patch.object(_torchfile, "_tail", tail):
        files = list(arrange(request("fsdp=8,tp=2")))
    assert len(files) == 49
    assert made.call_count <= 6  # two shapes of uneven tensors, in three kinds of files
    assert tail.call_count <= 12
