"""Write torch_dist for a mesh; Megatron-Core loads it at any TP x PP."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import JOBS
from samples import SAMPLES, Sample, differences, value
from torch.distributed.tensor import Shard

import ckptcore
from ckptcore.conversion.pipeline import convert, validate
from ckptcore.planning.request import Request
from ckptcore.topology.layout import Mesh, TensorLayout, Topology

JOB = JOBS / "mcore_mesh_job.py"
PLAIN = "root_torch_dist_llama_0.19.2"
ADAM = "optim_llama_tp2dp2_fully_sharded_model_space_0.12.3"
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_fc1.weight")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
# TP that does not divide the rows of the vocabulary (Megatron-LM pads them, its loader trims them) or others:
# loaders do not depend on how a checkpoint is split.
UNEVEN = [(3, 1), (5, 2)]


def layout(fqn: str, shape: tuple[int, ...], mesh: Mesh) -> TensorLayout:
    """Layers by stage, rows and columns by tensor rank."""
    stacked = int("decoder.layers." in fqn)
    last = dict(mesh.axes)["pp"] - 1
    if stacked and shape:
        placed: dict[str, Any] = {"pp": Shard(0)}
        at: tuple[Any, ...] = ()
    else:
        placed, at = {}, (("pp", (0 if "embedding" in fqn else last,)),)
    if fqn.endswith((*ROWS, *COLUMNS)):
        placed["tp"] = Shard(stacked + int(fqn.endswith(COLUMNS)))
    return TensorLayout(tuple(placed), tuple(placed.values()), at)


def reshard(source: Path, target: Path, tp: int, pp: int) -> None:
    mesh = Mesh((("pp", pp), ("tp", tp)))
    tensors = ckptcore.open(str(source)).tensors
    topology = Topology(mesh, {t.fqn: layout(t.fqn, t.shape, mesh) for t in tensors})
    asked = Request(str(source), str(target), verb="reshard", to="torch_dist", mesh=f"pp={pp},tp={tp}")
    convert(asked, catalog_url=False, topology=topology)


def saved_in(sample: Sample) -> Path:
    return next(sample.root.rglob("metadata.json")).parent


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, Sample]:
    return {s.name: s for s in request.config.stash[SAMPLES]}


@pytest.mark.parametrize("mesh", [*MESHES, *UNEVEN], ids=lambda m: f"tp{m[0]}pp{m[1]}")
@pytest.mark.parametrize("name", [PLAIN, ADAM])
def test_round_trip(name: str, mesh: tuple[int, int], found: dict[str, Sample], tmp_path: Path) -> None:
    source = saved_in(found[name])
    reshard(source, tmp_path / "out", *mesh)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names >= {f"__{r}_0.distcp" for r in range(mesh[0] * mesh[1])}
    before, after = ckptcore.open(str(source)), ckptcore.open(str(tmp_path / "out"))
    assert after.format == "torch_dist"
    assert validate(after, "bytes").ok
    # Random states belong to the ranks that saved them.
    kept = [t.fqn for t in before.tensors if not t.fqn.startswith("rng_state/")]
    read = {n: value(ckptcore.read(before, n)) for n in kept}
    written = {t.fqn: value(ckptcore.read(after, t.fqn)) for t in after.tensors}
    assert sorted(read) == sorted(written)
    assert not differences(read, written)
    objects = {b.key: b.tree for b in before.blobs if not b.key.startswith("rng_state/")}
    objects["args"]["value"]["no_save_rng"] = True  # else Megatron-LM requires them
    assert {b.key: b.tree for b in after.blobs} == objects


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", [*MESHES, (3, 1)], ids=lambda m: f"tp{m[0]}pp{m[1]}")
def test_megatron_loads_it(mesh: tuple[int, int], tmp_path: Path, found: dict[str, Sample]) -> None:
    folders: dict[str, list[str]] = {}
    for name in (PLAIN, ADAM):
        for tp, pp in ((4, 1), (2, 2), (1, 3), *UNEVEN):
            out = tmp_path / f"{name}_tp{tp}pp{pp}"
            reshard(saved_in(found[name]), out, tp, pp)
            folders[str(out)] = [str(p) for p in sorted(found[name].root.glob("expected*.safetensors"))]
    answer = tmp_path / "answer.json"
    line = [sys.executable, str(JOB), json.dumps(folders), *map(str, mesh), str(answer)]
    job = [
        subprocess.Popen(line, env=os.environ | {"RANK": str(r)}, stderr=subprocess.PIPE, text=True)
        for r in range(mesh[0] * mesh[1])
    ]
    errors = [one.communicate(timeout=800)[1] for one in job]
    assert all(one.returncode == 0 for one in job), "\n".join(errors)[-3000:]
    got = json.loads(answer.read_text())
    assert got.keys() == folders.keys()
    for folder, row in got.items():
        assert row["differ"] == [], folder
        assert all(n > 4 for n in row["asked"])
        assert {"args", "iteration"} <= {*row["common"]}
