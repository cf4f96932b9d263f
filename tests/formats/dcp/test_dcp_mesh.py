"""Resume jobs from DCP folders written for their mesh, as from the original.

The oracle is a real job (reshard_job.py): what `torch.distributed.checkpoint` loads into FSDP2, HSDP, TP and
pipeline models of that mesh, the losses of its next steps, and the folder that it saves itself.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm
from driver import Cli
from paths import JOBS
from reshard_job import BUFFERS, stage_of
from samples import SAMPLES, Sample
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptcore
from ckptcore.conversion.pipeline import convert, validate
from ckptcore.core.box import Box
from ckptcore.planning.request import Request
from ckptcore.topology.layout import Mesh, TensorLayout, Topology

JOB = JOBS / "reshard_job.py"
TOYS = ("dcp_fsdp2_bf16_4r", "dcp_fsdp2_tied_4r", "dcp_fsdp2_tp_uneven_4r", "dcp_hsdp_4r")
TITAN = "dcp_torchtitan_like_4r"
Axes = tuple[tuple[str, int], ...]
Chunks = dict[str, dict[Box, int]]
FSDP = {n: (("fsdp", n),) for n in (1, 2, 3, 4, 8)}
TP: Axes = (("fsdp", 2), ("tp", 2))
HSDP: Axes = (("dp_replicate", 2), ("fsdp", 2))
PP: Axes = (("pp", 2), ("fsdp", 2), ("tp", 2))
ROWS, COLUMNS = ("up.weight", "embed.weight", "head.weight"), ("down.weight",)


def layout(fqn: str, shape: tuple[int, ...], axes: Axes) -> TensorLayout:
    """The layout that `fully_shard` and `parallelize_module` give a tensor of the samples."""
    sizes = dict(axes)
    name = fqn.removeprefix("model.").removeprefix("optim.state.").removeprefix("optimizer.state.")
    name = name.removesuffix(".exp_avg").removesuffix(".exp_avg_sq").removesuffix(".step")
    at = (("pp", (stage_of(name),)),) if "pp" in sizes else ()
    if not shape or name in (*BUFFERS, "rep", "plain", "zero"):
        return TensorLayout(coordinates=at)
    placed: dict[str, Any] = {a: Replicate() for a in sizes if a == "dp_replicate"} | {"fsdp": Shard(0)}
    if "tp" in sizes and name.endswith(ROWS):
        placed |= {"fsdp": _StridedShard(0, split_factor=sizes["tp"]), "tp": Shard(0)}
    elif "tp" in sizes and name.endswith(COLUMNS):
        placed |= {"tp": Shard(1)}
    return TensorLayout(tuple(placed), tuple(placed.values()), at)


def reshard(source: Path, target: Path, axes: Axes, **options: Any) -> Topology:
    """Write what a job of this mesh would have saved, with the placements above."""
    manifest = ckptcore.open(str(source))
    topology = Topology(Mesh(axes), {t.fqn: layout(t.fqn, t.shape, axes) for t in manifest.tensors})
    mesh = ",".join(f"{a}={n}" for a, n in axes)
    asked = Request(str(source), str(target), verb="reshard", to="dcp", mesh=mesh, **options)
    convert(asked, catalog_url=False, topology=topology)
    return topology


def resume(sample: Sample, axes: Axes, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the report of each rank of the job."""
    spec = {
        "axes": axes,
        "truth": str(sample.root / "expected.safetensors"),
        "original": str(sample.root / "ckpt"),
        "written": str(tmp_path / "out"),
        "saved": str(tmp_path / "saved"),
        "out": str(tmp_path / "report.json"),
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    ran = subprocess.run(
        [*warm.python(), str(JOB), str(tmp_path / "spec.json")],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads((tmp_path / "report.json").read_text())
    return rows


def chunks(folder: Path) -> Chunks:
    """Name -> box -> the rank in whose file torch finds it; empty boxes are left out."""
    metadata = FileSystemReader(folder).read_metadata()
    found: Chunks = {}
    assert metadata.storage_data is not None
    places = {(i.fqn, i.offset): int(s.relative_path.split("_")[2]) for i, s in metadata.storage_data.items()}
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        found[name] = {
            Box(tuple(c.offsets), tuple(c.sizes)): places[name, c.offsets]
            for c in entry.chunks
            if 0 not in c.sizes or 0 in entry.size
        }
    return found


def loaded(sample: Sample, axes: Axes, tmp_path: Path) -> tuple[Chunks, Chunks]:
    """Load the output in a job of this mesh; return its chunks, and those that the job saves."""
    assert validate(ckptcore.open(str(tmp_path / "out")), "bytes").ok
    rows = resume(sample, axes, tmp_path)
    assert [row["wrong"] for row in rows] == [[]] * len(rows)
    for row in rows:
        assert row["losses"].get("written") == row["losses"].get("original") == row["losses"].get("load_into")
    assert "pp" in dict(axes) or sample.name == TITAN or all(len(row["losses"]) == 3 for row in rows)
    theirs = chunks(tmp_path / "saved")
    assert theirs
    return chunks(tmp_path / "out"), theirs


def resumes(sample: Sample, axes: Axes, tmp_path: Path) -> None:
    topology = reshard(sample.root / "ckpt", tmp_path / "out", axes)
    ours, theirs = loaded(sample, axes, tmp_path)
    # As if the job itself had saved: the same parts, each in a file of a rank that has it.
    for name, parts in theirs.items():
        assert ours[name].keys() == parts.keys(), name
        shape = next(t.shape for t in ckptcore.open(str(tmp_path / "out")).tensors if t.fqn == name)
        boxes = topology.boxes(name, shape)
        for box, rank in ours[name].items():
            assert boxes[rank] == box, (name, box, rank)
            assert rank == parts[box] or boxes.count(box) > 1


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, Sample]:
    return {s.name: s for s in request.config.stash[SAMPLES]}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        pytest.param("dcp_fsdp2_tp_uneven_4r", FSDP[3], id="uneven-fsdp3"),
        pytest.param("dcp_fsdp2_bf16_4r", TP, id="bf16-fsdp2-tp2", marks=pytest.mark.soak),
    ],
)
def test_a_job_resumes(name: str, axes: Axes, found: dict[str, Sample], tmp_path: Path) -> None:
    resumes(found[name], axes, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "axes", [*FSDP.values(), TP, HSDP, PP], ids=lambda a: "-".join(f"{k}{n}" for k, n in a)
)
@pytest.mark.parametrize("name", [*TOYS, TITAN])
def test_jobs_of_every_mesh_resume(name: str, axes: Axes, found: dict[str, Sample], tmp_path: Path) -> None:
    if "tp" in dict(axes) and name == TITAN:
        pytest.skip("its tensors have no TP plan")
    if "pp" in dict(axes) and "tied" in name:
        pytest.skip("its embeddings are tied across the stages")
    resumes(found[name], axes, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "axes",
    [pytest.param(a, marks=() if a == FSDP[2] else pytest.mark.soak) for a in (*FSDP.values(), HSDP)],
    ids=lambda a: "-".join(f"{k}{n}" for k, n in a),
)
def test_torchtitan_keys_by_built_in_rules(
    axes: Axes, found: dict[str, Sample], cli: Cli, tmp_path: Path
) -> None:
    mesh = ",".join(f"{a}={n}" for a, n in axes)
    done = cli("reshard", found[TITAN].root / "ckpt", tmp_path / "out", "--to", "dcp", "--mesh", mesh)
    assert done.code == 0, done
    ours, theirs = loaded(found[TITAN], axes, tmp_path)
    buffers = {"plain", "rep"}  # of floats, whose names say nothing: they look like parameters
    assert {n for n, parts in theirs.items() if ours[n].keys() != parts.keys()} <= buffers
